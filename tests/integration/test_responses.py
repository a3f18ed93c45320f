"""The target's own answers: what it would say, turn by turn, in any batch, resumed without a trace."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from spec_train.batch import FeatureSpec
from spec_train.data.chat import load_tokenizer, render_prompt
from spec_train.data.features import FeatureStore, StoreHeader
from spec_train.data.responses import AnswerSettings, Capture, generate_responses
from spec_train.data.rows import Conversation
from spec_train.decoding.engine import plain_decode
from spec_train.decoding.sampling import Sampling
from spec_train.target import TargetModel
from tests.tiny import tiny_model

CHATS = [
    Conversation("a", [{"role": "user", "content": "one"}, {"role": "assistant", "content": "not the target's words"},
                       {"role": "user", "content": "and then"}]),
    Conversation("b", [{"role": "user", "content": "a much longer question than the other one"}]),
    Conversation("c", [{"role": "user", "content": "three"}]),
]  # fmt: skip


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> tuple[TargetModel, Any]:
    path = str(tiny_model("llama", tmp_path_factory.mktemp("target")))
    return TargetModel.load(path), load_tokenizer(path)


def settings(**changes: Any) -> AnswerSettings:
    values = {"sampling": Sampling(), "max_new_tokens": 12, "max_length": 200, "batch_size": 2, "prompt_kwargs": {}}
    return AnswerSettings(**{**values, **changes})


def test_answers_are_the_targets_greedy_text_in_every_turn(place: tuple[TargetModel, Any], tmp_path: Path) -> None:
    """Turn 2 is asked on top of the target's own turn 1, not of the data's (D09)."""
    target, tokenizer = place
    documents, dropped = generate_responses(target, tokenizer, CHATS, settings(), tmp_path)
    assert not dropped
    assert [document.id for document in documents] == ["a", "a#turn2", "b", "c"]
    for document in documents:
        ((start, end),) = document.spans
        assert end == len(document.input_ids)
        plain = plain_decode(target, [document.input_ids[:start]], sampling=Sampling(), max_new_tokens=12)
        assert document.input_ids[start:] == plain.requests[0].output_ids
    first = tokenizer.decode(documents[0].input_ids[documents[0].spans[0][0] :], skip_special_tokens=True)
    asked = [*CHATS[0].messages[:1], {"role": "assistant", "content": first}, CHATS[0].messages[2]]
    assert documents[1].input_ids[: documents[1].spans[0][0]] == render_prompt(tokenizer, asked)


def test_a_long_prompt_does_not_shorten_its_neighbours(place: tuple[TargetModel, Any], tmp_path: Path) -> None:
    target, tokenizer = place
    longest = len(render_prompt(tokenizer, CHATS[1].messages))
    documents, _ = generate_responses(
        target, tokenizer, CHATS[1:], settings(max_length=longest + 4, max_new_tokens=12), tmp_path
    )
    lengths = {document.id: document.num_response_tokens for document in documents}
    assert lengths["b"] <= 4
    assert lengths["c"] == 12 or documents[1].input_ids[-1] in target.eos_token_ids


def test_a_prompt_that_fills_the_length_is_counted(place: tuple[TargetModel, Any], tmp_path: Path) -> None:
    target, tokenizer = place
    longest = len(render_prompt(tokenizer, CHATS[1].messages))
    documents, dropped = generate_responses(target, tokenizer, CHATS[1:], settings(max_length=longest), tmp_path)
    assert [document.id for document in documents] == ["c"]
    assert dict(dropped) == {"prompt fills data.max_length": 1}


def test_sampled_answers_do_not_depend_on_the_batch(place: tuple[TargetModel, Any], tmp_path: Path) -> None:
    target, tokenizer = place
    sampling = Sampling(temperature=0.9, top_p=0.95, seed=3)
    texts = []
    for size in (1, 3):
        documents, _ = generate_responses(
            target, tokenizer, CHATS, settings(sampling=sampling, batch_size=size), tmp_path / str(size)
        )
        texts.append([document.input_ids for document in documents])
    assert texts[0] == texts[1]
    greedy, _ = generate_responses(target, tokenizer, CHATS, settings(), tmp_path / "greedy")
    prompt = documents[2].spans[0][0]
    assert documents[2].input_ids[:prompt] == greedy[2].input_ids[:prompt]
    assert documents[2].input_ids[prompt:] != greedy[2].input_ids[prompt:]


@pytest.mark.parametrize("changes", [{"top_k": 2}, {"top_p": 0.3}, {"seed": 4}, {"temperature": 0.3}])
def test_every_setting_of_the_sampling_counts(
    changes: dict[str, Any], place: tuple[TargetModel, Any], tmp_path: Path
) -> None:
    """Each draw is the one that the target makes by itself with these settings, and another without them."""
    target, tokenizer = place
    base = Sampling(temperature=1.5, seed=3)
    sampling = replace(base, **changes)
    documents, _ = generate_responses(target, tokenizer, CHATS[1:], settings(sampling=sampling), tmp_path)
    for index, document in enumerate(documents):
        start = document.spans[0][0]
        drawn = [
            target.generate([document.input_ids[:start]], replace(s, seed=s.seed * 1009), 12, request_indices=[index])[
                0
            ].output_ids
            for s in (sampling, base)
        ]
        assert document.input_ids[start:] == drawn[0] != drawn[1]


def test_only_unfinished_batches_are_made_again(place: tuple[TargetModel, Any], tmp_path: Path) -> None:
    """A lost part, and one whose states are lost, are made anew; the others are read back (D06, D08)."""
    target, tokenizer = place
    header = StoreHeader("t", "float32", (1, 2, 4), target.hidden_size, "float32")

    def run() -> list[list[int]]:
        capture = Capture(FeatureStore(tmp_path / "states", header), FeatureSpec((1, 2, 4)), torch.float32)
        documents, _ = generate_responses(
            target, tokenizer, CHATS, settings(batch_size=1), tmp_path / "parts", capture=capture
        )
        assert all(capture.store.holds(document) for document in documents)
        return [document.input_ids for document in documents]

    texts = run()
    parts = sorted((tmp_path / "parts").glob("part-*.jsonl"))
    assert len(parts) == 4
    parts[0].unlink()
    (tmp_path / "states" / "part-00002.safetensors").unlink()
    stamps = {part: part.stat().st_mtime_ns for part in parts[1:]}
    assert run() == texts
    changed = {part.name for part in parts if part.stat().st_mtime_ns != stamps.get(part)}
    assert changed == {"part-00000.jsonl", "part-00002.jsonl"}
