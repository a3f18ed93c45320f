"""Decode the suites with the speculator and with the baselines."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from spec_train.data.documents import prompts_of
from spec_train.decoding.tree_draft import TreeShape, dynamic_tree, static_tree
from spec_train.errors import UserError
from spec_train.evaluation.assisted import assistant_of
from spec_train.evaluation.costs import measure_costs, write_costs
from spec_train.evaluation.evaluate import (
    Contender,
    EvalSettings,
    assisted_contender,
    evaluate_suite,
    ngram_contender,
    render_suite,
    speculator_contender,
    suffix_contender,
    tree_contenders,
)
from spec_train.evaluation.overlap import overlap_warning, overlap_with_run
from spec_train.evaluation.report import result_name, write_results
from spec_train.evaluation.turns import Suite
from spec_train.graphs import Graphs
from spec_train.manifest import Stage, file_digests, read_manifest
from spec_train.recipe import TreeSection
from spec_train.run import Run
from spec_train.speculators import load_speculator
from spec_train.speculators.head_files import state_sha256, weights_sha256
from spec_train.speculators.suffix import SuffixProposer
from spec_train.stages.common import documents_of, eval_sampling, make_stage
from spec_train.stages.inputs import eval_inputs
from spec_train.stages.train import new_speculator
from spec_train.target import TargetModel


def best_checkpoint(run: Run) -> Path:
    """The checkpoint that training chose."""
    name = Path(read_manifest(run.directory / "train")["outputs"]["best_checkpoint"]).name
    return run.directory / "train" / "checkpoints" / name  # a run may have been moved


def suite_of(run: Run, name: str) -> Suite:
    """A suite's prompts, rendered as the run renders its own."""
    if name == "held_out":
        documents, prompts = prompts_of(documents_of(run, "held_out"))
        suite = Suite(name, [d.id for d in documents], [d.category for d in documents], prompts)
    else:
        suite = render_suite(name, run.tokenizer, run.prompt_kwargs, run.stop_ids)
    if not suite.prompts:
        raise UserError(f"eval.suites {name}: no prompt can be rendered")
    return suite.first(run.recipe.eval.max_prompts)


def eval_settings(run: Run, temperature: float) -> EvalSettings:
    section = run.recipe.eval
    max_new_tokens = section.max_new_tokens or run.recipe.responses.max_new_tokens
    return EvalSettings(
        eval_sampling(run.recipe, temperature),
        max_new_tokens,
        section.batch_size,
        section.speed_prompts,
        section.speed_new_tokens,
        section.speed_rounds,
    )


def contenders_of(run: Run, target: TargetModel) -> list[Contender]:
    """What the run measures: its baselines, the untrained start where the method wants it shown, the result."""
    section = run.recipe.eval
    contenders = []
    if "ngram" in section.baselines:
        depths = section.ngram_num_draft_tokens or section.num_draft_tokens
        if section.ngram_windows is None:
            contenders.append(ngram_contender(section.ngram_min, section.ngram_max, depths))
        for shortest, longest in section.ngram_windows or []:
            contenders.append(ngram_contender(shortest, longest, depths, f"ngram {shortest}-{longest}"))
    if "suffix" in section.baselines:
        proposer = SuffixProposer(
            section.suffix_decoding_max_tree_depth,
            section.suffix_decoding_max_cached_requests,
            section.suffix_decoding_max_spec_factor,
            section.suffix_decoding_min_token_prob,
        )
        contenders.append(suffix_contender(proposer, section.num_draft_tokens))
    checkpoint = best_checkpoint(run)
    if run.recipe.speculator.start_is_baseline() or "untrained" in section.baselines:
        contenders.append(start_contender(run, target, section.num_draft_tokens))
    trained, weights = load_speculator(checkpoint, target), weights_sha256(checkpoint)
    contenders.append(speculator_contender(trained, str(checkpoint), section.num_draft_tokens, weights=weights))
    if "assisted" in section.baselines:
        assistant, reason = assistant_of(trained, target)
        if assistant is not None:
            contenders.append(assisted_contender(trained, assistant, section.num_draft_tokens, weights))
            reason = "at temperature 0 only" if any(section.temperature) else ""
        if reason:
            _warn(f"baseline assisted: {'left out, ' if assistant is None else ''}{reason}")
    trees = [_shape(tree) for tree in section.trees]
    return [*contenders, *tree_contenders(target, trained, str(checkpoint), trees, weights=weights)]


def _warn(text: str) -> None:
    Console(stderr=True).print(f"eval: {text}", style="yellow", markup=False, soft_wrap=True)


def _shape(tree: TreeSection) -> TreeShape:
    if tree.depth is not None and tree.top_k is not None and tree.num_tokens is not None:
        return dynamic_tree(tree.depth, tree.top_k, tree.num_tokens)
    return static_tree(tree.widths or (), tree.paths or ())


def start_contender(run: Run, target: TargetModel, num_draft_tokens: Sequence[int]) -> Contender:
    """The speculator as training found it."""
    start, _ = new_speculator(run, documents_of(run, "train"), documents_of(run, "held_out"))
    start.to(target.device, target.dtype).eval().requires_grad_(False)
    kind = f"{run.recipe.speculator.type} {'untrained' if run.recipe.speculator.start() is None else 'start'}"
    weights = state_sha256(start.state_dict())
    return speculator_contender(start, "as training found it", num_draft_tokens, kind, weights)


def write_chain_costs(target: TargetModel, contenders: Sequence[Contender], directory: Path) -> None:
    """Measure and write the step costs of every chain. A tree has the name of its chain and other times, and advice is
    on chains; assisted generation is no method of ours."""
    for contender in contenders:
        if contender.assistant is None and contender.tree is None:
            costs = measure_costs(target, contender.proposer, deepest=max(contender.num_draft_tokens))
            write_costs(directory, contender.kind, costs)


def evaluate(run: Run, force: bool) -> None:
    """Make the stage where needed; finished results of an interrupted one are kept. What it made are the traces of its
    results: who received which tokens in which rounds."""
    recipe = run.recipe

    def work(stage: Stage) -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]]:
        target = run.target()
        contenders = contenders_of(run, target)
        results: list[dict[str, Any]] = []
        for name in recipe.eval.suites:
            suite = suite_of(run, name)
            seen = overlap_with_run(suite, run.stage_directory("prompts"))
            if warning := overlap_warning(name, seen):
                _warn(warning)
            for temperature in recipe.eval.temperature:
                found = evaluate_suite(
                    target,
                    contenders,
                    suite,
                    eval_settings(run, temperature),
                    target_name=run.target_name,
                    directory=stage.directory,
                )
                results += [{**result, "overlap": seen} for result in found]
        write_results(stage.directory, results)
        if recipe.eval.measure_costs:
            write_chain_costs(target, contenders, stage.directory)
        names = dict.fromkeys(result_name(result) for result in results)
        made = file_digests((stage.directory / "traces").glob("*.jsonl"))
        return {"results": list(names)}, {"results": len(results)}, made

    def work_with_graphs(stage: Stage) -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]]:
        target = run.target()
        graphs = Graphs() if recipe.eval.cuda_graphs and target.device.type == "cuda" else None
        with target.replaying(graphs):
            return work(stage)

    make_stage(run, "eval", eval_inputs, force, work_with_graphs)
