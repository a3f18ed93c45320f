"""One row of any known shape -> one conversation, or the reason why it cannot be used.

Known shapes: `messages` (role/content), ShareGPT `conversations` (from/value), prompts (`turns`, `prompt`, `question`,
`instruction` with `input`), and plain `text`. The shape is found row by row, since public sets mix them. A line of a
request log holds one of these under `request` or `body`.
"""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import dataclass
from typing import Any

Message = dict[str, Any]


class DropReason(str):
    """Why a row was left out. It is returned and counted, never raised."""


@dataclass(frozen=True)
class Conversation:
    """One conversation, normalised.

    id        unique within a run
    messages  role (system, user, assistant, tool) and content (text, empty where there is none), with tool_calls,
              tool_call_id, name, reasoning_content (a thought, whatever the row calls it) and parts (the texts of
              content that came as several) where the row has them; an assistant's `weight: 0` means "not supervised"
    tools     what the row offers the model, passed to the chat template
    text      plain text instead of messages, which are then empty
    """

    id: str
    messages: list[Message]
    tools: list[dict[str, Any]] | None = None
    text: str | None = None
    category: str = ""
    source: str = ""


_ROLES = {
    "system": "system",
    "developer": "system",
    "user": "user",
    "human": "user",
    "prompter": "user",
    "assistant": "assistant",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "bot": "assistant",
    "model": "assistant",
    "function_call": "assistant",
    "tool_call": "assistant",
    "tool": "tool",
    "function": "tool",
    "observation": "tool",
    "tool_response": "tool",
}
_KEPT_KEYS = ("tool_call_id", "name", "weight")
_THOUGHT_KEYS = ("reasoning_content", "reasoning", "thinking", "thought", "tool_plan")
_READ_KEYS = {*_KEPT_KEYS, *_THOUGHT_KEYS, "role", "from", "content", "value", "tool_calls", "function_call"}
# Where each kind of row keeps its content, most telling name first, and the answer that belongs to a prompt.
_FIELDS = {
    "messages": ("messages",),
    "sharegpt": ("conversations", "conversation"),
    "prompt": ("turns", "prompt", "question", "instruction"),
    "text": ("text",),
}
_ANSWERS = ("completion", "response", "answer", "output")
_DEEPEST = 64  # levels of nested arguments and tools that are kept


def conversation_from_row(
    row: Any, *, format: str = "auto", field: str | None = None, ignored: Counter[str] | None = None
) -> Conversation | DropReason:
    """Normalise `row`. `format`: auto, messages, sharegpt, prompt or text; `field`: the column to read, where it has
    another name than usual. The id is the row's own or empty. `ignored` counts keys of messages that no template is
    given, once a row."""
    if isinstance(row, list):
        row = {"messages": row}
    if not isinstance(row, dict):
        return DropReason("the row is not a JSON object")
    row = _logged_request(row)
    found = _find(row, format, field)
    if isinstance(found, DropReason):
        return found
    kind, value = found
    category = row["category"] if isinstance(row.get("category"), str) else ""
    if kind == "text":
        if not isinstance(value, str) or not value.strip():
            return DropReason("empty text")
        problem = _unfit([value, _row_id(row), category])
        return problem or Conversation(_row_id(row), [], text=value, category=category)
    unread: set[str] = set()
    messages = _prompt_messages(row, value, unread) if kind == "prompt" else _messages(value, unread)
    if isinstance(messages, DropReason):
        return messages
    if ignored is not None:
        ignored.update(unread)
    tools = _tools(row)
    if isinstance(tools, DropReason):
        return tools
    system = row.get("system") or row.get("system_prompt")
    if isinstance(system, str) and system.strip() and messages and messages[0]["role"] != "system":
        messages = [{"role": "system", "content": system}, *messages]
    problem = _unfit([messages, tools, _row_id(row), category])
    return problem or Conversation(_row_id(row), messages, tools=tools, category=category)


def usable_for_answers(conversation: Conversation) -> Conversation | DropReason:
    """The part that the target answers: trailing assistant turns are cut off, earlier ones stay as the places where
    its own answers go. For `responses.mode: regenerate`."""
    if conversation.text is not None:
        return DropReason("plain text holds no prompt to answer (responses.mode keep trains on it)")
    messages = list(conversation.messages)
    while messages and messages[-1]["role"] == "assistant":
        messages.pop()
    problem = _order_problem(conversation.messages)
    if problem is None and messages[-1]["role"] == "system":
        problem = DropReason("ends with a system turn")
    if problem is not None:
        return problem
    return Conversation(conversation.id, messages, conversation.tools, None, conversation.category, conversation.source)


def usable_as_is(conversation: Conversation) -> Conversation | DropReason:
    """The conversation itself where it holds an answer to learn from. For `responses.mode: keep`."""
    if conversation.text is not None:
        return conversation
    problem = _order_problem(conversation.messages)
    if problem is not None:
        return problem
    answers = [message for message in conversation.messages if message["role"] == "assistant"]
    if not answers:
        return DropReason("no assistant turn (responses.mode regenerate writes one)")
    if any(not message["content"].strip() and not message.get("tool_calls") for message in answers):
        return DropReason("empty assistant turn")
    return conversation


def _order_problem(messages: list[Message]) -> DropReason | None:
    if not messages:
        return DropReason("no messages")
    spoken = [message for message in messages if message["role"] != "system"]
    if spoken and spoken[0]["role"] != "user":
        return DropReason(f"the first turn is the {spoken[0]['role']}'s")
    if not spoken:
        return DropReason("no user turn")
    if not spoken[0]["content"].strip():
        return DropReason("empty prompt")
    return None


def _logged_request(row: dict[str, Any]) -> dict[str, Any]:
    """The request inside a line of a log, with the line's own id and category; any other row as it is."""
    while not any(field in row for fields in _FIELDS.values() for field in fields):
        held = [inner for name in ("request", "body") if isinstance(inner := decoded(row.get(name)), dict)]
        if not held:
            break
        own = {key: row[key] for key in ("id", "custom_id", "category") if row.get(key) is not None}
        row = {**held[0], **own}
    return row


def _find(row: dict[str, Any], format: str, field: str | None) -> tuple[str, Any] | DropReason:
    """(kind, content) of a row."""
    if field is not None:
        if row.get(field) is None:
            return DropReason(f"no field {field!r}")
        is_chat = isinstance(row[field], list) and all(isinstance(item, dict) for item in row[field])
        return ("messages" if is_chat else "prompt") if format == "auto" else format, row[field]
    for kind in _FIELDS if format == "auto" else (format,):
        for name in _FIELDS[kind]:
            if row.get(name) is not None:
                return kind, row[name]
    names = [name for kind in (_FIELDS if format == "auto" else (format,)) for name in _FIELDS[kind]]
    return DropReason(f"none of the fields {', '.join(names)}")


def _unfit(value: Any) -> DropReason | None:
    """Why `value` cannot be kept: text with half of a surrogate pair, which JSON allows and no tokenizer takes; what
    Parquet has and JSON has not (dates, bytes); and nesting that templates and encoders, which recurse, end at."""
    waiting = [(value, 0)]
    while waiting:
        item, depth = waiting.pop()
        if depth > _DEEPEST:
            return DropReason(f"nested more than {_DEEPEST} levels deep")
        if isinstance(item, str):
            try:
                item.encode()
            except UnicodeEncodeError:
                return DropReason("text that is not valid Unicode")
        elif isinstance(item, dict):
            waiting += [(inner, depth + 1) for pair in item.items() for inner in pair]
        elif isinstance(item, list):
            waiting += [(inner, depth + 1) for inner in item]
        elif item is not None and not isinstance(item, (bool, int, float)):
            return DropReason(f"a value that JSON cannot hold ({type(item).__name__})")
    return None


def _row_id(row: dict[str, Any]) -> str:
    for name in ("id", "conversation_id", "question_id", "task_id", "custom_id", "key"):
        if isinstance(row.get(name), (str, int)):
            return str(row[name])
    return ""


def _messages(raw: Any, unread: set[str]) -> list[Message] | DropReason:
    """role/content and from/value turns, mixed as they come; names of keys that are not read go into `unread`."""
    if not isinstance(raw, list):
        return DropReason("the conversation is not a list of turns")
    messages: list[Message] = []
    for turn in raw:
        message = _message(turn) if isinstance(turn, dict) else DropReason("a turn is not a JSON object")
        if isinstance(message, DropReason):
            return message
        messages.append(message)
        unread.update(key for key in turn.keys() - _READ_KEYS if turn[key] not in (None, [], {}, ""))
    return messages


def _message(turn: dict[str, Any]) -> Message | DropReason:
    name = turn.get("role", turn.get("from"))
    if not isinstance(name, str):
        return DropReason("a turn without a role")
    role = _ROLES.get(name.strip().lower())
    if role is None:
        return DropReason(f"unknown role {name[:40]!r}")
    raw = turn.get("content", turn.get("value"))
    texts = _texts(raw, role)
    if isinstance(texts, DropReason):
        return texts
    message: Message = {"role": role, "content": "\n".join(texts)}
    if len(texts) > 1 and role != "tool":
        message["parts"] = texts
    message.update({key: turn[key] for key in _KEPT_KEYS if turn.get(key) is not None})
    if message.get("weight", 1) not in (0, 1):
        return DropReason("a turn's weight is neither 0 nor 1")
    if role == "assistant":
        thought = _thought(turn, raw)
        if isinstance(thought, DropReason):
            return thought
        if thought:
            message["reasoning_content"] = thought
    calls = turn.get("tool_calls") or ([turn["function_call"]] if turn.get("function_call") else None)
    if name.strip().lower() in ("function_call", "tool_call") and calls is None:
        calls, message["content"] = message["content"], ""
    if calls:
        parsed = _tool_calls(calls)
        if isinstance(parsed, DropReason):
            return parsed
        message["tool_calls"] = parsed
    return message


def _texts(raw: Any, role: str) -> list[str] | DropReason:
    """Texts of a turn, several where content comes as several text parts (vLLM joins them with a line break). None is
    empty, for turns that only call tools. Parts that hold a thought are left to `_thought`."""
    if raw is None:
        return []
    if isinstance(raw, str):
        return [raw]
    if isinstance(raw, list):
        parts = [part for part in raw if not (role == "assistant" and _is_thought(part))]
        if all(isinstance(part, dict) and isinstance(part.get("text"), str) for part in parts):
            return [part["text"] for part in parts]
    if role == "tool":
        return _unfit(raw) or [json.dumps(raw, ensure_ascii=False)]
    return DropReason("content that is not text")


def _is_thought(part: Any) -> bool:
    return isinstance(part, dict) and part.get("type") in ("thinking", "reasoning")


def _thought(turn: dict[str, Any], raw: Any) -> str | DropReason:
    """What the assistant thought before it spoke, under whatever name the row has it; empty where there is nothing."""
    given = [turn[key] for key in _THOUGHT_KEYS if turn.get(key) is not None]
    parts = [part for part in raw if _is_thought(part)] if isinstance(raw, list) else []
    given += [next((part[key] for key in ("thinking", "reasoning", "text") if part.get(key)), "") for part in parts]
    if not all(isinstance(thought, str) for thought in given):
        return DropReason("a thought (reasoning) that is not text")
    thoughts = list(dict.fromkeys(thought for thought in given if thought.strip()))
    if len(thoughts) > 1:
        return DropReason("several different thoughts (reasoning) in one turn")
    return thoughts[0] if thoughts else ""


def decoded(value: Any) -> Any:
    """JSON text decoded once; anything else, or text that is no JSON, as it is. Templates print arguments as JSON, so
    a string would come out quoted twice, and both spellings occur in one file."""
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value)
    except (ValueError, RecursionError):
        return value


def _tool_calls(raw: Any) -> list[dict[str, Any]] | DropReason:
    """Calls as [{"type": "function", "function": {"name", "arguments"}, "id"?}]."""
    raw = decoded(raw)
    calls = []
    for call in raw if isinstance(raw, list) else [raw]:
        function = call.get("function", call) if isinstance(call, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            return DropReason("a tool call without a name")
        arguments = decoded(function.get("arguments", function.get("parameters", {})))
        kept = {"id": call["id"]} if isinstance(call.get("id"), str) else {}
        calls.append({**kept, "type": "function", "function": {"name": function["name"], "arguments": arguments}})
    return calls


def _tools(row: dict[str, Any]) -> list[dict[str, Any]] | DropReason | None:
    raw = decoded(row.get("tools") or row.get("functions"))
    if not raw:
        return None
    if not isinstance(raw, list) or not all(isinstance(tool, dict) for tool in raw):
        return DropReason("tools is not a list of objects")
    return [tool if "function" in tool else {"type": "function", "function": tool} for tool in raw]


def _prompt_messages(row: dict[str, Any], value: Any, unread: set[str]) -> list[Message] | DropReason:
    """A prompt, or the user's turns, with the row's own answer after it where there is one."""
    if isinstance(value, list) and value and all(isinstance(turn, str) for turn in value):
        messages: list[Message] = []
        for turn in value:
            # The target's answers belong between the user's turns; they are empty until it has written them.
            messages += [{"role": "user", "content": turn}, {"role": "assistant", "content": ""}]
        return messages[:-1]
    opening: list[Message] | DropReason
    if isinstance(value, str):
        extra = row.get("input")
        addition = (
            f"\n\n{extra}" if isinstance(extra, str) and extra.strip() and value == row.get("instruction") else ""
        )
        opening = [{"role": "user", "content": value + addition}]
    else:
        opening = _messages(value, unread)
    if isinstance(opening, DropReason):
        return opening
    answer = next((row[name] for name in _ANSWERS if row.get(name) is not None), None)
    if isinstance(answer, str):
        return [*opening, {"role": "assistant", "content": answer}]
    if isinstance(answer, list):
        closing = _messages(answer, unread)
        return closing if isinstance(closing, DropReason) else opening + closing
    return opening
