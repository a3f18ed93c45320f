"""Files that ship with the library: recipes, accelerate configs, prompt sets and evaluation suites.

In a clone they lie at the repository root; the wheel packs the same folders into `spec_train/_assets`.
"""

from __future__ import annotations

from pathlib import Path

from spec_train.errors import UserError

ASSET_PREFIX = "asset:"
_PACKAGE = Path(__file__).resolve().parent


def asset_path(relative: str) -> Path:
    """The path of a bundled file or folder, named from the repository root (`eval/suites/gsm8k.yaml`).

    Raises UserError where nothing of that name is bundled.
    """
    packed = _PACKAGE / "_assets"
    root = packed if packed.is_dir() else _PACKAGE.parent
    path = (root / relative).resolve()
    if not path.is_relative_to(root) or not path.exists():
        raise UserError(f"{relative}: no such bundled file; bundled are recipes/, accelerate_configs/, data/ and eval/")
    return path


def resolve_path(path: str) -> Path:
    """A path given in a recipe: `asset:data/gsm8k.jsonl` names a bundled file, anything else a local one."""
    if path.startswith(ASSET_PREFIX):
        return asset_path(path.removeprefix(ASSET_PREFIX))
    return Path(path).expanduser()
