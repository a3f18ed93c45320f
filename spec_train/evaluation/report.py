"""Evaluation results as a table for the terminal, as Markdown, and as one JSON file each."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.table import Table

HEADER = (
    "suite",
    "speculator",
    "K",
    "T",
    "tokens/pass",
    "τ of drafted rounds (95%)",
    "accepted by position",
    "estimate",
    "lossless",
    "tokens/s",
    "speed-up",
)
ABSENT = "-"


CAPTION = (
    "tokens/pass: tokens per target pass after the prefill. τ: 1 + accepted drafts / rounds that drafted something, as "
    "vLLM counts it; prompt lookup drafts in few rounds, so compare it by tokens/pass."
)


def result_table(results: Sequence[dict[str, Any]], title: str | None = None) -> Table:
    """A rich table, one row per result (see `summarise` for the fields)."""
    table = Table(title=title, caption=CAPTION)
    for column in HEADER:
        table.add_column(column, justify="left" if column in ("suite", "speculator") else "right")
    for row in _rows(results):
        table.add_row(*row)
    return table


def markdown_row(cells: Sequence[str]) -> str:
    """One row of a Markdown table. Names of suites, categories and runs are the user's own: what would end the cell or
    the row, or begin a tag, is written so that it shows as it is; a line break becomes a blank."""
    return "| " + " | ".join(" ".join(c.split()).replace("|", "\\|").replace("<", "&lt;") for c in cells) + " |"


def result_markdown(results: Sequence[dict[str, Any]]) -> str:
    """The same table in Markdown, with a final newline."""
    lines = [markdown_row(HEADER)]
    lines.append("|" + "|".join("---" if column in ("suite", "speculator") else "---:" for column in HEADER) + "|")
    lines += [markdown_row(row) for row in _rows(results)]
    return "\n".join(lines) + "\n"


def table_rows(results: Sequence[dict[str, Any]]) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
    """(header, rows) of the table, for other forms of it."""
    return HEADER, _rows(results)


def write_results(directory: Path, results: Sequence[dict[str, Any]]) -> list[Path]:
    """One JSON file per result, written whole or not at all; returns the paths in the order of `results`."""
    directory.mkdir(parents=True, exist_ok=True)
    paths = []
    for result in results:
        path = directory / result_name(result)
        temporary = path.with_name(f".{path.name}.{os.getpid()}")
        temporary.write_text(json.dumps(result, indent=2, ensure_ascii=False, allow_nan=False) + "\n", encoding="utf-8")
        os.replace(temporary, path)
        paths.append(path)
    return paths


def result_name(result: dict[str, Any]) -> str:
    """`<suite>-<type>-k<K>-t<T>[-probabilistic][-block][-<tree>].json`; a suite given as a path counts by its stem."""
    suite = Path(result["suite"]).stem
    drafts = "-probabilistic" if result["draft_sample_method"] == "probabilistic" else ""
    drafts += "-block" if result.get("rejection_sample_method") == "block" else ""  # older results do not name it
    if result.get("tree"):
        drafts += f"-{result['tree']['name']}"
    kind = result["type"].replace(" ", "_")
    return f"{suite}-{kind}-k{result['num_draft_tokens']}-t{result['temperature']:g}{drafts}.json"


def _rows(results: Sequence[dict[str, Any]]) -> list[tuple[str, ...]]:
    """Cells by suite and temperature; inside those the plain target first, then the order given."""
    order = {(result["suite"], result["temperature"]): None for result in results}
    rows = []
    for suite, temperature in order:
        group = [r for r in results if (r["suite"], r["temperature"]) == (suite, temperature)]
        with_speed = next((r for r in group if r.get("speed")), None)
        if not any(r["type"] == "plain" for r in group) and with_speed:
            rows.append(_plain_row(with_speed))
        rows += [_row(result) for result in sorted(group, key=lambda r: bool(r["type"] != "plain"))]
    return rows


def _row(result: dict[str, Any]) -> tuple[str, ...]:
    low, high = result["mean_acceptance_length_ci95"]
    lossless, speed, estimate = result["lossless"], result["speed"], result["estimate"]
    plain = result["type"] == "plain"
    return (
        Path(result["suite"]).stem,
        result["type"],
        ABSENT if plain else f"{result['num_draft_tokens']}{_tree(result)}",
        f"{result['temperature']:g}",
        "1.00" if plain else f"{result['tokens_per_step']:.2f}",
        ABSENT if plain else f"{result['mean_acceptance_length']:.2f} ({low:.2f}-{high:.2f})",
        ABSENT if plain else " ".join(f"{rate:.2f}" for rate in result["acceptance_rate_per_position"]),
        f"{estimate['renewal']:.2f}" if estimate else ABSENT,
        f"{lossless['identical']}/{lossless['checked']}" if lossless else ABSENT,
        f"{speed['tokens_per_second']:.1f}" if speed else ABSENT,
        f"{speed['speedup']:.2f}x" if speed else ABSENT,
    )


def _tree(result: dict[str, Any]) -> str:
    return f" {result['tree']['name']}" if result.get("tree") else ""


def _plain_row(result: dict[str, Any]) -> tuple[str, ...]:
    """The target on its own, as timed beside `result`."""
    rate = f"{result['speed']['baseline_tokens_per_second']:.1f}"
    where = (Path(result["suite"]).stem, "plain", ABSENT, f"{result['temperature']:g}")
    return (*where, "1.00", ABSENT, ABSENT, ABSENT, ABSENT, rate, "1.00x")
