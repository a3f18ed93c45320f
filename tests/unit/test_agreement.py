"""Agreement of sampled measurements: what is told apart, and what an interrupted journal keeps."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from spec_train.errors import UserError
from spec_train.evaluation.agreement import Journal, Plan, Sampled, agreement_table, compare_sides, measure_here
from spec_train.evaluation.turns import Suite
from spec_train.speculators.eagle3 import Eagle3
from spec_train.target import TargetModel
from tests.heads import random_eagle3
from tests.tiny import tiny_model

PLAN = Plan(samples=6, num_draft_tokens=3, temperature=0.7, max_new_tokens=12, batch_size=6)


def sampled_sides(folder: Path, rates: dict[str, float], prompts: int = 20, samples: int = 50) -> Journal:
    """Synthetic sides: prompts differ a lot, rounds are kept at the side's rate times the prompt's own."""
    random = np.random.default_rng(5)
    journal = Journal(folder / "counts.jsonl", {"of": "synthetic"})
    for side, rate in rates.items():
        for prompt in range(prompts):
            own = rate * (0.5 + prompt / prompts)
            rounds = random.integers(8, 14, size=samples)
            kept = random.binomial(rounds * 2, own)
            journal.add(side, prompt, Sampled(rounds.tolist(), kept.tolist()))
    return journal


def test_a_single_continuation_has_no_interval() -> None:
    with pytest.raises(UserError, match="--samples 1"):
        replace(PLAN, samples=1)


def test_equal_sides_agree_and_others_do_not(tmp_path: Path) -> None:
    result = compare_sides(sampled_sides(tmp_path, {"estimate": 0.4, "decode": 0.4, "vllm": 0.43}), 20)
    assert [pair["agree"] for pair in result["pairs"]] == [True, False, False]
    assert not result["agree"]
    side = result["sides"]["estimate"]
    assert side["ci95"][0] < side["tau"] < side["ci95"][1]
    assert side["tau"] == 1 + side["kept"] / side["rounds"]
    # The prompts are the same for all: how much they differ is not in the interval.
    variance = 0.0
    for prompt in range(20):
        own = 0.4 * (0.5 + prompt / 20)  # kept ~ Binomial(2 rounds, own), rounds uniform on 8..13
        variance += 50 * (2 * 10.5 * own * (1 - own) + (2 * own + 1 - side["tau"]) ** 2 * 35 / 12)
    width = 2 * 1.96 * variance**0.5 / side["rounds"]
    assert side["ci95"][1] - side["ci95"][0] == pytest.approx(width, rel=0.08)  # a 90% interval is 16% narrower
    apart = result["pairs"][0]["ci95"]
    assert apart[1] - apart[0] == pytest.approx(2**0.5 * width, rel=0.08)
    assert "NOT all pairs agree" in agreement_table(result)


def test_a_side_that_is_not_whole_is_left_out(tmp_path: Path) -> None:
    journal = sampled_sides(tmp_path, {"estimate": 0.4, "decode": 0.4})
    result = compare_sides(journal, 20)
    assert list(result["sides"]) == ["estimate", "decode"] and result["agree"]
    assert compare_sides(journal, 21)["pairs"] == []


def test_an_interrupted_journal_goes_on(tmp_path: Path) -> None:
    """A torn line is sampled again, to the very same numbers; other settings are refused and nothing is lost."""
    folder = tiny_model("llama", tmp_path)
    target = TargetModel.load(str(folder))
    head = random_eagle3()
    speculator = Eagle3.from_serving(head.config, head.tensors, target)
    suite = Suite("two", ["a", "b"], ["", ""], [[5, 6, 7, 8], [20, 21]])
    path = tmp_path / "out" / "counts.jsonl"
    whole = Journal(path, {"seed": 0})
    for side in ("estimate", "decode"):
        measure_here(side, target, speculator, suite, PLAN, whole)
    written = path.read_bytes()
    assert all(len(sampled.rounds) == 6 and min(sampled.rounds) > 0 for sampled in whole.found.values())
    path.write_bytes(written[:-20])
    again = Journal(path, {"seed": 0})
    assert again.missing("decode", 2) == [1]
    measure_here("decode", target, speculator, suite, PLAN, again)
    assert path.read_bytes() == written
    with pytest.raises(UserError, match="other settings"):
        Journal(path, {"seed": 1})
    assert path.read_bytes() == written
