"""Which method and how many draft tokens K to serve at which load, from measured acceptance and measured step costs.

    speed-up(B, K) = tokens per round(K) * plain step(B) / round(B, K)
    round(B, K)    = target pass(B, 1 + K) + draft(B, K) + overhead(B, K)

Leviathan et al. 2023 (arXiv 2211.17192), section 3.3, with measured times in place of an assumed cost ratio. Tokens per
round at a K that was decoded are that decode's own; at a K between, the rounds of the next deeper decode cut off at K,
1 + sum_{j<=K} prod_{i<=j} c_i with the conditional rates c_i (see `chains.py`), corrected for where those rounds start.
A server's own measurement of a load is preferred to the model.

Uncertainty: prompts are resampled (the same for every method, so comparisons are paired), and times are jittered by
their measured spread. Depths within 1% of the best are a tie, and the smallest of them is advised: it costs less
memory and loses less when the traffic is harder than the suite. The prefill is left out: short answers gain less.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from spec_train.errors import UserError
from spec_train.evaluation.advice_input import Evaluated, Method
from spec_train.evaluation.chains import causal_ms_per_token, conditional_rates, fixed, oracle_ms_per_token
from spec_train.evaluation.costs import Costs

RESAMPLES = 1000
TIE = 0.01
FEW_PROMPTS = 20
SHORT_ANSWER = 24  # tokens
LOW_ACCEPTANCE = 0.4  # of the first draft
SATURATED = 0.5  # a further row costs this share of a whole step
Samples = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Candidate:
    """One method at one K at one load. `samples` [RESAMPLES]: the speed-up in every resample."""

    kind: str
    num_draft_tokens: int
    tokens: float
    speedup: float
    samples: Samples
    measured: bool

    @property
    def interval(self) -> tuple[float, float]:
        low, high = np.quantile(self.samples, [0.025, 0.975])
        return float(low), float(high)


def advise(
    methods: Sequence[Method], concurrency: Sequence[int] | None = None, notes: Sequence[str] = ()
) -> dict[str, Any]:
    """The advice as JSON: "loads" (one entry per concurrency), "methods" (break-even, schedule), "warnings".

    `concurrency` None: the measured batch sizes and servers' loads. Raises UserError for a load below 1, or where
    neither costs nor a server's measurements are at hand.
    """
    if not any(m.costs or m.served for m in methods):
        raise UserError("no step was timed: evaluate with eval.measure_costs=true or eval.speed_prompts above 0")
    timed = [m for m in methods if m.costs or m.served]
    warnings = [*notes, *(f"{m.kind} left out: nothing was timed" for m in methods if m not in timed)]
    loads = sorted(set(concurrency)) if concurrency else _known_loads(timed)
    if loads[0] < 1:
        raise UserError(f"--concurrency {loads[0]}: give at least 1")
    entries = [_load_advice(timed, load, warnings) for load in loads]
    summary = {m.kind: _method_summary(m, max(loads)) for m in timed}
    warnings += _traffic_warnings(timed, loads)
    return {
        "target": next(iter(timed[0].evaluated.values())).results[0]["target"],
        "method": _overall(timed, loads),
        "loads": entries,
        "methods": summary,
        "warnings": list(dict.fromkeys(warnings)),
    }


def candidates_at(method: Method, load: int) -> list[Candidate]:
    """Every K of one method at one load: what servers measured there, else the model for K = 1 up to the deepest."""
    served = {k: result for (where, k), result in method.served.items() if where == load}
    if served:
        return [_served(method, k, result) for k, result in sorted(served.items())]
    if method.costs is None:
        return []
    return [_modelled(method, method.costs, k, load) for k in range(1, max(method.evaluated) + 1)]


def pick(candidates: Sequence[Candidate]) -> Candidate:
    """The smallest K within 1% of the fastest one; candidates are of one method."""
    best = max(c.speedup for c in candidates)
    near = [c for c in candidates if c.speedup >= (1 - TIE) * best]
    return min(near, key=lambda c: c.num_draft_tokens)


def tokens_per_round(method: Method, num_draft_tokens: int) -> tuple[float, Samples, float]:
    """(mean tokens of a round, the same per resample, mean drafts that stood in the target's pass).

    A deep decode's rounds start at harder places than those of a decode at K, so cutting them off understates K. Where
    the results have an estimate for every depth, it tells by how much. Else, between two decoded depths L < K < D, the
    factor is known at L and 1 at D, and its logarithm is interpolated.
    """
    k, deepest = num_draft_tokens, min(depth for depth in method.evaluated if depth >= num_draft_tokens)
    deep = method.evaluated[deepest]
    tokens, samples, drafts = _replayed(deep, k)
    shallower = [depth for depth in method.evaluated if depth < k]
    factor, here, whole = 1.0, _estimated(deep, k), _estimated(deep, deepest)
    if deepest == k:
        return tokens, samples, drafts
    if here is not None and whole is not None:
        factor = _replayed(deep, deepest)[0] * here / whole / tokens
    elif shallower:
        last = max(shallower)
        known = _replayed(method.evaluated[last], last)[0] / _replayed(deep, last)[0]
        factor = known ** ((deepest - k) / (deepest - last))
    return tokens * factor, samples * factor, drafts


def _estimated(deep: Evaluated, num_draft_tokens: int) -> float | None:
    """Tokens of a round over all suites by their estimates; None where one of them has none at this depth."""
    text = rounds = 0.0
    for result in deep.results:
        by_depth = (result.get("estimate") or {}).get("renewal_by_depth") or []
        if len(by_depth) < num_draft_tokens:
            return None
        emitted = result["num_output_tokens"] - result["num_prompts"]
        text, rounds = text + emitted, rounds + emitted / by_depth[num_draft_tokens - 1]
    return text / rounds if rounds else None


def _replayed(deep: Evaluated, num_draft_tokens: int) -> tuple[float, Samples, float]:
    """`tokens_per_round` from what was decoded at one depth, `num_draft_tokens` or deeper."""
    if not deep.chains:
        return _from_rates(deep, num_draft_tokens)
    walks = [fixed(chain, num_draft_tokens) for chain in deep.chains]
    tokens, rounds = np.array([w.tokens for w in walks], float), np.array([w.rounds for w in walks], float)
    if not rounds.sum():
        return 1.0, np.ones(RESAMPLES), 0.0
    picks = np.random.default_rng(0).integers(0, len(walks), size=(RESAMPLES, len(walks)))
    samples = tokens[picks].sum(1) / np.maximum(rounds[picks].sum(1), 1)
    return float(tokens.sum() / rounds.sum()), samples, sum(w.drafts for w in walks) / float(rounds.sum())


def schedule(method: Method, largest: int) -> list[list[int]]:
    """vLLM's `num_speculative_tokens_per_batch_size`: [first, last, K], inclusive, from 1, without gaps; K = 0 where
    speculation slows down. A K is kept while no other is more than 1% better, so that ranges stay few."""
    ranges: list[list[int]] = []
    for size in range(1, largest + 1):
        speedups = {0: 1.0} | {c.num_draft_tokens: c.speedup for c in candidates_at(method, size)}
        best = max(speedups.values())
        current = ranges[-1][2] if ranges else None
        if current is None or speedups.get(current, 0.0) < (1 - TIE) * best:
            current = min(k for k, value in speedups.items() if value >= (1 - TIE) * best)
            ranges.append([size, size, current])
        ranges[-1][1] = size
    return ranges


def _from_rates(deep: Evaluated, num_draft_tokens: int) -> tuple[float, Samples, float]:
    """Without traces: products of the conditional rates, and the spread of the acceptance interval."""
    weights = [r["num_spec_steps"] for r in deep.results]
    tokens = spread = verified = 0.0
    total = 0.0
    for result, steps in zip(deep.results, weights, strict=True):
        rates = result["conditional_acceptance_rate_per_position"][:num_draft_tokens]
        rounds = (result["num_output_tokens"] - result["num_prompts"]) / result["tokens_per_step"]
        share = min(1.0, steps / rounds) if rounds > 0 else 1.0  # the rest are plain steps
        kept = float(np.cumprod(rates).sum())
        low, high = result["mean_acceptance_length_ci95"]
        whole = max(result["mean_acceptance_length"] - 1, 1e-9)
        tokens += rounds * (1 + share * kept)
        spread += (rounds * share * kept * (high - low) / 3.92 / whole) ** 2
        verified += result["num_draft_tokens_total"] * num_draft_tokens / deep.num_draft_tokens
        total += rounds
    if total <= 0:
        return 1.0, np.ones(RESAMPLES), 0.0
    mean = tokens / total
    noise = np.random.default_rng(0).standard_normal(RESAMPLES)
    return mean, np.maximum(mean + noise * spread**0.5 / total, 1.0), verified / total


def _modelled(method: Method, costs: Costs, k: int, load: int) -> Candidate:
    tokens, tokens_R, verified = tokens_per_round(method, k)
    gain = costs.target_ms(load, 1) / costs.round_ms(load, k, verified)
    jitter = 1 + costs.relative_spread() * np.random.default_rng(1).standard_normal(RESAMPLES)
    return Candidate(method.kind, k, tokens, tokens * gain, tokens_R * gain * np.maximum(jitter, 0.1), False)


def _served(method: Method, k: int, result: dict[str, Any]) -> Candidate:
    tokens, tokens_R, _ = tokens_per_round(method, k)
    speedup = float(result["speed"]["speedup"])
    return Candidate(method.kind, k, tokens, speedup, tokens_R / tokens * speedup, True)


def _known_loads(methods: Sequence[Method]) -> list[int]:
    sizes = {size for m in methods if m.costs for size, _, _, _ in m.costs.target}
    return sorted(sizes | {load for m in methods for load, _ in m.served})


def _load_advice(methods: Sequence[Method], load: int, warnings: list[str]) -> dict[str, Any]:
    by_method = {m.kind: candidates_at(m, load) for m in methods}
    if any(c.measured for found in by_method.values() for c in found):
        unserved = [kind for kind, found in by_method.items() if found and not found[0].measured]
        by_method = {kind: found for kind, found in by_method.items() if kind not in unserved}
        if unserved:
            warnings.append(f"load {load}: {', '.join(unserved)} left out, no server was measured with it there")
    choices = sorted((pick(found) for found in by_method.values() if found), key=lambda c: -c.speedup)
    if not choices:
        raise UserError(f"--concurrency {load}: no cost was measured; servers were measured at other loads only")
    best = choices[0]
    tied = [c.kind for c in choices[1:] if float(np.quantile(best.samples / c.samples, 0.025)) <= 1.0]
    if tied:
        warnings.append(f"load {load}: {best.kind} and {', '.join(tied)} cannot be told apart; measure more prompts")
    low, high = best.interval
    speculate = best.speedup > 1.0
    if low <= 1.0 <= high:
        warnings.append(f"load {load}: a gain is not certain, {best.speedup:.2f}x ({low:.2f}-{high:.2f})")
    if not speculate:
        warnings.append(f"load {load}: speculation slows this down ({best.speedup:.2f}x at best); serve without it")
    method = next(m for m in methods if m.kind == best.kind)
    return {
        "concurrency": load,
        "source": "server" if best.measured else "model",
        "speculate": speculate,
        "type": best.kind,
        "num_draft_tokens": best.num_draft_tokens if speculate else 0,
        "speedup": best.speedup,
        "speedup_ci95": [low, high],
        "tokens_per_round": best.tokens,
        "tied_with": tied,
        "adaptive": None if best.measured or not speculate else _adaptive(method, best, load),
        "candidates": [
            {"type": c.kind, "num_draft_tokens": c.num_draft_tokens, "speedup": c.speedup}
            for found in by_method.values()
            for c in found
        ],
    }


def _adaptive(method: Method, best: Candidate, load: int) -> dict[str, float] | None:
    """What an adaptive K would add to the best fixed one: the oracle's bound and a causal policy, as speed-ups over
    plain decoding. None without traces."""
    deep = method.evaluated[max(method.evaluated)]
    if not deep.chains or method.costs is None:
        return None
    depth = deep.num_draft_tokens
    ms = [method.costs.round_ms(load, k) for k in range(depth + 1)]
    rates = conditional_rates(deep.chains, depth)
    fixed_ms = min(_fixed_ms(deep, k, ms) for k in range(1, depth + 1))
    return {
        "oracle_gain": fixed_ms / oracle_ms_per_token(deep.chains, ms) - 1,
        "causal_gain": fixed_ms / causal_ms_per_token(deep.chains, ms, rates) - 1,
    }


def _fixed_ms(deep: Evaluated, k: int, ms: Sequence[float]) -> float:
    """Milliseconds a token at a fixed depth, on the same rounds and prices as the adaptive policies."""
    walks = [fixed(chain, k) for chain in deep.chains]
    return sum(w.rounds for w in walks) * ms[k] / max(1, sum(w.tokens for w in walks))


def _method_summary(method: Method, largest: int) -> dict[str, Any]:
    """Break-even load (None: not up to `searched`), the schedule, and what the cost model rests on."""
    if method.costs is None:
        return {"break_even_concurrency": None, "searched": 0, "schedule": []}
    largest = max(largest, method.costs.largest_batch)
    ranges = schedule(method, largest)
    losing = [size for size in range(1, largest + 1) if max(c.speedup for c in candidates_at(method, size)) < 1.0]
    return {"break_even_concurrency": losing[0] if losing else None, "searched": largest, "schedule": ranges}


def _overall(methods: Sequence[Method], loads: Sequence[int]) -> str:
    """The method whose best K gains most over all loads together (geometric mean); a server runs one method."""

    def worth(method: Method) -> float:
        gains = [max([1.0, *(c.speedup for c in candidates_at(method, load))]) for load in loads]
        return float(np.log(gains).mean())

    return max(methods, key=worth).kind


def _traffic_warnings(methods: Sequence[Method], loads: Sequence[int]) -> list[str]:
    """Where speculation disappoints: few prompts, short answers, low acceptance, a busy device."""
    warnings = []
    first = next(iter(methods[0].evaluated.values()))
    prompts = sum(r["num_prompts"] for r in first.results)
    answer = sum(r["num_output_tokens"] for r in first.results) / max(1, prompts)
    if prompts < FEW_PROMPTS:
        warnings.append(f"{prompts} prompts only: intervals are wide, measure {FEW_PROMPTS} or more")
    ttft = [(r.get("speed") or {}).get("ttft_ms") for m in methods for e in m.evaluated.values() for r in e.results]
    costs = next((m.costs for m in methods if m.costs), None)
    prefill = [value for value in ttft if value]
    share = 0.0
    if prefill and costs:
        share = prefill[0] / (prefill[0] + (answer - 1) * costs.target_ms(1, 1))
    if answer < SHORT_ANSWER or share > 0.5:
        known = f", and the prefill takes {share:.0%} of a plain answer's time" if share else ""
        warnings.append(f"short answers ({answer:.0f} tokens on average{known}): users will see less than the speed-up")
    for method in methods:
        shallow = method.evaluated[min(method.evaluated)]
        rate = sum(r["acceptance_rate_per_position"][0] * r["num_spec_steps"] for r in shallow.results)
        rate /= sum(r["num_spec_steps"] for r in shallow.results)
        if rate < LOW_ACCEPTANCE:
            warnings.append(
                f"{method.kind}: low acceptance, only {rate:.0%} of first drafts are kept; train it further"
            )
        if method.costs is None:
            continue
        busy = [load for load in loads if _row_share(method.costs, load) > SATURATED]
        if busy:
            warnings.append(
                f"{method.kind}: from load {busy[0]} on the target's pass grows with its rows (a further row costs "
                f"{_row_share(method.costs, busy[0]):.0%} of a step): the device is saturated, verifying is not free"
            )
        beyond = [load for load in loads if load > method.costs.largest_batch and not method.served]
        if beyond:
            largest = method.costs.largest_batch
            warnings.append(
                f"{method.kind}: loads above {largest} are extrapolated from costs measured up to {largest}"
            )
    return warnings


def _row_share(costs: Costs, load: int) -> float:
    """What one more verified row costs, relative to a plain step: 0 where verifying is free, 1 on a full device."""
    rows = max(rows for _, rows, _, _ in costs.target)
    return (costs.target_ms(load, rows) / costs.target_ms(load, 1) - 1) / (rows - 1) if rows > 1 else 0.0
