"""The troubleshooting page quotes what the tool prints."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "troubleshooting.md"


def pairs(text: str) -> set[tuple[str, ...]]:
    words = re.findall(r"[A-Za-z_.@+-]+|\d+", text)
    return {tuple(words[i : i + 2]) for i in range(len(words) - 1)}


def printed() -> set[tuple[str, ...]]:
    """Neighbouring words in every string of the package; what an f-string fills in is a gap between its parts."""
    found: set[tuple[str, ...]] = set()
    for file in (ROOT / "spec_train").rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                found |= pairs(node.value)
    return found


def quoted() -> list[str]:
    """The first cell of every row of the page's tables of messages, where it is code."""
    return re.findall(r"^\| `([^`]+)`[^|]*\|", PAGE.read_text(), re.MULTILINE)


PRINTED = printed()
FOREIGN = (  # messages of other packages
    "operator torchvision::nms does not exist",
    "is falling back to its reference PyTorch implementation",
)


@pytest.mark.parametrize("message", [message for message in quoted() if message not in FOREIGN])
def test_a_quoted_message_is_one_that_the_tool_prints(message: str) -> None:
    """Values that a message fills in differ; of its pairs of words half are found in the source."""
    parts = set().union(*(pairs(part) for part in message.split("...")))
    assert len(parts & PRINTED) >= len(parts) / 2, sorted(parts - PRINTED)
