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
import numpy.typing as npt
import torch
from torch import Tensor

from spec_train.speculators.base import ResponseHits

BOOTSTRAP_RESAMPLES = 2000


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


def position_sums(responses: Iterable[ResponseHits], num_draft_tokens: int) -> tuple[int, int]:
    """(leading hits summed over all positions, positions), from which the position average comes."""
    total = positions = 0
    for response in responses:
        run_M = _leading_hits(response.hit_MK, num_draft_tokens)
        total += sum(run_M)
        positions += len(run_M)
    return total, positions


def position_average(responses: Iterable[ResponseHits], num_draft_tokens: int) -> float:
    """The common, biased figure: 1 + the mean of leading hits over all positions. Kept to show the bias."""
    total, positions = position_sums(responses, num_draft_tokens)
    return 1.0 + total / positions if positions else 1.0


def ratio_interval(
    part_R: npt.NDArray[np.int64], whole_R: npt.NDArray[np.int64], seed: int = 0
) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.float64]]:
    """95% bootstrap bounds (low, high) of sum(part) / sum(whole) over R responses; columns of `part_R` [R, ...] are
    judged on the same resamples. `whole_R` must not be all 0.

    Rounds of one response resemble each other, so responses are drawn and not rounds. The seed is fixed: the same
    counts give the same bounds.
    """
    picks = np.random.default_rng(seed).integers(0, len(whole_R), size=(BOOTSTRAP_RESAMPLES, len(whole_R)))
    whole_S = whole_R[picks].sum(axis=1)
    part_S = part_R[picks].sum(axis=1)[whole_S > 0]
    ratios_S = part_S / whole_S[whole_S > 0].reshape(-1, *[1] * (part_S.ndim - 1))
    low, high = np.quantile(ratios_S, [0.025, 0.975], axis=0)
    return low, high


def renewal_interval(responses: Sequence[ResponseHits], num_draft_tokens: int) -> tuple[float, float]:
    """95% bootstrap interval of the renewal estimate over responses; (1, 1) where nothing was drafted."""
    counts = [renewal_counts([response], num_draft_tokens) for response in responses]
    steps = np.array([c.steps for c in counts], dtype=np.int64)
    if steps.sum() == 0:
        return 1.0, 1.0
    low, high = ratio_interval(np.array([c.accepted for c in counts], dtype=np.int64), steps)
    return 1 + float(low), 1 + float(high)


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
