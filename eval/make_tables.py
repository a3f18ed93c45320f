"""The tables of README.md and docs/ out of the files that the commands printed beside them leave.

    python eval/make_tables.py quickstart runs/quickstart --into README.md

A table is printed, with what else the page says of the same run; `--into` puts it in place of the one in that page that
has the same heading. Figures are read and not computed: each stands in a result, a comparison or a manifest.
"""

import argparse
import json
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from spec_train.errors import UserError
from spec_train.evaluation.report import length_cell, number, table_rows
from spec_train.manifest import read_manifest

Rows = list[list[str]]
QUICKSTART = ("speculator", "K", "tokens/pass", "τ of drafted rounds (95%)", "accepted by position", "estimate")
QUICKSTART += ("lossless", "speed-up")


def read(file: Path) -> Any:
    try:
        return json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UserError(f"{file}: not there; run the command that the page prints first") from None


def results_of(run: Path) -> list[dict[str, Any]]:
    """The results of a finished run, in the order they were made."""
    return [read(run / "eval" / name) for name in read_manifest(run / "eval")["outputs"]["results"]]


def markdown(header: Rows, rows: Rows) -> str:
    """`header`: names and their alignment, from `aligned`."""
    names, alignment = header
    lines = ["| " + " | ".join(names) + " |", "|" + "|".join(alignment) + "|"]
    return "".join(f"{line}\n" for line in [*lines, *("| " + " | ".join(row) + " |" for row in rows)])


def aligned(names: list[str], text: int = 1) -> Rows:
    """A heading whose first `text` columns are text."""
    return [names, ["---"] * text + ["---:"] * (len(names) - text)]


def quickstart(run: Path) -> tuple[str, list[str]]:
    """README's first table, of `make quickstart`."""
    header, rows = table_rows(results_of(run))
    wanted = [header.index(name) for name in QUICKSTART]
    said = [f"{name} took {read_manifest(run / name)['outputs']['seconds']:.0f} s" for name in ("train",)]
    for file in sorted((run / "eval").glob("costs-*.json")):
        steps = {p["rows"]: p["ms"] for p in read(file)["target_step"] if p["batch_size"] == 1}
        passes = ", ".join(f"{count} rows {ms:.0f} ms" for count, ms in steps.items())
        said.append(f"{file.name}: a pass of the target takes {passes}")
    return markdown(aligned(list(QUICKSTART)), [[row[i] for i in wanted] for row in rows]), said + proven([run])


def methods(run: Path) -> tuple[str, list[str]]:
    """README's table of methods, of `spec-train compare recipes/comparisons/quickstart.yaml`."""
    file = run / "comparison.md"
    if not file.is_file():
        raise UserError(f"{file}: not there; run the command that the page prints first")
    table = [line for line in file.read_text(encoding="utf-8").splitlines() if line.startswith("|")]
    table[1] = table[1].replace(" ", "")
    return "".join(f"{line}\n" for line in table), proven(sorted(path for path in run.iterdir() if path.is_dir()))


def proven(runs: list[Path]) -> list[str]:
    """What the verify stage of each run found in vLLM."""
    said = []
    for run in runs:
        file = run / "verify" / "report.json"
        for report in read(file) if file.is_file() else ():
            if (seen := report.get("vllm")) is not None:
                where = f"{run.name} ({report['format']}) in vLLM {seen['version']}"
                text = f"text as without speculation in {seen['outputs_equal_baseline']} of {seen['requests']}"
                said.append(
                    f"{where}: {text}, {seen['cycles_equal']} of {seen['cycles_compared']} rounds drafted alike"
                )
    return said


def objectives(run: Path) -> tuple[str, list[str]]:
    """README's table of objectives at the deepest K, of `spec-train compare recipes/comparisons/objectives.yaml`."""
    found: dict[str, dict[str, float]] = {}
    for row in read(run / "comparison.json")["rows"]:
        loss, _, seed = row["name"].partition(" ")
        if seed.isdigit():
            found.setdefault(loss, {})[seed] = row["estimates"][max(row["estimates"], key=int)]
    seeds = sorted({seed for values in found.values() for seed in values})
    rows = []
    for loss, values in found.items():
        mean = sum(values.values()) / len(values)
        rows.append([f"`{loss}`", *(number(values.get(seed), "{:.3f}") for seed in seeds), f"{mean:.3f}"])
    return markdown(aligned(["`speculator.loss`", *(f"seed {seed}" for seed in seeds), "mean"]), rows), []


def adapted(run: Path) -> tuple[str, list[str]]:
    """The table of docs/import.md: the head as it was beside the adapted one, on every suite."""
    by_suite: dict[str, dict[str, dict[str, Any]]] = {}
    for result in results_of(run):
        if result["type"].startswith("eagle3"):
            by_suite.setdefault(result["suite"], {})[result["type"]] = result
    rows, said = [], []
    for suite, found in by_suite.items():
        before, after = found["eagle3 start"], found["eagle3"]
        name = f"{suite}, {after['num_prompts']} prompts"
        rows.append([f"{name}, estimated", *(number(r["estimate"]["renewal"]) for r in (before, after))])
        rows.append([f"{name}, decoded", length_cell(before), length_cell(after)])
        equal = [f"{r['lossless']['identical']}/{r['lossless']['checked']}" for r in (before, after)]
        said.append(f"{suite}: text equal {' and '.join(equal)}")
    return markdown(aligned(["τ (95%)", "the head as it was", "adapted"]), rows), said


def trees(files: list[Path]) -> tuple[str, list[str]]:
    """The table of docs/evaluation.md, of `spec-train eval ... --tree ... --json FILE` a suite."""
    columns: dict[str, tuple[str, str]] = {}
    said = []
    for file in files:
        results = read(file)
        chain, tree = (next(r for r in results if bool(r.get("tree")) == planted) for planted in (False, True))
        columns[chain["suite"]] = (number(chain["mean_acceptance_length"]), number(tree["mean_acceptance_length"]))
        equal = [f"{r['lossless']['identical']}/{r['lossless']['checked']}" for r in (chain, tree)]
        shapes = f"K={chain['num_draft_tokens']} and {tree['tree']['name']}"
        said.append(f"{chain['suite']}: {shapes}, text equal {' and '.join(equal)}")
    rows = [[name, *(cells[i] for cells in columns.values())] for i, name in enumerate(("chain", "tree"))]
    return markdown(aligned(["", *columns]), rows), said


def speed(files: list[Path]) -> tuple[str, list[str]]:
    """The table of docs/evaluation.md, of `eval/bench_decoding.py`, one file a run."""
    from spec_train.evaluation.speed import bench_table  # loads torch

    lines: dict[str, str] = {}  # by what is compared; plain decoding is the same in every file
    said = []
    for file in files:
        result = read(file)
        for line in bench_table(result).splitlines():
            lines.setdefault(line.split(" | ")[0], line)
        said.append(f"{file.name}: K={result['num_draft_tokens']}, overhead {100 * result['overhead_share']:.1f}%")
    return "".join(f"{line}\n" for line in lines.values()), said


def put(table: str, page: Path) -> None:
    """Replace the table of `page` that has the same heading. Raises UserError where there is none."""
    lines, new = page.read_text(encoding="utf-8").splitlines(), table.splitlines()
    if new[0] not in lines:
        raise UserError(f"{page}: no table with the heading {new[0]}")
    first = last = lines.index(new[0])
    while last < len(lines) and lines[last].startswith("|"):
        last += 1
    page.write_text("\n".join([*lines[:first], *new, *lines[last:]]) + "\n", encoding="utf-8")


TABLES = {
    "quickstart": quickstart,
    "methods": methods,
    "objectives": objectives,
    "adapted": adapted,
    "trees": trees,
    "speed": speed,
}


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("table", choices=TABLES)
    parser.add_argument("paths", nargs="+", type=Path, help="the run's folder; trees and speed: result files")
    parser.add_argument("--into", type=Path, help="the page whose table it replaces")
    given = parser.parse_args(arguments)
    several = given.table in ("trees", "speed")
    if not several and len(given.paths) > 1:
        parser.error(f"{given.table} takes one folder")
    make: Any = TABLES[given.table]
    table, said = make(given.paths if several else given.paths[0])
    print(table, *said, sep="\n")
    if given.into:
        put(table, given.into)
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except UserError as error:
        print(f"make_tables: {error}", file=sys.stderr)
        sys.exit(2)
