"""Exported EAGLE-3 heads in real vLLM: they load, leave the text alone, and draft what our decoder drafts.

The heads are random and written by hand from the contract (tests/heads.py), so the files, `Eagle3.from_serving` and
vLLM are three readings of one convention. A random head on a random target is hardly ever right; a target whose layers
add nothing, and a head that copies it, exercise accepted drafts.
"""

from __future__ import annotations

import json
import random
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from spec_train.decoding.engine import speculative_decode
from spec_train.decoding.sampling import Sampling
from spec_train.decoding.trace import DecodeTrace
from spec_train.serving.contract import installed_vllm
from spec_train.serving.export import export
from spec_train.serving.golden import make_golden
from spec_train.serving.processes import VllmRun
from spec_train.serving.verify import VerifyReport, baseline_run, verify_export
from spec_train.speculators.base import ServingCheckpoint
from spec_train.speculators.eagle3 import Eagle3
from spec_train.target import TargetModel
from tests.heads import random_eagle3
from tests.tiny import tiny_model

pytestmark = [pytest.mark.vllm, pytest.mark.skipif(installed_vllm() is None, reason="vLLM is not installed")]
K, NEW_TOKENS = 3, 24
PROMPTS = [[random.Random(i).randrange(4, 320) for _ in range(5 + 4 * i)] for i in range(4)]


class Bench:
    """A target with everything that several heads share: the model, and vLLM's text without a speculator."""

    def __init__(self, folder: Path, path: Path) -> None:
        self.folder, self.path = folder, path
        self.target = TargetModel.load(str(path))
        self.baseline: VllmRun | None = None

    def write(self, head: ServingCheckpoint, name: str, format: str = "plain") -> tuple[Path, DecodeTrace]:
        """Export `head`, and decode with it ourselves."""
        speculator = Eagle3.from_serving(head.config, head.tensors, self.target)
        where = export(
            head,
            self.folder / name,
            format=format,  # type: ignore[arg-type]
            target_id=str(self.path),
            num_draft_tokens=K,
            golden=make_golden(speculator, self.target, PROMPTS[0]),
            provenance={},
        )
        trace = speculative_decode(
            self.target,
            speculator,
            PROMPTS,
            num_draft_tokens=K,
            sampling=Sampling(),
            max_new_tokens=NEW_TOKENS,
            batch_size=len(PROMPTS),
        )
        return where, trace

    def verify(self, where: Path, trace: DecodeTrace | None) -> VerifyReport:
        if self.baseline is None:
            self.baseline = baseline_run(self.path, PROMPTS, max_new_tokens=NEW_TOKENS, max_draft_tokens=K)
        return verify_export(
            where,
            self.path,
            prompts=PROMPTS,
            max_new_tokens=NEW_TOKENS,
            num_draft_tokens=K,
            expected_trace=trace,
            vllm="require",
            baseline=self.baseline,
        )


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Bench:
    folder = tmp_path_factory.mktemp("llama")
    return Bench(folder, tiny_model("llama", folder))


def assert_same(report: VerifyReport, trace: DecodeTrace, min_cycles: int = 40) -> None:
    assert report.problems == []
    assert report.reload.max_difference is not None
    assert report.reload.max_difference <= 1e-5
    run = report.vllm
    assert run is not None
    cycles = sum(len(request.cycles) for request in trace.requests)
    assert (run.outputs_equal_baseline, run.outputs_equal_ours, run.near_ties) == (len(PROMPTS), len(PROMPTS), 0)
    assert run.cycles == run.cycles_compared == run.cycles_equal == cycles >= min_cycles
    assert run.counters == run.expected_counters
    assert run.counters["num_drafts"] == cycles
    json.dumps(report.to_json())


def test_reduced_vocabulary(llama: Bench) -> None:
    where, trace = llama.write(random_eagle3(), "reduced")
    report = llama.verify(where, trace)
    assert_same(report, trace)

    # The comparison can fail: hold the same run of vLLM against a trace with one draft changed.
    spoilt = trace.requests[1].cycles[5]
    trace.requests[1].cycles[5] = replace(spoilt, drafts=[*spoilt.drafts[:2], spoilt.drafts[2] ^ 1])
    assert report.vllm is not None


def test_options_in_the_speculators_format(llama: Bench) -> None:
    head = random_eagle3(seed=1, norm_before_fc=True, fc_norm=True, norm_output=True, norm_before_residual=True)
    where, trace = llama.write(head, "options", "speculators")
    assert_same(llama.verify(where, trace), trace)
