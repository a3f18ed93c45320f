"""Generated conversations, and what a template lets the target write of them, found without our rule for spans.

Every text holds words that occur nowhere else in its conversation, first and last, so that its place in any rendering
is known, whatever the template does around it.
"""

from __future__ import annotations

import json
import random
from dataclasses import dataclass, field
from typing import Any

from jinja2 import TemplateError
from transformers import PreTrainedTokenizerFast

from spec_train.data.chat import render
from spec_train.data.documents import Document
from spec_train.data.rows import Conversation, DropReason, conversation_from_row, usable_as_is
from tests.templates import Family

KINDS = (
    "plain",
    "system",
    "unicode",
    "newlines",
    "empty answer",
    "unsupervised turn",
    "thoughts",
    "thoughts in the text",
    "call",
    "text and call",
    "calls in a row",
    "parallel calls",
    "nested arguments",
    "thoughts and calls",
    "ends with a call",
)
AGENT_KINDS = KINDS[8:]
_FILLER = ("the sum of it", "of two parts", "is not so far", "in a new form", "as we said", "there are three")
_UNICODE = ("über naïve", "数学の答え", "ответ готов", "🙂🙃 ok", "e\u0301 combined", "नमस्ते")
_PARAMETERS = {"type": "object", "properties": {"a": {"type": "string", "description": "first"}}, "required": ["a"]}


class _Writer:
    """Texts of one conversation."""

    def __init__(self, kind: str, seed: int) -> None:
        self.random = random.Random(f"{kind}-{seed}")
        self.kind, self.words, self.calls = kind, 0, 0

    def word(self) -> str:
        self.words += 1
        return f"zq{self.words:03d}"

    def text(self) -> str:
        middle = self.random.choice(_UNICODE if self.kind == "unicode" else _FILLER)
        return f"{self.word()} {middle} {self.word()}"

    def answer(self) -> str:
        before, after = "", ""
        if self.kind == "newlines":
            before, after = (self.random.choice(("", "\n", "\n\n", "  ", " \n")) for _ in range(2))
            return f"{before}{self.text()}\n{self.text()}\n\n  {self.text()}{after}"
        if self.kind == "thoughts in the text":
            return f"<think>\n{self.text()}\n</think>\n\n{self.text()}"
        return self.text()

    def user(self) -> dict[str, Any]:
        return {"role": "user", "content": self.text()}

    def assistant(self, calls: int = 0) -> dict[str, Any]:
        turn: dict[str, Any] = {"role": "assistant", "content": self.answer()}
        if calls:
            turn["tool_calls"] = [self.call() for _ in range(calls)]
            if self.kind != "text and call":
                turn["content"] = ""
        if self.kind in ("thoughts", "thoughts and calls"):
            turn["reasoning_content"] = self.text()
        return turn

    def call(self) -> dict[str, Any]:
        self.calls += 1
        arguments: dict[str, Any] = {"a": self.text()}
        if self.kind == "nested arguments":
            inner = {
                "deep": [{"x": self.word(), "n": 3, "f": 0.5}, [], None, True],
                "text": 'say "' + self.word() + '"',
            }
            arguments = {"a": inner, "b": [self.word(), {}], "c": "line\nbreak " + self.word()}
        name = self.random.choice(("add", "look_up"))
        function = {"name": name, "arguments": arguments}
        return {"id": f"call{self.calls:05d}", "type": "function", "function": function}

    def results(self, turn: dict[str, Any]) -> list[dict[str, Any]]:
        return [
            {"role": "tool", "tool_call_id": call["id"], "name": call["function"]["name"], "content": self.text()}
            for call in turn["tool_calls"]
        ]


def row(kind: str, seed: int) -> dict[str, Any]:
    """A row of a data set; the same kind and seed give the same row."""
    writer = _Writer(kind, seed)
    messages: list[dict[str, Any]] = []
    if kind == "system" or (kind in AGENT_KINDS and writer.random.random() < 0.5):
        messages.append({"role": "system", "content": writer.text()})
    if kind not in AGENT_KINDS:
        for _ in range(writer.random.randint(2, 3)):
            messages += [writer.user(), writer.assistant()]
        if kind == "empty answer":
            messages[writer.random.choice((1, -1))]["content"] = writer.random.choice(("", "\n", " \n\n"))
        if kind == "unsupervised turn":
            messages[1]["weight"] = 0
        return {"messages": messages}
    for _ in range(writer.random.randint(1, 2)):
        messages.append(writer.user())
        for _ in range(2 if kind in ("calls in a row", "thoughts and calls") else 1):
            turn = writer.assistant(calls=2 if kind == "parallel calls" else 1)
            messages += [turn, *writer.results(turn)]
        messages.append(writer.assistant())
    if kind == "ends with a call":
        messages += [writer.user(), writer.assistant(calls=1)]
    tools = [
        {"type": "function", "function": {"name": name, "description": "adds " + name, "parameters": _PARAMETERS}}
        for name in ("add", "look_up")
    ]
    return {"messages": messages, "tools": tools}


# ------------------------------------------------------------------------------------------------ the oracle


@dataclass
class Outcome:
    """What became of one row: kept and right, dropped for a reason, or wrong in these ways."""

    dropped: str = ""
    wrong: list[str] = field(default_factory=list)

    @property
    def right(self) -> bool:
        return not self.dropped and not self.wrong


def outcome(tokenizer: PreTrainedTokenizerFast, family: Family, data: dict[str, Any]) -> Outcome:
    """Render a row as training does and hold it against what the target would write."""
    conversation = conversation_from_row(data)
    if isinstance(conversation, Conversation):
        conversation = usable_as_is(conversation)
    if isinstance(conversation, DropReason):
        return Outcome(dropped=str(conversation))
    stop_ids = [tokenizer.convert_tokens_to_ids(stop) for stop in family.stops]
    missing = set(family.stops) - set(tokenizer.convert_ids_to_tokens(stop_ids))
    assert not missing, f"{family.name}: the tokenizer has no {missing}"
    document = render(tokenizer, conversation, max_length=1_000_000, stop_ids=stop_ids)
    if isinstance(document, DropReason):
        return Outcome(dropped=str(document))
    given = {**data, "messages": [_as_read(message, family) for message in data["messages"]]}
    return Outcome(wrong=differences(tokenizer, family.stops, given, document))


def _as_read(message: dict[str, Any], family: Family) -> dict[str, Any]:
    """A message in the form that the family's template reads."""
    given = {family.thought if key == "reasoning_content" else key: value for key, value in message.items()}
    if family.text_arguments and "tool_calls" in message:
        given["tool_calls"] = [
            {**call, "function": {**call["function"], "arguments": json.dumps(call["function"]["arguments"])}}
            for call in message["tool_calls"]
        ]
    if family.null_call_content and "tool_calls" in message:
        given["content"] = message["content"] or None
    return given


def differences(
    tokenizer: PreTrainedTokenizerFast, stops: tuple[str, ...], data: dict[str, Any], document: Document
) -> list[str]:
    """How a document differs from what the target would write; empty where it does not."""
    chat = _Rendering(tokenizer, data["messages"], data.get("tools"))
    whole = chat.text(chat.messages)
    encoded = tokenizer(whole, add_special_tokens=False, return_offsets_mapping=True)
    if list(encoded["input_ids"]) != document.input_ids:
        whole = chat.behind_last_prompt(whole, stops)
        encoded = tokenizer(whole, add_special_tokens=False, return_offsets_mapping=True)
    if list(encoded["input_ids"]) != document.input_ids:
        return [f"another text than the template's: {_around(tokenizer.decode(document.input_ids), whole)}"]
    found = [f"absent: {text!r}" for text in _texts_to_be_kept(chat.messages) if text not in whole]
    needed, allowed = set(), set()
    for index, message in enumerate(chat.messages):
        if message["role"] == "assistant" and message.get("weight", 1) != 0:
            place = chat.written(whole, index, stops)
            if place is None:
                found.append(f"turn {index}: its place cannot be told")
                continue
            earliest, first, least, most = _tokens(encoded["offset_mapping"], place)
            needed.update(range(first, least))
            allowed.update(range(earliest, most))
    supervised = [index for start, end in document.spans for index in range(start, end)]
    if len(set(supervised)) != len(supervised):
        found.append("a token is supervised twice")
    for name, tokens in (("not supervised", needed - set(supervised)), ("supervised", set(supervised) - allowed)):
        found += [f"{name}: {_shown(tokenizer, document, run)}" for run in _runs(tokens)]
    return found


@dataclass
class _Place:
    """Characters that the target writes: from `start` to an end of at least `least` and at most `most`. `earliest` is
    before `start` where the prompt goes on with other text (a thought that history drops): texts that part within a
    token, or share its first letters by chance, part at the token."""

    earliest: int
    start: int
    least: int
    most: int


class _Rendering:
    def __init__(self, tokenizer: PreTrainedTokenizerFast, messages: list[dict[str, Any]], tools: Any) -> None:
        self.tokenizer, self.tools = tokenizer, tools
        self.messages = messages

    def text(self, messages: list[dict[str, Any]], prompt: bool = False) -> str:
        plain = [{key: value for key, value in message.items() if key != "weight"} for message in messages]
        return str(
            self.tokenizer.apply_chat_template(plain, tools=self.tools, tokenize=False, add_generation_prompt=prompt)
        )

    def behind_last_prompt(self, whole: str, stops: tuple[str, ...]) -> str:
        """The last answer behind its own prompt: some templates print the system text in prompts only."""
        last = len(self.messages) - 1
        place = self.written(whole, last, stops) if self.messages[last]["role"] == "assistant" else None
        return whole if place is None else self.text(self.messages[:last], prompt=True) + whole[place.start :]

    def written(self, whole: str, index: int, stops: tuple[str, ...]) -> _Place | None:
        """From where the prompt of turn `index` ends to the first stop token; without one, to what a next turn adds."""
        try:
            prompt = self.text(self.messages[:index], prompt=True)
        except (TemplateError, TypeError):
            return None
        anchor = self.messages[index - 1]["content"].split()[-1]
        if prompt.count(anchor) != 1 or whole.count(anchor) != 1:
            return None
        tail = prompt[prompt.index(anchor) :]
        behind = whole.index(anchor)
        shared = _shared(tail, whole[behind:])
        start = earliest = behind + shared
        while shared < len(tail) and earliest > behind and whole[earliest - 1] not in ">]\n":
            earliest -= 1
        if shared < len(tail) and whole[:earliest].rstrip("\n").endswith("<think>"):
            earliest = whole.rindex("<think>", 0, earliest)  # a prompt with an empty thought, an answer with one
        bound = len(whole)
        if index + 1 < len(self.messages):
            bound = whole.find(self.messages[index + 1]["content"].split()[0], start)
            if bound < 0:
                return None
        ends = [whole.index(stop, start) + len(stop) for stop in stops if stop in whole[start:bound]]
        if ends:
            return _Place(earliest, start, min(ends), min(ends))
        words = [word for word in _words(self.messages[index]) if word in whole[start:bound]]
        least = max((whole.index(word, start) + len(word) for word in words), default=start)
        return _Place(earliest, start, least, max(least, self._most(whole, index, least)))

    def _most(self, whole: str, index: int, least: int) -> int:
        """Up to where the text behind a turn is the same, whatever follows it; a token of the template's that stands
        for the one that the target writes is part of it."""
        try:
            other = self.text([*self.messages[: index + 1], {"role": "user", "content": "zq999"}])
            upto = self.text(self.messages[: index + 1])
        except (TemplateError, TypeError):
            return len(whole)
        last = whole[least - 5 : least]
        if upto.count(last) != 1 or other.count(last) != 1:
            return least
        after = [text[text.index(last) + 5 :] for text in (upto, other)]
        most = least + min(_shared(whole[least:], text) for text in after)
        special = [str(token) for token in self.tokenizer.added_tokens_decoder.values()]
        inside = [t for t in special for at in range(max(least, most - len(t)), most + 1) if whole.startswith(t, at)]
        return max([most, *(whole.index(t, least) + len(t) for t in inside)])


def _tokens(offsets: list[tuple[int, int]], place: _Place) -> tuple[int, int, int, int]:
    """(earliest first token, first, least end, most end). A token that the prompt's own text begins is not the
    target's; one that begins where the texts part is."""
    first = next((i for i, (start, end) in enumerate(offsets) if start >= place.start and end > start), len(offsets))
    earliest = first
    while earliest > 0 and offsets[earliest - 1][0] >= place.earliest:
        earliest -= 1
    if earliest < first and offsets[first - 1][1] > place.start:
        first -= 1
    least = first
    while least < len(offsets) and offsets[least][1] <= place.least:
        least += 1
    most = least
    while most < len(offsets) and offsets[most][0] < place.most:
        most += 1
    return earliest, first, least, most


def _texts_to_be_kept(messages: list[dict[str, Any]]) -> list[str]:
    """Words that must stand in the rendering: all but those of thoughts, which templates drop from history."""
    texts = []
    for message in messages:
        content = (message["content"] or "").rpartition("</think>")[2]
        texts += [word for word in content.split() if word.startswith("zq")]
        for call in message.get("tool_calls", []):
            texts += _words_in(json.dumps(call["function"]["arguments"]))
    return texts


def _words(message: dict[str, Any]) -> list[str]:
    return _words_in(json.dumps(message))


def _words_in(text: str) -> list[str]:
    return [text[at : at + 5] for at in range(len(text)) if text.startswith("zq", at)]


def _shared(a: str, b: str) -> int:
    return next((index for index, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


def _runs(tokens: set[int]) -> list[tuple[int, int]]:
    runs: list[tuple[int, int]] = []
    for token in sorted(tokens):
        if runs and runs[-1][1] == token:
            runs[-1] = (runs[-1][0], token + 1)
        else:
            runs.append((token, token + 1))
    return runs


def _shown(tokenizer: PreTrainedTokenizerFast, document: Document, run: tuple[int, int]) -> str:
    text = [tokenizer.decode(document.input_ids[a:b]) for a, b in ((max(0, run[0] - 8), run[0]), run)]
    return f"{text[1]!r} after {text[0]!r}"


def _around(found: str, expected: str) -> str:
    at = max(0, _shared(found, expected) - 20)
    return f"{found[at : at + 80]!r} for {expected[at : at + 80]!r}"
