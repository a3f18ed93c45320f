"""`spec-train run RECIPE --dry-run`: counts, bytes and refusals, and nothing written."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml

from spec_train.dry_run import plan
from spec_train.errors import UserError
from spec_train.recipe import load_recipe
from tests.program import spec_train
from tests.tiny import tiny_model


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("dry")
    rows: list[dict[str, object]] = [{"prompt": f"question {n}"} for n in range(20)]
    (folder / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in [*rows, {"messages": []}]))
    fields = {
        "run": {"name": "dry", "output_dir": str(folder / "out"), "device": "cpu"},
        "target": {"model": str(tiny_model("llama", folder)), "dtype": "float32"},
        "data": {"sources": [{"path": str(folder / "prompts.jsonl")}], "held_out": 4, "max_length": 100},
        "responses": {"max_new_tokens": 30},
        "features": {"mode": "offline", "dtype": "float32"},
        "speculator": {"type": "eagle3", "draft_vocab_size": 200},
        "train": {"micro_batch_tokens": 400, "epochs": 2},
    }
    (folder / "r.yaml").write_text(yaml.safe_dump(fields))
    return folder / "r.yaml"


def test_what_the_stages_would_do(recipe: Path) -> None:
    lines = {stage: text for stage, _, text in plan(load_recipe(recipe)).lines}
    assert "llama, 0.00B parameters" in lines["target"]
    assert lines["prompts"] == "15 conversations, 1 for validation, 4 held out, 1 rows dropped"
    assert "at most 600 tokens" in lines["responses"]  # 20 answers of at most 30
    # Three layers and the last state, 64 numbers of 4 bytes each, and one number more: 1028 bytes, 2000 positions.
    assert lines["features"].startswith("1 KB a token, at most 2.1 MB; ")
    assert "2 epochs, at most 8 steps of 400 tokens" in lines["train"]
    assert "1 KB a token)" in plan(load_recipe(recipe, ["features.mode=online"])).lines[3][2]
    other = ["speculator.type=medusa", "eval.num_draft_tokens=[3]", "features.dtype=bfloat16"]
    assert plan(load_recipe(recipe, other)).lines[3][2].startswith("132 B a token")


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("target.model=nobody/nothing", "its config cannot be read"),
        ("data.sources.0={hub: nobody/nothing}", "cannot be reached"),
        ("data.held_out=20", "ask for fewer"),
    ],
)
def test_what_would_stop_the_run_is_said_now(recipe: Path, override: str, message: str) -> None:
    with pytest.raises(UserError, match=message) as caught:
        plan(load_recipe(recipe, [override]))
    assert "\n" not in str(caught.value)


def test_the_command_writes_nothing(recipe: Path) -> None:
    done = spec_train(recipe.parent, "run", str(recipe), "--dry-run")
    assert done.returncode == 0, done.stderr
    assert len(done.stdout.splitlines()) == 8
    assert not (recipe.parent / "out").exists()
