"""Random EAGLE-3 checkpoints, written by hand from the contract: nothing here comes from our exporter."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from spec_train.speculators.base import ServingCheckpoint

HIDDEN, INTERMEDIATE, HEADS, KV_HEADS, HEAD_DIM, VOCAB = 64, 128, 4, 2, 32, 320


def random_eagle3(
    *, draft_vocab: int = 96, kind: str = "llama", aux_ids: tuple[int, ...] = (1, 2, 4), seed: int = 0, **flags: Any
) -> ServingCheckpoint:
    """A head for the tiny models (hidden 64, 4 heads of 32, vocabulary 320). `flags`: norm_before_fc, fc_norm, ..."""
    generator = torch.Generator().manual_seed(seed)

    def weight(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator) * shape[-1] ** -0.5

    def norm(size: int) -> Tensor:
        return 1 + 0.3 * torch.randn(size, generator=generator)

    first = "midlayer."
    tensors = {
        "fc.weight": weight(HIDDEN, len(aux_ids) * HIDDEN),
        f"{first}input_layernorm.weight": norm(HIDDEN),
        f"{first}hidden_norm.weight": norm(HIDDEN),
        f"{first}post_attention_layernorm.weight": norm(HIDDEN),
        f"{first}self_attn.q_proj.weight": weight(HEADS * HEAD_DIM, 2 * HIDDEN),
        f"{first}self_attn.k_proj.weight": weight(KV_HEADS * HEAD_DIM, 2 * HIDDEN),
        f"{first}self_attn.v_proj.weight": weight(KV_HEADS * HEAD_DIM, 2 * HIDDEN),
        f"{first}self_attn.o_proj.weight": weight(HIDDEN, HEADS * HEAD_DIM),
        f"{first}mlp.gate_proj.weight": weight(INTERMEDIATE, HIDDEN),
        f"{first}mlp.up_proj.weight": weight(INTERMEDIATE, HIDDEN),
        f"{first}mlp.down_proj.weight": weight(HIDDEN, INTERMEDIATE),
        "norm.weight": norm(HIDDEN),
        "lm_head.weight": weight(draft_vocab, HIDDEN),
    }
    if kind == "qwen3":
        tensors[f"{first}self_attn.q_norm.weight"] = norm(HEAD_DIM)
        tensors[f"{first}self_attn.k_norm.weight"] = norm(HEAD_DIM)
    if flags.get("norm_before_fc"):
        tensors["input_norm.weight"] = norm(len(aux_ids) * HIDDEN)
    if flags.get("fc_norm"):
        tensors.update({f"fc_norm.{j}.weight": norm(HIDDEN) for j in range(len(aux_ids))})
    if draft_vocab != VOCAB:
        kept = torch.randperm(VOCAB, generator=generator)[:draft_vocab].sort().values
        tensors["d2t"] = kept - torch.arange(draft_vocab)
        tensors["t2d"] = torch.zeros(VOCAB, dtype=torch.bool).index_fill_(0, kept, True)
    config = {
        "architectures": ["LlamaForCausalLMEagle3" if kind == "llama" else "Eagle3Qwen3ForCausalLM"],
        "model_type": kind,
        "hidden_size": HIDDEN,
        "intermediate_size": INTERMEDIATE,
        "num_hidden_layers": 1,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": HEAD_DIM,
        "vocab_size": VOCAB,
        "draft_vocab_size": draft_vocab,
        "rms_norm_eps": 1e-6,
        "hidden_act": "silu",
        "max_position_embeddings": 512,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        "tie_word_embeddings": False,
        "eagle_aux_hidden_state_layer_ids": list(aux_ids),
        "num_aux_hidden_states": len(aux_ids),
        "eagle_config": {"eagle_aux_hidden_state_layer_ids": list(aux_ids), "use_aux_hidden_state": True},
        "torch_dtype": "float32",
        **dict.fromkeys(("norm_before_fc", "fc_norm", "norm_output", "norm_before_residual"), False),
        **flags,
    }
    renamed = {n.replace("midlayer.", "layers.0."): t for n, t in tensors.items()}
    return ServingCheckpoint("eagle3", "eagle3", config, tensors, speculators_form(config), renamed)


def speculators_form(config: dict[str, Any]) -> dict[str, Any]:
    """The same head as the speculators library writes it; the exporter adds target and K."""
    flags = ("norm_before_fc", "fc_norm", "norm_output", "norm_before_residual")
    outside = (*flags, "draft_vocab_size", "architectures", "eagle_config", "eagle_aux_hidden_state_layer_ids")
    return {
        "architectures": ["Eagle3Speculator"],
        "speculators_model_type": "eagle3",
        "draft_vocab_size": config["draft_vocab_size"],
        **{name: config[name] for name in flags},
        "eagle_aux_hidden_state_layer_ids": config["eagle_aux_hidden_state_layer_ids"],
        "transformer_layer_config": {name: value for name, value in config.items() if name not in outside},
        "speculators_config": {
            "algorithm": "eagle3",
            "default_proposal_method": "greedy",
            "proposal_methods": [{"proposal_type": "greedy"}],
            "verifier": {"architectures": ["LlamaForCausalLM"]},
        },
    }
