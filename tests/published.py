"""Heads as other tools publish them, written by hand for the tiny models: nothing here comes from our exporters.

Names, shapes and configs follow the tools' own code: SafeAILab/EAGLE (pytorch_model.bin, `midlayer.*`; EAGLE-1 with
the target's embedding and no input norm), sgl-project/SpecForge (the same names in safetensors, layer ids under
`eagle_config`), vllm-project/speculators (`layers.0.*`, nested config), foundation-model-stack/fms-extras and
snowflakedb/ArcticInference (`speculator.*`), FasterDecoding/Medusa (medusa_lm_head.pt, `HEAD.LAYER.linear.weight`).
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

HIDDEN, WIDE, HEADS, KV_HEADS, HEAD_DIM, VOCAB, DRAFTED = 64, 128, 4, 2, 32, 320, 240
GEOMETRY: dict[str, Any] = {
    "hidden_size": HIDDEN,
    "intermediate_size": WIDE,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
    "num_hidden_layers": 1,
    "head_dim": HEAD_DIM,
    "vocab_size": VOCAB,
    "rms_norm_eps": 1e-6,
    "hidden_act": "silu",
    "max_position_embeddings": 512,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "use_cache": True,
    "torch_dtype": "float32",
    "transformers_version": "4.51.0",
}
LAYOUTS = ("eagle3", "eagle3 qwen3", "specforge", "speculators", "eagle1", "ibm", "ibm untied", "arctic", "medusa")
# Our names of the methods; where none is given, the first word.
METHOD = {"specforge": "eagle3", "speculators": "eagle3", "ibm": "mlp", "ibm untied": "mlp", "arctic": "mlp"}


class Draw:
    """Random tensors of sensible sizes."""

    def __init__(self, seed: int) -> None:
        self.generator = torch.Generator().manual_seed(seed)

    def weight(self, *shape: int) -> Tensor:
        return torch.randn(*shape, generator=self.generator) * shape[-1] ** -0.5

    def norm(self, size: int) -> Tensor:
        return 1 + 0.3 * torch.randn(size, generator=self.generator)

    def layer(self, prefix: str, reads: int, norms: tuple[str, ...]) -> dict[str, Tensor]:
        rows = {"q": HEADS * HEAD_DIM, "k": KV_HEADS * HEAD_DIM, "v": KV_HEADS * HEAD_DIM}
        tensors = {f"{prefix}self_attn.{n}_proj.weight": self.weight(size, reads) for n, size in rows.items()}
        tensors[f"{prefix}self_attn.o_proj.weight"] = self.weight(HIDDEN, HEADS * HEAD_DIM)
        tensors[f"{prefix}mlp.gate_proj.weight"] = self.weight(WIDE, HIDDEN)
        tensors[f"{prefix}mlp.up_proj.weight"] = self.weight(WIDE, HIDDEN)
        tensors[f"{prefix}mlp.down_proj.weight"] = self.weight(HIDDEN, WIDE)
        return {**tensors, **{f"{prefix}{name}.weight": self.norm(HIDDEN) for name in norms}}


def random_tensors(layout: str, embedding: Tensor, seed: int = 0) -> dict[str, Tensor]:
    """A head's tensors by their published names. `embedding`: the target's."""
    draw = Draw(seed)
    if layout == "eagle1":
        first = draw.layer("layers.0.", HIDDEN, ("post_attention_layernorm",))
        return {"embed_tokens.weight": embedding.clone(), "fc.weight": draw.weight(HIDDEN, 2 * HIDDEN), **first}
    if layout in ("ibm", "ibm untied"):
        own = range(3)
        tensors = {f"emb.{i}.weight": draw.weight(VOCAB, 48) for i in own}
        tensors |= {f"proj.{i}.weight": draw.weight(48, HIDDEN if i == 0 else 48) for i in own}
        tensors |= {f"head.{i}.weight": draw.weight(VOCAB, 48) for i in own}
        tensors |= {f"ln.{i}.weight": draw.norm(48) for i in own}
        tensors |= {f"ln.{i}.bias": 0.1 * draw.norm(48) for i in own}
        if layout == "ibm":  # tied: all heads hold the same, of the projections all but the first
            tensors = {n: tensors[re.sub(r"\d", "1" if "proj" in n and ".0." not in n else "0", n)] for n in tensors}
        return {f"speculator.{name}": value.clone() for name, value in tensors.items()}
    if layout == "arctic":
        tensors = {"forget_emb.0.weight": draw.weight(VOCAB, HIDDEN)}
        for gate in ("forget", "input", "cell", "output"):
            tensors |= {f"{gate}_proj.{i}.weight": draw.weight(HIDDEN, HIDDEN) for i in (0, 1)}
            tensors[f"{gate}_emb.0.weight"] = tensors["forget_emb.0.weight"]
        for name in ("cell_ln", "state_ln"):
            tensors |= {f"{name}.0.weight": draw.norm(HIDDEN), f"{name}.0.bias": 0.1 * draw.norm(HIDDEN)}
        tensors |= dict.fromkeys([f"head.{i}.weight" for i in range(3)], draw.weight(VOCAB, HIDDEN))
        return {f"speculator.{name}": value.clone() for name, value in tensors.items()}
    if layout == "medusa":
        tensors = {f"{i}.0.linear.weight": draw.weight(HIDDEN, HIDDEN) for i in range(3)}
        tensors |= {f"{i}.0.linear.bias": 0.1 * draw.norm(HIDDEN) for i in range(3)}
        return tensors | {f"{i}.1.weight": draw.weight(VOCAB, HIDDEN) for i in range(3)}
    prefix = "layers.0." if layout == "speculators" else "midlayer."
    norms = ("hidden_norm", "input_layernorm", "post_attention_layernorm")
    tensors = {"fc.weight": draw.weight(HIDDEN, 3 * HIDDEN), **draw.layer(prefix, 2 * HIDDEN, norms)}
    if layout == "eagle3 qwen3":
        tensors |= {f"{prefix}self_attn.{n}_norm.weight": draw.norm(HEAD_DIM) for n in "qk"}
    if layout == "speculators":
        tensors["embed_tokens.weight"] = embedding.clone()
    tensors |= {"norm.weight": draw.norm(HIDDEN), "lm_head.weight": draw.weight(DRAFTED, HIDDEN)}
    kept = torch.randperm(VOCAB, generator=draw.generator)[:DRAFTED].sort().values
    t2d = torch.zeros(VOCAB, dtype=torch.bool).index_fill_(0, kept, True)
    return tensors | {"d2t": kept - torch.arange(DRAFTED), "t2d": t2d}


def config_of(layout: str, target: str) -> dict[str, Any]:
    """The config.json that the tool writes. `target`: folder of the target."""
    if layout == "eagle1":
        return {**GEOMETRY, "architectures": ["LlamaForCausalLM"], "model_type": "llama", "bias": False}
    if layout in ("ibm", "ibm untied"):
        return {
            "architectures": ["MLPSpeculatorPreTrainedModel"],
            "model_type": "mlp_speculator",
            "emb_dim": HIDDEN,
            "inner_dim": 48,
            "n_candidates": 4,
            "n_predict": 3,
            "scale_input": layout == "ibm",
            "tie_weights": layout == "ibm",
            "top_k_tokens_per_head": [4, 3, 2],
            "torch_dtype": "float16",
            "vocab_size": VOCAB,
        }
    if layout == "arctic":
        widths = dict.fromkeys(("inner_dim", "emb_dim", "proj_dim"), str(HIDDEN))
        return {
            "architectures": ["ArcticLSTMSpeculatorPreTrainedModel"],
            "base_model_arch": "LlamaForCausalLM",
            "input_hidden_dim": HIDDEN,
            "method": "sum_lstm",
            "model_type": "mlp_speculator",
            "n_predict": 3,
            "scale_input": True,
            "tie_lstm_embs": True,
            "tie_weights": True,
            "top_k_tokens_per_head": [1, 1, 1],
            "vocab_size": VOCAB,
            **widths,
        }
    if layout == "medusa":  # the published ones count two heads, whatever the file holds
        return {"base_model_name_or_path": target, "medusa_num_heads": 2, "medusa_num_layers": 1}
    if layout == "speculators":
        proposal = {"proposal_type": "greedy", "speculative_tokens": 3, "accept_tolerance": 0.0, "verifier_accept_k": 1}
        verifier = {"name_or_path": target, "architectures": ["LlamaForCausalLM"]}
        return {
            "architectures": ["Eagle3Speculator"],
            "speculators_model_type": "eagle3",
            "speculators_version": "0.3.0",
            "draft_vocab_size": DRAFTED,
            "eagle_aux_hidden_state_layer_ids": [1, 2, 4],
            "norm_before_residual": True,
            "target_hidden_size": None,
            "speculators_config": {
                "algorithm": "eagle3",
                "default_proposal_method": "greedy",
                "proposal_methods": [proposal],
                "verifier": verifier,
            },
            "transformer_layer_config": {**GEOMETRY, "model_type": "llama"},
        }
    kind = {"architectures": ["LlamaForCausalLMEagle3"], "model_type": "llama"}
    if layout == "eagle3 qwen3":
        kind = {"architectures": ["Eagle3Qwen3ForCausalLM"], "model_type": "qwen3"}
    extra: dict[str, Any] = {"draft_vocab_size": DRAFTED}
    if layout == "specforge":
        extra |= {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 3, 4]}, "sliding_window": None}
        extra |= {"attention_bias": False, "rope_scaling": None, "use_sliding_window": False, "max_window_layers": 36}
    return {**GEOMETRY, **kind, **extra}


def write_head(folder: Path, layout: str, target: str, tensors: dict[str, Tensor], **changes: Any) -> Path:
    """The folder as the tool leaves it. `changes` replace entries of the config."""
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps({**config_of(layout, target), **changes}))
    if layout in ("eagle3", "eagle1"):
        torch.save(tensors, folder / "pytorch_model.bin")
    elif layout == "medusa":
        torch.save(tensors, folder / "medusa_lm_head.pt")
    else:
        save_file(tensors, folder / "model.safetensors")
    return folder


def published_name(layout: str, name: str) -> list[str]:
    """The published names of a tensor of our modules: several where tied copies are written out."""
    name = name.removeprefix("heads.")
    if name == "d2t":
        return []
    if layout in ("eagle3", "eagle3 qwen3", "specforge"):
        return [name.replace("layers.0.", "midlayer.")]
    if layout == "medusa":
        return [re.sub(r"blocks\.(\d)\.layers\.0\.", r"\1.0.linear.", re.sub(r"lm_heads\.(\d)", r"\1.1", name))]
    if layout == "ibm":
        tied = (1, 2) if name.startswith("proj.1") else (0,) if name.startswith("proj.0") else range(3)
        return [f"speculator.{re.sub(r'[0-9]', str(i), name)}" for i in tied]
    if layout in ("ibm untied", "arctic"):
        return [f"speculator.{name}"]
    return [name]


def republished(layout: str, tensors: dict[str, Tensor], trained: dict[str, Tensor]) -> dict[str, Tensor]:
    """`tensors` of a published head with the values that `trained`, the state of our module, has come to."""
    values = {new: value for name, value in trained.items() for new in published_name(layout, name)}
    assert values.keys() <= tensors.keys()
    return {**tensors, **{name: value.detach().clone() for name, value in values.items()}}
