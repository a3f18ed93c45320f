"""Heads fitted to some of the prompts' answers, exported and served in one process of vLLM, against our decoder."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from spec_train.decoding.engine import speculative_decode
from spec_train.decoding.sampling import Sampling
from spec_train.decoding.trace import DecodeTrace
from spec_train.serving.compare import VllmReport, compare
from spec_train.serving.contract import engine_arguments
from spec_train.serving.export import export, read_export
from spec_train.serving.golden import make_golden
from spec_train.serving.processes import VllmRun, run_vllm
from spec_train.serving.verify import stop_token_ids
from spec_train.speculators import load_speculator
from spec_train.speculators.multi_head import MultiHead
from spec_train.target import TargetModel
from tests import multi_head as shared
from tests.tiny import tiny_model

K, NEW_TOKENS = 3, 24
DRAW = random.Random(0)
PROMPTS = [[DRAW.randrange(4, 320) for _ in range(length)] for length in (5, 9, 13, 17, 30)]


class Served:
    """One target, and vLLM that serves it without a speculator and then with each of several."""

    def __init__(self, folder: Path, cls: type[MultiHead], heads: dict[str, dict[str, Any]]) -> None:
        self.path = tiny_model("llama", folder)
        self.target = TargetModel.load(str(self.path))
        known = shared.answers(self.target, PROMPTS[:3])  # right often on these, hardly ever on the others
        self.folders: dict[str, Path] = {}
        self.traces: dict[str, DecodeTrace] = {}
        for number, (name, options) in enumerate(heads.items()):
            speculator = shared.fresh(cls, self.target, loss="ce", **options)
            shared.fit(speculator, known, steps=60, lr=1e-2)
            self.folders[name] = export(
                speculator.serving(),
                folder / f"heads-{number}",
                format="plain",
                target_id=str(self.path),
                num_draft_tokens=K,
                golden=make_golden(speculator, self.target, PROMPTS[0]),
                provenance={},
            )
            self.traces[name] = self.decode(name)

    def decode(self, name: str) -> DecodeTrace:
        """Our own decoding with the heads as the files have them."""
        speculator = load_speculator(self.folders[name], self.target)
        settings: dict[str, Any] = {"num_draft_tokens": K, "max_new_tokens": NEW_TOKENS, "batch_size": len(PROMPTS)}
        return speculative_decode(self.target, speculator, PROMPTS, sampling=Sampling(), **settings)

    def run(self, plugin: Sequence[str], native: Sequence[str] = ()) -> None:
        """Serve the exports named `plugin` as their README says, those named `native` with vLLM's loader of Medusa."""
        arguments = {}
        for name in plugin:
            folder = self.folders[name]
            arguments[name] = engine_arguments(folder, str(self.path), read_export(folder), K)
        for name in native:
            own = {"method": "medusa", "model": str(self.folders[name]), "num_speculative_tokens": K}
            arguments[f"{name}, natively"] = {"speculative_config": own}
            self.traces[f"{name}, natively"] = self.traces[name]
        self.baseline, *runs = run_vllm(
            str(self.path),
            [{}, *arguments.values()],
            PROMPTS,
            max_new_tokens=NEW_TOKENS,
            max_draft_tokens=K,
            stop_token_ids=stop_token_ids(self.path),
        )
        self.runs: dict[str, VllmRun] = dict(zip(arguments, runs, strict=True))

    def report(self, name: str) -> VllmReport:
        """What `spec-train verify` finds."""
        return compare(self.baseline, self.runs[name], self.traces[name], K, "test")

    def check(self, name: str) -> None:
        """Text, every draft of every round and the counters are equal, in rounds that accept nothing and all."""
        report, trace = self.report(name), self.traces[name]
        cycles = [cycle for request in trace.requests for cycle in request.cycles]
        assert report.problems == []
        assert (report.outputs_equal_baseline, report.outputs_equal_ours) == (len(PROMPTS), len(PROMPTS))
        assert report.cycles == report.cycles_compared == report.cycles_equal == len(cycles) >= 40
        assert report.counters == report.expected_counters
        assert {0, K} <= {cycle.accepted for cycle in cycles}
