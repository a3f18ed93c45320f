"""Documents that share a row do not see each other: EAGLE-3 losses, gradients and estimates ignore packing."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from spec_train.batch import Batch
from spec_train.data.batches import build_batch
from spec_train.data.documents import Document
from spec_train.recipe import OptimSection, TrainSection
from spec_train.speculators.eagle3 import Eagle3, Eagle3Options, eagle3_config
from spec_train.target import TargetModel
from spec_train.training.checkpoint import latest_checkpoint, load_weights
from spec_train.training.trainer import train
from tests.tiny import tiny_model

DOCUMENTS = [
    Document("a", [(5 * t + 2) % 300 for t in range(23)], [(9, 23)]),
    Document("b", [(7 * t + 5) % 300 for t in range(17)], [(4, 9), (13, 17)]),
    Document("c", [(3 * t + 1) % 300 for t in range(9)], [(8, 9)]),
    Document("d", [(11 * t + 3) % 300 for t in range(31)], [(2, 30)]),
]


@pytest.fixture(scope="module", params=["llama", "mistral"])
def target(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> TargetModel:
    return TargetModel.load(str(tiny_model(request.param, tmp_path_factory.mktemp(request.param))))


def new_head(target: TargetModel, draft_vocab: int | None = 200, **changes: Any) -> Eagle3:
    ids = torch.arange(target.vocab_size if draft_vocab is None else draft_vocab)
    section = Eagle3Options(type="eagle3", aux_layer_ids=[1, 2], ttt_steps=3, **changes)
    return Eagle3.from_target(eagle3_config(section, target, len(ids)), target, ids, "target_layer", 0)


def filled(target: TargetModel, head: Eagle3, rows: list[list[int]], documents: list[Document] = DOCUMENTS) -> Batch:
    return target.fill_features(build_batch(documents, rows), head.feature_spec, torch.float32)


def loss_and_gradients(head: Eagle3, batches: list[Batch], normalizer: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    head.zero_grad()
    total = torch.zeros(())
    for batch in batches:
        loss = head(batch, normalizer)[0]
        loss.backward()
        total += loss.detach()
    gradients = {name: value.grad for name, value in head.named_parameters() if value.grad is not None}
    return total, {name: value.clone() for name, value in gradients.items()}


@pytest.mark.parametrize("changes", [{}, {"num_layers": 2}, {"loss": "lk", "norm_before_fc": True}], ids=str)
def test_packed_equals_separate(target: TargetModel, changes: dict[str, Any]) -> None:
    head = new_head(target, **changes)
    packed = filled(target, head, [[0, 1], [2, 3]])
    alone = [filled(target, head, [[index]]) for index in range(4)]
    normalizer = head.supervised_counts(packed)
    torch.testing.assert_close(normalizer, torch.stack([head.supervised_counts(batch) for batch in alone]).sum(0))
    assert normalizer.min() > 0
    one, one_gradients = loss_and_gradients(head, [packed], normalizer)
    four, four_gradients = loss_and_gradients(head, alone, normalizer)
    torch.testing.assert_close(one, four, rtol=0, atol=1e-5)
    assert one_gradients.keys() == four_gradients.keys() == dict(head.named_parameters()).keys()
    for name, value in one_gradients.items():
        assert value.abs().max() > 0, name
        torch.testing.assert_close(value, four_gradients[name], rtol=0, atol=1e-5)


def test_another_first_document_leaves_the_second_alone(target: TargetModel) -> None:
    head = new_head(target)
    silent = Document("a", DOCUMENTS[0].input_ids, [])
    other = Document("a", [(token + 91) % 300 for token in silent.input_ids], [])
    documents = [[first, DOCUMENTS[1]] for first in (silent, other)]
    batches = [filled(target, head, [[0, 1]], pair) for pair in documents]
    normalizer = head.supervised_counts(batches[0])
    assert torch.equal(normalizer, head.supervised_counts(batches[1]))
    (one, one_gradients), (two, two_gradients) = (loss_and_gradients(head, [b], normalizer) for b in batches)
    assert torch.equal(one, two)
    for name, value in one_gradients.items():
        torch.testing.assert_close(value, two_gradients[name], rtol=0, atol=1e-7)
    hits = [head.draft_hits(batch, 3) for batch in batches]
    assert [hit.document_id for hit in hits[0]] == ["b", "b"]
    assert all(torch.equal(a.survival_MK, b.survival_MK) for a, b in zip(*hits, strict=True))


def test_work_of_weight_zero_touches_every_parameter_with_zero(target: TargetModel) -> None:
    head = new_head(target)
    batch = filled(target, head, [])
    counts = head.supervised_counts(batch)
    assert counts.tolist() == [0, 0, 0]
    loss, gradients = loss_and_gradients(head, [batch], torch.ones_like(counts))
    assert loss == 0
    assert gradients.keys() == dict(head.named_parameters()).keys()
    assert all(not value.any() for value in gradients.values())
    assert head.draft_hits(batch, 3) == []


def run(target: TargetModel, head: Eagle3, output_dir: Path, documents: list[Document], **changes: Any) -> Any:
    dtype = torch.bfloat16 if changes.pop("half", False) else torch.float32
    settings = {"epochs": 6, "micro_batch_tokens": 64, "precision": "fp32", "save_every": 4, "log_every": 1, **changes}
    return train(
        head,
        documents,
        documents[:2],
        lambda batch: target.fill_features(batch, head.feature_spec, dtype),
        optim=OptimSection(lr=3e-3),
        train=TrainSection(**settings),
        seed=0,
        device="cpu",
        num_draft_tokens=[2, 4],
        output_dir=output_dir,
        speculator_config={"type": "eagle3"},
        run_config={},
    )


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_eagle3_trains_and_reloads(target: TargetModel, tmp_path: Path, precision: str) -> None:
    head = new_head(target, gradient_checkpointing=True)
    before = {name: value.clone() for name, value in head.named_parameters()}
    result = run(target, head, tmp_path, DOCUMENTS, precision=precision, half=precision == "bf16")
    assert result.best_value is not None
    assert all(not torch.equal(before[name], value) for name, value in head.named_parameters())
    lines = [json.loads(line) for line in (tmp_path / "log.jsonl").read_text().splitlines()]
    for line in lines:
        if "loss" in line:  # the whole, and its parts by depth
            by_depth = sum(0.8**k * line[f"depth_loss_{k}"] for k in range(3))
            assert line["loss"] == pytest.approx(by_depth, rel=1e-5 if precision == "fp32" else 1e-2)
            assert {"hit_0", "hit_1", "hit_2", "alpha_0", "grad_norm", "learning_rate"} <= line.keys()
    again = new_head(target)
    latest = latest_checkpoint(tmp_path / "checkpoints")
    assert latest is not None
    load_weights(again, latest)
    assert all(torch.equal(value, again.state_dict()[name]) for name, value in head.state_dict().items())
    assert not {"embedding_VH", "target_head_DH"} & head.state_dict().keys()
