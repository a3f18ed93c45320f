"""Does sampled text bear out the estimate? One speculator measured three times at a temperature, on the same prompts.

- *estimate*: N plain continuations of every prompt, and the renewal walk over them (`training/acceptance.py`);
- *decode*: N continuations by our decoder with speculation;
- *vllm*: N continuations by vLLM's offline engine with the export.

Drafts are the draft's argmax or drawn from its law, and judged token by token or as a block, on every side alike.

Random numbers are independent, so the sides are three samples. Each gives tau = 1 + sum of kept drafts / sum of rounds.
All sides share their prompts, which are therefore no source of chance: the bootstrap draws continuations within each
prompt. Two sides agree where 0 lies in the 95% interval of their difference. Of three pairs that truly agree, one is
outside in about one run of eight.

Every finished prompt is a line of a journal, so an interrupted measurement goes on where it stood.

Shape legend: P prompts, N continuations of each, S resamples.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import combinations
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from spec_train.decoding.acceptance import acceptance_length, drafted_rounds
from spec_train.decoding.engine import plain_decode, speculative_decode
from spec_train.decoding.sampling import Sampling
from spec_train.decoding.trace import RequestTrace
from spec_train.errors import UserError
from spec_train.evaluation.estimate import text_hits
from spec_train.evaluation.turns import Suite
from spec_train.evaluation.vllm_backend import run_engines, trace_of
from spec_train.speculators.base import Speculator
from spec_train.target import TargetModel
from spec_train.training.acceptance import BOOTSTRAP_RESAMPLES, renewal_counts

SIDES = ("estimate", "decode", "vllm")
VLLM_TIMEOUT_S = 4 * 3600.0  # of one engine; shared cores are slow


@dataclass(frozen=True)
class Plan:
    """What is sampled: `samples` continuations of each prompt, `batch_size` at a time."""

    samples: int
    num_draft_tokens: int
    temperature: float
    max_new_tokens: int
    batch_size: int
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0
    draft_sample_method: Literal["greedy", "probabilistic"] = "greedy"
    rejection_sample_method: Literal["standard", "block"] = "standard"

    def __post_init__(self) -> None:
        if self.samples < 2:
            raise UserError(f"--samples {self.samples}: one continuation of a prompt varies by nothing; give 2 or more")

    def sampling(self, side: str) -> Sampling:
        """The settings of one side, each with a seed of its own."""
        return Sampling(
            self.temperature,
            self.top_k,
            self.top_p,
            self.draft_sample_method,
            seed=3 * self.seed + SIDES.index(side),
            rejection_sample_method=self.rejection_sample_method,
        )


@dataclass(frozen=True)
class Sampled:
    """Rounds with drafts and kept drafts of every continuation of one prompt, [N] each; the estimate's are expected."""

    rounds: list[float]
    kept: list[float]


class Journal:
    """The finished prompts of every side, in a file that only grows. Raises UserError where it was made otherwise."""

    def __init__(self, path: Path, settings: dict[str, Any]) -> None:
        self.path = path
        self.found: dict[tuple[str, int], Sampled] = {}
        head = json.loads(json.dumps(settings))
        whole = path.read_bytes() if path.is_file() else b""
        lines = whole[: whole.rfind(b"\n") + 1].decode("utf-8").splitlines()
        if not lines:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(json.dumps(head) + "\n", encoding="utf-8")
            return
        if json.loads(lines[0]) != head:
            raise UserError(f"{path} was measured with other settings; give the same ones, or another folder")
        os.truncate(path, whole.rfind(b"\n") + 1)  # a torn last line
        for line in lines[1:]:
            entry = json.loads(line)
            self.found[entry["side"], entry["prompt"]] = Sampled(entry["rounds"], entry["kept"])

    def add(self, side: str, prompt: int, sampled: Sampled) -> None:
        """Keep what one prompt gave."""
        self.found[side, prompt] = sampled
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps({"side": side, "prompt": prompt, **asdict(sampled)}) + "\n")

    def missing(self, side: str, prompts: int) -> list[int]:
        """The prompts that this side has yet to sample."""
        return [prompt for prompt in range(prompts) if (side, prompt) not in self.found]


def measure_here(
    side: str, target: TargetModel, speculator: Speculator, suite: Suite, plan: Plan, journal: Journal
) -> None:
    """Fill in the side "estimate" or "decode", prompt by prompt."""
    common: dict[str, Any] = {"max_new_tokens": plan.max_new_tokens, "batch_size": plan.batch_size}
    for prompt in journal.missing(side, len(suite.prompts)):
        begun = time.monotonic()
        first = prompt * plan.samples
        copies = [suite.prompts[prompt]] * plan.samples
        settings = {**common, "sampling": plan.sampling(side), "indices": range(first, first + plan.samples)}
        if side == "estimate":
            plain = plain_decode(target, copies, **settings)
            sampled = _estimated(target, speculator, plain.requests, plan.num_draft_tokens, plan.sampling(side))
        else:
            trace = speculative_decode(target, speculator, copies, num_draft_tokens=plan.num_draft_tokens, **settings)
            sampled = _decoded(trace.requests)
        journal.add(side, prompt, sampled)
        _say(side, prompt, prompt, suite, begun)


def measure_in_vllm(
    export_dir: Path, target_dir: Path, suite: Suite, plan: Plan, journal: Journal, prompts_at_once: int, dtype: str
) -> None:
    """Fill in the side "vllm", `prompts_at_once` prompts to an engine."""
    missing = journal.missing("vllm", len(suite.prompts))
    while missing:
        begun = time.monotonic()
        part, missing = missing[:prompts_at_once], missing[prompts_at_once:]
        names = [f"{suite.ids[prompt]}/{sample}" for prompt in part for sample in range(plan.samples)]
        copies = [suite.prompts[prompt] for prompt in part for _ in range(plan.samples)]
        asked = Suite(suite.name, names, [""] * len(names), copies)
        places = [prompt * plan.samples + sample for prompt in part for sample in range(plan.samples)]
        ((load,),) = run_engines(
            str(export_dir), target_dir, asked, plan.sampling("vllm"), num_draft_tokens=[plan.num_draft_tokens],
            concurrency=[plan.batch_size], max_new_tokens=plan.max_new_tokens, dtype=dtype, timeout_s=VLLM_TIMEOUT_S,
            indices=places,
        )  # fmt: skip
        requests = trace_of(load, asked, plan.num_draft_tokens).requests
        for place, prompt in enumerate(part):
            own = requests[place * plan.samples : (place + 1) * plan.samples]
            journal.add("vllm", prompt, _decoded(own))
        _say("vllm", part[0], part[-1], suite, begun)


def compare_sides(journal: Journal, prompts: int) -> dict[str, Any]:
    """tau of every side that is whole, with its 95% interval, and every pair of them; ready for JSON."""
    sides: dict[str, dict[str, Any]] = {}
    resampled: dict[str, npt.NDArray[np.float64]] = {}
    for number, side in enumerate(SIDES):
        if journal.missing(side, prompts):
            continue
        rows = [journal.found[side, prompt] for prompt in range(prompts)]
        rounds, kept = sum(sum(row.rounds) for row in rows), sum(sum(row.kept) for row in rows)
        resampled[side] = _resampled(rows, number)
        low, high = np.quantile(resampled[side], [0.025, 0.975])
        sides[side] = {
            "continuations": sum(len(row.rounds) for row in rows),
            "rounds": rounds,
            "kept": kept,
            "tau": acceptance_length(kept, rounds),
            "ci95": [float(low), float(high)],
        }
    pairs = []
    for left, right in combinations(resampled, 2):
        low, high = np.quantile(resampled[left] - resampled[right], [0.025, 0.975])
        pairs.append(
            {
                "sides": [left, right],
                "difference": sides[left]["tau"] - sides[right]["tau"],
                "ci95": [float(low), float(high)],
                "agree": bool(low <= 0 <= high),
            }
        )
    return {"sides": sides, "pairs": pairs, "agree": bool(pairs) and all(pair["agree"] for pair in pairs)}


def agreement_table(result: dict[str, Any]) -> str:
    """The comparison as Markdown, with the verdict as its last line."""
    lines = ["| side | continuations | rounds | τ | 95% |", "|---|---:|---:|---:|---|"]
    for name, side in result["sides"].items():
        low, high = side["ci95"]
        lines.append(
            f"| {name} | {side['continuations']} | {side['rounds']} | {side['tau']:.4f} | {low:.4f}-{high:.4f} |"
        )
    lines += ["", "| pair | difference | 95% | agree |", "|---|---:|---|---|"]
    for pair in result["pairs"]:
        low, high = pair["ci95"]
        verdict = "yes" if pair["agree"] else "NO"
        lines.append(
            f"| {' - '.join(pair['sides'])} | {pair['difference']:+.4f} | {low:+.4f} to {high:+.4f} | {verdict} |"
        )
    verdict = (
        "all pairs agree" if result["agree"] else "NOT all pairs agree" if result["pairs"] else "nothing to compare"
    )
    return "\n".join([*lines, "", f"{verdict} within the 95% interval of their difference", ""])


def _estimated(
    target: TargetModel,
    speculator: Speculator,
    requests: Sequence[RequestTrace],
    num_draft_tokens: int,
    sampling: Sampling,
) -> Sampled:
    (hits,) = text_hits(target, speculator, requests, num_draft_tokens, [sampling])
    counts = [renewal_counts([response], num_draft_tokens) for response in hits]
    none = [0.0] * (len(requests) - len(counts))  # answers of one token have no round
    return Sampled([c.steps for c in counts] + none, [c.accepted for c in counts] + none)


def _decoded(requests: Sequence[RequestTrace]) -> Sampled:
    rounds = [drafted_rounds([request]) for request in requests]
    return Sampled([len(cycles) for cycles in rounds], [sum(cycle.kept for cycle in cycles) for cycles in rounds])


def _resampled(rows: Sequence[Sampled], seed: int) -> npt.NDArray[np.float64]:
    """tau [S] of resamples that draw the continuations of each prompt anew."""
    random = np.random.default_rng(seed)
    rounds_S, kept_S = np.zeros(BOOTSTRAP_RESAMPLES), np.zeros(BOOTSTRAP_RESAMPLES)
    for row in rows:
        picks = random.integers(0, len(row.rounds), size=(BOOTSTRAP_RESAMPLES, len(row.rounds)))
        rounds_S += np.array(row.rounds)[picks].sum(axis=1)
        kept_S += np.array(row.kept)[picks].sum(axis=1)
    tau_S: npt.NDArray[np.float64] = 1 + kept_S / np.maximum(rounds_S, 1)
    return tau_S


def _say(side: str, first: int, last: int, suite: Suite, begun: float) -> None:
    which = f"prompt {first + 1}" if first == last else f"prompts {first + 1}-{last + 1}"
    print(f"{side}: {which} of {len(suite.prompts)}, {time.monotonic() - begun:.0f} s", flush=True)
