"""Decode the suites with the speculator and with the baselines."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from spec_train.decoding.sampling import Sampling
from spec_train.errors import UserError
from spec_train.evaluation.evaluate import EvalSettings, Suite, evaluate_suite, render_suite
from spec_train.manifest import Stage, read_manifest
from spec_train.run import Run
from spec_train.speculators import load_speculator
from spec_train.stages.common import documents_of, make_stage


def best_checkpoint(run: Run) -> Path:
    """The checkpoint that training chose."""
    return Path(read_manifest(run.directory / "train")["outputs"]["best_checkpoint"])


def _suite(run: Run, name: str) -> Suite:
    """A suite's prompts, rendered as the run renders its own."""
    if name == "held_out":
        documents = [document for document in documents_of(run, "held_out") if document.spans[0][0] > 0]
        prompts = [document.input_ids[: document.spans[0][0]] for document in documents]
        suite = Suite(name, [d.id for d in documents], [d.category for d in documents], prompts)
    else:
        suite = render_suite(name, run.tokenizer, run.prompt_kwargs)
    if not suite.prompts:
        raise UserError(f"eval.suites {name}: no prompt can be rendered")
    return suite.first(run.recipe.eval.max_prompts)


def _settings(run: Run, temperature: float) -> EvalSettings:
    section = run.recipe.eval
    sampling = Sampling(temperature, section.top_k, section.top_p, section.draft_sample_method, run.recipe.run.seed)
    max_new_tokens = section.max_new_tokens or run.recipe.responses.max_new_tokens
    return EvalSettings(
        sampling,
        max_new_tokens,
        section.batch_size,
        section.speed_prompts,
        section.speed_new_tokens,
        section.speed_rounds,
    )


def evaluate(run: Run, force: bool) -> None:
    """Make the stage where needed; finished results of an interrupted one are kept."""
    recipe = run.recipe
    inputs = {
        "train": run.made_from("train"),
        "eval": recipe.eval.model_dump(mode="json"),
        "dtype": recipe.target.dtype,
    }

    def work(stage: Stage) -> tuple[dict[str, Any], dict[str, Any]]:
        checkpoint = best_checkpoint(run)
        target = run.target()
        head = load_speculator(checkpoint, target)
        results: list[dict[str, Any]] = []
        for name in recipe.eval.suites:
            suite = _suite(run, name)
            for temperature in recipe.eval.temperature:
                results += evaluate_suite(
                    target,
                    head,
                    suite,
                    _settings(run, temperature),
                    list(recipe.eval.num_draft_tokens),
                    baselines=list(recipe.eval.baselines),
                    ngram=(recipe.eval.ngram_min, recipe.eval.ngram_max),
                    ngram_num_draft_tokens=recipe.eval.ngram_num_draft_tokens,
                    speculator_name=str(checkpoint),
                    target_name=run.target_name,
                    directory=stage.directory,
                )
        return {"results": [str(p.name) for p in sorted(stage.directory.glob("*-k*.json"))]}, {"results": len(results)}

    make_stage(run, "eval", inputs, force, work)
