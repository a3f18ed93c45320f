"""Train several recipes on the same data, features and budget, and put what they reach into one table.

The file says which recipes, how much each may train, and at which K to look:

    name: compare
    seconds: 300                      # of training for each; or tokens: 350000 (answer tokens)
    num_draft_tokens: [1, 3, 5, 7]    # acceptance by the renewal estimate, which a greedy chain reaches exactly
    decode: [3]                       # where it is also measured by decoding, with speed and losslessness
    entries:
      - recipe: recipes/quickstart/eagle3.yaml
      - {recipe: recipes/quickstart/draft_lm.yaml, name: draft_lm kl, overrides: [speculator.loss=kl]}

A budget in seconds becomes a number of steps by timing a few of them first, on this machine, and that number is kept:
a comparison that is interrupted and repeated goes on where it was.
"""

from __future__ import annotations

import json
import re
import statistics
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Self

from pydantic import Field, ValidationError, model_validator
from rich.console import Console
from rich.table import Table

from spec_train.data.documents import Document
from spec_train.dry_run import plan
from spec_train.errors import UserError
from spec_train.evaluation.evaluate import (
    Contender,
    decode_reference,
    estimator_of,
    evaluate_suite,
    ngram_contender,
    speculator_contender,
)
from spec_train.evaluation.report import markdown_row
from spec_train.evaluation.turns import Suite
from spec_train.manifest import atomic_write_json, atomic_write_text, canonical, json_sha256, read_manifest
from spec_train.recipe import PositiveInt, Recipe, Section, load_recipe
from spec_train.recipe_file import find_recipe, parse_yaml
from spec_train.run import DATA_STAGES, Run
from spec_train.speculators import load_speculator
from spec_train.speculators.base import Speculator
from spec_train.stages.common import documents_of
from spec_train.stages.evaluate import best_checkpoint, eval_settings, start_contender, suite_of
from spec_train.stages.features import features
from spec_train.stages.inputs import stage_state, train_inputs
from spec_train.stages.prompts import prompts
from spec_train.stages.responses import responses
from spec_train.stages.train import feature_provider, new_speculator, train
from spec_train.target import TargetModel

TIMED_STEPS, SKIPPED_STEPS = 6, 2  # steps that are timed to turn seconds into steps, after some that warm up


class Entry(Section):
    """One recipe of a comparison. `name` is what the table calls it, by default its kind of speculator."""

    recipe: str
    name: str | None = Field(default=None, pattern=r"^[A-Za-z0-9][A-Za-z0-9 ._-]*$")
    overrides: list[str] = []


class Comparison(Section):
    """A comparison file."""

    name: str = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")
    output_dir: str = Field(default_factory=lambda fields: f"runs/{fields.get('name')}")
    seconds: PositiveInt | None = None
    tokens: PositiveInt | None = None
    num_draft_tokens: list[PositiveInt] = Field(default=[1, 3, 5, 7], min_length=1)
    decode: list[PositiveInt] = [3]
    entries: list[Entry] = Field(min_length=1)

    @model_validator(mode="after")
    def _one_budget(self) -> Self:
        if (self.seconds is None) == (self.tokens is None):
            raise ValueError("needs exactly one of seconds and tokens")
        return self


@dataclass(frozen=True)
class Budget:
    """What one entry trains: parameters, and for how many optimiser steps."""

    parameters: int
    steps: int


def load_comparison(path: Path) -> Comparison:
    """Read a comparison file, given by path or as a bundled one. Raises UserError."""
    try:
        return Comparison.model_validate(parse_yaml(find_recipe(path)))
    except ValidationError as error:
        problem = error.errors()[0]
        where = ".".join(map(str, problem["loc"])) or "comparison"
        raise UserError(f"{path}: {where}: {problem['msg']}") from None


def compare(path: Path) -> None:
    """Train, measure, and print the table; `comparison.json` and `comparison.md` are left in the output directory."""
    comparison = load_comparison(path)
    directory = Path(comparison.output_dir)
    runs = _runs(comparison)
    first = next(iter(runs.values()))
    for stage in (prompts, responses, features):
        for run in runs.values():
            run.share_target(first)
            stage(run, False)
            first.share_target(run)
    rows: list[dict[str, Any]] = []
    trained: dict[str, Run] = {}
    for name, run in runs.items():
        budget = _budget(run, comparison, first)
        trained[name] = Run(_limited(run.recipe, budget))
        trained[name].share_target(run)
        train(trained[name], False)
        outputs = read_manifest(trained[name].directory / "train")["outputs"]
        rows.append({"name": name, "type": run.recipe.speculator.type, **asdict(budget), "training": outputs})
    record = {"comparison": comparison.model_dump(mode="json"), "trained": rows}
    earlier = _earlier(directory / "comparison.json")
    if earlier is not None and all(earlier[key] == canonical(record[key]) for key in record):
        rows = earlier["rows"]
    else:
        rows = _measure(comparison, trained, rows, directory)
        atomic_write_json(directory / "comparison.json", {**record, "rows": rows})
    table, markdown = _tables(comparison, rows)
    atomic_write_text(directory / "comparison.md", markdown)
    console = Console() if Console().is_terminal else Console(width=160)
    console.print(table)
    console.print(f"compare: see {directory / 'comparison.md'}", markup=False, soft_wrap=True)


def plan_comparison(path: Path) -> list[tuple[str, str, str]]:
    """What `compare` would do, as `dry_run.plan` says it: the stages that the entries share, then the training of each.
    Nothing is written. Raises UserError for whatever would stop the comparison before it starts."""
    comparison = load_comparison(path)
    budget = f"{comparison.seconds} s" if comparison.seconds else f"{comparison.tokens:,} answer tokens"
    shared: list[tuple[str, str, str]] = []
    entries: list[tuple[str, str, str]] = []
    for name, run in _runs(comparison).items():
        lines = plan(run.recipe).lines  # refuses an entry that cannot start
        shared = shared or [line for line in lines if line[0] in ("target", *DATA_STAGES)]
        budgeted = _kept_budget(run, comparison) if stage_state(run, "features")[0] == "done" else None
        state, _ = stage_state(Run(_limited(run.recipe, budgeted)) if budgeted else run, "train")
        depths = run.recipe.eval.num_draft_tokens
        decoded = ", ".join(str(k) for k in depths if k in comparison.decode) or "none"
        what = f"{run.recipe.speculator.type}, {budget} of training; K {', '.join(map(str, depths))}, decoded {decoded}"
        entries.append((name, state, what))
    return [*shared, *entries]


def _runs(comparison: Comparison) -> dict[str, Run]:
    """A run for each entry, in directories of their own. Raises UserError where they do not share their data."""
    runs: dict[str, Run] = {}
    for entry in comparison.entries:
        recipe = load_recipe(Path(entry.recipe), entry.overrides)
        name = entry.name or recipe.speculator.type
        if name in runs:
            raise UserError(f"{comparison.name}: two entries are called {name!r}; give them names")
        deepest = recipe.speculator.max_draft_tokens() or max(comparison.num_draft_tokens)
        depths = [k for k in comparison.num_draft_tokens if k <= deepest]
        where = f"{comparison.output_dir}/{re.sub('[^A-Za-z0-9._-]+', '-', name)}"
        runs[name] = Run(_with(recipe, ["run.output_dir", where], ["eval.num_draft_tokens", depths]))
    first = next(iter(runs.values()))
    for name, run in runs.items():
        if any(run.stage_directory(stage) != first.stage_directory(stage) for stage in DATA_STAGES):
            raise UserError(f"{comparison.name}: {name} has other data than the rest; set the same run.data_dir in all")
    return runs


def _with(recipe: Recipe, *changes: list[Any]) -> Recipe:
    """The recipe with some values replaced, validated again."""
    fields = recipe.model_dump(mode="json")
    for key, value in changes:
        section, _, leaf = key.partition(".")
        fields[section][leaf] = value
    return type(recipe).model_validate(fields)


def _limited(recipe: Recipe, budget: Budget) -> Recipe:
    """The recipe as the entry is trained."""
    return _with(recipe, ["train.max_steps", budget.steps], ["train.save_every", budget.steps])


def _budget_of(run: Run, comparison: Comparison) -> str:
    """A hash of what the entry's budget depends on."""
    return json_sha256(canonical([train_inputs(run), comparison.seconds, comparison.tokens]))


def _kept_budget(run: Run, comparison: Comparison) -> Budget | None:
    """The budget that was worked out for this very entry, None before that."""
    file = run.directory / "budget.json"
    kept: dict[str, Any] = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}
    if kept.get("made_from") != _budget_of(run, comparison):
        return None
    return Budget(kept["parameters"], kept["steps"])


def _budget(run: Run, comparison: Comparison, first: Run) -> Budget:
    """How many steps the entry trains; worked out once and kept."""
    if (kept := _kept_budget(run, comparison)) is not None:
        return kept
    run.share_target(first)
    documents = documents_of(run, "train")
    speculator, _ = new_speculator(run, documents, [])
    first.share_target(run)
    parameters = sum(p.numel() for p in speculator.parameters() if p.requires_grad)
    tokens = comparison.tokens or (comparison.seconds or 0) * _tokens_per_second(run, speculator, documents)
    supervised = sum(document.num_response_tokens for document in documents)
    per_step = supervised / _steps_an_epoch(run, documents)
    budget = Budget(parameters, max(1, round(tokens / per_step)))
    run.directory.mkdir(parents=True, exist_ok=True)
    atomic_write_json(run.directory / "budget.json", {**asdict(budget), "made_from": _budget_of(run, comparison)})
    return budget


def _tokens_per_second(run: Run, speculator: Speculator, documents: list[Document]) -> float:
    """Answer tokens a second over a few steps, which are thrown away with the speculator."""
    from spec_train.training.trainer import train as train_speculator

    settings = run.recipe.train.model_copy(
        update={"max_steps": TIMED_STEPS + SKIPPED_STEPS, "log_every": 1, "trackers": []}
    )
    with tempfile.TemporaryDirectory(prefix="spec-train-") as folder:
        train_speculator(
            speculator,
            documents,
            [],
            feature_provider(run),
            optim=run.recipe.optim,
            train=settings,
            seed=run.training_seed,
            device=run.recipe.run.device,
            num_draft_tokens=[1],
            output_dir=Path(folder),
            speculator_config={},
            run_config={},
        )
        lines = (Path(folder) / "log.jsonl").read_text(encoding="utf-8").splitlines()
    return statistics.median(float(json.loads(line)["tokens_per_second"]) for line in lines[SKIPPED_STEPS:])


def _steps_an_epoch(run: Run, documents: list[Document]) -> int:
    from spec_train.data.batches import plan_epoch

    section = run.recipe.train
    steps = plan_epoch(
        [len(document.input_ids) for document in documents],
        [document.num_response_tokens for document in documents],
        micro_batch_tokens=section.micro_batch_tokens,
        seed=run.training_seed,
        epoch=0,
        per_step=section.grad_accum_steps,
    )
    return len(steps)


def _earlier(file: Path) -> dict[str, Any] | None:
    """What an earlier run of the same comparison found."""
    if not file.is_file():
        return None
    found: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    return found


def _measure(
    comparison: Comparison, runs: dict[str, Run], trained: list[dict[str, Any]], directory: Path
) -> list[dict[str, Any]]:
    """Rows with estimates at every K and decodes at some, all on one plain decoding of the held-out prompts."""
    rows = [dict(row) for row in trained]
    first = next(iter(runs.values()))
    target = first.target()
    suite = suite_of(first, "held_out")
    settings = eval_settings(first, 0.0)
    reference = decode_reference(target, suite, settings)
    section = first.recipe.eval
    contenders: list[tuple[Contender, dict[str, Any]]] = []
    for row in rows:
        run = runs[row["name"]]
        depths = run.recipe.eval.num_draft_tokens
        result, weights = load_speculator(best_checkpoint(run), target), row["training"]["weights_sha256"]
        contenders.append((speculator_contender(result, row["name"], depths, row["name"], weights), row))
    for run in _first_of_each_kind(runs):
        if run.recipe.speculator.start_is_baseline():
            run.share_target(first)
            start = start_contender(run, target, run.recipe.eval.num_draft_tokens)
            rows.append({"name": start.kind, "type": run.recipe.speculator.type})
            contenders.append((start, rows[-1]))
    if comparison.decode:
        rows.append({"name": "prompt lookup", "type": "ngram"})
        contenders.append((ngram_contender(section.ngram_min, section.ngram_max, comparison.decode), rows[-1]))
    for contender, row in contenders:
        _measure_one(comparison, contender, row, target, suite, settings, reference, first.target_name, directory)
    return rows


def _first_of_each_kind(runs: dict[str, Run]) -> list[Run]:
    """The first run of every kind of speculator: its start stands for the others'."""
    kinds: dict[str, Run] = {}
    for run in runs.values():
        kinds.setdefault(run.recipe.speculator.type, run)
    return list(kinds.values())


def _measure_one(
    comparison: Comparison,
    contender: Contender,
    row: dict[str, Any],
    target: TargetModel,
    suite: Suite,
    settings: Any,
    reference: Any,
    target_name: str,
    directory: Path,
) -> None:
    """Fill `row` with `estimates` by K and `decoded`, the evaluation results by K."""
    depths = contender.num_draft_tokens
    estimate = estimator_of(target, contender, reference, settings)
    row["estimates"] = {str(k): estimate(k)["renewal"] for k in depths}
    decoded = replace(contender, num_draft_tokens=tuple(k for k in depths if k in comparison.decode))
    results = evaluate_suite(
        target, [decoded], suite, settings,
        target_name=target_name, directory=directory / "eval", reference=reference, estimate=estimate,
    )  # fmt: skip
    row["decoded"] = {str(result["num_draft_tokens"]): result for result in results}


def _tables(comparison: Comparison, rows: list[dict[str, Any]]) -> tuple[Table, str]:
    """The table for the terminal and in Markdown."""
    depths, decode = comparison.num_draft_tokens, comparison.decode
    header = ["speculator", "trained", "answer tokens", "minutes", *(f"τ K={k}" for k in depths)]
    for k in decode:
        header += [f"tokens/pass K={k}", "text equal", "draft ms", "speed-up"]
    cells = [_cells(row, depths, decode) for row in rows]
    table = Table(title=comparison.name, title_justify="left", caption=CAPTION, caption_justify="left")
    for column in header:
        table.add_column(column, justify="left" if column == "speculator" else "right")
    for line in cells:
        table.add_row(*line)
    lines = [header, ["---", *["---:"] * (len(header) - 1)], *cells]
    return table, "\n".join(map(markdown_row, lines)) + f"\n\n{CAPTION}\n"


CAPTION = (
    "trained: parameters. τ: acceptance length on the held-out prompts, greedy, by the renewal estimate. tokens/pass: "
    "as decoded, every target pass counted, with the texts equal to plain decoding, the time to draft K tokens, and "
    "the speed-up one request at a time."
)
ABSENT = "-"


def _cells(row: dict[str, Any], depths: Sequence[int], decode: Sequence[int]) -> list[str]:
    training = row.get("training")
    cells = [
        row["name"],
        f"{row['parameters'] / 1e6:.1f}M" if training else ABSENT,
        f"{training['trained_tokens'] / 1e3:.0f}k" if training else ABSENT,
        f"{training['seconds'] / 60:.1f}" if training else ABSENT,
        *(f"{row['estimates'][str(k)]:.2f}" if str(k) in row["estimates"] else ABSENT for k in depths),
    ]
    for k in decode:
        result = row["decoded"].get(str(k))
        if result is None:
            cells += [ABSENT] * 4
            continue
        speed, lossless = result["speed"], result["lossless"]
        cells += [
            f"{result['tokens_per_step']:.2f}",
            f"{lossless['identical']}/{lossless['checked']}",
            f"{speed['draft_ms']:.0f}" if speed else ABSENT,
            f"{speed['speedup']:.2f}x" if speed else ABSENT,
        ]
    return cells
