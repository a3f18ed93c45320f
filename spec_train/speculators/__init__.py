"""The methods, one file each, and the one place that knows which name means which class."""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from spec_train.errors import UserError

if TYPE_CHECKING:
    from torch import Tensor

    from spec_train.recipe import SpeculatorOptions
    from spec_train.speculators.base import Speculator
    from spec_train.target import TargetModel

# type, as recipes, checkpoints and exports spell it: module and class. Imported when needed: torch is slow to load.
METHODS: dict[str, tuple[str, str]] = {
    "eagle3": ("spec_train.speculators.eagle3", "Eagle3"),
    "draft_lm": ("spec_train.speculators.draft_lm", "DraftLM"),
    "mtp": ("spec_train.speculators.mtp", "Mtp"),
    "mlp": ("spec_train.speculators.mlp", "Mlp"),
    "medusa": ("spec_train.speculators.medusa", "Medusa"),
    "eagle1": ("spec_train.speculators.eagle", "Eagle1"),
    "peagle": ("spec_train.speculators.peagle", "PEagle"),
    "pard": ("spec_train.speculators.pard", "Pard"),
}
EMBEDDING = "embed_tokens.weight"  # EAGLE heads may ship a copy of the target's


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

    `path`: a training checkpoint (speculator.json) or an export in any format (config.json), of ours or of another
    tool. Raises UserError.
    """
    if (path / "speculator.json").is_file():
        saved = read_json(path / "speculator.json")
        return speculator_class(saved["type"]).from_checkpoint(path, saved["config"], target)
    if not (path / "config.json").is_file() or not list(path.glob("*.safetensors")):
        raise UserError(
            f"{path}: neither a training checkpoint (speculator.json) nor an export (config.json, model.safetensors)"
        )
    config, tensors = read_json(path / "config.json"), export_tensors(path)
    shipped = tensors.pop(EMBEDDING, None)
    if shipped is not None and not torch_equal(shipped, target.embedding.weight):
        raise UserError(f"{path}: {EMBEDDING} is not the embedding of {target.name}, which heads here share")
    head = speculator_class(export_type(path, config)).from_serving(config, tensors, target)
    return head.to(target.device, target.dtype).eval().requires_grad_(False)


def export_tensors(path: Path) -> dict[str, Tensor]:
    """Every tensor of an export; of a stitched copy of the target those of the head. Raises UserError where one that
    export.json lists is missing."""
    from safetensors import safe_open

    description = read_json(path / "export.json") if (path / "export.json").is_file() else {"tensors": {}}
    listed, stitched = description["tensors"], description.get("format") == "stitched"
    tensors: dict[str, Tensor] = {}
    for shard in sorted(path.glob("*.safetensors")):
        with safe_open(shard, framework="pt") as file:
            names = [name for name in file.keys() if not stitched or name in listed]  # noqa: SIM118 - not a dict
            tensors.update({name: file.get_tensor(name) for name in names})
    missing = sorted(set(listed) - set(tensors))
    if missing:
        raise UserError(f"{path}: {missing[0]} is missing, which export.json lists; export again")
    return tensors


def torch_equal(shipped: Tensor, own: Tensor) -> bool:
    """Whether a shipped copy holds the target's values, in the target's dtype."""
    return bool((shipped.to(own) == own).all()) if shipped.shape == own.shape else False


def export_type(path: Path, config: dict[str, Any]) -> str:
    """The method of an export: as our export.json says, else as the config of another tool's checkpoint shows."""
    if (path / "export.json").is_file():
        return str(read_json(path / "export.json")["type"])
    architectures = " ".join(config.get("architectures") or [])
    eagle = "speculators_model_type" in config or "eagle3" in architectures.lower() or "draft_vocab_size" in config
    parallel = "pard_token" in config or "mask_token_id" in config
    if eagle:
        return "peagle" if parallel else "eagle3"
    if config.get("model_type") == "mlp_speculator":
        return "mlp"
    if config.get("model_type") == "medusa":
        return "medusa"
    if "MiMo" in architectures:
        return "mtp"
    return "pard" if parallel else "draft_lm"


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
