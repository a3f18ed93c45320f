"""Hold what vLLM did against what our decoder did: text, drafts and counters."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from spec_train.decoding.acceptance import acceptance_length, vllm_counters
from spec_train.decoding.trace import DecodeTrace
from spec_train.serving.processes import VllmRun

# Two implementations round differently. Where the two best tokens are this close (in log-probability) either choice is
# right; and a draft may fall on such a tie without anyone seeing it, which this share of the cycles may.
TIE = {"float32": 1e-3, "bfloat16": 0.25}
TIE_SHARE = {"float32": 1e-3, "bfloat16": 0.1}


@dataclass
class VllmReport:
    """What real vLLM did. Counts of requests and cycles; `None`: no trace of our own decoder was given.

    `near_ties`: requests whose text differs at a tie of the target's two best tokens, and so counts as equal.
    `dtype`: in which both decoded. `first_divergence`: by comparison, where it first failed (request, position, and the
    cycle for drafts).
    `stops_checked`: requests whose answer also ends there when vLLM stops by itself; None where the target has no
    tokenizer. `counters`, `expected_counters`: vLLM's own of the run with the speculator, and the sums over our trace.
    """

    version: str
    requests: int
    output_tokens: int
    outputs_equal_baseline: int
    outputs_equal_ours: int | None
    near_ties: int
    cycles: int
    cycles_compared: int
    cycles_equal: int
    counters: dict[str, Any]
    expected_counters: dict[str, Any] | None
    mean_acceptance_length: float
    seconds: float
    dtype: str = "float32"
    stops_checked: int | None = None
    first_divergence: dict[str, dict[str, int]] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)


def first_difference(a: Sequence[int], b: Sequence[int]) -> int | None:
    """The first index at which two sequences differ (one may end there); None if they are equal."""
    for i, (x, y) in enumerate(zip(a, b, strict=False)):
        if x != y:
            return i
    return None if len(a) == len(b) else min(len(a), len(b))


def compare(
    base: VllmRun,
    spec: VllmRun,
    trace: DecodeTrace | None,
    version: str,
    dtype: str = "float32",
) -> VllmReport:
    """Hold vLLM with the speculator against vLLM without it, and against our own trace, all three in `dtype`."""
    drafts = spec.counters.get("num_drafts", 0)
    report = VllmReport(
        version=version,
        requests=len(spec.outputs),
        output_tokens=sum(map(len, spec.outputs)),
        outputs_equal_baseline=0,
        outputs_equal_ours=None,
        near_ties=0,
        cycles=sum(map(len, spec.steps)),
        cycles_compared=0,
        cycles_equal=0,
        counters=spec.counters,
        expected_counters=None,
        mean_acceptance_length=acceptance_length(spec.counters.get("num_accepted_tokens", 0), drafts),
        seconds=base.seconds["generate"] + spec.seconds["generate"],
        dtype=dtype,
    )
    if drafts == 0:
        report.problems.append("vLLM drafted nothing: give prompts whose answers are longer than one token")
    against_base = _compare_outputs(report, "baseline", base.outputs, spec.outputs, base.margins)
    report.outputs_equal_baseline = against_base
    if trace is not None:
        ours = [request.output_ids for request in trace.requests]
        report.outputs_equal_ours = _compare_outputs(report, "ours", ours, spec.outputs, base.margins)
        _compare_cycles(report, spec, trace)
        report.expected_counters = vllm_counters(trace)
        exact = report.cycles_equal == report.cycles and not report.near_ties
        counted = {name: report.counters.get(name) for name in report.expected_counters}
        if exact and counted != report.expected_counters:
            report.problems.append(f"vLLM's counters {counted} are not ours: {report.expected_counters}")
    return report


def stop_problems(base: VllmRun, stop_ids: Sequence[int], dtype: str = "float32") -> list[str]:
    """Where vLLM, left to itself, ends answers at other tokens than `stop_ids`, by which all else was compared."""
    own = base.own_stops
    if own is None:
        return []
    if own["ids"] != sorted(stop_ids):
        return [f"vLLM ends answers at the ids {own['ids']}, we at {sorted(stop_ids)}"]
    for request, found in zip(own["requests"], own["outputs"], strict=True):
        at = first_difference(base.outputs[request], found)
        margins = base.margins[request]
        if at is not None and not (at < len(margins) and margins[at] < TIE[dtype]):
            return [f"vLLM's answer {request} ends or reads otherwise where vLLM stops by itself, from token {at} on"]
    return []


def _compare_outputs(
    report: VllmReport, name: str, expected: list[list[int]], found: list[list[int]], margins: list[list[float]]
) -> int:
    """How many requests have the same text, ties aside; the first that does not is noted as `name`."""
    equal = 0
    for request, (a, b) in enumerate(zip(expected, found, strict=True)):
        at = first_difference(a, b)
        tied = at is not None and at < len(margins[request]) and margins[request][at] < TIE[report.dtype]
        if at is None or tied:
            equal += 1
            report.near_ties += tied
        else:
            report.first_divergence.setdefault(f"outputs_{name}", {"request": request, "position": at})
    if equal < len(expected):
        where = report.first_divergence[f"outputs_{name}"]
        other = "its own without the speculator" if name == "baseline" else "ours"
        report.problems.append(
            f"vLLM's text differs from {other} in {len(expected) - equal} of {len(expected)} requests, "
            f"first in request {where['request']} at output token {where['position']}"
        )
    return equal


def _compare_cycles(report: VllmReport, spec: VllmRun, trace: DecodeTrace) -> None:
    """Compare drafts cycle by cycle while the context is the same: up to the first difference in a request's text."""
    for index, request in enumerate(trace.requests):
        at = first_difference(request.output_ids, spec.outputs[index])
        known = 1  # output tokens before the cycle; the first comes from the prefill
        for number, (ours, theirs) in enumerate(zip(request.cycles, spec.steps[index], strict=False)):
            if at is not None and known > at:
                break
            report.cycles_compared += 1
            if ours.drafts == theirs["drafts"] and (at is not None or ours.accepted == theirs["accepted"]):
                report.cycles_equal += 1
            else:
                position = first_difference(ours.drafts, theirs["drafts"])
                where = {"request": index, "cycle": number, "position": -1 if position is None else position}
                report.first_divergence.setdefault("drafts", where)
            if ours.accepted != theirs["accepted"]:
                break  # from here on the two are at different places
            known += ours.accepted + 1
    wrong = report.cycles_compared - report.cycles_equal
    if wrong > TIE_SHARE[report.dtype] * report.cycles_compared:
        where = report.first_divergence["drafts"]
        report.problems.append(
            f"vLLM drafts other tokens than we do in {wrong} of {report.cycles_compared} cycles, first in request "
            f"{where['request']}, cycle {where['cycle']}, draft {where['position']}"
        )
