"""The methods, one file each, and the one place that knows which name means which class."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from spec_train.errors import UserError

if TYPE_CHECKING:
    from spec_train.speculators.eagle3 import Eagle3
    from spec_train.target import TargetModel


def speculator_class(kind: str) -> type[Eagle3]:
    """The class of a method's name, as recipes, checkpoints and exports spell it. Raises UserError."""
    if kind == "eagle3":
        from spec_train.speculators.eagle3 import Eagle3

        return Eagle3
    raise UserError(f"speculator type {kind!r} is not known; known are: eagle3")


def load_speculator(path: Path, target: TargetModel) -> Eagle3:
    """A trained speculator, frozen, in the target's dtype and on its device.

    `path`: a training checkpoint (speculator.json) or an export in either format (config.json). Raises UserError.
    """
    if (path / "speculator.json").is_file():
        saved = _read_json(path / "speculator.json")
        return speculator_class(saved["type"]).from_checkpoint(path, saved["config"], target)
    if not (path / "config.json").is_file() or not (path / "model.safetensors").is_file():
        raise UserError(
            f"{path}: neither a training checkpoint (speculator.json) nor an export (config.json, model.safetensors)"
        )
    from safetensors.torch import load_file

    config = _read_json(path / "config.json")
    head = speculator_class("eagle3").from_serving(config, load_file(path / "model.safetensors"), target)
    return head.to(target.device, target.dtype)


def recorded_prompt(path: Path) -> dict[str, Any]:
    """How the prompts were rendered that a checkpoint or export was trained on: system_prompt, chat_template_kwargs.
    Empty where it is not on record."""
    if (path / "speculator.json").is_file():
        prompt: dict[str, Any] = _read_json(path / "speculator.json").get("prompt", {})
        return prompt
    if (path / "export.json").is_file():
        section = _read_json(path / "export.json").get("provenance", {}).get("recipe", {}).get("target", {})
        return {key: section[key] for key in ("system_prompt", "chat_template_kwargs") if key in section}
    return {}


def _read_json(path: Path) -> dict[str, Any]:
    value: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return value
