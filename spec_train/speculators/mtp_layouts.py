"""How model families store and run the multi-token-prediction (MTP) layer that they ship: one table.

Every family computes h' = W [RMS(a); RMS(b)], one decoder layer, a norm; they differ in which half of W reads the
state and which the embedding, in where the target's state is taken, and in what the tensors are called. A head put
together in another family's way loads without an error and drafts noise. In each of these families the state behind
the head's own final norm goes both to the output head and back into the next step, and embedding and output head are
the target's.

Sources: vLLM 0.32 `model_executor/models/{mimo,mimo_mtp,qwen3_5_mtp,deepseek_mtp}.py`, whose drafts ours must equal.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from safetensors import safe_open
from torch import Tensor

from spec_train.errors import UserError
from spec_train.speculators.layers import layer_geometry
from spec_train.target import TargetModel

LayoutName = Literal["mimo", "qwen3_5", "deepseek"]


@dataclass(frozen=True)
class Layout:
    """One family.

    prefix           what precedes every tensor of the first MTP layer; {L} is the target's number of layers
    names            our name of a module (MiMo's) -> the family's; the layer's own modules stand under `layer`
    layer_index      finds the number of an MTP layer in a tensor's name
    first_index      the number that the first MTP layer bears; None for the target's number of layers
    shared           copies of the target's embedding and output head in the file, which nothing reads
    embedding_first  W reads [embedding; state], otherwise [state; embedding]
    reads_pre_norm   the first step reads the target's state before its final norm, otherwise behind it
    zero_first       the embedding at position 0 is zeroed before its norm
    centred_norms    norm weights are stored as their distance from 1
    width_over_heads head_dim is hidden_size / num_attention_heads, whatever the target's own is
    count_key        how many MTP layers there are, in config.json
    """

    name: LayoutName
    prefix: str
    names: Mapping[str, str]
    layer: str
    layer_index: str
    first_index: int | None
    count_key: str
    shared: tuple[str, ...] = ()
    embedding_first: bool = True
    reads_pre_norm: bool = False
    zero_first: bool = True
    centred_norms: bool = False
    width_over_heads: bool = False


LAYOUTS: dict[LayoutName, Layout] = {
    "mimo": Layout(
        name="mimo",
        prefix="model.mtp_layers.0.",
        names={name: name for name in ("token_layernorm", "hidden_layernorm", "input_proj", "final_layernorm")},
        layer="",
        layer_index=r"^model\.mtp_layers\.(\d+)\.",
        first_index=0,
        count_key="num_nextn_predict_layers",
        embedding_first=False,
        reads_pre_norm=True,
        width_over_heads=True,
    ),
    "qwen3_5": Layout(
        name="qwen3_5",
        prefix="mtp.",
        names={
            "token_layernorm": "pre_fc_norm_embedding",
            "hidden_layernorm": "pre_fc_norm_hidden",
            "input_proj": "fc",
            "final_layernorm": "norm",
        },
        layer="layers.0.",
        layer_index=r"^mtp\.layers\.(\d+)\.",
        first_index=0,
        count_key="mtp_num_hidden_layers",
        zero_first=False,
        centred_norms=True,
    ),
    "deepseek": Layout(
        name="deepseek",
        prefix="model.layers.{L}.",
        names={
            "token_layernorm": "enorm",
            "hidden_layernorm": "hnorm",
            "input_proj": "eh_proj",
            "final_layernorm": "shared_head.norm",
        },
        layer="",
        layer_index=r"^model\.layers\.(\d+)\.",
        first_index=None,
        count_key="num_nextn_predict_layers",
        shared=("embed_tokens.weight", "shared_head.head.weight"),
    ),
}
# The same tensor names with another computation behind them.
_LOOKALIKES = ("glm", "exaone", "qwen3_next", "ernie")
# Beside these targets vLLM's MiMo block runs on its own: it takes its sizes from their config, as Qwen2 would.
_UNIVERSAL_TARGETS = ("llama", "qwen2", "qwen3")


def served_name(layout: Layout, name: str, num_layers: int) -> str:
    """The family's name of our tensor `name`, for a target of `num_layers` layers."""
    prefix = layout.prefix.format(L=num_layers)
    module, _, leaf = name.rpartition(".")
    if module in layout.names:
        return f"{prefix}{layout.names[module]}.{leaf}"
    return f"{prefix}{layout.layer}{name}"


def is_mimo(target: TargetModel) -> bool:
    """Whether vLLM runs this target as MiMo, whose MTP layer reads the state before the final norm."""
    return "MiMoForCausalLM" in (target.full_config.architectures or [])


def count_layers(names: Iterable[str], num_layers: int) -> int:
    """How many MTP layers the tensors of a checkpoint amount to, whatever its config declares."""
    found = set()
    for name in names:
        for layout in LAYOUTS.values():
            match = re.match(layout.layer_index, name)
            if match and int(match[1]) >= (num_layers if layout.first_index is None else 0):
                found.add((layout.name, match[1]))
    return len(found)


def find_head(tensors: Mapping[str, Tensor], target: TargetModel, where: str) -> tuple[Layout, dict[str, Tensor]]:
    """The layout of the MTP layer among `tensors`, and its tensors under our names.

    Raises UserError where there is none, or one that we would run in another way than vLLM does.
    """
    layers = target.num_layers
    count = count_layers(tensors, layers)
    layout = next((one for one in LAYOUTS.values() if served_name(one, "input_proj.weight", layers) in tensors), None)
    if layout is None and count:
        mixers = [served_name(one, "input_proj.weight", layers) for one in LAYOUTS.values()]
        raise UserError(f"{where} holds an MTP layer without what it begins with, one of {', '.join(mixers)}")
    if layout is None or count == 0:
        raise UserError(
            f"{where} holds no MTP layer (model.mtp_layers.0.*, mtp.*, model.layers.{layers}.eh_proj); "
            "a fine-tuned copy may have lost it: use the original, or set speculator.init to target_layer"
        )
    if count > 1:
        raise UserError(f"{where} holds {count} MTP layers: only a single one, applied again and again, can be trained")
    family = str(target.config.model_type)
    if family.startswith(_LOOKALIKES):
        raise UserError(f"{where}: the MTP layer of {family} is not supported; those of {', '.join(LAYOUTS)} are")
    prefix = layout.prefix.format(L=layers)
    ours = {f"{theirs}.": f"{name}." for name, theirs in layout.names.items()}
    head = {}
    for name, tensor in tensors.items():
        own = name.removeprefix(prefix)
        if own == name or own in layout.shared:
            continue
        renamed = next((ours[key] + own.removeprefix(key) for key in ours if own.startswith(key)), None)
        head[renamed or own.removeprefix(layout.layer)] = tensor
    if any("kv_a_proj" in name or "q_a_proj" in name for name in head):
        raise UserError(
            f"{where}: its MTP layer has latent attention (MLA), which is not supported; use eagle3 instead"
        )
    if any(".experts." in name for name in head):
        raise UserError(f"{where}: its MTP layer is a mixture of experts; only a dense one is supported, or use eagle3")
    return layout, head


def shipped_head(target: TargetModel) -> tuple[Layout, dict[str, Tensor]]:
    """`find_head` in the target's own folder: Transformers leaves these tensors out when it loads the model."""
    folder = target_folder(target)
    prefixes = tuple(layout.prefix.format(L=target.num_layers) for layout in LAYOUTS.values())
    tensors = {}
    for file in sorted(folder.glob("*.safetensors")):
        with safe_open(file, framework="pt") as opened:
            names = [name for name in opened.keys() if _is_mtp(name, target.num_layers, prefixes)]  # noqa: SIM118
            tensors.update({name: opened.get_tensor(name) for name in names})
    return find_head(tensors, target, f"target {folder}")


def _is_mtp(name: str, num_layers: int, prefixes: tuple[str, ...]) -> bool:
    return name.startswith(prefixes) or count_layers([name], num_layers) > 0


def target_folder(target: TargetModel) -> Path:
    """The folder that the target was loaded from. Raises UserError for a hub id."""
    folder = Path(target.name).expanduser()
    if not folder.is_dir():
        raise UserError(
            f"target.model {target.name}: its MTP layer is read from the checkpoint's files; "
            "download it and give the local folder"
        )
    return folder


def head_geometry(layout: Layout, target: TargetModel) -> dict[str, Any]:
    """Sizes and rotary settings of the layer, as keyword arguments of its config: the target's, as vLLM takes them."""
    geometry = layer_geometry(target)
    if layout.width_over_heads:
        geometry["head_dim"] = geometry["hidden_size"] // geometry["num_attention_heads"]
    rope = getattr(target.config, "rope_parameters", None) or {}
    share = float(rope.get("partial_rotary_factor") or 1.0)
    return {**geometry, "rotary_dim": int(geometry["head_dim"] * share)}


def check_universal(target: TargetModel) -> None:
    """Raise UserError where vLLM does not run a MiMo block beside this target as we train it."""
    kind, text = str(target.full_config.model_type), target.config
    advice = "use speculator.type eagle3 instead"
    if kind not in _UNIVERSAL_TARGETS:
        raise UserError(
            f"a fresh MTP head goes beside {', '.join(_UNIVERSAL_TARGETS)} targets; {target.name} is {kind}; {advice}"
        )
    if any(window is not None for window in target.windows.values()):
        raise UserError(f"a fresh MTP head cannot go beside a target with sliding windows ({target.name}); {advice}")
    if text.hidden_act != "silu" or target.hidden_size % text.num_attention_heads:
        raise UserError(
            f"a fresh MTP head needs silu and heads that divide the width; {target.name} has {text.hidden_act} and "
            f"{text.num_attention_heads} heads of {target.hidden_size}; {advice}"
        )
    if head_geometry(LAYOUTS["mimo"], target)["rotary_dim"] != target.hidden_size // text.num_attention_heads:
        raise UserError(f"a fresh MTP head cannot go beside partial rotary embeddings ({target.name}); {advice}")
