"""Targets of the families that recipes are shipped for: their real config classes with their real peculiarities, few
and narrow layers, random weights, and a byte-level tokenizer whose template marks turns as the family's does."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    Gemma3Config,
    Gemma3ForConditionalGeneration,
    GptOssConfig,
    GptOssForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    Mistral3Config,
    Mistral3ForConditionalGeneration,
    Phi3Config,
    Phi3ForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3_5Config,
    Qwen3_5ForConditionalGeneration,
    Qwen3_5MoeForCausalLM,
    Qwen3_5MoeTextConfig,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

SIZES: dict[str, Any] = {
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
# No system turns of its own: the system prompt goes before the first question.
GEMMA3 = (
    "{{ '<bos>' }}{% if messages[0].role == 'system' %}{% set first = messages[0].content + '\n\n' %}"
    "{% set turns = messages[1:] %}{% else %}{% set first = '' %}{% set turns = messages %}{% endif %}"
    "{% for m in turns %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('turns must alternate') }}{% endif %}"
    "{{ '<start_of_turn>' + ('model' if m.role == 'assistant' else m.role) + '\n' + (first if loop.first else '') + "
    "m.content | trim + '<end_of_turn>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<start_of_turn>model\n' }}{% endif %}"
)
PHI4 = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '<|im_sep|>' + m.content + '<|im_end|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant<|im_sep|>' }}{% endif %}"
)
# Answers end with eos and have no header; a default system prompt where none is given.
MISTRAL = (
    "{{ '<s>' }}{% if messages[0].role != 'system' %}{{ '[SYSTEM_PROMPT]Be brief.[/SYSTEM_PROMPT]' }}{% endif %}"
    "{% for m in messages %}{% if m.role == 'system' %}{{ '[SYSTEM_PROMPT]' + m.content + '[/SYSTEM_PROMPT]' }}"
    "{% elif m.role == 'user' %}{{ '[INST]' + m.content + '[/INST]' }}{% else %}{{ m.content + '</s>' }}{% endif %}"
    "{% endfor %}"
)
# Harmony: channels inside an answer, another terminator for the last turn than for earlier ones, a developer's turn.
HARMONY = (
    "{{ '<|start|>system<|message|>Reasoning: ' + (reasoning_effort | default('medium')) + '<|end|>' }}"
    "{% for m in messages %}{% if m.role == 'assistant' %}{{ '<|start|>assistant<|channel|>final<|message|>' + "
    "m.content + ('<|return|>' if loop.last else '<|end|>') }}{% else %}"
    "{{ '<|start|>' + ('developer' if m.role == 'system' else m.role) + '<|message|>' + m.content + '<|end|>' }}"
    "{% endif %}{% endfor %}{% if add_generation_prompt %}{{ '<|start|>assistant' }}{% endif %}"
)


def llama3() -> PreTrainedModel:
    """Llama 3.1 8B and 3.3 70B: rope of type llama3, untied, several ids that end an answer."""
    return LlamaForCausalLM(LlamaConfig(**SIZES, vocab_size=320, rope_parameters=LONG_LLAMA3, bos_token_id=0))


def qwen3() -> PreTrainedModel:
    """Qwen3 8B and 32B: heads wider than their share of the hidden size, normed queries, padded vocabulary."""
    return Qwen3ForCausalLM(Qwen3Config(**SIZES, vocab_size=384, head_dim=32, tie_word_embeddings=False))


def mimo() -> PreTrainedModel:
    """MiMo 7B: Qwen2's body, biased queries, keys and values. `add_mtp_layer` adds what it ships beside it."""
    return Qwen2ForCausalLM(Qwen2Config(**SIZES, vocab_size=288))


def qwen3_moe() -> PreTrainedModel:
    """Qwen3 30B A3B: a mixture of experts in every layer, an intermediate size that no layer has."""
    experts = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "norm_topk_prob": True}
    return Qwen3MoeForCausalLM(Qwen3MoeConfig(**SIZES, **experts, vocab_size=384, head_dim=32))


# Three linear layers to a full one, two value heads to a key head, a gated output, a rotary quarter of each head.
QWEN35: dict[str, Any] = {
    "vocab_size": 320,
    "head_dim": 32,
    "layer_types": ["linear_attention"] * 3 + ["full_attention", "linear_attention", "full_attention"],
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 1e7,
        "partial_rotary_factor": 0.25,
        "mrope_section": [2, 1, 1],
        "mrope_interleaved": True,
    },
}


def qwen3_5() -> PreTrainedModel:
    """Qwen3.5 4B: beside a vision tower, linear and full attention in turn, embeddings that are also the output head.
    `add_mtp_layer` adds the MTP layer, which Transformers does not know."""
    vision = {"hidden_size": 32, "intermediate_size": 32, "depth": 1, "num_heads": 1, "patch_size": 4}
    vision.update(out_hidden_size=SIZES["hidden_size"], num_position_embeddings=16)
    config = Qwen3_5Config(text_config={**SIZES, **QWEN35, "tie_word_embeddings": True}, vision_config=vision)
    config.tie_word_embeddings = True
    config.image_token_id, config.video_token_id = 310, 311
    config.vision_start_token_id, config.vision_end_token_id = 312, 313
    return remembering(Qwen3_5ForConditionalGeneration(config))


def qwen3_5_moe() -> PreTrainedModel:
    """Qwen3.5 35B A3B: the same attention with a mixture of experts and a shared one in every layer."""
    experts = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
    sizes = {name: value for name, value in SIZES.items() if name != "intermediate_size"}
    config = Qwen3_5MoeTextConfig(**sizes, **QWEN35, **experts, shared_expert_intermediate_size=32)
    return remembering(Qwen3_5MoeForCausalLM(config))


def remembering(model: PreTrainedModel) -> PreTrainedModel:
    """Linear layers that forget slowly enough for their state to matter."""
    for name, value in model.named_parameters():
        if name.endswith("A_log"):
            value.data.fill_(-3.0)
    return model


def gemma3() -> PreTrainedModel:
    """Gemma 3 12B: beside a vision tower, five sliding layers to a full one, two rotary bases, scaled embeddings that
    are also the output head, norms around attention and MLP."""
    text = {
        **SIZES,
        "vocab_size": 320,
        "head_dim": 32,
        "sliding_window": 8,
        "query_pre_attn_scalar": 32,
        "layer_types": ["sliding_attention"] * 5 + ["full_attention"],
        "rope_parameters": {
            "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
            "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
        },
        "tie_word_embeddings": True,
    }
    vision = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 1}
    vision.update(image_size=28, patch_size=14)
    config = Gemma3Config(text_config=text, vision_config=vision, mm_tokens_per_image=4, initializer_range=0.2)
    config.boi_token_index, config.eoi_token_index, config.image_token_index = 310, 311, 312
    return Gemma3ForConditionalGeneration(config)


def phi4() -> PreTrainedModel:
    """Phi-4: Phi3's fused projections, ten key/value heads for forty, padded vocabulary."""
    rope = {"rope_type": "default", "rope_theta": 250000.0, "partial_rotary_factor": 1.0}
    sizes = {**SIZES, "num_key_value_heads": 1, "original_max_position_embeddings": 512, "pad_token_id": 257}
    return Phi3ForCausalLM(Phi3Config(**sizes, vocab_size=352, rope_parameters=rope, sliding_window=None))


def mistral_small() -> PreTrainedModel:
    """Mistral Small 3.2: a text model in a multimodal wrapper, heads narrower than their share of the hidden size."""
    text = {**SIZES, "model_type": "mistral", "vocab_size": 320, "head_dim": 8, "sliding_window": None}
    text["rope_parameters"] = {"rope_type": "default", "rope_theta": 1e9}
    vision = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 1}
    vision.update(model_type="pixtral", image_size=28, patch_size=14, head_dim=32)
    config = Mistral3Config(text_config=text, vision_config=vision, image_token_index=310, tie_word_embeddings=False)
    return Mistral3ForConditionalGeneration(config)


def gpt_oss() -> PreTrainedModel:
    """gpt-oss 20B: a sink in every attention head, sliding and full layers in turn, biased projections, biased experts
    with a clamped activation, rope of type yarn."""
    experts = {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 8, "head_dim": 16}
    rope = {"rope_type": "yarn", "rope_theta": 150000.0, "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0}
    rope.update(truncate=False, original_max_position_embeddings=64)
    return GptOssForCausalLM(GptOssConfig(**SIZES, **experts, vocab_size=320, rope_parameters=rope))


# family: how the model is built, its special tokens (the first one ends an answer), its template
FAMILIES: dict[str, tuple[Callable[[], PreTrainedModel], list[str], str]] = {
    "llama3": (
        llama3,
        ["<|eot_id|>", "<|end_of_text|>", "<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>"],
        LLAMA,
    ),
    "llama3_fp8": (
        llama3,
        ["<|eot_id|>", "<|end_of_text|>", "<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>"],
        LLAMA,
    ),
    "mimo": (mimo, ["<|im_end|>", "<|endoftext|>", "<|im_start|>"], QWEN3),
    "qwen3_5": (qwen3_5, ["<|im_end|>", "<|endoftext|>", "<|im_start|>", "<think>", "</think>"], QWEN3),
    "qwen3_5_moe": (qwen3_5_moe, ["<|im_end|>", "<|endoftext|>", "<|im_start|>", "<think>", "</think>"], QWEN3),
    "qwen3_moe": (qwen3_moe, ["<|im_end|>", "<|endoftext|>", "<|im_start|>", "<think>", "</think>"], QWEN3),
    "gemma3": (gemma3, ["<end_of_turn>", "<eos>", "<bos>", "<start_of_turn>"], GEMMA3),
    "phi4": (phi4, ["<|im_end|>", "<|endoftext|>", "<|im_start|>", "<|im_sep|>"], PHI4),
    "mistral_small": (
        mistral_small,
        ["</s>", "<pad>", "<s>", "[INST]", "[/INST]", "[SYSTEM_PROMPT]", "[/SYSTEM_PROMPT]"],
        MISTRAL,
    ),
    "gpt_oss": (
        gpt_oss,
        ["<|return|>", "<|call|>", "<|endoftext|>", "<|start|>", "<|end|>", "<|message|>", "<|channel|>"],
        HARMONY,
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


# folder of recipes/ -> family of its target
RECIPES = {
    "llama-3.1-8b-instruct": "llama3",
    "llama-3.1-8b-instruct-fp8": "llama3_fp8",
    "domain-adaptation": "llama3",
    "mimo-7b-rl": "mimo",
    "llama-3.3-70b-instruct": "llama3",
    "qwen3-8b": "qwen3",
    "qwen3.5-4b": "qwen3_5",
    "qwen3-32b": "qwen3",
    "qwen3-30b-a3b": "qwen3_moe",
    "gemma-3-12b-it": "gemma3",
    "phi-4": "phi4",
    "mistral-small-3.2-24b": "mistral_small",
    "gpt-oss-20b": "gpt_oss",
}


def recipe_target(file: Path, folder: Path) -> Path:
    """The tiny target of a shipped recipe's family, written into `folder` by the first that asks; a test whose family
    needs a package that is missing is skipped. A recipe without a family in `RECIPES` is not finished."""
    family = RECIPES[file.parent.name]
    if family.endswith("_fp8"):
        pytest.importorskip("compressed_tensors")
    return folder / family if (folder / family).is_dir() else family_target(family, folder)


def family_target(family: str, folder: Path) -> Path:
    """Write a random checkpoint of `family` with its tokenizer into `folder/<family>` and return that folder."""
    build, special, template = FAMILIES[family]
    tokenizer = family_tokenizer(special, template)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = build()
        for name, value in model.named_parameters():
            # Norms that are all ones, or biases of zeros, hide one that is applied twice, or not at all.
            if value.ndim == 1 or name.endswith("bias"):
                value.data += 0.3 * torch.randn_like(value)
    ends: Any = tokenizer.convert_tokens_to_ids(special[:2])
    model.generation_config.eos_token_id = ends
    model.generation_config.pad_token_id = model.config.pad_token_id = ends[1]
    place = folder / family
    model.eval().save_pretrained(place)
    tokenizer.save_pretrained(place)
    if family.endswith("_fp8"):
        quantise(place)
    if family in ("mimo", "qwen3_5"):
        add_mtp_layer(place, family)
    return place


def add_mtp_layer(place: Path, family: str) -> None:
    """One MTP layer under the family's names, like the target's last one, and the keys of its config.json that declare
    it."""
    tensors, hidden = load_file(place / "model.safetensors"), SIZES["hidden_size"]
    draw = torch.Generator().manual_seed(0)
    config = json.loads((place / "config.json").read_text())
    if family == "mimo":
        last, layer, projection = "model.layers.5.", "model.mtp_layers.0.", "model.mtp_layers.0.input_proj"
        norms = [f"{layer}{name}_layernorm" for name in ("token", "hidden", "final")]
        config.update(model_type="mimo", architectures=["MiMoForCausalLM"], num_nextn_predict_layers=1)
    else:
        last, layer, projection = "model.language_model.layers.5.", "mtp.layers.0.", "mtp.fc"
        norms = ["mtp.pre_fc_norm_embedding", "mtp.pre_fc_norm_hidden", "mtp.norm"]
        config["text_config"].update(mtp_num_hidden_layers=1, mtp_use_dedicated_embeddings=False)
    own = {name: value for name, value in tensors.items() if name.startswith(last)}
    tensors.update({layer + name.removeprefix(last): value.clone() for name, value in own.items()})
    for norm in norms:
        tensors[f"{norm}.weight"] = float(family == "mimo") + 0.3 * torch.randn(hidden, generator=draw)
    tensors[f"{projection}.weight"] = torch.randn(hidden, 2 * hidden, generator=draw) * (2 * hidden) ** -0.5
    save_file(tensors, place / "model.safetensors", metadata={"format": "pt"})
    (place / "config.json").write_text(json.dumps(config))


def quantise(place: Path) -> None:
    """Rewrite a checkpoint as llm-compressor's FP8 ones are: a scale for each row of a projection, the output head
    untouched. Activations are left alone: rounded to eight bits, a sum's last bit shows, and nothing can be equal."""
    tensors = {}
    for name, value in load_file(place / "model.safetensors").items():
        tensors[name] = value
        if name.endswith("proj.weight"):
            scale = value.abs().amax(1, keepdim=True) / torch.finfo(torch.float8_e4m3fn).max
            tensors[name], tensors[f"{name}_scale"] = (value / scale).to(torch.float8_e4m3fn), scale
    save_file(tensors, place / "model.safetensors", metadata={"format": "pt"})
    eight = {"num_bits": 8, "type": "float", "symmetric": True}
    group = {
        "targets": ["Linear"],
        "weights": {**eight, "strategy": "channel", "dynamic": False},
    }
    config = json.loads((place / "config.json").read_text())
    config["quantization_config"] = {
        "quant_method": "compressed-tensors",
        "format": "float-quantized",
        "quantization_status": "compressed",
        "ignore": ["lm_head"],
        "config_groups": {"group_0": group},
    }
    (place / "config.json").write_text(json.dumps(config))
