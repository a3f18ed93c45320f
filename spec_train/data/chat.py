"""Chats as the target's own template renders them, and which of their tokens the target wrote.

A row is rendered once and tokenised once; `turn_spans` says where the target's turns lie in that text. What a server
would put into the prompt (headers, an injected think block, tool results, user turns) is context, never supervised;
what the target writes is supervised whole: thoughts and calls with their marks, and the end of the turn, once.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from spec_train.data.chat_template import REFUSALS, ChatTemplate, on_day
from spec_train.data.documents import Document
from spec_train.data.rows import Conversation, DropReason, Message
from spec_train.data.turn_spans import Rendered, missing_text, turn_spans, whole_chat
from spec_train.errors import UserError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


CUT_ROWS = "rows cut at the limit of tokens"


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
    stop_ids: Collection[int] = (),
    notes: Counter[str] | None = None,
    date: str | None = None,
) -> Document | DropReason:
    """Token ids of a conversation with the spans of its assistant turns, cut at `max_length` tokens.

    A turn that is cut keeps its surviving tokens. Plain text gets the tokenizer's own special tokens and is supervised
    whole. `stop_ids`: what the target stops at beside the tokenizer's eos. A row without a supervised token, one that
    the template refuses, and one whose text, calls or thoughts do not all stand in the render comes back as a
    DropReason. `notes` counts what is kept though something is left out: rows that are cut, thoughts that a template
    strips from earlier turns. `date`: the day (YYYY-MM-DD) that a template which prints one gets. Raises UserError
    where the tokenizer has no chat template and the row is a chat.
    """
    notes = Counter() if notes is None else notes
    if conversation.text is not None:
        ids = list(tokenizer(conversation.text, add_special_tokens=True)["input_ids"])
        found: list[tuple[int, int]] | DropReason = [(0, len(ids))]
    else:
        chat = ChatTemplate(tokenizer, conversation.tools, on_day(chat_template_kwargs, date))
        stops = frozenset(stop_ids) | ({tokenizer.eos_token_id} if tokenizer.eos_token_id is not None else set())
        endings = chat.endings(stops)
        messages = [_without_ending(message, endings) for message in _with_system(conversation.messages, system_prompt)]
        turns = [index for index, message in enumerate(messages) if message["role"] == "assistant"]
        if last_turn_only:
            turns = turns[-1:]
        supervised = [index for index in turns if messages[index].get("weight", 1) != 0]
        if not supervised:
            return DropReason("no assistant turn to learn from")
        try:
            text = whole_chat(chat, messages)
        except REFUSALS as error:
            return DropReason(f"the chat template refuses the row: {_one_line(error)}")
        rendered = Rendered.of(tokenizer, text)
        ids = rendered.ids
        found = turn_spans(chat, messages, supervised, rendered, stops, notes)
    if isinstance(found, DropReason):
        return found
    spans = [(start, min(end, max_length)) for start, end in found if start < min(end, max_length)]
    if not spans:
        return DropReason("no response token left within data.max_length")
    if len(ids) > max_length:
        notes[CUT_ROWS] += 1
    return Document(conversation.id, ids[:max_length], spans, conversation.category, conversation.source)


def render_prompt(
    tokenizer: PreTrainedTokenizerBase,
    messages: Sequence[Message],
    *,
    tools: list[dict[str, Any]] | None = None,
    system_prompt: str | None = None,
    chat_template_kwargs: Mapping[str, Any] | None = None,
    notes: Counter[str] | None = None,
    date: str | None = None,
) -> list[int] | DropReason:
    """Token ids of a chat up to the point where the assistant speaks next.

    A DropReason where the template refuses the chat, or leaves out some of its text or calls; thoughts that it strips
    from the turns are counted in `notes`. `date`: as in `render`. Raises UserError where the tokenizer has no chat
    template.
    """
    chat = ChatTemplate(tokenizer, tools, on_day(chat_template_kwargs, date))
    messages = _with_system(messages, system_prompt)
    try:
        text = chat.text(messages, add_generation_prompt=True)
    except REFUSALS as error:
        return DropReason(f"the chat template refuses the row: {_one_line(error)}")
    missing = missing_text(chat, messages, text, Counter() if notes is None else notes)
    return list(tokenizer(text, add_special_tokens=False)["input_ids"]) if missing is None else missing


def template_hash(
    tokenizer: PreTrainedTokenizerBase,
    chat_template_kwargs: Mapping[str, Any] | None = None,
    system_prompt: str | None = None,
) -> str:
    """sha256 (hex) over everything that decides how a chat is rendered. Stages compare it: a draft trained with
    thinking off accepts little of what the target says with thinking on."""
    parts = [tokenizer.chat_template, dict(chat_template_kwargs or {}), system_prompt]
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()


def reads_date(tokenizer: PreTrainedTokenizerBase) -> bool:
    """Whether the chat template prints the day on which it is rendered."""
    return "strftime_now" in str(tokenizer.chat_template)


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


def _with_system(messages: Sequence[Message], system_prompt: str | None) -> list[Message]:
    """A row's own system turn wins over `system_prompt`."""
    if system_prompt is None or any(message["role"] == "system" for message in messages):
        return list(messages)
    return [{"role": "system", "content": system_prompt}, *messages]


def _without_ending(message: Message, endings: Collection[str]) -> Message:
    """An answer that already carries the end of its turn would get a second one from the template."""
    if message["role"] != "assistant":
        return message
    content = message["content"].rstrip()
    ending = next((token for token in endings if content.endswith(token)), None)
    return message if ending is None else {**message, "content": content.removesuffix(ending)}


def _decode(tokenizer: PreTrainedTokenizerBase, ids: list[int]) -> str:
    return str(tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False))


def _one_line(error: Exception) -> str:
    """What a template says of a chat, without the chat."""
    return " ".join(str(error).split())[:160] or type(error).__name__
