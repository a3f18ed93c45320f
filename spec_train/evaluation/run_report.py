"""`spec-train report`: what runs reached, as one HTML file without outside requests, PNG plots and Markdown tables.

A report reads evaluation results (`eval/*.json`) and training logs (`train/log.jsonl`) and computes nothing anew: every
figure in it stands in one of those files. The page carries its pictures inside and forbids any request.
"""

from __future__ import annotations

import base64
import html
import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from spec_train.errors import UserError
from spec_train.evaluation.plots import Curve, draw_all
from spec_train.evaluation.report import ABSENT, CAPTION, markdown_row, result_markdown, table_rows
from spec_train.manifest import atomic_write_text, made_otherwise

STYLE = """
body{font:16px/1.5 system-ui,sans-serif;color:#1b1f24;background:#fff;max-width:70rem;margin:2rem auto;padding:0 1rem}
h1{font-size:1.7rem}h2{font-size:1.25rem;margin-top:2.5rem;border-bottom:1px solid #d0d7de}
table{border-collapse:collapse;font-size:.85rem;display:block;overflow-x:auto}
th,td{padding:.3rem .6rem;border-bottom:1px solid #d0d7de;text-align:right;white-space:nowrap}
th{background:#f6f8fa}th.text,td.text{text-align:left}img{max-width:100%;height:auto}
p.note{color:#57606a;font-size:.9rem}
"""
TEXT_COLUMNS = ("suite", "speculator", "run")
ACCEPTANCE_KEYS = ("renewal", "decode@", "decode_renewal", "decode_T")
TRAINING_CAPTION = (
    "Acceptance lengths: renewal is estimated on all held-out answers, decode measured on a few held-out prompts, "
    "decode_renewal estimated on the answers of that decode; T is the temperature where it is not 0."
)


@dataclass
class Collected:
    """Evaluation results in the order found, and the training curve of every run that has one."""

    results: list[dict[str, Any]] = field(default_factory=list)
    curves: list[Curve] = field(default_factory=list)


def collect(paths: Sequence[Path]) -> Collected:
    """Results and curves under `paths`: run folders, folders of results, or single result files.

    Raises UserError for a path that is absent, a result file that is none, or where nothing is found at all.
    """
    found = Collected()
    seen: set[Path] = set()
    for path in paths:
        if not path.exists():
            raise UserError(f"report {path}: no such file or folder; give a run folder or evaluation results (.json)")
        for file in [path] if path.is_file() else _result_files(path):
            if file.resolve() not in seen:
                seen.add(file.resolve())
                found.results += _read_results(file, named=path.is_file())
        for log in sorted(path.glob("train/log.jsonl")) + sorted(path.glob("*/train/log.jsonl")):
            run = log.parent.parent
            if made_otherwise(run, "eval", "train"):
                raise UserError(
                    f"report {run}: its evaluation is of another training than the one whose log lies there; "
                    "`spec-train run RECIPE --force eval` measures anew"
                )
            if log.resolve() not in seen:
                seen.add(log.resolve())
                found.curves.append(_read_curve(log))
    if not found.results and not found.curves:
        raise UserError(
            f"report: no evaluation result and no training log under {', '.join(map(str, paths))}; run spec-train eval"
        )
    return found


def write_report(found: Collected, directory: Path, title: str) -> list[Path]:
    """Write `report.html`, `report.md` and the PNG plots into `directory`; returns their paths."""
    directory.mkdir(parents=True, exist_ok=True)
    pictures = draw_all(found.results, found.curves)
    paths = []
    for name, (_, png) in pictures.items():
        paths.append(directory / f"{name}.png")
        paths[-1].write_bytes(png)
    for name, text in (("report.html", _page(found, pictures, title)), ("report.md", _markdown(found, title))):
        paths.append(directory / name)
        atomic_write_text(paths[-1], text)
    return paths


def _result_files(directory: Path) -> list[Path]:
    """JSON files of a folder of results, of a run's `eval/`, or of the `eval/` of every run inside."""
    patterns = ("*.json", "eval/*.json", "*/eval/*.json")
    return [file for pattern in patterns for file in sorted(directory.glob(pattern))]


def _read_results(file: Path, named: bool) -> list[dict[str, Any]]:
    """The results in a file: one, or a list. Other JSON is passed over unless the user named it (`named`)."""
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UserError(f"report {file}: not readable as JSON ({error})") from None
    rows = content if isinstance(content, list) else [content]
    results = [row for row in rows if isinstance(row, dict) and "mean_acceptance_length" in row and "suite" in row]
    if named and not results:
        raise UserError(f"report {file}: holds no evaluation result; give what spec-train eval --json wrote")
    return results


def _read_curve(log: Path) -> Curve:
    """The training curve of `<run>/train/log.jsonl`."""
    rows = [json.loads(line) for line in log.read_text(encoding="utf-8").splitlines() if line]
    keys = dict.fromkeys(key for row in rows for key in row if key != "step")
    series = {key: [(row["step"], row[key]) for row in rows if row.get(key) is not None] for key in keys}
    return Curve(log.parent.parent.name, series)


def _markdown(found: Collected, title: str) -> str:
    """The tables, ready for a README."""
    parts = [f"# {title}\n"]
    if found.results:
        parts += [result_markdown(found.results), CAPTION + "\n", _conditions(found.results) + "\n"]
    header, rows = _training_rows(found.curves)
    if rows:
        parts += [_markdown_table(header, rows), TRAINING_CAPTION + "\n"]
    return "\n".join(parts)


def _conditions(results: Sequence[dict[str, Any]]) -> str:
    """One line: what was measured on what."""

    def values(key: str) -> str:
        return ", ".join(dict.fromkeys(str(result[key]) for result in results if result.get(key) is not None))

    # A server tells neither its device nor its dtype.
    where = ", ".join(found for key in ("device", "dtype", "backend") if (found := values(key)))
    prompts = sorted({result["num_prompts"] for result in results})
    count = str(prompts[0]) if len(prompts) == 1 else f"{prompts[0]} to {prompts[-1]}"
    return f"Target {values('target')}; {where}; {count} prompts."


def _page(found: Collected, pictures: dict[str, tuple[str, bytes]], title: str) -> str:
    body = [f"<h1>{html.escape(title)}</h1>"]
    if found.results:
        body += [f'<p class="note">{html.escape(_conditions(found.results))}</p>', "<h2>Results</h2>"]
        body += [_table(*table_rows(found.results)), f'<p class="note">{html.escape(CAPTION)}</p>']
    header, rows = _training_rows(found.curves)
    if rows:
        body += ["<h2>Last evaluation in training</h2>", _table(header, rows)]
        body.append(f'<p class="note">{html.escape(TRAINING_CAPTION)}</p>')
    for heading, png in pictures.values():
        source = f"data:image/png;base64,{base64.b64encode(png).decode()}"
        body.append(f'<h2>{html.escape(heading)}</h2><img src="{source}" alt="{html.escape(heading)}">')
    policy = "default-src 'none'; img-src data:; style-src 'unsafe-inline'"
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">'
        '<meta name="viewport" content="width=device-width,initial-scale=1"><link rel="icon" href="data:,">'
        f"<title>{html.escape(title)}</title><style>{STYLE}</style></head>\n<body>\n"
        + "\n".join(body)
        + "\n</body></html>\n"
    )


def _training_rows(curves: Sequence[Curve]) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
    """(header, rows): the acceptance lengths of each run's last evaluation, by their names in log.jsonl."""
    keys = list(dict.fromkeys(key for curve in curves for key in curve.series if key.startswith(ACCEPTANCE_KEYS)))
    rows = []
    for curve in curves:
        last = {key: curve.series[key][-1] for key in keys if key in curve.series}
        if last:
            values = [f"{last[key][1]:.3f}" if key in last else ABSENT for key in keys]
            rows.append((curve.name, str(max(step for step, _ in last.values())), *values))
    return ("run", "step", *keys), rows


def _markdown_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [markdown_row(header)]
    lines.append("|" + "|".join("---" if column in TEXT_COLUMNS else "---:" for column in header) + "|")
    lines += [markdown_row(row) for row in rows]
    return "\n".join(lines) + "\n"


def _table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    def line(cells: Sequence[str], tag: str) -> str:
        kinds = [' class="text"' if name in TEXT_COLUMNS else "" for name in header]
        return (
            "<tr>" + "".join(f"<{tag}{k}>{html.escape(c)}</{tag}>" for k, c in zip(kinds, cells, strict=True)) + "</tr>"
        )

    body = "\n".join(line(row, "td") for row in rows)
    return f"<table><thead>{line(header, 'th')}</thead>\n<tbody>{body}</tbody></table>"
