"""Acceptance length from teacher-forced drafts, without decoding.

Under sampling the text decides too where drafts are greedy (one-hot, vLLM's default): the draft x is accepted with
probability target_probs[x] and the residual never gives x, so a draft was accepted if and only if it is the token that
stands in the text. Along a text that the target sampled, the walk below has therefore the very law of the decoder's
rounds. A walk over the probabilities target_probs[x] along the text has not: beyond the first draft they are
conditioned on tokens that the round's own drafts did not propose.

Serving rounds do not start at evenly spread positions: each starts where the last one stopped, so hard regions are
visited more often and an average over positions overstates. The renewal walk starts at the first token after the
prefill and jumps by what each round emits, exactly as the decoder does on the same text.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from spec_train.speculators.base import ResponseHits

RESAMPLES = 2000


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


def renewal_interval(responses: Sequence[ResponseHits], num_draft_tokens: int, seed: int = 0) -> tuple[float, float]:
    """95% bootstrap interval of the renewal estimate over responses, sums over sums in every resample; (1, 1) where
    nothing was drafted."""
    counts = [renewal_counts([response], num_draft_tokens) for response in responses]
    accepted, steps = np.array([c.accepted for c in counts]), np.array([c.steps for c in counts])
    if steps.sum() == 0:
        return 1.0, 1.0
    picks = np.random.default_rng(seed).integers(0, len(counts), size=(RESAMPLES, len(counts)))
    steps_S = steps[picks].sum(axis=1)
    lengths_S = 1 + accepted[picks].sum(axis=1)[steps_S > 0] / steps_S[steps_S > 0]
    low, high = np.quantile(lengths_S, [0.025, 0.975])
    return float(low), float(high)


def independent_length(responses: Iterable[ResponseHits], num_draft_tokens: int) -> float:
    """The textbook figure (1 - a^(K+1)) / (1 - a), a the share of positions whose first draft is right: as if every
    draft of every round were accepted independently (Leviathan et al. 2023, equation 1). Kept to show the bias."""
    hits = positions = 0
    for response in responses:
        hits += int(response.hit_MK[:, :1].sum())
        positions += response.hit_MK.shape[0]
    rate = hits / positions if positions else 0.0
    return float(sum(rate**i for i in range(num_draft_tokens + 1)))


def _leading_hits(hit_MK: Tensor, num_draft_tokens: int) -> list[int]:
    if hit_MK.shape[0] and hit_MK.shape[1] < num_draft_tokens:
        raise ValueError(f"{hit_MK.shape[1]} depths were drafted, {num_draft_tokens} are needed")
    runs: list[int] = hit_MK[:, :num_draft_tokens].to(torch.int64).cumprod(1).sum(1).tolist()
    return runs
