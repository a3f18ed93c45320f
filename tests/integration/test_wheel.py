"""The wheel, installed in an environment of its own, works away from the clone: from prompts to a verified export."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path

import pytest
import yaml

from tests.tiny import tiny_model

ROOT = Path(__file__).parents[2]
ASSETS = ("accelerate_configs", "data", "eval", "recipes")


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(folder)]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True)
    (built,) = folder.glob("*.whl")
    return built


@pytest.fixture(scope="module")
def environment(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A virtual environment with the wheel; what the wheel depends on is read from this one's site-packages."""
    place = tmp_path_factory.mktemp("environment") / "venv"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(place)], check=True)
    install = [sys.executable, "-m", "pip", "--python", str(place / "bin" / "python"), "install", "--no-deps"]
    subprocess.run([*install, "--no-index", str(wheel)], check=True, capture_output=True)
    (site,) = (place / "lib").glob("python*/site-packages")
    (site / "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n")
    return place


def outside(environment: Path, folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    variables = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    command = [str(environment / "bin" / arguments[0]), *arguments[1:]]
    return subprocess.run(
        command, cwd=folder, env={**variables, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True, check=False
    )


def test_the_wheel_installs_one_package(wheel: Path) -> None:
    names = zipfile.ZipFile(wheel).namelist()
    assert {name.split("/")[0] for name in names} == {"spec_train", "spec_train-0.1.0.dist-info"}
    assert not [name for name in names if "__pycache__" in name or name.endswith(".pyc")]
    assert any(name.endswith("licenses/LICENSE") for name in names)
    assert "spec_train/py.typed" in names


def test_the_wheel_carries_every_asset(wheel: Path) -> None:
    names = set(zipfile.ZipFile(wheel).namelist())
    tracked = subprocess.run(["git", "ls-files", *ASSETS], cwd=ROOT, capture_output=True, text=True, check=False)
    files = tracked.stdout.split() or [
        str(file.relative_to(ROOT)) for asset in ASSETS for file in (ROOT / asset).rglob("*.yaml")
    ]
    assert "recipes/quickstart/eagle3.yaml" in files
    assert [file for file in files if f"spec_train/_assets/{file}" not in names and (ROOT / file).exists()] == []


def test_the_installed_wheel_takes_a_run_from_prompts_to_a_verified_export(environment: Path, tmp_path: Path) -> None:
    place = outside(environment, tmp_path, "python", "-c", "import spec_train; print(spec_train.__file__)")
    assert place.stdout.startswith(str(environment)), place.stderr
    recipe = {
        "run": {"name": "outside", "device": "cpu"},
        "target": {"model": str(tiny_model("llama", tmp_path, max_position_embeddings=4096))},
        "data": {"sources": [{"path": "asset:data/gsm8k.jsonl", "limit": 12}], "held_out": 2, "max_length": 400},
        "responses": {"max_new_tokens": 12, "batch_size": 4},
        "speculator": {"type": "eagle3", "ttt_steps": 2, "draft_vocab_size": 200},
        "train": {"max_steps": 2, "micro_batch_tokens": 512, "precision": "fp32"},
        "eval": {"suites": ["json"], "max_prompts": 2, "num_draft_tokens": [2], "speed_prompts": 0},
        "export": {"vllm": "off", "formats": ["plain"]},
    }
    (tmp_path / "outside.yaml").write_text(yaml.safe_dump(recipe))
    result = outside(environment, tmp_path, "spec-train", "run", "outside.yaml")
    assert result.returncode == 0, result.stderr[-3000:]
    report = json.loads((tmp_path / "runs" / "outside" / "verify" / "report.json").read_text())
    assert all(form["reload"]["problems"] == [] for form in report)


def test_bundled_files_and_the_vllm_plugin_come_with_the_wheel(environment: Path, tmp_path: Path) -> None:
    """Away from the clone a bundled recipe comes out of the wheel, and so does whatever it names."""
    suites = outside(environment, tmp_path, "spec-train", "suites")
    assert suites.returncode == 0, suites.stderr
    assert "humaneval" in suites.stdout
    find = (
        "from importlib.metadata import entry_points\n"
        "from pathlib import Path\n"
        "from spec_train.recipe import load_recipe\n"
        "print(load_recipe(Path('recipes/quickstart/eagle3.yaml')).run.name)\n"
        "(plugin,) = [e for e in entry_points(group='vllm.general_plugins') if e.name == 'spec_train']\n"
        "print(plugin.load().__module__)\n"
    )
    plugin = outside(environment, tmp_path, "python", "-c", find)
    assert plugin.stdout.split() == ["quickstart", "spec_train.serving.vllm_plugin.register"], plugin.stderr
