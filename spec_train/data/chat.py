"""Chats as the target's own template renders them, and which of their tokens the target wrote.

A row is rendered once and tokenised once. Where an assistant turn lies in that text is found by rendering the same
chat again with the turn replaced by a mark: what differs between the two texts is what the model says, the rest is what
the template says. That needs no generation tags in the template, no legal prefixes, and holds for templates that trim,
reorder or inject text. Header and generation prompt (an injected think block included) are context, never supervised;
the terminator of a turn is supervised once, with its turn.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jinja2 import TemplateError

from spec_train.data.documents import Document
from spec_train.data.rows import Conversation, DropReason, Message
from spec_train.errors import UserError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_OWN_ARGUMENTS = {
    "tokenize",
    "add_generation_prompt",
    "continue_final_message",
    "tools",
    "conversation",
    "chat_template",
}


def load_tokenizer(
    name: str, *, revision: str | None = None, chat_template: str | None = None
) -> PreTrainedTokenizerBase:
    """The tokenizer of a checkpoint folder or hub id, with the template of the file `chat_template` where one is given.

    Raises UserError where it cannot be loaded, or cannot say where a token lies in the text.
    """
    from transformers import AutoTokenizer

    try:
        tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(name, revision=revision)
    except (OSError, ValueError) as error:
        reason = str(error).strip().splitlines()[0]
        raise UserError(
            f"tokenizer of {name}: cannot be loaded ({reason}); give a checkpoint with its tokenizer"
        ) from None
    if not tokenizer.is_fast:
        raise UserError(f"tokenizer of {name}: has no fast version (tokenizer.json), which character offsets need")
    if chat_template is not None:
        try:
            tokenizer.chat_template = Path(chat_template).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise UserError(f"target.chat_template {chat_template}: cannot be read ({error})") from None
    return tokenizer


def render(
    tokenizer: PreTrainedTokenizerBase,
    conversation: Conversation,
    *,
    max_length: int,
    system_prompt: str | None = None,
    chat_template_kwargs: Mapping[str, Any] | None = None,
    last_turn_only: bool = False,
) -> Document | DropReason:
    """Token ids of a conversation with the spans of its assistant turns, cut at `max_length` tokens.

    A turn that is cut keeps its surviving tokens. Plain text gets the tokenizer's own special tokens and is supervised
    whole. A row without a supervised token, or one that the template refuses, comes back as a DropReason. Raises
    UserError where the tokenizer has no chat template and the row is a chat.
    """
    if conversation.text is not None:
        ids = list(tokenizer(conversation.text, add_special_tokens=True)["input_ids"])
        spans = [(0, len(ids))]
    else:
        chat = _Chat(tokenizer, conversation.tools, chat_template_kwargs or {})
        terminators = chat.terminators()
        messages = _with_system(conversation.messages, system_prompt)
        messages = [_without_terminator(message, terminators) for message in messages]
        turns = [index for index, message in enumerate(messages) if message["role"] == "assistant"]
        if last_turn_only:
            turns = turns[-1:]
        supervised = [index for index in turns if messages[index].get("weight", 1) != 0]
        if not supervised:
            return DropReason("no assistant turn to learn from")
        try:
            text = chat.text(messages)
        except (TemplateError, TypeError) as error:
            return DropReason(f"the chat template refuses the row: {_one_line(error)}")
        ranges = [chat.turn_range(messages, index, text, terminators) for index in supervised]
        if None in ranges:
            return DropReason("an assistant turn cannot be found in the rendered chat")
        encoding = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
        ids = list(encoding["input_ids"])
        spans = _token_spans(ids, encoding["offset_mapping"], text, [r for r in ranges if r is not None], terminators)
    spans = [(start, min(end, max_length)) for start, end in spans if start < min(end, max_length)]
    if not spans:
        return DropReason("no response token left within data.max_length")
    return Document(conversation.id, ids[:max_length], spans, conversation.category, conversation.source)


def render_prompt(
    tokenizer: PreTrainedTokenizerBase,
    messages: Sequence[Message],
    *,
    tools: list[dict[str, Any]] | None = None,
    system_prompt: str | None = None,
    chat_template_kwargs: Mapping[str, Any] | None = None,
) -> list[int] | DropReason:
    """Token ids of a chat up to the point where the assistant speaks next; a DropReason where the template refuses.

    Raises UserError where the tokenizer has no chat template.
    """
    chat = _Chat(tokenizer, tools, chat_template_kwargs or {})
    try:
        text = chat.text(_with_system(messages, system_prompt), add_generation_prompt=True)
    except (TemplateError, TypeError) as error:
        return DropReason(f"the chat template refuses the row: {_one_line(error)}")
    return list(tokenizer(text, add_special_tokens=False)["input_ids"])


def template_hash(
    tokenizer: PreTrainedTokenizerBase,
    chat_template_kwargs: Mapping[str, Any] | None = None,
    system_prompt: str | None = None,
) -> str:
    """sha256 (hex) over everything that decides how a chat is rendered. Stages compare it: a draft trained with
    thinking off accepts little of what the target says with thinking on."""
    parts = [tokenizer.chat_template, dict(chat_template_kwargs or {}), system_prompt]
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()


def supervised_text(tokenizer: PreTrainedTokenizerBase, document: Document) -> str:
    """The text of the supervised tokens, special tokens included, spans one after the other."""
    return "".join(_decode(tokenizer, document.input_ids[start:end]) for start, end in document.spans)


def inspect_rows(tokenizer: PreTrainedTokenizerBase, documents: Iterable[Document]) -> Iterator[dict[str, Any]]:
    """What `spec-train inspect --json` prints for each document."""
    for document in documents:
        yield {
            "id": document.id,
            "input_ids": document.input_ids,
            "loss_mask": document.loss_mask,
            "text": _decode(tokenizer, document.input_ids),
            "supervised_text": supervised_text(tokenizer, document),
        }


def check_same_tokenizer(a: PreTrainedTokenizerBase, b: PreTrainedTokenizerBase, names: tuple[str, str]) -> None:
    """Raise UserError, naming the first difference, unless every id means the same text to both tokenizers and they
    stop at the same token. Widths of embeddings, which models pad, play no part. `names`: what to call the two."""
    token_a, token_b = ({token_id: token for token, token_id in t.get_vocab().items()} for t in (a, b))
    for token_id in sorted(token_a.keys() | token_b.keys()):
        if token_a.get(token_id) != token_b.get(token_id):
            first, second = (repr(t[token_id]) if token_id in t else "nothing" for t in (token_a, token_b))
            raise UserError(
                f"tokenizers differ: id {token_id} is {first} in {names[0]} and {second} in {names[1]}; "
                "both must share one tokenizer"
            )
    if a.eos_token_id != b.eos_token_id:
        raise UserError(
            f"tokenizers differ: eos is id {a.eos_token_id} ({a.eos_token!r}) in {names[0]} and id {b.eos_token_id} "
            f"({b.eos_token!r}) in {names[1]}; both must share one tokenizer"
        )


def check_tokenizer_fits(tokenizer: PreTrainedTokenizerBase, vocab_size: int) -> None:
    """Raise UserError where the tokenizer can produce ids that the model's `vocab_size` embedding rows do not cover."""
    longest = max(tokenizer.get_vocab().values()) + 1
    if longest > vocab_size:
        raise UserError(
            f"the tokenizer has {longest} ids and the target only {vocab_size} embedding rows; use the tokenizer that "
            "belongs to the target"
        )


# --------------------------------------------------------------------------------------------- where turns lie


class _Chat:
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

    def text(self, messages: Sequence[Message], add_generation_prompt: bool = False) -> str:
        """The rendered chat. Raises TemplateError, or TypeError from an expression that a row's values do not fit."""
        plain = [{key: value for key, value in message.items() if key != "weight"} for message in messages]
        rendered = self.tokenizer.apply_chat_template(
            plain, tools=self.tools, tokenize=False, add_generation_prompt=add_generation_prompt, **self.kwargs
        )
        return str(rendered)

    def try_text(self, messages: Sequence[Message], add_generation_prompt: bool = False) -> str | None:
        """`text`, or None for a chat that the template refuses: not every prefix or change of a legal chat is legal."""
        if not messages:
            return None
        try:
            return self.text(messages, add_generation_prompt)
        except (TemplateError, TypeError):
            return None

    def terminators(self) -> dict[int, str]:
        """Tokens (id -> text) that end an assistant turn: eos, and the special token that the template puts there."""
        known = {token_id: str(token) for token_id, token in self.tokenizer.added_tokens_decoder.items()}
        ends = {}
        if self.tokenizer.eos_token_id is not None:
            ends[int(self.tokenizer.eos_token_id)] = str(self.tokenizer.eos_token)
        mark = "\ue000"
        probe = self.try_text([{"role": "user", "content": "a"}, {"role": "assistant", "content": mark}]) or ""
        tail = probe.partition(mark)[2].lstrip()
        ids = self.tokenizer(tail, add_special_tokens=False)["input_ids"] if tail else []
        if ids and ids[0] in known and tail.startswith(known[ids[0]]):
            ends[ids[0]] = known[ids[0]]
        return ends

    def turn_range(
        self, messages: Sequence[Message], index: int, text: str, terminators: Mapping[int, str]
    ) -> tuple[int, int] | None:
        """Half-open character range of what the model says in assistant turn `index`, without terminator."""
        mark = next(char for char in map(chr, range(0xE000, 0xF8FF)) if char not in text)
        marked_turn = {"role": "assistant", "content": mark}
        marked = self.try_text([*messages[:index], marked_turn, *messages[index + 1 :]])
        prompt = self.try_text(messages[:index], add_generation_prompt=True)
        if marked is not None and marked.count(mark) == 1:
            before, after = marked.split(mark)
            start = _common_prefix(text, before)
            end = len(text) - _common_prefix(text[start:][::-1], after[::-1])
        else:
            # The template ignores the mark or refuses the change, as some do for turns that call tools.
            upto = self.try_text(messages[: index + 1])
            if prompt is None or upto is None or not text.startswith(upto) or not upto.startswith(prompt):
                return None
            body = upto.rstrip()
            ending = next((token for token in terminators.values() if token and body.endswith(token)), "")
            start, end = len(prompt), len(body) - len(ending)
        if prompt is not None and text.startswith(prompt):
            start = max(start, len(prompt))
        return start, max(start, end)


def _token_spans(
    ids: list[int],
    offsets: Sequence[tuple[int, int]],
    text: str,
    ranges: Sequence[tuple[int, int]],
    terminators: Mapping[int, str],
) -> list[tuple[int, int]]:
    """Token spans of character `ranges`, each with the terminator that follows, where one does."""
    spans: list[tuple[int, int]] = []
    token = 0
    for char_start, char_end in ranges:
        while token < len(ids) and offsets[token][1] <= char_start:
            token += 1
        first = token
        while token < len(ids) and offsets[token][0] < char_end:
            token += 1
        end = ahead = token
        while ahead < len(ids) and ids[ahead] not in terminators and not text[char_end : offsets[ahead][1]].strip():
            ahead += 1
        if ahead < len(ids) and ids[ahead] in terminators and not text[char_end : offsets[ahead][0]].strip():
            end = token = ahead + 1
        if end > first:
            spans.append((first, end))
    return spans


def _common_prefix(a: str, b: str) -> int:
    """How many leading characters two texts share."""
    if a.startswith(b):
        return len(b)
    return next((index for index, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


def _with_system(messages: Sequence[Message], system_prompt: str | None) -> list[Message]:
    """A row's own system turn wins over `system_prompt`."""
    if system_prompt is None or any(message["role"] == "system" for message in messages):
        return list(messages)
    return [{"role": "system", "content": system_prompt}, *messages]


def _without_terminator(message: Message, terminators: Mapping[int, str]) -> Message:
    """An answer that already carries its terminator would get a second one from the template."""
    if message["role"] != "assistant":
        return message
    content = message["content"].rstrip()
    ending = next((token for token in terminators.values() if token and content.endswith(token)), None)
    return message if ending is None else {**message, "content": content.removesuffix(ending)}


def _decode(tokenizer: PreTrainedTokenizerBase, ids: list[int]) -> str:
    return str(tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False))


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split()) or type(error).__name__
