"""A generated answer as the message that the target's own server makes of it.

Targets write thoughts and calls of tools between marks, each family its own. A server takes them apart into content,
reasoning and calls, and gives those back to the chat template with the next turn. The same is done here, for forms
whose marks the tokenizer or the chat template knows: `<think>` in the words of a target without such a form is text.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from spec_train.data.chat_template import ChatTemplate
from spec_train.data.rows import DropReason, Message

_THOUGHTS = (
    ("<think>", "</think>"),
    ("[THINK]", "[/THINK]"),
    ("<|START_THINKING|>", "<|END_THINKING|>"),
    ("<seed:think>", "</seed:think>"),
)
_RESPONSE = ("<|START_RESPONSE|>", "<|END_RESPONSE|>")  # Command's marks around its content
_DEEPSEEK_CALLS = "<\uff5ctool▁calls▁begin\uff5c>"
_DEEPSEEK_CALL = re.compile(
    "<\uff5ctool▁call▁begin\uff5c>(?:function<\uff5ctool▁sep\uff5c>(?P<name>[^\n<]+)\n```json\n(?P<fenced>.*?)\n```"
    "|(?P<plain>[^\n<]+)<\uff5ctool▁sep\uff5c>(?P<arguments>.*?))<\uff5ctool▁call▁end\uff5c>",
    re.DOTALL,
)
_UNREAD_CALL = DropReason("a turn after the target's own call of a tool, which cannot be read")
_UNKNOWN_FORM = "a turn after an answer that holds {}, in a form that is not known"


def answer_message(
    tokenizer: Any,
    prompt_ids: Sequence[int],
    output_ids: Sequence[int],
    stop_ids: Collection[int],
    *,
    tools: list[dict[str, Any]] | None = None,
    chat_template_kwargs: Mapping[str, Any] | None = None,
) -> Message | DropReason:
    """The answer `output_ids` to `prompt_ids` as a message: role, content, and where it has them reasoning_content and
    tool_calls (arguments as JSON values). A thought that the template prints nowhere is left out, as it does.

    `stop_ids`: tokens that end an answer, beside the tokenizer's eos. A DropReason where it holds a call that cannot be
    read, or special tokens of a form that is not known here. Raises UserError where the tokenizer has no chat template.
    """
    chat = ChatTemplate(tokenizer, tools, chat_template_kwargs or {})
    text = _without_end(chat, list(output_ids), {*stop_ids, tokenizer.eos_token_id})
    if _knows(chat, "<|channel|>") and _knows(chat, "<|message|>"):
        message = _harmony(text)
    else:
        thought, rest = _thought(chat, text, _decode(tokenizer, prompt_ids[-16:]).rstrip())
        read = _calls(chat, rest)
        message = read if isinstance(read, DropReason) else _message(read[0], thought, read[1])
    if isinstance(message, DropReason):
        return message
    if not chat.prints_thoughts(message):
        message.pop("reasoning_content", None)  # which such a template never reads
    said = message["content"] + message.get("reasoning_content", "")
    specials = {str(token) for token in tokenizer.added_tokens_decoder.values() if token.special}
    if stray := next((token for token in sorted(specials) if token in said), None):
        return DropReason(_UNKNOWN_FORM.format(stray))
    return message


def _knows(chat: ChatTemplate, mark: str) -> bool:
    return mark in chat.source or mark in chat.tokenizer.get_added_vocab()


def _without_end(chat: ChatTemplate, ids: list[int], stop_ids: Collection[int]) -> str:
    """The text of an answer without what ends it: a token, and what the template puts before that one."""
    if not ids or ids[-1] not in stop_ids:
        return _decode(chat.tokenizer, ids)
    text, end = _decode(chat.tokenizer, ids[:-1]), _decode(chat.tokenizer, ids[-1:])
    ending, mark, _ = chat.edges.tail.partition(end)
    return text.removesuffix(ending) if mark else text


def same_calls(own: Sequence[dict[str, Any]], recorded: Sequence[dict[str, Any]]) -> bool:
    """Whether results of the `recorded` calls answer the target's `own`: as many, in the same order, of the same names
    and with arguments that are equal as JSON values."""
    return [_call_key(call) for call in own] == [_call_key(call) for call in recorded]


def _call_key(call: dict[str, Any]) -> tuple[str, str]:
    arguments = call["function"]["arguments"]
    if isinstance(arguments, str):
        arguments = _json(arguments, arguments)
    return call["function"]["name"], json.dumps(arguments, sort_keys=True)


def _message(content: str, thought: str | None, calls: list[dict[str, Any]]) -> Message:
    message: Message = {"role": "assistant", "content": content if content.strip() or not calls else ""}
    if thought and thought.strip():
        message["reasoning_content"] = thought
    if calls:
        message["tool_calls"] = calls
    return message


def _call(name: str, arguments: Any, place: int) -> dict[str, Any]:
    """A call with an id of nine letters and digits, which is what every family takes; the same one in every run."""
    said = json.dumps([name, arguments, place], sort_keys=True, default=str)
    number = hashlib.sha256(said.encode()).hexdigest()[:9]
    return {"id": number, "type": "function", "function": {"name": name, "arguments": arguments}}


# ------------------------------------------------------------------------------------------------ thoughts


def _thought(chat: ChatTemplate, text: str, prompt_end: str) -> tuple[str | None, str]:
    """(thought, what follows it). One that the prompt opens, or that the answer does, and nobody closes is all there
    is: the limit cut the answer."""
    for opening, closing in _THOUGHTS:
        if not _knows(chat, closing):
            continue
        before, mark, inside = text.partition(opening)
        opened = bool(mark) and not before.strip()
        thought, mark, rest = (inside if opened else text).partition(closing)
        if mark:
            return thought, rest
        if opened or prompt_end.endswith(opening):
            return thought, ""
    return None, text


# ------------------------------------------------------------------------------------------------ calls


def _calls(chat: ChatTemplate, text: str) -> tuple[str, list[dict[str, Any]]] | DropReason:
    """(content, calls) of an answer without its thought."""
    if _knows(chat, _RESPONSE[0]):
        text = text.replace(_RESPONSE[0], "").replace(_RESPONSE[1], "")
    for mark, read in (
        ("<tool_call>", _tagged_calls),
        (_DEEPSEEK_CALLS, _deepseek_calls),
        ("[TOOL_CALLS]", _mistral_calls),
        ("<|START_ACTION|>", _command_calls),
    ):
        content, found, called = text.partition(mark)
        if found and _knows(chat, mark):
            if "<function=" in called or "<arg_key>" in called:
                content = content.strip()  # as the servers of these two families do
            calls = read(mark + called, chat.tools)
            return (content, calls) if calls else _UNREAD_CALL
    calls = _bare_calls(text) if chat.tools and '"parameters": ' in chat.source else []
    return ("", calls) if calls else (text, [])


def _tagged_calls(text: str, tools: list[dict[str, Any]] | None) -> list[dict[str, Any]]:
    """Hermes, Qwen: JSON between <tool_call> tags; Qwen-Coder and GLM: tags for each argument too."""
    calls: list[dict[str, Any]] = []
    for body in re.findall(r"<tool_call>(.*?)</tool_call>", text, re.DOTALL):
        found = re.search(r"<function=([^>\n]+)>(.*?)(?:</function>|\Z)", body, re.DOTALL)
        if found:
            pairs = re.findall(r"<parameter=([^>\n]+)>\n?(.*?)\n?</parameter>", found[2], re.DOTALL)
            calls.append(_call(found[1], _typed(found[1], pairs, tools), len(calls)))
            continue
        if "<arg_key>" in body:
            name = body.partition("<arg_key>")[0].strip()
            pairs = re.findall(r"<arg_key>(.*?)</arg_key>\s*<arg_value>(.*?)</arg_value>", body, re.DOTALL)
            calls.append(_call(name, _typed(name, pairs, tools), len(calls)))
            continue
        call = _json_call(_json(body.strip(), None), len(calls))
        if call is None:
            return []
        calls.append(call)
    return calls if text.count("<tool_call>") == len(calls) else []


def _deepseek_calls(text: str, _tools: Any) -> list[dict[str, Any]]:
    calls: list[dict[str, Any]] = []
    for match in _DEEPSEEK_CALL.finditer(text):
        arguments = _json(match["fenced"] or match["arguments"], None)
        if not isinstance(arguments, dict):
            return []
        calls.append(_call((match["name"] or match["plain"]).strip(), arguments, len(calls)))
    return calls if text.count("<\uff5ctool▁call▁begin\uff5c>") == len(calls) else []


def _mistral_calls(text: str, _tools: Any) -> list[dict[str, Any]]:
    """A list of calls after the mark, or the mark, a name and its arguments, once a call."""
    calls: list[dict[str, Any]] = []
    for part in text.split("[TOOL_CALLS]")[1:]:
        listed = _json(part.strip(), None)
        if isinstance(listed, list):
            found = [_json_call(entry, place) for place, entry in enumerate(listed, len(calls))]
        else:
            named = re.fullmatch(r"\s*([\w.-]+)\s*(?:\[CALL_ID\]\w+)?(?:\[ARGS\])?\s*(\{.*\})\s*", part, re.DOTALL)
            arguments = _json(named[2], None) if named else None
            found = [_call(named[1], arguments, len(calls))] if named and isinstance(arguments, dict) else [None]
        if None in found:
            return []
        calls += [call for call in found if call is not None]
    return calls


def _command_calls(text: str, _tools: Any) -> list[dict[str, Any]]:
    body = re.match(r"<\|START_ACTION\|>(.*?)<\|END_ACTION\|>", text, re.DOTALL)
    listed = _json(body[1].strip(), None) if body else None
    found = [_json_call(entry, place) for place, entry in enumerate(listed)] if isinstance(listed, list) else []
    return [] if None in found else [call for call in found if call is not None]


def _bare_calls(text: str) -> list[dict[str, Any]]:
    """Llama 3: the whole answer is one call as JSON, or several with semicolons between."""
    calls: list[dict[str, Any]] = []
    left = text.removeprefix("<|python_tag|>").strip()
    while left:
        try:
            value, end = json.JSONDecoder().raw_decode(left)
        except ValueError:
            return []
        call = _json_call(value, len(calls))
        if call is None:
            return []
        calls.append(call)
        left = left[end:].lstrip().removeprefix(";").lstrip()
    return calls


def _json_call(value: Any, place: int) -> dict[str, Any] | None:
    """A call out of the JSON object that a family writes for one."""
    if not isinstance(value, dict):
        return None
    name = value.get("name", value.get("tool_name"))
    arguments = value.get("arguments", value.get("parameters"))
    if isinstance(arguments, str):
        arguments = _json(arguments, None)
    return _call(name, arguments, place) if isinstance(name, str) and isinstance(arguments, dict) else None


def _typed(name: str, pairs: list[tuple[str, str]], tools: list[dict[str, Any]] | None) -> dict[str, Any]:
    """Arguments that a family writes as text: JSON values, but for those that the tool wants as strings."""
    functions = [tool.get("function", tool) for tool in tools or []]
    parameters = next((f.get("parameters") or {} for f in functions if f.get("name") == name), {})
    types = {key: value.get("type") for key, value in (parameters.get("properties") or {}).items()}
    return {key: value if types.get(key) == "string" else _json(value, value) for key, value in pairs}


# ------------------------------------------------------------------------------------------------ gpt-oss


def _harmony(text: str) -> Message | DropReason:
    """Parts with a channel each: analysis is thought, one that names a recipient is a call, all else is content."""
    thoughts, contents = [], []
    calls: list[dict[str, Any]] = []
    for part in text.split("<|end|>"):
        header, mark, said = part.removeprefix("<|start|>assistant").partition("<|message|>")
        recipient = re.search(r"to=functions\.([\w.-]+)", header)
        if recipient and mark:
            arguments = _json(said.strip(), None)
            if not isinstance(arguments, dict):
                return _UNREAD_CALL
            calls.append(_call(recipient[1], arguments, len(calls)))
        elif "to=" in header:
            return _UNREAD_CALL
        elif not mark:
            contents.append(header)  # a header that the limit cut; its marks are seen by the caller
        elif "analysis" in header:
            thoughts.append(said)
        else:
            contents.append(said)
    return _message("\n".join(filter(None, contents)), "\n".join(thoughts), calls)


def _json(text: str | None, otherwise: Any) -> Any:
    try:
        return json.loads(text or "")
    except ValueError:
        return otherwise


def _decode(tokenizer: Any, ids: Sequence[int]) -> str:
    return str(tokenizer.decode(list(ids), skip_special_tokens=False, clean_up_tokenization_spaces=False))
