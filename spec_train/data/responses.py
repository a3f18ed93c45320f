"""The target's own answers: generated as they will be served, stored as token ids, never tokenised again.

Answers are made a batch at a time, sorted by length, and every finished batch is a file of its own: an interrupted run
goes on with the next one. Hidden states can be kept as they are computed, which saves a pass over all the text.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from spec_train.batch import FeatureSpec
from spec_train.data.chat import render_prompt
from spec_train.data.documents import Document, read_documents, write_documents
from spec_train.data.features import DocumentFeatures, FeatureStore
from spec_train.data.prompts import Conversation
from spec_train.decoding.sampling import Sampling
from spec_train.target import TargetModel


@dataclass(frozen=True)
class Capture:
    """Where hidden states go while answers are generated."""

    store: FeatureStore
    spec: FeatureSpec
    dtype: torch.dtype


@dataclass(frozen=True)
class AnswerSettings:
    """How answers are made. `max_length` bounds prompt + answer; `prompt_kwargs` go to the chat template's renderer."""

    sampling: Sampling
    max_new_tokens: int
    max_length: int
    batch_size: int
    prompt_kwargs: dict[str, Any]


def generate_responses(
    target: TargetModel,
    tokenizer: Any,
    conversations: Sequence[Conversation],
    settings: AnswerSettings,
    directory: Path,
    *,
    capture: Capture | None = None,
    on_progress: Callable[[int, int], None] | None = None,
) -> tuple[list[Document], Counter[str]]:
    """One document per answer, in the order of `conversations`, and how many answers were left out for which reason.

    A conversation of several user turns gives one document a turn: the prompt holds the target's own earlier answers,
    rendered anew as a server would. `on_progress(answers, tokens)` is called after every batch.
    """
    directory.mkdir(parents=True, exist_ok=True)
    documents: dict[str, Document] = {}
    dropped: Counter[str] = Counter()
    order = {conversation.id: place for place, conversation in enumerate(conversations)}
    histories = {conversation.id: _history(conversation) for conversation in conversations}
    turns = max((len(history.user_turns) for history in histories.values()), default=0)
    index = 0
    for turn in range(turns):
        asking = [c for c in conversations if histories[c.id].open_for(turn)]
        prompts: list[tuple[Conversation, list[int]]] = []
        for conversation in asking:
            history = histories[conversation.id]
            history.messages += history.user_turns[turn]
            ids = render_prompt(tokenizer, history.messages, tools=conversation.tools, **settings.prompt_kwargs)
            if not isinstance(ids, list):
                dropped[str(ids)] += 1
                history.closed = True
            elif len(ids) >= min(settings.max_length, target.max_length):
                dropped["prompt fills data.max_length"] += 1
                history.closed = True
            else:
                prompts.append((conversation, ids))
        for batch in _batches(prompts, settings.batch_size):
            part = directory / f"part-{index:05d}.jsonl"
            answers = _finished(part, batch, capture)
            if answers is None:
                answers = _answer(target, batch, turn, order, settings, part, capture)
            for (conversation, ids), document in zip(batch, answers, strict=True):
                documents[document.id] = document
                history = histories[conversation.id]
                if turn + 1 < len(history.user_turns):
                    text = tokenizer.decode(document.input_ids[len(ids) :], skip_special_tokens=True)
                    history.messages.append({"role": "assistant", "content": text})
            if on_progress:
                on_progress(len(batch), sum(document.num_response_tokens for document in answers))
            index += 1
    ordered = [documents[name] for c in conversations for t in range(turns) if (name := _name(c, t)) in documents]
    return ordered, dropped


def _answer(
    target: TargetModel,
    batch: Sequence[tuple[Conversation, list[int]]],
    turn: int,
    order: dict[str, int],
    settings: AnswerSettings,
    part: Path,
    capture: Capture | None,
) -> list[Document]:
    """Generate one batch and write it: features first, then the part file that declares it finished."""
    answers = target.generate(
        [ids for _, ids in batch],
        replace(settings.sampling, seed=settings.sampling.seed * 1009 + turn),
        [min(settings.max_new_tokens, settings.max_length - len(ids)) for _, ids in batch],
        # Each conversation draws from its own generator, whatever batch it sits in.
        request_indices=[order[conversation.id] for conversation, _ in batch],
        capture=capture.spec if capture else None,
        capture_dtype=capture.dtype if capture else torch.bfloat16,
    )
    documents = [
        Document(_name(c, turn), ids + a.output_ids, [(len(ids), len(ids) + len(a.output_ids))], c.category, c.source)
        for (c, ids), a in zip(batch, answers, strict=True)
    ]
    if capture:
        states = [
            DocumentFeatures(a.features.aux_hidden, a.features.last_hidden, a.target_lse)
            for a in answers
            if a.features is not None
        ]
        capture.store.add(part.stem, zip(documents, states, strict=True))
    write_documents(part, documents)
    return documents


def _finished(
    part: Path, batch: Sequence[tuple[Conversation, list[int]]], capture: Capture | None
) -> list[Document] | None:
    """The documents of a finished batch, or None. One whose features should be there and are not is unfinished."""
    if not part.is_file():
        return None
    documents = read_documents(part)
    same = len(documents) == len(batch) and all(
        document.input_ids[: len(ids)] == ids for document, (_, ids) in zip(documents, batch, strict=True)
    )
    if not same or (capture and not all(capture.store.holds(document) for document in documents)):
        return None
    return documents


@dataclass
class _History:
    """A conversation as it grows: user turns still to ask, and the messages so far."""

    user_turns: list[list[dict[str, Any]]]
    messages: list[dict[str, Any]]
    closed: bool = False

    def open_for(self, turn: int) -> bool:
        return not self.closed and turn < len(self.user_turns)


def _history(conversation: Conversation) -> _History:
    """Everything up to an assistant turn is asked together; the data's own assistant turns are not used."""
    turns: list[list[dict[str, Any]]] = []
    asked: list[dict[str, Any]] = []
    for message in conversation.messages:
        if message["role"] == "assistant":
            if asked:
                turns.append(asked)
            asked = []
        else:
            asked.append(message)
    if any(message["role"] == "user" for message in asked):
        turns.append(asked)
    return _History(turns, [])


def _batches(
    prompts: list[tuple[Conversation, list[int]]], size: int
) -> Iterator[list[tuple[Conversation, list[int]]]]:
    ordered = sorted(prompts, key=lambda pair: (len(pair[1]), pair[0].id))
    for start in range(0, len(ordered), size):
        yield ordered[start : start + size]


def _name(conversation: Conversation, turn: int) -> str:
    return conversation.id if turn == 0 else f"{conversation.id}#turn{turn + 1}"
