"""Where the target's own text lies in a rendered chat, and whether all that a row says stands in it.

A turn begins where its prompt ends: the messages before it, rendered with the generation prompt, are the beginning of
the whole chat in nearly every template. It ends with the token that the target stops at, before the next turn begins.
Where a template renders earlier turns otherwise than the last one (thoughts that it strips, tools that it moves), the
turn is found by putting a mark in its place, or in the next turn's, and looking how far the two texts agree.

What a row holds and the render does not is never kept in silence: the row is dropped and the reason says which.
"""

from __future__ import annotations

import json
from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Iterator, Sequence, Set
from dataclasses import dataclass
from itertools import chain
from typing import Any

from spec_train.data.chat_template import ChatTemplate, common_prefix
from spec_train.data.rows import DropReason, Message, decoded

# Marks around a thought that stands in the text of an answer.
_THOUGHT_MARKS = (
    ("<think>", "</think>"),
    ("[THINK]", "[/THINK]"),
    ("<|START_THINKING|>", "<|END_THINKING|>"),
    ("<seed:think>", "</seed:think>"),
    ("<thought>", "</thought>"),
    ("<|channel>thought", "<channel|>"),
)
STRIPPED_THOUGHTS = "thoughts of earlier turns that the chat template leaves out"


@dataclass(frozen=True)
class Rendered:
    """One rendered chat and its tokens. `starts`, `ends`: the characters of each token, half open."""

    text: str
    ids: list[int]
    starts: list[int]
    ends: list[int]

    @classmethod
    def of(cls, tokenizer: Any, text: str) -> Rendered:
        """Tokenise once, without special tokens of the tokenizer's own."""
        encoding = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
        starts, ends = [], []
        previous = 0
        for start, end in encoding["offset_mapping"]:
            # Some tokenizers leave a token's blanks out of its offsets: what lies between two tokens belongs to the
            # second.
            starts.append(min(start, previous) if not text[previous:start].strip() else start)
            ends.append(end)
            previous = max(previous, end)
        return cls(text, list(encoding["input_ids"]), starts, ends)

    def span(self, start: int, end: int) -> tuple[int, int]:
        """The tokens that lie within characters [start, end). One that reaches over an edge is in neither side: the
        target, which sees the prompt's own tokens, would not write it."""
        first = bisect_left(self.starts, start)
        while first < len(self.ids) and self.ends[first] <= start:
            first += 1
        last = first
        while last < len(self.ids) and self.ends[last] <= end:
            last += 1
        return first, last


def whole_chat(chat: ChatTemplate, messages: Sequence[Message]) -> str:
    """The rendered chat. Raises one of REFUSALS for a chat that the template does not take.

    Some templates print the system text only while a chat ends with the user's turn, so that no finished chat holds it:
    there the last answer stands behind its prompt, which is what the server sent.
    """
    text = chat.text(messages)
    system = [message for message in messages if message["role"] == "system"]
    if messages[-1]["role"] != "assistant" or all(message["content"].strip() in text for message in system):
        return text
    prompt = chat.try_text(messages[:-1], add_generation_prompt=True)
    if prompt is None or not all(message["content"].strip() in prompt for message in system):
        return text
    start = _turn_start(chat, messages, len(messages) - 1, Rendered(text, [], [], []))
    return text if start is None else prompt + text[start:]


def turn_spans(
    chat: ChatTemplate,
    messages: Sequence[Message],
    supervised: Sequence[int],
    rendered: Rendered,
    stop_ids: Set[int],
    notes: Counter[str],
) -> list[tuple[int, int]] | DropReason:
    """Token spans of the assistant turns `supervised` (indices of messages), or why the row cannot be used.

    `stop_ids`: tokens that end every answer. `notes` counts what is kept although the template leaves some of it out.
    """
    missing = missing_text(chat, messages, rendered.text, notes, skip=supervised)
    if missing is not None:
        return missing
    spans: list[tuple[int, int]] = []
    for index in supervised:
        span = _turn_span(chat, messages, index, rendered, stop_ids, notes)
        if isinstance(span, DropReason):
            return span
        if spans and span[0] < spans[-1][1]:
            return DropReason("two assistant turns cannot be told apart in the rendered chat")
        if span[0] < span[1]:
            spans.append(span)
    return spans


def missing_text(
    chat: ChatTemplate, messages: Sequence[Message], text: str, notes: Counter[str], skip: Sequence[int] = ()
) -> DropReason | None:
    """The reason to drop a chat whose `text` lacks some of what its messages (but `skip`) say."""
    for index, message in enumerate(messages):
        if index in skip:
            continue
        found = _find_message(message, text, 0, len(text))
        reason = _reason(chat, message, found.missing, True, notes)
        if reason is not None:
            return reason
    return None


# ------------------------------------------------------------------------------------------------ one turn


def _turn_span(
    chat: ChatTemplate,
    messages: Sequence[Message],
    index: int,
    rendered: Rendered,
    stop_ids: Set[int],
    notes: Counter[str],
) -> tuple[int, int] | DropReason:
    message, text = messages[index], rendered.text
    start = _turn_start(chat, messages, index, rendered)
    is_earlier = index + 1 < len(messages)
    if start is None:
        anywhere = _find_message(message, text, 0, len(text))
        return _reason(chat, message, anywhere.missing, is_earlier, notes) or DropReason(
            "an assistant turn cannot be found in the rendered chat"
        )
    limit = _turn_limit(chat, messages, index, text, start)
    if limit is None:
        return DropReason("the end of an assistant turn cannot be found in the rendered chat")
    right, exact = limit
    found = _find_message(message, text, start, right)
    reason = _reason(chat, message, found.missing, is_earlier, notes)
    if reason is not None:
        return reason
    span = _written(chat, rendered, message, start, found.end, right, exact, stop_ids)
    if span is None:
        return DropReason("the end of an assistant turn cannot be found in the rendered chat")
    stops = stop_ids | ({chat.edges.end} if chat.edges.end is not None else set())
    for token in rendered.ids[span[0] : span[1] - 1]:
        if token in stops:
            text = chat.tokenizer.convert_ids_to_tokens(token)
            return DropReason(f"an answer holds {text}, which ends the target's answers")
    return span


def _written(
    chat: ChatTemplate,
    rendered: Rendered,
    message: Message,
    start: int,
    after: int,
    right: int,
    exact: bool,
    stop_ids: Set[int],
) -> tuple[int, int] | None:
    """The tokens of a turn that begins at character `start`, says its last at `after` and does not reach beyond
    `right` (exactly there where `exact`)."""
    ending = _ending(chat, rendered, after, right, exact, stop_ids)
    if ending is not None:
        return rendered.span(start, start)[0], ending
    # Nothing but text follows: what the template puts between turns is not the target's.
    tail = chat.edges.tail
    if exact and tail and rendered.text.endswith(tail, after, right):
        return rendered.span(start, right - len(tail))
    if not message.get("tool_calls"):
        return rendered.span(start, after)
    return rendered.span(start, max(after, start + len(rendered.text[start:right].rstrip()))) if exact else None


def _turn_start(chat: ChatTemplate, messages: Sequence[Message], index: int, rendered: Rendered) -> int | None:
    """Where the target begins to write turn `index`; None where that cannot be told."""
    text = rendered.text
    for prompt in _versions(chat, messages[:index], add_generation_prompt=True):
        for extra in ("", *chat.edges.extras):
            if prompt.endswith(extra) and text.startswith(prompt[: len(prompt) - len(extra)]):
                return _behind_prompt(rendered, len(prompt) - len(extra), extra, messages[index])
    # The chat before this turn reads otherwise when more follows: put a mark in its place.
    header, lead = chat.edges.header, chat.edges.lead
    mark = _unused(text)
    for turn in _marked_turns(messages[index], mark, bool(header)):
        marked = chat.try_text([*messages[:index], turn, *messages[index + 1 :]])
        if marked is None or mark not in marked:
            continue
        if not header and turn["content"] != mark:
            continue  # what stands before the name of a call cannot be told from what the model writes
        place = marked.index(mark)
        opening = marked.rfind(header, 0, place) if header else -1
        start = opening + len(header) if opening >= 0 else place - len(lead)
        before = messages[index - 1]["content"].strip() if index else ""
        if max(0, marked.rfind(before, 0, place) + len(before)) <= start <= common_prefix(text, marked):
            return max((_behind_prompt(rendered, start, e, messages[index]) for e in chat.edges.extras), default=start)
    return None


def _versions(chat: ChatTemplate, messages: Sequence[Message], add_generation_prompt: bool = False) -> Iterator[str]:
    """The beginning of a chat as it may stand in the whole: as it is, or without what templates leave out of earlier
    turns (thoughts, the list of tools, the system text)."""
    versions = [list(messages)]
    for shorter in (
        [_without_thought(message) for message in messages],
        [_without_thought(message) for message in messages if message["role"] != "system"],
    ):
        if shorter not in versions:
            versions.append(shorter)
    for version in versions:
        for with_tools in (True, False) if chat.tools else (True,):
            text = chat.try_text(version, add_generation_prompt, with_tools)
            if text is not None:
                yield text


def _without_thought(message: Message) -> Message:
    if message["role"] != "assistant":
        return message
    plain = {key: value for key, value in message.items() if key != "reasoning_content"}
    return {**plain, "content": _split_thought(message["content"])[1]}


def _behind_prompt(rendered: Rendered, start: int, extra: str, message: Message) -> int:
    """Where a turn that begins at `start` parts from `extra`, which the prompt holds there: at the edge of a token, and
    before any text of the message's own."""
    text, (thought, answer) = rendered.text, _split_thought(message["content"])
    own = next((piece for piece in (message.get("reasoning_content"), thought, answer) if piece and piece.strip()), "")
    supplied = common_prefix(text[start : start + len(extra)], extra)
    most = text.find(own.strip(), start, start + supplied + len(own)) if own else -1
    end = min(start + supplied, most) if most >= 0 else start + supplied
    edges = rendered.starts or [end]
    return max(start, edges[bisect_right(edges, end) - 1]) if end > start else start


def _marked_turns(message: Message, mark: str, with_header: bool) -> Iterator[Message]:
    """The turn with a mark for its text, beside its calls and without them, or for the name of its call (before which
    the target writes more: where it begins is told by the header only)."""
    plain = {"role": "assistant", "content": mark}
    calls = message.get("tool_calls")
    if calls:
        yield {**plain, "tool_calls": calls}
    yield plain
    if calls and with_header:
        call = {**calls[0], "function": {**calls[0]["function"], "name": mark}}
        yield {"role": "assistant", "content": "", "tool_calls": [call, *calls[1:]]}


def _unused(text: str) -> str:
    """A character for private use that does not occur in `text`."""
    return next(char for char in map(chr, chain(range(0xE000, 0xF8FF), range(0xF0000, 0xFFFFD))) if char not in text)


def _turn_limit(
    chat: ChatTemplate, messages: Sequence[Message], index: int, text: str, start: int
) -> tuple[int, bool] | None:
    """(a character that turn `index` does not reach beyond, whether it is exactly where the next turn begins).

    Where it is not exact, the next turn's header lies before it. None where no such place can be told.
    """
    if index + 1 == len(messages):
        return len(text), True
    for upto in _versions(chat, messages[: index + 1]):
        if len(upto) >= start and text.startswith(upto):
            return len(upto), True
    following = messages[index + 1]
    mark = _unused(text)
    marked_turn = {key: value for key, value in following.items() if key not in ("parts", "reasoning_content")}
    marked = chat.try_text([*messages[: index + 1], {**marked_turn, "content": mark}, *messages[index + 2 :]])
    if marked is not None and mark in marked:
        return max(start, common_prefix(text, marked)), False
    return None


def _ending(
    chat: ChatTemplate, rendered: Rendered, after: int, right: int, exact: bool, stop_ids: Set[int]
) -> int | None:
    """The token index behind the token that ends a turn, looked for from character `after` up to `right`."""
    ends = stop_ids | {token for token in (chat.edges.end, chat.edges.inner_end) if token is not None}
    first, last = rendered.span(after, right)
    for place in range(first, last):
        if rendered.ids[place] in ends:
            return place + 1
    if not exact:
        return None
    # Some families have no ending of their own: they stop by writing the next turn's header.
    if last < len(rendered.ids) and rendered.starts[last] == right and rendered.ids[last] in stop_ids:
        return last + 1
    for place in reversed(range(first, last)):
        if rendered.ids[place] in chat.edges.marks:
            return place + 1
    return None


# ------------------------------------------------------------------------------------------------ the guard


@dataclass(frozen=True)
class _Found:
    """Where the last piece of a message ends, and which kinds of pieces are missing."""

    end: int
    missing: tuple[str, ...]


def _find_message(message: Message, text: str, start: int, end: int) -> _Found:
    """Look for all that a message says in text[start:end]: thought, content, calls."""
    thoughts, content = [message.get("reasoning_content", "")], message["content"]
    whole = _find(content, text, start, start, end) is not None
    if message["role"] == "assistant" and not whole:
        inline, content = _split_thought(content)
        thoughts.append(inline)
    parts = message.get("parts") or [content]
    if message["role"] == "tool" and not whole:
        parts = list(_leaves(decoded(content)))  # results that are JSON may be printed in another way
    place, missing = start, []
    for kind, pieces in (("thought", thoughts), ("text", parts)):
        found = _find_all(pieces, text, place, start, end)
        place = place if found is None else found
        missing += [kind] if found is None else []
    for call in message.get("tool_calls", []):
        found = _find_call(call["function"], text, place, start, end)
        place = place if found is None else found
        missing += ["call"] if found is None else []
    return _Found(place, tuple(missing))


def _find_call(function: dict[str, Any], text: str, place: int, start: int, end: int) -> int | None:
    """Where a call ends, see `_find`. Its arguments are looked for from where calls begin, since short ones occur in
    other text too: from `place`, unless the name stands before it."""
    name, arguments = function["name"], function["arguments"]
    begin = place if text.find(name, place, end) >= 0 else start
    if not isinstance(arguments, str):
        found = _find_all([name, json.dumps(arguments, ensure_ascii=False)], text, place, begin, end)
        if found is not None:
            return found
    return _find_all([name, *_leaves(arguments)], text, place, begin, end)


def _reason(
    chat: ChatTemplate, message: Message, missing: Sequence[str], is_earlier: bool, notes: Counter[str]
) -> DropReason | None:
    """Why a message whose render lacks `missing` cannot be kept. Thoughts of earlier turns that the template prints
    elsewhere are left out on purpose, and counted."""
    for kind in missing:
        if kind == "thought":
            on_purpose = not message.get("reasoning_content") or chat.prints_thoughts(message)
            if is_earlier and on_purpose:
                notes[STRIPPED_THOUGHTS] += 1
                continue
            return DropReason("the chat template leaves out the thought (reasoning) of an assistant turn")
        if kind == "call":
            return DropReason("the chat template leaves out a tool call, or some of its arguments")
        return DropReason(f"the chat template leaves out or changes the text of a turn of role {message['role']}")
    return None


def _split_thought(content: str) -> tuple[str, str]:
    """(thought, answer) of a text that begins with a thought between known marks; ("", content) of any other."""
    for opening, closing in _THOUGHT_MARKS:
        thought, mark, answer = content.rpartition(closing)
        if mark:
            return thought.strip().removeprefix(opening).strip(), answer
    return "", content


def _leaves(value: Any) -> Iterator[str]:
    """Keys and values of nested arguments, as text and in their order."""
    waiting = [value]
    while waiting:
        item = waiting.pop()
        if isinstance(item, dict):
            waiting += [inner for pair in reversed(item.items()) for inner in reversed(pair)]
        elif isinstance(item, list):
            waiting += reversed(item)
        else:
            yield item if isinstance(item, str) else json.dumps(item)


_PYTHON_WORDS = {"true": "True", "false": "False", "null": "None"}


def _find_all(pieces: Sequence[str], text: str, place: int, start: int, end: int) -> int | None:
    """Where the last of `pieces` ends, see `_find`; None where one is missing."""
    for piece in pieces:
        found = _find(piece, text, place, start, end)
        if found is None:
            return None
        place = max(place, found)
    return place


def _find(piece: str, text: str, place: int, start: int, end: int) -> int | None:
    """Where `piece` ends in text[start:end], looked for from `place` on first; None where it does not stand there.
    Blanks around it do not count, and it may be written as in JSON or, a truth value, as in Python."""
    piece = piece.strip()
    for form in _forms(piece):
        for begin in (place, start) if piece else ():
            at = text.find(form, begin, end)
            if at >= 0:
                return at + len(form)
    return None if piece else place


def _forms(piece: str) -> Iterator[str]:
    yield piece
    if piece in _PYTHON_WORDS:
        yield _PYTHON_WORDS[piece]
        return
    for ascii_only in (False, True):
        written = json.dumps(piece, ensure_ascii=ascii_only)[1:-1]
        if written != piece:
            yield written
