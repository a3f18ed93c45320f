"""Rendered prompts of a suite, and later turns that wait for the target's own answers.

MT-Bench's second question follows an answer that only the target can give. The evaluation decodes the first turn
plainly, which it does anyway for the reference text, and renders the second one from what came out. Every contender
then decodes both as prompts of their own, so that all of them answer the very same questions.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from spec_train.data.answer_messages import answer_message
from spec_train.data.chat import render_prompt
from spec_train.data.rows import Conversation, DropReason, Message
from spec_train.decoding.trace import RequestTrace


@dataclass(frozen=True)
class FollowUp:
    """Turn `number` (from 1) of a conversation: everything up to the first empty answer. `parent`: the place in its
    suite of the prompt whose answer it needs. `stop_ids`: what the target stops at beside the tokenizer's eos."""

    conversation: Conversation
    number: int
    parent: int
    tokenizer: Any
    prompt_kwargs: dict[str, Any]
    stop_ids: Collection[int] = ()


@dataclass(frozen=True)
class Suite:
    """Prompts as token ids, rendered exactly as they are served. `asked`: the same prompts as text, for overlap with
    the training data. `follow_ups`: the later turns, which wait for the target's own answers. `left_out`: how many
    prompts could not be asked, by reason. `conversations`: that of each prompt, empty where every prompt is its own."""

    name: str
    ids: list[str]
    categories: list[str]
    prompts: list[list[int]]
    asked: list[str] = field(default_factory=list)
    follow_ups: list[FollowUp] = field(default_factory=list)
    left_out: Counter[str] = field(default_factory=Counter)
    conversations: list[str] = field(default_factory=list)

    def first(self, count: int | None) -> Suite:
        """The first `count` prompts with their later turns."""
        waiting = [f for f in self.follow_ups if count is None or f.parent < count]
        kept = (self.ids[:count], self.categories[:count], self.prompts[:count], self.asked[:count])
        return Suite(self.name, *kept, waiting, self.left_out, self.conversations[:count])

    def part(self, indices: Sequence[int]) -> dict[str, Any]:
        """The prompts at `indices` as one batch, in the decoders' words."""
        columns: dict[str, Sequence[Any]] = {"prompts": self.prompts, "ids": self.ids, "categories": self.categories}
        chosen: dict[str, Any] = {name: [column[i] for i in indices] for name, column in columns.items()}
        return {**chosen, "indices": list(indices), "batch_size": len(indices)}

    def joined(self, later: Suite) -> Suite:
        """These prompts and those of a later turn, after which nothing waits."""
        lists = (self.ids + later.ids, self.categories + later.categories, self.prompts + later.prompts)
        return Suite(
            self.name,
            *lists,
            self.asked + later.asked,
            left_out=self.left_out + later.left_out,
            conversations=self.conversations + later.conversations,
        )

    def name_conversations(self, requests: Sequence[RequestTrace]) -> None:
        """Note in the decoded `requests`, one a prompt, which conversation each belongs to."""
        for request, conversation in zip(requests, self.conversations, strict=False):
            request.conversation = conversation


def is_gap(message: Message) -> bool:
    """Whether this is the place of an answer that the target has yet to give."""
    return message["role"] == "assistant" and not message["content"] and not message.get("tool_calls")


def last_user_message(messages: Sequence[Message]) -> str:
    """The text of the user's last turn."""
    return next((str(message["content"]) for message in reversed(messages) if message["role"] == "user"), "")


def add_turn(suite: Suite, turn: FollowUp, max_length: int | None = None) -> None:
    """Render the turn into `suite` and let the one after it wait; one that the template refuses, or that fills
    `max_length`, is left out and counted."""
    messages = turn.conversation.messages
    gap = next((i for i, message in enumerate(messages) if is_gap(message)), len(messages))
    rendered = render_prompt(turn.tokenizer, messages[:gap], tools=turn.conversation.tools, **turn.prompt_kwargs)
    if isinstance(rendered, list) and max_length is not None and len(rendered) >= max_length:
        rendered = DropReason("the prompt leaves no room for an answer")
    if not isinstance(rendered, list):
        suite.left_out[str(rendered)] += 1
        return
    several = turn.number > 1 or gap < len(messages)
    suite.ids.append(f"{turn.conversation.id}/{turn.number}" if several else turn.conversation.id)
    suite.categories.append(turn.conversation.category)
    suite.prompts.append(rendered)
    suite.conversations.append(turn.conversation.id)
    suite.asked.append(last_user_message(messages[:gap]))
    if gap < len(messages):
        suite.follow_ups.append(replace(turn, number=turn.number + 1, parent=len(suite.prompts) - 1))


def next_turn(suite: Suite, answers: Sequence[RequestTrace], max_length: int) -> Suite:
    """The waiting turns of `suite` as prompts that hold the target's `answers` (one a prompt of `suite`) as messages,
    as a chat client sends them back. A conversation ends, and is counted, where an answer cannot be sent back, or where
    the next prompt would leave no room for one within `max_length`."""
    later = Suite(suite.name, [], [], [])
    for turn in suite.follow_ups:
        messages = list(turn.conversation.messages)
        gap = next(i for i, message in enumerate(messages) if is_gap(message))
        answer = answer_message(
            turn.tokenizer,
            suite.prompts[turn.parent],
            answers[turn.parent].output_ids,
            turn.stop_ids,
            tools=turn.conversation.tools,
            chat_template_kwargs=turn.prompt_kwargs.get("chat_template_kwargs"),
        )
        if not isinstance(answer, DropReason):
            answer = _sent_back(answer, messages[gap + 1 :])
        if isinstance(answer, DropReason):
            later.left_out[str(answer)] += 1
            continue
        messages[gap] = answer
        add_turn(later, replace(turn, conversation=replace(turn.conversation, messages=messages)), max_length)
    return later


def _sent_back(answer: Message, following: Sequence[Message]) -> Message | DropReason:
    """The answer where a chat can go on behind it: after a call with a tool's result, after text with a user's turn."""
    calls = answer.get("tool_calls", [])
    results = [message for message in following[: len(calls)] if message["role"] == "tool"]
    if bool(calls) != bool(following and following[0]["role"] == "tool") or len(results) < len(calls):
        return DropReason("a turn whose tool results do not answer the target's own calls")
    if not calls and not answer["content"].strip():
        return DropReason("a turn after an empty answer, or one cut off within its thought")
    named = [
        {**call, "id": result.get("tool_call_id", call["id"])} for call, result in zip(calls, results, strict=True)
    ]
    return {**answer, "tool_calls": named} if calls else answer
