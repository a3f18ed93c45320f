"""Tiny targets that ship an MTP layer, each in the layout of its family. Nothing here comes from our table."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3_5ForCausalLM,
    Qwen3_5TextConfig,
)

from tests.tiny import tiny_tokenizer

FAMILIES = ("mimo", "qwen3_5", "deepseek")
HIDDEN, INNER, HEADS, KV_HEADS, HEAD_DIM, VOCAB, LAYERS = 64, 96, 2, 1, 32, 320, 4

LAYER = [
    "input_layernorm.weight",
    "mlp.down_proj.weight",
    "mlp.gate_proj.weight",
    "mlp.up_proj.weight",
    "post_attention_layernorm.weight",
    "self_attn.k_proj.weight",
    "self_attn.o_proj.weight",
    "self_attn.q_proj.weight",
    "self_attn.v_proj.weight",
]
# Written out from the published checkpoints; of DeepSeek's, whose attention is latent, the layer is a dense one here.
GOLDEN_NAMES = {
    "mimo": [
        *(f"model.mtp_layers.0.{name}" for name in LAYER),
        *(f"model.mtp_layers.0.self_attn.{which}_proj.bias" for which in "qkv"),
        "model.mtp_layers.0.final_layernorm.weight",
        "model.mtp_layers.0.hidden_layernorm.weight",
        "model.mtp_layers.0.input_proj.weight",
        "model.mtp_layers.0.token_layernorm.weight",
    ],
    "qwen3_5": [
        "mtp.fc.weight",
        "mtp.norm.weight",
        "mtp.pre_fc_norm_embedding.weight",
        "mtp.pre_fc_norm_hidden.weight",
        *(f"mtp.layers.0.{name}" for name in LAYER),
        "mtp.layers.0.self_attn.k_norm.weight",
        "mtp.layers.0.self_attn.q_norm.weight",
    ],
    "deepseek": [
        "model.layers.4.eh_proj.weight",
        "model.layers.4.enorm.weight",
        "model.layers.4.hnorm.weight",
        "model.layers.4.shared_head.norm.weight",
        *(f"model.layers.4.{name}" for name in LAYER),
    ],
}


def mtp_target(family: str, tmp_path: Path, **overrides: Any) -> Path:
    """Write a random target of `family` with its MTP layer and a tokenizer; `overrides` replace config entries."""
    settings: dict[str, Any] = {
        "vocab_size": VOCAB, "hidden_size": HIDDEN, "intermediate_size": INNER, "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS, "num_key_value_heads": KV_HEADS, "head_dim": HEAD_DIM,
        "max_position_embeddings": 512, "initializer_range": 0.2, "tie_word_embeddings": False,
        "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0, "dtype": "float32", **overrides,
    }  # fmt: skip
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = _model(family, settings)
        for name, value in model.named_parameters():
            if value.ndim == 1:
                centre = 1.0 if "norm" in name and family != "qwen3_5" else 0.0
                value.data = centre + 0.3 * torch.randn_like(value)
        head = {name: _random(name, family) for name in GOLDEN_NAMES[family]}
    folder = tmp_path / family
    model.save_pretrained(folder)
    tensors = {**load_file(folder / "model.safetensors"), **head}
    if family == "deepseek":
        tensors["model.layers.4.embed_tokens.weight"] = tensors["model.embed_tokens.weight"].clone()
        tensors["model.layers.4.shared_head.head.weight"] = tensors["lm_head.weight"].clone()
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    config["mtp_num_hidden_layers" if family == "qwen3_5" else "num_nextn_predict_layers"] = 1
    if family == "mimo":
        config["architectures"] = ["MiMoForCausalLM"]
    (folder / "config.json").write_text(json.dumps(config))
    tiny_tokenizer().save_pretrained(folder)
    return folder


def _model(family: str, settings: dict[str, Any]) -> PreTrainedModel:
    if family == "mimo":
        without = {key: value for key, value in settings.items() if key != "head_dim"}
        return Qwen2ForCausalLM(Qwen2Config(**without))
    if family == "deepseek":
        return LlamaForCausalLM(LlamaConfig(**settings))
    rope = {"rope_type": "default", "rope_theta": 1e5, "partial_rotary_factor": 0.5, "mrope_section": [3, 3, 2]}
    linear = {"linear_num_key_heads": 2, "linear_num_value_heads": 2, "linear_key_head_dim": 32}
    full = ["full_attention"] * settings["num_hidden_layers"]
    config = {"linear_value_head_dim": 32, "rope_parameters": rope, "layer_types": full, **linear, **settings}
    return Qwen3_5ForCausalLM(Qwen3_5TextConfig(**config))


def _random(name: str, family: str) -> Tensor:
    """A tensor of the MTP layer, its shape from its name."""
    if "norm" in name:
        size = HEAD_DIM if name.endswith(("q_norm.weight", "k_norm.weight")) else HIDDEN
        return torch.full((size,), float(family != "qwen3_5")) + 0.3 * torch.randn(size)
    queries = HEADS * HEAD_DIM * (2 if family == "qwen3_5" else 1)
    rows = {"q_proj": queries, "k_proj": KV_HEADS * HEAD_DIM, "v_proj": KV_HEADS * HEAD_DIM, "o_proj": HIDDEN}
    rows.update({"gate_proj": INNER, "up_proj": INNER, "down_proj": HIDDEN, "input_proj": HIDDEN})
    rows.update({"fc": HIDDEN, "eh_proj": HIDDEN})
    columns = {"o_proj": HEADS * HEAD_DIM, "down_proj": INNER, "input_proj": 2 * HIDDEN, "fc": 2 * HIDDEN}
    columns["eh_proj"] = 2 * HIDDEN
    module = name.split(".")[-2]
    if name.endswith("bias"):
        return 0.3 * torch.randn(rows[module])
    width = columns.get(module, HIDDEN)
    return torch.randn(rows[module], width).div(width**0.5)
