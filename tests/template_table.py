"""The table of chat templates in docs/recipe.md: `python -m tests.template_table` prints it.

Every family's template renders generated conversations of every kind; a cell says how many of them are kept, and why
the others are dropped. A kept row that differs from what the target would write ends the script with its difference.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from tests.conversations import outcome, row
from tests.templates import FAMILIES, Family, available, tokenizer_of

COLUMNS = {
    "text": ("plain", "unicode", "newlines", "unsupervised turn"),
    "system": ("system",),
    "thoughts": ("thoughts",),
    "thoughts in text": ("thoughts in the text",),
    "calls": ("call", "calls in a row", "nested arguments", "ends with a call"),
    "parallel calls": ("parallel calls",),
    "text and call": ("text and call",),
    "thoughts and calls": ("thoughts and calls",),
}
# Letter in the table -> how the reason begins.
REASONS = {
    "T": "the chat template leaves out the thought",
    "C": "the chat template leaves out a tool call",
    "S": "the chat template leaves out or changes the text of a turn of role system",
    "U": "the chat template leaves out or changes the text of a turn of role tool",
    "A": "the chat template leaves out or changes the text of a turn of role assistant",
    "R": "the chat template refuses the row",
    "P": "an assistant turn cannot be found",
    "E": "the end of an assistant turn cannot be found",
}
ROWS = 8  # conversations of each kind


def table(families: Iterable[Family], rows: int = ROWS) -> list[str]:
    """Lines of the Markdown table. Raises AssertionError for a row that is kept and wrong."""
    heads = ["family", *COLUMNS]
    lines = [f"| {' | '.join(heads)} |", f"|{'---|' * len(heads)}"]
    for family in families:
        cells = [cell(family, column, range(rows)) for column in COLUMNS]
        lines.append(f"| {' | '.join([family.name, *cells])} |")
    return lines


def cell(family: Family, column: str, seeds: Iterable[int]) -> str:
    """`all`, or how many rows of a column's kinds are kept and the letters of the reasons for the others."""
    tokenizer = tokenizer_of(family)
    kept, letters = 0, Counter[str]()
    for kind in COLUMNS[column]:
        for seed in seeds:
            found = outcome(tokenizer, family, row(kind, seed))
            assert not found.wrong, f"{family.name}, {kind}, seed {seed}: {'; '.join(found.wrong)}"
            if found.dropped:
                letters[letter(found.dropped)] += 1
            else:
                kept += 1
    if not letters:
        return "all"
    return f"{kept or 'none'} ({', '.join(sorted(letters))})"


def letter(reason: str) -> str:
    found = [letter for letter, beginning in REASONS.items() if reason.startswith(beginning)]
    assert len(found) == 1, f"no letter for the reason {reason!r}"
    return found[0]


if __name__ == "__main__":
    for line in table(family for family in FAMILIES if available(family)):
        print(line)
