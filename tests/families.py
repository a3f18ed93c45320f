"""Targets of the families that recipes are shipped for: their real config classes with their real peculiarities, few
and narrow layers, random weights, and a byte-level tokenizer whose template marks turns as the family's does."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen3Config,
    Qwen3ForCausalLM,
)

SIZES = {
    "hidden_size": 48,
    "intermediate_size": 96,
    "num_hidden_layers": 6,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "initializer_range": 0.2,
    "dtype": "float32",
}
LONG_LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}

# ------------------------------------------------------------------------------------------ templates, our own wording
LLAMA = (
    "{{ '<|begin_of_text|>' }}{% for m in messages %}{{ '<|start_header_id|>' + m.role + '<|end_header_id|>\n\n' + "
    "m.content | trim + '<|eot_id|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}"
)
# Earlier turns lose their thoughts; with thinking off an empty block of them is put into the mouth of the model.
QWEN3 = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + (m.content.split('</think>')[-1] | trim) + "
    "'<|im_end|>\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}"
    "{% if enable_thinking is defined and not enable_thinking %}{{ '<think>\n\n</think>\n\n' }}{% endif %}{% endif %}"
)


def llama3() -> PreTrainedModel:
    """Llama 3.1 8B and 3.3 70B: rope of type llama3, untied, several ids that end an answer."""
    return LlamaForCausalLM(LlamaConfig(**SIZES, vocab_size=320, rope_parameters=LONG_LLAMA3, bos_token_id=0))


def qwen3() -> PreTrainedModel:
    """Qwen3 8B and 32B: heads wider than their share of the hidden size, normed queries, padded vocabulary."""
    return Qwen3ForCausalLM(Qwen3Config(**SIZES, vocab_size=384, head_dim=32, tie_word_embeddings=False))


# family: how the model is built, its special tokens (the first one ends an answer), its template
FAMILIES: dict[str, tuple[Callable[[], PreTrainedModel], list[str], str]] = {
    "llama3": (
        llama3,
        ["<|eot_id|>", "<|end_of_text|>", "<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>"],
        LLAMA,
    ),
    "qwen3": (qwen3, ["<|im_end|>", "<|endoftext|>", "<|im_start|>", "<think>", "</think>"], QWEN3),
}


def family_tokenizer(special: list[str], template: str) -> PreTrainedTokenizerFast:
    """Bytes as ids 0 to 255, then the special tokens."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    core = Tokenizer(models.BPE(vocab={char: i for i, char in enumerate(alphabet)}, merges=[]))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    core.add_special_tokens([AddedToken(token, special=True) for token in special])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, eos_token=special[0], pad_token=special[1])
    tokenizer.chat_template = template
    return tokenizer


def family_target(family: str, folder: Path) -> Path:
    """Write a random checkpoint of `family` with its tokenizer into `folder/<family>` and return that folder."""
    build, special, template = FAMILIES[family]
    tokenizer = family_tokenizer(special, template)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = build()
        for value in model.parameters():
            if value.ndim == 1:  # norms that are all ones hide one that is applied twice, or not at all
                value.data += 0.3 * torch.randn_like(value)
    ends: Any = tokenizer.convert_tokens_to_ids(special[:2])
    model.generation_config.eos_token_id = ends
    model.generation_config.pad_token_id = model.config.pad_token_id = ends[1]
    place = folder / family
    model.eval().save_pretrained(place)
    tokenizer.save_pretrained(place)
    return place
