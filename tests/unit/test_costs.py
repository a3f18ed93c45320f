"""Measured step costs: every point is there, positive, and read back by the advice."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from spec_train.evaluation.costs import Costs, measure_costs, write_costs
from spec_train.speculators.ngram import NgramProposer
from spec_train.target import TargetModel
from tests.tiny import tiny_model


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> TargetModel:
    return TargetModel.load(str(tiny_model("llama", tmp_path_factory.mktemp("model"))), dtype=torch.float32)


def test_every_point_is_measured(target: TargetModel, tmp_path: Path) -> None:
    costs = measure_costs(target, NgramProposer(), deepest=3, context=64, batch_sizes=(1, 4), repeats=3)
    assert {(p["batch_size"], p["rows"]) for p in costs["target_step"]} == {(b, r) for b in (1, 4) for r in (1, 2, 4)}
    depths = {(b, k) for b in (1, 4) for k in (1, 2, 3)}
    for part in ("draft", "overhead"):
        assert {(p["batch_size"], p["num_draft_tokens"]) for p in costs[part]} == depths
    assert all(p["ms"] > 0 for part in ("target_step", "draft", "overhead") for p in costs[part])
    write_costs(tmp_path, "ngram", costs)
    read = Costs.of(json.loads((tmp_path / "costs-ngram.json").read_text()))
    assert min(read.round_ms(1, 3), read.target_ms(1, 1)) > 0


def test_times_that_fall_as_work_grows_are_averaged_and_a_plain_step_is_not() -> None:
    def points(name: str, *ms: float) -> list[dict[str, float]]:
        return [{"batch_size": 1, name: n, "ms": value} for n, value in enumerate(ms, start=1)]

    costs = Costs.of(
        {
            "target_step": points("rows", 60.0, 53.0, 51.0, 55.0, 50.0, 52.0),
            "draft": points("num_draft_tokens", 4.0, 3.0, 6.0),
            "overhead": points("num_draft_tokens", 0.5, 0.4, 0.3),
        }
    )
    assert [costs.target_ms(1, rows) for rows in range(1, 7)] == pytest.approx([60, 52, 52] + 3 * [157 / 3])
    assert [costs.round_ms(1, k) for k in (1, 2, 3)] == pytest.approx([52 + 3.5 + 0.5, 52 + 3.5 + 0.4, 157 / 3 + 6.3])


def test_slow_targets_get_fewer_points(target: TargetModel) -> None:
    costs = measure_costs(target, NgramProposer(), deepest=2, context=64, batch_sizes=(1, 4), repeats=1, seconds=0.0)
    assert {p["batch_size"] for p in costs["target_step"]} == {1}


def test_a_short_context_is_respected(target: TargetModel) -> None:
    costs = measure_costs(target, NgramProposer(), deepest=7, context=100_000, batch_sizes=(1,), repeats=1)
    assert costs["context"] == target.max_length - 9
