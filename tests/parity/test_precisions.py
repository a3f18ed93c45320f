"""Every method in every mixture of precisions: two steps of training with estimate and decode, and target probabilities
that belong to the states that are multiplied."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch

from spec_train.batch import Batch
from spec_train.data.batches import add_features, build_batch
from spec_train.data.documents import Document
from spec_train.data.features import DocumentFeatures
from spec_train.decoding.engine import plain_decode
from spec_train.decoding.sampling import Sampling
from spec_train.evaluation.validation_decode import ValidationDecode
from spec_train.recipe import OptimSection, TrainSection
from spec_train.speculators import speculator_class
from spec_train.speculators.base import Speculator
from spec_train.speculators.distillation import compute_dtype, target_distributions
from spec_train.speculators.draft_lm import DraftLM
from spec_train.speculators.supervision import supervised_queries
from spec_train.target import TargetModel
from spec_train.training.trainer import train
from tests.tiny import tiny_model

METHODS: dict[str, dict[str, Any]] = {
    "eagle3": {"type": "eagle3", "ttt_steps": 2, "aux_layer_ids": [1, 2, 4]},
    "eagle1": {"type": "eagle1", "ttt_steps": 2},
    "peagle": {"type": "peagle", "aux_layer_ids": [1, 2, 4]},
    "mtp": {"type": "mtp", "ttt_steps": 2},
    "mlp": {"type": "mlp", "num_heads": 2},
    "medusa": {"type": "medusa", "num_heads": 2},
    "medusa, shared": {"type": "medusa", "num_heads": 2, "shared_head": True},
    "draft_lm, borrowed": {"type": "draft_lm", "start_layers": 2},
    "draft_lm, own": {"type": "draft_lm", "start_layers": 2, "train_embeddings": True},
    "draft_lm, low rank": {"type": "draft_lm", "start_layers": 2, "lora": {"rank": 4, "alpha": 8.0}},
    "draft_lm, on policy": {"type": "draft_lm", "start_layers": 2, "on_policy_fraction": 0.9, "temperature": 2.0},
    "pard, borrowed": {"type": "pard", "start_layers": 2},
    "pard, own": {"type": "pard", "start_layers": 2, "train_embeddings": True},
}
TARGET_DTYPES = ("float32", "bfloat16")
PRECISIONS = ("fp32", "bf16")
MODES = ("online", "offline")
STATES = ("float32", "bfloat16")
MIXTURES = list(itertools.product(TARGET_DTYPES, PRECISIONS, MODES, STATES))


@pytest.fixture(scope="module")
def targets(tmp_path_factory: pytest.TempPathFactory) -> dict[str, TargetModel]:
    folder = str(tiny_model("llama", tmp_path_factory.mktemp("target")))
    return {dtype: TargetModel.load(folder, dtype=getattr(torch, dtype)) for dtype in TARGET_DTYPES}


@pytest.fixture(scope="module")
def documents(targets: dict[str, TargetModel]) -> list[Document]:
    """The float32 target's own answers."""
    prompts = [[5 + (7 * n + 3 * t) % 300 for t in range(4 + n)] for n in range(8)]
    decode = plain_decode(targets["float32"], prompts, sampling=Sampling(), max_new_tokens=16, batch_size=8)
    return [
        Document(r.id, r.prompt_ids + r.output_ids, [(len(r.prompt_ids), len(r.prompt_ids) + len(r.output_ids))])
        for r in decode.requests
    ]


def fresh(target: TargetModel, options: dict[str, Any], ids: torch.Tensor) -> Speculator:
    cls = speculator_class(options["type"])
    return cls.from_recipe(cls.options(**options), target, ids, seed=0)


def provider(
    target: TargetModel, speculator: Speculator, documents: list[Document], mode: str, states: str
) -> Callable[[Batch], Batch]:
    """As the recipe's features.mode and features.dtype have it."""
    dtype = getattr(torch, states)
    if mode == "online":
        return lambda batch: target.fill_features(batch, speculator.feature_spec, dtype)
    stored = {}
    for document in documents:
        filled = target.fill_features(build_batch([document], [[0]]), speculator.feature_spec, dtype)
        parts = [
            None if part is None else part[0, :-1]
            for part in (filled.aux_hidden_BTAH, filled.last_hidden_BTH, filled.target_lse_BT)
        ]
        stored[document.id] = DocumentFeatures(parts[0], parts[1], parts[2], filled.logits_dtype)
    return lambda batch: add_features(batch, lambda document_id, _ids: stored[document_id])


def two_steps(
    target: TargetModel, documents: list[Document], options: dict[str, Any], mixture: tuple[str, ...], folder: Path
) -> None:
    _, precision, mode, states = mixture
    speculator = fresh(target, options, torch.arange(0, 320, 2))
    train(
        speculator,
        documents[2:],
        documents[:2],
        provider(target, speculator, documents, mode, states),
        optim=OptimSection(lr=1e-3),
        train=TrainSection(micro_batch_tokens=64, precision=precision, save_every=2, eval_every=1, max_steps=2),
        seed=3,
        device="cpu",
        num_draft_tokens=(2,),
        output_dir=folder,
        speculator_config={"type": options["type"], "config": asdict(speculator.config)},
        run_config={},
        decode=ValidationDecode(target, documents[:2], 2, 8, 2, ()),
    )
    lines = [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]
    scores = [line for line in lines if "renewal@2" in line]
    assert [line["step"] for line in scores] == [1, 2]
    assert all(line["decode@2"] >= 1.0 for line in scores)
    if target.dtype == torch.float32:
        assert all(line["decode_text_equal"] == 1.0 for line in scores)


@pytest.mark.parametrize("options", METHODS.values(), ids=METHODS)
def test_methods_train_in_mixed_precision(
    targets: dict[str, TargetModel], documents: list[Document], options: dict[str, Any], tmp_path: Path
) -> None:
    """A few of the mixtures, other ones for every method; all pairs of settings are among them."""
    place = list(METHODS.values()).index(options)
    for number in range(2):
        mixture = MIXTURES[(5 * place + 11 * number) % len(MIXTURES)]
        two_steps(targets[mixture[0]], documents, options, mixture, tmp_path / str(number))


@pytest.mark.slow
@pytest.mark.parametrize("mixture", MIXTURES, ids=" ".join)
@pytest.mark.parametrize("options", METHODS.values(), ids=METHODS)
def test_methods_train_in_every_mixture(
    targets: dict[str, TargetModel],
    documents: list[Document],
    options: dict[str, Any],
    mixture: tuple[str, ...],
    tmp_path: Path,
) -> None:
    two_steps(targets[mixture[0]], documents, options, mixture, tmp_path)


@pytest.mark.parametrize("mixture", MIXTURES, ids=" ".join)
def test_target_probabilities_sum_to_one(
    targets: dict[str, TargetModel], documents: list[Document], mixture: tuple[str, ...]
) -> None:
    """Over the whole vocabulary, and over a part of it what the whole gives there."""
    dtype, precision, mode, states = mixture
    target = targets[dtype]
    speculator = fresh(target, METHODS["eagle3"], torch.arange(target.vocab_size))
    batch = provider(target, speculator, documents, mode, states)(build_batch(documents, [[0, 1], [2, 3]]))
    queries = supervised_queries(batch, 2)
    assert batch.last_hidden_BTH is not None and batch.target_lse_BT is not None
    with torch.autocast("cpu", torch.bfloat16, enabled=precision == "bf16"):
        whole, _ = target_distributions(batch, queries, target.lm_head.weight, target)
        part, _ = target_distributions(batch, queries, target.lm_head.weight[:160], target)
        draft = fresh(target, METHODS["draft_lm, borrowed"], torch.arange(target.vocab_size))
        assert isinstance(draft, DraftLM)
        chosen = batch.target_lse_BT != 0
        own = draft.target_probs(batch, chosen, compute_dtype(torch.device("cpu")))
    tolerance = 1e-5 if precision == "fp32" else 4e-3  # the probabilities themselves are rounded
    for probs in (whole, own):
        torch.testing.assert_close(probs.float().sum(-1), torch.ones(len(probs)), rtol=0, atol=tolerance)
    torch.testing.assert_close(part, whole[:, :160], rtol=1e-2, atol=1e-3)
