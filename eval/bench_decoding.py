"""Decoding speed of a draft model against `transformers`, and of a batch against single requests; see --help."""

import argparse
import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch

from spec_train.evaluation.evaluate import render_suite
from spec_train.evaluation.speed import bench_decoding, bench_linears, bench_table, linears_table
from spec_train.recipe import load_recipe
from spec_train.run import Run
from spec_train.speculators import load_speculator
from spec_train.speculators.draft_lm import DraftLM
from spec_train.stages.evaluate import best_checkpoint

if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("recipe", type=Path, help="a trained run; a draft model is held against assisted generation")
    parser.add_argument("--suite", default="gsm8k", help="bundled suite or JSONL file with prompts")
    parser.add_argument("--num-draft-tokens", type=int, default=4)
    parser.add_argument("--max-new-tokens", type=int, default=96)
    parser.add_argument("--prompts", type=int, default=16, help="decoded singly and in batches")
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--single-prompts", type=int, default=3, help="of these, decoded by transformers as well")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--linears", type=int, nargs="*", metavar="ROWS", help="time linear layers alone, e.g. 1 4 32")
    parser.add_argument("--json", type=Path, default=Path("bench_decoding.json"), help="where the figures are written")
    given = parser.parse_args()
    torch.set_num_threads(given.threads)
    run = Run(load_recipe(given.recipe))
    target = run.target()
    if given.linears:
        layers = bench_linears(target, given.linears, given.rounds)
        given.json.write_text(json.dumps(layers, indent=2) + "\n", encoding="utf-8")
        print(linears_table(layers), end="")
        sys.exit(0)
    speculator = load_speculator(best_checkpoint(run), target)
    assistant = speculator.body.model if isinstance(speculator, DraftLM) else None
    result = bench_decoding(
        target,
        speculator,
        assistant,
        render_suite(given.suite, run.tokenizer, run.prompt_kwargs).prompts[: given.prompts],
        num_draft_tokens=given.num_draft_tokens,
        max_new_tokens=given.max_new_tokens,
        batch_size=given.batch_size,
        single_prompts=given.single_prompts,
        rounds=given.rounds,
    )
    given.json.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    print(bench_table(result), end="")
    print(
        f"tokens/pass {result['tokens_per_step']:.2f}, loop overhead {100 * result['overhead_share']:.1f}%,",
        f"same text in batches: {result['same_text']};",
        given.json,
    )
