"""Every file under recipes/ dry-runs as it is shipped; only what needs a network is replaced: the target, by a tiny one
of its family, and sources on the Hub. Their way from prompts to a checkpoint is tested in test_recipes.py."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml

from spec_train.assets import asset_path
from spec_train.comparison import load_comparison
from spec_train.recipe import load_recipe
from tests.families import recipe_target
from tests.program import spec_train
from tests.tiny import tiny_model

FILES = sorted(file for file in asset_path("recipes").rglob("*") if file.is_file())
COMPARISONS = [file for file in FILES if file.parent.name == "comparisons"]
SHIPPED = [file for file in FILES if file.suffix == ".yaml" and file not in COMPARISONS]
STAGES = ["target", "prompts", "responses", "features", "train", "eval", "export", "verify"]


@pytest.fixture(scope="module")
def targets(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the tiny targets lie, beside questions in the place of the Hub's; the working directory is empty."""
    folder = tmp_path_factory.mktemp("targets")
    rows = [json.dumps({"prompt": f"What is {n} and {n + 3}?"}) for n in range(300)]
    (folder / "prompts.jsonl").write_text("\n".join(rows) + "\n")
    return folder


def replaced(file: Path, targets: Path) -> list[str]:
    """The overrides that make a shipped recipe's dry run possible without a network."""
    recipe = load_recipe(file)
    if file.parent.name == "quickstart":  # as deep as the real one, whose layers the recipes name
        target = targets / "llama-0"
        if not target.is_dir():
            tiny_model("llama", targets, num_hidden_layers=30, max_position_embeddings=8192)
    else:
        target = recipe_target(file, targets)
    changes = [f"target.model={target}", *(f"target.{key}=null" for key in ("package", "member", "sha256", "revision"))]
    changes += ["run.device=cpu"]
    for number, source in enumerate(recipe.data.sources):
        if source.hub is not None:
            changes.append(f"data.sources.{number}={{path: {targets / 'prompts.jsonl'}}}")
    return changes


@pytest.mark.parametrize("file", SHIPPED, ids=lambda file: f"{file.parent.name}-{file.stem}")
def test_a_recipe_dry_runs(file: Path, targets: Path, tmp_path: Path) -> None:
    shown = spec_train(tmp_path, "run", str(file), "--dry-run", *replaced(file, targets))
    assert shown.returncode == 0, shown.stderr
    lines = [line.split() for line in shown.stdout.splitlines()]
    assert [line[0] for line in lines] == STAGES
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("file", COMPARISONS, ids=lambda file: file.stem)
def test_a_comparison_dry_runs(file: Path, targets: Path, tmp_path: Path) -> None:
    """Every entry is planned, on the same data."""
    comparison = yaml.safe_load(file.read_text())
    for entry in comparison["entries"]:
        recipe = asset_path(entry["recipe"])
        assert recipe in SHIPPED
        entry["overrides"] = [*entry.get("overrides", []), *replaced(recipe, targets)]
    copy = tmp_path / file.name
    copy.write_text(yaml.safe_dump(comparison))
    shown = spec_train(tmp_path, "compare", str(copy), "--dry-run")
    assert shown.returncode == 0, shown.stderr
    lines = shown.stdout.splitlines()
    assert [line.split()[0] for line in lines[:4]] == ["target", "prompts", "responses", "features"]
    entries = load_comparison(file).entries
    assert len(lines) == 4 + len(entries)
    for entry, line in zip(entries, lines[4:], strict=True):
        assert line.startswith(entry.name or load_recipe(Path(entry.recipe)).speculator.type)
    assert list(tmp_path.iterdir()) == [copy]


def test_every_other_file_belongs_to_a_recipe() -> None:
    sources = {Path(source.path) for file in SHIPPED for source in load_recipe(file).data.sources if source.path}
    assert set(FILES) - set(SHIPPED) - set(COMPARISONS) <= sources
