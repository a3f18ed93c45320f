"""The methods, one file each, and the one place that knows which name means which class."""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from spec_train.errors import UserError

if TYPE_CHECKING:
    from spec_train.recipe import SpeculatorOptions
    from spec_train.speculators.base import Speculator
    from spec_train.target import TargetModel

# type, as recipes, checkpoints and exports spell it: module and class. Imported when needed: torch is slow to load.
METHODS: dict[str, tuple[str, str]] = {
    "eagle3": ("spec_train.speculators.eagle3", "Eagle3"),
}


def speculator_class(kind: str) -> type[Speculator]:
    """The class of a method's name. Raises UserError."""
    if kind not in METHODS:
        raise UserError(f"speculator type {kind!r} is not known; known are: {', '.join(METHODS)}")
    module, name = METHODS[kind]
    found: type[Speculator] = getattr(importlib.import_module(module), name)
    return found


def options_class(kind: str) -> type[SpeculatorOptions]:
    """What a recipe's `speculator` section of this type may hold. Raises UserError."""
    return speculator_class(kind).options


def load_speculator(path: Path, target: TargetModel) -> Speculator:
    """A trained speculator, frozen, in the target's dtype and on its device.

    `path`: a training checkpoint (speculator.json) or an export in any format (config.json). Raises UserError.
    """
    if (path / "speculator.json").is_file():
        saved = read_json(path / "speculator.json")
        return speculator_class(saved["type"]).from_checkpoint(path, saved["config"], target)
    if not (path / "config.json").is_file() or not (path / "model.safetensors").is_file():
        raise UserError(
            f"{path}: neither a training checkpoint (speculator.json) nor an export (config.json, model.safetensors)"
        )
    from safetensors.torch import load_file

    config = read_json(path / "config.json")
    kind = export_type(path, config)
    head = speculator_class(kind).from_serving(config, load_file(path / "model.safetensors"), target)
    return head.to(target.device, target.dtype).eval().requires_grad_(False)


def export_type(path: Path, config: dict[str, Any]) -> str:
    """The method of an export: as our export.json says, else as the config of another tool's checkpoint shows."""
    if (path / "export.json").is_file():
        return str(read_json(path / "export.json")["type"])
    architectures = " ".join(config.get("architectures") or [])
    if config.get("speculators_model_type") == "peagle" or "mask_token_id" in config:
        return "peagle"
    if "speculators_model_type" in config or "eagle3" in architectures.lower() or "draft_vocab_size" in config:
        return "eagle3"
    if config.get("model_type") == "mlp_speculator":
        return "mlp"
    if config.get("model_type") == "medusa":
        return "medusa"
    if "MiMo" in architectures:
        return "mtp"
    if "pard_token" in config:
        return "pard"
    return "draft_lm"


def recorded_prompt(path: Path) -> dict[str, Any]:
    """How the prompts were rendered that a checkpoint or export was trained on: system_prompt, chat_template_kwargs.
    Empty where it is not on record."""
    if (path / "speculator.json").is_file():
        prompt: dict[str, Any] = read_json(path / "speculator.json").get("prompt", {})
        return prompt
    if (path / "export.json").is_file():
        section = read_json(path / "export.json").get("provenance", {}).get("recipe", {}).get("target", {})
        return {key: section[key] for key in ("system_prompt", "chat_template_kwargs") if key in section}
    return {}


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object in a file."""
    value: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return value
