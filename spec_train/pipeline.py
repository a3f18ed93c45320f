"""A run from prompts to a proven export: the stages in order, and the commands that work without a recipe.

Every stage reads the recipe and the manifests before it, and writes `<output_dir>/<stage>/`. A stage that is current
is skipped; one whose inputs disagree with what is on disk is refused; an interrupted one is continued.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

from rich.console import Console

from spec_train.data.documents import read_documents
from spec_train.data.prompts import load_conversations
from spec_train.errors import UserError
from spec_train.estimate import target_facts
from spec_train.manifest import read_manifest
from spec_train.recipe import Recipe
from spec_train.run import Run
from spec_train.stages.common import is_finished
from spec_train.stages.evaluate import evaluate
from spec_train.stages.export import export
from spec_train.stages.features import features
from spec_train.stages.inputs import stage_state
from spec_train.stages.prompts import prompts
from spec_train.stages.responses import render_kept, render_prompts, responses
from spec_train.stages.train import train
from spec_train.stages.verify import verify

STAGES: dict[str, Callable[[Run, bool], None]] = {
    "prompts": prompts,
    "responses": responses,
    "features": features,
    "train": train,
    "eval": evaluate,
    "export": export,
    "verify": verify,
}


def run_all(recipe: Recipe, force: set[str]) -> None:
    """Every stage in order. `force`: stages to make anew, and with them all that follow. Raises UserError before the
    first one for a target that cannot be run, or that the recipe's speculator cannot be trained beside."""
    run = Run(recipe)
    if force or not all(is_finished(run.stage_directory(name)) for name in STAGES):
        target_facts(run)  # refuses what cannot be trained before anything is made
    anew = False
    for name, stage in STAGES.items():
        anew = anew or name in force
        stage(run, anew)
    show_results(run)


def run_prompts(recipe: Recipe, force: bool = False) -> None:
    """Read the sources; split off the held-out conversations."""
    STAGES["prompts"](Run(recipe), force)


def run_responses(recipe: Recipe, force: bool = False) -> None:
    """The target's answers as token ids, or the data's own answers with their mask."""
    STAGES["responses"](Run(recipe), force)


def run_features(recipe: Recipe, force: bool = False) -> None:
    """Hidden states on disk, where the recipe asks for them."""
    STAGES["features"](Run(recipe), force)


def run_train(recipe: Recipe, force: bool = False) -> None:
    """Train the speculator."""
    STAGES["train"](Run(recipe), force)


def run_eval(recipe: Recipe, force: bool = False) -> None:
    """Decode the suites with the speculator and with the baselines."""
    run = Run(recipe)
    STAGES["eval"](run, force)
    show_results(run)


def run_export(recipe: Recipe, force: bool = False) -> None:
    """Write what vLLM loads."""
    STAGES["export"](Run(recipe), force)


def run_verify(recipe: Recipe, force: bool = False) -> None:
    """Reload the export in a fresh process, then run it in real vLLM."""
    STAGES["verify"](Run(recipe), force)


def show_results(run: Run) -> None:
    """The table of the eval stage, what the machine gains and why, and how to serve the result."""
    from spec_train.evaluation.metrics import explain_speed
    from spec_train.evaluation.report import result_table

    if not run.is_main:
        return
    done = {name for name in ("eval", "export", "verify") if stage_state(run, name)[0] == "done"}
    if "eval" not in done:
        return
    console = Console() if Console().is_terminal else Console(width=140)
    files = [run.directory / "eval" / name for name in read_manifest(run.directory / "eval")["outputs"]["results"]]
    results = [json.loads(path.read_text(encoding="utf-8")) for path in files]
    order = {name: place for place, name in enumerate(dict.fromkeys(r["type"] for r in results))}
    results.sort(key=lambda r: (r["suite"], r["temperature"], order[r["type"]], r["num_draft_tokens"]))
    console.print(result_table(results, title=f"{run.target_name} on {results[0]['device']}, {results[0]['dtype']}"))
    for result in results:
        if result["speed"] and result["type"] == run.recipe.speculator.type:
            text = explain_speed(result["speed"], result["speed"]["tokens_per_step"], result["num_draft_tokens"])
            console.print(f"{result['type']} K={result['num_draft_tokens']}: {text}", markup=False)
    if "verify" in done:
        for status in read_manifest(run.directory / "verify")["outputs"]["reports"]:
            console.print(f"vLLM: {status}", markup=False)
    if "export" in done:
        for form, command in read_manifest(run.directory / "export")["outputs"]["serve"].items():
            console.print(f"serve ({form}): {command}", markup=False, soft_wrap=True)


def inspect_rows(recipe: Recipe, n: int) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """The first `n` training rows as they would be supervised, and counts of all: {"kept": N, "dropped": {reason: N},
    "notes": {what is kept though something is left out: N}}.

    Rows come from the responses stage where that is what the recipe asks for. Before that the data's own answers are
    rendered, so that a template or a mask can be judged before any work is done; prompts without answers are shown as
    the target gets them.
    """
    from spec_train.data.chat import inspect_rows as rows_of

    run = Run(recipe)
    finished = run.stage_directory("responses") / "train.jsonl"
    if stage_state(run, "responses")[0] == "done":
        documents = read_documents(finished)
        counted = read_manifest(finished.parent)["counts"]
        counts = {"kept": len(documents), "dropped": counted["dropped"], "notes": counted.get("notes", {})}
        return list(rows_of(run.tokenizer, documents[:n])), counts
    sources, seed = recipe.data.sources, recipe.run.seed
    notes: Counter[str] = Counter()
    try:
        conversations, lost = load_conversations(sources, mode="keep", max_drop_rate=1.0, seed=seed, notes=notes)
        documents, more = render_kept(run, conversations, notes=notes)
    except UserError:
        if recipe.responses.mode == "keep":
            raise
        notes.clear()
        conversations, lost = load_conversations(sources, mode="regenerate", max_drop_rate=1.0, seed=seed, notes=notes)
        documents, more = render_prompts(run, conversations, notes)
    counts = {"kept": len(documents), "dropped": dict(lost + more), "notes": dict(notes)}
    return list(rows_of(run.tokenizer, islice(documents, n))), counts


def evaluate_checkpoint(
    checkpoint: str,
    target: str,
    suite: str,
    num_draft_tokens: list[int],
    temperature: list[float],
    *,
    max_prompts: int | None = None,
    max_new_tokens: int = 256,
    batch_size: int = 8,
    dtype: str = "float32",
    device: str = "auto",
    top_k: int = 0,
    top_p: float = 1.0,
    min_p: float = 0.0,
    draft_sample_method: Any = "greedy",
    rejection_sample_method: Any = "standard",
    speed_prompts: int = 4,
    speed_rounds: int = 3,
    seed: int = 0,
    trees: Sequence[str] = (),
) -> list[dict[str, Any]]:
    """Evaluate a training checkpoint, an export, a published head (folder or hub id), "ngram" or "suffix" on a suite,
    without a recipe.

    Prompts are rendered as those were that the speculator was trained on, where that is on record. `trees`: see
    `tree_draft.parse_tree`.
    """
    import torch

    from spec_train.data.chat import load_tokenizer
    from spec_train.decoding.sampling import Sampling
    from spec_train.decoding.tree_draft import parse_tree
    from spec_train.evaluation.costs import measure_costs
    from spec_train.evaluation.evaluate import (
        Contender,
        EvalSettings,
        evaluate_suite,
        ngram_contender,
        render_suite,
        speculator_contender,
        suffix_contender,
        tree_contenders,
    )
    from spec_train.evaluation.overlap import overlap_warning, overlap_with_run, prompts_stage_of
    from spec_train.speculators import load_speculator, recorded_prompt
    from spec_train.speculators.head_files import find_head, weights_sha256
    from spec_train.speculators.suffix import SuffixProposer
    from spec_train.stop_ids import stop_token_ids
    from spec_train.target import TargetModel

    path = Path(checkpoint) if checkpoint in ("ngram", "suffix") else find_head(checkpoint)
    samplings = [
        Sampling(value, top_k, top_p, draft_sample_method, seed, min_p, rejection_sample_method)
        for value in temperature
    ]
    shapes = [parse_tree(text) for text in trees]
    if shapes and checkpoint in ("ngram", "suffix"):
        raise UserError(f"--tree needs a speculator: {checkpoint} drafts chains only")
    where = ("cuda" if torch.cuda.is_available() else "cpu") if device == "auto" else device
    prompts = render_suite(suite, load_tokenizer(target), recorded_prompt(path), stop_token_ids(target)).first(
        max_prompts
    )
    seen = overlap_with_run(prompts, prompts_stage_of(path))
    if warning := overlap_warning(suite, seen):
        Console(stderr=True).print(f"eval: {warning}", style="yellow", markup=False, soft_wrap=True)
    model = TargetModel.load(target, dtype=getattr(torch, dtype), device=where)
    planted: list[Contender] = []
    if checkpoint == "ngram":
        contender = ngram_contender(2, 4, num_draft_tokens)
    elif checkpoint == "suffix":
        contender = suffix_contender(SuffixProposer(), num_draft_tokens)
    else:
        speculator, weights = load_speculator(path, model), weights_sha256(path)
        contender = speculator_contender(speculator, checkpoint, num_draft_tokens, weights=weights)
        planted = tree_contenders(model, speculator, checkpoint, shapes, weights=weights)
    if len(contender.num_draft_tokens) < len(num_draft_tokens):
        raise UserError(f"{checkpoint}: drafts at most {max(contender.num_draft_tokens, default=0)} tokens at a time")
    results = []
    for sampling in samplings:
        settings = EvalSettings(sampling, max_new_tokens, batch_size, speed_prompts, None, speed_rounds)
        results += evaluate_suite(model, [contender, *planted], prompts, settings, target_name=target)
    costs = measure_costs(model, contender.proposer, deepest=max(contender.num_draft_tokens))
    # The costs are the chain's: a tree drafts and checks at others.
    return [{**result, **({} if result.get("tree") else {"costs": costs}), "overlap": seen} for result in results]


def verify_export_dir(
    export_dir: Path, target: str | None, *, num_draft_tokens: int, max_new_tokens: int, prompts: int
) -> Any:
    """Verify an export on a few bundled prompts, without a recipe."""
    import torch

    from spec_train.data.chat import load_tokenizer
    from spec_train.decoding.engine import speculative_decode
    from spec_train.decoding.sampling import Sampling
    from spec_train.evaluation.evaluate import render_suite
    from spec_train.serving.export import read_export
    from spec_train.serving.verify import comparison_dtype, local_folder, verify_export
    from spec_train.speculators import load_speculator, recorded_prompt
    from spec_train.target import TargetModel

    name = target or str(read_export(export_dir)["target_id"])
    suite = render_suite("gsm8k", load_tokenizer(name), recorded_prompt(export_dir)).first(prompts)
    model = TargetModel.load(name, dtype=getattr(torch, comparison_dtype(name)))
    trace = speculative_decode(
        model,
        load_speculator(export_dir, model),
        suite.prompts,
        num_draft_tokens=num_draft_tokens,
        sampling=Sampling(),
        max_new_tokens=max_new_tokens,
        batch_size=8,
    )
    return verify_export(
        export_dir,
        local_folder(name),
        prompts=suite.prompts,
        max_new_tokens=max_new_tokens,
        num_draft_tokens=num_draft_tokens,
        expected_trace=trace,
        vllm="auto",
    )
