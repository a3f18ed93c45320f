"""The conditional drop keeps nested rows, the right share of them, and the expected loss."""

from __future__ import annotations

import torch

from spec_train.speculators.cod import chain_rows, depth_width, drop_rows, retain, retention_by_depth
from spec_train.speculators.supervision import Queries

DEPTHS = 5
RETENTION = retention_by_depth(0.7, 0.3, DEPTHS)


def some_queries(seed: int = 0) -> Queries:
    """Two rows of 200 queries; the second has 120, and supervises its early queries at deep depths only."""
    generator = torch.Generator().manual_seed(seed)
    weight = torch.rand(2, 200, DEPTHS, generator=generator) + 0.5
    weight[1, 120:] = 0
    weight[1, :10, :3] = 0
    index = torch.arange(200).expand(2, -1)
    valid = (weight > 0).any(-1)
    return Queries(index, valid, index[..., None] + 2 + torch.arange(DEPTHS), weight)


def test_retention_never_rises() -> None:
    assert torch.allclose(RETENTION, torch.tensor([1.0, 0.7, 0.49, 0.343, 0.3]))


def test_kept_rows_are_nested_and_of_the_right_number() -> None:
    torch.manual_seed(0)
    supervised = some_queries().weight_BQK > 0
    chosen = drop_rows(supervised, RETENTION)
    assert not (chosen & ~supervised).any()
    for k in range(1, DEPTHS):  # kept at depth k: kept at every lower depth that is supervised at all
        assert not (chosen[..., k] & supervised[..., k - 1] & ~chosen[..., k - 1]).any()
    rows = chain_rows(chosen)
    assert not (chosen & ~rows).any()
    assert not (rows[..., 1:] & ~rows[..., :-1]).any()
    for row, count in ((0, 200), (1, 120)):
        for k in range(DEPTHS):
            expected = float(RETENTION[k]) * count
            unsupervised = 10 if row == 1 and k < 3 else 0
            assert expected - unsupervised - 1 <= int(chosen[row, :, k].sum()) <= expected + 1


def test_each_prediction_is_kept_with_its_probability_and_scaled_by_it() -> None:
    """The mean weight over many draws is the weight without the drop."""
    torch.manual_seed(0)
    queries = some_queries()
    total = torch.zeros_like(queries.weight_BQK)
    draws = 2000
    for _ in range(draws):
        kept = retain(queries, RETENTION)
        total.scatter_add_(1, kept.index_BQ[..., None].expand_as(kept.weight_BQK), kept.weight_BQK)
    assert torch.allclose(total / draws, queries.weight_BQK, atol=0.3)
    assert abs(float((total / draws).sum() / queries.weight_BQK.sum()) - 1) < 0.01


def test_the_rows_of_a_depth_are_leading_queries() -> None:
    torch.manual_seed(1)
    queries = some_queries()
    kept = retain(queries, RETENTION)
    assert torch.equal(kept.index_BQ.sort(1).values, queries.index_BQ)
    assert torch.equal(kept.predicted_BQK[..., 0], kept.index_BQ + 2)
    rows = chain_rows(kept.weight_BQK > 0)
    for k in range(DEPTHS):
        width = depth_width(kept, k)
        assert width == int(rows[..., k].sum(1).max())
        assert rows[0, :width, k].all()
        assert not rows[:, width:, k].any()


def test_the_same_seed_drops_the_same_and_nothing_is_dropped_at_one() -> None:
    queries = some_queries()
    torch.manual_seed(3)
    first = retain(queries, RETENTION)
    torch.manual_seed(3)
    assert torch.equal(first.weight_BQK, retain(queries, RETENTION).weight_BQK)
    whole = retain(queries, torch.ones(DEPTHS))
    assert torch.equal(whole.weight_BQK.sum(1), queries.weight_BQK.sum(1))
    silent = Queries(
        queries.index_BQ, queries.valid_BQ & False, queries.predicted_BQK, torch.zeros_like(queries.weight_BQK)
    )
    assert float(retain(silent, RETENTION).weight_BQK.sum()) == 0
    assert depth_width(silent, 1) == 1
