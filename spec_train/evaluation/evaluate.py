"""Measure a proposer by decoding: acceptance, losslessness, speed, and the estimate beside them."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from spec_train.data.batches import build_batch
from spec_train.data.documents import Document
from spec_train.decoding.engine import plain_decode, speculative_decode
from spec_train.decoding.sampling import Sampling
from spec_train.decoding.trace import DecodeTrace, RequestTrace, Timings
from spec_train.decoding.tree import tree_decode
from spec_train.decoding.tree_draft import TreeShape
from spec_train.errors import UserError
from spec_train.evaluation.assisted import assisted_decode, assisted_speed
from spec_train.evaluation.metrics import batched_speed, compare_lossless, speed_summary, summarise, tokens_per_step
from spec_train.evaluation.recall import top_k_recall
from spec_train.evaluation.report import result_name, write_results
from spec_train.evaluation.suites import load_suite
from spec_train.evaluation.traces import partial_path, resumable_decode, trace_path, write_trace
from spec_train.evaluation.turns import FollowUp, Suite, add_turn, next_turn
from spec_train.manifest import package_versions
from spec_train.progress import progress
from spec_train.speculators.base import Proposer, ResponseHits, Speculator
from spec_train.speculators.ngram import NgramProposer
from spec_train.speculators.suffix import SuffixProposer
from spec_train.target import TargetModel
from spec_train.training.acceptance import independent_length, position_average, renewal_counts, renewal_interval

ESTIMATE_TOKENS = 4096  # positions in one teacher-forced pass


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
    draft as a Transformers model, it is `transformers` that decodes."""

    kind: str
    name: str
    proposer: Proposer
    num_draft_tokens: tuple[int, ...]
    method: str = ""
    tree: TreeShape | None = None
    assistant: PreTrainedModel | None = None

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
    while (turn := next_turn(turn, answered.requests, target.max_length)).prompts:
        later = partial.with_name(f"{partial.name}{number}") if partial else None
        answered = _decode_turn(target, turn, settings, later)
        suite, number = suite.joined(turn), number + 1
        parts = {f.name: getattr(trace.timings, f.name) + getattr(answered.timings, f.name) for f in fields(Timings)}
        trace = replace(trace, requests=trace.requests + answered.requests, timings=Timings(**parts))
    return Reference(suite, trace)


def _decode_turn(target: TargetModel, suite: Suite, settings: EvalSettings, partial: Path | None) -> DecodeTrace:
    """The text of one turn of a suite."""
    common: dict[str, Any] = {"sampling": settings.sampling, "max_new_tokens": settings.max_new_tokens}
    with progress(f"{suite.name}: plain decoding", len(suite.prompts) * settings.max_new_tokens) as advance:
        return resumable_decode(
            lambda chunk: plain_decode(target, **suite.part(chunk), **common, on_progress=advance),
            suite.prompts,
            settings.batch_size,
            0,
            partial=partial,
            settings=_settings_key(target, suite, settings, "plain"),
            on_progress=advance,
        )


def evaluate(
    target: TargetModel,
    contender: Contender,
    suite: Suite,
    reference: Reference,
    settings: EvalSettings,
    num_draft_tokens: int,
    *,
    target_name: str,
    estimate: Callable[[int], dict[str, Any]] | None = None,
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
            settings=_settings_key(target, suite, settings, f"{contender.name} {who}"),
            on_progress=advance,
        )
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
    return speed


def response_hits(
    target: TargetModel, speculator: Speculator, requests: Sequence[RequestTrace], num_draft_tokens: int
) -> list[ResponseHits]:
    """Teacher-forced drafts along the answers of `requests`, in the order of their length."""
    documents = [
        Document(r.id, r.prompt_ids + r.output_ids, [(len(r.prompt_ids), len(r.prompt_ids) + len(r.output_ids))])
        for r in requests
    ]
    hits: list[ResponseHits] = []
    for rows in _rows_of(documents):
        batch = build_batch(documents, rows).to(target.device)
        filled = target.fill_features(batch, speculator.feature_spec, target.dtype)
        hits += speculator.draft_hits(filled, num_draft_tokens)
    return hits


def estimator(
    target: TargetModel, speculator: Speculator, reference: DecodeTrace, max_draft_tokens: int
) -> Callable[[int], dict[str, Any]]:
    """The renewal estimate on the reference's own text, for any K up to `max_draft_tokens`, for greedy drafts.

    At temperature 0 it equals what decoding measures, to the last counted token. On sampled text it has the expectation
    of what decoding measures (`training/acceptance.py`), with an interval over the prompts.
    """
    hits = response_hits(target, speculator, reference.requests, max_draft_tokens)

    def estimate(num_draft_tokens: int) -> dict[str, Any]:
        counts = renewal_counts(hits, num_draft_tokens)
        return {
            "renewal": counts.mean_acceptance_length,
            "renewal_steps": counts.steps,
            "renewal_accepted": counts.accepted,
            "renewal_ci95": list(renewal_interval(hits, num_draft_tokens)),
            "position_average": position_average(hits, num_draft_tokens),
            "independent": independent_length(hits, num_draft_tokens),
        }

    return estimate


def ngram_contender(min_n: int, max_n: int, num_draft_tokens: Sequence[int], kind: str = "ngram") -> Contender:
    """Prompt lookup, the baseline that costs nothing to train. `kind`: what results call it."""
    name = f"prompt lookup n={min_n}..{max_n}"
    return Contender(kind, name, NgramProposer(min_n, max_n), tuple(num_draft_tokens), "ngram")


def suffix_contender(proposer: SuffixProposer, num_draft_tokens: Sequence[int]) -> Contender:
    """Suffix decoding, the other one."""
    name = f"suffix decoding depth={proposer.max_tree_depth} cached={proposer.max_cached_requests}"
    return Contender("suffix", name, proposer, tuple(num_draft_tokens))


def speculator_contender(
    speculator: Speculator, name: str, num_draft_tokens: Sequence[int], kind: str | None = None
) -> Contender:
    """A speculator at every K that it can draft. `kind`: what results call it, its own kind by default."""
    deepest = speculator.max_draft_tokens or max(num_draft_tokens)
    return Contender(
        kind or speculator.kind, name, speculator, tuple(k for k in num_draft_tokens if k <= deepest), speculator.method
    )


def assisted_contender(
    speculator: Speculator, assistant: PreTrainedModel, num_draft_tokens: Sequence[int]
) -> Contender:
    """Assisted generation of `transformers` with a draft language model. See `assisted.assistant_of`."""
    return Contender("assisted", "transformers", speculator, tuple(num_draft_tokens), assistant=assistant)


def tree_contenders(
    speculator: Speculator, name: str, trees: Sequence[TreeShape], kind: str | None = None
) -> list[Contender]:
    """A speculator with trees of each shape. Raises UserError for one deeper than it drafts."""
    deepest = speculator.max_draft_tokens
    for tree in trees:
        if deepest is not None and tree.depth > deepest:
            raise UserError(f"{tree.name}: {name} drafts at most {deepest} tokens in a row; give a tree of that depth")
    kind = kind or speculator.kind
    return [Contender(kind, name, speculator, (tree.depth,), speculator.method, tree) for tree in trees]


def evaluate_suite(
    target: TargetModel,
    contenders: Sequence[Contender],
    suite: Suite,
    settings: EvalSettings,
    *,
    target_name: str,
    directory: Path | None = None,
    reference: Reference | None = None,
) -> list[dict[str, Any]]:
    """Every contender at every K on one suite. Results are written as they come, and read back after an interruption.
    `reference`: plain decoding of this very suite, where it is at hand."""
    results = []
    plain = {"suite": suite.name, "type": "plain", "num_draft_tokens": 0, "temperature": settings.sampling.temperature}
    plain_trace = trace_path(directory / result_name({**plain, "draft_sample_method": "greedy"})) if directory else None
    for contender in contenders:
        if contender.assistant is not None and not settings.sampling.greedy:
            continue  # measured greedily only
        estimate = None
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
            if done is not None and done.is_file():
                results.append(json.loads(done.read_text(encoding="utf-8")))
                continue
            partial = partial_path(plain_trace) if plain_trace else None
            reference = reference or decode_reference(target, suite, settings, partial)
            suite = reference.suite
            proposer = contender.proposer
            wanted = estimate is None and contender.tree is None and settings.sampling.judged_by_text
            wanted = wanted and contender.assistant is None
            if isinstance(proposer, Speculator) and wanted:
                estimate = estimator(target, proposer, reference.trace, max(contender.num_draft_tokens))
            partial = partial_path(trace_path(done)) if done else None
            result, trace = evaluate(
                target, contender, suite, reference, settings, k,
                target_name=target_name, estimate=estimate, partial=partial,
            )  # fmt: skip
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


def render_suite(name: str, tokenizer: Any, prompt_kwargs: dict[str, Any]) -> Suite:
    """A bundled suite or a user's file, rendered with the tokenizer's template. Of a conversation with gaps for the
    target's answers, the turn before the first gap is a prompt (`<id>/1`) and the others follow it."""
    suite = Suite(Path(name).stem, [], [], [])
    for conversation in load_suite(name):
        add_turn(suite, FollowUp(conversation, 1, -1, tokenizer, prompt_kwargs))
    return suite


def _rows_of(documents: Sequence[Document]) -> list[list[list[int]]]:
    """Micro-batches of documents of similar length, one a row."""
    order = sorted(range(len(documents)), key=lambda i: len(documents[i].input_ids))
    batches: list[list[list[int]]] = []
    rows: list[list[int]] = []
    for index in order:
        if rows and (len(rows) + 1) * len(documents[index].input_ids) > ESTIMATE_TOKENS:
            batches.append(rows)
            rows = []
        rows.append([index])
    return [*batches, rows] if rows else batches


def _settings_key(target: TargetModel, suite: Suite, settings: EvalSettings, who: str) -> dict[str, Any]:
    """Everything that a decoded batch depends on, short of the weights."""
    prompts = hashlib.sha256(json.dumps(suite.prompts).encode()).hexdigest()
    return {
        "who": who,
        "target": target.name,
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
