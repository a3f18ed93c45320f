"""What `spec-train doctor RECIPE` finds: whether this recipe can work on this machine, before hours are spent on it.

Checks come in the order in which a run meets them. One that fails says what to look at; those after it still run where
they can. The last one, the overfit gate, loads the target and trains on one of its own answers.
"""

from __future__ import annotations

import os
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, Literal

from spec_train.data.chat import inspect_rows
from spec_train.data.features import free_disk
from spec_train.dry_run import plan
from spec_train.errors import UserError
from spec_train.estimate import TargetFacts, size, state_bytes
from spec_train.recipe import Recipe
from spec_train.run import Run
from spec_train.serving.contract import CAPABILITIES, installed_vllm, target_problem, version_problem
from spec_train.stop_ids import stop_sources

if TYPE_CHECKING:
    from spec_train.data.documents import Document
    from spec_train.speculators.base import Speculator

GATE_TOKENS = 64  # of the answer that the gate learns
HEAD_BYTES = 16  # of a trained parameter: float32 weight, gradient and AdamW's two moments


@dataclass(frozen=True)
class Check:
    """One line of the table. `state`: "pass", "fail", or "note" for what cannot be judged here."""

    name: str
    state: Literal["pass", "fail", "note"]
    text: str


@dataclass(frozen=True)
class Diagnosis:
    """All checks, and the gate's sample as training sees it: pairs of (text, whether it is supervised)."""

    checks: list[Check]
    preview: list[tuple[str, bool]]

    @property
    def ok(self) -> bool:
        """Whether no check failed."""
        return all(check.state != "fail" for check in self.checks)

    def to_json(self) -> dict[str, Any]:
        """As JSON values."""
        preview = [{"text": text, "supervised": supervised} for text, supervised in self.preview]
        return {"ok": self.ok, "checks": [asdict(check) for check in self.checks], "preview": preview}


def diagnose(recipe: Recipe, steps: int) -> Diagnosis:
    """Every check of the recipe on this machine. `steps`: at most so many of the overfit gate."""
    run = Run(recipe)
    try:
        planned = plan(recipe)
    except UserError as error:
        return Diagnosis([Check("plan", "fail", str(error))], [])
    lines = {stage: text for stage, _, text in planned.lines}
    short = planned.store_bytes > free_disk(run.stage_directory("features"))
    checks = [
        Check("target", "pass", lines["target"]),
        Check("data", "pass", lines["prompts"]),
        Check("disk", "fail" if short else "pass", lines["features"]),
        _vllm(recipe, planned.facts),
    ]
    try:
        checks += _stops(run)
        document = _sample(run)
        preview = _preview(run, document)
        supervised = document.num_response_tokens
        checks.append(
            Check("mask", "pass", f"{supervised} of {len(document.input_ids)} tokens of the sample supervised")
        )
        head, coverage = _new_head(run, document)
        checks.append(_memory(run, head))
        if coverage < 1:
            share = f"{100 * coverage:.0f}% of the sample's tokens; raise speculator.draft_vocab_size"
            checks.append(Check("vocab", "fail", f"the draft vocabulary holds {share}"))
        checks.append(_gate(run, document, head, steps))
    except UserError as error:
        return Diagnosis([*checks, Check("gate", "fail", str(error))], [])
    return Diagnosis(checks, preview)


def _vllm(recipe: Recipe, facts: TargetFacts) -> Check:
    """Whether the installed vLLM loads the method, and what this target takes."""
    kind, version = recipe.speculator.type, installed_vllm()
    needs = target_problem(kind, facts.family) or CAPABILITIES[kind].needs
    if facts.switch is not None:
        long_rope = (
            f"LongRoPE: --max-model-len {facts.switch}, above which vLLM takes the long factors for every request"
        )
        needs = f"{needs}; {long_rope}" if needs else long_rope
    if version is None:
        return Check("vllm", "note", f"not installed here; {kind} needs {needs}" if needs else "not installed here")
    problem = version_problem(kind, version)
    if problem is not None:
        return Check("vllm", "fail", problem)
    return Check("vllm", "pass", f"vLLM {version} loads {kind}" + (f"; {needs}" if needs else ""))


def _stops(run: Run) -> list[Check]:
    """A note where the target's files name different tokens that end an answer: it ends at any of them, as in vLLM."""
    sources = stop_sources(run.target_path, run.recipe.target.revision if run.recipe.target.model else None)
    if len({tuple(ids) for ids in sources.values()}) == 1:
        return []
    named = [
        f"{', '.join(f'{run.tokenizer.decode([i])} ({i})' for i in ids) or 'none'} in {source}"
        for source, ids in sources.items()
    ]
    return [Check("stops", "note", f"{'; '.join(named)}: an answer ends at any of them, as in vLLM")]


def _sample(run: Run) -> Document:
    """The target's own answer to the first prompt that leads to one."""
    from spec_train.data.prompts import load_conversations
    from spec_train.stages.responses import render_prompts
    from spec_train.training.overfit import answer_of

    recipe = run.recipe
    sources = [source.model_copy(update={"limit": min(source.limit or 8, 8)}) for source in recipe.data.sources]
    conversations, _ = load_conversations(sources, mode="regenerate", max_drop_rate=1.0, seed=recipe.run.seed)
    prompts, dropped = render_prompts(run, conversations)
    if not prompts:
        raise UserError(f"no row can be rendered: {'; '.join(dropped)}")
    refused = UserError("no prompt")
    for prompt in prompts[:4]:
        limit = min(GATE_TOKENS, recipe.responses.max_new_tokens)
        try:
            return answer_of(run.target(), prompt.input_ids, _drafts(recipe), limit)
        except UserError as error:
            refused = error
    raise refused


def _drafts(recipe: Recipe) -> int:
    """How many drafts a round the gate asks for: no deeper than the head is trained."""
    return min(recipe.eval.num_draft_tokens[0], 3)


def _preview(run: Run, document: Document) -> list[tuple[str, bool]]:
    (row,) = inspect_rows(run.tokenizer, [document])
    start, end = document.spans[0]
    pieces = [(row["input_ids"][:start], False), (row["input_ids"][start:end], True)]
    return [(str(run.tokenizer.decode(ids, skip_special_tokens=False)), supervised) for ids, supervised in pieces]


def _new_head(run: Run, document: Document) -> tuple[Speculator, float]:
    from spec_train.stages.train import new_speculator

    return new_speculator(run, [document], [document])


def _memory(run: Run, head: Speculator) -> Check:
    """Weights, head with optimiser, and the largest micro-batch (states and activations), against the memory of the
    device. The last is an estimate, and documents may all be shorter, so it alone fails no recipe."""
    import torch

    from spec_train.data.batches import row_shape
    from spec_train.training.memory import HEAD_WIDTHS, MARGIN, StepShape, activation_bytes

    target, recipe = run.target(), run.recipe
    weights = sum(p.numel() * p.element_size() for p in target.model.parameters())
    if target.device.type == "cuda":
        free = torch.cuda.mem_get_info(target.device)[0] + weights  # the target is loaded already
    else:
        free = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_AVPHYS_PAGES") + weights
    trained = sum(p.numel() for p in head.parameters() if p.requires_grad)
    rows, width = row_shape(min(recipe.data.max_length, target.max_length), recipe.train.micro_batch_tokens)
    online = recipe.features.mode == "online"
    shape = StepShape(rows, width, online, run.torch_dtype, recipe.train.precision)
    try:
        activations = activation_bytes(target, head.float().to(target.device), shape)
    except torch.OutOfMemoryError:
        return Check("memory", "fail", f"no room for {HEAD_WIDTHS[-1]} tokens of training; {size(free)} free")
    least = weights + trained * HEAD_BYTES + rows * width * state_bytes(run, target.hidden_size)
    needed = weights + trained * HEAD_BYTES + activations
    text = (
        f"target {size(weights)}, head of {trained / 1e6:.1f}M with gradients and AdamW {size(trained * HEAD_BYTES)}, "
        f"states and activations of a micro-batch about {size(activations)} (± {100 * MARGIN:.0f}%; {rows} x {width} "
        f"tokens, all supervised); {size(free)} free"
    )
    if least > free:
        return Check("memory", "fail", text)
    if needed > free:
        return Check("memory", "note", f"{text}: the longest documents may not fit, lower train.micro_batch_tokens")
    return Check("memory", "pass", text)


def _gate(run: Run, document: Document, head: Speculator, steps: int) -> Check:
    from spec_train.training.overfit import overfit

    result = overfit(
        run.target(),
        document,
        head,
        num_draft_tokens=_drafts(run.recipe),
        steps=steps,
    )
    if result.suspect is not None:
        return Check("gate", "fail", result.suspect)
    text = f"one answer learnt in {result.steps} steps: decoded at τ {result.decoded:.2f} of at most {result.best:.2f}"
    return Check("gate", "pass", text)
