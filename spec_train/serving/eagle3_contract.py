"""Whether the files of an EAGLE-3 or P-EAGLE head keep to what vLLM loads. Nothing here imports vLLM.

vLLM loads such a head without looking for missing tensors, and guesses what the config leaves out: an absent weight
stays uninitialised and an absent layer id becomes another layer, both without an error and with an acceptance near
zero. So the contract is checked here, before anything is written and again before anything is run.
Facts: vLLM 0.32.0 (run) and 0.33.0 (read), `model_executor/models/{llama,qwen3}_eagle3.py`,
`transformers_utils/configs/speculators/`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from spec_train.data.draft_vocab import map_problem, token_problem

# The model type goes with the architecture: vLLM picks the class by the latter and the config by the former.
EAGLE3_ARCHITECTURES = {
    "LlamaForCausalLMEagle3": "llama",
    "Eagle3LlamaForCausalLM": "llama",
    "Eagle3Qwen3ForCausalLM": "qwen3",
}
EAGLE3_FLAGS = ("norm_before_fc", "fc_norm", "norm_output", "norm_before_residual")
# What Transformers writes into every config and nothing reads.
NEUTRAL_KEYS = frozenset(
    {
        *("return_dict", "output_hidden_states", "output_attentions", "chunk_size_feed_forward", "is_encoder_decoder"),
        *(
            "id2label",
            "label2id",
            "problem_type",
            "pretraining_tp",
            "initializer_range",
            "attention_dropout",
            "use_cache",
        ),
        *("transformers_version", "bos_token_id", "eos_token_id", "pad_token_id", "torch_dtype", "dtype"),
        "trained_max_length",
    }
)
# Keys that vLLM honours in a head. Any other key is refused: vLLM would ignore it in silence.
EAGLE3_KEYS = frozenset(
    {
        *("architectures", "model_type", "hidden_size", "intermediate_size", "num_hidden_layers", "head_dim"),
        *("num_attention_heads", "num_key_value_heads", "vocab_size", "draft_vocab_size", "target_hidden_size"),
        *("rms_norm_eps", "hidden_act", "max_position_embeddings", "rope_parameters", "rope_theta", "rope_scaling"),
        *("attention_bias", "mlp_bias", "tie_word_embeddings", "num_aux_hidden_states", "eagle_config", "logit_scale"),
        *("eagle_aux_hidden_state_layer_ids", *EAGLE3_FLAGS),
        "pard_token",  # P-EAGLE: the id of the mask token
    }
)
EAGLE3_REQUIRED_KEYS = (
    *("architectures", "model_type", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"),
    *("num_key_value_heads", "head_dim", "vocab_size", "draft_vocab_size", "rms_norm_eps", "max_position_embeddings"),
    *("rope_parameters", "tie_word_embeddings", "eagle_aux_hidden_state_layer_ids", "num_aux_hidden_states"),
    *("eagle_config", *EAGLE3_FLAGS),
)


def served_config(speculators_config: Mapping[str, Any]) -> dict[str, Any]:
    """The draft config that vLLM builds from the config.json of the speculators format (eagle3 and peagle).

    Only `transformer_layer_config` and the named fields survive; in particular `norm_before_residual` is True unless
    it is written in an eagle3 one, and a peagle one knows no `norm_output`."""
    parallel = speculators_config.get("speculators_model_type") == "peagle"
    config = dict(speculators_config.get("transformer_layer_config") or {})
    config["draft_vocab_size"] = speculators_config.get("draft_vocab_size")
    if speculators_config.get("target_hidden_size") is not None:
        config["target_hidden_size"] = speculators_config["target_hidden_size"]
    for flag in EAGLE3_FLAGS:
        config[flag] = speculators_config.get(flag, flag == "norm_before_residual" and not parallel)
    if parallel:  # `fc_norm` survives only where it stands among the layer's own keys
        config["fc_norm"] = (speculators_config.get("transformer_layer_config") or {}).get("fc_norm", False)
        config["norm_output"] = False
        config["pard_token"] = speculators_config.get("mask_token_id")
    names = {"llama": "Eagle3LlamaForCausalLM", "qwen3": "Eagle3Qwen3ForCausalLM"}
    config["architectures"] = [names.get(str(config.get("model_type", "llama")), "")]
    if speculators_config.get("eagle_aux_hidden_state_layer_ids"):
        config["eagle_aux_hidden_state_layer_ids"] = speculators_config["eagle_aux_hidden_state_layer_ids"]
    # What vLLM takes for granted where the form has no room for it.
    ids = config.get("eagle_aux_hidden_state_layer_ids")
    config.setdefault("eagle_config", {"eagle_aux_hidden_state_layer_ids": ids, "use_aux_hidden_state": True})
    return config


def check_speculators(speculators_config: Mapping[str, Any], config: Mapping[str, Any]) -> list[str]:
    """Problems of the speculators form: it must give vLLM the very draft that the plain `config` describes."""
    problems = []
    kind = "peagle" if "pard_token" in config else "eagle3"
    if speculators_config.get("speculators_model_type") != kind:
        problems.append(f"speculators_model_type is {speculators_config.get('speculators_model_type')!r}, not {kind!r}")
    inner = speculators_config.get("speculators_config") or {}
    methods = inner.get("proposal_methods") or [{}]
    if not isinstance(methods[0].get("speculative_tokens"), int):
        problems.append("speculators_config.proposal_methods[0].speculative_tokens is missing")
    if not (inner.get("verifier") or {}).get("name_or_path"):
        problems.append("speculators_config.verifier.name_or_path is missing: vLLM finds the target through it")
    served = served_config(speculators_config)
    compared = (EAGLE3_KEYS & set(config)) - {"architectures", "eagle_config"}  # the latter repeats the top level
    problems += [
        f"{key} reaches vLLM as {served.get(key)!r} through the speculators form, not {config[key]!r}"
        for key in sorted(compared)
        if served.get(key) != config[key]
    ]
    if EAGLE3_ARCHITECTURES.get(served["architectures"][0]) != config.get("model_type"):
        problems.append(f"transformer_layer_config.model_type is {served.get('model_type')!r}")
    return problems


def eagle3_shapes(config: Mapping[str, Any], prefix: str = "midlayer.") -> dict[str, tuple[int, ...]]:
    """Name and shape of every tensor that an EAGLE-3 head of this config must have (`embed_tokens.weight` may be
    added). `prefix`: what the first layer is called, `midlayer.` or `layers.0.`."""
    hidden, wide = int(config["hidden_size"]), int(config["intermediate_size"])
    target_hidden = int(config.get("target_hidden_size") or hidden)
    aux = int(config["num_aux_hidden_states"])
    heads, kv_heads, dim = (int(config[k]) for k in ("num_attention_heads", "num_key_value_heads", "head_dim"))
    vocab, draft_vocab = int(config["vocab_size"]), int(config["draft_vocab_size"])
    shapes: dict[str, tuple[int, ...]] = {
        "fc.weight": (hidden, aux * target_hidden),
        "norm.weight": (hidden,),
        "lm_head.weight": (draft_vocab, hidden),
    }
    if config.get("norm_before_fc"):
        shapes["input_norm.weight"] = (aux * target_hidden,)
    if config.get("fc_norm"):
        shapes.update({f"fc_norm.{j}.weight": (target_hidden,) for j in range(aux)})
    if config.get("pard_token") is not None:
        shapes["mask_hidden"] = (1, aux * target_hidden)
    if draft_vocab != vocab:
        shapes.update({"d2t": (draft_vocab,), "t2d": (vocab,)})
    for layer in range(int(config["num_hidden_layers"])):
        name = prefix if layer == 0 else f"layers.{layer}."
        width = 2 * hidden if layer == 0 else hidden
        rows = {"q_proj": heads * dim, "k_proj": kv_heads * dim, "v_proj": kv_heads * dim}
        for projection, size in rows.items():
            shapes[f"{name}self_attn.{projection}.weight"] = (size, width)
            if config.get("attention_bias"):
                shapes[f"{name}self_attn.{projection}.bias"] = (size,)
        shapes[f"{name}self_attn.o_proj.weight"] = (hidden, heads * dim)
        if config.get("attention_bias") and config.get("model_type") == "llama":
            shapes[f"{name}self_attn.o_proj.bias"] = (hidden,)
        if config.get("model_type") == "qwen3":
            shapes.update({f"{name}self_attn.{n}.weight": (dim,) for n in ("q_norm", "k_norm")})
        mlp = {"gate_proj": (wide, hidden), "up_proj": (wide, hidden), "down_proj": (hidden, wide)}
        for projection, shape in mlp.items():
            shapes[f"{name}mlp.{projection}.weight"] = shape
            if config.get("mlp_bias") and config.get("model_type") == "llama":
                shapes[f"{name}mlp.{projection}.bias"] = shape[:1]
        norms = ("input_layernorm", "post_attention_layernorm", *(("hidden_norm",) if layer == 0 else ()))
        shapes.update({f"{name}{norm}.weight": (hidden,) for norm in norms})
    return shapes


def check_eagle3(config: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> list[str]:
    """Every problem that keeps vLLM from loading this head, or lets it load and draft something else.

    `config`: the plain config.json (or `served_config` of the speculators form). `tensors`: plain names. An empty
    list means that the contract is kept; whether drafts are right is for `verify_export` to show."""
    problems = _check_config(config)
    if problems:
        return problems  # shapes follow from the config; without it they mean nothing
    return _check_tensors(config, tensors) + (_check_vocabulary(config, tensors) if "d2t" in tensors else [])


def _check_config(config: Mapping[str, Any]) -> list[str]:
    """Problems of the config alone."""
    problems = [f"config.json lacks {key}" for key in EAGLE3_REQUIRED_KEYS if config.get(key) is None]
    if "quantization_config" in config:
        problems.append("config.json has a quantization_config: vLLM would look for scales that the head does not have")
    ignored = sorted(set(config) - EAGLE3_KEYS - NEUTRAL_KEYS - {"quantization_config"})
    problems += [f"config.json has {key!r}, which vLLM 0.32 and 0.33 ignore in an EAGLE-3 head" for key in ignored]
    architectures = list(config.get("architectures") or [])
    model_type = EAGLE3_ARCHITECTURES.get(architectures[0]) if len(architectures) == 1 else None
    if model_type is None:
        problems.append(f"architectures {architectures} is not one of {sorted(EAGLE3_ARCHITECTURES)}")
    elif config.get("model_type") != model_type:
        problems.append(
            f"model_type {config.get('model_type')!r} does not go with {architectures[0]}: {model_type!r} does"
        )
    if config.get("tie_word_embeddings"):
        problems.append("tie_word_embeddings is true: the loader would tie lm_head to the target-sized embedding")
    if config.get("hidden_act", "silu") != "silu":
        problems.append(f"hidden_act is {config['hidden_act']!r}: vLLM's head takes silu only")
    problems += _check_aux_ids(config)
    rope = config.get("rope_parameters")
    if isinstance(rope, Mapping):
        if rope.get("rope_theta") is None:
            problems.append("rope_parameters lacks rope_theta: vLLM would fall back to 10000")
        if "rope_theta" in config and config["rope_theta"] != rope.get("rope_theta"):
            problems.append(f"rope_theta {config['rope_theta']} contradicts rope_parameters ({rope.get('rope_theta')})")
    if int(config.get("draft_vocab_size") or 0) > int(config.get("vocab_size") or 0):
        problems.append(f"draft_vocab_size {config['draft_vocab_size']} exceeds vocab_size {config['vocab_size']}")
    mask, vocab = config.get("pard_token"), int(config.get("vocab_size") or 0)
    if mask is not None and (problem := token_problem(mask, vocab)):
        problems.append(problem)
    return problems


def _check_aux_ids(config: Mapping[str, Any]) -> list[str]:
    """vLLM reads the aux layer ids from three places, depending on the runner and the head class: all must agree."""
    ids = config.get("eagle_aux_hidden_state_layer_ids") or []
    eagle = config.get("eagle_config") or {}
    problems = []
    if not ids or list(ids) != sorted(set(ids)) or min(ids) < 0:
        problems.append(f"eagle_aux_hidden_state_layer_ids {list(ids)} must be distinct, ascending and not negative")
    if list(eagle.get("eagle_aux_hidden_state_layer_ids") or []) != list(ids):
        problems.append("eagle_config.eagle_aux_hidden_state_layer_ids differs from eagle_aux_hidden_state_layer_ids")
    if config.get("num_aux_hidden_states") != len(ids):
        problems.append(f"num_aux_hidden_states is {config.get('num_aux_hidden_states')}, the ids are {len(ids)}")
    if eagle.get("use_aux_hidden_state") is not True:
        problems.append("eagle_config.use_aux_hidden_state must be true")
    if "norm_before_fc" in eagle and eagle["norm_before_fc"] != config.get("norm_before_fc"):
        problems.append("eagle_config.norm_before_fc contradicts norm_before_fc, and wins in vLLM")
    return problems


def _check_tensors(config: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> list[str]:
    """Names, shapes, types and values of all tensors against the config."""
    spellings = [prefix for prefix in ("midlayer.", "layers.0.") if any(name.startswith(prefix) for name in tensors)]
    if len(spellings) > 1:
        return ["the first layer is spelled both midlayer. and layers.0.: keep one"]
    expected = eagle3_shapes(config, spellings[0] if spellings else "midlayer.")
    optional = {"embed_tokens.weight": (int(config["vocab_size"]), int(config["hidden_size"]))}
    problems = [f"{name} is missing (shape {list(expected[name])})" for name in sorted(set(expected) - set(tensors))]
    for name in sorted(tensors):
        tensor, shape = tensors[name], expected.get(name, optional.get(name))
        if shape is None:
            problems.append(f"{name} is a tensor that vLLM does not know, or that the config does not declare")
        elif tensor.numel() == 0:
            problems.append(f"{name} is empty: a sharded parameter that was not gathered before saving")
        elif tuple(tensor.shape) != shape:
            problems.append(f"{name} has shape {list(tensor.shape)}, the config asks for {list(shape)}")
        elif name not in ("d2t", "t2d") and not tensor.is_floating_point():
            problems.append(f"{name} is {tensor.dtype}, not a floating point tensor")
        elif tensor.is_floating_point() and not bool(torch.isfinite(tensor).all()):
            problems.append(f"{name} holds values that are not finite")
    if int(config.get("target_hidden_size") or config["hidden_size"]) != int(config["hidden_size"]) and (
        "embed_tokens.weight" not in tensors
    ):
        problems.append("embed_tokens.weight is missing: the target's embedding has another width")
    return problems


def _check_vocabulary(config: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> list[str]:
    """Problems of the draft vocabulary: d2t holds offsets (target id - draft id), t2d marks the drafted target ids."""
    vocab, t2d = int(config["vocab_size"]), tensors.get("t2d")
    if t2d is not None and t2d.shape != (vocab,):
        t2d = None  # reported with the shapes
    problem = map_problem(tensors["d2t"], t2d, vocab)
    return [problem] if problem else []


def check_target(config: Mapping[str, Any], target_config: Mapping[str, Any]) -> list[str]:
    """Problems of an EAGLE-3 head (plain config) beside the config.json of its target."""
    text = target_config.get("text_config") or target_config
    layers, hidden, vocab = (text.get(k) for k in ("num_hidden_layers", "hidden_size", "vocab_size"))
    problems = []
    if vocab is not None and config["vocab_size"] != vocab:
        problems.append(f"vocab_size is {config['vocab_size']}, the target's is {vocab}")
    if hidden is not None and (config.get("target_hidden_size") or config["hidden_size"]) != hidden:
        problems.append(f"the head takes states of width {config['hidden_size']}, the target's are {hidden}")
    if layers is not None and max(config["eagle_aux_hidden_state_layer_ids"]) > layers:
        problems.append(
            f"aux layer ids {config['eagle_aux_hidden_state_layer_ids']} exceed the target's {layers} layers"
        )
    limit = text.get("max_position_embeddings")
    if limit is not None and config["max_position_embeddings"] != limit:
        problems.append(
            f"max_position_embeddings is {config['max_position_embeddings']}, the target's is {limit}: write the "
            "target's, and the length trained on as trained_max_length"
        )
    return problems
