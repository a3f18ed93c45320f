"""Which method and how many draft tokens K to serve at which load, from measured acceptance and measured step costs.

    speed-up(B, K) = tokens per round(K) * plain step(B) / round(B, K)
    round(B, K)    = target pass(B, 1 + K) + draft(B, K) + overhead(B, K)

Leviathan et al. 2023 (arXiv 2211.17192), section 3.3, with measured times in place of an assumed cost ratio. Tokens per
round at a K that was decoded are that decode's own; at a K between, the rounds of the next deeper decode cut off at K,
1 + sum_{j<=K} prod_{i<=j} c_i with the conditional rates c_i (see `chains.py`), corrected for where those rounds start.
A server's own measurement of a load is preferred to the model.

Uncertainty: conversations are resampled (the same for every method, so comparisons are paired), and times are jittered
by their measured spread; where the spread of acceptance is not known, there is no interval. Depths within 1% of the
best are a tie, and the smallest of them is advised: it costs less memory and loses less when the traffic is harder than
the suite. The prefill is left out: short answers gain less.
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
from spec_train.training.acceptance import sums_of_clusters

RESAMPLES = 1000
TIE = 0.01
FEW_PROMPTS = 20
SHORT_ANSWER = 24  # tokens
LOW_ACCEPTANCE = 0.4  # of the first draft
SATURATED = 0.5  # a further row costs this share of a whole step
Samples = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Candidate:
    """One method at one K at one load. `name`: of the method; `samples` [RESAMPLES]: the speed-up in every resample,
    nan where it is not known how much it varies; `speedup` nan where a server was measured without a baseline;
    `tokens_per_second`: of a server."""

    name: str
    num_draft_tokens: int
    tokens: float
    speedup: float
    samples: Samples
    measured: bool
    tokens_per_second: float = 0.0

    @property
    def interval(self) -> list[float] | None:
        """The 95% interval of the speed-up, None where it is not known."""
        if np.isnan(self.samples).any():
            return None
        return [float(bound) for bound in np.quantile(self.samples, [0.025, 0.975])]


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
    warnings = [*notes, *(f"{m.name} left out: nothing was timed" for m in methods if m not in timed)]
    loads = sorted(set(concurrency)) if concurrency else _known_loads(timed)
    if loads[0] < 1:
        raise UserError(f"--concurrency {loads[0]}: give at least 1")
    entries = [_load_advice(timed, load, warnings) for load in loads]
    summary = {m.name: _method_summary(m, max(loads)) for m in timed}
    warnings += _traffic_warnings(timed, loads)
    return {
        "target": next(iter(timed[0].evaluated.values())).results[0]["target"],
        "method": _overall(timed, loads),
        "loads": entries,
        "methods": summary,
        "warnings": list(dict.fromkeys(warnings)),
    }


def candidates_at(method: Method, load: int) -> list[Candidate]:
    """Every K of one method at one load: what servers gained there, else the model for K = 1 up to the deepest, else
    what servers reached without one to compare them with."""
    served = [_served(method, k, result) for (where, k), result in sorted(method.served.items()) if where == load]
    compared = [candidate for candidate in served if not np.isnan(candidate.speedup)]
    if compared or method.costs is None:
        return compared or served
    return [_modelled(method, method.costs, k, load) for k in range(1, max(method.evaluated) + 1)]


def pick(candidates: Sequence[Candidate]) -> Candidate:
    """The smallest K within 1% of the fastest one; candidates are of one method, all compared with plain decoding or
    none."""
    if any(np.isnan(c.speedup) for c in candidates):
        return max(candidates, key=lambda c: c.tokens_per_second)
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
    names = [chain.conversation or place for place, chain in enumerate(deep.chains)]
    tokens_R, rounds_R = np.array([w.tokens for w in walks], float), np.array([w.rounds for w in walks], float)
    tokens_C, rounds_C = sums_of_clusters(tokens_R, rounds_R, names)
    if not len(rounds_C):
        return 1.0, np.ones(RESAMPLES), 0.0
    samples = np.full(RESAMPLES, np.nan)
    if len(rounds_C) > 1:  # one conversation alone does not tell how others differ
        picks = np.random.default_rng(0).integers(0, len(rounds_C), size=(RESAMPLES, len(rounds_C)))
        samples = tokens_C[picks].sum(1) / rounds_C[picks].sum(1)
    return float(tokens_C.sum() / rounds_C.sum()), samples, sum(w.drafts for w in walks) / float(rounds_C.sum())


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
    """Without traces: products of the conditional rates, and the spread of the acceptance interval (none: nan)."""
    tokens = spread = verified = total = 0.0
    for result in deep.results:
        rates = result["conditional_acceptance_rate_per_position"][:num_draft_tokens]
        rounds, steps = _passes(result), result["num_spec_steps"]
        share = min(1.0, steps / rounds) if rounds > 0 else 1.0  # the rest are plain steps
        kept = float(np.cumprod(rates).sum())
        interval = result.get("mean_acceptance_length_ci95")
        whole = max(result["mean_acceptance_length"] - 1, 1e-9)
        tokens += rounds * (1 + share * kept)
        width = interval[1] - interval[0] if interval else np.nan
        spread += (rounds * share * kept * width / 3.92 / whole) ** 2
        verified += result["num_draft_tokens_total"] * num_draft_tokens / deep.num_draft_tokens
        total += rounds
    if total <= 0:
        return 1.0, np.ones(RESAMPLES), 0.0
    mean = tokens / total
    noise = np.random.default_rng(0).standard_normal(RESAMPLES)
    return mean, np.maximum(mean + noise * spread**0.5 / total, 1.0), verified / total


def _passes(result: dict[str, Any]) -> float:
    """The target's passes after the prefill. A server does not tell them; each gave one token beside its drafts."""
    emitted = result["num_output_tokens"] - result["num_prompts"]
    if result.get("tokens_per_step"):
        return float(emitted / result["tokens_per_step"])
    return float(max(result["num_spec_steps"], emitted - result["num_accepted_draft_tokens"]))


def _modelled(method: Method, costs: Costs, k: int, load: int) -> Candidate:
    tokens, tokens_R, verified = tokens_per_round(method, k)
    gain = costs.target_ms(load, 1) / costs.round_ms(load, k, verified)
    jitter = 1 + costs.relative_spread() * np.random.default_rng(1).standard_normal(RESAMPLES)
    return Candidate(method.name, k, tokens, tokens * gain, tokens_R * gain * np.maximum(jitter, 0.1), False)


def _served(method: Method, k: int, result: dict[str, Any]) -> Candidate:
    tokens, tokens_R, _ = tokens_per_round(method, k)
    speed = result["speed"]
    speedup = np.nan if speed.get("speedup") is None else float(speed["speedup"])
    rate = float(speed.get("tokens_per_second") or 0)
    return Candidate(method.name, k, tokens, speedup, tokens_R / tokens * speedup, True, rate)


def _known_loads(methods: Sequence[Method]) -> list[int]:
    sizes = {size for m in methods if m.costs for size, _, _, _ in m.costs.target}
    return sorted(sizes | {load for m in methods for load, _ in m.served})


def _load_advice(methods: Sequence[Method], load: int, warnings: list[str]) -> dict[str, Any]:
    by_method = {m.name: found for m in methods if (found := candidates_at(m, load))}
    if not by_method:
        raise UserError(f"--concurrency {load}: no cost was measured; servers were measured at other loads only")
    for why, comparable in (
        ("no server was measured without speculation beside it", lambda c: not np.isnan(c.speedup)),
        ("no server was measured with it there", lambda c: c.measured),
    ):
        better = {name: found for name, found in by_method.items() if comparable(found[0])}
        if better and len(better) < len(by_method):
            others = ", ".join(name for name in by_method if name not in better)
            warnings.append(f"load {load}: {others} left out, {why}")
            by_method = better
    choices = [pick(found) for found in by_method.values()]
    compared = not np.isnan(choices[0].speedup)
    choices.sort(key=lambda c: -c.speedup if compared else -c.tokens_per_second)
    best = choices[0]
    # Unknown spreads (nan) cannot tell two methods apart either.
    tied = [c.name for c in choices[1:] if not float(np.quantile(best.samples / c.samples, 0.025)) > 1.0]
    _say_doubts(best, tied, load, warnings)
    method = next(m for m in methods if m.name == best.name)
    speculate = best.speedup > 1.0 if compared else None
    return {
        "concurrency": load,
        "source": "server" if best.measured else "model",
        "speculate": speculate,
        "type": method.kind,
        "method": method.name,
        "num_draft_tokens": 0 if speculate is False else best.num_draft_tokens,
        "speedup": best.speedup if compared else None,
        "speedup_ci95": best.interval,
        "tokens_per_second": best.tokens_per_second if best.measured else None,
        "tokens_per_round": best.tokens,
        "tied_with": tied,
        "adaptive": _adaptive(method, best, load) if speculate and not best.measured else None,
        "candidates": [
            {
                "type": c.name,
                "num_draft_tokens": c.num_draft_tokens,
                "speedup": c.speedup if compared else None,
            }
            for found in by_method.values()
            for c in found
        ],
    }


def _say_doubts(best: Candidate, tied: Sequence[str], load: int, warnings: list[str]) -> None:
    """What may be otherwise than the best candidate of a load says."""
    if np.isnan(best.speedup):
        warnings.append(
            f"load {load}: whether this gains is not known, no server without speculation was measured; "
            "evaluate again with --baseline-server"
        )
        return
    if tied:
        warnings.append(f"load {load}: {best.name} and {', '.join(tied)} cannot be told apart; measure more prompts")
    if best.interval is None:
        warnings.append(f"load {load}: no interval, a single conversation or a server does not tell how others differ")
    elif best.interval[0] <= 1.0 <= best.interval[1]:
        low, high = best.interval
        warnings.append(f"load {load}: a gain is not certain, {best.speedup:.2f}x ({low:.2f}-{high:.2f})")
    if not best.speedup > 1.0:
        warnings.append(f"load {load}: speculation slows this down ({best.speedup:.2f}x at best); serve without it")


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
    """The method whose best K gains most over all loads together (geometric mean); a server runs one method. Where no
    gain is known, the one that gave most tokens a second."""

    def worth(method: Method) -> tuple[float, float]:
        found = [candidate for load in loads for candidate in candidates_at(method, load)]
        gains = [max([1.0, *(c.speedup for c in candidates_at(method, load))]) for load in loads]
        return float(np.log(gains).mean()), max((c.tokens_per_second for c in found), default=0.0)

    return max(methods, key=worth).name


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
                f"{method.name}: low acceptance, only {rate:.0%} of first drafts are kept; train it further"
            )
        if method.costs is None:
            continue
        busy = [load for load in loads if _row_share(method.costs, load) > SATURATED]
        if busy:
            warnings.append(
                f"{method.name}: from load {busy[0]} on the target's pass grows with its rows (a further row costs "
                f"{_row_share(method.costs, busy[0]):.0%} of a step): the device is saturated, verifying is not free"
            )
        beyond = [load for load in loads if load > method.costs.largest_batch and not method.served]
        if beyond:
            largest = method.costs.largest_batch
            warnings.append(
                f"{method.name}: loads above {largest} are extrapolated from costs measured up to {largest}"
            )
    return warnings


def _row_share(costs: Costs, load: int) -> float:
    """What one more verified row costs, relative to a plain step: 0 where verifying is free, 1 on a full device."""
    rows = max(rows for _, rows, _, _ in costs.target)
    return (costs.target_ms(load, rows) / costs.target_ms(load, 1) - 1) / (rows - 1) if rows > 1 else 0.0
