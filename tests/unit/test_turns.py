"""Later turns of a suite: the second prompt holds the target's own first answer."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import torch

from spec_train.decoding.sampling import Sampling
from spec_train.evaluation.evaluate import (
    EvalSettings,
    decode_reference,
    estimator_of,
    evaluate_suite,
    ngram_contender,
    render_suite,
    speculator_contender,
)
from spec_train.evaluation.traces import read_trace
from spec_train.evaluation.turns import next_turn
from spec_train.speculators.draft_lm import DraftLM, DraftLMOptions
from spec_train.target import TargetModel
from tests.tiny import tiny_model, tiny_tokenizer

ROWS = [
    {"id": "a", "category": "writing", "turns": ["one two three", "say that again", "and again"]},
    {"id": "b", "category": "math", "turns": ["two plus two?"]},
    {"id": "c", "category": "writing", "turns": ["hello there", "rewrite it"]},
]
SETTINGS = EvalSettings(Sampling(), max_new_tokens=12, batch_size=2, speed_prompts=0)


@pytest.fixture
def suite_file(tmp_path: Path) -> str:
    file = tmp_path / "turns.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    return str(file)


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> TargetModel:
    return TargetModel.load(str(tiny_model("llama", tmp_path_factory.mktemp("llama"))))


def test_second_prompt_holds_the_first_answer(suite_file: str, target: TargetModel) -> None:
    tokenizer = tiny_tokenizer()
    suite = render_suite(suite_file, tokenizer, {})
    assert suite.ids == ["a/1", "b", "c/1"]
    reference = decode_reference(target, suite, SETTINGS)
    whole = reference.suite
    assert whole.ids == ["a/1", "b", "c/1", "a/2", "c/2", "a/3"] == [r.id for r in reference.trace.requests]
    assert whole.categories[3:] == ["writing"] * 3
    assert whole.asked[3:] == ["say that again", "rewrite it", "and again"]
    answers = {r.id: tokenizer.decode(r.output_ids, skip_special_tokens=True) for r in reference.trace.requests}
    told = {name: tokenizer.decode(ids) for name, ids in zip(whole.ids, whole.prompts, strict=True)}
    assert answers["a/1"] and answers["a/2"]
    first = f"<|im_start|>user\none two three<|im_end|>\n<|im_start|>assistant\n{answers['a/1']}<|im_end|>\n"
    second = f"{first}<|im_start|>user\nsay that again<|im_end|>\n<|im_start|>assistant\n"
    assert told["a/2"] == second
    assert told["a/3"] == (
        f"{second}{answers['a/2']}<|im_end|>\n<|im_start|>user\nand again<|im_end|>\n<|im_start|>assistant\n"
    )


def test_every_turn_is_drafted_for(suite_file: str, target: TargetModel, tmp_path: Path) -> None:
    suite = render_suite(suite_file, tiny_tokenizer(), {})
    (result,) = evaluate_suite(
        target, [ngram_contender(2, 3, [3])], suite, SETTINGS, target_name="tiny", directory=tmp_path / "out"
    )
    assert result["lossless"] == {**result["lossless"], "identical": 6, "checked": 6}
    assert not list((tmp_path / "out" / "traces").glob(".*"))
    assert (result["num_prompts"], result["num_conversations"]) == (6, 3)
    (trace,) = (tmp_path / "out" / "traces").glob("*ngram*")
    assert [(r.id, r.conversation) for r in read_trace(trace)] == [
        ("a/1", "a"), ("b", "b"), ("c/1", "c"), ("a/2", "a"), ("c/2", "c"), ("a/3", "a"),
    ]  # fmt: skip
    older = [json.dumps({**json.loads(line), "conversation": None}) for line in trace.read_text().splitlines()]
    trace.write_text("\n".join(re.sub(r'"conversation": null, ', "", line) for line in older))
    assert [r.conversation for r in read_trace(trace)] == [""] * 6  # written before conversations were kept


def test_an_estimate_draws_conversations_too(suite_file: str, target: TargetModel) -> None:
    """A conversation alone has an estimate and no interval, however many turns it has."""
    reference = decode_reference(target, render_suite(suite_file, tiny_tokenizer(), {}).first(1), SETTINGS)
    assert [r.conversation for r in reference.trace.requests] == ["a", "a", "a"]
    head = DraftLM.from_recipe(
        DraftLMOptions(type="draft_lm", start_layers=1), target, torch.arange(target.vocab_size), seed=0
    )
    for contender in (speculator_contender(head, "draft", [3]), ngram_contender(1, 2, [3])):
        estimate = estimator_of(target, contender, reference, SETTINGS)(3)
        assert estimate["renewal"] >= 1 and estimate["renewal_ci95"] is None


def test_first_prompts_bring_their_later_turns(suite_file: str, target: TargetModel) -> None:
    suite = render_suite(suite_file, tiny_tokenizer(), {}).first(2)
    assert decode_reference(target, suite, SETTINGS).suite.ids == ["a/1", "b", "a/2", "a/3"]


def test_conversation_ends_at_an_empty_answer_or_a_full_context(suite_file: str, target: TargetModel) -> None:
    tokenizer = tiny_tokenizer()
    suite = render_suite(suite_file, tokenizer, {})
    answers = decode_reference(target, suite, SETTINGS).trace.requests[:3]
    assert next_turn(suite, answers, max_length=1).prompts == []
    answers[0].output_ids = [tokenizer.eos_token_id]
    assert next_turn(suite, answers, target.max_length).ids == ["c/2"]
