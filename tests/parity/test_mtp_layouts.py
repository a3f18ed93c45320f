"""MTP layers that targets ship: names, order and norms of every family, held against a plain forward pass of it."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor

from spec_train.batch import Batch
from spec_train.errors import UserError
from spec_train.serving.export import export
from spec_train.speculators import load_speculator
from spec_train.speculators.mtp import Mtp, MtpOptions
from spec_train.speculators.mtp_layouts import LAYOUTS, count_layers, served_name
from spec_train.speculators.supervision import supervised_queries
from spec_train.target import TargetModel
from tests.mtp_targets import FAMILIES, GOLDEN_NAMES, HEAD_DIM, HEADS, KV_HEADS, LAYERS, mtp_target
from tests.parity.test_eagle3 import packed_batch
from tests.parity.test_mtp import (
    assert_estimate_equals_decode,
    assert_same_head,
    assert_training_pass_equals_decode,
    fit,
)

EPS = 1e-6


def shipped(family: str, tmp_path: Path) -> tuple[TargetModel, Mtp]:
    target = TargetModel.load(str(mtp_target(family, tmp_path)))
    return target, Mtp.from_recipe(MtpOptions(type="mtp", init="target_head"), target, torch.arange(320), seed=0)


# ---------------------------------------------------------------------- plain forward passes, one per family
def rms(x: Tensor, weight: Tensor, eps: float = EPS) -> Tensor:
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps) * weight


def rotate(x: Tensor, positions: Tensor, theta: float, rotary: int) -> Tensor:
    """[T, heads, d]: the first `rotary` channels turned, neox style."""
    angle = positions[:, None, None] / theta ** (torch.arange(0, rotary, 2) / rotary)
    one, two, rest = x[..., : rotary // 2], x[..., rotary // 2 : rotary], x[..., rotary:]
    return torch.cat([one * angle.cos() - two * angle.sin(), two * angle.cos() + one * angle.sin(), rest], dim=-1)


Cache = list[tuple[Tensor, Tensor]]


def layer(
    y: Tensor, at: Tensor, w: Callable[[str], Tensor | None], cache: Cache, *, centred: bool, theta: float, rotary: int
) -> Tensor:
    """A pre-norm decoder layer on top of `cache`, one token at a time."""
    one = 1.0 if centred else 0.0

    def norm(x: Tensor, name: str) -> Tensor:
        weight = w(name)
        return x if weight is None else rms(x, one + weight)

    def project(x: Tensor, name: str) -> Tensor:
        weight = w(f"{name}.weight")
        assert weight is not None
        return F.linear(x, weight, w(f"{name}.bias"))

    out = []
    for t in range(len(y)):
        x = norm(y[t : t + 1], "input_layernorm.weight")
        q = project(x, "self_attn.q_proj").view(1, HEADS, -1)
        q, gate = torch.split(q, [HEAD_DIM, q.shape[-1] - HEAD_DIM], dim=-1)
        k, v = (project(x, f"self_attn.{name}_proj").view(1, KV_HEADS, HEAD_DIM) for name in "kv")
        q, k = norm(q, "self_attn.q_norm.weight"), norm(k, "self_attn.k_norm.weight")
        q, k = rotate(q, at[t : t + 1], theta, rotary), rotate(k, at[t : t + 1], theta, rotary)
        cache.append((k[0], v[0]))
        keys, values = (torch.stack(part).repeat_interleave(HEADS // KV_HEADS, 1) for part in zip(*cache, strict=True))
        weights = (torch.einsum("hd,thd->ht", q[0], keys) * HEAD_DIM**-0.5).softmax(-1)
        context = torch.einsum("ht,thd->hd", weights, values).reshape(1, -1)
        if gate.shape[-1]:
            context = context * gate.reshape(1, -1).sigmoid()
        x = y[t : t + 1] + project(context, "self_attn.o_proj")
        z = norm(x, "post_attention_layernorm.weight")
        out.append(x + project(F.silu(project(z, "mlp.gate_proj")) * project(z, "mlp.up_proj"), "mlp.down_proj"))
    return torch.cat(out)


def mimo(tensors: dict[str, Tensor], state: Tensor, embedding: Tensor, at: Tensor, cache: Cache) -> Tensor:
    g = {name.removeprefix("model.mtp_layers.0."): value for name, value in tensors.items()}
    embedding = embedding * (at != 0)[:, None]
    both = [rms(state, g["hidden_layernorm.weight"]), rms(embedding, g["token_layernorm.weight"])]
    y = torch.cat(both, -1) @ g["input_proj.weight"].T
    y = layer(y, at, g.get, cache, centred=False, theta=10000.0, rotary=32)
    return rms(y, g["final_layernorm.weight"])


def qwen3_5(tensors: dict[str, Tensor], state: Tensor, embedding: Tensor, at: Tensor, cache: Cache) -> Tensor:
    g = {name.removeprefix("mtp."): value for name, value in tensors.items()}
    both = [rms(embedding, 1 + g["pre_fc_norm_embedding.weight"]), rms(state, 1 + g["pre_fc_norm_hidden.weight"])]
    y = torch.cat(both, -1) @ g["fc.weight"].T
    y = layer(y, at, lambda name: g.get(f"layers.0.{name}"), cache, centred=True, theta=1e5, rotary=16)
    return rms(y, 1 + g["norm.weight"])


def deepseek(tensors: dict[str, Tensor], state: Tensor, embedding: Tensor, at: Tensor, cache: Cache) -> Tensor:
    g = {name.removeprefix("model.layers.4."): value for name, value in tensors.items()}
    embedding = embedding * (at != 0)[:, None]
    y = torch.cat([rms(embedding, g["enorm.weight"]), rms(state, g["hnorm.weight"])], -1) @ g["eh_proj.weight"].T
    y = layer(y, at, g.get, cache, centred=False, theta=10000.0, rotary=32)
    return rms(y, g["shared_head.norm.weight"])


REFERENCE = {"mimo": mimo, "qwen3_5": qwen3_5, "deepseek": deepseek}


@pytest.mark.parametrize("family", FAMILIES)
def test_shipped_head_drafts_as_a_plain_forward_pass_of_its_family(family: str, tmp_path: Path) -> None:
    """Four depths from three positions, on the text's own tokens: concat order, norms, the state that is read first
    and the one that is fed back, against lines written from vLLM's model files (H07, H08)."""
    target, head = shipped(family, tmp_path)
    torch.manual_seed(1)
    ids, depths = torch.randint(3, 300, (16,)), 4
    batch = target.fill_features(packed_batch([(ids.tolist(), 3)], 1), head.feature_spec, torch.float32)
    ours = list(head.unroll(batch, supervised_queries(batch, depths, everywhere=True), depths))
    whole = target.forward(ids[None], torch.arange(16)[None], aux_layer_ids=(LAYERS,))
    assert whole[1] is not None
    state = (whole[1] if family == "mimo" else whole[0])[0]
    tensors = load_file(Path(target.name) / "model.safetensors")
    named = {name: tensors[name] for name in GOLDEN_NAMES[family]}
    embedding = target.embedding.weight[ids]
    for p in (1, 5, 9):
        cache: Cache = []
        at = torch.arange(p + 1)
        out = REFERENCE[family](named, state[: p + 1], embedding[1 : p + 2], at, cache)[-1:]
        for k in range(depths):
            torch.testing.assert_close(ours[k][0, p][None], out, atol=2e-4, rtol=1e-3)
            if k < depths - 1:
                at = torch.tensor([p + 1 + k])
                out = REFERENCE[family](named, out, embedding[p + 2 + k][None], at, cache)


@pytest.mark.parametrize("family", FAMILIES)
def test_import_and_export_give_the_same_tensors_under_the_same_names(family: str, tmp_path: Path) -> None:
    target, head = shipped(family, tmp_path)
    served = head.serving()
    assert served.stitched
    assert sorted(served.tensors) == sorted(GOLDEN_NAMES[family])
    original = load_file(Path(target.name) / "model.safetensors")
    for name, value in served.tensors.items():
        assert torch.equal(value, original[name]), name
    assert served.config == json.loads((Path(target.name) / "config.json").read_text())
    again = Mtp.from_serving(served.config, served.tensors, target)
    assert again.config.stitched
    assert_same_head(head, again, target)
    settings: dict[str, Any] = {"format": "stitched", "target_id": target.name, "num_draft_tokens": 3, "golden": None}
    copy = export(served, tmp_path / "copy", provenance={}, **settings)
    stitched, merged = load_speculator(copy, target), load_file(copy / "model.safetensors")
    assert isinstance(stitched, Mtp)
    assert_same_head(head, stitched, target)
    assert merged.keys() == original.keys()
    assert all(torch.equal(value, original[name]) for name, value in merged.items())


def test_mimo_as_published_loads_without_its_remote_code(tmp_path: Path) -> None:
    """Its config names a type that only the repository's own code knows; the body is Qwen2."""
    path = mtp_target("mimo", tmp_path)
    as_qwen2 = TargetModel.load(str(path))
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps({**config, "model_type": "mimo"}))
    target = TargetModel.load(str(path))
    ids = torch.tensor([[5, 6, 7, 8]])
    assert torch.equal(target.model(ids).logits, as_qwen2.model(ids).logits)
    options = MtpOptions(type="mtp", init="target_head")
    assert Mtp.from_recipe(options, target, torch.arange(target.vocab_size), 0).config.reads_pre_norm


@pytest.mark.parametrize("family", FAMILIES)
def test_training_pass_equals_decode_and_every_tensor_changes(family: str, tmp_path: Path) -> None:
    target, head = shipped(family, tmp_path)
    before = {name: value.clone() for name, value in head.serving().tensors.items()}
    assert_training_pass_equals_decode(target, head)
    fit(target, head, steps=40)
    for name, value in head.serving().tensors.items():
        assert not torch.equal(value, before[name]), f"{name} was not trained"
    assert_estimate_equals_decode(target, head)


@pytest.mark.parametrize("family", FAMILIES)
def test_every_switch_of_the_table_changes_the_drafts(family: str, tmp_path: Path) -> None:
    """A wrong entry could not go unnoticed: order of the halves, and for position 0 whether the embedding is read."""
    target, head = shipped(family, tmp_path)
    batch: Batch = target.fill_features(packed_batch([(list(range(5, 20)), 3)], 1), head.feature_spec, torch.float32)
    queries = supervised_queries(batch, 1, everywhere=True)
    right = next(iter(head.unroll(batch, queries, 1)))
    for switch in ("embedding_first", "zero_first"):
        turned = {**vars(LAYOUTS[head.config.layout])}
        turned[switch] = not turned[switch]
        other = Mtp.from_recipe(MtpOptions(type="mtp", init="target_head"), target, torch.arange(320), seed=0)
        other.layout = type(head.layout)(**turned)
        assert (next(iter(other.unroll(batch, queries, 1))) - right).abs().max() > 1e-2, switch


def test_names_of_the_table() -> None:
    assert served_name(LAYOUTS["deepseek"], "input_proj.weight", 61) == "model.layers.61.eh_proj.weight"
    assert served_name(LAYOUTS["deepseek"], "mlp.up_proj.weight", 61) == "model.layers.61.mlp.up_proj.weight"
    assert served_name(LAYOUTS["qwen3_5"], "self_attn.q_norm.weight", 32) == "mtp.layers.0.self_attn.q_norm.weight"
    assert served_name(LAYOUTS["mimo"], "self_attn.q_proj.bias", 36) == "model.mtp_layers.0.self_attn.q_proj.bias"


@pytest.mark.parametrize("family", FAMILIES)
def test_a_lost_head_counts_as_none_and_is_reported(family: str, tmp_path: Path) -> None:
    """A fine-tune through Transformers drops these tensors and keeps the config that declares them (X08)."""
    folder = mtp_target(family, tmp_path)
    tensors = load_file(folder / "model.safetensors")
    assert count_layers(tensors, LAYERS) == 1
    for name in [name for name in tensors if name in GOLDEN_NAMES[family]]:
        del tensors[name]
    tensors = {name: value for name, value in tensors.items() if not name.startswith("model.layers.4.")}
    assert count_layers(tensors, LAYERS) == 0
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    target = TargetModel.load(str(folder))
    with pytest.raises(UserError, match="holds no MTP layer"):
        Mtp.from_recipe(MtpOptions(type="mtp", init="target_head"), target, torch.arange(320), seed=0)


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        ("model.layers.4.self_attn.kv_a_proj_with_mqa.weight", "latent attention"),
        ("model.layers.4.mlp.experts.0.up_proj.weight", "mixture of experts"),
        ("model.layers.5.eh_proj.weight", "2 MTP layers"),
        ("model.layers.4.mlp.up_proj.weight_scale_inv", "unknown tensors"),
    ],
)
def test_heads_that_we_would_run_wrongly_are_refused(extra: str, message: str, tmp_path: Path) -> None:
    folder = mtp_target("deepseek", tmp_path)
    tensors = load_file(folder / "model.safetensors")
    save_file({**tensors, extra: torch.zeros(2)}, folder / "model.safetensors", metadata={"format": "pt"})
    target = TargetModel.load(str(folder))
    with pytest.raises(UserError, match=message):
        Mtp.from_recipe(MtpOptions(type="mtp", init="target_head"), target, torch.arange(320), seed=0)


def test_a_hub_id_is_refused(tmp_path: Path) -> None:
    target = TargetModel.load(str(mtp_target("mimo", tmp_path)))
    target.name = "someone/model"
    with pytest.raises(UserError, match="give the local folder"):
        Mtp.from_recipe(MtpOptions(type="mtp", init="target_head"), target, torch.arange(320), seed=0)
