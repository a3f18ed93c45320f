"""Decoding with and without CUDA graphs, in paired runs: one after the other in every round, texts compared."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any

from spec_train.decoding.engine import plain_decode, speculative_decode
from spec_train.decoding.sampling import Sampling
from spec_train.decoding.trace import DecodeTrace
from spec_train.graphs import Graphs
from spec_train.speculators.base import Proposer
from spec_train.target import TargetModel

GREEDY = Sampling()


def bench_graphs(
    target: TargetModel,
    proposer: Proposer,
    prompts: Sequence[list[int]],
    *,
    num_draft_tokens: Sequence[int],
    max_new_tokens: int,
    batch_size: int = 1,
    rounds: int = 3,
) -> list[dict[str, Any]]:
    """One entry for plain decoding (K = 0) and one per K of `num_draft_tokens`, for JSON.

    An uncounted round comes first, in which passes are captured. tokens_per_second: of every round, `eager` and with
    `graphs`; ratio: the median quotient inside a round; target_step_ms: the median over rounds. same_text: how many of
    the `texts` of the last round are equal; in bfloat16 nearly tied tokens may fall otherwise. passes: the target's
    static passes so far; refused: models that cannot be captured; captured: False where passes are computed anew at
    each call, as on a device without CUDA, or where the target cannot be captured.
    """
    graphs = Graphs(capture=target.device.type == "cuda")
    entries = []
    for k in (0, *num_draft_tokens):
        eager: list[DecodeTrace] = []
        replayed: list[DecodeTrace] = []
        for _ in range(rounds + 1):
            for found, used in ((eager, None), (replayed, graphs)):
                with target.replaying(used):
                    found.append(_decode(target, proposer, prompts, k, max_new_tokens, batch_size))
        rates = {"eager": [_rate(t) for t in eager[1:]], "graphs": [_rate(t) for t in replayed[1:]]}
        entries.append(
            {
                "num_draft_tokens": k,
                "batch_size": batch_size,
                "tokens_per_second": rates,
                "ratio": statistics.median(b / a for a, b in zip(rates["eager"], rates["graphs"], strict=True)),
                "target_step_ms": {"eager": _target_step_ms(eager[1:]), "graphs": _target_step_ms(replayed[1:])},
                "same_text": sum(
                    a.output_ids == b.output_ids for a, b in zip(eager[-1].requests, replayed[-1].requests, strict=True)
                ),
                "texts": len(prompts),
                "passes": graphs.passes(target.model),
                "refused": sorted(type(model).__name__ for model in graphs.refused),
                "captured": graphs.capture and graphs.passes(target.model) > 0,
            }
        )
    return entries


def _decode(
    target: TargetModel, proposer: Proposer, prompts: Sequence[list[int]], k: int, max_new_tokens: int, batch_size: int
) -> DecodeTrace:
    if not k:
        return plain_decode(target, prompts, sampling=GREEDY, max_new_tokens=max_new_tokens, batch_size=batch_size)
    proposer.reset()
    return speculative_decode(
        target,
        proposer,
        prompts,
        num_draft_tokens=k,
        sampling=GREEDY,
        max_new_tokens=max_new_tokens,
        batch_size=batch_size,
    )


def _rate(trace: DecodeTrace) -> float:
    return sum(len(request.output_ids) for request in trace.requests) / trace.timings.total


def _target_step_ms(traces: Sequence[DecodeTrace]) -> float:
    return statistics.median(1000 * t.timings.target / max(1, t.timings.target_steps) for t in traces)
