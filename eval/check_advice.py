"""Advice against a full sweep, with a real target and speculator.

Prompts are dealt into 2N groups. For each pair, advice comes from one half (decoded at two depths, costs measured), and
every K from 1 to the deepest is decoded on the other half and timed. The advice is right where its K is within
`--tolerance` of the fastest K's tokens per second.

    python eval/check_advice.py CHECKPOINT --target MODEL --suite gsm8k --groups 10 --prompts 8 --json check.json
"""

import argparse
import json
import statistics
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch

from spec_train.data.chat import load_tokenizer
from spec_train.decoding.engine import speculative_decode
from spec_train.decoding.sampling import Sampling
from spec_train.decoding.trace import DecodeTrace
from spec_train.evaluation.advice_input import Evaluated, Method
from spec_train.evaluation.advise import candidates_at, pick
from spec_train.evaluation.chains import Chain
from spec_train.evaluation.costs import Costs, measure_costs
from spec_train.evaluation.evaluate import render_suite
from spec_train.speculators import load_speculator, recorded_prompt
from spec_train.target import TargetModel


def chains_of(trace: DecodeTrace) -> list[Chain]:
    """The rounds of a decode as the advice reads them."""
    return [
        Chain(
            request.id,
            tuple(cycle.accepted for cycle in request.cycles),
            tuple(len(cycle.drafts) for cycle in request.cycles),
            trace.num_draft_tokens,
            False,
            len(request.output_ids),
        )
        for request in trace.requests
    ]


def decoding_rate(trace: DecodeTrace) -> float:
    """Tokens per second after the prefill."""
    tokens = sum(len(request.output_ids) - 1 for request in trace.requests)
    return tokens / (trace.timings.total - trace.timings.prefill)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkpoint")
    parser.add_argument("--target", required=True)
    parser.add_argument("--suite", default="gsm8k")
    parser.add_argument("--groups", type=int, default=10)
    parser.add_argument("--prompts", type=int, default=8, help="prompts of each half")
    parser.add_argument("--deepest", type=int, default=7)
    parser.add_argument("--max-new-tokens", type=int, default=128)
    parser.add_argument("--batch-size", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=3, help="timed rounds of the sweep, K in turns")
    parser.add_argument("--tolerance", type=float, default=0.01)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()

    device = "cuda" if torch.cuda.is_available() else "cpu"
    target = TargetModel.load(options.target, dtype=getattr(torch, options.dtype), device=device)
    speculator = load_speculator(Path(options.checkpoint), target)
    deepest = min(options.deepest, speculator.max_draft_tokens or options.deepest)
    suite = render_suite(options.suite, load_tokenizer(options.target), recorded_prompt(Path(options.checkpoint)))
    if len(suite.prompts) < 2 * options.groups * options.prompts:
        sys.exit(f"{options.suite} has {len(suite.prompts)} prompts; give fewer --groups or --prompts")
    costs = measure_costs(target, speculator, deepest=deepest, batch_sizes=[options.batch_size])

    def decode(prompts: list[list[int]], k: int) -> DecodeTrace:
        return speculative_decode(
            target, speculator, prompts, num_draft_tokens=k, sampling=Sampling(),
            max_new_tokens=options.max_new_tokens, batch_size=options.batch_size,
        )  # fmt: skip

    rows: list[dict[str, Any]] = []
    for group in range(options.groups):
        # Every 2N-th prompt, so that both halves see every part of the suite.
        seen = suite.prompts[2 * group :: 2 * options.groups][: options.prompts]
        held_out = suite.prompts[2 * group + 1 :: 2 * options.groups][: options.prompts]
        depths = sorted({min(3, deepest), deepest})
        evaluated = {k: Evaluated(k, [], chains_of(decode(seen, k))) for k in depths}
        method = Method(speculator.kind, evaluated, Costs.of(costs))
        advised = pick(candidates_at(method, options.batch_size))
        rates: dict[int, list[float]] = {k: [] for k in range(1, deepest + 1)}
        for _ in range(options.rounds):
            for k, samples in rates.items():
                samples.append(decoding_rate(decode(held_out, k)))
        medians = {k: statistics.median(samples) for k, samples in rates.items()}
        best = max(medians, key=medians.__getitem__)
        loss = 1 - medians[advised.num_draft_tokens] / medians[best]
        rows.append(
            {
                "group": group,
                "advised": advised.num_draft_tokens,
                "expected_speedup": advised.speedup,
                "best": best,
                "loss": loss,
                "right": loss <= options.tolerance,
                "tokens_per_second": medians,
            }
        )
        print(f"group {group}: advised K={advised.num_draft_tokens}, fastest K={best}, {loss:.1%} lost", flush=True)
    right = sum(row["right"] for row in rows)
    print(f"{right} of {len(rows)} within {options.tolerance:.0%} of the fastest K")
    if options.json:
        report = {"target": options.target, "device": device, "costs": costs, "groups": rows, "right": right}
        options.json.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
