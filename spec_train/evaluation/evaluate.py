"""Measure a proposer by decoding: acceptance, losslessness, speed, and the estimate beside them."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection, Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from spec_train.decoding.engine import plain_decode, speculative_decode
from spec_train.decoding.sampling import Sampling
from spec_train.decoding.trace import DecodeTrace, Timings
from spec_train.decoding.tree import tree_decode
from spec_train.decoding.tree_draft import TreeShape
from spec_train.errors import UserError
from spec_train.evaluation.assisted import assisted_decode, assisted_speed
from spec_train.evaluation.estimate import Estimate, estimator
from spec_train.evaluation.metrics import batched_speed, compare_lossless, speed_summary, summarise, tokens_per_step
from spec_train.evaluation.recall import top_k_recall
from spec_train.evaluation.report import result_name, write_results
from spec_train.evaluation.suites import load_suite
from spec_train.evaluation.traces import partial_path, resumable_decode, trace_path, write_trace
from spec_train.evaluation.turns import FollowUp, Suite, add_turn, next_turn
from spec_train.manifest import canonical, json_sha256, package_versions, weights_fingerprint
from spec_train.progress import progress
from spec_train.speculators.base import Proposer, Speculator
from spec_train.speculators.ngram import NgramProposer
from spec_train.speculators.suffix import SuffixProposer
from spec_train.target import TargetModel


@dataclass(frozen=True)
class EvalSettings:
    """How a suite is decoded. `speed_prompts` of it are timed one request at a time,
    `speed_new_tokens` each (None: as many as the text), `speed_rounds` times in turn with plain decoding."""

    sampling: Sampling
    max_new_tokens: int
    batch_size: int
    speed_prompts: int = 4
    speed_new_tokens: int | None = None
    speed_rounds: int = 3


@dataclass(frozen=True)
class Contender:
    """A proposer to measure: `kind` our name of the method, `name` which one it is, `method` vLLM's name where that is
    another. With `tree` it drafts trees of that shape, and `num_draft_tokens` is their depth; with `assistant`, the
    draft as a Transformers model, it is `transformers` that decodes. `weights`: sha256 of what was trained, None where
    nothing was (see `head_files.weights_sha256`)."""

    kind: str
    name: str
    proposer: Proposer
    num_draft_tokens: tuple[int, ...]
    method: str = ""
    tree: TreeShape | None = None
    assistant: PreTrainedModel | None = None
    weights: str | None = None

    def decode(self, target: TargetModel, **arguments: Any) -> DecodeTrace:
        """`speculative_decode`, or `tree_decode` for trees, or `assisted_decode`."""
        if self.assistant is not None:
            return assisted_decode(target, self.assistant, **arguments)
        if self.tree is None:
            return speculative_decode(target, self.proposer, **arguments)
        assert isinstance(self.proposer, Speculator)
        del arguments["num_draft_tokens"]
        return tree_decode(target, self.proposer, shape=self.tree, **arguments)


@dataclass(frozen=True)
class Reference:
    """Plain decoding of a suite, whose text every contender must give. `suite` has every turn in it."""

    suite: Suite
    trace: DecodeTrace


def decode_reference(
    target: TargetModel, suite: Suite, settings: EvalSettings, partial: Path | None = None
) -> Reference:
    """Plain decoding in batches. A later turn is rendered from the answers to the turns before it, and decoded after
    them. `partial`: see `resumable_decode`; a later turn has its own."""
    turn = suite
    answered = trace = _decode_turn(target, turn, settings, partial)
    suite, number = replace(suite, follow_ups=[]), 2
    while turn.follow_ups:
        turn = next_turn(turn, answered.requests, target.max_length)
        suite = suite.joined(turn)
        if not turn.prompts:
            break
        later = partial.with_name(f"{partial.name}{number}") if partial else None
        answered = _decode_turn(target, turn, settings, later)
        number += 1
        parts = {f.name: getattr(trace.timings, f.name) + getattr(answered.timings, f.name) for f in fields(Timings)}
        trace = replace(trace, requests=trace.requests + answered.requests, timings=Timings(**parts))
    return Reference(suite, trace)


def _decode_turn(target: TargetModel, suite: Suite, settings: EvalSettings, partial: Path | None) -> DecodeTrace:
    """The text of one turn of a suite."""
    common: dict[str, Any] = {"sampling": settings.sampling, "max_new_tokens": settings.max_new_tokens}
    with progress(f"{suite.name}: plain decoding", len(suite.prompts) * settings.max_new_tokens) as advance:
        trace = resumable_decode(
            lambda chunk: plain_decode(target, **suite.part(chunk), **common, on_progress=advance),
            suite.prompts,
            settings.batch_size,
            0,
            partial=partial,
            settings=_settings_key(target, suite, settings, "plain"),
            on_progress=advance,
        )
    suite.name_conversations(trace.requests)
    return trace


def evaluate(
    target: TargetModel,
    contender: Contender,
    suite: Suite,
    reference: Reference,
    settings: EvalSettings,
    num_draft_tokens: int,
    *,
    target_name: str,
    estimate: Estimate | None = None,
    partial: Path | None = None,
) -> tuple[dict[str, Any], DecodeTrace]:
    """(the result of DESIGN's evaluation JSON, the trace it was computed from). `partial`: see `resumable_decode`."""
    common: dict[str, Any] = {
        "num_draft_tokens": num_draft_tokens,
        "sampling": settings.sampling,
        "max_new_tokens": settings.max_new_tokens,
    }
    total = len(suite.prompts) * settings.max_new_tokens
    contender.proposer.reset()
    who = f"K={num_draft_tokens}" + (f" {contender.tree.name}" if contender.tree else "")
    with progress(f"{suite.name}: {contender.kind} {who}", total) as advance:
        trace = resumable_decode(
            lambda chunk: contender.decode(target, **suite.part(chunk), **common, on_progress=advance),
            suite.prompts,
            settings.batch_size,
            num_draft_tokens,
            # Half a run of a proposer that remembers would not know the other half's outputs.
            partial=None if contender.proposer.remembers else partial,
            settings=_settings_key(target, suite, settings, f"{contender.name} {who}", contender.weights),
            on_progress=advance,
        )
    suite.name_conversations(trace.requests)
    greedy = settings.sampling.greedy
    speed = _timed(target, contender, suite, settings, num_draft_tokens) if settings.speed_prompts else None
    if speed is not None and contender.assistant is None:  # assisted generation knows no batches
        speed["batched"] = batched_speed(reference.trace, trace)
    result = summarise(
        trace,
        target=target_name,
        speculator=contender.name,
        kind=contender.kind,
        method=contender.method or contender.kind,
        suite=suite.name,
        device=_device_name(target.device),
        dtype=str(target.dtype).removeprefix("torch."),
        sampling=settings.sampling,
        lossless=compare_lossless(reference.trace.requests, trace.requests) if greedy else None,
        speed=speed,
        estimate=estimate(num_draft_tokens) if estimate else None,
        versions=package_versions(),
    )
    result["weights_sha256"] = contender.weights
    if suite.left_out:
        result["left_out"] = dict(suite.left_out)
    if contender.tree is not None:
        assert isinstance(contender.proposer, Speculator)
        result["tree"] = _tree_figures(contender.tree, trace)
        result["recall_top_k"] = top_k_recall(target, contender.proposer, reference.trace.requests, num_draft_tokens)
    return result, trace


def _tree_figures(tree: TreeShape, trace: DecodeTrace) -> dict[str, Any]:
    """What a result says of its trees: their shape, and the drafts that a target pass held on average."""
    nodes = [len(cycle.drafts) for request in trace.requests for cycle in request.cycles]
    figures: dict[str, Any] = {"name": tree.name, "depth": tree.depth, "num_tokens": tree.num_tokens}
    figures["mean_nodes"] = sum(nodes) / len(nodes) if nodes else 0.0
    if tree.dynamic:
        return {**figures, "top_k": tree.top_k}
    return {**figures, "paths": [list(path) for path in tree.paths]}


def _timed(
    target: TargetModel, contender: Contender, suite: Suite, settings: EvalSettings, num_draft_tokens: int
) -> dict[str, Any]:
    """The first prompts one request at a time, plain and speculative in turn: the "speed" block."""
    prompts = suite.prompts[: settings.speed_prompts]
    common: dict[str, Any] = {
        "sampling": settings.sampling,
        "max_new_tokens": settings.speed_new_tokens or settings.max_new_tokens,
    }
    plain, spec = [], []
    total = settings.speed_rounds * (2 if contender.assistant is None else 3)
    with progress(f"{suite.name}: timing {contender.kind} K={num_draft_tokens}", total, "runs") as advance:
        if contender.assistant is not None:
            return assisted_speed(
                target, contender.proposer, contender.assistant, prompts, num_draft_tokens=num_draft_tokens,
                max_new_tokens=common["max_new_tokens"], rounds=settings.speed_rounds, on_progress=advance,
            )  # fmt: skip
        for _ in range(settings.speed_rounds):
            plain.append(plain_decode(target, prompts, **common))
            advance(1)
            contender.proposer.reset()
            spec.append(contender.decode(target, prompts=prompts, num_draft_tokens=num_draft_tokens, **common))
            advance(1)
    speed = speed_summary(plain, spec)
    speed["tokens_per_step"] = tokens_per_step([request for trace in spec for request in trace.requests])
    speed["cuda_graphs"] = target.graphs is not None and target.graphs.passes(target.model) > 0
    return speed


def estimator_of(target: TargetModel, contender: Contender, reference: Reference, settings: EvalSettings) -> Estimate:
    """Estimates of a chain at each of the contender's K on the reference's text."""
    return estimator(
        target,
        contender.proposer,
        reference.trace.requests,
        sampling=settings.sampling,
        max_draft_tokens=max(contender.num_draft_tokens),
        batch_size=settings.batch_size,
    )


def ngram_contender(min_n: int, max_n: int, num_draft_tokens: Sequence[int], kind: str = "ngram") -> Contender:
    """Prompt lookup, the baseline that costs nothing to train. `kind`: what results call it."""
    name = f"prompt lookup n={min_n}..{max_n}"
    return Contender(kind, name, NgramProposer(min_n, max_n), tuple(num_draft_tokens), "ngram")


def suffix_contender(proposer: SuffixProposer, num_draft_tokens: Sequence[int]) -> Contender:
    """Suffix decoding, the other one."""
    name = f"suffix decoding depth={proposer.max_tree_depth} cached={proposer.max_cached_requests}"
    return Contender("suffix", name, proposer, tuple(num_draft_tokens))


def speculator_contender(
    speculator: Speculator,
    name: str,
    num_draft_tokens: Sequence[int],
    kind: str | None = None,
    weights: str | None = None,
) -> Contender:
    """A speculator at every K that it can draft. `kind`: what results call it, its own kind by default."""
    deepest = speculator.max_draft_tokens or max(num_draft_tokens)
    depths = tuple(k for k in num_draft_tokens if k <= deepest)
    return Contender(kind or speculator.kind, name, speculator, depths, speculator.method, weights=weights)


def assisted_contender(
    speculator: Speculator, assistant: PreTrainedModel, num_draft_tokens: Sequence[int], weights: str | None = None
) -> Contender:
    """Assisted generation of `transformers` with a draft language model. See `assisted.assistant_of`."""
    depths = tuple(num_draft_tokens)
    return Contender("assisted", "transformers", speculator, depths, assistant=assistant, weights=weights)


def tree_contenders(
    target: TargetModel,
    speculator: Speculator,
    name: str,
    trees: Sequence[TreeShape],
    kind: str | None = None,
    weights: str | None = None,
) -> list[Contender]:
    """A speculator with trees of each shape. Raises UserError for one deeper than it drafts, and beside a target that
    checks none."""
    if trees:
        target.check_trees()
    deepest = speculator.max_draft_tokens
    for tree in trees:
        if deepest is not None and tree.depth > deepest:
            raise UserError(f"{tree.name}: {name} drafts at most {deepest} tokens in a row; give a tree of that depth")
    kind = kind or speculator.kind
    return [
        Contender(kind, name, speculator, (tree.depth,), speculator.method, tree, weights=weights) for tree in trees
    ]


def evaluate_suite(
    target: TargetModel,
    contenders: Sequence[Contender],
    suite: Suite,
    settings: EvalSettings,
    *,
    target_name: str,
    directory: Path | None = None,
    reference: Reference | None = None,
    estimate: Estimate | None = None,
) -> list[dict[str, Any]]:
    """Every contender at every K on one suite. Results are written as they come, and read back after an interruption
    where they are of the same weights, prompts and settings. `reference`: plain decoding of this very suite, where it
    is at hand; `estimate`: that of the only contender."""
    results = []
    made_of = canonical({**_settings_key(target, suite, settings, "all"), **asdict(settings)})
    plain = {"suite": suite.name, "type": "plain", "num_draft_tokens": 0, "temperature": settings.sampling.temperature}
    plain_trace = trace_path(directory / result_name({**plain, "draft_sample_method": "greedy"})) if directory else None
    for contender in contenders:
        if contender.assistant is not None and not settings.sampling.greedy:
            continue  # measured greedily only
        found = estimate
        for k in contender.num_draft_tokens:
            key = {
                "suite": suite.name,
                "type": contender.kind,
                "num_draft_tokens": k,
                "temperature": settings.sampling.temperature,
                "draft_sample_method": settings.sampling.draft_sample_method,
                "rejection_sample_method": settings.sampling.rejection_sample_method,
                "tree": {"name": contender.tree.name} if contender.tree else None,
            }
            done = directory / result_name(key) if directory else None
            made_from = json_sha256([made_of, contender.name, contender.weights])
            if done is not None and (finished := _finished(done, made_from)) is not None:
                results.append(finished)
                continue
            partial = partial_path(plain_trace) if plain_trace else None
            reference = reference or decode_reference(target, suite, settings, partial)
            suite = reference.suite
            if found is None and contender.tree is None and contender.assistant is None:
                found = estimator_of(target, contender, reference, settings)
            partial = partial_path(trace_path(done)) if done else None
            result, trace = evaluate(
                target, contender, suite, reference, settings, k,
                target_name=target_name, estimate=found, partial=partial,
            )  # fmt: skip
            result["inputs_sha256"] = made_from
            results.append(result)
            if directory is not None and done is not None and partial is not None:
                write_trace(trace_path(done), trace.requests)
                write_results(directory, [result])
                partial.unlink(missing_ok=True)
    if plain_trace is not None and reference is not None:
        write_trace(plain_trace, reference.trace.requests)
        for partial in plain_trace.parent.glob(f"{partial_path(plain_trace).name}*"):
            partial.unlink()
    return results


def _finished(file: Path, made_from: str) -> dict[str, Any] | None:
    """The result in `file`, where there is one and it was made from the same."""
    if not file.is_file():
        return None
    result: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    return result if result.get("inputs_sha256") == made_from else None


def render_suite(name: str, tokenizer: Any, prompt_kwargs: dict[str, Any], stop_ids: Collection[int] = ()) -> Suite:
    """A bundled suite or a user's file, rendered with the tokenizer's template. Of a conversation with gaps for the
    target's answers, the turn before the first gap is a prompt (`<id>/1`) and the others follow it. `stop_ids`: what
    the target stops at beside the tokenizer's eos."""
    suite = Suite(Path(name).stem, [], [], [])
    for conversation in load_suite(name):
        add_turn(suite, FollowUp(conversation, 1, -1, tokenizer, prompt_kwargs, stop_ids))
    return suite


def _settings_key(
    target: TargetModel, suite: Suite, settings: EvalSettings, who: str, weights: str | None = None
) -> dict[str, Any]:
    """Everything that a decoded batch depends on."""
    prompts = hashlib.sha256(json.dumps(suite.prompts).encode()).hexdigest()
    return {
        "who": who,
        "weights": weights,
        "target": target.name,
        "target_weights": weights_fingerprint(target.name),
        "dtype": str(target.dtype),
        "sampling": asdict(settings.sampling),
        "max_new_tokens": settings.max_new_tokens,
        "batch_size": settings.batch_size,
        "prompts": prompts,
    }


def _device_name(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"cpu ({torch.get_num_threads()} threads)"
