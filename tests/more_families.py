"""Tiny random targets of further families, for the table of families and methods: each family's own config class with
what sets it apart, few and narrow layers, norms that are not all ones."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from tests.tiny import tiny_tokenizer

SIZES: dict[str, Any] = {
    "vocab_size": 320,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "initializer_range": 0.2,
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
SWITCH = 48  # tokens from which on LongRoPE takes its long factors
LATENT: dict[str, Any] = {  # queries of 24 + 8 channels, values of 16
    "q_lora_rank": 24,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 24,
    "qk_rope_head_dim": 8,
    "v_head_dim": 16,
    "head_dim": 8,
    "num_key_value_heads": 4,
    "first_k_dense_replace": 2,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_shared_experts": 1,
    "moe_intermediate_size": 32,
    "n_group": 1,
    "topk_group": 1,
}
ALTERNATING = {"sliding_window": 16, "layer_types": ["sliding_attention", "full_attention"] * 2}
EXPERTS = {"num_experts_per_tok": 2, "num_local_experts": 4}
LONG_ROPE = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "short_factor": [1.0 + 0.1 * i for i in range(8)],
    "long_factor": [4.0 + 0.5 * i for i in range(8)],
}
GPT2 = {"n_embd": 64, "n_layer": 4, "n_head": 4, "n_positions": 512, "n_inner": None}

# model_type -> what its config has beside or in place of `SIZES`; None leaves a key out
CONFIGS: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen2": {},
    "qwen3": {"head_dim": 32},
    "mistral": {"sliding_window": 16},
    "gemma2": {**ALTERNATING, "head_dim": 32, "query_pre_attn_scalar": 32, "tie_word_embeddings": True},
    "gemma3_text": {**ALTERNATING, "head_dim": 32, "query_pre_attn_scalar": 32, "tie_word_embeddings": True},
    "phi3": {"rope_parameters": LONG_ROPE, "original_max_position_embeddings": SWITCH, "sliding_window": None},
    "gpt2": {**dict.fromkeys(SIZES), **GPT2, "vocab_size": 320, "initializer_range": 0.2, "tie_word_embeddings": True},
    "opt": {"intermediate_size": None, "num_key_value_heads": None, "ffn_dim": 96, "word_embed_proj_dim": 64},
    "bloom": {
        **dict.fromkeys(SIZES),
        **{"vocab_size": 320, "hidden_size": 64, "n_layer": 4, "n_head": 4, "initializer_range": 0.2},
        "tie_word_embeddings": True,
    },
    "deepseek_v2": {**LATENT, "topk_method": "greedy"},
    "deepseek_v3": LATENT,
    "olmo2": {},
    "olmo3": {"sliding_window": 16, "layer_types": ["sliding_attention"] * 3 + ["full_attention"]},
    "cohere": {"logit_scale": 0.25, "tie_word_embeddings": True, "use_qk_norm": True},
    "cohere2": {**ALTERNATING, "logit_scale": 0.25, "tie_word_embeddings": True, "head_dim": 16},
    "stablelm": {"partial_rotary_factor": 0.25, "use_qkv_bias": True},
    "starcoder2": {"sliding_window": 16, "tie_word_embeddings": True},
    "granite": {
        "embedding_multiplier": 3.0,
        "residual_multiplier": 0.5,
        "attention_multiplier": 0.2,
        "logits_scaling": 2.0,
        "tie_word_embeddings": True,
    },
    "glm4": {"head_dim": 16, "partial_rotary_factor": 0.5},
    "nemotron": {"partial_rotary_factor": 0.5, "head_dim": 16},
    "exaone4": {"sliding_window": 16, "layer_types": ["sliding_attention"] * 3 + ["full_attention"]},
    "mixtral": {**EXPERTS, "sliding_window": None},
    "qwen3_moe": {
        "head_dim": 32,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
        "norm_topk_prob": True,
    },
    "gpt_oss": {**EXPERTS, **ALTERNATING, "head_dim": 16},
    "falcon_h1": {
        "mamba_d_ssm": 64,
        "mamba_n_heads": 4,
        "mamba_d_head": 16,
        "mamba_d_state": 8,
        "mamba_chunk_size": 16,
    },
}

ALIBI = {"alibi": True, "new_decoder_architecture": False, "multi_query": False}  # Falcon's, which is in no table


def more_family(family: str, folder: Path, **overrides: Any) -> Path:
    """Write a random checkpoint of `family` with the tiny tokenizer into `folder/<family>` and return that folder.
    `overrides` replace entries of its config."""
    changed = {**CONFIGS.get(family, ALIBI), **overrides}
    none = {key: None for key in ("sliding_window", "n_inner") if key in changed}
    settings = none | {key: value for key, value in {**SIZES, **changed}.items() if value is not None}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **settings), dtype=torch.float32)
        for name, value in model.named_parameters():
            # Norms that are all ones, or biases of zeros, hide one that is applied twice, or not at all.
            if value.ndim == 1 or name.endswith("bias"):
                value.data += 0.3 * torch.randn_like(value)
        # A dozen likely tokens: texts repeat, and drafts of a head that was barely trained are accepted now and then.
        head = model.get_output_embeddings().weight.data
        head *= 0.3 + 0.7 * torch.isin(torch.arange(len(head)), torch.arange(40, 52))[:, None]
    model.generation_config.bos_token_id = model.config.bos_token_id = 1
    model.generation_config.eos_token_id = model.config.eos_token_id = 2
    model.generation_config.pad_token_id = model.config.pad_token_id = 0
    place = folder / family
    model.eval().save_pretrained(place)
    tiny_tokenizer().save_pretrained(place)
    return place
