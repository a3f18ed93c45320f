"""Low-rank adapters (Hu et al., 2022, arXiv:2106.09685) through peft, and their merge into plain weights.

y = W x + (alpha / r) B A x        A [r, in], B [out, r] start at random and at 0
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from spec_train.errors import UserError


def inject_lora(module: nn.Module, lora: dict[str, Any]) -> None:
    """Put adapters beside the linear layers of `module`; they alone are trained. Random from torch's generator.

    `lora`: rank, alpha and target_modules (ends of layers' names, or "all-linear"). Raises UserError where none fits.
    """
    from peft import LoraConfig, inject_adapter_in_model

    modules = lora["target_modules"]
    if modules == "all-linear":
        linear = [name for name, part in module.named_modules() if isinstance(part, nn.Linear)]
        modules = sorted({name.rsplit(".", 1)[-1] for name in linear})
    config = LoraConfig(r=lora["rank"], lora_alpha=lora["alpha"], target_modules=modules, lora_dropout=0.0)
    try:
        inject_adapter_in_model(config, module)
    except ValueError as error:
        first = str(error).strip().splitlines()[0]
        raise UserError(f"speculator.lora.target_modules {modules}: {first}") from None


def merged(tensors: dict[str, Tensor], lora: dict[str, Any], where: str) -> dict[str, Tensor]:
    """The tensors of a module with adapters as those of the plain module, under its own names.

    Raises UserError, begun with `where`, for an adapter without its layer, or one that is not whole or of another rank.
    """
    _check_adapters(tensors, int(lora["rank"]), where)
    out = {}
    for name, value in tensors.items():
        if ".lora_" in name:
            continue
        if name.endswith(".base_layer.weight"):
            layer = name.removesuffix(".base_layer.weight")
            down, up = (tensors[f"{layer}.lora_{part}.default.weight"].float() for part in "AB")
            value = (value.float() + lora["alpha"] / lora["rank"] * (up @ down)).to(value.dtype)
        out[name.replace(".base_layer.", ".")] = value
    return out


def _check_adapters(tensors: dict[str, Tensor], rank: int, where: str) -> None:
    ends = ".base_layer.weight"
    shapes = {
        f"{name.removesuffix(ends)}.lora_{part}.default.weight": (rank, weight.shape[1])
        if part == "A"
        else (weight.shape[0], rank)
        for name, weight in tensors.items()
        if name.endswith(ends)
        for part in "AB"
    }
    given = {name: tuple(value.shape) for name, value in tensors.items() if ".lora_" in name}
    wrong = sorted(name for name in shapes.keys() | given.keys() if shapes.get(name) != given.get(name))
    if wrong:
        raise UserError(
            f"{where}: the adapter {wrong[0]} has shape {given.get(wrong[0])} and its layer asks for "
            f"{shapes.get(wrong[0])} (None: there is none)"
        )
