"""Assisted generation of Transformers as a baseline: the same text, and the same counts round by round."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from spec_train.decoding.acceptance import vllm_counters
from spec_train.decoding.engine import plain_decode, speculative_decode
from spec_train.decoding.sampling import Sampling
from spec_train.evaluation.advice_input import read_methods
from spec_train.evaluation.assisted import assistant_of, assisted_decode
from spec_train.evaluation.evaluate import EvalSettings, assisted_contender, evaluate_suite, speculator_contender
from spec_train.evaluation.report import result_markdown
from spec_train.evaluation.turns import Suite
from spec_train.speculators.ngram import NgramProposer
from spec_train.target import TargetModel
from tests.parity.test_draft_lm import GREEDY, PROMPTS, answers, draft_for, fit
from tests.tiny import tiny_model


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> TargetModel:
    return TargetModel.load(str(tiny_model("llama", tmp_path_factory.mktemp("llama"))))


def test_assisted_rows_are_counted_as_ours(target: TargetModel, tmp_path: Path) -> None:
    """Assisted generation with the same draft gives the same text and, round by round, the same accepted drafts, to the
    last counted token: with an EOS inside a block, with a limit inside one, and with one token to give."""
    draft, k = draft_for(target), 4
    fit(draft, answers(target, PROMPTS), 60)
    assistant, reason = assistant_of(draft, target)
    assert assistant is not None and not reason
    eos = target.eos_token_ids
    text = plain_decode(target, PROMPTS, sampling=GREEDY, max_new_tokens=40).requests[2].output_ids
    for ids, limit in ((eos, 40), (eos, 17), (eos, 1), (frozenset({text[20]}), 40)):
        target.eos_token_ids = ids
        common: dict[str, Any] = {"num_draft_tokens": k, "sampling": GREEDY, "max_new_tokens": limit}
        ours = speculative_decode(target, draft, PROMPTS, **common)
        theirs = assisted_decode(target, assistant, PROMPTS, **common)
        target.eos_token_ids = eos
        assert [r.output_ids for r in theirs.requests] == [r.output_ids for r in ours.requests]
        assert [r.finish_reason for r in theirs.requests] == [r.finish_reason for r in ours.requests]
        for a, b in zip(theirs.requests, ours.requests, strict=True):
            assert [(len(c.drafts), c.accepted, c.kept, c.emitted) for c in a.cycles] == [
                (len(c.drafts), c.accepted, c.kept, c.emitted) for c in b.cycles
            ]
    assert vllm_counters(theirs) == vllm_counters(ours)
    assert vllm_counters(ours)["num_accepted_tokens"] > 5


def test_assisted_baseline_has_a_row(target: TargetModel, tmp_path: Path) -> None:
    """On a suite: a result like any other, timed in turn with plain decoding and our decoder; none where sampled."""
    draft = draft_for(target)
    assistant, _ = assistant_of(draft, target)
    assert assistant is not None
    suite = Suite("tiny", list("abcd"), [""] * 4, PROMPTS)
    contenders = [speculator_contender(draft, "draft", [3]), assisted_contender(draft, assistant, [3])]
    settings = EvalSettings(GREEDY, 12, 4, speed_prompts=2, speed_rounds=1)
    own, theirs = evaluate_suite(target, contenders, suite, settings, target_name="tiny", directory=tmp_path)
    assert (own["type"], theirs["type"], theirs["num_draft_tokens"]) == ("draft_lm", "assisted", 3)
    assert theirs["vllm_counters"] == own["vllm_counters"]
    assert theirs["lossless"] == {"checked": 4, "identical": 4, "first_divergence": None}
    speed = theirs["speed"]
    assert min(speed["tokens_per_second"], speed["own_tokens_per_second"], speed["baseline_tokens_per_second"]) > 0
    assert speed["own_ratio"] == pytest.approx(speed["own_tokens_per_second"] / speed["tokens_per_second"])
    assert "assisted" in result_markdown([own, theirs])
    assert (tmp_path / "tiny-assisted-k3-t0.json").is_file()
    methods, _ = read_methods([tmp_path])
    assert [method.kind for method in methods] == ["draft_lm"]  # it is nothing to serve
    sampled = replace(settings, sampling=Sampling(0.7), speed_prompts=0)
    assert [r["type"] for r in evaluate_suite(target, contenders, suite, sampled, target_name="tiny")] == ["draft_lm"]


def test_what_transformers_cannot_draft_with(target: TargetModel) -> None:
    assistant, reason = assistant_of(NgramProposer(1, 3), target)
    assert assistant is None and "no language model of its own" in reason
