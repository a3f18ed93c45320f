"""The same global batch gives the same training, however it is spread: accumulation, two processes, ZeRO, FSDP2."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from spec_train.training.checkpoint import latest_checkpoint
from tests.toy_speculator import mean_weight, toy_train

ROOT = Path(__file__).parents[2]
LAUNCH = [sys.executable, "-m", "accelerate.commands.launch", "--main_process_port", "0"]


def launch(config: str, flags: list[str], output_dir: Path, *, fails: bool = False, **arguments: Any) -> str:
    """Run train_worker under an accelerate config of the repository; returns what it printed."""
    command = [*LAUNCH, "--config_file", f"accelerate_configs/{config}.yaml", *flags]
    worker = subprocess.run(
        [*command, "-m", "tests.integration.train_worker", str(output_dir), json.dumps(arguments)],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert (worker.returncode != 0) == fails, worker.stdout + worker.stderr
    return worker.stdout + worker.stderr


def log_lines(output_dir: Path) -> list[dict[str, float]]:
    lines = [json.loads(line) for line in (output_dir / "log.jsonl").read_text().splitlines()]
    return [
        {key: value for key, value in line.items() if key not in ("tokens_per_second", "memory_gb")} for line in lines
    ]


def assert_same_training(one: Path, two: Path, tolerance: float) -> None:
    for a, b in zip(log_lines(one), log_lines(two), strict=True):
        assert a == pytest.approx(b, abs=tolerance)
    files = []
    for run in (one, two):
        latest = latest_checkpoint(run / "checkpoints")
        assert latest is not None
        files.append(load_file(latest / "model.safetensors"))
    assert files[0].keys() == files[1].keys()
    for name, value in files[0].items():
        torch.testing.assert_close(value, files[1][name], rtol=0, atol=tolerance)


@pytest.fixture(scope="module")
def single(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One process that accumulates two micro-batches."""
    output_dir = tmp_path_factory.mktemp("single")
    result = toy_train(output_dir, grad_accum_steps=2, decode=mean_weight)
    assert result.steps == 10
    return output_dir


def test_two_processes_train_like_one(single: Path, tmp_path: Path) -> None:
    launch("cpu", [], tmp_path / "run", trackers=["tensorboard"])
    assert_same_training(single, tmp_path / "run", 1e-5)
    # One tracker run in all, not one a process.
    events = list((tmp_path / "run" / "tensorboard").glob("events.out.tfevents.*"))
    assert len(events) == 1


def test_a_process_without_work_takes_part(tmp_path: Path) -> None:
    """All documents of an epoch fit into one micro-batch."""
    toy_train(tmp_path / "one", grad_accum_steps=2, micro_batch_tokens=1024, decode=mean_weight)
    launch("cpu", [], tmp_path / "two", micro_batch_tokens=1024)
    assert_same_training(tmp_path / "one", tmp_path / "two", 1e-5)


@pytest.mark.parametrize("stage", [2, 3])
def test_zero_trains_and_resumes_like_one_process(single: Path, tmp_path: Path, stage: int) -> None:
    """One process: accelerate takes the world size for 1 where DeepSpeed runs on CPUs."""
    pytest.importorskip("deepspeed")
    flags = ["--num_processes", "1", "--cpu"]
    if stage == 2:
        launch(f"zero{stage}", flags, tmp_path / "run", fails=True, grad_accum_steps=2, stop_after=20)
        latest = latest_checkpoint(tmp_path / "run" / "checkpoints")
        assert latest is not None
        assert latest.name == "step-000008"
    launch(f"zero{stage}", flags, tmp_path / "run", grad_accum_steps=2)
    assert_same_training(single, tmp_path / "run", 1e-5)


def test_processes_leave_their_group_when_nothing_was_to_do(tmp_path: Path) -> None:
    """They only agreed that a stage is current. To end inside the group aborts now and then."""
    script = tmp_path / "agree.py"
    script.write_text(
        "import atexit, os, pathlib\n"
        "import torch\n"
        "here = pathlib.Path(__file__)\n"
        "left = lambda: here.with_name(os.environ['RANK']).write_text(str(torch.distributed.is_initialized()))\n"
        "atexit.register(left)  # runs after what is registered later\n"
        "from spec_train.training.parallel import broadcast_flag\n"
        "assert broadcast_flag(os.environ['RANK'] == '0', 'cpu')\n"
        "assert torch.distributed.is_initialized()\n"
    )
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2", str(script)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    worker = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=False)
    assert worker.returncode == 0, worker.stderr
    assert [(tmp_path / rank).read_text() for rank in "01"] == ["False", "False"]


def test_fsdp2_shards_train_evaluate_save_and_load(tmp_path: Path) -> None:
    """Accelerate starts FSDP on GPUs only; the same calls on a module sharded over two gloo processes."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
    worker = subprocess.run(
        [*command, "-m", "tests.integration.fsdp_worker", str(tmp_path)],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert worker.returncode == 0, worker.stdout + worker.stderr
    assert (tmp_path / "ok").read_text() == "2 processes"
