"""What `spec-train advise` reads: results, their traces, and the measured costs, by method."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from spec_train.errors import UserError
from spec_train.evaluation.chains import Chain
from spec_train.evaluation.costs import COSTS_PREFIX, Costs
from spec_train.evaluation.traces import read_trace, trace_path


@dataclass(frozen=True)
class Evaluated:
    """A method at one K over the suites in question: its results, and the requests where traces lie beside them."""

    num_draft_tokens: int
    results: list[dict[str, Any]]
    chains: list[Chain]


@dataclass
class Method:
    """`kind` our name; `results` by K, deepest last; `costs` None where nothing was timed; `served`: measured speed-ups
    of a real server by (concurrency, K)."""

    kind: str
    evaluated: dict[int, Evaluated] = field(default_factory=dict)
    costs: Costs | None = None
    served: dict[tuple[int, int], dict[str, Any]] = field(default_factory=dict)


def read_methods(paths: Sequence[Path], temperature: float | None = None) -> tuple[list[Method], list[str]]:
    """(the methods in the order met, notes on what was left out).

    `paths`: result files, files with a list of results, or folders. Raises UserError where there is no result, where
    they are of different targets, devices or dtypes, or where no suite is common to all methods.
    """
    found, costs = _read_all(paths)
    _one_of(found, "target", "advice holds for one target")
    notes = []
    temperatures = sorted({r["temperature"] for r, _ in found})
    wanted = temperatures[0] if temperature is None else temperature
    if wanted not in temperatures:
        raise UserError(f"--temperature {wanted:g}: results are at {', '.join(f'{t:g}' for t in temperatures)}")
    if len(temperatures) > 1:
        notes.append(f"results at temperature {wanted:g} only; others with --temperature")
    found = [(r, path) for r, path in found if r["temperature"] == wanted]
    served = [(r, path) for r, path in found if concurrency_of(r) is not None]
    own = [(r, path) for r, path in found if concurrency_of(r) is None]
    _one_of(own, "device", "their times cannot be compared")
    _one_of(own, "dtype", "their times cannot be compared")
    methods: dict[str, Method] = {}
    suites = _common_suites(own, notes)
    for kind in dict.fromkeys(r["type"] for r, _ in own):
        methods[kind] = method = Method(kind)
        mine = [(r, path) for r, path in own if r["type"] == kind and r["suite"] in suites]
        for k in sorted({r["num_draft_tokens"] for r, _ in mine}):
            at_k = [(r, path) for r, path in mine if r["num_draft_tokens"] == k]
            complete = {r["suite"] for r, _ in at_k} == suites
            if not complete:
                notes.append(f"{kind} K={k} left out: not measured on every suite")
                continue
            traces = [_chains(r, path) for r, path in at_k]
            chains = [chain for trace in traces for chain in trace] if all(traces) else []
            method.evaluated[k] = Evaluated(k, [r for r, _ in at_k], chains)
        inline = [r["costs"] for r, _ in mine if r.get("costs")]
        given = costs.get(kind) or (inline[0] if inline else None)
        method.costs = Costs.of(given) if given else Costs.of_speed([r for r, _ in mine])
    for result, path in served:
        method = methods.setdefault(result["type"], Method(result["type"]))
        k = result["num_draft_tokens"]
        if result.get("speed"):
            method.served[concurrency_of(result) or 1, k] = result
            if k not in method.evaluated:
                method.evaluated[k] = Evaluated(k, [result], _chains(result, path))
    return [m for m in methods.values() if m.evaluated], notes


def concurrency_of(result: dict[str, Any]) -> int | None:
    """The load at which a server was measured; None for our own decoder."""
    value = result.get("concurrency") or (result.get("speed") or {}).get("concurrency")
    return None if value is None else int(value)


def _read_all(paths: Sequence[Path]) -> tuple[list[tuple[dict[str, Any], Path]], dict[str, dict[str, Any]]]:
    """Every result that drafts something, with the file it is from, and costs by method."""
    files = []
    for path in paths:
        if not path.exists():
            raise UserError(f"{path}: no such file or folder; give results of spec-train eval")
        folder = path if path.is_dir() else path.parent
        files += sorted(path.glob("*.json")) if path.is_dir() else [path, *sorted(folder.glob(f"{COSTS_PREFIX}*.json"))]
    found: list[tuple[dict[str, Any], Path]] = []
    costs: dict[str, dict[str, Any]] = {}
    for file in dict.fromkeys(files):
        content = _read_json(file)
        if file.name.startswith(COSTS_PREFIX):
            costs[content["type"]] = content
            continue
        entries = content if isinstance(content, list) else [content]
        for entry in entries:
            if isinstance(entry, dict) and "conditional_acceptance_rate_per_position" in entry:
                if entry["type"] not in ("plain", "assisted") and entry["num_spec_steps"]:
                    found.append((entry, file))
            elif file in paths:
                raise UserError(f"{file}: not a result of spec-train eval")
    if not found:
        raise UserError(f"{paths[0]}: no result with drafts; run spec-train eval first")
    return found, costs


def _read_json(file: Path) -> Any:
    try:
        return json.loads(file.read_text(encoding="utf-8"))
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise UserError(f"{file}: not JSON ({error})") from None


def _one_of(found: Sequence[tuple[dict[str, Any], Path]], key: str, why: str) -> None:
    values = {result[key]: path for result, path in found}
    if len(values) > 1:
        (a, where_a), (b, where_b) = list(values.items())[:2]
        raise UserError(f"results of different {key}s, {a!r} ({where_a}) and {b!r} ({where_b}): {why}")


def _common_suites(found: Sequence[tuple[dict[str, Any], Path]], notes: list[str]) -> set[str]:
    """The suites on which every method was measured."""
    by_kind: dict[str, set[str]] = {}
    for result, _ in found:
        by_kind.setdefault(result["type"], set()).add(result["suite"])
    if not by_kind:
        return set()
    common = set.intersection(*by_kind.values())
    if not common:
        raise UserError(f"no suite was measured with all of {', '.join(by_kind)}: evaluate them on the same prompts")
    dropped = set.union(*by_kind.values()) - common
    if dropped:
        notes.append(f"suites that not every method was measured on are left out: {', '.join(sorted(dropped))}")
    return common


def _chains(result: dict[str, Any], path: Path) -> list[Chain]:
    """The requests of `traces/<result>.jsonl` beside the result; none where there is no such file."""
    file = trace_path(path)
    if not file.is_file():
        return []
    return [
        Chain(
            request.id,
            tuple(accepted for _, accepted, _, _ in request.cycles),
            tuple(drafted for drafted, _, _, _ in request.cycles),
            result["num_draft_tokens"],
            False,
            len(request.output_ids),
        )
        for request in read_trace(file)
    ]
