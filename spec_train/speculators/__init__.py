"""The methods, one file each, and the one place that knows which name means which class."""

from __future__ import annotations

import importlib
import logging
from pathlib import Path
from typing import TYPE_CHECKING, Any

from spec_train.errors import UserError
from spec_train.speculators.head_files import export_tensors, head_type, read_json, weight_files

if TYPE_CHECKING:
    from torch import Tensor

    from spec_train.recipe import SpeculatorOptions
    from spec_train.speculators.base import Speculator
    from spec_train.target import TargetModel

logger = logging.getLogger(__name__)
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
    tool, see `head_files.py`. Raises UserError.
    """
    from spec_train.packed import pack_linears
    from spec_train.speculators.start import StartableSpeculator

    head = read_speculator(path, target).to(target.device, target.dtype)
    if isinstance(head, StartableSpeculator):
        head.borrow(target)  # again: only now do dtype and device agree
    pack_linears(head)
    return head.eval().requires_grad_(False)


def read_speculator(path: Path, target: TargetModel) -> Speculator:
    """`load_speculator` in the precision of the reader: an export in float32, a checkpoint in the target's dtype."""
    if (path / "speculator.json").is_file():
        saved = read_json(path / "speculator.json")
        return speculator_class(saved["type"]).from_checkpoint(path, saved["config"], target)
    if not (path / "config.json").is_file() or not weight_files(path):
        raise UserError(
            f"{path}: neither a training checkpoint (speculator.json) nor an export (config.json, model.safetensors)"
        )
    config, tensors = read_json(path / "config.json"), export_tensors(path)
    shipped = tensors.pop(EMBEDDING, None)
    if shipped is not None and not torch_equal(shipped, target.embedding.weight):
        raise UserError(f"{path}: {EMBEDDING} is not the embedding of {target.name}, which heads here share")
    return speculator_class(head_type(path, config, tensors)).from_serving(config, tensors, target)


def torch_equal(shipped: Tensor, own: Tensor) -> bool:
    """Whether a shipped copy holds the target's values, in the target's dtype or in its own (a float16 copy)."""
    if shipped.shape != own.shape:
        return False
    return bool((shipped.to(own) == own).all()) or bool((own.to(shipped) == shipped).all())


def recorded_prompt(path: Path) -> dict[str, Any]:
    """How the prompts were rendered that a checkpoint or export was trained on: system_prompt, chat_template_kwargs,
    and the date where the template prints one. Empty where it is not on record."""
    if (path / "speculator.json").is_file():
        prompt: dict[str, Any] = read_json(path / "speculator.json").get("prompt", {})
        return prompt
    if (path / "export.json").is_file():
        provenance = read_json(path / "export.json").get("provenance", {})
        if "target.system_prompt" in provenance.get("withheld", []):
            logger.warning("%s: was trained with a system prompt that is not published; prompts go without it", path)
        section = provenance.get("recipe", {}).get("target", {})
        prompt = {key: section[key] for key in ("system_prompt", "chat_template_kwargs") if key in section}
        return {**prompt, "date": provenance["date"]} if "date" in provenance else prompt
    return {}
