"""SIGKILL at random points, start again: the final weights equal those of an undisturbed run, bit for bit."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import torch
from safetensors.torch import load_file

from spec_train.training.checkpoint import best_checkpoint, latest_checkpoint

ROOT = Path(__file__).parents[2]


def test_killed_runs_end_like_an_undisturbed_one(tmp_path: Path) -> None:
    worker = subprocess.run(
        [sys.executable, "-m", "tests.integration.kill_worker", str(tmp_path), "0", "6"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert worker.returncode == 0, worker.stderr
    assert worker.stdout.count("killed after") == 6
    runs = [tmp_path / "whole", tmp_path / "killed"]
    latest = [latest_checkpoint(run / "checkpoints") for run in runs]
    assert latest[0] is not None
    assert latest[1] is not None
    assert latest[0].name == latest[1].name
    for file in ("model.safetensors", "optimizer.safetensors"):
        whole, killed = (load_file(path / file) for path in latest if path is not None)
        assert whole.keys() == killed.keys()
        for name in whole:
            assert torch.equal(whole[name], killed[name]), name
    best = [best_checkpoint(run / "checkpoints") for run in runs]
    assert best[0] is not None
    assert best[1] is not None
    assert best[0].name == best[1].name
    logs = [[json.loads(line) for line in (run / "log.jsonl").read_text().splitlines()] for run in runs]
    for line in (line for log in logs for line in log):
        line.pop("tokens_per_second", None)
        line.pop("memory_gb", None)
    assert logs[0] == logs[1]
    results = [json.loads((run / "result.json").read_text()) for run in runs]
    for key in ("steps", "trained_tokens", "best_value"):
        assert results[0][key] == results[1][key]
    assert not list((tmp_path / "killed").rglob("*.tmp"))
