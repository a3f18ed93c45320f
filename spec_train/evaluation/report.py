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
    "vLLM counts it; prompt lookup drafts in few rounds, so compare it by tokens/pass. In brackets its 95% interval "
    "over conversations, (-) where there is none: a single conversation, or a server, which tells sums only."
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
    # Neither older results nor a server's name both.
    drafts = "-probabilistic" if result.get("draft_sample_method") == "probabilistic" else ""
    drafts += "-block" if result.get("rejection_sample_method") == "block" else ""
    if result.get("tree"):
        drafts += f"-{result['tree']['name']}"
    kind = result["type"].replace(" ", "_")
    return f"{suite}-{kind}-k{result['num_draft_tokens']}-t{result['temperature']:g}{drafts}.json"


def _rows(results: Sequence[dict[str, Any]]) -> list[tuple[str, ...]]:
    """Cells by suite, temperature and decoder; inside those the plain target first, then the order given."""
    groups: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
    for result in results:
        groups.setdefault((result["suite"], result["temperature"], _where(result)), []).append(result)
    rows = []
    for group in groups.values():
        with_speed = next((r for r in group if (r.get("speed") or {}).get("baseline_tokens_per_second")), None)
        if not any(r["type"] == "plain" for r in group) and with_speed:
            rows.append(_plain_row(with_speed))
        rows += [_row(result) for result in sorted(group, key=lambda r: bool(r["type"] != "plain"))]
    return rows


def _row(result: dict[str, Any]) -> tuple[str, ...]:
    lossless, speed, estimate = result.get("lossless"), result.get("speed") or {}, result.get("estimate")
    plain = result["type"] == "plain"
    rates = result.get("acceptance_rate_per_position") or []
    return (
        Path(result["suite"]).stem,
        result["type"] + _where(result),
        ABSENT if plain else f"{result['num_draft_tokens']}{_tree(result)}",
        f"{result['temperature']:g}",
        "1.00" if plain else number(result.get("tokens_per_step")),
        ABSENT if plain else length_cell(result),
        ABSENT if plain else " ".join(f"{rate:.2f}" for rate in rates) or ABSENT,
        number(estimate["renewal"]) if estimate else ABSENT,
        f"{lossless['identical']}/{lossless['checked']}" if lossless else ABSENT,
        number(speed.get("tokens_per_second"), "{:.1f}"),
        number(speed.get("speedup"), "{:.2f}x"),
    )


def length_cell(figures: dict[str, Any]) -> str:
    """The acceptance length of a result or of a category with its interval, "2.06 (1.98-2.14)"; "2.06 (-)" without."""
    length, interval = figures.get("mean_acceptance_length"), figures.get("mean_acceptance_length_ci95")
    if length is None:
        return ABSENT
    return f"{length:.2f} ({ABSENT})" if interval is None else f"{length:.2f} ({interval[0]:.2f}-{interval[1]:.2f})"


def number(value: float | None, form: str = "{:.2f}") -> str:
    """A figure in a table; "-" where it is not known."""
    return ABSENT if value is None else form.format(value)


def _where(result: dict[str, Any]) -> str:
    """ " (server, 8 at a time)" of what was not decoded here; else ""."""
    if result.get("backend", "torch") == "torch":
        return ""
    return f" ({result['backend']}, {result['batch_size']} at a time)"


def _tree(result: dict[str, Any]) -> str:
    return f" {result['tree']['name']}" if result.get("tree") else ""


def _plain_row(result: dict[str, Any]) -> tuple[str, ...]:
    """The target on its own, as timed beside `result`."""
    rate = f"{result['speed']['baseline_tokens_per_second']:.1f}"
    where = (Path(result["suite"]).stem, "plain" + _where(result), ABSENT, f"{result['temperature']:g}")
    return (*where, "1.00", ABSENT, ABSENT, ABSENT, ABSENT, rate, "1.00x")
