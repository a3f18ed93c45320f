"""Every figure of an evaluation, computed from a DecodeTrace and from nothing else.

Two counts run side by side, and the JSON names both:

- *kept* (`num_accepted_draft_tokens`, the acceptance length, the rates): accepted drafts that the user received.
  Drafts that an EOS or the length limit cuts off in a request's last round are not in it.
- *uncut* (`vllm_counters`): what vLLM's scheduler counts, cut-off drafts included. Use it to compare with a server.

`num_spec_steps` follows vLLM: rounds in which at least one token was drafted. A round without a draft (prompt lookup
found nothing, or one token of room was left) is a plain decoding step; it is in `tokens_per_step`, whose denominator is
every target pass after the prefill. The prefill's own token belongs to no round.

The acceptance length counts the target's own token in every round, as vLLM does. A round that an EOS among its drafts
or the length limit ends does not give it. `tokens_per_drafted_round` is what users received from these rounds, and so
less, by at most one token a request.

Intervals draw conversations, since rounds of one conversation resemble each other, those of its later turns too. Fewer
than two that drafted anything have no interval: None.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from spec_train.decoding.acceptance import (
    acceptance_length,
    decoded_length,
    drafted_rounds,
    survivors,
    vllm_counters,
)
from spec_train.decoding.sampling import Sampling
from spec_train.decoding.trace import DecodeTrace, RequestTrace
from spec_train.training.acceptance import Interval, length_interval, ratio_interval, sums_of_clusters


def summarise(
    trace: DecodeTrace,
    *,
    target: str,
    speculator: str,
    kind: str,
    method: str,
    suite: str,
    device: str,
    dtype: str,
    sampling: Sampling,
    backend: str = "torch",
    lossless: dict[str, Any] | None = None,
    speed: dict[str, Any] | None = None,
    estimate: dict[str, Any] | None = None,
    versions: dict[str, str] | None = None,
) -> dict[str, Any]:
    """The result of one evaluation, ready for JSON. `kind` is our name of the method ("draft_lm", "ngram") or
    "plain", `method` vLLM's ("draft_model").

    `lossless` from compare_lossless (None where the law is sampled), `speed` from speed_summary, `estimate` from
    training.acceptance. Intervals are None where there is none (see above). Rates without a single round to count are
    0.0, the acceptance length is then 1.0.
    """
    rounds = drafted_rounds(trace.requests)
    steps, kept = len(rounds), sum(cycle.kept for cycle in rounds)
    drafted = sum(len(cycle.drafts) for cycle in rounds)
    survived = survivors((cycle.kept for cycle in rounds), trace.num_draft_tokens)
    return {
        "target": target,
        "speculator": speculator,
        "type": kind,
        "method": method,
        "suite": suite,
        "backend": backend,
        "device": device,
        "dtype": dtype,
        "num_draft_tokens": trace.num_draft_tokens,
        "temperature": sampling.temperature,
        "top_k": sampling.top_k,
        "top_p": sampling.top_p,
        "min_p": sampling.min_p,
        "draft_sample_method": sampling.draft_sample_method,
        "rejection_sample_method": sampling.rejection_sample_method,
        "batch_size": trace.batch_size,
        "seed": sampling.seed,
        "num_prompts": len(trace.requests),
        "num_conversations": num_conversations(trace.requests),
        "num_output_tokens": sum(len(request.output_ids) for request in trace.requests),
        "num_spec_steps": steps,
        "num_draft_tokens_total": drafted,
        "num_accepted_draft_tokens": kept,
        "mean_acceptance_length": acceptance_length(kept, steps),
        "mean_acceptance_length_ci95": acceptance_interval(trace.requests),
        "tokens_per_step": tokens_per_step(trace.requests),
        "tokens_per_drafted_round": _ratio(sum(cycle.emitted for cycle in rounds), steps) if steps else 1.0,
        "draft_acceptance_rate": _ratio(kept, drafted),
        "acceptance_rate_per_position": [_ratio(count, steps) for count in survived],
        "acceptance_rate_per_position_ci95": position_intervals(trace.requests, trace.num_draft_tokens),
        "conditional_acceptance_rate_per_position": [
            _ratio(count, before) for before, count in zip([steps, *survived], survived, strict=False)
        ],
        "vllm_counters": vllm_counters(trace),
        "lossless": lossless,
        "speed": speed,
        "estimate": estimate,
        "by_category": _by_category(trace.requests),
        "versions": versions or {},
    }


def tokens_per_step(requests: Iterable[RequestTrace]) -> float:
    """Tokens the user received per target pass after the prefill, rounds without a draft included; 1.0 without any."""
    cycles = [cycle for request in requests for cycle in request.cycles]
    return sum(cycle.emitted for cycle in cycles) / len(cycles) if cycles else 1.0


def num_conversations(requests: Sequence[RequestTrace]) -> int:
    """How many there are, a request that stands alone being one."""
    return len(set(_conversations(requests)))


def acceptance_interval(requests: Sequence[RequestTrace], seed: int = 0) -> Interval | None:
    """95% bootstrap interval of the acceptance length over conversations, see `ratio_interval`."""
    rounds = [drafted_rounds([request]) for request in requests]
    kept = [sum(cycle.kept for cycle in cycles) for cycles in rounds]
    return length_interval(kept, [len(cycles) for cycles in rounds], _conversations(requests), seed)


def position_intervals(requests: Sequence[RequestTrace], positions: int, seed: int = 0) -> list[Interval] | None:
    """95% bootstrap intervals [low, high] of the acceptance rate at each position, over conversations; None where they
    have none, see `ratio_interval`."""
    rounds = [drafted_rounds([request]) for request in requests]
    survived = [survivors((cycle.kept for cycle in cycles), positions) for cycles in rounds]
    survived_RK, steps_R = np.array(survived).reshape(len(rounds), positions), np.array([len(c) for c in rounds])
    bounds = ratio_interval(*sums_of_clusters(survived_RK, steps_R, _conversations(requests)), seed)
    return None if bounds is None else [[float(low), float(high)] for low, high in zip(*bounds, strict=True)]


def _conversations(requests: Sequence[RequestTrace]) -> list[str | int]:
    """The conversation of each request: its name, or the place of a request that stands alone."""
    return [request.conversation or place for place, request in enumerate(requests)]


def compare_lossless(plain: Sequence[RequestTrace], spec: Sequence[RequestTrace]) -> dict[str, Any]:
    """Token-by-token comparison of greedy outputs of the same requests in the same order.

    `first_divergence` is None, or the first request that differs: its id, the output position, and the token on
    either side (None where that output had ended). Raises ValueError if the requests are not the same.
    """
    if [(r.id, r.prompt_ids) for r in plain] != [(r.id, r.prompt_ids) for r in spec]:
        raise ValueError("lossless comparison needs the same requests in the same order on both sides")
    divergences = [
        _divergence(left, right) for left, right in zip(plain, spec, strict=True) if left.output_ids != right.output_ids
    ]
    return {
        "checked": len(plain),
        "identical": len(plain) - len(divergences),
        "first_divergence": divergences[0] if divergences else None,
    }


def speed_summary(plain: Sequence[DecodeTrace], spec: Sequence[DecodeTrace]) -> dict[str, Any]:
    """The "speed" block from paired runs over the same prompts, one pair per measuring round: medians over rounds.

    tokens_per_second: output tokens over wall seconds, prefill included; speedup: the quotient inside a round, so that
    what slows a machine down for a while slows both. baseline_*: plain decoding.
    ttft_ms: mean prefill of a batch. tpot_ms: milliseconds between a request's tokens after the first (a batch's rows
    run side by side, so this is the batch's time per token times its rows).
    target_step_ms: one target pass over K + 1 rows a request; baseline_target_step_ms: over one row; draft_ms: drafting
    of one round, all K tokens; verify_ms: the acceptance rule and bookkeeping of one round; overhead_ms: everything of
    a round that is neither target nor draft (verify_ms is part of it), overhead_share: its share of decoding time.
    plain_steps_per_round: how many plain steps a round replaces. For single requests that is tokens_per_step; in a
    batch it is less, because the slowest row decides how long the batch runs.
    """
    rounds, baseline = [_run_speed(trace) for trace in spec], [_run_speed(trace) for trace in plain]
    median = {name: float(np.median([run[name] for run in rounds])) for name in rounds[0]}
    base = {name: float(np.median([run[name] for run in baseline])) for name in baseline[0]}
    rate = "tokens_per_second"
    return {
        rate: median[rate],
        "baseline_tokens_per_second": base[rate],
        "speedup": float(np.median([_ratio(a[rate], b[rate]) for a, b in zip(rounds, baseline, strict=True)])),
        "ttft_ms": median["ttft_ms"],
        "baseline_ttft_ms": base["ttft_ms"],
        "tpot_ms": median["tpot_ms"],
        "baseline_tpot_ms": base["tpot_ms"],
        "target_step_ms": median["target_step_ms"],
        "baseline_target_step_ms": base["target_step_ms"],
        "draft_ms": median["draft_ms"],
        "verify_ms": median["verify_ms"],
        "overhead_ms": median["overhead_ms"],
        "overhead_share": median["overhead_share"],
        "plain_steps_per_round": _ratio(median["tokens_per_pass"], base["tokens_per_pass"]),
        "batch_size": spec[0].batch_size,
        "rounds": len(spec),
    }


def batched_speed(plain: DecodeTrace, spec: DecodeTrace) -> dict[str, Any]:
    """Output tokens per second of the batched decoding of a whole suite, prefill included."""
    rate, baseline = _run_speed(spec)["tokens_per_second"], _run_speed(plain)["tokens_per_second"]
    return {
        "batch_size": spec.batch_size,
        "tokens_per_second": rate,
        "baseline_tokens_per_second": baseline,
        "speedup": _ratio(rate, baseline),
    }


def _run_speed(trace: DecodeTrace) -> dict[str, float]:
    """The figures of one run; see speed_summary."""
    part = trace.timings
    tokens = sum(len(request.output_ids) for request in trace.requests)
    decoded = tokens - len(trace.requests)  # the first token of each comes from the prefill
    batches = -(-len(trace.requests) // trace.batch_size)
    outside = max(0.0, part.total - part.prefill - part.target - part.draft)
    return {
        "tokens_per_second": _ratio(tokens, part.total),
        "ttft_ms": 1000 * _ratio(part.prefill, batches),
        "tpot_ms": 1000 * min(trace.batch_size, len(trace.requests)) * _ratio(part.total - part.prefill, decoded),
        "target_step_ms": 1000 * _ratio(part.target, part.target_steps),
        "draft_ms": 1000 * _ratio(part.draft, part.draft_steps),
        "verify_ms": 1000 * _ratio(part.verify, part.target_steps),
        "overhead_ms": 1000 * _ratio(outside, part.target_steps),
        "overhead_share": _ratio(outside, part.total - part.prefill),
        "tokens_per_pass": _ratio(decoded, part.target_steps),
    }


def explain_speed(speed: dict[str, Any], steps_replaced: float, num_draft_tokens: int) -> str:
    """Why this machine gains or does not, from a "speed" block: S = tau * plain step / (draft + wide pass + verify).

    `steps_replaced`: plain steps that one round saves the target: tokens_per_step where requests run one at a time,
    the block's own plain_steps_per_round where they run in batches.
    Source of the model: Leviathan et al. 2023, section 3.3, with measured costs in place of the assumed ones. The
    prefill is left out, so the gain of short answers is smaller.
    """
    plain_ms, target_ms, draft_ms = speed["baseline_target_step_ms"], speed["target_step_ms"], speed["draft_ms"]
    round_ms = target_ms + draft_ms + speed["verify_ms"]
    if plain_ms <= 0 or round_ms <= 0:
        return "No decoding step was timed, so there is no speed to explain."
    cost, worth = round_ms / plain_ms, steps_replaced
    sentence = (
        f"A round takes {round_ms:.1f} ms ({draft_ms:.1f} of it to draft {num_draft_tokens} tokens, {target_ms:.1f} "
        f"for the target's pass over {num_draft_tokens + 1}), {cost:.2f} times a plain step of {plain_ms:.1f} ms, "
        f"and replaces {worth:.2f} plain steps:"
    )
    if worth > cost:
        return f"{sentence} decoding is {worth / cost:.2f}x as fast."
    culprit = "the wider target pass" if target_ms - plain_ms > draft_ms else "drafting"
    return f"{sentence} no gain here ({worth / cost:.2f}x), mostly for the cost of {culprit}."


def _ratio(part: float, whole: float) -> float:
    return part / whole if whole else 0.0


def _by_category(requests: Sequence[RequestTrace]) -> dict[str, dict[str, Any]]:
    """Figures of each named category, in the order of its first request."""
    groups: dict[str, list[RequestTrace]] = {}
    for request in requests:
        if request.category:
            groups.setdefault(request.category, []).append(request)
    table = {}
    for category, members in groups.items():
        rounds = drafted_rounds(members)
        table[category] = {
            "num_prompts": len(members),
            "num_spec_steps": len(rounds),
            "mean_acceptance_length": decoded_length(members),
            "mean_acceptance_length_ci95": acceptance_interval(members),
            "tokens_per_step": tokens_per_step(members),
        }
    return table


def _divergence(plain: RequestTrace, spec: RequestTrace) -> dict[str, Any]:
    left, right = plain.output_ids, spec.output_ids
    shared = min(len(left), len(right))
    position = next((i for i in range(shared) if left[i] != right[i]), shared)
    return {
        "id": plain.id,
        "position": position,
        "plain": left[position] if position < len(left) else None,
        "spec": right[position] if position < len(right) else None,
    }
