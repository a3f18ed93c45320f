"""Everything that a repository on the Hub holds for one export.

  README.md                    the card (`card.py`), in the place of the export's short one
  recipe.yaml                  the resolved recipe
  eval/<suite>-<type>-....json the evaluation results that the card states
  everything else              the export's own files, byte for byte

Two files of an export may name a local target: export.json, and config.json in the speculators format. They are then
written with its Hub id, because the path is of no use to anybody else. Nothing else of a run is published: no optimizer
state, no cache, no manifest, no training text.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from spec_train.errors import UserError
from spec_train.evaluation.report import result_name
from spec_train.recipe_file import dump_yaml, refuse_secrets
from spec_train.serving.card import write_card
from spec_train.serving.export import EXPORT_FILE, GOLDEN_FILE
from spec_train.serving.facts import Facts, read_facts
from spec_train.serving.stitch import OTHER_WEIGHTS

CARD_FILE = "README.md"
RECIPE_FILE = "recipe.yaml"


def publication(
    export_dir: Path, repo_id: str, overrides: Sequence[str] = (), results: Path | None = None
) -> dict[str, Path | bytes]:
    """Path inside the repository -> the export's file as it is (Path), or content made here (bytes).

    `overrides`: `hub.key=value`; `results`: evaluation results in the place of the run's own; see `read_facts`.
    Raises UserError where the export cannot be published or something in it looks like an access token.
    """
    return files_of(export_dir, read_facts(export_dir, repo_id, overrides, results))


def files_of(export_dir: Path, facts: Facts) -> dict[str, Path | bytes]:
    """`publication` of facts that are at hand."""
    made: dict[str, bytes] = {
        CARD_FILE: write_card(facts).encode(),
        EXPORT_FILE: _json(facts.description),
        "config.json": _config(export_dir, facts),
    }
    if facts.recipe:
        made[RECIPE_FILE] = dump_yaml(facts.recipe).encode()
    for result in facts.results:
        made[f"eval/{_file_of(result)}"] = _json(result)
    for name, content in made.items():
        refuse_secrets(f"{export_dir}: {name}", content.decode())
    files: dict[str, Path | bytes] = {}
    for path in _export_files(export_dir):
        name = path.relative_to(export_dir).as_posix()
        files[name] = made[name] if name in made and made[name] != path.read_bytes() else path
    return dict(sorted({**made, **files}.items()))


def _export_files(export_dir: Path) -> list[Path]:
    """The files that an export is made of. Anything else in the folder was put there by somebody and is refused:
    whether it is to be public is not for us to say."""
    files = sorted(path for path in export_dir.rglob("*") if path.is_file())
    for path in files:
        inside = path.relative_to(export_dir)
        odd = inside.name.startswith(".") or path.suffix in OTHER_WEIGHTS
        if odd or (len(inside.parts) > 1 and inside.as_posix() != GOLDEN_FILE):
            raise UserError(f"{path}: not a file of the export; move it away before it is published")
    return files


def _config(export_dir: Path, facts: Facts) -> bytes:
    """config.json; that of the speculators format names the target, which may have been a local folder."""
    content = (export_dir / "config.json").read_bytes()
    config: dict[str, Any] = json.loads(content)
    verifier = config.get("speculators_config", {}).get("verifier", {})
    if Path(verifier.get("name_or_path") or "").is_absolute():
        verifier["name_or_path"] = facts.description["target_id"]
        return _json(config)
    return content


def _file_of(result: dict[str, Any]) -> str:
    """The name of a result's file; those of another engine than ours may be of several loads."""
    name = result_name(result)
    if result["backend"] == "torch":
        return name
    return f"{name.removesuffix('.json')}-{result['backend']}-c{result['batch_size']}.json"


def _json(value: dict[str, Any]) -> bytes:
    return (json.dumps(value, indent=2, sort_keys=True) + "\n").encode()
