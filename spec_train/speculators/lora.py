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


def merged(tensors: dict[str, Tensor], lora: dict[str, Any]) -> dict[str, Tensor]:
    """The tensors of a module with adapters as those of the plain module, under its own names."""
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
