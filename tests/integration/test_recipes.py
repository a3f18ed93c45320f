"""Every shipped recipe goes the whole way, from prompts to a checkpoint that reloads strictly, on a tiny target of its
own family. Only sizes are replaced."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from spec_train.assets import asset_path
from spec_train.dry_run import plan
from spec_train.manifest import read_manifest
from spec_train.pipeline import STAGES
from spec_train.recipe import load_recipe
from spec_train.run import Run
from spec_train.serving.export import read_export
from spec_train.speculators import load_speculator
from tests.families import recipe_target

OTHERS = ("quickstart", "comparisons")  # run by `make quickstart` and by compare
SIZES = [
    "data.max_length=160",
    "data.held_out=3",
    "responses.max_new_tokens=20",
    "responses.batch_size=8",
    "train.epochs=1",
    "train.max_steps=4",
    "train.micro_batch_tokens=400",
    "train.grad_accum_steps=1",
    "train.save_every=4",
    "train.trackers=[]",
    "eval.suites=[held_out]",
    "eval.num_draft_tokens=[2]",
    "eval.temperature=[0.0]",
    "eval.max_new_tokens=12",
    "eval.speed_prompts=0",
    "eval.measure_costs=false",
    "export.verify_num_draft_tokens=2",
    "export.vllm=off",
    "run.device=cpu",
    "target.dtype=float32",  # losslessness is a promise in float32
]


def files() -> list[Path]:
    return sorted(f for f in asset_path("recipes").rglob("*.yaml") if f.parent.name not in OTHERS)


@pytest.fixture(scope="module")
def targets(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("targets")


def overrides(file: Path, target: Path, folder: Path) -> list[str]:
    """What makes the recipe small: target, data and sizes."""
    rows = [{"prompt": f"What is {n} and {n + 3}?"} for n in range(15)]
    (folder / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    recipe = load_recipe(file)
    small = [f"target.model={target}", f"data.sources=[{{path: {folder / 'prompts.jsonl'}}}]"]
    small += [f"run.output_dir={folder / 'run'}", "run.data_dir=null", *SIZES]
    options = recipe.speculator.model_dump()
    for key, value in (("draft_vocab_size", 200), ("loss_vocab_size", 200), ("ttt_steps", 2), ("num_heads", 2)):
        if options.get(key):
            small.append(f"speculator.{key}={value}")
    if options.get("start_model"):  # a smaller model with the target's tokenizer
        small.append(f"speculator.start_model={target}")
    if options.get("start_from"):
        small.append(f"speculator.start_from={general_head(target, folder)}")
    return small


def general_head(target: Path, folder: Path) -> Path:
    """An export of the recipe for the same target, with which a domain adaptation starts."""
    place = folder / "general"
    place.mkdir()
    file = asset_path("recipes") / "llama-3.1-8b-instruct" / "eagle3.yaml"
    run = Run(load_recipe(file, overrides(file, target, place)))
    for name, stage in STAGES.items():
        if name not in ("eval", "verify"):
            stage(run, False)
    return run.directory / "export" / "plain"


@pytest.mark.parametrize("file", files(), ids=lambda f: f"{f.parent.name}-{f.stem}")
def test_a_recipe_goes_the_whole_way(file: Path, targets: Path, tmp_path: Path) -> None:
    target = recipe_target(file, targets)
    run = Run(load_recipe(file, overrides(file, target, tmp_path)))
    planned = plan(run.recipe).lines
    assert [state for _, state, _ in planned] == ["found"] + ["to do"] * len(STAGES)
    assert not run.directory.exists()  # a dry run writes nothing
    for name, stage in STAGES.items():
        if name != "verify":  # its fresh process is tested elsewhere; the export is reloaded here
            stage(run, False)
    kind = run.recipe.speculator.type
    result = json.loads((run.directory / "eval" / f"held_out-{kind}-k2-t0.json").read_text())
    assert result["lossless"]["identical"] == result["lossless"]["checked"] == 3
    assert result["estimate"]["renewal"] == result["mean_acceptance_length"]
    for form in read_manifest(run.directory / "export")["outputs"]["serve"]:
        folder = run.directory / "export" / form
        head = load_speculator(folder, run.target("float32"))
        assert head.kind == kind
        assert "quantization_config" not in json.loads((folder / "config.json").read_text()), read_export(folder)
