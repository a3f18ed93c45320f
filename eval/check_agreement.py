"""Estimate, our decode and vLLM at a temperature, each on continuations of its own (`evaluation.agreement`).

    python eval/check_agreement.py runs/quickstart/recipe.yaml --prompts 40 --samples 50 --out agreement

Exit status 0 where every pair agrees, 1 where one does not. An interrupted run goes on with the same command.
"""

import argparse
import sys
from dataclasses import asdict
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from spec_train.errors import UserError
from spec_train.evaluation.agreement import (
    SIDES,
    Journal,
    Plan,
    agreement_table,
    compare_sides,
    measure_here,
    measure_in_vllm,
)
from spec_train.evaluation.vllm_backend import check_sampling, check_subject
from spec_train.manifest import atomic_write_json
from spec_train.recipe import load_recipe
from spec_train.run import Run
from spec_train.serving.verify import local_folder
from spec_train.speculators import load_speculator
from spec_train.stages.evaluate import best_checkpoint, suite_of


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recipe", type=Path, help="a trained and exported run")
    parser.add_argument("--out", type=Path, required=True, help="folder of the journal and the result")
    parser.add_argument("--checkpoint", type=Path, help="default: the one that training chose")
    parser.add_argument("--export", type=Path, help="what vLLM serves (default: the run's own, plain format)")
    parser.add_argument("--suite", default="held_out")
    parser.add_argument("--prompts", type=int, default=40)
    parser.add_argument("--samples", type=int, default=50, help="continuations of each prompt and side")
    parser.add_argument("--num-draft-tokens", type=int, default=3)
    parser.add_argument("--temperature", type=float, default=0.7)
    parser.add_argument("--top-k", type=int, default=0)
    parser.add_argument("--top-p", type=float, default=1.0)
    parser.add_argument("--draft-sample-method", choices=("greedy", "probabilistic"), default="greedy")
    parser.add_argument("--rejection-sample-method", choices=("standard", "block"), default="standard")
    parser.add_argument("--max-new-tokens", type=int, default=32)
    parser.add_argument("--batch-size", type=int, default=50, help="requests at a time, in vLLM too")
    parser.add_argument(
        "--vllm-prompts", type=int, default=10, help="prompts to an engine; it is started anew for more"
    )
    parser.add_argument("--sides", nargs="+", choices=SIDES, default=list(SIDES))
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()

    run = Run(load_recipe(given.recipe))
    export = given.export or run.stage_directory("export") / "plain"
    suite = suite_of(run, given.suite).first(given.prompts)
    plan = Plan(
        given.samples,
        given.num_draft_tokens,
        given.temperature,
        given.max_new_tokens,
        given.batch_size,
        given.top_k,
        given.top_p,
        given.seed,
        given.draft_sample_method,
        given.rejection_sample_method,
    )
    if "vllm" in given.sides:
        check_subject(str(export))
        check_sampling(plan.sampling("vllm"), run.recipe.speculator.type)
    checkpoint = given.checkpoint or best_checkpoint(run)
    about = {"target": run.target_name, "checkpoint": str(checkpoint), "suite": suite.name, "prompts": suite.ids}
    journal = Journal(given.out / "counts.jsonl", {**about, "plan": asdict(plan)})
    for side in given.sides:
        if side == "vllm":
            folder = local_folder(run.target_path).absolute()
            measure_in_vllm(export, folder, suite, plan, journal, given.vllm_prompts, run.recipe.target.dtype)
        else:
            target = run.target()
            measure_here(side, target, load_speculator(checkpoint, target), suite, plan, journal)
    result = compare_sides(journal, len(suite.prompts))
    atomic_write_json(given.out / "agreement.json", {**about, "plan": asdict(plan), **result})
    print(agreement_table(result), end="")
    return 0 if result["agree"] else 1


if __name__ == "__main__":
    try:
        sys.exit(main())
    except UserError as error:
        sys.exit(f"check_agreement: {error}")
