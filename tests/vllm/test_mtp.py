"""MTP heads in real vLLM: fresh ones beside targets that ship none, and a shipped one stitched back into its target.

The heads are fitted a little to the target's answers to the very prompts: right often, and wrong often enough. One
process of vLLM serves all targets, each without a speculator and then with its head.
"""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch

from spec_train.decoding.engine import speculative_decode
from spec_train.decoding.sampling import Sampling
from spec_train.decoding.trace import DecodeTrace
from spec_train.serving.compare import compare
from spec_train.serving.contract import engine_arguments
from spec_train.serving.export import export, read_export
from spec_train.serving.golden import make_golden
from spec_train.serving.processes import VllmRun, run_vllm
from spec_train.serving.verify import check_reload
from spec_train.speculators import load_speculator
from spec_train.speculators.mtp import Mtp, MtpOptions
from spec_train.target import TargetModel
from tests.mtp_targets import mtp_target
from tests.parity.test_mtp import fit, head_for
from tests.tiny import tiny_model
from tests.vllm_report import assert_same

pytestmark = pytest.mark.vllm
K, NEW_TOKENS = 3, 32
DRAW = random.Random(0)
PROMPTS = [[DRAW.randrange(4, 320) for _ in range(length)] for length in (5, 9, 13, 17, 24)]
CASES = ("llama", "qwen3", "mimo")


def make_target(case: str, folder: Path) -> TargetModel:
    """vLLM gives the block heads of width / number of heads: 32 here, as in the Llama target; Qwen3's own have 64."""
    if case == "mimo":
        return TargetModel.load(str(mtp_target("mimo", folder)))
    heads: dict[str, Any] = {"num_attention_heads": 2, "num_key_value_heads": 1}
    if case == "qwen3":
        rope: dict[str, Any] = {"rope_type": "default", "rope_theta": 1e6}
        return TargetModel.load(str(tiny_model("qwen3", folder, rope_parameters=rope, **heads, head_dim=64)))
    rope = {"rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    rope["original_max_position_embeddings"] = 32
    return TargetModel.load(str(tiny_model("llama", folder, rope_parameters=rope, **heads)))


def trained_head(case: str, target: TargetModel) -> Mtp:
    if case == "mimo":
        head = Mtp.from_recipe(MtpOptions(type="mtp", init="target_head"), target, torch.arange(320), seed=0)
        assert head.feature_spec.aux_layer_ids == (4,)  # the state before the final norm
    else:
        head = head_for(target)
    fit(target, head, steps=30, prompts=PROMPTS)
    return head


class Served:
    """The targets with their exported heads, our own decoding with what the files hold, and vLLM's."""

    def __init__(self, folder: Path) -> None:
        self.exports: dict[str, Path] = {}
        self.traces: dict[str, DecodeTrace] = {}
        self.targets: dict[str, Path] = {}
        engines: list[dict[str, Any]] = []
        for case in CASES:
            target = make_target(case, folder)
            head = trained_head(case, target)
            self.targets[case] = Path(target.name)
            self.exports[case] = export(
                head.serving(),
                folder / f"{case}-head",
                format="stitched" if case == "mimo" else "plain",
                target_id=target.name,
                num_draft_tokens=K,
                golden=make_golden(head, target, PROMPTS[0]),
                provenance={},
            )
            self.traces[case] = speculative_decode(
                target,
                load_speculator(self.exports[case], target),
                PROMPTS,
                num_draft_tokens=K,
                sampling=Sampling(),
                max_new_tokens=NEW_TOKENS,
                batch_size=len(PROMPTS),
            )
            description = read_export(self.exports[case])
            engines += [{"model": target.name}, engine_arguments(self.exports[case], target.name, description, K)]
        runs = run_vllm("", engines, PROMPTS, max_new_tokens=NEW_TOKENS, max_draft_tokens=K, stop_token_ids=[2])
        self.baselines: dict[str, VllmRun] = dict(zip(CASES, runs[0::2], strict=True))
        self.runs: dict[str, VllmRun] = dict(zip(CASES, runs[1::2], strict=True))


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Served:
    return Served(tmp_path_factory.mktemp("mtp"))


@pytest.mark.parametrize("case", CASES)
def test_vllm_drafts_what_we_draft(served: Served, case: str) -> None:
    trace = served.traces[case]
    run = compare(served.baselines[case], served.runs[case], trace, "test")
    cycles = len(assert_same(run, trace))
    assert run.near_ties == 0
    per_position = run.counters["num_accepted_tokens_per_pos"]
    assert 0 < per_position[-1] < per_position[0] < run.counters["num_drafts"] == cycles


def test_the_stitched_copy_reloads_in_a_fresh_process_and_still_declares_its_head(served: Served) -> None:
    where = served.exports["mimo"]
    report = check_reload(where, served.targets["mimo"], "float32", "cpu")
    assert report.problems == []
    assert report.max_difference is not None
    assert report.max_difference <= 1e-5
    config = json.loads((where / "config.json").read_text())
    assert (config["architectures"], config["num_nextn_predict_layers"]) == (["MiMoForCausalLM"], 1)
