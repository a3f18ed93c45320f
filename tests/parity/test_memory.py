"""The memory estimate of a micro-batch, against steps of the full size and against torch's own account."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from spec_train.data.batches import build_batch
from spec_train.data.documents import Document
from spec_train.speculators import speculator_class
from spec_train.speculators.base import Speculator
from spec_train.target import TargetModel
from spec_train.training.memory import (
    HEAD_WIDTHS,
    MARGIN,
    TARGET_WIDTHS,
    LiveTensors,
    StepShape,
    activation_bytes,
    carried_over,
    head_peaks,
    target_peaks,
)
from tests.tiny import tiny_model

METHODS: dict[str, dict[str, Any]] = {
    "eagle3": {"draft_vocab_size": 200},
    "eagle1": {"ttt_steps": 2},
    "peagle": {},
    "mtp": {"ttt_steps": 2},
    "mlp": {},
    "medusa": {},
    "draft_lm": {"start_layers": 2},
    "pard": {"start_layers": 2},
}
LONG = StepShape(rows=2, width=1500, online=True, dtype=torch.float32, precision="fp32")


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> TargetModel:
    folder = tmp_path_factory.mktemp("target")
    return TargetModel.load(str(tiny_model("llama", folder, max_position_embeddings=2048)))


def fresh(target: TargetModel, kind: str, **options: Any) -> Speculator:
    cls = speculator_class(kind)
    ids = torch.arange(options.get("draft_vocab_size", target.vocab_size))
    return cls.from_recipe(cls.options(type=kind, **options), target, ids, 0)


@pytest.mark.parametrize("kind", METHODS)
def test_short_rows_tell_what_long_ones_take(target: TargetModel, kind: str) -> None:
    head = fresh(target, kind, **METHODS[kind])
    for measure, widths in ((head_peaks, HEAD_WIDTHS), (target_peaks, TARGET_WIDTHS)):
        expected, found = carried_over(measure, target, head, LONG, widths), measure(target, head, LONG)
        assert abs(expected.max() / found.max() - 1) < MARGIN
    assert all(parameter.grad is None for parameter in head.parameters())


@pytest.mark.parametrize("kind", ["eagle3", "draft_lm"])
def test_many_short_rows_and_half_precision(target: TargetModel, kind: str) -> None:
    head = fresh(target, kind, **METHODS[kind])
    shape = replace(LONG, rows=24, width=96, precision="bf16", dtype=torch.bfloat16)
    expected, found = carried_over(head_peaks, target, head, shape, HEAD_WIDTHS), head_peaks(target, head, shape)
    assert abs(expected.max() / found.max() - 1) < MARGIN


def test_recomputed_activations_take_less(target: TargetModel) -> None:
    heads = [fresh(target, "eagle3", gradient_checkpointing=on) for on in (False, True)]
    plain, saving = (activation_bytes(target, head, LONG) for head in heads)
    assert saving < 0.8 * plain
    medusa = fresh(target, "medusa")
    online, offline = (activation_bytes(target, medusa, replace(LONG, online=on)) for on in (True, False))
    assert offline < online  # such heads are light; the target's own pass takes more


def test_the_count_is_that_of_torch_s_allocator(target: TargetModel) -> None:
    """A whole step on the CPU; the profiler sees every allocation, those inside of kernels too."""
    head = fresh(target, "eagle3", **METHODS["eagle3"])
    document = Document("a", [5 + i % 300 for i in range(700)], [(1, 700)])
    batch = target.fill_features(build_batch([document], [[0]]), head.feature_spec, torch.float32)
    counts = head.supervised_counts(batch)

    def step() -> None:
        head(batch, counts)[0].backward()

    step()  # the gradients are there from now on
    live = LiveTensors()
    with live:
        step()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        step()
    now = most = 0
    for event in profiled.profiler.kineto_results.events():
        if event.name() == "[memory]":
            now += event.nbytes()
            most = max(most, now)
    counted = live.take_peak()
    assert counted == pytest.approx(most, rel=0.1)


def test_what_is_freed_counts_no_more_and_views_count_once() -> None:
    outside = torch.zeros(100)
    live = LiveTensors()
    with live:
        made = outside + 1
        view = made[:50].view(5, 10)
        assert live.take_peak() == 400
        del made
        again = view * 2
        assert live.take_peak() == 600
        del view
        assert live.take_peak() == 600
        assert again.t().sum() > 0
        del again
        live.take_peak()
        assert live.take_peak() == 0
        assert outside.view(10, 10).t().shape == (10, 10)
        assert live.take_peak() == 0
