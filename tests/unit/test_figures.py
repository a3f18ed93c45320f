"""What an evaluation in training writes: sums over processes give the figures of the whole."""

from __future__ import annotations

import pytest
import torch

from spec_train.speculators.base import ResponseHits
from spec_train.speculators.supervision import survival
from spec_train.training.acceptance import position_average, renewal_counts
from spec_train.training.figures import estimate_figures, estimate_sums


def responses(count: int, seed: int = 0) -> list[ResponseHits]:
    """Random hits that end with the response."""
    generator = torch.Generator().manual_seed(seed)
    found = []
    for i in range(count):
        length = int(torch.randint(3, 20, (), generator=generator))
        hit_MK = torch.rand(length - 1, 5, generator=generator) < 0.7
        within = torch.arange(1, length)[:, None] + torch.arange(5) < length
        found.append(ResponseHits(str(i), survival(hit_MK & within, block=False)))
    return found


def test_parts_of_two_processes_add_up_to_the_whole() -> None:
    everything, depths = responses(9), (3, 5, 1)
    sums = estimate_sums(everything[::2], depths) + estimate_sums(everything[1::2], depths)
    figures = estimate_figures(sums, depths)
    for k in depths:
        assert figures[f"renewal@{k}"] == renewal_counts(everything, k).mean_acceptance_length
        assert figures[f"position_average@{k}"] == pytest.approx(position_average(everything, k))
    deepest = renewal_counts(everything, 5)
    # Rounds that keep i drafts are the product of the conditional shares; their sum is the acceptance length.
    kept, length = 1.0, 1.0
    for i, survivors in enumerate(deepest.survived, 1):
        kept *= figures[f"conditional_acceptance_{i}"]
        assert kept == pytest.approx(survivors / deepest.steps)
        length += kept
    assert length == pytest.approx(figures["renewal@5"])


def test_a_share_of_no_rounds_is_left_out() -> None:
    misses = [ResponseHits("a", torch.zeros(4, 3, dtype=torch.float64))]
    figures = estimate_figures(estimate_sums(misses, (3,)), (3,))
    assert figures == {"renewal@3": 1.0, "position_average@3": 1.0, "conditional_acceptance_1": 0.0}
    assert estimate_figures(estimate_sums([], (3,)), (3,)) == {"renewal@3": 1.0, "position_average@3": 1.0}
