"""The overfit gate: a head trained on one answer of the user's own target must draft that answer without a miss.

A head that cannot learn one answer by heart, or knows it and drafts something else, is not short of data: a mask, a
shift between states and tokens, or the wrong hidden states keep it from it. The gate looks at what could be wrong in
the order in which a run meets it, so its first complaint is the cause and what follows from it is not reported.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from spec_train.batch import Batch
from spec_train.data.batches import build_batch
from spec_train.data.documents import Document
from spec_train.decoding.acceptance import decoded_length
from spec_train.decoding.engine import speculative_decode
from spec_train.decoding.sampling import Sampling
from spec_train.errors import UserError
from spec_train.speculators.base import ResponseHits, Speculator
from spec_train.target import TargetModel
from spec_train.training.acceptance import renewal_counts

LEARNING_RATE = 2e-3
WARMUP = 10
LOOK_EVERY = 20  # steps between two looks at the drafts
CLOSE = 0.9  # of the accepted drafts that a perfect head gets
AGREEMENT = 0.9  # of the answer's tokens that the target's states must lead to


@dataclass(frozen=True)
class OverfitResult:
    """`best`: τ of a head without a miss, K+1 up to the last, shorter round; `estimate`: τ of the trained head, teacher
    forced; `decoded`: by the decoder. `suspect`: None where the gate is passed, else what to look at, in one line."""

    steps: int
    best: float
    estimate: float
    decoded: float
    suspect: str | None


def answer_of(target: TargetModel, prompt: list[int], num_draft_tokens: int, max_new_tokens: int) -> Document:
    """The target's greedy answer to `prompt`. Raises UserError where it is too short for a round of drafts."""
    (answer,) = target.generate([prompt], Sampling(), max_new_tokens)
    if len(answer.output_ids) < num_draft_tokens + 2:
        raise UserError(
            f"the target answers with {len(answer.output_ids)} tokens, too few for a round of {num_draft_tokens} "
            "drafts; look at the prompt, the template and responses.max_new_tokens"
        )
    ids = prompt + answer.output_ids
    return Document("overfit", ids, [(len(prompt), len(ids))])


def overfit(
    target: TargetModel,
    document: Document,
    head: Speculator,
    *,
    num_draft_tokens: int,
    steps: int,
) -> OverfitResult:
    """Train `head`, a fresh one, on `document`, an answer of `answer_of`, until it drafts it without a miss, for at
    most `steps` steps; then decode the prompt with it."""
    start, end = document.spans[0]
    perfect = ResponseHits("perfect", _reachable(end - start, num_draft_tokens))
    best = renewal_counts([perfect], num_draft_tokens).mean_acceptance_length
    goal = 1 + CLOSE * (best - 1)
    batch = build_batch([document], [[0]]).to(target.device)
    head = head.float().to(target.device)
    filled = target.fill_features(batch, replace(head.feature_spec, last_hidden=True), torch.float32)
    complaint = _broken_mask(head, batch) or _broken_states(filled) or _broken_alignment(target, filled)
    if complaint is not None:
        return OverfitResult(0, best, 1.0, 1.0, complaint)
    taken, losses, estimate = _train(head, filled, goal, num_draft_tokens, steps)
    if estimate < goal:
        return OverfitResult(taken, best, estimate, 1.0, _why_not_learnt(losses, estimate))
    head.to(target.dtype).eval()
    trace = speculative_decode(
        target,
        head,
        [document.input_ids[:start]],
        num_draft_tokens=num_draft_tokens,
        sampling=Sampling(),
        max_new_tokens=end - start,
    )
    decoded = decoded_length(trace.requests)
    suspect = None
    if decoded < goal:
        suspect = (
            f"decoding: the head knows the answer (τ {estimate:.2f}) and drafts it at τ {decoded:.2f}; the states or "
            "positions it was trained on are not those that it decodes with"
        )
    return OverfitResult(taken, best, estimate, decoded, suspect)


def _reachable(length: int, num_draft_tokens: int) -> Tensor:
    """hit_MK of a head without a miss on an answer of `length` tokens."""
    known = torch.arange(1, length)[:, None]
    return known + torch.arange(num_draft_tokens) < length


def _train(
    head: Speculator, batch: Batch, goal: float, num_draft_tokens: int, steps: int
) -> tuple[int, list[float], float]:
    """(steps taken, losses, τ of the last look). AdamW on one batch; the seed of each step is its number."""
    optimizer = torch.optim.AdamW([p for p in head.parameters() if p.requires_grad], weight_decay=0.0)
    counts = head.supervised_counts(batch)
    normalizer = torch.where(counts > 0, counts, torch.ones_like(counts))
    losses: list[float] = []
    estimate = 1.0
    for step in range(1, steps + 1):
        torch.manual_seed(step)
        for group in optimizer.param_groups:
            group["lr"] = LEARNING_RATE * min(1.0, step / WARMUP)
        head.train()
        loss = head.loss(batch, normalizer).loss
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(head.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
        if step % LOOK_EVERY == 0 or step == steps:
            head.eval()
            estimate = renewal_counts(head.draft_hits(batch, num_draft_tokens), num_draft_tokens).mean_acceptance_length
            if estimate >= goal:
                return step, losses, estimate
    return steps, losses, estimate


def _why_not_learnt(losses: list[float], estimate: float) -> str:
    """A loss that still falls wants more steps; one that stands still has not what it needs to know the answer."""
    half = len(losses) // 2
    early, late = (
        sum(part) / max(1, len(part)) for part in (losses[half : half + half // 2], losses[half + half // 2 :])
    )
    course = f"loss {losses[0]:.3g} to {losses[-1]:.3g} in {len(losses)} steps, τ {estimate:.2f}"
    if late < early - 0.02 * abs(losses[0] - early):
        return f"training: not learnt yet and still falling ({course}); give more --steps"
    return f"aux layers or alignment: the head learns no more ({course}); look at the layers it reads and its targets"


def _broken_mask(head: Speculator, batch: Batch) -> str | None:
    supervised = int((batch.loss_weight_BT > 0).sum())
    if supervised == 0 or not bool((head.supervised_counts(batch) > 0).all()):
        return f"mask: {supervised} tokens are supervised, too few for every depth of the head; look at the spans"
    return None


def _broken_states(batch: Batch) -> str | None:
    for name, states in (("aux layers", batch.aux_hidden_BTAH), ("the last state", batch.last_hidden_BTH)):
        if states is None:
            continue
        if not bool(torch.isfinite(states).all()):
            return f"{name}: the target's states are not finite; another target.dtype may hold them"
        if bool((states == states[:, :1]).all()):
            return f"{name}: the target's states are the same at every position"
    return None


@torch.no_grad()
def _broken_alignment(target: TargetModel, batch: Batch) -> str | None:
    """The answer is greedy: the state at position p must lead to the token at p+1."""
    assert batch.last_hidden_BTH is not None
    predicts = F.pad(batch.loss_weight_BT[:, 1:] > 0, (0, 1))
    following = F.pad(batch.input_ids_BT[:, 1:], (0, 1))
    led_to = target.logits(batch.last_hidden_BTH[predicts]).argmax(-1)
    share = float((led_to == following[predicts]).float().mean())
    if share < AGREEMENT:
        return f"alignment: the target's states lead to {100 * share:.0f}% of its own answer's tokens, one place later"
    return None
