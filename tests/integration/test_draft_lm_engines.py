"""A draft language model trains alike in one process, in two, under ZeRO-3 and FSDP2; on answers of its own, too."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.integration.draft_lm_worker import train_draft
from tests.integration.test_distributed import LAUNCH, ROOT, assert_same_training
from tests.tiny import tiny_model

OPTIONS: dict[str, Any] = {"on_policy_fraction": 0.5, "loss": "lk"}
MODULE = "tests.integration.draft_lm_worker"


def run(command: list[str], output_dir: Path, target: Path, options: dict[str, Any]) -> None:
    worker = subprocess.run(
        [*command, MODULE, str(output_dir), str(target), json.dumps(options)],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert worker.returncode == 0, worker.stdout + worker.stderr


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model("llama", tmp_path_factory.mktemp("llama"), tie_word_embeddings=True)


@pytest.fixture(scope="module")
def single(target: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    output_dir = tmp_path_factory.mktemp("single")
    train_draft(output_dir, str(target), {**OPTIONS, "grad_accum_steps": 2})
    return output_dir


def test_two_processes_train_like_one(single: Path, target: Path, tmp_path: Path) -> None:
    command = [*LAUNCH, "--config_file", "accelerate_configs/cpu.yaml", "-m"]
    run(command, tmp_path, target, {**OPTIONS, "grad_accum_steps": 1})
    assert_same_training(single, tmp_path, 1e-5)


def test_zero_3_trains_like_one_process(single: Path, target: Path, tmp_path: Path) -> None:
    pytest.importorskip("deepspeed")
    command = [*LAUNCH, "--config_file", "accelerate_configs/zero3.yaml", "--num_processes", "1", "--cpu", "-m"]
    run(command, tmp_path, target, {**OPTIONS, "grad_accum_steps": 2})
    assert_same_training(single, tmp_path, 1e-5)


def test_fsdp2_gives_the_same_gradients(target: Path, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2", "-m"]
    run(command, tmp_path, target, {"shard": [OPTIONS, {"lora": {"rank": 4}}, {"train_embeddings": True}]})
    assert (tmp_path / "ok").read_text() == "3 drafts"
