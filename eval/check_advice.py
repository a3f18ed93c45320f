"""Advice against a full sweep, with a real target and speculator.

A trace is one suite, or one of `--groups` parts of it, its prompts dealt into two halves. The advice is made from one
half (decoded at two depths, with the estimate) and from step costs measured once. The other half is held out: every K
from 1 to the deepest is decoded on it. A K's speed there is tokens of a round / milliseconds of a round; the first is
the trace's own, the second is timed on single requests of every suite, K in turns, and pooled: the machine is the same
for all, and a trace alone is too short to time to a percent. The advice is right where the K it names is within
`--tolerance` of the fastest.

    python eval/check_advice.py CHECKPOINT --target MODEL --suite gsm8k humaneval mt_bench --out check.jsonl

Decoding may share the machine with other work; what `--timing` adds needs it quiet. Every finished part is a line of
`--out`: an interrupted check goes on with the same command.
"""

import argparse
import dataclasses
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
from spec_train.serving.export import read_export
from spec_train.speculators import load_speculator, recorded_prompt
from spec_train.target import TargetModel

Line = dict[str, Any]


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


def read_lines(path: Path, settings: Line) -> list[Line]:
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


def emitted_and_rounds(trace: DecodeTrace) -> tuple[int, int]:
    """Tokens that rounds gave (a request's first one comes from its prompt's pass), and rounds."""
    return (
        sum(len(request.output_ids) - 1 for request in trace.requests),
        sum(len(request.cycles) for request in trace.requests),
    )


def judge(lines: list[Line], tolerance: float) -> int:
    """Print how the advice for every trace does in its sweep; how many are right."""
    costs = Costs.of(next(line["costs"] for line in lines if "costs" in line))
    timed = [line["timed"] for line in lines if "timed" in line]
    depths = sorted(int(k) for k in timed[0])
    ms = {k: 1000 * sum(t[str(k)][1] for t in timed) / sum(t[str(k)][0] for t in timed) for k in depths}
    print("ms of a round, timed and as priced:", {k: (round(ms[k], 1), round(costs.round_ms(1, k), 1)) for k in depths})
    traces = [line for line in lines if "trace" in line]
    right, losses = 0, []
    for line in traces:
        evaluated = {
            int(k): Evaluated(int(k), [line["figures"]], [Chain(*(map(_tuple, chain))) for chain in chains])
            for k, chains in line["chains"].items()
        }
        advice = pick(candidates_at(Method(line["type"], evaluated, costs), 1))
        advised = advice.num_draft_tokens
        rate = {k: line["sweep"][str(k)][0] / line["sweep"][str(k)][1] / ms[k] for k in depths}
        best = max(rate, key=rate.__getitem__)
        losses.append(1 - rate[advised] / rate[best])
        right += losses[-1] <= tolerance
        print(f"{line['trace']}: advised K={advised}, fastest K={best}, {losses[-1]:.1%} lost")
    mean = sum(losses) / len(losses)
    print(f"{right} of {len(traces)} within {tolerance:.0%} of the fastest K; {mean:.1%} lost on average")
    return right


def _tuple(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkpoint")
    parser.add_argument("--target", help="default: the one that an export names")
    parser.add_argument("--out", type=Path, required=True, help="JSON lines, read back after an interruption")
    parser.add_argument("--suite", nargs="+", default=["gsm8k"])
    parser.add_argument("--groups", type=int, default=1, help="traces of each suite")
    parser.add_argument("--prompts", type=int, default=12, help="prompts of each half, at most")
    parser.add_argument("--deepest", type=int, default=7)
    parser.add_argument("--max-new-tokens", type=int, default=128)
    parser.add_argument("--batch-size", type=int, default=8, help="of the decodes that are counted and not timed")
    parser.add_argument("--timing", action="store_true", help="also time rounds and steps, and judge")
    parser.add_argument("--rounds", type=int, default=3, help="timed turns over all suites, one prompt of each")
    parser.add_argument("--tolerance", type=float, default=0.01)
    parser.add_argument("--dtype", default="float32")
    options = parser.parse_args()
    options.target = options.target or read_export(Path(options.checkpoint))["target_id"]

    device = "cuda" if torch.cuda.is_available() else "cpu"
    target = TargetModel.load(options.target, dtype=getattr(torch, options.dtype), device=device)
    speculator = load_speculator(Path(options.checkpoint), target)
    deepest = min(options.deepest, speculator.max_draft_tokens or options.deepest)
    tokenizer, prompt = load_tokenizer(options.target), recorded_prompt(Path(options.checkpoint))
    suites = {name: render_suite(name, tokenizer, prompt).prompts for name in options.suite}
    told = ("checkpoint", "target", "groups", "prompts", "max_new_tokens", "dtype")
    settings = {name: getattr(options, name) for name in told} | {"deepest": deepest, "device": device}
    lines = read_lines(options.out, settings)

    def add(line: Line) -> None:
        lines.append(json.loads(json.dumps(line)))
        with options.out.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")

    def decode(prompts: list[list[int]], k: int, batch_size: int) -> DecodeTrace:
        common: dict[str, Any] = {"sampling": Sampling(), "max_new_tokens": options.max_new_tokens}
        return speculative_decode(target, speculator, prompts, num_draft_tokens=k, batch_size=batch_size, **common)

    for suite, prompts in suites.items():
        for group in range(options.groups):
            name = f"{suite}/{group}"
            if any(line.get("trace") == name for line in lines):
                continue
            # Every 2N-th prompt, so that both halves of every trace see every part of the suite.
            advice, held_out = (
                prompts[2 * group + place :: 2 * options.groups][: options.prompts] for place in range(2)
            )
            depths = sorted({min(3, deepest), deepest})
            traces = {k: decode(advice, k, options.batch_size) for k in depths}
            texts = traces[deepest].requests
            estimates = estimator(
                target, speculator, texts, sampling=Sampling(), max_draft_tokens=deepest, batch_size=options.batch_size
            )
            figures = {
                "num_output_tokens": sum(len(text.output_ids) for text in texts),
                "num_prompts": len(texts),
                "estimate": estimates(deepest),
            }
            chains = {k: [dataclasses.astuple(chain) for chain in chains_of(trace)] for k, trace in traces.items()}
            sweep = {k: emitted_and_rounds(decode(held_out, k, options.batch_size)) for k in range(1, deepest + 1)}
            add({"trace": name, "type": speculator.kind, "figures": figures, "chains": chains, "sweep": sweep})
            print(f"{name}: tokens of a round { ({k: round(t / r, 3) for k, (t, r) in sweep.items()}) }", flush=True)
    if not options.timing:
        return
    if not any("costs" in line for line in lines):
        add({"costs": measure_costs(target, speculator, deepest=deepest, batch_sizes=[1])})
    for turn in range(options.rounds):
        for suite, prompts in suites.items():
            if any(line.get("turn") == [turn, suite] for line in lines):
                continue
            timed: dict[int, list[float]] = {}
            for k in range(1, deepest + 1):
                trace = decode(prompts[turn : turn + 1], k, 1)
                timed[k] = [emitted_and_rounds(trace)[1], trace.timings.total - trace.timings.prefill]
            add({"turn": [turn, suite], "timed": timed})
            print(f"turn {turn}: {suite} timed", flush=True)
    judge(lines, options.tolerance)


if __name__ == "__main__":
    main()
