"""Rendering: which tokens of a chat are supervised, for templates that differ in everything but the task."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tokenizers import processors
from transformers import PreTrainedTokenizerFast

from spec_train.data.chat import (
    check_same_tokenizer,
    check_tokenizer_fits,
    inspect_rows,
    load_tokenizer,
    render,
    render_prompt,
    supervised_text,
    template_hash,
)
from spec_train.data.documents import Document
from spec_train.data.rows import Conversation, DropReason
from spec_train.errors import UserError
from tests.tiny import CHATML, tiny_tokenizer

# ChatML that prints tool calls, tools and (for the last turn) a think block, as Qwen3 does.
QWEN_LIKE = (
    "{%- if tools %}<|im_start|>system\n# Tools\n"
    "{%- for t in tools %}{{ t | tojson }}\n{% endfor %}<|im_end|>\n{% endif %}"
    "{%- set ns = namespace(user=false) %}"
    "{%- for m in messages %}{% if m.role == 'user' %}{% set ns.user = true %}{% endif %}{% endfor %}"
    "{%- if not ns.user %}{{ raise_exception('No user query found') }}{% endif %}"
    "{%- for m in messages %}"
    "{%- if m.role == 'assistant' %}"
    "{%- set text = m.content %}{%- set thought = m.reasoning_content or '' %}"
    "{%- if '</think>' in text %}"
    "{%- set thought = text.split('</think>')[0].split('<think>')[-1].strip('\n') %}"
    "{%- set text = text.split('</think>')[-1].lstrip('\n') %}{% endif %}"
    "{{- '<|im_start|>assistant\n' }}"
    "{%- if loop.last or thought and loop.last %}{{ '<think>\n' + thought + '\n</think>\n\n' }}{% endif %}{{ text }}"
    "{%- for c in m.tool_calls or [] %}\n<tool_call>\n{{ c.function | tojson }}\n</tool_call>{% endfor %}"
    "{{- '<|im_end|>\n' }}"
    "{%- elif m.role == 'tool' %}"
    "{{- '<|im_start|>user\n<tool_response>\n' + m.content + '\n</tool_response><|im_end|>\n' }}"
    "{%- else %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{% endif %}{% endfor %}"
    "{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}"
    "{%- if enable_thinking is defined and not enable_thinking %}{{ '<think>\n\n</think>\n\n' }}{% endif %}{% endif %}"
)
# Alternation enforced, no system role, answers trimmed, eos after a blank: Llama-2 and Mistral style.
STRICT = (
    "{% for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('roles must alternate user/assistant') }}{% endif %}"
    "{% if m.role == 'user' %}{{ '[INST] ' + m.content + ' [/INST]' }}"
    "{% else %}{{ ' ' + m.content | trim + ' ' + eos_token }}{% endif %}{% endfor %}"
)
EMPTY_THOUGHT = "<think>\n\n</think>\n\n"  # what QWEN_LIKE puts into the last turn, and not into the prompt
CHAT = [
    {"role": "user", "content": "two plus two?"},
    {"role": "assistant", "content": "It is four."},
    {"role": "user", "content": "and the fox?"},
    {"role": "assistant", "content": "Over the lazy dog."},
]


def chat(messages: list[dict[str, Any]], **fields: Any) -> Conversation:
    return Conversation("row", messages, **fields)


def rendered(tokenizer: PreTrainedTokenizerFast, messages: list[dict[str, Any]], **options: Any) -> Document:
    document = render(tokenizer, chat(messages, tools=options.pop("tools", None)), **{"max_length": 4096, **options})
    assert isinstance(document, Document), document
    return document


def pieces(tokenizer: PreTrainedTokenizerFast, document: Document) -> list[str]:
    return [tokenizer.decode(document.input_ids[start:end]) for start, end in document.spans]


def test_spans_are_answers_with_their_terminator_in_templates_without_generation_tags() -> None:
    """M01, M09, M17: exactly answer + EOT of every turn, once."""
    tokenizer = tiny_tokenizer()
    document = rendered(tokenizer, CHAT)
    assert pieces(tokenizer, document) == ["It is four.<|im_end|>", "Over the lazy dog.<|im_end|>"]
    assert supervised_text(tokenizer, document) == "It is four.<|im_end|>Over the lazy dog.<|im_end|>"
    assert sum(document.loss_mask) == document.num_response_tokens
    whole = tokenizer.apply_chat_template(CHAT, tokenize=False)
    assert tokenizer.decode(document.input_ids) == whole
    assert all(document.input_ids[end - 1] == tokenizer.eos_token_id for _, end in document.spans)


def test_last_turn_only_and_per_turn_weight() -> None:
    """M17: one span on request, and a turn of weight 0 is left out."""
    tokenizer = tiny_tokenizer()
    assert pieces(tokenizer, rendered(tokenizer, CHAT, last_turn_only=True)) == ["Over the lazy dog.<|im_end|>"]
    weighted = [CHAT[0], {**CHAT[1], "weight": 0}, *CHAT[2:]]
    assert pieces(tokenizer, rendered(tokenizer, weighted)) == ["Over the lazy dog.<|im_end|>"]


def test_injected_think_block_is_context() -> None:
    """M03: what the generation prompt holds is not supervised; what the model writes after it is, marks included."""
    tokenizer = tiny_tokenizer(chat_template=QWEN_LIKE)
    assert pieces(tokenizer, rendered(tokenizer, CHAT[:2])) == [EMPTY_THOUGHT + "It is four.<|im_end|>"]
    thinking_off = rendered(tokenizer, CHAT[:2], chat_template_kwargs={"enable_thinking": False})
    assert pieces(tokenizer, thinking_off) == ["It is four.<|im_end|>"]
    start = thinking_off.spans[0][0]
    assert tokenizer.decode(thinking_off.input_ids[:start]).endswith("<think>\n\n</think>\n\n")
    thought = [CHAT[0], {"role": "assistant", "content": "<think>\nhm, two\n</think>\n\nFour."}]
    assert pieces(tokenizer, rendered(tokenizer, thought)) == ["<think>\nhm, two\n</think>\n\nFour.<|im_end|>"]
    # The answer itself carries the block that the generation prompt supplies; the template adds nothing.
    supplied = CHATML.replace("'<|im_start|>assistant\n'", "'<|im_start|>assistant\n<think>\n\n</think>\n\n'")
    carrying = [CHAT[0], {"role": "assistant", "content": "<think>\n\n</think>\n\nFour."}]
    tokenizer = tiny_tokenizer(chat_template=supplied)
    assert pieces(tokenizer, rendered(tokenizer, carrying)) == ["Four.<|im_end|>"]


def test_reasoning_stripped_from_history_does_not_move_the_spans() -> None:
    tokenizer = tiny_tokenizer(chat_template=QWEN_LIKE)
    history = [CHAT[0], {"role": "assistant", "content": "<think>\nhm\n</think>\n\nFour."}, *CHAT[2:]]
    document = rendered(tokenizer, history)
    assert pieces(tokenizer, document) == ["Four.<|im_end|>", EMPTY_THOUGHT + "Over the lazy dog.<|im_end|>"]
    assert "hm" not in tokenizer.decode(document.input_ids)


def test_illegal_prefixes_are_never_needed() -> None:
    """M11: a template that refuses a chat without a user turn still takes system + user + assistant."""
    tokenizer = tiny_tokenizer(chat_template=QWEN_LIKE)
    document = rendered(tokenizer, [{"role": "system", "content": "Be brief."}, *CHAT])
    assert pieces(tokenizer, document) == ["It is four.<|im_end|>", EMPTY_THOUGHT + "Over the lazy dog.<|im_end|>"]


def test_tool_turns_are_rendered_and_only_the_call_and_the_answer_are_supervised() -> None:
    """D02: tools, calls and replies reach the template; replies get no loss."""
    tokenizer = tiny_tokenizer(chat_template=QWEN_LIKE)
    call = {"type": "function", "function": {"name": "add", "arguments": {"a": 2}}}
    messages = [
        CHAT[0],
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": "sum=4", "name": "add"},
        {"role": "assistant", "content": "Four."},
    ]
    document = rendered(tokenizer, messages, tools=[{"type": "function", "function": {"name": "add"}}])
    text = tokenizer.decode(document.input_ids)
    assert "# Tools" in text
    assert "<tool_response>\nsum=4\n</tool_response>" in text
    call_text = '<tool_call>\n{"name": "add", "arguments": {"a": 2}}\n</tool_call><|im_end|>'
    assert pieces(tokenizer, document) == [call_text, EMPTY_THOUGHT + "Four.<|im_end|>"]


def test_a_tool_turn_that_cannot_be_replaced_is_found_by_its_prefixes() -> None:
    """The mark is refused here (a tool reply must follow a call), so the turn is located by rendering up to it."""
    guard = (
        "{% for m in messages %}{% if m.role == 'tool' and not messages[loop.index0 - 1].tool_calls %}"
        "{{ raise_exception('a tool reply without a call') }}{% endif %}{% endfor %}"
    )
    tokenizer = tiny_tokenizer(chat_template=guard + QWEN_LIKE.replace("loop.last or thought and loop.last", "false"))
    call = {"type": "function", "function": {"name": "add", "arguments": {}}}
    messages = [
        CHAT[0],
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": "4"},
        {"role": "assistant", "content": "Four."},
    ]
    found = pieces(tokenizer, rendered(tokenizer, messages))
    assert found[0].strip() == '<tool_call>\n{"name": "add", "arguments": {}}\n</tool_call><|im_end|>'
    assert found[1] == "Four.<|im_end|>"


def test_template_refusals_are_reasons() -> None:
    """M10: each refused row is dropped with the template's message; the legal one is kept."""
    tokenizer = tiny_tokenizer(chat_template=STRICT)
    for roles in ("uua", "sua"):
        names = {"u": "user", "a": "assistant", "s": "system"}
        outcome = render(tokenizer, chat([{"role": names[r], "content": "hi"} for r in roles]), max_length=64)
        assert isinstance(outcome, DropReason)
        assert "roles must alternate" in outcome
    assert pieces(tokenizer, rendered(tokenizer, CHAT[:2])) == [" It is four. <|im_end|>"]
    refused = render_prompt(tokenizer, [{"role": "system", "content": "s"}, CHAT[0]])
    assert isinstance(refused, DropReason)


def test_any_separator_keeps_every_row() -> None:
    """M13: a hundred rows through a template with its own separators: none is lost, every answer is whole."""
    plain = (
        "{% for m in messages %}{{ m.role.upper() + ':' + m.content + '\n### ' }}{% endfor %}"
        "{% if add_generation_prompt %}ASSISTANT:{% endif %}"
    )
    for template in (STRICT, plain, CHATML):
        tokenizer = tiny_tokenizer(chat_template=template)
        for index in range(100):
            answer = f"answer {index}\n\n  with é, 你好 and  blanks"
            document = rendered(tokenizer, [CHAT[0], {"role": "assistant", "content": answer}])
            assert supervised_text(tokenizer, document).removesuffix("<|im_end|>").strip() == answer


def test_answer_first_in_the_text_and_stripped_blanks() -> None:
    """M06: a span that ends at token 0, and an answer that the template trims."""
    bare = "{% for m in messages %}{{ m.content | trim + ';' }}{% endfor %}"
    tokenizer = tiny_tokenizer(chat_template=bare)
    document = rendered(tokenizer, [{"role": "assistant", "content": "a"}, {"role": "user", "content": "b"}])
    assert document.loss_mask == [1, 0, 0, 0]
    trimmed = rendered(tokenizer, [CHAT[0], {"role": "assistant", "content": "  spaced \n"}])
    assert pieces(tokenizer, trimmed) == ["spaced"]


def test_answers_that_begin_and_end_with_blanks_are_kept_exactly() -> None:
    tokenizer = tiny_tokenizer()
    for answer in ("\n\nfour", "four  ", " \n ", "\tfour\n", "é", "👍🏽", ""):
        document = rendered(tokenizer, [CHAT[0], {"role": "assistant", "content": answer}])
        assert pieces(tokenizer, document) == [answer + "<|im_end|>"], repr(answer)


def test_trimmed_offsets_lose_no_blank() -> None:
    """Byte-level tokenizers may leave blanks out of their offsets; the spans must not."""
    tokenizer = tiny_tokenizer()
    tokenizer.backend_tokenizer.post_processor = processors.ByteLevel(trim_offsets=True)
    for answer in ("four is it", "\n\nfour  \n"):
        document = rendered(tokenizer, [CHAT[0], {"role": "assistant", "content": answer}, CHAT[2]])
        assert pieces(tokenizer, document) == [answer + "<|im_end|>"]


def test_terminator_that_is_not_eos_and_terminator_in_the_answer() -> None:
    """M09: Gemma-like turns end with a special token that is not the tokenizer's eos; it is never doubled."""
    tokenizer = tiny_tokenizer(chat_template=CHATML.replace("<|im_end|>", "<|endoftext|>"))
    assert pieces(tokenizer, rendered(tokenizer, CHAT[:2])) == ["It is four.<|endoftext|>"]
    tokenizer = tiny_tokenizer()
    with_end = [CHAT[0], {"role": "assistant", "content": "Four.<|im_end|>"}]
    document = rendered(tokenizer, with_end)
    assert pieces(tokenizer, document) == ["Four.<|im_end|>"]
    assert tokenizer.decode(document.input_ids).count("<|im_end|>") == 2


def test_header_of_the_next_turn_is_never_taken_for_a_terminator() -> None:
    unended = CHATML.replace("<|im_end|>", "")
    document = rendered(tiny_tokenizer(chat_template=unended), CHAT)
    assert pieces(tiny_tokenizer(), document) == ["It is four.", "Over the lazy dog."]


def test_truncation_keeps_the_surviving_part_without_a_terminator() -> None:
    """M05: two tokens into the answer, two supervised."""
    tokenizer = tiny_tokenizer()
    start, end = rendered(tokenizer, CHAT[:2]).spans[0]
    assert end - start > 3
    cut = rendered(tokenizer, CHAT[:2], max_length=start + 2)
    assert cut.spans == [(start, start + 2)]
    assert len(cut.input_ids) == start + 2
    assert tokenizer.eos_token_id not in cut.input_ids[start:]


def test_truncation_that_leaves_nothing_is_a_reason() -> None:
    """D12."""
    tokenizer = tiny_tokenizer()
    start, _ = rendered(tokenizer, CHAT[:2]).spans[0]
    outcome = render(tokenizer, chat(CHAT[:2]), max_length=start)
    assert isinstance(outcome, DropReason)
    assert "max_length" in outcome


def test_bos_is_there_once() -> None:
    """M14: template and post-processor both add it; plain text still gets its own."""
    tokenizer = tiny_tokenizer(chat_template="{{ bos_token }}" + CHATML.replace("<|im_start|>", "# "))
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single="<|im_start|> $A", special_tokens=[("<|im_start|>", 1)]
    )
    assert tokenizer(tokenizer.apply_chat_template(CHAT, tokenize=False)).input_ids[:2] == [1, 1]
    assert rendered(tokenizer, CHAT).input_ids.count(1) == 1
    prompt = render_prompt(tokenizer, CHAT[:1])
    assert not isinstance(prompt, DropReason)
    assert prompt.count(1) == 1
    plain = render(tokenizer, chat([], text="Hello there"), max_length=64)
    assert isinstance(plain, Document)
    assert plain.input_ids.count(1) == 1


def test_prompt_is_the_beginning_of_the_rendered_chat() -> None:
    """What the target answers is what training puts before the span."""
    tokenizer = tiny_tokenizer()
    document = rendered(tokenizer, CHAT[:2], system_prompt="Be brief.")
    prompt = render_prompt(tokenizer, CHAT[:1], system_prompt="Be brief.")
    assert prompt == document.input_ids[: document.spans[0][0]]
    own = render_prompt(tokenizer, [{"role": "system", "content": "own"}, CHAT[0]], system_prompt="Be brief.")
    assert not isinstance(own, DropReason)
    assert "Be brief." not in tokenizer.decode(own)


def test_no_chat_template() -> None:
    """M15: chats end in an error that names the ways out; plain text is supervised whole."""
    tokenizer = tiny_tokenizer(chat_template=None)
    for call in (lambda: render(tokenizer, chat(CHAT), max_length=64), lambda: render_prompt(tokenizer, CHAT[:1])):
        with pytest.raises(UserError, match=r"instruct model.*target\.chat_template.*plain text"):
            call()
    document = render(tokenizer, chat([], text="The lazy dog"), max_length=64)
    assert isinstance(document, Document)
    assert document.loss_mask == [1] * len(document.input_ids)


def test_pad_equal_to_eos_changes_nothing() -> None:
    """M16: nothing is found by its id."""
    tokenizer = tiny_tokenizer()
    tokenizer.pad_token = tokenizer.eos_token
    assert pieces(tokenizer, rendered(tokenizer, CHAT)) == ["It is four.<|im_end|>", "Over the lazy dog.<|im_end|>"]


def test_template_hash_sees_template_kwargs_and_system_prompt() -> None:
    """M18."""
    tokenizer = tiny_tokenizer()
    hashes = {
        template_hash(tokenizer),
        template_hash(tokenizer, {"enable_thinking": False}),
        template_hash(tokenizer, {"enable_thinking": True}),
        template_hash(tokenizer, {}, "Be brief."),
        template_hash(tiny_tokenizer(chat_template=STRICT)),
    }
    assert len(hashes) == 5
    assert template_hash(tokenizer, {}) == template_hash(tiny_tokenizer(), None)


def test_reserved_template_arguments_are_refused() -> None:
    with pytest.raises(UserError, match="add_generation_prompt"):
        render_prompt(tiny_tokenizer(), CHAT[:1], chat_template_kwargs={"add_generation_prompt": False})


def test_inspect_rows() -> None:
    tokenizer = tiny_tokenizer()
    (row,) = inspect_rows(tokenizer, [rendered(tokenizer, CHAT)])
    assert set(row) == {"id", "input_ids", "loss_mask", "text", "supervised_text"}
    assert len(row["input_ids"]) == len(row["loss_mask"])
    assert row["text"] == tokenizer.apply_chat_template(CHAT, tokenize=False)
    assert row["supervised_text"] == "It is four.<|im_end|>Over the lazy dog.<|im_end|>"


def test_tokenizers_are_compared_by_what_ids_mean() -> None:
    """V04, V05: widths play no part; one differing id or another eos does."""
    a = tiny_tokenizer()
    check_same_tokenizer(a, tiny_tokenizer(), ("the target", "the draft"))
    other_stop = tiny_tokenizer()
    other_stop.eos_token = "<|endoftext|>"
    with pytest.raises(UserError, match=r"eos is id 2 .*<\|im_end\|>.* and id 3 .*<\|endoftext\|>"):
        check_same_tokenizer(a, other_stop, ("the target", "the draft"))
    longer = tiny_tokenizer()
    longer.add_tokens(["<extra>"])
    with pytest.raises(UserError, match="id 320 is nothing in the target and '<extra>' in the draft"):
        check_same_tokenizer(a, longer, ("the target", "the draft"))
    shorter = tiny_tokenizer(vocab_size=319)
    shorter.add_tokens(["<other>"])
    with pytest.raises(UserError, match=r"id 319 is '.+' in the target and '<other>' in the draft"):
        check_same_tokenizer(a, shorter, ("the target", "the draft"))


def test_tokenizer_must_fit_the_embedding() -> None:
    """V09."""
    tokenizer = tiny_tokenizer()
    check_tokenizer_fits(tokenizer, 328)
    with pytest.raises(UserError, match="320 ids and the target only 310"):
        check_tokenizer_fits(tokenizer, 310)


def test_load_tokenizer_takes_a_template_file(tmp_path: Path) -> None:
    tiny_tokenizer(chat_template=None).save_pretrained(tmp_path)
    (tmp_path / "t.jinja").write_text(CHATML)
    assert load_tokenizer(str(tmp_path), chat_template=str(tmp_path / "t.jinja")).chat_template == CHATML
    with pytest.raises(UserError, match=r"target\.chat_template"):
        load_tokenizer(str(tmp_path), chat_template=str(tmp_path / "none.jinja"))
    with pytest.raises(UserError, match="cannot be loaded"):
        load_tokenizer(str(tmp_path / "nowhere"))
