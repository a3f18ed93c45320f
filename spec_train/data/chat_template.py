"""A chat template as a black box: which form of a message it prints, and how it opens and ends an assistant turn.

Templates differ in what they read: content as text or as a list of parts, null or empty content beside a call, thoughts
under one of several names. vLLM finds the form of the content in the template's syntax tree; here small chats are
rendered once per template, and what stands in the text is what the template reads.
"""

from __future__ import annotations

import datetime
import json
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

from jinja2 import TemplateError

from spec_train.data.rows import Message
from spec_train.errors import UserError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

# What a template raises on purpose, and what its expressions raise on values that they do not fit.
REFUSALS = (TemplateError, TypeError, ValueError, LookupError, AttributeError, ArithmeticError, RecursionError)
# Names under which templates read a thought. vLLM gives the first two together; the others belong to single families.
THOUGHT_NAMES = (("reasoning_content", "reasoning"), ("thinking",), ("thought",), ("tool_plan",))

_OWN_ARGUMENTS = {
    "tokenize",
    "add_generation_prompt",
    "continue_final_message",
    "tools",
    "conversation",
    "chat_template",
}
_NOT_FOR_TEMPLATES = ("weight", "parts", "reasoning_content")
_MARKS = "\ue000\ue001"
_PRINTED_LIST = re.compile(rf"""["']text["']\s*:\s*["']{_MARKS[0]}""")  # parts printed as the list that they are


@dataclass(frozen=True)
class _Reading:
    """What a template prints of a message.

    as_text, as_parts   roles whose content it prints when it comes as a string, and as a list of text parts
    null_call_content   a turn that only calls tools must have null content, else its calls are left out
    json_arguments      arguments of calls must come as JSON text, and not as objects
    thought_names       under which names it prints the thought of an answer, and of a turn that calls tools
    """

    as_text: frozenset[str] = frozenset()
    as_parts: frozenset[str] = frozenset()
    null_call_content: bool = False
    json_arguments: bool = False
    thought_names: tuple[tuple[str, ...], tuple[str, ...]] = ((), ())


@dataclass(frozen=True)
class Edges:
    """How a template opens and ends an assistant turn of plain text.

    header   what the generation prompt and a rendered turn have in common before the answer
    extras   what the generation prompt has after `header` and a rendered turn lacks (an opened or empty thought)
    lead     what a rendered turn has before the answer and the generation prompt lacks (often a blank): written by the
             model
    tail     text after the last answer of a chat
    end      the token that ends a turn wherever it stands in a chat; None where there is none
    inner_end  the token that ends a turn which others follow, where the last one of a chat ends with another
    marks    every token that stands for more than its text: those added to the vocabulary, but for runs of blanks
    """

    header: str = ""
    extras: tuple[str, ...] = ()
    lead: str = ""
    tail: str = ""
    end: int | None = None
    inner_end: int | None = None
    marks: frozenset[int] = frozenset()


class ChatTemplate:
    """One tokenizer's template with the arguments that a row is rendered with."""

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase, tools: list[dict[str, Any]] | None, kwargs: Mapping[str, Any]
    ) -> None:
        if tokenizer.chat_template is None:
            raise UserError(
                "the tokenizer has no chat template and the data holds chats: use an instruct model, name a template "
                'file in target.chat_template, or train on plain text rows ({"text": ...})'
            )
        if clash := sorted(_OWN_ARGUMENTS & kwargs.keys()):
            raise UserError(f"target.chat_template_kwargs: {clash[0]} is set by spec-train itself; remove it")
        self.tokenizer, self.tools, self.kwargs = tokenizer, tools, kwargs
        try:
            self.source = str(tokenizer.get_chat_template(tools=tools))
        except ValueError as error:
            raise UserError(f"target: no chat template can be chosen: {' '.join(str(error).split())}") from None
        key = (self.source, json.dumps(dict(kwargs), sort_keys=True, default=str))
        known = _KNOWN.setdefault(tokenizer, {})
        if key not in known:
            self._reading = _Reading()
            self._reading = self._read()
            known[key] = (self._reading, self._find_edges())
        self._reading, self.edges = known[key]

    def text(self, messages: Sequence[Message], add_generation_prompt: bool = False, with_tools: bool = True) -> str:
        """The rendered chat. Raises one of REFUSALS for a chat that the template does not take."""
        given = [self._given(message) for message in messages]
        return self._apply(given, add_generation_prompt, self.tools if with_tools else None)

    def try_text(
        self, messages: Sequence[Message], add_generation_prompt: bool = False, with_tools: bool = True
    ) -> str | None:
        """`text`, or None for a chat that the template refuses: not every prefix or change of a legal chat is legal."""
        if not messages:
            return None
        try:
            return self.text(messages, add_generation_prompt, with_tools)
        except REFUSALS:
            return None

    def endings(self, stop_ids: Collection[int]) -> list[str]:
        """Text of the tokens that end an assistant turn."""
        ids = {*stop_ids, *(token for token in (self.edges.end, self.edges.inner_end) if token is not None)}
        return [text for token in sorted(ids) if (text := str(self.tokenizer.convert_ids_to_tokens(token)))]

    def prints_thoughts(self, message: Message) -> bool:
        """Whether the template prints the thought of such a turn anywhere at all."""
        return bool(self._reading.thought_names[bool(message.get("tool_calls"))])

    # ------------------------------------------------------------------------------------------ messages

    def _apply(self, given: list[Message], add_generation_prompt: bool, tools: list[dict[str, Any]] | None) -> str:
        rendered = self.tokenizer.apply_chat_template(
            given,
            tools=tools,
            chat_template=self.source,
            tokenize=False,
            add_generation_prompt=add_generation_prompt,
            **self.kwargs,
        )
        return str(rendered)

    def _given(self, message: Message) -> Message:
        """The message in the form that the template prints."""
        given = {key: value for key, value in message.items() if key not in _NOT_FOR_TEMPLATES}
        given["content"] = self._content(message)
        if thought := message.get("reasoning_content"):
            calling = bool(message.get("tool_calls"))
            names = self._reading.thought_names[calling] or THOUGHT_NAMES[0]
            given.update(dict.fromkeys(names, thought))
        if message.get("tool_calls") and self._reading.json_arguments:
            given["tool_calls"] = [_with_json_arguments(call) for call in message["tool_calls"]]
        return given

    def _content(self, message: Message) -> Any:
        role, text, parts = message["role"], message["content"], message.get("parts")
        if not text and message.get("tool_calls") and self._reading.null_call_content:
            return None
        wants_parts = role in self._reading.as_parts and (parts is not None or role not in self._reading.as_text)
        if not wants_parts:
            return text
        return [{"type": "text", "text": part} for part in (parts or [text]) if part]

    # ------------------------------------------------------------------------------------------ probes

    def _probe(self, messages: list[Message], add_generation_prompt: bool = False) -> str:
        """A small chat rendered without tools; empty where the template refuses it."""
        try:
            return self._apply(messages, add_generation_prompt, None)
        except REFUSALS:
            return ""

    def _read(self) -> _Reading:
        mark = _MARKS[0]
        user: Message = {"role": "user", "content": "a"}
        if mark not in self._probe([{"role": "user", "content": mark}]):
            user["content"] = [{"type": "text", "text": "a"}]
        # vLLM gives a call empty text and an object: another form is taken only where that one does not show the call.
        forms = [("", {}), (None, {}), ("", "{}"), (None, "{}")]
        content, arguments = next((f for f in forms if mark in self._probe([user, _call(mark, *f)])), forms[0])
        call = _call("f", content, arguments)
        before: dict[str, list[Message]] = {"system": [], "user": [], "assistant": [user], "tool": [user, call]}
        as_text, as_parts = set(), set()
        for role, asked in before.items():
            after = [user] if role == "system" else []
            if mark in self._probe([*asked, {"role": role, "content": mark}, *after]):
                as_text.add(role)
            in_parts = self._probe([*asked, {"role": role, "content": [{"type": "text", "text": mark}]}, *after])
            if mark in in_parts and not _PRINTED_LIST.search(in_parts):
                as_parts.add(role)
        answer: Message = {"role": "assistant", "content": "b"}
        names = [
            next((n for n in THOUGHT_NAMES if mark in self._probe([user, {**turn, **dict.fromkeys(n, mark)}])), ())
            for turn in (answer, call)
        ]
        return _Reading(
            frozenset(as_text), frozenset(as_parts), content is None, arguments == "{}", (names[0], names[1])
        )

    def _find_edges(self) -> Edges:
        mark, other = _MARKS[0], _MARKS[1]
        user, answer = {"role": "user", "content": "a"}, {"role": "assistant", "content": mark}
        asked = self.try_text([user], with_tools=False) or ""  # the same for every row, whatever its tools
        prompt = self.try_text([user], add_generation_prompt=True, with_tools=False) or ""
        last = self.try_text([user, answer], with_tools=False) or ""
        inner = self.try_text([user, answer, {"role": "user", "content": other}], with_tools=False) or ""
        before_last, _, tail = last.partition(mark)
        before_inner, _, rest = inner.partition(mark)
        gap = rest.partition(other)[0]
        shared = min(common_prefix(prompt, before_last), common_prefix(prompt, before_inner) if inner else len(prompt))
        header = prompt[min(common_prefix(prompt, asked), shared) : shared]
        extras = {prompt[common_prefix(prompt, before) :] for before in (before_last, before_inner) if before}
        lead = before_last[shared:] if before_last.startswith(prompt[:shared]) else ""
        added = self.tokenizer.added_tokens_decoder.items()
        marks = frozenset(int(token) for token, text in added if str(text).strip("\u2581 \t\r\n"))
        end, inner_end = self._ends(tail, gap, marks)
        return Edges(header, tuple(sorted(extras - {""}, key=len)), lead, tail, end, inner_end, marks)

    def _ends(self, tail: str, gap: str, known: frozenset[int]) -> tuple[int | None, int | None]:
        """(the token that ends a turn wherever it stands, the one that ends it before others only)."""
        tail_ids, gap_ids = (list(self.tokenizer(text, add_special_tokens=False)["input_ids"]) for text in (tail, gap))
        length = next((i for i, pair in enumerate(zip(tail_ids, gap_ids, strict=False)) if pair[0] != pair[1]), None)
        both = gap_ids[: min(len(tail_ids), len(gap_ids)) if length is None else length]
        if specials := [token for token in both if token in known]:
            return specials[-1], None
        # Another token ends the last turn than the inner ones: each text then begins with its own.
        if tail.strip() and gap.strip():
            first = [
                next((token for token in ids if token in known or str(self.tokenizer.decode([token])).strip()), None)
                for ids in (tail_ids, gap_ids)
            ]
            if first[0] in known and first[1] in known:
                return None, first[1]
        return None, None


_KNOWN: WeakKeyDictionary[Any, dict[tuple[str, str], tuple[_Reading, Edges]]] = WeakKeyDictionary()


@dataclass(frozen=True)
class _Day:
    """What templates call for the time, on one day."""

    date: str

    def __call__(self, form: str) -> str:
        return datetime.datetime.fromisoformat(self.date).strftime(form)


def on_day(kwargs: Mapping[str, Any] | None, date: str | None) -> dict[str, Any]:
    """The template's arguments with the day that it is to print, where one is given."""
    return {**({} if date is None else {"strftime_now": _Day(date)}), **(kwargs or {})}


def common_prefix(a: str, b: str) -> int:
    """How many leading characters two texts share."""
    low, high = 0, min(len(a), len(b))
    while low < high:
        middle = (low + high + 1) // 2
        if a[low:middle] == b[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low


def _call(name: str, content: str | None, arguments: Any) -> Message:
    call = {"id": "abcdefghi", "type": "function", "function": {"name": name, "arguments": arguments}}
    return {"role": "assistant", "content": content, "tool_calls": [call]}


def _with_json_arguments(call: dict[str, Any]) -> dict[str, Any]:
    function = call["function"]
    if isinstance(function["arguments"], str):
        return call
    return {**call, "function": {**function, "arguments": json.dumps(function["arguments"], ensure_ascii=False)}}
