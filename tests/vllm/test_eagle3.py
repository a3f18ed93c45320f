"""Exported EAGLE-3 heads in real vLLM: they load, leave the text alone, and draft what our decoder drafts.

Most heads are random and written by hand from the contract (tests/heads.py), so the files, our reader and vLLM are
three readings of one convention. A random head is hardly ever right, so others are trained on the target's own answers
to the very prompts, which exercises accepted drafts and answers that end inside a block of them.
"""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch

from spec_train.batch import Batch
from spec_train.decoding.engine import plain_decode, speculative_decode
from spec_train.decoding.sampling import Sampling
from spec_train.decoding.trace import DecodeTrace
from spec_train.serving.compare import VllmReport, compare
from spec_train.serving.contract import engine_arguments
from spec_train.serving.export import export, read_export
from spec_train.serving.golden import make_golden
from spec_train.serving.processes import VllmRun, run_vllm
from spec_train.serving.verify import render_report, verify_export
from spec_train.speculators.base import ServingCheckpoint
from spec_train.speculators.eagle3 import Eagle3, Eagle3Options, eagle3_config
from spec_train.stop_ids import stop_token_ids
from spec_train.target import TargetModel
from tests.heads import random_eagle3
from tests.tiny import tiny_model
from tests.vllm_report import assert_same

pytestmark = pytest.mark.vllm
K, NEW_TOKENS = 3, 24
DRAW = random.Random(0)
PROMPTS = [[DRAW.randrange(4, 320) for _ in range(length)] for length in (5, 9, 13, 17)]


def trained_head(target: TargetModel, draft_ids: torch.Tensor, steps: int, **changes: Any) -> Eagle3:
    """A head fitted to the target's answers to PROMPTS: right often, and wrong often enough."""
    options = Eagle3Options(type="eagle3", ttt_steps=3, step_decay=1.0, **changes)
    head = Eagle3.from_target(
        eagle3_config(options, target, len(draft_ids)), target, draft_ids, init="target_layer", seed=0
    )
    answers = plain_decode(target, PROMPTS, sampling=Sampling(), max_new_tokens=NEW_TOKENS, batch_size=4).requests
    width = max(len(prompt) for prompt in PROMPTS) + NEW_TOKENS
    ids, document = torch.zeros(4, width, dtype=torch.long), torch.full((4, width), -1)
    weight, position = torch.zeros(4, width), torch.arange(width).expand(4, -1)
    for row, answer in enumerate(answers):
        tokens = answer.prompt_ids + answer.output_ids
        ids[row, : len(tokens)], document[row, : len(tokens)] = torch.tensor(tokens), 0
        weight[row, len(answer.prompt_ids) : len(tokens)] = 1.0
    batch = target.fill_features(Batch(ids, position, document, weight), head.feature_spec, torch.float32)
    optimizer = torch.optim.Adam(head.parameters(), lr=1e-2)
    for _ in range(steps):
        optimizer.zero_grad()
        head.loss(batch, head.supervised_counts(batch)).loss.backward()
        optimizer.step()
    return head.eval().requires_grad_(False)


def write(folder: Path, path: Path, target: TargetModel, head: ServingCheckpoint, format: str) -> Path:
    speculator = Eagle3.from_serving(head.config, head.tensors, target)
    golden = make_golden(speculator, target, PROMPTS[0])
    settings: dict[str, Any] = {"format": format, "target_id": str(path), "num_draft_tokens": K, "golden": golden}
    return export(head, folder, provenance={}, **settings)


def decode(target: TargetModel, head: ServingCheckpoint) -> DecodeTrace:
    """Our own decoding with the head as the files have it."""
    speculator = Eagle3.from_serving(head.config, head.tensors, target)
    settings: dict[str, Any] = {"num_draft_tokens": K, "max_new_tokens": NEW_TOKENS, "batch_size": len(PROMPTS)}
    return speculative_decode(target, speculator, PROMPTS, sampling=Sampling(), **settings)


def assert_exact(run: VllmReport | None, trace: DecodeTrace, min_cycles: int) -> None:
    assert run is not None
    cycles = assert_same(run, trace, min_cycles)
    assert run.near_ties == 0
    assert run.counters["num_drafts"] == len(cycles)


class Llama:
    """One target, and one process of vLLM that serves it without a speculator and then with each of several heads."""

    def __init__(self, folder: Path) -> None:
        self.path = tiny_model("llama", folder)
        self.target = TargetModel.load(str(self.path))
        generator = torch.Generator().manual_seed(0)
        some = torch.randperm(320, generator=generator)[:200].sort().values
        self.heads = {
            "reduced vocabulary": random_eagle3(),
            "full vocabulary, trained": trained_head(self.target, torch.arange(320), steps=60).serving(),
            "two layers, states 0 to 4": trained_head(
                self.target, some, steps=0, num_layers=2, aux_layer_ids=[0, 1, 3, 4]
            ).serving(),
            "a Qwen3 layer, trained": trained_head(self.target, some, steps=30, qk_norm=True).serving(),
        }
        self.traces = {name: decode(self.target, head) for name, head in self.heads.items()}
        arguments: list[dict[str, Any]] = [{}]
        for number, head in enumerate(self.heads.values()):
            where = write(folder / f"head-{number}", self.path, self.target, head, "plain")
            arguments.append(engine_arguments(where, str(self.path), read_export(where), K))
        self.baseline, *runs = run_vllm(
            str(self.path),
            arguments,
            PROMPTS,
            max_new_tokens=NEW_TOKENS,
            max_draft_tokens=K,
            stop_token_ids=stop_token_ids(self.path),
        )
        self.runs: dict[str, VllmRun] = dict(zip(self.heads, runs, strict=True))


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Llama:
    return Llama(tmp_path_factory.mktemp("llama"))


@pytest.mark.parametrize(
    "name", ["reduced vocabulary", "full vocabulary, trained", "two layers, states 0 to 4", "a Qwen3 layer, trained"]
)
def test_vllm_drafts_what_we_draft(llama: Llama, name: str) -> None:
    trace = llama.traces[name]
    trained = "trained" in name
    run = compare(llama.baseline, llama.runs[name], trace, "test")
    assert_exact(run, trace, min_cycles=25 if trained else 80)
    if trained:  # accepted drafts at every position, and rejected ones
        per_position = run.counters["num_accepted_tokens_per_pos"]
        assert 0 < per_position[-1] < per_position[0] < run.counters["num_drafts"]


def test_another_head_is_told_apart(llama: Llama) -> None:
    """The comparison can fail: hold vLLM's run against the trace of the same head with one option turned."""
    head = random_eagle3()
    turned = ServingCheckpoint(head.kind, head.method, {**head.config, "norm_output": True}, head.tensors)
    run = compare(llama.baseline, llama.runs["reduced vocabulary"], decode(llama.target, turned), "test")
    assert run.outputs_equal_ours == len(PROMPTS)  # the text is the target's, whatever is drafted
    assert run.cycles_equal < run.cycles_compared
    assert run.first_divergence["drafts"]["position"] == 1  # the first draft reads no fed-back state
    assert "vLLM drafts other tokens" in run.problems[0]


def test_every_option_in_the_speculators_format(llama: Llama, tmp_path: Path) -> None:
    """Served as `vllm serve DIR` is: vLLM finds target and method in the folder. The target has moved since."""
    head = random_eagle3(seed=1, norm_before_fc=True, fc_norm=True, norm_output=True, norm_before_residual=True)
    trace = decode(llama.target, head)
    where = write(tmp_path / "head", Path("someone/model"), llama.target, head, "speculators")
    report = verify_export(
        where,
        llama.path,
        prompts=PROMPTS,
        max_new_tokens=NEW_TOKENS,
        num_draft_tokens=K,
        expected_trace=trace,
        vllm="require",
        baseline=llama.baseline,
    )
    assert report.problems == []
    assert report.reload.max_difference is not None
    assert report.reload.max_difference <= 1e-5
    assert_exact(report.vllm, trace, min_cycles=80)


def test_answers_that_end_on_a_scaled_qwen3(tmp_path: Path) -> None:
    """The whole of `verify_export` on another family, with scaled rotary embeddings, a trained head and an EOS that
    comes up in the middle of accepted drafts."""
    rope = {"rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    path = tiny_model("qwen3", tmp_path, rope_parameters={**rope, "original_max_position_embeddings": 32})
    target = TargetModel.load(str(path))
    answers = plain_decode(target, PROMPTS, sampling=Sampling(), max_new_tokens=NEW_TOKENS, batch_size=4).requests
    head = trained_head(target, torch.arange(4, 320), steps=80).serving()
    generation = json.loads((path / "generation_config.json").read_text())
    eos = answers[0].output_ids[14]
    (path / "generation_config.json").write_text(json.dumps({**generation, "eos_token_id": [2, eos]}))
    target = TargetModel.load(str(path))
    trace = decode(target, head)
    assert trace.requests[0].finish_reason == "stop"
    assert any(cycle.kept < cycle.accepted for request in trace.requests for cycle in request.cycles)  # cut off
    where = write(tmp_path / "head", path, target, head, "plain")
    report = verify_export(
        where,
        path,
        prompts=PROMPTS,
        max_new_tokens=NEW_TOKENS,
        num_draft_tokens=K,
        expected_trace=trace,
        vllm="require",
    )
    assert report.problems == []
    assert_exact(report.vllm, trace, min_cycles=20)
    assert report.vllm is not None
    assert report.vllm.mean_acceptance_length > 1.3
    assert json.loads(json.dumps(report.to_json()))["ok"] is True
    assert report.vllm.stops_checked == 2
    assert render_report(report).row_count == 9
