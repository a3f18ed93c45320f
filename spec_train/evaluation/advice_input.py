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
from spec_train.serving.contract import sampling_problem

Found = list[tuple[dict[str, Any], Path]]
"""Results, each with the file it is from."""


@dataclass(frozen=True)
class Evaluated:
    """A method at one K over the suites in question: its results, and the requests where traces lie beside them."""

    num_draft_tokens: int
    results: list[dict[str, Any]]
    chains: list[Chain]


@dataclass
class Method:
    """`kind` our name; `results` by K, deepest last; `costs` None where nothing was timed; `served`: results of a real
    server by (concurrency, K). How drafts are picked and judged is part of the method: None where only a server knows.
    """

    kind: str
    evaluated: dict[int, Evaluated] = field(default_factory=dict)
    costs: Costs | None = None
    served: dict[tuple[int, int], dict[str, Any]] = field(default_factory=dict)
    draft_sample_method: str | None = "greedy"
    rejection_sample_method: str | None = "standard"

    @property
    def name(self) -> str:
        """The kind, and what is not as usual: "eagle3, probabilistic drafts, block rejection"."""
        name = self.kind
        name += ", probabilistic drafts" if self.draft_sample_method == "probabilistic" else ""
        return name + (", block rejection" if self.rejection_sample_method == "block" else "")


def read_methods(paths: Sequence[Path], temperature: float | None = None) -> tuple[list[Method], list[str]]:
    """(the methods in the order met, notes on what was left out).

    `paths`: result files, files with a list of results, or folders. Trees are left out: vLLM serves chains. Raises
    UserError where there is no result, where they are of different targets, devices or dtypes, where two differ for the
    same method, K and suite, or where no suite is common to all methods.
    """
    found, costs = _read_all(paths)
    notes: list[str] = []
    found = _servable(_at_temperature(_chains_only(found, paths[0], notes), temperature, notes), notes)
    own = [(r, path) for r, path in found if concurrency_of(r) is None]
    _one_of(found, "target", "advice holds for one target")
    for key in ("device", "dtype"):
        _one_of(own, key, "their times cannot be compared")
    for key in ("top_k", "top_p", "min_p"):
        _one_of(found, key, "they filter what the target says; advise on one setting")
    suites = _common_suites(own, notes)
    methods: dict[str, Method] = {}
    for name in dict.fromkeys(_method_of(r).name for r, _ in own):
        mine = [(r, path) for r, path in own if _method_of(r).name == name and r["suite"] in suites]
        methods[name] = method = _method_of(mine[0][0])
        _evaluate(method, mine, suites, notes)
        inline = [r["costs"] for r, _ in mine if r.get("costs")]
        beside = [costs[path.parent, method.kind] for _, path in mine if (path.parent, method.kind) in costs]
        given = next(iter(beside + inline), None)
        method.costs = Costs.of(given) if given else Costs.of_speed([r for r, _ in mine])
    for result, path in found:
        load = concurrency_of(result)
        if load is not None and result.get("speed"):
            _serve(methods, load, result, path, notes)
    return [m for m in methods.values() if m.evaluated], notes


def concurrency_of(result: dict[str, Any]) -> int | None:
    """The load at which a server was measured; None for our own decoder."""
    value = result.get("concurrency") or (result.get("speed") or {}).get("concurrency")
    return None if value is None else int(value)


def _chains_only(found: Found, where: Path, notes: list[str]) -> Found:
    trees = list(dict.fromkeys(f"{r['type']} {r['tree']['name']}" for r, _ in found if r.get("tree")))
    if trees:
        notes.append(f"trees left out, vLLM serves chains only: {', '.join(trees)}")
    chains = [(r, path) for r, path in found if not r.get("tree")]
    if not chains:
        raise UserError(f"{where}: trees only, and vLLM serves chains; evaluate a chain too (eval.num_draft_tokens)")
    return chains


def _at_temperature(found: Found, temperature: float | None, notes: list[str]) -> Found:
    temperatures = sorted({r["temperature"] for r, _ in found})
    wanted = temperatures[0] if temperature is None else temperature
    if wanted not in temperatures:
        raise UserError(f"--temperature {wanted:g}: results are at {', '.join(f'{t:g}' for t in temperatures)}")
    if len(temperatures) > 1:
        notes.append(f"results at temperature {wanted:g} only; others with --temperature")
    return [(r, path) for r, path in found if r["temperature"] == wanted]


def _servable(found: Found, notes: list[str]) -> Found:
    """Without what vLLM would silently do otherwise than it was measured."""
    kept: Found = []
    for result, path in found:
        method = _method_of(result)
        problem = sampling_problem(method.kind, method.draft_sample_method, method.rejection_sample_method)
        if problem is None:
            kept.append((result, path))
        elif (note := f"{method.name} left out: {problem}") not in notes:
            notes.append(note)
    if not kept:
        raise UserError(f"nothing that vLLM would serve as it was measured: {'; '.join(notes)}")
    return kept


def _method_of(result: dict[str, Any]) -> Method:
    """The method that a result belongs to, empty. At temperature 0 drafts are the argmax and any rule judges them
    alike; what vLLM could not do at a temperature then stands for the usual."""
    if result.get("backend") == "server":
        return Method(result["type"], draft_sample_method=None, rejection_sample_method=None)
    drafts, judged = result.get("draft_sample_method") or "greedy", result.get("rejection_sample_method") or "standard"
    if result["temperature"] == 0 and sampling_problem(result["type"], drafts, judged):
        drafts, judged = "greedy", "standard"
    return Method(result["type"], draft_sample_method=drafts, rejection_sample_method=judged)


def _evaluate(method: Method, mine: Found, suites: set[str], notes: list[str]) -> None:
    """Fill in what our decoder measured, by K."""
    for k in sorted({r["num_draft_tokens"] for r, _ in mine}):
        by_suite: dict[str, tuple[dict[str, Any], Path]] = {}
        for result, path in mine:
            if result["num_draft_tokens"] != k:
                continue
            first, where = by_suite.setdefault(result["suite"], (result, path))
            if {**first, "costs": None} != {**result, "costs": None}:
                raise UserError(
                    f"two results of {method.name} with K={k} on {result['suite']}, {where} and {path}: advise on one "
                    "speculator of a type at a time"
                )
        if by_suite.keys() != suites:
            notes.append(f"{method.name} K={k} left out: not measured on every suite")
            continue
        traces = [_chains(r, path) for r, path in by_suite.values()]
        chains = [chain for trace in traces for chain in trace] if all(traces) else []
        method.evaluated[k] = Evaluated(k, [r for r, _ in by_suite.values()], chains)


def _serve(methods: dict[str, Method], load: int, result: dict[str, Any], path: Path, notes: list[str]) -> None:
    """Add what a server measured. Where it does not tell how it drafts, that joins the only method of its kind."""
    method, k = _method_of(result), result["num_draft_tokens"]
    same = [found for found in methods.values() if found.kind == method.kind]
    if method.draft_sample_method is None and len(same) == 1:
        method = same[0]
    method = methods.setdefault(method.name, method)
    if method.served.setdefault((load, k), result) != result:
        notes.append(f"{method.name} K={k} at load {load}: measured several times, the first result counts")
    if k not in method.evaluated:
        method.evaluated[k] = Evaluated(k, [result], _chains(result, path))


def _read_all(paths: Sequence[Path]) -> tuple[Found, dict[tuple[Path, str], dict[str, Any]]]:
    """Every result that drafts something, and costs by folder and method."""
    files = []
    for path in paths:
        if not path.exists():
            raise UserError(f"{path}: no such file or folder; give results of spec-train eval")
        folder = path if path.is_dir() else path.parent
        files += sorted(path.glob("*.json")) if path.is_dir() else [path, *sorted(folder.glob(f"{COSTS_PREFIX}*.json"))]
    found: Found = []
    costs: dict[tuple[Path, str], dict[str, Any]] = {}
    for file in dict.fromkeys(files):
        content = _read_json(file)
        if file.name.startswith(COSTS_PREFIX):
            costs[file.parent, content["type"]] = content
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


def _one_of(found: Found, key: str, why: str) -> None:
    values = {result[key]: path for result, path in found if result.get(key) is not None}
    if len(values) > 1:
        (a, where_a), (b, where_b) = list(values.items())[:2]
        raise UserError(f"results of different {key}s, {a!r} ({where_a}) and {b!r} ({where_b}): {why}")


def _common_suites(found: Found, notes: list[str]) -> set[str]:
    """The suites on which every method was measured."""
    by_method: dict[str, set[str]] = {}
    for result, _ in found:
        by_method.setdefault(_method_of(result).name, set()).add(result["suite"])
    if not by_method:
        return set()
    common = set.intersection(*by_method.values())
    if not common:
        raise UserError(f"no suite was measured with all of {'; '.join(by_method)}: evaluate them on the same prompts")
    dropped = set.union(*by_method.values()) - common
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
            f"{result['suite']}/{request.conversation or request.id}",
        )
        for request in read_trace(file)
    ]
