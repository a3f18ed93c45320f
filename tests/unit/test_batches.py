"""Packing: every document once, boundaries kept, the same plan again for the same arguments."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from spec_train.data.batches import add_features, build_batch, plan_epoch
from spec_train.data.documents import Document
from spec_train.errors import UserError


def random_lengths(count: int, low: int = 3, high: int = 60) -> list[int]:
    return torch.randint(low, high, (count,), generator=torch.Generator().manual_seed(1)).tolist()


def width(rows: list[list[int]], lengths: list[int]) -> int:
    return max(sum(lengths[index] for index in row) for row in rows)


@pytest.mark.parametrize("micro_batch_tokens", [64, 200, 4096])
@pytest.mark.parametrize("count", [1, 7, 500])
def test_every_document_exactly_once_within_the_budget(count: int, micro_batch_tokens: int) -> None:
    lengths = random_lengths(count)
    plan = plan_epoch(lengths, micro_batch_tokens=micro_batch_tokens, seed=0, epoch=0)
    assert sorted(index for rows in plan for row in rows for index in row) == list(range(count))
    for rows in plan:
        assert rows
        assert all(rows)
        assert len(rows) * width(rows, lengths) <= micro_batch_tokens


def test_a_document_beyond_the_budget_gets_its_own_micro_batch() -> None:
    lengths = [5, 300, 6, 100, 101]
    plan = plan_epoch(lengths, micro_batch_tokens=100, seed=0, epoch=0)
    assert [[1]] in plan
    assert [[4]] in plan
    assert sorted(index for rows in plan for row in rows for index in row) == list(range(5))


def test_plan_depends_on_seed_and_epoch_alone() -> None:
    lengths = random_lengths(300)

    def plan(seed: int, epoch: int) -> list[list[list[int]]]:
        return plan_epoch(lengths, micro_batch_tokens=256, seed=seed, epoch=epoch)

    assert plan(1, 0) == plan(1, 0)
    torch.manual_seed(99)  # nor on global random state
    assert plan(1, 0) == plan(1, 0)
    assert plan(1, 0) != plan(1, 1)
    assert plan(1, 0) != plan(2, 0)


def test_packing_wastes_little() -> None:
    lengths = random_lengths(2000, 10, 400)
    plan = plan_epoch(lengths, micro_batch_tokens=4096, seed=0, epoch=0)
    padded = sum(len(rows) * width(rows, lengths) for rows in plan)
    assert sum(lengths) / padded > 0.9
    assert len(plan) < 1.2 * sum(lengths) / 4096


def test_order_is_random_over_the_epoch() -> None:
    lengths = random_lengths(2000, 10, 400)
    plan = plan_epoch(lengths, micro_batch_tokens=1024, seed=0, epoch=0)
    widths = torch.tensor([width(rows, lengths) for rows in plan]).double()
    centred = widths - widths.mean()
    assert abs(float((centred[1:] * centred[:-1]).mean() / centred.square().mean())) < 0.2


@pytest.mark.parametrize("multiple_of", [1, 2, 3, 8])
def test_short_last_window_is_filled_with_empty_micro_batches(multiple_of: int) -> None:
    lengths = random_lengths(50)
    bare = plan_epoch(lengths, micro_batch_tokens=128, seed=0, epoch=0)
    plan = plan_epoch(lengths, micro_batch_tokens=128, seed=0, epoch=0, multiple_of=multiple_of)
    assert len(plan) % multiple_of == 0
    assert len(plan) - len(bare) < multiple_of
    assert plan[: len(bare)] == bare
    assert all(rows == [] for rows in plan[len(bare) :])


def test_an_empty_document_is_refused() -> None:
    with pytest.raises(UserError, match="document 1 has no tokens"):
        plan_epoch([3, 0], micro_batch_tokens=64, seed=0, epoch=0)


def documents() -> list[Document]:
    return [
        Document("a", [5, 6, 7, 8, 9], [(2, 4)]),
        Document("b", [1, 2, 3], [(1, 3)]),
        Document("c", [4, 4, 4, 4], [(1, 2), (3, 4)]),
    ]


def test_build_batch_keeps_boundaries() -> None:
    batch = build_batch(documents(), [[0, 1], [2]])
    assert batch.input_ids_BT.tolist() == [[5, 6, 7, 8, 9, 1, 2, 3], [4, 4, 4, 4, 0, 0, 0, 0]]
    assert batch.position_BT.tolist() == [[0, 1, 2, 3, 4, 0, 1, 2], [0, 1, 2, 3, 0, 0, 0, 0]]
    assert batch.document_BT.tolist() == [[0, 0, 0, 0, 0, 1, 1, 1], [0, 0, 0, 0, -1, -1, -1, -1]]
    assert batch.loss_weight_BT.tolist() == [[0, 0, 1, 1, 0, 0, 1, 1], [0, 1, 0, 1, 0, 0, 0, 0]]
    assert batch.row_ids == (("a", "b"), ("c",))
    assert batch.aux_hidden_BTAH is None
    assert (batch.input_ids_BT.dtype, batch.loss_weight_BT.dtype) == (torch.int64, torch.float32)


def test_sequence_normalization_gives_every_document_the_same_weight() -> None:
    docs = [*documents(), Document("silent", [1, 2, 3, 4], [])]
    batch = build_batch(docs, [[0, 1], [2, 3]], None, "sequence")
    assert batch.loss_weight_BT[0].tolist() == [0, 0, 0.5, 0.5, 0, 0, 0.5, 0.5]
    assert batch.loss_weight_BT[1].tolist() == [0, 0.5, 0, 0.5, 0, 0, 0, 0]


def test_no_rows_give_work_of_weight_zero() -> None:
    batch = build_batch(documents(), [])
    assert batch.input_ids_BT.tolist() == [[5, 6, 7, 8, 9]]
    assert batch.document_BT.tolist() == [[0, 0, 0, 0, 0]]
    assert not batch.loss_weight_BT.any()


def stored(document: Document, short_by: int = 0) -> Any:
    length = len(document.input_ids) - short_by
    base = torch.tensor(document.input_ids[:length], dtype=torch.float32)
    return SimpleNamespace(
        aux_hidden=(base[:, None] * torch.tensor([1.0, 10.0, 100.0])).bfloat16(),
        last_hidden=(base[:, None] + torch.tensor([0.0, 0.5])).bfloat16(),
        target_lse=-base,
    )


@pytest.mark.parametrize("short_by", [0, 1])
def test_features_land_beside_their_tokens(short_by: int) -> None:
    batch = build_batch(documents(), [[0, 1], [2]], lambda document: stored(document, short_by))
    assert batch.aux_hidden_BTAH is not None
    assert batch.last_hidden_BTH is not None
    assert batch.target_lse_BT is not None
    assert batch.aux_hidden_BTAH.shape == (2, 8, 3)
    assert batch.aux_hidden_BTAH.dtype == torch.bfloat16
    ids = batch.input_ids_BT.float()
    if short_by:  # the last token of a document predicts nothing: zeros
        ids[0, [4, 7]] = 0
        ids[1, 3] = 0
    assert torch.equal(batch.target_lse_BT, -ids)
    assert torch.equal(batch.aux_hidden_BTAH[..., 1].float(), ids * 10)
    assert torch.equal(batch.last_hidden_BTH[..., 0].float(), ids)


def test_features_of_another_length_are_refused_by_name() -> None:
    with pytest.raises(UserError, match="document 'b' cover 1 positions but it has 3 tokens"):
        build_batch(documents(), [[0, 1]], lambda document: stored(document, 2 if document.id == "b" else 0))


def test_add_features_reads_by_document_id() -> None:
    by_id = {document.id: stored(document) for document in documents()}
    batch = add_features(build_batch(documents(), [[2, 1], [0]]), by_id.__getitem__)
    assert batch.target_lse_BT is not None
    assert batch.target_lse_BT.tolist() == [[-4, -4, -4, -4, -1, -2, -3], [-5, -6, -7, -8, -9, 0, 0]]
