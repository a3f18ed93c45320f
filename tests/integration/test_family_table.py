"""Families and methods, each with each: a run from prompts to its evaluation, or one line before anything is made. What
comes of a cell is what docs/families.md says."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.family_table import METHODS, cell
from tests.more_families import CONFIGS

PAGE = Path(__file__).parents[2] / "docs" / "families.md"
# What sets families apart (learned positions, alibi, factors that change), each method but
# `mtp`, which goes beside Llama's kind alone and has tests of its own, and each way to be refused.
SAMPLE = {
    ("gpt2", "eagle3"),
    ("opt", "peagle"),
    ("opt", "mlp"),
    ("opt", "pard"),
    ("bloom", "eagle1"),
    ("phi3", "medusa"),
    ("opt", "draft_lm"),
    ("falcon_h1", "eagle3"),
    ("gemma2", "draft_lm"),
    ("olmo2", "mtp"),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Methods of a family share its target and its answers."""
    return tmp_path_factory.mktemp("families")


def documented() -> dict[tuple[str, str], str]:
    """(family, method) -> the entry of the table."""
    rows = [[part.strip() for part in line.split("|")[1:-1]] for line in PAGE.read_text().splitlines() if "|" in line]
    header = next(row for row in rows if row[0] == "target")
    return {
        (row[0].strip("`"), method): entry
        for row in rows
        if row[0].strip("`") in CONFIGS
        for method, entry in zip(header[1:], row[1:], strict=True)
    }


def test_the_table_has_every_cell() -> None:
    assert {(family, method) for family in CONFIGS for method in METHODS} <= set(documented())


@pytest.mark.parametrize(
    ("family", "method"),
    [
        pytest.param(family, method, marks=() if (family, method) in SAMPLE else pytest.mark.slow)
        for family in CONFIGS
        for method in METHODS
    ],
)
def test_a_cell_runs_or_is_refused_before_anything_is_made(family: str, method: str, folder: Path) -> None:
    kind, text = cell(family, method, folder)
    entry = documented()[family, method]
    assert (kind == "refused") == (entry == "refused"), text
    assert kind == "refused" or re.fullmatch(r"\d\.\d\d", entry)
