"""A method that is not ours goes the whole way: one module and two lines, no edit to trainer, data, decoder, export.
And a comparison of several recipes ends in one table."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from spec_train.comparison import compare
from spec_train.errors import UserError
from spec_train.serving.contract import CAPABILITIES, Capability
from spec_train.speculators import METHODS
from tests.tiny import tiny_model

ROOT = Path(__file__).parents[2]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working directory with a tiny target and prompts; in this process the method is known too."""
    monkeypatch.setitem(METHODS, "bigram", ("tests.bigram", "Bigram"))
    monkeypatch.setitem(CAPABILITIES, "bigram", Capability("custom_class"))
    tiny_model("llama", tmp_path).rename(tmp_path / "target")
    rows = [{"id": f"row-{n}", "prompt": f"What is {n} plus two?"} for n in range(14)]
    (tmp_path / "prompts.jsonl").write_text("\n".join(json.dumps(row) for row in rows) + "\n")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def recipe(folder: Path, kind: str, **speculator: Any) -> Path:
    fields = {
        "run": {"name": f"tiny-{kind}", "device": "cpu", "data_dir": "data"},
        "target": {"model": "target"},
        "data": {"sources": [{"path": "prompts.jsonl"}], "held_out": 3, "max_length": 128},
        "responses": {"max_new_tokens": 12},
        "features": {"mode": "offline", "dtype": "float32", "aux_layer_ids": [1, 2, 4]},
        "speculator": {"type": kind, **speculator},
        "train": {"epochs": 8, "precision": "fp32", "micro_batch_tokens": 256},
        "optim": {"lr": 1.0e-2},
        "eval": {"num_draft_tokens": [2], "speed_prompts": 1},
        "export": {"vllm": "off", "verify_prompts": 2, "verify_num_draft_tokens": 2},
    }
    file = folder / f"{kind}.yaml"
    file.write_text(yaml.safe_dump(fields))
    return file


def test_a_new_method_is_one_module_and_two_lines(folder: Path) -> None:
    """In a copy of the package: the module, a line in `speculators/__init__.py`, a line in `serving/contract.py`."""
    package = folder / "package" / "spec_train"
    shutil.copytree(ROOT / "spec_train", package, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "tests" / "bigram.py", package / "speculators" / "bigram.py")
    add_line(
        package / "speculators/__init__.py", "METHODS:", '    "bigram": ("spec_train.speculators.bigram", "Bigram"),'
    )
    add_line(package / "serving/contract.py", "CAPABILITIES:", '    "bigram": Capability("custom_class"),')
    command = [sys.executable, "-m", "spec_train", "run", str(recipe(folder, "bigram"))]
    environment = {**os.environ, "PYTHONPATH": str(package.parent)}
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    run = folder / "runs" / "tiny-bigram"
    result = json.loads((run / "eval" / "held_out-bigram-k2-t0.json").read_text())
    assert result["lossless"]["identical"] == 3
    assert result["estimate"]["renewal"] == result["mean_acceptance_length"]
    (report,) = json.loads((run / "verify" / "report.json").read_text())
    assert report["ok"] and report["reload"]["drafts_equal"]


def add_line(file: Path, after: str, line: str) -> None:
    """Put `line` after the one that starts with `after`."""
    lines = file.read_text().splitlines()
    place = next(i for i, text in enumerate(lines) if text.startswith(after))
    file.write_text("\n".join([*lines[: place + 1], line, *lines[place + 1 :]]) + "\n")


def test_a_comparison_trains_all_on_the_same_data_and_ends_in_one_table(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    entries: list[Any] = [
        {"recipe": str(recipe(folder, "bigram"))},
        {"recipe": str(folder / "bigram.yaml"), "name": "wide", "overrides": ["speculator.width=64"]},
        {"recipe": str(recipe(folder, "eagle3", ttt_steps=2, aux_layer_ids=[1, 2, 4]))},
    ]
    file = folder / "compare.yaml"
    fields = {"name": "tiny", "tokens": 400, "num_draft_tokens": [1, 2], "decode": [2], "entries": entries}
    file.write_text(yaml.safe_dump(fields))
    compare(file)
    printed = capsys.readouterr().out
    rows = json.loads((folder / "runs" / "tiny" / "comparison.json").read_text())["rows"]
    assert [row["name"] for row in rows] == ["bigram", "wide", "eagle3", "prompt lookup"]
    for row in rows[:3]:
        assert row["name"] in printed
        assert abs(row["training"]["trained_tokens"] - 400) < 132  # a step more or less
        assert row["decoded"]["2"]["lossless"]["identical"] == 3
        assert row["estimates"]["2"] == row["decoded"]["2"]["mean_acceptance_length"]
    assert rows[1]["parameters"] == 2 * rows[0]["parameters"]
    before = (folder / "runs" / "tiny" / "comparison.md").read_text()
    compare(file)  # everything is current: nothing is trained or decoded again
    assert (folder / "runs" / "tiny" / "comparison.md").read_text() == before


def test_a_comparison_needs_shared_data_and_names(folder: Path) -> None:
    file = folder / "compare.yaml"
    one = {"recipe": str(recipe(folder, "bigram"))}
    other = {**one, "name": "other", "overrides": ["run.data_dir=elsewhere"]}
    for entries, message in (([one, one], "two entries"), ([one, other], "same run.data_dir")):
        file.write_text(yaml.safe_dump({"name": "tiny", "tokens": 10, "entries": entries}))
        with pytest.raises(UserError, match=message):
            compare(file)
    file.write_text(yaml.safe_dump({"name": "tiny", "entries": [one]}))
    with pytest.raises(UserError, match="exactly one of seconds and tokens"):
        compare(file)
