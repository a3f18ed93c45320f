"""Medusa: training pass, decoder, estimate and the files of several tools are one and the same thing."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor

from spec_train.errors import UserError
from spec_train.speculators import load_speculator
from spec_train.speculators.medusa import Medusa, MedusaOptions, heads_from_serving
from spec_train.target import TargetModel
from tests import multi_head as shared
from tests.tiny import tiny_model

SOME_IDS = torch.arange(0, 320, 2)
KINDS: list[dict[str, Any]] = [{}, {"num_layers": 2, "bias": False, "num_heads": 4}, {"shared_head": True}]


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> TargetModel:
    return TargetModel.load(str(tiny_model("llama", tmp_path_factory.mktemp("llama"))))


# ------------------------------------------------------------------ files of other tools
def legacy(num_layers: int = 2, heads: int = 3) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """A random checkpoint as FasterDecoding writes it: lists of residual layers (with bias), then the output head."""
    generator = torch.Generator().manual_seed(0)
    tensors = {}
    for h in range(heads):
        for layer in range(num_layers):
            tensors[f"{h}.{layer}.linear.weight"] = torch.randn(64, 64, generator=generator) / 8
            tensors[f"{h}.{layer}.linear.bias"] = torch.randn(64, generator=generator)
        tensors[f"{h}.{num_layers}.weight"] = torch.randn(320, 64, generator=generator) / 8
    config = {"medusa_num_heads": heads, "medusa_num_layers": num_layers, "base_model_name_or_path": "x/y"}
    return config, tensors


def reference(tensors: dict[str, Tensor], num_layers: int, head: int, hidden: Tensor) -> Tensor:
    """The logits of one head in FasterDecoding's names."""
    for layer in range(num_layers):
        name = f"{head}.{layer}.linear"
        hidden = hidden + F.silu(hidden @ tensors[f"{name}.weight"].T + tensors[f"{name}.bias"])
    return hidden @ tensors[f"{head}.{num_layers}.weight"].T


@pytest.mark.parametrize("prefix", ["", "medusa_heads."])
@pytest.mark.parametrize("num_layers", [1, 2])
def test_legacy_files_round_trip(target: TargetModel, prefix: str, num_layers: int) -> None:
    """FasterDecoding's names in, vLLM's names out, the same tensors, and again the same from those (X06)."""
    config, tensors = legacy(num_layers)
    given = {f"{prefix}{name}": value for name, value in tensors.items()}
    served = Medusa.from_serving(config, given, target).serving()
    expected = {}
    for name, value in tensors.items():
        head, layer, *leaf = name.split(".")
        linear = leaf[0] == "linear"
        expected[f"blocks.{head}.layers.{layer}.{leaf[1]}" if linear else f"lm_heads.{head}.weight"] = value
    assert served.tensors.keys() == expected.keys()
    assert all(torch.equal(served.tensors[name], value) for name, value in expected.items())
    assert served.config == {
        "architectures": ["MedusaModel"],
        "model_type": "medusa",
        "hidden_size": 64,
        "vocab_size": 320,
        "truncated_vocab_size": 320,
        "num_heads": 3,
        "num_hidden_layers": num_layers,
        "medusa_fc_bias": True,
        "original_lm_head": False,
    }
    again = Medusa.from_serving(served.config, served.tensors, target).serving()
    assert again.config == served.config
    assert all(torch.equal(again.tensors[name], value) for name, value in expected.items())
    hidden = torch.randn(5, 64)
    drafts = heads_from_serving(config, given).draft(hidden, torch.zeros(5, dtype=torch.long), 3)
    plain = torch.stack([reference(tensors, num_layers, h, hidden).argmax(-1) for h in range(3)], 1)
    assert torch.equal(drafts, plain)


def test_files_that_do_not_fit_are_refused(target: TargetModel) -> None:
    config, tensors = legacy(1)
    cases: list[tuple[dict[str, Any], dict[str, Tensor], str]] = [
        ({}, {"fc.weight": torch.ones(2)}, "unknown tensors"),
        ({"medusa_num_heads": 4}, {}, "missing tensors"),
        ({"medusa_num_layers": 2}, {}, "needs a tensor lm_heads.0.weight"),
        ({"hidden_size": 32}, {}, "has shape"),
        ({}, {"1.1.weight": torch.ones(10, 64)}, "has shape"),
        ({"medusa_num_heads": None}, {}, "num_heads in config.json"),
    ]
    for changes, extra, message in cases:
        with pytest.raises(UserError, match=message) as error:
            Medusa.from_serving({**config, **changes}, {**tensors, **extra}, target)
        assert "\n" not in str(error.value)


# ------------------------------------------------------------------ training, decoding
@pytest.mark.parametrize("options", KINDS, ids=str)
def test_training_pass_equals_step_by_step_decode(target: TargetModel, options: dict[str, Any]) -> None:
    speculator = shared.fresh(Medusa, target, **options)
    torch.manual_seed(2)
    with torch.no_grad():  # fresh residual layers are zero
        for block in speculator.heads.blocks.parameters():
            block.normal_(std=0.2)
    shared.assert_pass_equals_steps(target, speculator)


def test_fresh_heads_are_the_target_itself(target: TargetModel) -> None:
    """Zero residual layers and the target's rows: every head gives the target's own logits of the next token."""
    speculator = Medusa.from_recipe(MedusaOptions(type="medusa"), target, SOME_IDS, seed=0)
    hidden = torch.randn(4, 64)
    state = speculator.heads.start(hidden)
    for k in range(3):
        state = speculator.heads.step(state, torch.zeros(4, dtype=torch.long), k)
        logits = state[0] @ speculator.heads.output_head(k).T
        assert torch.allclose(logits, target.logits(hidden)[:, SOME_IDS], atol=1e-5)


@pytest.mark.parametrize("options", KINDS, ids=str)
def test_every_head_learns(target: TargetModel, options: dict[str, Any]) -> None:
    shared.assert_supervision(shared.fresh(Medusa, target, **options), target)


def test_each_head_learns_its_own_offset(target: TargetModel) -> None:
    """Head k overfits the token k+2 after its state, not a neighbour's (N05)."""
    speculator = shared.fresh(Medusa, target, num_heads=4, loss="ce", step_decay=1.0)
    ids = [3 + (7 * t * t) % 311 for t in range(24)]
    batch = shared.packed_batch([(ids, 4)], 1)
    batch = target.fill_features(batch, speculator.feature_spec, torch.float32)
    shared.fit(speculator, batch, steps=100)
    assert batch.last_hidden_BTH is not None
    drafts = speculator.heads.draft(batch.last_hidden_BTH[0], torch.tensor(ids), 4)
    for p in range(2, 18):
        assert drafts[p].tolist() == ids[p + 2 : p + 6]


@pytest.mark.parametrize("options", KINDS, ids=str)
def test_loss_equals_a_plain_loop(target: TargetModel, options: dict[str, Any]) -> None:
    shared.assert_loss_equals_plain_loss(shared.fresh(Medusa, target, SOME_IDS, **options), target)


@pytest.mark.parametrize("loss", ["kl", "ce", "lk"])
def test_estimate_equals_decode(target: TargetModel, loss: str) -> None:
    speculator = shared.fresh(Medusa, target, loss=loss)
    shared.fit(speculator, shared.answers(target), steps=40)
    shared.assert_estimate_equals_decode(target, speculator)


@pytest.mark.parametrize("shared_head", [False, True])
def test_a_reduced_vocabulary(target: TargetModel, shared_head: bool) -> None:
    """The estimate still equals the decode; the files carry absolute ids, and give the same drafts again (V02)."""
    speculator = shared.fresh(Medusa, target, SOME_IDS, shared_head=shared_head)
    shared.fit(speculator, shared.answers(target), steps=40)
    shared.assert_estimate_equals_decode(target, speculator)
    served = speculator.serving()
    assert torch.equal(served.tensors["token_map"], SOME_IDS)
    assert served.config["truncated_vocab_size"] == 160
    assert served.tensors["lm_heads.0.weight"].shape == (160, 64)
    again = Medusa.from_serving(served.config, served.tensors, target)
    text, cycles = shared.decode(target, again, 3)
    assert (text, cycles) == shared.decode(target, speculator, 3)
    assert {token for cycle in cycles for token in cycle.drafts} <= set(SOME_IDS.tolist())


def test_one_sample_overfit_and_corruption(target: TargetModel) -> None:
    """Heads overfitted to one prompt are accepted almost whole; corrupted weights change speed, never text (E05)."""
    prompts = shared.PROMPTS[:1]
    speculator = shared.fresh(Medusa, target, step_decay=1.0)
    batch = shared.answers(target, prompts)
    shared.fit(speculator, batch, steps=200)
    text, cycles = shared.decode(target, speculator, 3, prompts)
    assert shared.acceptance_length(cycles) >= 3.9
    hits = torch.cat([response.survival_MK for response in speculator.draft_hits(batch, 1)])
    assert float(hits.float().mean()) >= 0.98
    with torch.no_grad():
        speculator.heads.lm_heads[0].weight.mul_(-1)
    corrupted, cycles = shared.decode(target, speculator, 3, prompts)
    assert corrupted == text
    assert shared.acceptance_length(cycles) < 2.9


# ------------------------------------------------------------------ checkpoints
def test_resumed_training_is_the_same(target: TargetModel, tmp_path: Path) -> None:
    whole = shared.train_checkpoint(shared.fresh(Medusa, target), target, tmp_path / "whole", 4)
    shared.train_checkpoint(shared.fresh(Medusa, target), target, tmp_path / "resumed", 2)
    resumed = shared.train_checkpoint(shared.fresh(Medusa, target), target, tmp_path / "resumed", 4)
    one, two = load_file(whole / "model.safetensors"), load_file(resumed / "model.safetensors")
    assert one.keys() == two.keys()
    assert all(torch.equal(value, two[name]) for name, value in one.items())
    loaded = load_speculator(whole, target)
    assert all(torch.equal(value, one[name]) for name, value in loaded.state_dict().items())
