"""Advice against a full sweep, with a real target and speculator.

Prompts are dealt into 2N groups. For each pair, advice comes from one half (decoded at two depths with the estimate,
costs measured once), and every K from 1 to the deepest is decoded on the other half and timed, K in turns. A sweep's
speed at K is tokens / (rounds * ms of a round at K), with the milliseconds pooled over all groups: the machine is the
same for all, and a group alone is too short to time to a percent. The advice is right where its K is within
`--tolerance` of the fastest K.

    python eval/check_advice.py CHECKPOINT --target MODEL --suite gsm8k --groups 10 --prompts 8 --out check.jsonl

Every timed round of a group is a line of `--out`; an interrupted check goes on with the same command.
"""

import argparse
import json
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
from spec_train.evaluation.estimate import estimator
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


def read_lines(path: Path, settings: dict[str, Any]) -> list[dict[str, Any]]:
    """The whole lines of an interrupted check; a torn last one is cut off the file."""
    whole = path.read_bytes() if path.is_file() else b""
    whole = whole[: whole.rfind(b"\n") + 1]
    lines = [json.loads(line) for line in whole.splitlines()]
    if not lines:
        path.write_text(json.dumps(settings) + "\n", encoding="utf-8")
        return []
    if lines[0] != settings:
        sys.exit(f"{path} was made with other settings; give another --out")
    path.write_bytes(whole)
    return lines[1:]


def judge(lines: list[dict[str, Any]], groups: int, tolerance: float) -> int:
    """Print how every finished group's advice does in its sweep; how many are right."""
    costs = Costs.of(next(line["costs"] for line in lines if "costs" in line))
    rounds = [line for line in lines if "sweep" in line]
    depths = sorted({int(k) for line in rounds for k in line["sweep"]})
    ms = {
        k: 1000 * sum(r["sweep"][str(k)][2] for r in rounds) / sum(r["sweep"][str(k)][1] for r in rounds)
        for k in depths
    }
    print("ms of a round, swept and as priced:", {k: (round(ms[k], 1), round(costs.round_ms(1, k), 1)) for k in depths})
    right = done = 0
    for group in range(groups):
        advice = next((line for line in lines if line.get("group") == group and "advised" in line), None)
        swept = [line["sweep"] for line in rounds if line["group"] == group]
        if advice is None or not swept:
            continue
        per_round = {k: sum(s[str(k)][0] for s in swept) / sum(s[str(k)][1] for s in swept) for k in depths}
        rate = {k: per_round[k] / ms[k] for k in depths}
        best, advised = max(rate, key=rate.__getitem__), advice["advised"]
        loss = 1 - rate[advised] / rate[best]
        done, right = done + 1, right + (loss <= tolerance)
        print(f"group {group}: advised K={advised}, fastest K={best}, {loss:.1%} lost")
    print(f"{right} of {done} within {tolerance:.0%} of the fastest K")
    return right


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkpoint")
    parser.add_argument("--target", required=True)
    parser.add_argument("--out", type=Path, required=True, help="JSON lines, read back after an interruption")
    parser.add_argument("--suite", default="gsm8k")
    parser.add_argument("--groups", type=int, default=10)
    parser.add_argument("--prompts", type=int, default=8, help="prompts of each half")
    parser.add_argument("--deepest", type=int, default=7)
    parser.add_argument("--max-new-tokens", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=2, help="timed rounds of the sweep, K in turns")
    parser.add_argument("--tolerance", type=float, default=0.01)
    parser.add_argument("--dtype", default="float32")
    options = parser.parse_args()

    device = "cuda" if torch.cuda.is_available() else "cpu"
    target = TargetModel.load(options.target, dtype=getattr(torch, options.dtype), device=device)
    speculator = load_speculator(Path(options.checkpoint), target)
    deepest = min(options.deepest, speculator.max_draft_tokens or options.deepest)
    suite = render_suite(options.suite, load_tokenizer(options.target), recorded_prompt(Path(options.checkpoint)))
    if len(suite.prompts) < 2 * options.groups * options.prompts:
        sys.exit(f"{options.suite} has {len(suite.prompts)} prompts; give fewer --groups or --prompts")
    told = ("checkpoint", "target", "suite", "groups", "prompts", "max_new_tokens", "dtype")
    settings = {name: getattr(options, name) for name in told} | {"deepest": deepest, "device": device}
    lines = read_lines(options.out, settings)

    def add(line: dict[str, Any]) -> None:
        lines.append(json.loads(json.dumps(line)))
        with options.out.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")

    def decode(prompts: list[list[int]], k: int) -> DecodeTrace:
        common: dict[str, Any] = {"sampling": Sampling(), "max_new_tokens": options.max_new_tokens}
        return speculative_decode(target, speculator, prompts, num_draft_tokens=k, **common)

    def half(group: int, place: int) -> list[list[int]]:
        """Every 2N-th prompt, so that both halves see every part of the suite."""
        return suite.prompts[2 * group + place :: 2 * options.groups][: options.prompts]

    if not any("costs" in line for line in lines):
        add({"costs": measure_costs(target, speculator, deepest=deepest, batch_sizes=[1])})
    costs = Costs.of(next(line["costs"] for line in lines if "costs" in line))
    for group in range(options.groups):
        if any(line.get("group") == group and "advised" in line for line in lines):
            continue
        traces = {k: decode(half(group, 0), k) for k in sorted({min(3, deepest), deepest})}
        texts = traces[deepest].requests
        estimate = estimator(target, speculator, texts, sampling=Sampling(), max_draft_tokens=deepest, batch_size=1)(
            deepest
        )
        tokens = sum(len(text.output_ids) for text in texts)
        figures = {"num_output_tokens": tokens, "num_prompts": len(texts), "estimate": estimate}
        evaluated = {k: Evaluated(k, [figures], chains_of(trace)) for k, trace in traces.items()}
        advised = pick(candidates_at(Method(speculator.kind, evaluated, costs), 1))
        add({"group": group, "advised": advised.num_draft_tokens, "expected_speedup": advised.speedup})
        print(f"group {group}: advised K={advised.num_draft_tokens}", flush=True)
    for turn in range(options.rounds):
        for group in range(options.groups):
            if any(line.get("group") == group and line.get("turn") == turn for line in lines):
                continue
            sweep: dict[int, list[float]] = {}
            for k in range(1, deepest + 1):
                trace = decode(half(group, 1), k)
                emitted = sum(len(request.output_ids) - 1 for request in trace.requests)
                rounds = sum(len(request.cycles) for request in trace.requests)
                sweep[k] = [emitted, rounds, trace.timings.total - trace.timings.prefill]
            add({"group": group, "turn": turn, "sweep": sweep})
            print(f"turn {turn}: group {group} swept", flush=True)
    judge(lines, options.groups, options.tolerance)


if __name__ == "__main__":
    main()
