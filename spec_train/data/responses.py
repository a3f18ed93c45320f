"""The target's own answers: generated as they will be served, stored as token ids, never tokenised again.

Answers are made a batch at a time, sorted by length, and every finished batch is a file of its own: an interrupted run
goes on with the next one. Hidden states can be kept as they are computed, which saves a pass over all the text.

The target answers wherever the row's assistant speaks, and after a tool's last result. Its answer then stands in the
history as the message that its own server would make of it. A tool's result needs the call that it answers: where the
target has called the same tools with equal arguments (as JSON values), the result stands behind its own call; elsewhere
the row's call stands before it, as context that is not learned from.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from spec_train.batch import FeatureSpec
from spec_train.data.answer_messages import answer_message, same_calls
from spec_train.data.chat import render_prompt
from spec_train.data.documents import Document, read_documents, write_documents
from spec_train.data.features import DocumentFeatures, FeatureStore
from spec_train.data.prompts import Conversation
from spec_train.data.rows import DropReason, Message
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
    notes: Counter[str] | None = None,
) -> tuple[list[Document], Counter[str]]:
    """One document per answer, in the order of `conversations`, and how many answers were left out for which reason:
    together they are all the places where the rows let an assistant speak.

    A conversation of several turns gives one document a turn: the prompt holds the target's own earlier answers,
    rendered anew as a server would. `on_progress(answers, tokens)` is called after every batch. `notes` counts what is
    kept though something differs from what a server would see.
    """
    notes = Counter() if notes is None else notes
    directory.mkdir(parents=True, exist_ok=True)
    documents: dict[str, Document] = {}
    dropped: Counter[str] = Counter()
    order = {conversation.id: place for place, conversation in enumerate(conversations)}
    histories = {conversation.id: _history(conversation) for conversation in conversations}
    turns = max((len(history.steps) for history in histories.values()), default=0)
    index = 0
    for turn in range(turns):
        asking = [c for c in conversations if histories[c.id].open_for(turn)]
        prompts: list[tuple[Conversation, list[int]]] = []
        for conversation in asking:
            history = histories[conversation.id]
            history.messages += history.steps[turn].asked
            ids = render_prompt(
                tokenizer, history.messages, tools=conversation.tools, notes=notes, **settings.prompt_kwargs
            )
            if isinstance(ids, list) and len(ids) >= min(settings.max_length, target.max_length):
                ids = DropReason("prompt fills data.max_length")
            if isinstance(ids, list):
                prompts.append((conversation, ids))
            else:
                dropped[str(ids)] += history.close(turn)
        for batch in _batches(prompts, settings.batch_size):
            part = directory / f"part-{index:05d}.jsonl"
            answers = _finished(part, batch, capture)
            if answers is None:
                answers = _answer(target, batch, turn, order, settings, part, capture)
            for (conversation, ids), document in zip(batch, answers, strict=True):
                documents[document.id] = document
                history = histories[conversation.id]
                if turn + 1 < len(history.steps):
                    message = answer_message(
                        tokenizer,
                        ids,
                        document.input_ids[len(ids) :],
                        target.eos_token_ids,
                        tools=conversation.tools,
                        chat_template_kwargs=settings.prompt_kwargs.get("chat_template_kwargs"),
                    )
                    context = _context(history.steps[turn], history.steps[turn + 1], message, notes)
                    if isinstance(context, DropReason):
                        dropped[str(context)] += history.close(turn + 1)
                    else:
                        history.messages += context
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


@dataclass(frozen=True)
class _Step:
    """What is said before the target speaks, and the row's own assistant turns in its place (none at the row's end)."""

    asked: list[Message]
    recorded: list[Message]


@dataclass
class _History:
    """A conversation as it grows: every step at which the target speaks, and the messages so far."""

    steps: list[_Step]
    messages: list[Message]
    closed: bool = False

    def open_for(self, turn: int) -> bool:
        return not self.closed and turn < len(self.steps)

    def close(self, turn: int) -> int:
        """End it before step `turn`; how many answers are left out."""
        self.closed = True
        return len(self.steps) - turn


def _history(conversation: Conversation) -> _History:
    """Everything up to an assistant turn is asked together; so is what follows the last one, but for system turns."""
    steps: list[_Step] = []
    asked: list[Message] = []
    for message in conversation.messages:
        if message["role"] != "assistant":
            asked.append(message)
        elif asked:
            steps.append(_Step(asked, [message]))
            asked = []
        elif steps:
            steps[-1].recorded.append(message)
    if any(message["role"] != "system" for message in asked):
        steps.append(_Step(asked, []))
    return _History(steps, [])


def _context(
    step: _Step, following: _Step, answer: Message | DropReason, notes: Counter[str]
) -> list[Message] | DropReason:
    """What stands in the history for the target's `answer` to `step`, when the row goes on with `following`."""
    calls = [] if isinstance(answer, DropReason) else answer.get("tool_calls", [])
    if following.asked[0]["role"] == "tool":
        recorded = [call for message in step.recorded for call in message.get("tool_calls", [])]
        if not recorded:
            return DropReason("a turn after a tool's result that no call stands before")
        if not isinstance(answer, DropReason) and same_calls(calls, recorded):
            return [{**answer, "tool_calls": recorded}]  # equal, and the results name the row's calls by their ids
        notes["tool results that stand behind the row's own call: the target called otherwise"] += 1
        return step.recorded
    if isinstance(answer, DropReason):
        return answer
    if calls:
        return DropReason("a turn after the target's own call of a tool, whose result the row does not hold")
    if not answer["content"].strip():
        return DropReason("a turn after an empty answer, or one cut off within its thought")
    return [answer]


def _batches(
    prompts: list[tuple[Conversation, list[int]]], size: int
) -> Iterator[list[tuple[Conversation, list[int]]]]:
    ordered = sorted(prompts, key=lambda pair: (len(pair[1]), pair[0].id))
    for start in range(0, len(ordered), size):
        yield ordered[start : start + size]


def _name(conversation: Conversation, turn: int) -> str:
    return conversation.id if turn == 0 else f"{conversation.id}#turn{turn + 1}"
