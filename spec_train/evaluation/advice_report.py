"""Advice as a table, and as the vLLM config to paste."""

from __future__ import annotations

import json
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.table import Table

from spec_train.errors import UserError
from spec_train.evaluation.advice_input import Method
from spec_train.evaluation.report import ABSENT
from spec_train.serving.contract import engine_arguments

EXPORT_PLACEHOLDER = "EXPORT_DIR"
NO_WEIGHTS = ("ngram", "suffix")


def advice_table(advice: dict[str, Any]) -> Table:
    """One row a load."""
    table = Table(title=f"Advice for {advice['target']}")
    for column in ("load", "from", "method", "K", "tokens/round", "speed-up (95%)", "adaptive K adds", "tied with"):
        table.add_column(column, justify="left" if column in ("from", "method", "tied with") else "right")
    for load in advice["loads"]:
        gain = load["adaptive"]
        table.add_row(
            str(load["concurrency"]),
            load["source"],
            f"none (best: {load['method']})" if load["speculate"] is False else load["method"],
            str(load["num_draft_tokens"]),
            f"{load['tokens_per_round']:.2f}",
            _speedup(load),
            f"{gain['causal_gain']:+.0%} (bound {gain['oracle_gain']:+.0%})" if gain else ABSENT,
            ", ".join(load["tied_with"]) or ABSENT,
        )
    return table


def _speedup(load: dict[str, Any]) -> str:
    """ "1.50x (1.41-1.58)"; "1.50x (-)" without an interval; "- (41.3 tokens/s)" of a server that nothing was held
    against."""
    if load["speedup"] is None:
        return f"{ABSENT} ({load['tokens_per_second']:.1f} tokens/s)"
    interval = load["speedup_ci95"]
    return f"{load['speedup']:.2f}x ({f'{interval[0]:.2f}-{interval[1]:.2f}' if interval else ABSENT})"


def break_even_lines(advice: dict[str, Any]) -> list[str]:
    """One sentence a method: from which load on it stops paying."""
    lines = []
    for name, summary in advice["methods"].items():
        if not summary["searched"]:
            continue
        where = summary["break_even_concurrency"]
        pays = f"pays at every load up to {summary['searched']}" if where is None else f"pays below load {where}"
        lines.append(f"{name}: {pays}")
    return lines


def vllm_config(method: Method, advice: dict[str, Any], export_dir: Path | None = None) -> dict[str, Any] | None:
    """The arguments that serve the advised method in vLLM ("model", "speculative_config", ...); None where no load
    gains. How drafts are picked and judged is named as it was measured (vLLM 0.32 and later), unless only the server
    knows. The schedule is added where K differs between batch sizes.

    `export_dir`: the exported speculator; searched for beside the run's checkpoint where it is not given. Raises
    UserError where `export_dir` is no export of this method.
    """
    ranges = advice["methods"][method.name]["schedule"]
    advised = [load["num_draft_tokens"] for load in advice["loads"] if load["method"] == method.name]
    deepest = max([k for _, _, k in ranges] or advised, default=0)
    if deepest == 0:
        return None
    result = method.evaluated[max(method.evaluated)].results[0]
    arguments = _arguments(method.kind, result, deepest, export_dir)
    settings = {"draft_sample_method": method.draft_sample_method}
    settings["rejection_sample_method"] = method.rejection_sample_method
    arguments["speculative_config"] |= {name: value for name, value in settings.items() if value is not None}
    if len(ranges) > 1:
        arguments["speculative_config"]["num_speculative_tokens_per_batch_size"] = ranges
    return arguments


def command(arguments: dict[str, Any]) -> str:
    """`vllm serve ...` with these arguments."""
    line = f"vllm serve {shlex.quote(arguments['model'])}"
    for name, value in arguments.items():
        if name != "model":
            line += f" --{name.replace('_', '-')} {shlex.quote(json.dumps(value))}"
    return line


def _arguments(kind: str, result: dict[str, Any], k: int, export_dir: Path | None) -> dict[str, Any]:
    if result["method"] in NO_WEIGHTS:
        settings: dict[str, Any] = {"method": result["method"], "num_speculative_tokens": k}
        if result["method"] == "ngram":
            low, _, high = result["speculator"].rpartition("=")[2].partition("..")
            if low.isdigit() and high.isdigit():
                settings |= {"prompt_lookup_min": int(low), "prompt_lookup_max": int(high)}
        return {"model": result["target"], "speculative_config": settings}
    folder = export_dir or _find_export(kind, Path(result["speculator"]))
    if folder is None:
        settings = {"method": result["method"], "model": EXPORT_PLACEHOLDER, "num_speculative_tokens": k}
        return {"model": result["target"], "speculative_config": settings}
    file = folder / "export.json"
    if not file.is_file():
        raise UserError(f"--export {folder}: no export.json there; give a folder that spec-train export wrote")
    description = json.loads(file.read_text(encoding="utf-8"))
    if description["type"] != kind:
        raise UserError(f"--export {folder}: an export of {description['type']}, but {kind} is advised")
    return engine_arguments(folder, description["target_id"], description, k)


def _find_export(kind: str, speculator: Path) -> Path | None:
    """An export of this method in the run that the checkpoint belongs to, plain files before others."""
    for parent in (speculator, *list(speculator.parents)[:4]):
        files: Sequence[Path] = [parent / "export.json", *sorted(parent.glob("export/*/export.json"))]
        for file in sorted((f for f in files if f.is_file()), key=lambda f: "plain" not in f.parent.name):
            if json.loads(file.read_text(encoding="utf-8"))["type"] == kind:
                return file.parent
    return None
