"""Acceptance length from teacher-forced drafts, exact for greedy chains.

Serving rounds do not start at evenly spread positions: each starts where the last one stopped, so hard regions are
visited more often and an average over positions overstates. The renewal walk starts at the first token after the
prefill and jumps by what each round emits, exactly as the decoder does on the same text.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from spec_train.speculators.base import ResponseHits


@dataclass(frozen=True)
class AcceptanceCounts:
    """Sums over rounds: rounds, accepted drafts that the user keeps, tokens emitted, rounds that kept at least i+1."""

    steps: int
    accepted: int
    emitted: int
    survived: tuple[int, ...]

    @property
    def mean_acceptance_length(self) -> float:
        """1 + accepted / steps, as vLLM defines it; 1 where nothing was drafted."""
        return 1.0 + self.accepted / self.steps if self.steps else 1.0


def renewal_counts(responses: Iterable[ResponseHits], num_draft_tokens: int) -> AcceptanceCounts:
    """Walk every response round by round with K = `num_draft_tokens` drafts a round."""
    steps = accepted = emitted = 0
    survived = [0] * num_draft_tokens
    for response in responses:
        run_M = _leading_hits(response.hit_MK, num_draft_tokens)
        length, known = len(run_M) + 1, 1
        while known < length:
            kept = min(run_M[known - 1], length - known)
            steps += 1
            accepted += kept
            emitted += min(run_M[known - 1] + 1, length - known)
            for i in range(kept):
                survived[i] += 1
            known += run_M[known - 1] + 1
    return AcceptanceCounts(steps, accepted, emitted, tuple(survived))


def position_average(responses: Iterable[ResponseHits], num_draft_tokens: int) -> float:
    """The common, biased figure: 1 + the mean of leading hits over all positions. Kept to show the bias."""
    total = positions = 0
    for response in responses:
        run_M = _leading_hits(response.hit_MK, num_draft_tokens)
        total += sum(run_M)
        positions += len(run_M)
    return 1.0 + total / positions if positions else 1.0


def _leading_hits(hit_MK: Tensor, num_draft_tokens: int) -> list[int]:
    if hit_MK.shape[0] and hit_MK.shape[1] < num_draft_tokens:
        raise ValueError(f"{hit_MK.shape[1]} depths were drafted, {num_draft_tokens} are needed")
    runs: list[int] = hit_MK[:, :num_draft_tokens].to(torch.int64).cumprod(1).sum(1).tolist()
    return runs
