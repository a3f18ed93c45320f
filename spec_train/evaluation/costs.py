"""What a step costs: the target's pass, the draft and the rest of a round, measured, and read between the points.

Decoding position after position on a cache of `context` tokens whose contents do not matter for time: it is never
filled, so that no prefill is paid for. Points are measured in turns, round after round, so that a slow minute of the
machine touches all of them alike; medians, with the quartiles beside them.

Between points costs are linear in the rows and linear in the batch; beyond them the last slope goes on.

Shape legend: B requests, K draft tokens, Q = K + 1 target rows, V target vocabulary, A aux layers, H hidden size.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from spec_train.batch import Features
from spec_train.decoding.verify import verify_greedy
from spec_train.manifest import atomic_write_json
from spec_train.speculators.base import Committed, Proposer
from spec_train.target import TargetModel, clock

BATCH_SIZES = (1, 4, 8, 32)
COSTS_PREFIX = "costs-"
ROWS = (1, 2, 4, 6, 8)
Point = tuple[int, int, float, float]  # batch size, rows or drafts, ms, half the interquartile range in ms


@torch.no_grad()
def measure_costs(
    target: TargetModel,
    proposer: Proposer,
    *,
    deepest: int,
    context: int = 256,
    batch_sizes: Sequence[int] = BATCH_SIZES,
    rows: Sequence[int] = ROWS,
    repeats: int = 5,
    seconds: float = 10.0,
) -> dict[str, Any]:
    """The `costs` of a result: {"context", "target_step": [{"batch_size", "rows", "ms", "spread_ms"}], "draft":
    [{"batch_size", "num_draft_tokens", ...}], "overhead": [...]}, milliseconds.

    `deepest`: the most draft tokens the proposer is asked for. Points go from small batches to large ones; those whose
    turns do not fit in `seconds` any more are left out (a slow target then has fewer). At least the first batch size is
    measured whole, whatever it takes.
    """
    started = time.monotonic()
    # Turns that warm up or capture a graph are not counted; the one more is for taking the cache's buffers.
    uncounted = 1 if target.graphs is None else target.graphs.eager_passes + 2
    context = min(context, target.max_length - max(*rows, deepest + 1) - repeats)
    depths = sorted({k for k in (1, 2, 4, 6, 8) if k < deepest} | {deepest})
    wanted = sorted({row for row in rows if row <= max(deepest + 1, 2)} | {deepest + 1})
    costs: dict[str, Any] = {"context": context, "target_step": [], "draft": [], "overhead": []}
    taken = 0.0
    for place, size in enumerate(batch_sizes):
        growth = size / batch_sizes[place - 1] if place else 1.0
        if place and time.monotonic() - started + taken * growth > seconds:
            break
        begun = time.monotonic()
        calls: dict[tuple[str, str, int], Callable[[], None]] = {}
        for row in wanted:
            calls["target_step", "rows", row] = _target_call(target, proposer, size, row, context, uncounted + repeats)
        for k in depths:
            calls["draft", "num_draft_tokens", k] = _draft_call(target, proposer, size, k, context)
            calls["overhead", "num_draft_tokens", k] = _verify_call(target, size, k)
        for (part, name, number), samples in _timed(target, calls, uncounted, repeats).items():
            low, middle, high = np.quantile(samples, [0.25, 0.5, 0.75])
            costs[part].append(
                {"batch_size": size, name: number, "ms": float(middle), "spread_ms": float(high - low) / 2}
            )
        taken = time.monotonic() - begun
    return costs


def write_costs(folder: Path, kind: str, costs: dict[str, Any]) -> Path:
    """`costs-<type>.json`, where `spec-train advise` looks for the costs of a method."""
    path = folder / f"{COSTS_PREFIX}{kind.replace(' ', '_')}.json"
    atomic_write_json(path, {"type": kind, **costs})
    return path


def _timed(
    target: TargetModel, calls: dict[tuple[str, str, int], Callable[[], None]], uncounted: int, repeats: int
) -> dict[tuple[str, str, int], list[float]]:
    """Milliseconds of every call, in turns, without the first `uncounted` ones.

    A target pass goes before every draft, untimed: in a decode it leaves nothing of the speculator in the CPU's caches.
    """
    target_pass = next(call for (part, _, _), call in reversed(calls.items()) if part == "target_step")
    samples: dict[tuple[str, str, int], list[float]] = {key: [] for key in calls}
    for turn in range(uncounted + repeats):
        for key, call in calls.items():
            if key[0] == "draft":
                target_pass()
            begun = clock(target.device)
            call()
            if turn >= uncounted:
                samples[key].append(1000 * (clock(target.device) - begun))
    return samples


def _target_call(
    target: TargetModel, proposer: Proposer, size: int, rows: int, context: int, calls: int
) -> Callable[[], None]:
    """A pass over `rows` tokens. A plain step never takes anything back, which a running state would have to pay for:
    there it goes on by a position each time. Elsewhere it stays, so that every pass has the same shapes."""
    cache = target.new_cache(context + rows + calls)
    position_BQ = (context + torch.arange(rows, device=target.device)).expand(size, -1)
    token_BQ = torch.ones_like(position_BQ)
    onward = int(rows == 1 and len(target.linear_layers) > 0)

    def call() -> None:
        nonlocal position_BQ
        hidden_BQH, _ = target.step(token_BQ, position_BQ, cache, proposer.feature_spec)
        target.logits(hidden_BQH)
        position_BQ = position_BQ + onward

    return call


def _draft_call(target: TargetModel, proposer: Proposer, size: int, depth: int, context: int) -> Callable[[], None]:
    """A round of the proposer: commit what a round verified, then draft `depth` tokens."""
    state = proposer.begin([[1] * context for _ in range(size)], context + 2 * depth + 2)
    cache = target.new_cache(context + depth + 1)
    position_BS = (context - 1 + torch.arange(depth + 1, device=target.device)).expand(size, -1)
    token_BS = torch.ones_like(position_BS)
    _, features = target.step(token_BS, position_BS, cache, proposer.feature_spec)
    count_B = torch.full((size,), 1 + depth // 2, device=target.device)
    committed = Committed(token_BS, position_BS, count_B, features)

    def call() -> None:
        proposer.commit(state, committed)
        proposer.propose(state, depth, lambda logits_BD: (logits_BD.argmax(-1), None))

    first = Committed(token_BS[:, :1], position_BS[:, :1], torch.ones_like(count_B), _first(features))
    proposer.commit(state, first)
    return call


def _first(features: Features) -> Features:
    return Features(
        None if features.aux_hidden is None else features.aux_hidden[:, :1],
        None if features.last_hidden is None else features.last_hidden[:, :1],
    )


def _verify_call(target: TargetModel, size: int, depth: int) -> Callable[[], None]:
    hidden = torch.zeros(1, target.hidden_size, device=target.device, dtype=target.dtype)
    logits_BQV = target.logits(hidden)[0].repeat(size, depth + 1, 1)
    draft_BK = torch.ones(size, depth, dtype=torch.long, device=target.device)
    count_B = torch.full((size,), depth, device=target.device)

    def call() -> None:
        accepted_B, next_B = verify_greedy(draft_BK, count_B, logits_BQV)
        [column.tolist() for column in (draft_BK, count_B, accepted_B, next_B)]

    return call


@dataclass(frozen=True)
class Costs:
    """Measured points, read between and beyond them. `measured`: False where the points were only those of a result's
    own timed run."""

    target: list[Point]
    draft: list[Point]
    overhead: list[Point]
    measured: bool = True

    @classmethod
    def of(cls, costs: dict[str, Any]) -> Costs:
        """From the JSON form. A verification over more rows, or a deeper draft, that was timed as the faster one was
        so by noise: see `_rising`. A plain step is left as it is, since a single row may take another kernel."""
        target = _points(costs["target_step"], "rows")
        return cls(
            [p for p in target if p[1] == 1] + _rising([p for p in target if p[1] > 1]),
            _rising(_points(costs["draft"], "num_draft_tokens")),
            _points(costs["overhead"], "num_draft_tokens"),
        )

    @classmethod
    def of_speed(cls, results: Sequence[dict[str, Any]]) -> Costs | None:
        """From the timed runs of results of one method (at the batch size they ran at); None where none was timed."""
        timed = [r for r in results if (r.get("speed") or {}).get("target_step_ms")]
        if not timed:
            return None
        target, draft, overhead = [], [], []
        for result in timed:
            speed, k = result["speed"], result["num_draft_tokens"]
            size = speed.get("batch_size", 1)
            target += [(size, 1, speed["baseline_target_step_ms"], 0.0), (size, k + 1, speed["target_step_ms"], 0.0)]
            draft.append((size, k, speed["draft_ms"], 0.0))
            overhead.append((size, k, speed["verify_ms"], 0.0))
        return cls(_merged(target), _merged(draft), _merged(overhead), measured=False)

    @property
    def largest_batch(self) -> int:
        return max(size for size, _, _, _ in self.target)

    def target_ms(self, batch_size: float, rows: float) -> float:
        """One target pass over `rows` tokens of each of `batch_size` requests."""
        return _read(self.target, batch_size, rows)

    def round_ms(self, batch_size: float, num_draft_tokens: float, verified: float | None = None) -> float:
        """A whole round that drafts `num_draft_tokens`; `verified`: the mean drafts that really stood in the target's
        pass, fewer for prompt lookup. 0 drafts: a plain step."""
        verified = num_draft_tokens if verified is None else verified
        if num_draft_tokens == 0:
            return self.target_ms(batch_size, 1)
        extra = _read(self.draft, batch_size, num_draft_tokens) + _read(self.overhead, batch_size, num_draft_tokens)
        return self.target_ms(batch_size, 1 + verified) + extra

    def relative_spread(self) -> float:
        """The median over the target's points of half the interquartile range, relative to the time."""
        return float(np.median([spread / ms for _, _, ms, spread in self.target if ms > 0] or [0.0]))


def _points(rows: Sequence[dict[str, Any]], name: str) -> list[Point]:
    return [(row["batch_size"], row[name], row["ms"], row.get("spread_ms", 0.0)) for row in rows]


def _rising(points: Sequence[Point]) -> list[Point]:
    """Times that do not fall as the number grows, by batch size: neighbours that would are set to their mean (pool
    adjacent violators, the least-squares fit)."""
    found: list[Point] = []
    for size in sorted({size for size, _, _, _ in points}):
        pools: list[list[Point]] = []
        for point in sorted(p for p in points if p[0] == size):
            pools.append([point])
            while len(pools) > 1 and _mean_ms(pools[-2]) > _mean_ms(pools[-1]):
                pools[-2:] = [pools[-2] + pools[-1]]
        found += [(size, number, _mean_ms(pool), spread) for pool in pools for _, number, _, spread in pool]
    return found


def _mean_ms(pool: Sequence[Point]) -> float:
    return sum(ms for _, _, ms, _ in pool) / len(pool)


def _merged(points: Sequence[Point]) -> list[Point]:
    """One point a place: the median of those measured there, and half their range as its spread."""
    places: dict[tuple[int, int], list[float]] = {}
    for size, number, ms, _ in points:
        places.setdefault((size, number), []).append(ms)
    return [(*place, float(np.median(ms)), (max(ms) - min(ms)) / 2) for place, ms in sorted(places.items())]


def _read(points: Sequence[Point], batch_size: float, number: float) -> float:
    """Linear in `number` at every measured batch size, then linear in the batch size."""
    sizes = sorted({size for size, _, _, _ in points})
    at_sizes = [_line([(n, ms) for size, n, ms, _ in points if size == wanted], number) for wanted in sizes]
    return _line(list(zip(sizes, at_sizes, strict=True)), batch_size)


def _line(points: Sequence[tuple[float, float]], x: float) -> float:
    """Piecewise linear through `points`, the end slopes going on (never below zero); a single point holds anywhere."""
    points = sorted(points)
    if len(points) == 1:
        return points[0][1]
    i = min(max(sum(px <= x for px, _ in points) - 1, 0), len(points) - 2)
    (x0, y0), (x1, y1) = points[i], points[i + 1]
    return max(0.0, y0 + (y1 - y0) * (x - x0) / (x1 - x0))
