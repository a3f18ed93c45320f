"""Packing: every document once, boundaries kept, the same plan again for the same arguments."""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from spec_train.data.batches import add_features, build_batch, plan_epoch
from spec_train.data.documents import Document
from spec_train.errors import UserError

Rows = list[list[int]]


def random_lengths(count: int, low: int = 3, high: int = 60) -> list[int]:
    return torch.randint(low, high, (count,), generator=torch.Generator().manual_seed(1)).tolist()


def plan_of(lengths: list[int], supervised: list[int] | None = None, **settings: Any) -> list[list[Rows]]:
    return plan_epoch(lengths, supervised or lengths, **{"seed": 0, "epoch": 0, **settings})


def width(rows: Rows, lengths: list[int]) -> int:
    return max(sum(lengths[index] for index in row) for row in rows)


def documents_in(steps: list[list[Rows]]) -> list[int]:
    return sorted(index for step in steps for rows in step for row in rows for index in row)


def sums(steps: list[list[Rows]], counts: list[int]) -> list[int]:
    return [sum(counts[index] for rows in step for row in rows for index in row) for step in steps]


@pytest.mark.parametrize("per_step", [1, 4])
@pytest.mark.parametrize("micro_batch_tokens", [64, 200, 4096])
@pytest.mark.parametrize("count", [1, 7, 500])
def test_every_document_exactly_once_within_the_budget(count: int, micro_batch_tokens: int, per_step: int) -> None:
    lengths = random_lengths(count)
    plan = plan_of(lengths, micro_batch_tokens=micro_batch_tokens, per_step=per_step)
    assert documents_in(plan) == list(range(count))
    for step in plan:
        assert len(step) == per_step
        assert any(step)
        for rows in filter(None, step):
            assert all(rows)
            assert len(rows) * width(rows, lengths) <= micro_batch_tokens


def test_a_document_beyond_the_budget_gets_its_own_micro_batch() -> None:
    lengths = [5, 300, 6, 100, 101]
    plan = plan_of(lengths, micro_batch_tokens=100)
    assert [[[1]]] in plan
    assert [[[4]]] in plan
    assert documents_in(plan) == list(range(5))
    assert documents_in(plan_of([5000, 3, 4], micro_batch_tokens=10)) == [0, 1, 2]  # longer than a window


def test_plan_depends_on_seed_and_epoch_alone() -> None:
    lengths = random_lengths(300)

    def plan(seed: int, epoch: int) -> list[list[Rows]]:
        return plan_of(lengths, micro_batch_tokens=256, seed=seed, epoch=epoch)

    assert plan(1, 0) == plan(1, 0)
    torch.manual_seed(99)  # nor on global random state
    assert plan(1, 0) == plan(1, 0)
    assert plan(1, 0) != plan(1, 1)
    assert plan(1, 0) != plan(2, 0)


def chats(count: int, rng: random.Random) -> list[tuple[int, int]]:
    """(tokens, supervised tokens) as the quickstart's: prompts of 60 to 200 tokens, answers of 20 to 128."""
    answers = [rng.randint(20, 128) for _ in range(count)]
    return [(rng.randint(60, 200) + answer, answer) for answer in answers]


def any_share(count: int, rng: random.Random) -> list[tuple[int, int]]:
    """Up to 128 tokens, a tenth to nine tenths of them supervised."""
    lengths = [rng.randint(4, 128) for _ in range(count)]
    return [(length, max(1, int(length * rng.uniform(0.1, 0.9)))) for length in lengths]


def long_tailed(count: int, rng: random.Random) -> list[tuple[int, int]]:
    """Most around 50 tokens, some ten times as long; two thirds of the short ones supervised, a third of the long."""
    lengths = [min(500, 4 + int(rng.lognormvariate(3.9, 0.8))) for _ in range(count)]
    return [(length, max(1, length * 2 // 3 if length < 100 else length // 3)) for length in lengths]


def cut_off(count: int, rng: random.Random) -> list[tuple[int, int]]:
    """All cut at the same length."""
    return [(256, rng.randint(1, 255)) for _ in range(count)]


@pytest.mark.parametrize("documents", [chats, any_share, long_tailed, cut_off])
@pytest.mark.parametrize("micro_batch_tokens", [2048, 4096])
@pytest.mark.parametrize(("grad_accum", "ranks"), [(1, 1), (1, 2), (2, 1), (1, 3), (2, 4)])
def test_steps_are_of_like_size(documents: Any, micro_batch_tokens: int, grad_accum: int, ranks: int) -> None:
    for count in (90, 800, 2000):
        lengths, supervised = zip(*documents(count, random.Random(count)), strict=True)
        for epoch in range(2):
            plan = plan_epoch(
                lengths,
                supervised,
                micro_batch_tokens=micro_batch_tokens,
                seed=0,
                epoch=epoch,
                per_step=grad_accum * ranks,
            )
            assert documents_in(plan) == list(range(count))
            tokens = sums(plan, supervised)
            assert max(tokens) <= 1.3 * min(tokens)
            assert max(sums(plan, [1] * count)) <= 1.5 * min(sums(plan, [1] * count))  # where each weighs the same


def test_epochs_mix_documents_anew() -> None:
    """Also where the documents fill a few steps only: who shares a step with whom is not always the same."""
    lengths, supervised = zip(*chats(100, random.Random(0)), strict=True)

    def together(epoch: int) -> set[tuple[int, int]]:
        plan = plan_epoch(lengths, supervised, micro_batch_tokens=2048, seed=0, epoch=epoch)
        packed = [[index for rows in step for row in rows for index in row] for step in plan]
        return {(one, two) for step in packed for one in step for two in step if one < two}

    first, second = together(0), together(1)
    by_chance = len(first) / (100 * 99 / 2)
    assert len(first & second) / len(first) < 2 * by_chance


def test_packing_wastes_little() -> None:
    lengths = random_lengths(2000, 10, 400)
    plan = plan_of(lengths, micro_batch_tokens=4096)
    padded = sum(len(rows) * width(rows, lengths) for step in plan for rows in step)
    assert sum(lengths) / padded > 0.9
    assert len(plan) < 1.2 * sum(lengths) / 4096


def test_order_is_random_over_the_epoch() -> None:
    lengths = random_lengths(2000, 10, 400)
    plan = plan_of(lengths, micro_batch_tokens=1024)
    widths = torch.tensor([width(rows, lengths) for step in plan for rows in step]).double()
    centred = widths - widths.mean()
    assert abs(float((centred[1:] * centred[:-1]).mean() / centred.square().mean())) < 0.2


def test_no_rank_always_has_the_longest_documents() -> None:
    lengths = random_lengths(2000, 10, 400)
    plan = plan_of(lengths, micro_batch_tokens=1024, per_step=4)
    longest = [max(range(4), key=lambda place: width(step[place], lengths) if step[place] else 0) for step in plan]
    assert {longest.count(place) > len(plan) / 8 for place in range(4)} == {True}


def test_a_step_without_enough_documents_has_empty_micro_batches() -> None:
    plan = plan_of([16, 16], micro_batch_tokens=16, per_step=4)
    assert sorted(plan[0]) == [[], [], [[0]], [[1]]]
    assert len(plan) == 1


def test_an_empty_document_is_refused() -> None:
    with pytest.raises(UserError, match="document 1 has no tokens"):
        plan_of([3, 0], micro_batch_tokens=64)


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
    batch = add_features(build_batch(documents(), [[2, 1], [0]]), lambda name, _: by_id[name])
    assert batch.target_lse_BT is not None
    assert batch.target_lse_BT.tolist() == [[-4, -4, -4, -4, -1, -2, -3], [-5, -6, -7, -8, -9, 0, 0]]
