"""Acceptance length from teacher-forced drafts, without decoding.

What rounds would have done on a text that the target wrote is known: a token y that a round emits in place of a draft
was the draft itself with probability min(draft_probs[y], target_probs[y]), out of target_probs[y] in all. Given the
text, the draft was therefore accepted with probability min(1, draft_probs[y] / target_probs[y]), and independently of
everything before: the drafts before it in the round were accepted, so they are the text, and the laws are those that
teacher forcing gives. For greedy drafts, whose law is one-hot, this is 1 where the draft stands in the text and 0 where
it does not. A token outside a reduced draft vocabulary is never a draft. (`supervision.survival` has both acceptance
rules.) Along text that the target sampled, under any filters, rounds have so the very law of the decoder's; an average
of sum(min(draft_probs, target_probs)) over the text has not.

Serving rounds do not start at evenly spread positions: each starts where the last one stopped, so hard regions are
visited more often and an average over positions overstates. A round starts at the first token after the prefill; one
that starts at state m and keeps j drafts makes the next start at m + j + 1:

    visits[1] = 1,   visits[m + j + 1] += visits[m] * P(kept = j at m),   rounds = sum of visits

With greedy drafts this is a walk, exactly the decoder's on the same text.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from spec_train.decoding.acceptance import acceptance_length
from spec_train.speculators.base import ResponseHits

BOOTSTRAP_RESAMPLES = 2000
CHUNK = 256  # responses whose states are padded together

Interval = list[float]
"""[low, high], as JSON has it."""


@dataclass(frozen=True)
class AcceptanceCounts:
    """Sums over rounds, expected given the texts (whole numbers for greedy drafts): rounds, accepted drafts that the
    user keeps, tokens emitted, rounds that kept at least i+1."""

    steps: float
    accepted: float
    emitted: int
    survived: tuple[float, ...]

    @property
    def mean_acceptance_length(self) -> float:
        """See `acceptance_length`; 1 where nothing was drafted."""
        return acceptance_length(self.accepted, self.steps)


def expected_rounds(
    responses: Sequence[ResponseHits], num_draft_tokens: int
) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.float64]]:
    """(rounds [R], rounds that keep at least k+1 drafts [R, K]) of each response, expected given its text, with
    K = `num_draft_tokens` drafts a round. Raises ValueError where fewer were drafted."""
    survivals = [_survival(response, num_draft_tokens) for response in responses]
    steps_R, survived_RK = np.zeros(len(survivals)), np.zeros((len(survivals), num_draft_tokens))
    order = sorted(range(len(survivals)), key=lambda i: len(survivals[i]))
    for first in range(0, len(order), CHUNK):
        part = order[first : first + CHUNK]
        length_R = np.array([len(survivals[i]) for i in part])
        # Column j: the probability that a round keeps at least j drafts; j = 0 and beyond the last added.
        least_RMJ = np.zeros((len(part), length_R[-1], num_draft_tokens + 2))
        least_RMJ[..., 0] = 1
        for row, i in enumerate(part):
            least_RMJ[row, : length_R[row], 1:-1] = survivals[i]
        exactly_RMJ = least_RMJ[..., :-1] - least_RMJ[..., 1:]
        visits_RM = np.zeros((len(part), length_R[-1] + num_draft_tokens + 1))
        visits_RM[:, 0] = 1
        for m in range(length_R[-1]):
            visits_RM[:, m + 1 : m + num_draft_tokens + 2] += visits_RM[:, m, None] * exactly_RMJ[:, m]
        visits_RM = visits_RM[:, : length_R[-1]] * (np.arange(length_R[-1]) < length_R[:, None])
        steps_R[part] = visits_RM.sum(1)
        survived_RK[part] = np.einsum("rm,rmk->rk", visits_RM, least_RMJ[..., 1:-1])
    return steps_R, survived_RK


def renewal_counts(responses: Sequence[ResponseHits], num_draft_tokens: int) -> AcceptanceCounts:
    """Sums over all responses of `expected_rounds`."""
    steps_R, survived_RK = expected_rounds(responses, num_draft_tokens)
    emitted = sum(len(response.survival_MK) for response in responses)
    survived: list[float] = survived_RK.sum(0).tolist()
    return AcceptanceCounts(float(steps_R.sum()), float(survived_RK.sum()), emitted, tuple(survived))


def position_sums(responses: Iterable[ResponseHits], num_draft_tokens: int) -> tuple[float, int]:
    """(kept drafts summed over all positions, positions), from which the position average comes."""
    total, positions = 0.0, 0
    for response in responses:
        total += float(_survival(response, num_draft_tokens).sum())
        positions += len(response.survival_MK)
    return total, positions


def position_average(responses: Iterable[ResponseHits], num_draft_tokens: int) -> float:
    """The common, biased figure: 1 + the mean of kept drafts over all positions. Kept to show the bias."""
    total, positions = position_sums(responses, num_draft_tokens)
    return 1.0 + total / positions if positions else 1.0


def sums_of_clusters(
    part_R: npt.NDArray[np.number[Any]], whole_R: npt.NDArray[np.number[Any]], clusters: Sequence[Hashable]
) -> tuple[npt.NDArray[np.number[Any]], npt.NDArray[np.number[Any]]]:
    """(part [C, ...], whole [C]): sums over the responses of each cluster, `clusters` [R] naming it, of those clusters
    that have any of the whole."""
    place = {cluster: c for c, cluster in enumerate(dict.fromkeys(clusters))}
    place_R = np.array([place[cluster] for cluster in clusters], dtype=np.int64)
    whole_C, part_C = np.zeros(len(place), whole_R.dtype), np.zeros((len(place), *part_R.shape[1:]), part_R.dtype)
    np.add.at(whole_C, place_R, whole_R)
    np.add.at(part_C, place_R, part_R)
    return part_C[whole_C > 0], whole_C[whole_C > 0]


def ratio_interval(
    part_C: npt.NDArray[np.number[Any]], whole_C: npt.NDArray[np.number[Any]], seed: int = 0
) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.float64]] | None:
    """95% bootstrap bounds (low, high) of sum(part) / sum(whole) over C clusters of `sums_of_clusters`; columns of
    `part_C` [C, ...] are judged on the same resamples. None for fewer than two clusters: one tells
    nothing of how others would differ.

    Rounds of one conversation resemble each other, so conversations are drawn and not rounds. The seed is fixed: the
    same counts give the same bounds.
    """
    if len(whole_C) < 2:
        return None
    picks = np.random.default_rng(seed).integers(0, len(whole_C), size=(BOOTSTRAP_RESAMPLES, len(whole_C)))
    whole_S, part_S = whole_C[picks].sum(axis=1), part_C[picks].sum(axis=1)
    ratios_S = part_S / whole_S.reshape(-1, *[1] * (part_S.ndim - 1))
    low, high = np.quantile(ratios_S, [0.025, 0.975], axis=0)
    return low, high


def length_interval(
    accepted_R: Sequence[float] | npt.NDArray[np.float64],
    rounds_R: Sequence[float] | npt.NDArray[np.float64],
    clusters: Sequence[Hashable],
    seed: int = 0,
) -> Interval | None:
    """[low, high], the 95% bootstrap interval of the acceptance length over clusters of responses; None where
    `ratio_interval` has none."""
    bounds = ratio_interval(*sums_of_clusters(np.asarray(accepted_R), np.asarray(rounds_R), clusters), seed)
    return None if bounds is None else [1 + float(bound) for bound in bounds]


def renewal_interval(responses: Sequence[ResponseHits], num_draft_tokens: int) -> Interval | None:
    """95% bootstrap interval of the renewal estimate, see `length_interval`. Responses of one `document_id` are a
    cluster."""
    steps_R, survived_RK = expected_rounds(responses, num_draft_tokens)
    return length_interval(survived_RK.sum(1), steps_R, [response.document_id for response in responses])


def independent_length(responses: Iterable[ResponseHits], num_draft_tokens: int) -> float:
    """The textbook figure (1 - a^(K+1)) / (1 - a), a the mean acceptance of the first draft over all positions: as if
    every draft of every round were accepted independently (Leviathan et al. 2023, equation 1). Kept to show the
    bias."""
    accepted, positions = 0.0, 0
    for response in responses:
        accepted += float(response.survival_MK[:, :1].sum())
        positions += len(response.survival_MK)
    rate = accepted / positions if positions else 0.0
    return float(sum(rate**i for i in range(num_draft_tokens + 1)))


def _survival(response: ResponseHits, num_draft_tokens: int) -> npt.NDArray[np.float64]:
    survival_MK = response.survival_MK
    if survival_MK.shape[0] and survival_MK.shape[1] < num_draft_tokens:
        raise ValueError(f"{survival_MK.shape[1]} depths were drafted, {num_draft_tokens} are needed")
    columns: npt.NDArray[np.float64] = survival_MK[:, :num_draft_tokens].numpy()
    return columns
