"""Every command in the README and in docs/ runs as it is printed.

The commands are taken literally, page by page, in one folder. What makes them quick lies in that folder: the recipes
they name are the shipped ones with a tiny target and little data, and the Hub's cache holds a tiny model under the
name that they ask for. Commands that need what a test machine lacks are listed in ELSEWHERE, each with the test that
runs it or the reason why none does.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from safetensors.torch import load_file

from tests.hub_stand_in import HubStandIn
from tests.published import random_tensors, write_head
from tests.tiny import tiny_model

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
TARGETS = ("HuggingFaceTB/SmolLM2-135M-Instruct", "meta-llama/Llama-3.1-8B-Instruct")
HEAD = "yuhuili/EAGLE3-LLaMA3.1-Instruct-8B"
TOKEN = "hf_documented"
# The start of a command -> who runs it.
ELSEWHERE = {
    **{
        f"accelerate launch --config_file accelerate_configs/{name}.yaml": "GPUs; tests/unit/test_accelerate_configs.py"
        for name in ("ddp", "fsdp2", "zero3")
    },
    "make ": "tests/unit/test_packaging.py reads what they run; continuous integration runs `make test`",
    "vllm serve": "tests/vllm/test_serve_command.py",
    "python -m vllm": "tests/vllm/test_serve_command.py",
    "pytest tests/": "that very test runs with the others",
    "pip install": "tests/integration/test_wheel.py",
    "python -m venv old-pip": "needs the package index",
    "old-pip/bin/pip download": "needs the package index",
}
MINE = re.compile(r"^```yaml\n(run: \{name: my-model\}\n.*?)^```", re.MULTILINE | re.DOTALL)
BASH = re.compile(r"^```bash\n(.*?)^```", re.MULTILINE | re.DOTALL)


def commands(page: Path) -> list[str]:
    """The lines of a page's bash blocks, continued lines joined, without comments."""
    lines = "\n".join(BASH.findall(page.read_text())).replace("\\\n", " ").splitlines()
    return [line for line in (re.sub(r"(^|\s)#.*", "", line).strip() for line in lines) if line]


def shrunk(recipe: dict[str, Any]) -> dict[str, Any]:
    """A shipped recipe with a tiny target, a few short answers and a step or two of training."""
    small = {
        "run": {"device": "cpu"},
        "target": {"model": "path/or/hub-id", "package": None, "member": None, "sha256": None, "dtype": "float32"},
        "data": {"sources": [{"path": "conversations.jsonl"}], "held_out": 2, "max_length": 160},
        "responses": {"max_new_tokens": 12, "batch_size": 8, "dtype": None},
        "features": {"aux_layer_ids": [1, 2, 4]},
        "train": {"max_steps": 2, "micro_batch_tokens": 256, "save_every": 2},
        "eval": {"num_draft_tokens": [2], "max_prompts": 2, "speed_prompts": 1, "speed_rounds": 1},
        "export": {"vllm": "off"},
    }
    caps = {"draft_vocab_size": 200, "loss_vocab_size": 200, "start_layers": 2}
    for section, values in small.items():
        recipe[section] = {**recipe.get(section, {}), **values}
    speculator = recipe["speculator"]
    recipe["speculator"] = {**speculator, **{name: cap for name, cap in caps.items() if speculator.get(name)}}
    return recipe


def shrunk_comparison(comparison: dict[str, Any]) -> dict[str, Any]:
    return {**comparison, "seconds": 2, "num_draft_tokens": [2], "decode": [2], "entries": comparison["entries"][:2]}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A clone's folder as the pages take it to be, with everything small, after the quickstart and README's my.yaml."""
    folder = tmp_path_factory.mktemp("clone")
    (folder / "path/or").mkdir(parents=True)
    target = tiny_model("llama", folder / "models", max_position_embeddings=4096).rename(folder / "path/or/hub-id")
    prompts = [{"prompt": f"What is {n} plus {n + 3}? Two plus two is four."} for n in range(12)]
    (folder / "conversations.jsonl").write_text("".join(json.dumps(row) + "\n" for row in prompts))
    for file in sorted((ROOT / "recipes").rglob("*.yaml")):
        copy = folder / file.relative_to(ROOT)
        copy.parent.mkdir(parents=True, exist_ok=True)
        change = shrunk_comparison if file.parent.name == "comparisons" else shrunk
        copy.write_text(yaml.safe_dump(change(yaml.safe_load(file.read_text()))))
    (mine,) = MINE.findall(PAGES[0].read_text())
    (folder / "my.yaml").write_text(yaml.safe_dump(shrunk(yaml.safe_load(mine))))
    (folder / "accelerate_configs").symlink_to(ROOT / "accelerate_configs")
    embedding = load_file(target / "model.safetensors")["model.embed_tokens.weight"]
    head = write_head(folder / "head", "eagle3", str(target), random_tensors("eagle3", embedding))
    for name, files in (*((name, target) for name in TARGETS), (HEAD, head)):
        cached = folder / "hub" / "hub" / f"models--{name.replace('/', '--')}"
        (cached / "refs").mkdir(parents=True)
        (cached / "refs" / "main").write_text("0" * 40)
        (cached / "snapshots").mkdir()
        (cached / "snapshots" / ("0" * 40)).symlink_to(files)
    (folder / "bin").mkdir()
    for name, module in (("spec-train", "spec_train"), ("accelerate", "accelerate.commands.accelerate_cli")):
        (folder / "bin" / name).write_text(f'#!/bin/sh\nexec "{sys.executable}" -m {module} "$@"\n')
        (folder / "bin" / name).chmod(0o755)
    for recipe in ("my.yaml", "recipes/quickstart/eagle3.yaml"):
        done = run(f"spec-train run {recipe}", folder)
        assert done.returncode == 0, done.stderr
    return folder


@pytest.fixture
def hub() -> Iterator[dict[str, str]]:
    """The environment of a command that talks to the Hub."""
    with HubStandIn({TOKEN: ("me", "write")}) as server:
        yield {"HF_ENDPOINT": server.url, "HF_TOKEN": TOKEN, "HF_HUB_OFFLINE": "0", "HF_HUB_DISABLE_XET": "1"}


def run(command: str, folder: Path, **more: str) -> subprocess.CompletedProcess[str]:
    environment = {
        **os.environ,
        "PATH": f"{folder / 'bin'}:{Path(sys.executable).parent}:{os.environ['PATH']}",
        "PYTHONPATH": str(ROOT),
        "HOME": str(folder),
        "HF_HOME": str(folder / "hub"),
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",
        **more,
    }
    return subprocess.run(
        ["bash", "-c", command], cwd=folder, env=environment, capture_output=True, text=True, check=False, timeout=600
    )


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_a_page_s_commands_run_as_printed(page: Path, folder: Path, hub: dict[str, str]) -> None:
    for command in commands(page):
        if command.startswith(tuple(ELSEWHERE)):
            continue
        pushes = command.startswith("spec-train push") and "--dry-run" not in command
        result = run(command, folder, **(hub if pushes else {}))
        assert result.returncode == 0, f"{page.name}: {command}\n{result.stdout[-1000:]}\n{result.stderr[-3000:]}"
