"""A finished run of which one stage is made anew: whatever order, nothing stale is called current, nothing is mixed."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from spec_train.data.prompts import split_conversations
from spec_train.decoding.sampling import Sampling
from spec_train.dry_run import plan
from spec_train.errors import RunFailure, UserError
from spec_train.evaluation.evaluate import EvalSettings, evaluate_suite, ngram_contender
from spec_train.evaluation.run_report import collect
from spec_train.evaluation.turns import Suite
from spec_train.manifest import STAGES, read_manifest
from spec_train.pipeline import STAGES as MAKE
from spec_train.pipeline import evaluate_checkpoint, run_all
from spec_train.recipe import load_recipe
from spec_train.run import Run
from spec_train.serving.push_plan import PushPlan, plan_push
from spec_train.stages import export as export_stage
from spec_train.stages import prompts as prompts_stage
from spec_train.stages import responses as responses_stage
from spec_train.target import TargetModel
from spec_train.training import trainer
from tests.integration.test_run import ROOT, modified, run_all_until, write_recipe
from tests.tiny import tiny_model

# Which stages read what a stage makes, directly or through others.
AFTER = {
    "prompts": {"responses", "features", "train", "eval", "export", "verify"},
    "responses": {"features", "train", "eval", "export", "verify"},
    "features": {"train", "eval", "export", "verify"},
    "train": {"eval", "export", "verify"},
    "export": {"verify"},
}
HUB = ["hub.base_model=someone/model"]


@pytest.fixture(scope="module")
def kept(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """(recipe, a copy of its finished run)."""
    folder = tmp_path_factory.mktemp("stale")
    (folder / "mine.jsonl").write_text("".join(json.dumps({"prompt": f"say {n}"}) + "\n" for n in range(2)))
    path = write_recipe(
        folder,
        data={"held_out": 2},
        responses={"max_new_tokens": 12},
        features={"capture": False},
        train={"epochs": 1, "decode_prompts": 0},
        eval={"suites": ["held_out", str(folder / "mine.jsonl")], "speed_prompts": 0, "max_new_tokens": 8},
        export={"formats": ["plain"]},
    )
    run_all(load_recipe(path), force=set())
    shutil.copytree(folder / "run", folder / "kept")
    return path, folder / "kept"


@pytest.fixture
def recipe(kept: tuple[Path, Path]) -> Iterator[Path]:
    """The recipe of a finished run, which is put back afterwards."""
    path, copy = kept
    yield path
    shutil.rmtree(path.parent / "run")
    shutil.copytree(copy, path.parent / "run")


def other_split(*arguments: Any, seed: int, **sizes: Any) -> Any:
    return split_conversations(*arguments, seed=seed + 1, **sizes)


def noise(stage: str, patch: pytest.MonkeyPatch) -> None:
    """Let a stage end otherwise than before under the very same recipe, as a GPU's arithmetic or a server may."""
    if stage == "prompts":
        patch.setattr(prompts_stage, "split_conversations", other_split)
    elif stage == "responses":
        write = responses_stage.write_documents
        patch.setattr(responses_stage, "write_documents", lambda path, documents: write(path, documents[1:]))
    elif stage == "features":
        fill = TargetModel.fill_features

        def noisy(self: TargetModel, *arguments: Any) -> Any:
            batch = fill(self, *arguments)
            assert batch.last_hidden_BTH is not None
            return replace(batch, last_hidden_BTH=batch.last_hidden_BTH * 1.001)

        patch.setattr(TargetModel, "fill_features", noisy)
    elif stage == "train":
        patch.setattr(trainer, "learning_rate_scale", lambda *_, **__: 0.5)
    elif stage == "export":
        patch.setattr(export_stage, "GOLDEN_TEXT", "Other words for the sample that a reload must reproduce.")


def make(path: Path, stage: str, *overrides: str, force: bool = False) -> None:
    MAKE[stage](Run(load_recipe(path, overrides)), force)


def remake(path: Path, stage: str, patch: Callable[[], Any]) -> None:
    """One stage, with noise."""
    with patch() as patched:
        noise(stage, patched)
        make(path, stage, force=True)


def states(path: Path) -> dict[str, str]:
    return {stage: state for stage, state, _ in plan(load_recipe(path)).lines}


@pytest.mark.parametrize("stage", list(AFTER))
def test_what_was_made_from_something_else_is_never_current(
    recipe: Path, stage: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """After one stage came out otherwise: every later one as a single stage, in a whole run, in a dry run."""
    remake(recipe, stage, monkeypatch.context)
    before = modified(recipe.parent / "run")
    found = states(recipe)
    assert {name for name in STAGES if found[name] == "stale"} == AFTER[stage]
    assert {name for name in STAGES if found[name] == "done"} == set(STAGES) - AFTER[stage]
    first = next(name for name in STAGES if name in AFTER[stage])
    for later in (name for name in STAGES if name in AFTER[stage]):
        with pytest.raises(UserError, match=r"stage \w+ was made with what stage \w+ had made before") as refusal:
            make(recipe, later)
        (named,) = [name for name in AFTER[stage] if f"--force {name}`" in str(refusal.value)]
        assert STAGES.index(named) <= STAGES.index(later)
        assert "\n" not in str(refusal.value)
        if any(later in AFTER.get(name, ()) for name in AFTER[stage]):  # by force it would be built on a stale one
            with pytest.raises(UserError, match="had made before"):
                make(recipe, later, force=True)
    capsys.readouterr()
    with pytest.raises(UserError, match=rf"`spec-train run RECIPE --force {first}` makes it anew"):
        run_all(load_recipe(recipe), force=set())
    current = [line.partition(":")[0] for line in capsys.readouterr().err.splitlines() if line.endswith(": current")]
    assert not AFTER[stage] & set(current)
    assert modified(recipe.parent / "run") == before, "a refusal leaves everything as it was"


def test_what_comes_out_equal_leaves_later_stages_current(recipe: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """No time, place or machine is in the digests."""
    for stage in ("prompts", "responses", "features", "train", "export"):
        make(recipe, stage, force=True)
    assert {states(recipe)[stage] for stage in STAGES} == {"done"}
    capsys.readouterr()
    run_all(load_recipe(recipe), force=set())
    assert capsys.readouterr().err.count(": current") == len(STAGES)


@pytest.mark.parametrize(
    ("override", "stage", "field"),
    [
        ("data.held_out=3", "prompts", "data.held_out = 2, now it is 3"),
        ("responses.max_new_tokens=9", "responses", "responses.max_new_tokens = 12, now it is 9"),
        ("features.dtype=bfloat16", "features", 'dtype = "float32", now it is "bfloat16"'),
        ("optim.lr=0.01", "train", "optim.lr = 0.003, now it is 0.01"),
        ("export.verify_num_draft_tokens=2", "export", "num_draft_tokens = 3, now it is 2"),
    ],
)
def test_a_single_stage_looks_at_those_before_it(recipe: Path, override: str, stage: str, field: str) -> None:
    before = modified(recipe.parent / "run")
    for later in (name for name in STAGES if name in AFTER[stage]):
        for force in (False, True):
            with pytest.raises(UserError) as refusal:
                make(recipe, later, override, force=force)
            assert f"stage {stage} was made with {field}; `spec-train run RECIPE --force {stage}`" in str(refusal.value)
    assert modified(recipe.parent / "run") == before


def test_an_edited_suite_is_noticed(recipe: Path) -> None:
    suite = recipe.parent / "mine.jsonl"
    rows = suite.read_text()
    suite.write_text(rows + json.dumps({"prompt": "one more"}) + "\n")
    with pytest.raises(UserError, match=r"stage eval was made with suite_files.*--force eval"):
        make(recipe, "eval")
    suite.write_text(rows)
    make(recipe, "eval")


def test_a_changed_config_of_the_target_is_noticed(recipe: Path) -> None:
    file = Path(load_recipe(recipe).target.model or "") / "config.json"
    config = file.read_text()
    file.write_text(json.dumps({**json.loads(config), "rope_theta": 5000.0}))
    with pytest.raises(UserError, match=r"stage responses was made with target\.configs\.config\.json"):
        make(recipe, "train")
    file.write_text(config)


def test_mixed_results_are_not_published(recipe: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """New figures beside old weights, old figures beside new weights, an export that nobody verified."""
    export_dir = recipe.parent / "run" / "export" / "plain"

    def refused() -> str:
        with pytest.raises(UserError) as refusal:
            plan_push(export_dir, "me/head", HUB, None)
        assert "\n" not in str(refusal.value)
        return str(refusal.value)

    assert plan_push(export_dir, "me/head", HUB, None).unknown[:1] != ["the acceptance"]
    remake(recipe, "train", monkeypatch.context)
    assert "eval/held_out-eagle3-k3-t0.json" in plan_push(export_dir, "me/head", HUB, None).files  # all of the old
    with pytest.raises(UserError, match=r"its evaluation is of another training.*--force eval"):
        collect([recipe.parent / "run"])
    make(recipe, "eval", force=True)
    assert len(collect([recipe.parent / "run"]).curves) == 1
    assert "not of the weights in" in refused() and "--force export`" in refused()
    make(recipe, "export", force=True)
    assert "proved another export" in refused() and "--force verify`" in refused()
    with monkeypatch.context() as patched:
        patched.setattr(trainer, "learning_rate_scale", lambda *_, **__: 0.25)
        make(recipe, "train", force=True)
    make(recipe, "export", force=True)
    assert "not of the weights in" in refused() and "--force eval`" in refused()


def test_results_of_other_weights_are_refused_beside_a_folder(recipe: Path, tmp_path: Path) -> None:
    """An export that has left its run: its own results and those of its checkpoint are its, others are not."""
    run = Run(load_recipe(recipe))
    moved = Path(shutil.copytree(run.directory / "export" / "plain", tmp_path / "export" / "plain"))
    target, suite = str(run.recipe.target.model), str(recipe.parent / "mine.jsonl")
    (own,) = evaluate_checkpoint(str(moved), target, suite, [3], [0.0], max_new_tokens=4, speed_prompts=0)
    (of_checkpoint,) = (json.loads(file.read_text()) for file in (run.directory / "eval").glob("mine-eagle3*.json"))
    assert own["weights_sha256"] != of_checkpoint["weights_sha256"], "of two files with the same weights"
    file = tmp_path / "result.json"

    def planned(result: dict[str, Any]) -> PushPlan:
        file.write_text(json.dumps(result))
        return plan_push(moved, "me/head", HUB, file)

    for result in (own, of_checkpoint):
        assert "eval/mine-eagle3-k3-t0.json" in planned(result).files
    with pytest.raises(UserError, match=r"its figures are not of the weights in .*plain; "):
        planned({**own, "weights_sha256": "0" * 64})
    with pytest.raises(UserError, match="or do not say of which"):
        planned({**own, "weights_sha256": None})


def test_an_interrupted_evaluation_does_not_go_on_with_other_weights(
    recipe: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = recipe.parent / "run" / "eval"
    (directory / "manifest.json").unlink()
    (directory / "mine-eagle3-k3-t0.json").unlink()
    remake(recipe, "train", monkeypatch.context)
    with pytest.raises(UserError, match="eval was interrupted while being made with what stage train had made before"):
        make(recipe, "eval")


def test_results_are_taken_up_again_for_the_same_weights_only(tmp_path: Path) -> None:
    target = TargetModel.load(str(tiny_model("llama", tmp_path)))
    suite = Suite("two", ["a", "b"], ["", ""], [[5, 6, 7, 5, 6], [20, 21, 20]])
    settings = EvalSettings(Sampling(), 6, 1, speed_prompts=0)
    head = replace(ngram_contender(1, 3, [2]), weights="first")  # named by a path, as a retrained head is

    def measured(contender: Any, settings: EvalSettings = settings) -> dict[str, Any]:
        (result,) = evaluate_suite(
            target, [contender], suite, settings, target_name="tiny", directory=tmp_path / "eval"
        )
        return result

    first = measured(head)
    file = tmp_path / "eval" / "two-ngram-k2-t0.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "mark": 1}))
    assert measured(head)["mark"] == 1
    assert "mark" not in measured(replace(head, weights="second"))
    assert json.loads(file.read_text())["weights_sha256"] == "second"
    file.write_text(json.dumps({**first, "mark": 1}))
    assert "mark" not in measured(head, replace(settings, max_new_tokens=5))


def test_a_run_of_an_older_version_is_one_clear_line(recipe: Path) -> None:
    """Its manifests have no record of what came out, its results and its export none of their weights."""
    run = recipe.parent / "run"
    for stage in STAGES:
        file = run / stage / "manifest.json"
        manifest = json.loads(file.read_text())
        del manifest["outputs_sha256"]
        file.write_text(json.dumps(manifest))
    for stage in STAGES:
        named = "prompts"
        with pytest.raises(UserError, match=rf"stage {named} was made by an older spec-train.*--force {named}`"):
            make(recipe, stage)
    assert {states(recipe)[stage] for stage in STAGES} == {"stale"}
    for file in [*(run / "eval").glob("*.json"), run / "export" / "plain" / "export.json"]:
        content = json.loads(file.read_text())
        content.pop("weights_sha256", None)
        content.get("provenance", {}).pop("weights_sha256", None)
        file.write_text(json.dumps(content))
    planned = plan_push(run / "export" / "plain", "me/head", HUB, None)
    assert any("an older spec-train" in line for line in planned.unknown)
    assert not any(name.startswith("eval/") for name in planned.files)


def test_verify_fails_where_the_export_is_not_what_was_trained(recipe: Path) -> None:
    file = recipe.parent / "run" / "export" / "plain" / "model.safetensors"
    tensors = load_file(file)
    tensors["fc.weight"] = tensors["fc.weight"] + 0.05
    save_file(tensors, file, metadata={"format": "pt"})
    with pytest.raises(RunFailure, match=r"^verify: "):
        make(recipe, "verify", force=True)
    assert not (recipe.parent / "run" / "verify" / "manifest.json").exists()
    assert states(recipe)["verify"] == "begun"


def test_answers_of_one_token_are_refused_before_training(tmp_path: Path) -> None:
    path = write_recipe(tmp_path, responses={"max_new_tokens": 1})
    with pytest.raises(UserError, match="no answer is longer than one token") as refusal:
        run_all_until(load_recipe(path), "train")
    assert "\n" not in str(refusal.value)
    assert not (tmp_path / "run" / "train").exists()


def test_plain_text_finishes_a_run(tmp_path: Path) -> None:
    """Its rows have no prompt: what is decoded goes on from the beginnings of the texts."""
    path = write_recipe(
        tmp_path, data={"held_out": 3}, responses={"mode": "keep"}, features={"mode": "online"}, train={"epochs": 1},
        eval={"speed_prompts": 0, "max_new_tokens": 8, "baselines": []}, export={"formats": ["plain"]},
    )  # fmt: skip
    rows = [{"text": f"the text number {n} tells of {n} things and of {n + 1} more"} for n in range(12)]
    (tmp_path / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    run_all(load_recipe(path), force=set())
    result = json.loads((tmp_path / "run" / "eval" / "held_out-eagle3-k3-t0.json").read_text())
    assert result["num_prompts"] == 3
    assert result["lossless"]["identical"] == 3
    assert read_manifest(tmp_path / "run" / "verify")["counts"]["prompts"] == 3


@pytest.mark.slow
def test_a_refusal_under_a_launcher_ends_every_process(recipe: Path) -> None:
    """The main process refuses; the other one waits for its word and must get it."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
    done = subprocess.run(
        [*command, "-m", "spec_train", "train", str(recipe), "responses.max_new_tokens=9"],
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)},
        capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert done.returncode != 0
    assert done.stderr.count("error: ") == 1
    assert "stage responses was made with responses.max_new_tokens = 12, now it is 9" in done.stderr
