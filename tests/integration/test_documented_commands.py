"""Every command in the README and in docs/ runs as it is printed, those in the middle of a sentence too.

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
import time
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import yaml
from safetensors.torch import load_file

from tests.hub_stand_in import HubStandIn
from tests.integration.fork_server import CLIENT
from tests.published import random_tensors, write_head
from tests.tiny import tiny_model

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
TARGETS = ("HuggingFaceTB/SmolLM2-135M-Instruct", "meta-llama/Llama-3.1-8B-Instruct")
HEAD = "yuhuili/EAGLE3-LLaMA3.1-Instruct-8B"
TOKEN = "hf_documented"
# The start of a command -> who runs it.
ELSEWHERE = {
    "accelerate launch --config_file accelerate_configs/ddp.yaml": "GPUs; tests/unit/test_accelerate_configs.py",
    "make ": "tests/unit/test_packaging.py reads what they run; continuous integration runs `make test`",
    "vllm serve": "tests/vllm/test_serve_command.py",
    "python -m vllm": "tests/vllm/test_serve_command.py",
    "spec-train eval runs/my-model/export/speculators": "its servers run in tests/vllm/test_serve_command.py",
    "pytest tests/": "that very test runs with the others",
    "pytest -m gpu": "a GPU",
    "python tests/gpu/run_gpu.py": "a GPU; tests/gpu/test_run_gpu.py takes its path on a CPU",
    "pip install": "tests/integration/test_wheel.py",
    "pip uninstall": "changes this installation; the Makefile does it",
    "python -m venv old-pip": "needs the package index",
    "for suite in": "suites out of the package index; tests/unit/test_tree_results.py has trees beside chains",
    "python eval/make_tables.py trees": "the files of the command before; tests/unit/test_make_tables.py",
    "python eval/check_advice.py runs/quickstart/export/plain --suite gsm8k humaneval": "the package index",
    "old-pip/bin/pip download": "needs the package index",
    "python -m spec_train": "tests/unit/test_cli.py starts the program so",
    "tensorboard --logdir": "serves until it is stopped; tests/integration/test_trackers.py reads what it would show",
}
# What is printed -> what is run in its place: the same with less of it.
SMALLER = {
    "--groups 10 --deepest 5 --prompts 7": "--groups 1 --deepest 2 --prompts 1 --rounds 1",
    "--threads 2": "--threads 1 --prompts 2 --single-prompts 1 --rounds 1 --max-new-tokens 16",
    "eval.suites=[held_out,maths.jsonl,json]": "eval.suites=[held_out,maths.jsonl]",
    "--max-prompts 20": "--max-prompts 3 --max-new-tokens 24",
    "--max-prompts 40": "--max-prompts 3 --max-new-tokens 24",
}
# Whether samples of a tiny model agree is left to chance.
BY_CHANCE = ("python eval/check_agreement.py", "all pairs agree within the 95% interval")
VLLM = ("--backend vllm", "eval/check_agreement.py")
MINE = re.compile(r"^```yaml\n(run: \{name: my-model\}\n.*?)^```", re.MULTILINE | re.DOTALL)
FENCED = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
PROGRAM = r"(?:spec-train|python|accelerate|pytest|tensorboard|make|pip|vllm)"
BASH_OR_INLINE = re.compile(rf"^```bash\n(.*?)^```$|`({PROGRAM} [^`]+)`", re.MULTILINE | re.DOTALL)
# `spec-train run RECIPE` stands for many commands, `spec-train export` for the command of that name.
PATTERN = re.compile(rf"\b[A-Z][A-Z_]*\b|^{PROGRAM} [\w-]+$")


def commands(page: Path) -> list[str]:
    """The lines of a page's bash blocks, continued lines joined, without comments, and the commands between them."""
    found: list[str] = []
    for block, inline in BASH_OR_INLINE.findall(page.read_text()):
        if inline:
            found += [] if PATTERN.search(inline) else [" ".join(inline.split())]
            continue
        lines = block.replace("\\\n", " ").splitlines()
        found += [line for line in (re.sub(r"(^|\s)#.*", "", line).strip() for line in lines) if line]
    return found


def shrunk(recipe: dict[str, Any]) -> dict[str, Any]:
    """A shipped recipe with a tiny target, a few short answers and a step or two of training."""
    small = {
        "run": {"device": "cpu"},
        "target": {"model": "path/or/hub-id", "package": None, "member": None, "sha256": None, "dtype": "float32"},
        "data": {"sources": [{"path": "conversations.jsonl"}], "held_out": 2, "max_length": 160},
        "responses": {"max_new_tokens": 12, "batch_size": 8, "dtype": None},
        "features": {"aux_layer_ids": [1, 2, 4]},
        "train": {"max_steps": 2, "micro_batch_tokens": 256, "save_every": 2},
        "eval": {
            "num_draft_tokens": [2],
            "max_prompts": 2,
            "speed_prompts": 1,
            "speed_rounds": 1,
            "measure_costs": False,
        },
        "export": {"vllm": "off"},
    }
    caps = {"draft_vocab_size": 200, "loss_vocab_size": 200, "start_layers": 2}
    for section, values in small.items():
        recipe[section] = {**recipe.get(section, {}), **values}
    name = recipe["run"]["name"]
    recipe["eval"]["measure_costs"] = name == "my-model"  # whose results the page on advice reads
    if name not in ("my-model", "quickstart"):  # whose exports in the other format are named
        recipe["export"]["formats"] = ["plain"]
    speculator = recipe["speculator"]
    recipe["speculator"] = {**speculator, **{name: cap for name, cap in caps.items() if speculator.get(name)}}
    return recipe


def shrunk_comparison(comparison: dict[str, Any]) -> dict[str, Any]:
    budget = {"seconds": 2} if "seconds" in comparison else {"tokens": 100}
    decoded = {"num_draft_tokens": [2], "decode": comparison["decode"] and [2]}
    return {**comparison, **budget, **decoded, "entries": comparison["entries"][:2]}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
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
    for name in ("accelerate_configs", "eval"):
        (folder / name).symlink_to(ROOT / name)
    embedding = load_file(target / "model.safetensors")["model.embed_tokens.weight"]
    head = write_head(folder / "head", "eagle3", str(target), random_tensors("eagle3", embedding))
    for name, files in (*((name, target) for name in TARGETS), (HEAD, head)):
        cached = folder / "hub" / "hub" / f"models--{name.replace('/', '--')}"
        (cached / "refs").mkdir(parents=True)
        (cached / "refs" / "main").write_text("0" * 40)
        (cached / "snapshots").mkdir()
        (cached / "snapshots" / ("0" * 40)).symlink_to(files)
    (folder / "bin").mkdir()
    programs = {
        "spec-train": CLIENT.format(python=sys.executable, socket=folder / "socket"),
        "accelerate": f'#!/bin/sh\nexec "{sys.executable}" -m accelerate.commands.accelerate_cli "$@"\n',
    }
    for name, program in programs.items():
        (folder / "bin" / name).write_text(program)
        (folder / "bin" / name).chmod(0o755)
    command = [sys.executable, "-m", "tests.integration.fork_server", str(folder / "socket")]
    server = subprocess.Popen(command, cwd=folder, env=environment(folder))
    try:
        while not (folder / "socket").exists():
            assert server.poll() is None
            time.sleep(0.1)
        for recipe in ("my.yaml", "recipes/quickstart/eagle3.yaml"):
            done = run(f"spec-train run {recipe}", folder)
            assert done.returncode == 0, done.stderr
        yield folder
    finally:
        server.terminate()
        server.wait()


@pytest.fixture
def hub() -> Iterator[dict[str, str]]:
    """The environment of a command that talks to the Hub."""
    with HubStandIn({TOKEN: ("me", "write")}) as server:
        yield {"HF_ENDPOINT": server.url, "HF_TOKEN": TOKEN, "HF_HUB_OFFLINE": "0", "HF_HUB_DISABLE_XET": "1"}


def environment(folder: Path) -> dict[str, str]:
    return {
        **os.environ,
        "PATH": f"{folder / 'bin'}:{Path(sys.executable).parent}:{os.environ['PATH']}",
        "PYTHONPATH": str(ROOT),
        "HOME": str(folder),
        "HF_HOME": str(folder / "hub"),
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",
    }


def run(command: str, folder: Path, **more: str) -> subprocess.CompletedProcess[str]:
    variables = {**environment(folder), **more}
    return subprocess.run(
        ["bash", "-c", command], cwd=folder, env=variables, capture_output=True, text=True, check=False, timeout=600
    )


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_a_page_s_commands_run_as_printed(page: Path, folder: Path, hub: dict[str, str]) -> None:
    for command in commands(page):
        if command.startswith(tuple(ELSEWHERE)):
            continue
        for printed, smaller in SMALLER.items():
            command = command.replace(printed, smaller)
        if any(word in command for word in VLLM) and find_spec("vllm") is None:
            continue
        pushes = command.startswith("spec-train push") and "--dry-run" not in command
        result = run(command, folder, **(hub if pushes else {}))
        fine = result.returncode == 0 or (command.startswith(BY_CHANCE[0]) and BY_CHANCE[1] in result.stdout)
        assert fine, f"{page.name}: {command}\n{result.stdout[-1000:]}\n{result.stderr[-3000:]}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_no_command_stands_outside_a_bash_block(page: Path) -> None:
    """Indented text and blocks of another kind would not be run."""
    text = page.read_text()
    others = [block for language, block in FENCED.findall(text) if language != "bash"]
    for rest in (FENCED.sub("", text), *others):
        assert re.findall(rf"^\s*(?:\$ *)?{PROGRAM} .*", rest, re.MULTILINE) == []


def test_nothing_is_excused_that_no_page_has() -> None:
    found = [command for page in PAGES for command in commands(page)]
    assert [start for start in ELSEWHERE if not any(command.startswith(start) for command in found)] == []
