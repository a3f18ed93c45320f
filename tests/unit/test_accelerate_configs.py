"""The launcher configs hold processes and sharding only, and each of them starts a training step."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

FOLDER = Path(__file__).parents[2] / "accelerate_configs"
CONFIGS = sorted(FOLDER.glob("*.yaml"))
# The recipe decides these. Under DeepSpeed a value in the launcher's config silently wins over the program's.
RECIPE_ONLY = (
    "batch",
    "accumulation",
    "clip",
    "grad_norm",
    "schedul",
    "warmup",
    "lr",
    "learning",
    "precision",
    "optimizer_type",
    "seed",
)

STEP = """
import os, sys, torch
from accelerate import Accelerator
accelerator = Accelerator(cpu=sys.argv[1] == "cpu" or None, gradient_accumulation_steps=3)
model = torch.nn.Linear(2, 2)
optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
if accelerator.state.deepspeed_plugin is not None:
    accelerator.state.deepspeed_plugin.deepspeed_config["train_micro_batch_size_per_gpu"] = 1
model, optimizer = accelerator.prepare(model, optimizer)
loss = model(torch.ones(1, 2, device=accelerator.device) * (1 + accelerator.process_index)).square().mean()
accelerator.backward(loss)
optimizer.step()
accumulation = accelerator.gradient_accumulation_steps
figures = (accelerator.process_index, accelerator.num_processes, accumulation)
sys.stdout.write("STEPPED " + " ".join(map(str, figures)) + chr(10))  # one write: ranks share the pipe
sys.stdout.flush()
accelerator.wait_for_everyone()
accelerator.end_training()
os._exit(0)  # Gloo's threads now and then abort the interpreter's own teardown, long after the step that counts here
"""


def leaves(value: Any, name: str = "") -> list[str]:
    if isinstance(value, dict):
        return [leaf for key, item in value.items() for leaf in [str(key), *leaves(item, str(key))]]
    return []


def test_the_folder_holds_the_documented_set() -> None:
    assert [file.stem for file in CONFIGS] == ["cpu", "ddp", "fsdp2", "multi_node", "single_gpu", "zero2", "zero3"]


@pytest.mark.parametrize("file", CONFIGS, ids=lambda file: file.stem)
def test_a_config_leaves_the_recipe_alone(file: Path) -> None:
    keys = leaves(yaml.safe_load(file.read_text()))
    assert keys
    assert [key for key in keys if any(word in key.lower() for word in RECIPE_ONLY)] == []


@pytest.mark.parametrize("file", CONFIGS, ids=lambda file: file.stem)
def test_accelerate_reads_the_config(file: Path) -> None:
    from accelerate.commands.config.config_args import load_config_from_file

    config = load_config_from_file(str(file))  # refuses unknown keys
    assert config.num_processes == yaml.safe_load(file.read_text())["num_processes"]


@pytest.mark.parametrize(
    ("name", "arguments", "processes"),
    [
        ("cpu", ["cpu"], 2),
        pytest.param("ddp", ["--cpu", "--num_processes", "1", "cpu"], 1, marks=pytest.mark.slow),
        pytest.param("single_gpu", ["--cpu", "cpu"], 1, marks=pytest.mark.slow),
        pytest.param("fsdp2", ["--cpu", "--num_processes", "1", "cpu"], 1, marks=pytest.mark.slow),
        pytest.param(
            "multi_node", ["--cpu", "--num_processes", "1", "--num_machines", "1", "cpu"], 1, marks=pytest.mark.slow
        ),
        pytest.param("zero2", ["--num_processes", "1", "any"], 1, marks=pytest.mark.slow),
        pytest.param("zero3", ["--num_processes", "1", "any"], 1, marks=pytest.mark.slow),
    ],
)
def test_a_step_runs_under_the_config(tmp_path: Path, name: str, arguments: list[str], processes: int) -> None:
    """The program's accumulation of 3 survives the launcher, in every process. Whole trainings under zero2 and zero3
    are compared with one process in test_distributed.py."""
    script = tmp_path / "step.py"
    script.write_text(STEP)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    launcher = [sys.executable, "-m", "accelerate.commands.launch", "--config_file", str(FOLDER / f"{name}.yaml")]
    command = [*launcher, "--main_process_port", port, *arguments[:-1], str(script), arguments[-1]]
    result = subprocess.run(
        command, capture_output=True, text=True, timeout=240, env={**os.environ, "OMP_NUM_THREADS": "1"}, check=False
    )
    assert result.returncode == 0, result.stderr[-2000:]
    stepped = sorted(line for line in result.stdout.splitlines() if line.startswith("STEPPED"))
    assert stepped == [f"STEPPED {rank} {processes} 3" for rank in range(processes)]
