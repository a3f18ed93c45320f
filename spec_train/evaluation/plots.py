"""The pictures of a report, drawn from evaluation results and training logs (matplotlib, without a display)."""

from __future__ import annotations

import io
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from spec_train.errors import UserError

COLOURS = ("#0969da", "#bc4c00", "#1a7f37", "#8250df", "#cf222e", "#9a6700", "#57606a", "#bf3989", "#0a7d91", "#6e4a1f")
MARKERS = ("o", "s", "^", "D", "v", "P", "X", "<", ">", "*")
Results = Sequence[dict[str, Any]]
SAMPLED = re.compile(
    r"(?P<what>renewal|decode|decode_renewal)_T(?P<temperature>[\d.e-]+?)(_(?P<drafts>greedy|probabilistic))?@(?P<k>\d+)"
)
SAMPLED_LABELS = {
    "renewal": "estimate",
    "decode": "decode of a few prompts",
    "decode_renewal": "estimate on these",
}


@dataclass(frozen=True)
class Curve:
    """Training of one run: (step, value) points by the key of log.jsonl."""

    name: str
    series: dict[str, list[tuple[int, float]]]


def draw_all(results: Results, curves: Sequence[Curve]) -> dict[str, tuple[str, bytes]]:
    """(heading, PNG) by file name, of every picture that the data can fill. Raises UserError without matplotlib."""
    drawn = {
        "acceptance_by_k": ("Tokens per target pass against K", tokens_against_k(results)),
        "acceptance_by_position": ("Drafts accepted by position", acceptance_by_position(results)),
        "acceptance_by_category": ("Tokens per target pass by category", by_category(results)),
        "speedup_by_concurrency": ("Speed-up against concurrency", speedup_against_concurrency(results)),
        "training": ("Training", training_curves(curves)),
    }
    return {name: (heading, png) for name, (heading, png) in drawn.items() if png is not None}


def tokens_against_k(results: Results) -> bytes | None:
    """A panel for each suite and temperature, a line for each speculator; prompt lookup drafts in few rounds, so the
    axis is tokens per target pass and not the acceptance length of drafted rounds."""
    return _panels(_known(results, "tokens_per_step"), "draft tokens K", "tokens per target pass", _draw_against_k)


def acceptance_by_position(results: Results) -> bytes | None:
    """Unconditional rates at the deepest K of each speculator, with 95% intervals over conversations."""
    known = _known(results, "acceptance_rate_per_position")
    return _panels(known, "draft position", "accepted, share of drafted rounds", _draw_positions)


def by_category(results: Results) -> bytes | None:
    """Bars of tokens per target pass, at the K where each speculator does best overall."""
    known = _known(results, "by_category", "tokens_per_step")
    named = [result for result in known if len(result["by_category"]) > 1]
    return _panels(named, "", "tokens per target pass", _draw_categories) if named else None


def speedup_against_concurrency(results: Results) -> bytes | None:
    """Measured speed-up at each number of requests served together, where a speed was measured."""
    timed = [result for result in _known(results, "speed") if result["speed"].get("speedup")]
    return _panels(timed, "requests at once", "speed-up", _draw_speedup) if timed else None


def training_curves(curves: Sequence[Curve]) -> bytes | None:
    """Loss by step; acceptance length by step, estimated on all held-out answers and decoded on a few prompts, greedily
    and at every temperature that the log has."""
    if not curves:
        return None
    plt = _pyplot()
    figure, (left, right) = plt.subplots(1, 2, figsize=(11, 4), constrained_layout=True)
    for index, curve in enumerate(curves):
        colour = COLOURS[index % len(COLOURS)]
        if points := curve.series.get("loss"):
            left.plot(*zip(*points, strict=True), color=colour, label=curve.name)
        estimated = [key for key in curve.series if key.startswith("renewal@")]
        if estimated:
            # The first K is the one that chooses the checkpoint.
            label = f"{curve.name} estimate K={estimated[0].removeprefix('renewal@')}"
            right.plot(*zip(*curve.series[estimated[0]], strict=True), color=colour, marker=".", label=label)
        # A decode of a few prompts (crosses) and the estimate on its very answers (rings) should coincide.
        for prefix, what, style in (
            ("decode@", "decode of a few prompts", {"marker": "x", "linestyle": ":"}),
            ("decode_renewal@", "estimate on these", {"marker": "o", "linestyle": "none", "markersize": 9}),
        ):
            for key in (key for key in curve.series if key.startswith(prefix)):
                label = f"{curve.name} {what} K={key.removeprefix(prefix)}"
                steps, values = zip(*curve.series[key], strict=True)
                right.plot(steps, values, color=colour, markerfacecolor="none", label=label, **style)
        _draw_sampled(right, curve, colour)
    _finish(left, "step", "loss", "loss")
    _finish(right, "step", "acceptance length", "acceptance length")
    return _png(figure)


def _draw_sampled(axes: Any, curve: Curve, colour: str) -> None:
    """The same at temperatures above 0. Where the held-out answers were not sampled at one, its estimates are those on
    the decoded answers."""
    found = [match for key in curve.series if (match := SAMPLED.fullmatch(key))]
    on_all = {match["temperature"] for match in found if match["what"] == "renewal"}
    for match in found:
        shown = match["what"] != "decode_renewal" or match["temperature"] not in on_all
        if not shown or match["k"] != found[0]["k"]:
            continue
        label = f"{curve.name} T={match['temperature']} {SAMPLED_LABELS[match['what']]}"
        label += f", {match['drafts']} drafts K={match['k']}" if match["drafts"] else f" K={match['k']}"
        marker, line = {"greedy": ("^", "--"), "probabilistic": ("s", "--"), None: ("+", ":")}[match["drafts"]]
        steps, values = zip(*curve.series[match[0]], strict=True)
        axes.plot(steps, values, color=colour, marker=marker, linestyle=line, markersize=5, label=label)


def _draw_against_k(axes: Any, results: Results) -> None:
    for index, (kind, group) in enumerate(_by(results, "type").items()):
        points = sorted((r["num_draft_tokens"], r["tokens_per_step"]) for r in group)
        axes.plot(*zip(*points, strict=True), **_style(index), label=kind)
    axes.axhline(1, color="#8c959f", linewidth=1, linestyle="--")
    axes.set_xticks(sorted({result["num_draft_tokens"] for result in results}))


def _draw_positions(axes: Any, results: Results) -> None:
    groups = _by(results, "type")
    deepest = 1
    for index, (kind, group) in enumerate(groups.items()):
        result = max(group, key=lambda r: r["num_draft_tokens"])
        rates = result["acceptance_rate_per_position"]
        deepest = max(deepest, len(rates))
        # Side by side, so that intervals of different speculators can be told apart.
        places = [position + 1 + 0.05 * (index - (len(groups) - 1) / 2) for position in range(len(rates))]
        axes.plot(places, rates, **_style(index), label=f"{kind} K={len(rates)}")
        if bounds := result.get("acceptance_rate_per_position_ci95"):
            axes.vlines(places, [b[0] for b in bounds], [b[1] for b in bounds], color=COLOURS[index % len(COLOURS)])
    axes.set_xticks(range(1, deepest + 1))
    axes.set_ylim(0, 1)


def _draw_categories(axes: Any, results: Results) -> None:
    categories = list(dict.fromkeys(name for result in results for name in result["by_category"]))
    groups = _by(results, "type")
    width = 0.8 / len(groups)
    for index, (kind, group) in enumerate(groups.items()):
        best = max(group, key=lambda r: r["tokens_per_step"])
        values = [best["by_category"].get(name, {}).get("tokens_per_step", 0.0) for name in categories]
        places = [place - 0.4 + width * (index + 0.5) for place in range(len(categories))]
        label = f"{kind} K={best['num_draft_tokens']}"
        axes.bar(places, values, width, color=COLOURS[index % len(COLOURS)], label=label)
    axes.set_xticks(range(len(categories)), categories, rotation=30, ha="right")
    axes.axhline(1, color="#8c959f", linewidth=1, linestyle="--")


def _draw_speedup(axes: Any, results: Results) -> None:
    for index, (label, group) in enumerate(_by_kind_and_k(results).items()):
        points = sorted((_load(r), r["speed"]["speedup"]) for r in group)
        axes.plot(*zip(*points, strict=True), **_style(index), label=label)
    axes.axhline(1, color="#8c959f", linewidth=1, linestyle="--")
    loads = sorted({_load(r) for r in results})
    axes.set_xscale("log", base=2)
    axes.set_xticks(loads, [str(load) for load in loads])


def _panels(results: Results, x_label: str, y_label: str, draw: Any) -> bytes | None:
    """One panel for each suite, temperature and backend, drawn by `draw(axes, results of the panel)`."""
    groups: dict[str, list[dict[str, Any]]] = {}
    for result in results:
        if result["type"] != "plain":
            title = f"{result['suite']}, T={result['temperature']:g}"
            title += "" if result.get("backend", "torch") == "torch" else f", {result['backend']}"
            groups.setdefault(title, []).append(result)
    if not groups:
        return None
    plt = _pyplot()
    columns = min(2, len(groups))
    rows = -(-len(groups) // columns)
    size = (8 if columns == 1 else 13, 4.5 * rows)
    figure, grid = plt.subplots(rows, columns, figsize=size, squeeze=False, constrained_layout=True)
    for axes, (title, group) in zip(grid.flat, groups.items(), strict=False):
        draw(axes, group)
        _finish(axes, x_label, y_label, title)
    for axes in list(grid.flat)[len(groups) :]:
        axes.remove()
    return _png(figure)


def _known(results: Results, *keys: str) -> list[dict[str, Any]]:
    """The results that have a value for every one of `keys`; a server does not tell all of them."""
    return [result for result in results if all(result.get(key) is not None for key in keys)]


def _load(result: dict[str, Any]) -> int:
    """Requests at once in the run that was timed."""
    speed = result["speed"]
    return int(speed.get("concurrency") or speed.get("batch_size") or result["batch_size"])


def _by(results: Results, key: str) -> dict[str, list[dict[str, Any]]]:
    groups: dict[str, list[dict[str, Any]]] = {}
    for result in results:
        groups.setdefault(str(result[key]), []).append(result)
    return groups


def _by_kind_and_k(results: Results) -> dict[str, list[dict[str, Any]]]:
    groups: dict[str, list[dict[str, Any]]] = {}
    for result in results:
        groups.setdefault(f"{result['type']} K={result['num_draft_tokens']}", []).append(result)
    return groups


def _style(index: int) -> dict[str, Any]:
    return {"color": COLOURS[index % len(COLOURS)], "marker": MARKERS[index % len(MARKERS)], "markersize": 5}


def _finish(axes: Any, x_label: str, y_label: str, title: str) -> None:
    axes.set(xlabel=x_label, ylabel=y_label, title=title)
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    handles, labels = axes.get_legend_handles_labels()
    if handles:
        axes.legend(handles, labels, fontsize=8, loc="center left", bbox_to_anchor=(1.01, 0.5), frameon=False)


def _png(figure: Any) -> bytes:
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=120)
    _pyplot().close(figure)
    return buffer.getvalue()


def _pyplot() -> Any:
    try:
        import matplotlib
    except ImportError:
        raise UserError("report: plots need matplotlib: pip install 'spec-train[plots]'") from None
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    return plt
