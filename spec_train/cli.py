"""The commands. Each one loads its recipe, calls one function of `pipeline.py` and says where the result lies.

Heavy modules are imported inside the commands, so that `--help` answers at once. Exit status: 0 success, 2 a wrong
command, recipe or input (one line on stderr), 1 a failure while running, 130 interrupted.
"""

from __future__ import annotations

import json
import os
import sys
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, cast

import typer
from typer.core import TyperCommand

from spec_train.errors import RunFailure, UserError

if TYPE_CHECKING:
    from rich.console import Console

    from spec_train.recipe import Recipe

STAGES = ("prompts", "responses", "features", "train", "eval", "export", "verify")
INTERRUPTED = 130

# Typer raises its own copy of click's errors or the installed click's, by version; this is the base it uses.
_ClickException = cast("type[Exception]", typer.BadParameter.__mro__[2])

app = typer.Typer(
    help="Train speculative-decoding heads, measure what they accept, and serve them with vLLM.",
    epilog="Under a launcher: accelerate launch --config_file accelerate_configs/ddp.yaml -m spec_train train RECIPE",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)

RecipePath = Annotated[
    Path, typer.Argument(metavar="RECIPE", help="A recipe file, or a bundled one: recipes/quickstart/eagle3.yaml")
]
Overrides = Annotated[
    list[str] | None, typer.Argument(metavar="[SECTION.KEY=VALUE]...", help="Values that replace the recipe's")
]
Force = Annotated[bool, typer.Option("--force", help="Make this stage anew even where it is current")]


class _ListCommand(TyperCommand):
    """A command whose numeric options take several values: `--num-draft-tokens 3 5 7`."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        return super().parse_args(ctx, _repeat_options(args, ("--num-draft-tokens", "--temperature", "--concurrency")))


def _repeat_options(args: list[str], options: tuple[str, ...]) -> list[str]:
    """`--x 3 5` as `--x 3 --x 5`, the form the parser knows. Only numbers after the first value are taken."""
    repeated: list[str] = []
    current, values = "", 0
    for arg in args:
        if arg in options:
            current, values = arg, 0
        elif current and values and not arg.replace(".", "", 1).isdigit():
            current = ""
        elif current:
            repeated += [current] * (values > 0)
            values += 1
        repeated.append(arg)
    return repeated


def _load(path: Path, overrides: list[str] | None) -> Recipe:
    from spec_train.recipe import load_recipe

    return load_recipe(path, overrides or ())


def _console() -> Console:
    """Standard output of the main process; the other ranks of a launch stay silent."""
    from rich.console import Console

    return Console(quiet=os.environ.get("RANK", "0") != "0", highlight=False, soft_wrap=True)


def _say_where(recipe: Recipe, stage: str = "") -> None:
    directory = Path(recipe.run.output_dir) / stage
    if directory.is_dir():  # online features leave none
        _console().print(f"{stage or 'run'}: see {directory}", markup=False)


def _show_plan(lines: list[tuple[str, str, str]]) -> None:
    """A line each: what, done / begun / to do / stale, in words."""
    for what, state, text in lines:
        _console().print(f"{what:<10} {state:<6} {text}", markup=False)


@app.command()
def run(
    recipe: RecipePath,
    overrides: Overrides = None,
    force: Annotated[
        list[str] | None, typer.Option("--force", metavar="STAGE|all", help="Make this stage anew; may be repeated")
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Say what each stage would do; write nothing")] = False,
) -> None:
    """Every stage of a recipe in order, skipping what is current. May be interrupted and repeated."""
    unknown = [stage for stage in force or () if stage not in (*STAGES, "all")]
    if unknown:
        raise UserError(f"--force {unknown[0]}: no such stage; stages are {', '.join(STAGES)}, or all")
    loaded = _load(recipe, overrides)
    anew = set(STAGES) if "all" in (force or ()) else set(force or ())
    if dry_run:
        from spec_train.dry_run import plan

        _show_plan(plan(loaded, anew).lines)
        return
    from spec_train.pipeline import run_all

    run_all(loaded, force=anew)
    _say_where(loaded)


@app.command()
def prompts(recipe: RecipePath, overrides: Overrides = None, force: Force = False) -> None:
    """Read the data sources into one list of prompts, with what was dropped and why."""
    loaded = _load(recipe, overrides)
    from spec_train.pipeline import run_prompts

    run_prompts(loaded, force=force)
    _say_where(loaded, "prompts")


@app.command()
def responses(recipe: RecipePath, overrides: Overrides = None, force: Force = False) -> None:
    """Let the target answer the prompts (or render the answers in the data, with responses.mode=keep)."""
    loaded = _load(recipe, overrides)
    from spec_train.pipeline import run_responses

    run_responses(loaded, force=force)
    _say_where(loaded, "responses")


@app.command()
def features(recipe: RecipePath, overrides: Overrides = None, force: Force = False) -> None:
    """Store the target's hidden states (features.mode=offline)."""
    loaded = _load(recipe, overrides)
    from spec_train.pipeline import run_features

    run_features(loaded, force=force)
    _say_where(loaded, "features")


@app.command()
def train(recipe: RecipePath, overrides: Overrides = None, force: Force = False) -> None:
    """Train the speculator; resumes from the last checkpoint. Runs under accelerate launch too."""
    loaded = _load(recipe, overrides)
    from spec_train.pipeline import run_train

    run_train(loaded, force=force)
    _say_where(loaded, "train")


@app.command(name="eval", cls=_ListCommand)
def evaluate(
    subject: Annotated[
        str,
        typer.Argument(
            metavar="RECIPE|CHECKPOINT|ngram|suffix",
            help="A recipe, a checkpoint, export or published head (folder or hub id), or ngram or suffix",
        ),
    ],
    overrides: Overrides = None,
    force: Force = False,
    target: Annotated[
        str | None, typer.Option(help="The target model: a folder or hub id (default: the one an export names)")
    ] = None,
    suite: Annotated[str | None, typer.Option(help="A name out of spec-train suites, or a JSONL or suite file")] = None,
    num_draft_tokens: Annotated[list[int] | None, typer.Option(min=1, help="One or more, e.g. 3 5 7")] = None,
    temperature: Annotated[list[float] | None, typer.Option(min=0.0, help="One or more, e.g. 0 1")] = None,
    top_k: Annotated[int | None, typer.Option(min=0, help="Keep the k likeliest tokens (default 0: all)")] = None,
    top_p: Annotated[float | None, typer.Option(help="Keep the likeliest tokens of this mass (default 1: all)")] = None,
    min_p: Annotated[float | None, typer.Option(help="Drop tokens below this share of the likeliest")] = None,
    draft_sample_method: Annotated[str | None, typer.Option(help="greedy (default) or probabilistic")] = None,
    rejection_sample_method: Annotated[str | None, typer.Option(help="standard (default) or block")] = None,
    max_prompts: Annotated[int | None, typer.Option(min=1, help="Decode the first N prompts only")] = None,
    max_new_tokens: Annotated[int | None, typer.Option(min=1, help="Length limit of an answer (default 256)")] = None,
    batch_size: Annotated[int | None, typer.Option(min=1, help="Requests decoded together (default 8)")] = None,
    dtype: Annotated[str | None, typer.Option(help="float32 (default), bfloat16 or float16")] = None,
    tree: Annotated[
        list[str] | None, typer.Option(help="Trees beside the chains: depth,top_k,num_tokens or widths, 4,4,16 4x2x1")
    ] = None,
    json_path: Annotated[Path | None, typer.Option("--json", metavar="OUT", help="Write the results there")] = None,
    backend: Annotated[
        str, typer.Option(help="torch (our decoder) or vllm (its offline engine, of an export)")
    ] = "torch",
    concurrency: Annotated[
        list[int] | None, typer.Option(min=1, help="Requests at a time in vLLM, e.g. 1 8 32 (default 1 8)")
    ] = None,
    server: Annotated[str | None, typer.Option(metavar="URL", help="Measure this running vLLM instead")] = None,
    baseline_server: Annotated[str | None, typer.Option(metavar="URL", help="One without the speculator")] = None,
) -> None:
    """Decode with the speculator and measure acceptance length, losslessness and speed."""
    given = {
        "num_draft_tokens": num_draft_tokens,
        "temperature": temperature,
        "top_k": top_k,
        "top_p": top_p,
        "min_p": min_p,
        "draft_sample_method": draft_sample_method,
        "rejection_sample_method": rejection_sample_method,
        "max_prompts": max_prompts,
        "max_new_tokens": max_new_tokens,
        "batch_size": batch_size,
        "dtype": dtype,
        "trees": tree,
    }
    settings = {name: value for name, value in given.items() if value is not None}
    if subject.endswith((".yaml", ".yml")):
        if settings or target or suite or json_path or concurrency or server or baseline_server or backend != "torch":
            raise UserError(
                "eval RECIPE takes its settings from the recipe; override them, e.g. eval.num_draft_tokens=[3,5]"
            )
        loaded = _load(Path(subject), overrides)
        from spec_train.pipeline import run_eval

        run_eval(loaded, force=force)
        _say_where(loaded, "eval")
        return
    if overrides:
        raise UserError(
            f"{overrides[0]}: overrides belong to a recipe; for a checkpoint use the options of eval --help"
        )
    if subject not in ("ngram", "suffix") and not Path(subject).is_dir() and subject.count("/") != 1:
        raise UserError(
            f"{subject}: neither a recipe (.yaml) nor a checkpoint or export folder, nor a hub id, nor ngram or suffix"
        )
    target = target or _recorded_target(subject)
    if target is None or suite is None:
        raise UserError(f"eval {subject} needs --target MODEL and --suite SUITE")
    if dtype not in (None, "float32", "bfloat16", "float16"):
        raise UserError(f"--dtype must be one of float32, bfloat16, float16, got {dtype!r}")
    if backend not in ("torch", "vllm"):
        raise UserError(f"--backend must be torch or vllm, got {backend!r}")
    if baseline_server and not server:
        raise UserError("--baseline-server belongs to --server URL")
    if server:
        if num_draft_tokens or dtype or batch_size or draft_sample_method or rejection_sample_method:
            raise UserError(
                "--server: drafts, their sampling and the dtype are the server's, its load is --concurrency"
            )
        served = {"url": server, "baseline_url": baseline_server, "concurrency": concurrency or [1, 8]}
        _evaluate_server(subject, target, suite, {**settings, **served}, json_path)
        return
    if backend == "torch" and concurrency:
        raise UserError("--concurrency is vLLM's: add --backend vllm, or use --batch-size")
    if backend == "vllm":
        if batch_size is not None:
            raise UserError("--batch-size is of our decoder: with --backend vllm use --concurrency")
        _evaluate_in_vllm(subject, target, suite, {**settings, "concurrency": concurrency or [1, 8]}, json_path)
        return
    _evaluate_checkpoint(subject, target, suite, settings, json_path)


def _recorded_target(subject: str) -> str | None:
    """The target that an export names, as `verify` takes it; None of anything else."""
    from spec_train.serving.export import is_export, read_export

    return str(read_export(Path(subject))["target_id"]) if is_export(Path(subject)) else None


def _evaluate_in_vllm(subject: str, target: str, suite: str, settings: dict[str, Any], json_path: Path | None) -> None:
    from spec_train.evaluation.load_report import load_table
    from spec_train.evaluation.vllm_backend import evaluate_in_vllm
    from spec_train.manifest import atomic_write_json

    _check_json_path(json_path)
    results = evaluate_in_vllm(subject, target, suite, **{"num_draft_tokens": [3, 5], "temperature": [0.0], **settings})
    _console().print(load_table(results, f"{subject} in vLLM, {suite}"))
    if results[0]["cpu_sampling_repaired"] or results[-1]["cpu_sampling_repaired"]:
        _console().print(
            "eval: stock CPU builds of vLLM sample wrongly with speculation at temperature > 0; these runs used "
            "spec-train's repair of it, a server of that build does not"
        )
    if json_path is not None:
        atomic_write_json(json_path, results)
        _console().print(f"eval: results in {json_path}", markup=False)


def _evaluate_server(subject: str, target: str, suite: str, settings: dict[str, Any], json_path: Path | None) -> None:
    from spec_train.evaluation.load_report import load_table
    from spec_train.evaluation.server import evaluate_server
    from spec_train.manifest import atomic_write_json

    _check_json_path(json_path)
    results = evaluate_server(subject, target, suite, **{"temperature": [0.0], **settings})
    _console().print(load_table(results, f"{subject} at {settings['url']}, {suite}"))
    if any(result["others_tokens"] for result in results):
        _console().print("eval: the server answered others meanwhile: its counters and these speeds are not ours alone")
    if any(result["temperature"] > 0 for result in results):
        _console().print(
            "eval: a CPU build of vLLM samples wrongly with speculation at temperature > 0; a GPU is right"
        )
    if json_path is not None:
        atomic_write_json(json_path, results)
        _console().print(f"eval: results in {json_path}", markup=False)


def _check_json_path(json_path: Path | None) -> None:
    if json_path is not None and not json_path.absolute().parent.is_dir():
        raise UserError(f"--json {json_path}: the folder {json_path.absolute().parent} does not exist")


def _evaluate_checkpoint(
    subject: str, target: str, suite: str, settings: dict[str, Any], json_path: Path | None
) -> None:
    from spec_train.evaluation.report import result_table
    from spec_train.manifest import atomic_write_json
    from spec_train.pipeline import evaluate_checkpoint

    _check_json_path(json_path)
    settings = {"num_draft_tokens": [3, 5], "temperature": [0.0], **settings}
    results = evaluate_checkpoint(subject, target, suite, **settings)
    _console().print(result_table(results))
    if json_path is not None:
        atomic_write_json(json_path, results)
        _console().print(f"eval: results in {json_path}", markup=False)


@app.command()
def export(recipe: RecipePath, overrides: Overrides = None, force: Force = False) -> None:
    """Write the best checkpoint in the formats that vLLM loads, reloaded strictly and compared."""
    loaded = _load(recipe, overrides)
    from spec_train.pipeline import run_export

    run_export(loaded, force=force)
    _say_where(loaded, "export")


@app.command()
def verify(
    subject: Annotated[str, typer.Argument(metavar="RECIPE|EXPORT_DIR", help="A recipe, or an exported folder")],
    overrides: Overrides = None,
    force: Force = False,
    target: Annotated[str | None, typer.Option(help="The target, where the export does not name it")] = None,
    num_draft_tokens: Annotated[int, typer.Option(min=1, help="Draft tokens (of an export)")] = 3,
    prompts: Annotated[int, typer.Option(min=1, help="How many prompts to decode (of an export)")] = 8,
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Length limit of an answer (of an export)")] = 64,
) -> None:
    """Prove an export: strict reload, equal logits, and the same drafts in a real vLLM where one is installed."""
    if subject.endswith((".yaml", ".yml")):
        if target is not None:
            raise UserError("verify RECIPE takes the target from the recipe; drop --target")
        loaded = _load(Path(subject), overrides)
        from spec_train.pipeline import run_verify

        run_verify(loaded, force=force)
        _say_where(loaded, "verify")
        return
    if overrides:
        raise UserError(f"{overrides[0]}: overrides belong to a recipe; an export is verified as it is")
    if not Path(subject).is_dir():
        raise UserError(f"{subject}: neither a recipe (.yaml) nor an export folder")
    from spec_train.pipeline import verify_export_dir
    from spec_train.serving.verify import render_report

    limits = {"num_draft_tokens": num_draft_tokens, "max_new_tokens": max_new_tokens, "prompts": prompts}
    report = verify_export_dir(Path(subject), target, **limits)
    _console().print(render_report(report))
    if not report.ok:
        raise typer.Exit(1)


@app.command()
def push(
    export_dir: Annotated[Path, typer.Argument(metavar="EXPORT_DIR", help="An exported folder: RUN/export/FORMAT")],
    repo_id: Annotated[
        str | None, typer.Argument(metavar="[REPO_ID]", help="owner/name (default: hub.repo_id)")
    ] = None,
    overrides: Annotated[
        list[str] | None, typer.Argument(metavar="[hub.KEY=VALUE]...", help="Values that replace the recipe's")
    ] = None,
    private: Annotated[
        bool | None, typer.Option("--private/--public", help="The repository's visibility (default: hub.private)")
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Show the files and the card; no network")] = False,
    message: Annotated[str | None, typer.Option(help="Of the commit")] = None,
    revision: Annotated[str, typer.Option(metavar="BRANCH", help="The branch to commit to")] = "main",
    results: Annotated[Path | None, typer.Option(metavar="DIR", help="Evaluation results other than the run's")] = None,
    overwrite_card: Annotated[
        bool, typer.Option("--overwrite-card", help="Replace a README.md that was edited on the Hub")
    ] = False,
) -> None:
    """Publish an export on the Hugging Face Hub: its files, a card of what was measured, one commit."""
    from spec_train.serving.hub import describe
    from spec_train.serving.hub import push as push_files
    from spec_train.serving.push_plan import describe_plan, plan_push

    settings = list(overrides or ())
    if repo_id is not None and "=" in repo_id:  # REPO_ID is left out
        settings.insert(0, repo_id)
        repo_id = None
    if private is not None:
        settings.append(f"hub.private={str(private).lower()}")
    plan = plan_push(export_dir, repo_id, settings, results)
    for line in plan.unknown:
        print(f"push: the card does not know {line}", file=sys.stderr)
    if dry_run:
        print(describe_plan(plan))
        return
    done = push_files(
        plan.files,
        plan.repo_id,
        private=plan.private,
        message=message or plan.message,
        revision=revision,
        overwrite_card=overwrite_card,
    )
    print(describe(done, plan.repo_id, plan.private))


@app.command()
def inspect(
    recipe: RecipePath,
    overrides: Overrides = None,
    count: Annotated[int, typer.Option("-n", min=1, help="How many rows to show")] = 3,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object a row, then the counts")] = False,
) -> None:
    """Show rendered samples with the tokens that training supervises."""
    loaded = _load(recipe, overrides)
    from spec_train.pipeline import inspect_rows

    rows, counts = inspect_rows(loaded, count)
    if as_json:
        keys = ("id", "input_ids", "loss_mask", "text", "supervised_text")
        for row in rows:
            print(json.dumps({key: row[key] for key in keys}, ensure_ascii=False))
        print(json.dumps(counts, ensure_ascii=False))
        return
    from rich.text import Text

    from spec_train.run import Run

    console = _console()
    tokenizer = Run(loaded).tokenizer
    for row in rows:
        console.rule(Text(str(row["id"])))
        text = Text()
        for supervised, run_of_ids in groupby(zip(row["input_ids"], row["loss_mask"], strict=True), itemgetter(1)):
            piece = tokenizer.decode([token for token, _ in run_of_ids], skip_special_tokens=False)
            text.append(piece, style="bold green" if supervised else "dim")
        console.print(text)
        console.print(
            f"{sum(row['loss_mask'])} of {len(row['input_ids'])} tokens are supervised (green)", style="italic"
        )
    reasons = ", ".join(f"{number} {reason}" for reason, number in counts["dropped"].items()) or "none"
    console.print(f"kept {counts['kept']}, dropped: {reasons}", markup=False)
    for note, number in counts["notes"].items():
        console.print(f"{number} {note}", markup=False)


@app.command()
def compare(
    file: Annotated[
        Path, typer.Argument(metavar="COMPARISON", help="A comparison file: recipes/comparisons/quickstart.yaml")
    ],
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Say what would be done; write nothing")] = False,
) -> None:
    """Train several recipes on the same data and budget, and put what they reach into one table."""
    from spec_train.comparison import compare as compare_all
    from spec_train.comparison import plan_comparison

    if dry_run:
        _show_plan(plan_comparison(file))
        return
    compare_all(file)


@app.command(cls=_ListCommand)
def advise(
    results: Annotated[list[Path], typer.Argument(metavar="EVAL_JSON...", help="Results of eval, or folders of them")],
    concurrency: Annotated[list[int] | None, typer.Option(min=1, help="Your loads, e.g. 1 8 32")] = None,
    temperature: Annotated[float | None, typer.Option(min=0.0, help="Of the results (default: the lowest)")] = None,
    export_dir: Annotated[Path | None, typer.Option("--export", help="The exported speculator to serve")] = None,
    json_path: Annotated[Path | None, typer.Option("--json", metavar="OUT", help="Write the advice there")] = None,
) -> None:
    """Which method and how many draft tokens to serve at which load, with the vLLM config to use."""
    from spec_train.evaluation.advice_input import read_methods
    from spec_train.evaluation.advice_report import advice_table, break_even_lines, command, vllm_config
    from spec_train.evaluation.advise import advise as advise_on
    from spec_train.manifest import atomic_write_json

    if json_path is not None and not json_path.absolute().parent.is_dir():
        raise UserError(f"--json {json_path}: the folder {json_path.absolute().parent} does not exist")
    methods, notes = read_methods(results, temperature)
    advice = advise_on(methods, concurrency, notes)
    chosen = next(method for method in methods if method.name == advice["method"])
    arguments = vllm_config(chosen, advice, export_dir)
    advice["vllm"] = arguments
    console = _console()
    console.print(advice_table(advice))
    for line in break_even_lines(advice):
        console.print(line, markup=False)
    for warning in advice["warnings"]:
        console.print(f"warning: {warning}", markup=False)
    if arguments is None:
        console.print("serve without speculation: no load gains", markup=False)
    else:
        console.print(f"serve: {command(arguments)}", markup=False)
    if json_path is not None:
        atomic_write_json(json_path, advice)
        console.print(f"advise: advice in {json_path}", markup=False)


@app.command()
def report(
    paths: Annotated[
        list[Path], typer.Argument(metavar="RUN...", help="Run folders, folders of results, or result files")
    ],
    out: Annotated[Path, typer.Option(help="Where the report goes")] = Path("report"),
    title: Annotated[str, typer.Option(help="Its heading")] = "Speculative decoding, measured",
) -> None:
    """One self-contained HTML page with plots, the plots as PNG, and the tables in Markdown."""
    from spec_train.evaluation.report import result_table
    from spec_train.evaluation.run_report import collect, write_report

    found = collect(paths)
    if found.results:
        _console().print(result_table(found.results))
    written = write_report(found, out, title)
    _console().print(f"report: {out / 'report.html'} and {len(written) - 1} more files in {out}", markup=False)


@app.command()
def suites() -> None:
    """The bundled evaluation suites: prompts, licence, where the text comes from. Fetches nothing."""
    from rich.table import Table

    from spec_train.evaluation.suites import bundled_suites, suite_facts

    table = Table("suite", "prompts", "licence", "from", "what")
    for facts in (suite_facts(name) for name in bundled_suites()):
        table.add_row(facts.name, str(facts.prompts or ""), facts.license, facts.origin, facts.description)
    _console().print(table)


@app.command()
def doctor(
    recipe: Annotated[
        Path | None, typer.Argument(metavar="[RECIPE]", help="Check this recipe on this machine, the target included")
    ] = None,
    overrides: Overrides = None,
    steps: Annotated[int, typer.Option(min=20, help="At most so many steps of the overfit gate")] = 800,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object")] = False,
) -> None:
    """Versions, devices, memory, disk, what vLLM loads; with a RECIPE, whether it can work here."""
    if recipe is not None:
        _diagnose(_load(recipe, overrides), steps, as_json)
        return
    from spec_train.doctor import capability_table, findings

    if as_json:
        print(json.dumps(dict(findings()), ensure_ascii=False))
        return
    console = _console()
    for name, finding in findings():
        console.print(f"{name:<14} {finding}", markup=False)
    console.print(capability_table())


def _diagnose(recipe: Recipe, steps: int, as_json: bool) -> None:
    from spec_train.recipe_doctor import diagnose

    diagnosis = diagnose(recipe, steps)
    if as_json:
        print(json.dumps(diagnosis.to_json(), ensure_ascii=False))
    else:
        from rich.text import Text

        console = _console()
        preview = Text()
        for text, supervised in diagnosis.preview:
            preview.append(text, style="bold green" if supervised else "dim")
        console.print(preview)
        for check in diagnosis.checks:
            console.print(f"{check.state:<5} {check.name:<8} {check.text}", markup=False)
    if not diagnosis.ok:
        raise typer.Exit(1)


def _complain(message: str) -> None:
    """One line on stderr, from one process of each machine: a missing file may be missing on one machine only."""
    if os.environ.get("LOCAL_RANK", "0") == "0":
        print(" ".join(message.split()), file=sys.stderr)


def main() -> None:
    """The program: runs a command and turns its end into an exit status."""
    try:
        status = app(prog_name="spec-train", standalone_mode=False)
    except UserError as error:
        _complain(f"error: {error}")
        sys.exit(2)
    except RunFailure as error:
        _complain(f"error: {error}")
        sys.exit(1)
    except _ClickException as error:
        # Typer's own wording of a wrong command line, on one line.
        _complain(f"error: {cast('Any', error).format_message()} See spec-train --help")
        sys.exit(2)
    except (KeyboardInterrupt, typer.Abort) as interruption:
        if isinstance(interruption.__cause__, EOFError):  # a lost worker, not a user: show where
            raise interruption.__cause__ from None
        status = INTERRUPTED
    if status == INTERRUPTED:
        _complain("interrupted; repeat the same command to go on from here")
    sys.exit(status if isinstance(status, int) else 0)
