"""Tiny random models and a byte-level tokenizer, built in code so that no test needs the network.

Norm weights are randomised (all-ones norms hide a norm applied twice or not at all) and head_dim is 32 because vLLM's
CPU attention takes nothing smaller.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import (
    Gemma3Config,
    Gemma3ForCausalLM,
    Gemma3ForConditionalGeneration,
    Gemma3TextConfig,
    GPTNeoXConfig,
    GPTNeoXForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen3_5ForCausalLM,
    Qwen3_5TextConfig,
    Qwen3Config,
    Qwen3ForCausalLM,
)

KINDS = ("llama", "qwen3", "qwen3_5", "mistral", "gemma3_text", "gemma3", "gpt_neox")
VOCAB_SIZE = 320
SPECIAL_TOKENS = ("<|pad|>", "<|im_start|>", "<|im_end|>", "<|endoftext|>")
CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
_CORPUS = (
    "The quick brown fox jumps over the lazy dog. What is two plus two? Two plus two is four.",
    "system user assistant tool You are a helpful assistant. Write a function that adds the numbers.",
    "Hello there, how are you today? I am well, thank you. The answer is that there are three of them.",
)


def tiny_tokenizer(vocab_size: int = VOCAB_SIZE, chat_template: str | None = CHATML) -> PreTrainedTokenizerFast:
    """Byte-level BPE of exactly `vocab_size` entries: 4 special tokens (ids 0-3), 256 bytes, the rest merges.

    pad <|pad|> (0), bos <|im_start|> (1, never added by itself), eos <|im_end|> (2). ids below the special
    tokens' count are special; every other id decodes to plain bytes, so any text round-trips.
    """
    core = Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    core.train_from_iterator(_CORPUS, trainer)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=core,
        bos_token="<|im_start|>",
        eos_token="<|im_end|>",
        pad_token="<|pad|>",
        unk_token="<|endoftext|>",
        clean_up_tokenization_spaces=False,
    )
    tokenizer.chat_template = chat_template
    if len(tokenizer) != vocab_size:
        raise ValueError(f"the tiny corpus gives {len(tokenizer)} tokens, not {vocab_size}")
    return tokenizer


def _build(kind: str, settings: dict[str, Any]) -> PreTrainedModel:
    """A random model of `kind`; `settings` go to its (text) config."""
    if kind == "llama":
        return LlamaForCausalLM(LlamaConfig(**settings))
    if kind == "qwen3":
        return Qwen3ForCausalLM(Qwen3Config(**settings))
    if kind == "qwen3_5":  # linear and full attention; two value heads to a key head
        rope = {"rope_type": "default", "rope_theta": 1e5, "partial_rotary_factor": 0.5, "mrope_section": [3, 3, 2]}
        linear = {"linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 32}
        kinds = ["linear_attention", "full_attention", "linear_attention", "linear_attention"]
        own = {**linear, "linear_value_head_dim": 32, "rope_parameters": rope}
        count = settings["num_hidden_layers"]
        own["layer_types"] = [kinds[i % len(kinds)] for i in range(count)]
        return Qwen3_5ForCausalLM(Qwen3_5TextConfig(**{**own, **settings}))
    if kind == "mistral":
        return MistralForCausalLM(MistralConfig(**{"sliding_window": 16, **settings}))
    if kind == "gpt_neox":
        renamed = {name: value for name, value in settings.items() if name not in ("num_key_value_heads", "head_dim")}
        heads_by_dim = {"hidden_size": settings["num_attention_heads"] * settings["head_dim"]}
        return GPTNeoXForCausalLM(GPTNeoXConfig(**{**renamed, **heads_by_dim}))
    gemma = {
        "sliding_window": 16,
        "layer_types": ["sliding_attention", "full_attention"] * (settings["num_hidden_layers"] // 2)
        + ["sliding_attention"] * (settings["num_hidden_layers"] % 2),
        "query_pre_attn_scalar": settings["head_dim"],
        **settings,
    }
    if kind == "gemma3_text":
        return Gemma3ForCausalLM(Gemma3TextConfig(**gemma))
    if kind == "gemma3":
        vision = {
            "hidden_size": 32,
            "intermediate_size": 32,
            "num_hidden_layers": 1,
            "num_attention_heads": 1,
            "image_size": 28,
            "patch_size": 14,
        }
        config = Gemma3Config(
            text_config=gemma,
            vision_config=vision,
            mm_tokens_per_image=4,
            boi_token_index=settings["vocab_size"] - 3,
            eoi_token_index=settings["vocab_size"] - 2,
            image_token_index=settings["vocab_size"] - 1,
            initializer_range=settings["initializer_range"],
            tie_word_embeddings=settings.get("tie_word_embeddings", True),
            eos_token_id=settings["eos_token_id"],
            pad_token_id=settings["pad_token_id"],
            bos_token_id=settings["bos_token_id"],
        )
        return Gemma3ForConditionalGeneration(config)
    raise ValueError(f"unknown kind {kind!r}: one of {', '.join(KINDS)}")


def tiny_model(
    kind: str, tmp_path: Path, *, seed: int = 0, chat_template: str | None = CHATML, **overrides: Any
) -> Path:
    """Write a random checkpoint of `kind` with its tokenizer into `tmp_path/<kind>-<seed>` and return that folder.

    `overrides` replace entries of the config (num_hidden_layers=6, tie_word_embeddings=True, vocab_size=384 for a
    padded vocabulary: the tokenizer keeps its 320 entries). The same arguments give the same weights. GPT-NeoX has
    no head_dim of its own, so its hidden size is heads x head_dim = 128; the others have hidden 64.
    """
    settings: dict[str, Any] = {
        "vocab_size": VOCAB_SIZE,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "max_position_embeddings": 512,
        "initializer_range": 0.2,
        "tie_word_embeddings": False,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 0,
        "dtype": "float32",
        **overrides,
    }
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = _build(kind, settings)
        for name, parameter in model.named_parameters():
            if parameter.ndim == 1:
                # A norm weight multiplies (Gemma, Qwen3.5: 1 + weight), so it sits around 1, never at it; biases around
                # 0; and linear layers forget slowly enough for their state to matter.
                centred = kind.startswith("gemma3") or (kind == "qwen3_5" and "linear_attn" not in name)
                scale = "norm" in name.lower() and name.endswith("weight") and not centred
                centre = -3.0 if name.endswith("A_log") else float(scale)
                parameter.data = centre + 0.3 * torch.randn_like(parameter)
    model.generation_config.eos_token_id = settings["eos_token_id"]
    model.generation_config.pad_token_id = settings["pad_token_id"]
    folder = tmp_path / f"{kind}-{seed}"
    model.eval().save_pretrained(folder)
    tiny_tokenizer(chat_template=chat_template).save_pretrained(folder)
    return folder
