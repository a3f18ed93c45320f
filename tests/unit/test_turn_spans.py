"""What a row says stands in its render or the row is dropped; what the target writes is supervised, and nothing else.

Templates here are reduced to one habit each of published ones; tests/unit/test_templates.py tries those themselves.
"""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken
from transformers import GenerationConfig, GPT2Config, LlamaConfig, PreTrainedTokenizerFast

from spec_train.data.chat import render, render_prompt
from spec_train.data.documents import Document
from spec_train.data.rows import Conversation, DropReason, conversation_from_row
from spec_train.pipeline import inspect_rows
from spec_train.recipe import Recipe
from spec_train.run import Run
from spec_train.stages.responses import render_kept
from tests.tiny import CHATML, tiny_tokenizer

Row = dict[str, Any]

PARTS = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% for p in m.content %}{% if p.type == 'text' %}{{ p.text }}"
    "{% endif %}{% endfor %}<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
# Calls and results as ChatML; `CALLS` stands for how a calling turn is printed.
AGENT = (
    "{% set ns = namespace(calls=0) %}{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.role == 'tool' %}[{{ ns.calls }}] {{ m.content }}"
    "{% elif m.tool_calls %}CALLS"
    "{% for c in m.tool_calls %}{% set ns.calls = ns.calls + 1 %}<c>{{ c.function | tojson }}</c>{% endfor %}"
    "{% else %}{{ m.content }}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
ASK, ANSWER = {"role": "user", "content": "two plus two?"}, {"role": "assistant", "content": "It is four."}
MORE = [{"role": "user", "content": "and the fox?"}, {"role": "assistant", "content": "Over the lazy dog."}]


def call(name: str = "add", **arguments: Any) -> Row:
    return {"type": "function", "function": {"name": name, "arguments": arguments}}


def tokenizer_with(template: str, *special: str) -> PreTrainedTokenizerFast:
    tokenizer = tiny_tokenizer(chat_template=template)
    tokenizer.add_tokens([AddedToken(token, special=True, normalized=False) for token in special])
    return tokenizer


def normalised(messages: list[Row], **row: Any) -> Conversation:
    conversation = conversation_from_row({"messages": messages, **row})
    assert isinstance(conversation, Conversation), conversation
    return conversation


def outcome(tokenizer: PreTrainedTokenizerFast, messages: list[Row], **options: Any) -> Document | DropReason:
    return render(tokenizer, normalised(messages), **{"max_length": 4096, **options})


def spoken(tokenizer: PreTrainedTokenizerFast, messages: list[Row], **options: Any) -> list[str]:
    """The text of each supervised span."""
    document = outcome(tokenizer, messages, **options)
    assert isinstance(document, Document), document
    return [tokenizer.decode(document.input_ids[start:end]) for start, end in document.spans]


def shown(tokenizer: PreTrainedTokenizerFast, messages: list[Row]) -> str:
    document = outcome(tokenizer, messages)
    assert isinstance(document, Document), document
    return str(tokenizer.decode(document.input_ids))


# ------------------------------------------------------------------------------- the form that a template reads


def test_content_comes_as_parts_to_templates_that_walk_parts() -> None:
    tokenizer = tiny_tokenizer(chat_template=PARTS)
    in_parts = [{**m, "content": [{"type": "text", "text": m["content"]}]} for m in (ASK, ANSWER, *MORE)]
    for messages in ([ASK, ANSWER, *MORE], in_parts):
        assert spoken(tokenizer, messages) == ["It is four.<|im_end|>", "Over the lazy dog.<|im_end|>"]
        assert shown(tokenizer, messages).startswith("<|im_start|>user\ntwo plus two?<|im_end|>\n")
    prompt = render_prompt(tokenizer, normalised([ASK, ANSWER]).messages[:1])
    assert not isinstance(prompt, DropReason)
    assert tokenizer.decode(prompt) == "<|im_start|>user\ntwo plus two?<|im_end|>\n<|im_start|>assistant\n"


def test_several_parts_stay_parts_or_are_joined_as_vllm_joins_them() -> None:
    asked = {"role": "user", "content": [{"type": "text", "text": "two"}, {"type": "text", "text": "plus two?"}]}
    assert "\ntwoplus two?<" in shown(tiny_tokenizer(chat_template=PARTS), [asked, ANSWER])
    assert "\ntwo\nplus two?<" in shown(tiny_tokenizer(), [asked, ANSWER])


@pytest.mark.parametrize("content", [None, ""])
def test_a_call_without_text_has_null_content_where_only_that_shows_the_call(content: str | None) -> None:
    template = AGENT.replace("elif m.tool_calls", "elif m.content is none").replace("CALLS", "CALL ")
    messages = [ASK, {"role": "assistant", "content": content, "tool_calls": [call(a=2)]}]
    expected = 'CALL <c>{"name": "add", "arguments": {"a": 2}}</c><|im_end|>'
    assert spoken(tiny_tokenizer(chat_template=template), messages) == [expected]
    plain = AGENT.replace("CALLS", "{{ m.content + 'CALL ' }}")  # and this one takes text only
    assert spoken(tiny_tokenizer(chat_template=plain), messages) == [expected]


def test_arguments_come_as_json_text_where_only_that_is_taken() -> None:
    template = AGENT.replace("{{ c.function | tojson }}", "{{ c.function.name + ' ' + c.function.arguments }}")
    messages = [ASK, {"role": "assistant", "content": None, "tool_calls": [call(a="é", b=None)]}]
    found = spoken(tiny_tokenizer(chat_template=template), messages)
    assert found == ['CALLS<c>add {"a": "é", "b": null}</c><|im_end|>']


@pytest.mark.parametrize("name", ["reasoning_content", "reasoning", "thinking", "thought", "tool_plan"])
@pytest.mark.parametrize("given", ["reasoning_content", "reasoning", "thinking", "tool_plan", "part"])
def test_a_thought_reaches_the_template_under_the_name_that_it_reads(name: str, given: str) -> None:
    template = AGENT.replace("CALLS", "{{ '<t>' + m.NAME + '</t>' }}").replace("NAME", name)
    turn: Row = {"role": "assistant", "content": "", "tool_calls": [call()]}
    if given == "part":
        turn["content"] = [{"type": "thinking", "thinking": "hm, two"}]
    else:
        turn[given] = "hm, two"
    (found,) = spoken(tiny_tokenizer(chat_template=template), [ASK, turn])
    assert found == '<t>hm, two</t><c>{"name": "add", "arguments": {}}</c><|im_end|>'


# ------------------------------------------------------------------------------- what is left out

SILENT = CHATML.replace("for message in messages", "for message in messages if message['role'] != ROLE")


@pytest.mark.parametrize(
    ("template", "messages", "reason"),
    [
        (SILENT.replace("ROLE", "'system'"), [{"role": "system", "content": "Be brief."}, ASK, ANSWER], "role system"),
        (SILENT.replace("ROLE", "'user'"), [ASK, ANSWER], "text of a turn of role user"),
        (CHATML.replace("message['content']", "message['content'][:5]"), [ASK, ANSWER], "changes the text"),
        (CHATML, [ASK, {**ANSWER, "reasoning": "hm"}], "leaves out the thought"),
        (CHATML, [ASK, {**ANSWER, "content": "Four.", "tool_calls": [call()]}], "leaves out a tool call"),
        (
            AGENT.replace("c.function |", "c.function.name |"),
            [ASK, {"role": "assistant", "content": "", "tool_calls": [call(a="lost")]}],
            "leaves out a tool call, or some of its arguments",
        ),
        (  # the arguments' words occur, but not in the call
            AGENT.replace("CALLS", "{{ m.content }}").replace("c.function |", "c.function.name |"),
            [ASK, {"role": "assistant", "content": "a is lost", "tool_calls": [call(a="lost")]}],
            "leaves out a tool call, or some of its arguments",
        ),
        (AGENT.replace("{{ m.content }}{% elif", "{% elif"), [
            ASK,
            {"role": "assistant", "content": "", "tool_calls": [call()]},
            {"role": "tool", "content": "4"},
            ANSWER,
        ], "text of a turn of role tool"),
    ],
)  # fmt: skip
def test_a_row_whose_text_is_not_in_the_render_is_dropped_and_says_which(
    template: str, messages: list[Row], reason: str
) -> None:
    tokenizer = tiny_tokenizer(chat_template=template)
    result = outcome(tokenizer, messages)
    assert isinstance(result, DropReason)
    assert reason in result


def test_a_prompt_whose_text_is_not_in_the_render_is_dropped_too() -> None:
    tokenizer = tiny_tokenizer(chat_template=SILENT.replace("ROLE", "'system'"))
    prompt = render_prompt(tokenizer, [ASK], system_prompt="Be brief.")
    assert isinstance(prompt, DropReason)
    assert "role system" in prompt
    assert not isinstance(render_prompt(tokenizer, [ASK]), DropReason)


def test_nested_arguments_are_found_in_other_notations() -> None:
    """XML-like calls: keys and values one by one, strings raw."""
    template = AGENT.replace(
        "{{ c.function | tojson }}",
        "{{ c.function.name }}{% for k, v in c.function.arguments.items() %}<{{ k }}>"
        "{{ v if v is string else v | tojson }}{% endfor %}",
    )
    turn = {"role": "assistant", "content": "", "tool_calls": [call(a='say "hi"\n', b={"c": [1.5, None, True]})]}
    (found,) = spoken(tiny_tokenizer(chat_template=template), [ASK, turn])
    assert found == 'CALLS<c>add<a>say "hi"\n<b>{"c": [1.5, null, true]}</c><|im_end|>'


THINKING = (
    "{% set ns = namespace(last=0) %}{% for m in messages %}{% if m.role == 'user' %}{% set ns.last = loop.index0 %}"
    "{% endif %}{% endfor %}{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% set text = m.content.split('</think>')[-1].lstrip('\n') %}"
    "{% set thought = m.reasoning_content or (m.content.split('</think>')[0].split('<think>')[-1].strip('\n') "
    "if '</think>' in m.content else '') %}"
    "{% if thought and loop.index0 > ns.last %}<think>\n{{ thought }}\n</think>\n\n{% endif %}{{ text }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@pytest.mark.parametrize("inline", [False, True])
def test_thoughts_that_a_template_strips_from_history_are_counted_and_the_last_one_is_supervised(inline: bool) -> None:
    def thinking(turn: Row, thought: str) -> Row:
        if inline:
            return {**turn, "content": f"<think>\n{thought}\n</think>\n\n{turn['content']}"}
        return {**turn, "reasoning": thought}

    tokenizer, notes = tiny_tokenizer(chat_template=THINKING), Counter[str]()
    messages = [ASK, thinking(ANSWER, "hm, two"), MORE[0], thinking(MORE[1], "a quick one")]
    found = spoken(tokenizer, messages, notes=notes)
    assert found == ["It is four.<|im_end|>", "<think>\na quick one\n</think>\n\nOver the lazy dog.<|im_end|>"]
    assert notes == {"thoughts of earlier turns that the chat template leaves out": 1}
    always = tiny_tokenizer(chat_template=THINKING.replace("loop.index0 > ns.last", "false"))
    dropped = outcome(always, [ASK, thinking(ANSWER, "hm, two")])
    assert isinstance(dropped, DropReason)
    assert "thought" in dropped


# ------------------------------------------------------------------------------- where turns lie


def test_text_that_depends_on_an_earlier_call_is_never_supervised() -> None:
    """Results are numbered by counting the calls before them: all that follows changes with a turn's calls."""
    messages = [
        ASK,
        {"role": "assistant", "content": "", "tool_calls": [call(a=1)]},
        {"role": "tool", "content": "one"},
        {"role": "assistant", "content": "", "tool_calls": [call("fetch", b=2), call("fetch", b=3)]},
        {"role": "tool", "content": "two"},
        ANSWER,
    ]
    calls = [
        'CALLS<c>{"name": "add", "arguments": {"a": 1}}</c><|im_end|>',
        'CALLS<c>{"name": "fetch", "arguments": {"b": 2}}</c><c>{"name": "fetch", "arguments": {"b": 3}}</c><|im_end|>',
    ]
    tokenizer = tiny_tokenizer(chat_template=AGENT)
    assert "[3] two" in shown(tokenizer, messages)
    assert spoken(tokenizer, messages) == [*calls, "It is four.<|im_end|>"]
    # A family that takes no other text in the place of a call, and strips a thought from it later.
    strict = (
        "{% for m in messages %}{% if m.role == 'tool' and not messages[loop.index0 - 1].tool_calls %}"
        "{{ raise_exception('a result without a call') }}{% endif %}{% endfor %}"
    ) + AGENT.replace(
        "CALLS", "CALLS{% if m.reasoning and loop.index0 + 2 >= messages | length %}{{ m.reasoning }}{% endif %}"
    )
    thinking = [{**m, "reasoning": "hm, two"} if m.get("tool_calls") else m for m in messages]
    assert spoken(tiny_tokenizer(chat_template=strict), thinking) == [*calls, "It is four.<|im_end|>"]


def test_a_thought_that_the_model_opens_is_supervised_with_its_marks() -> None:
    template = CHATML.replace(
        "message['content'] + ",
        "('<START_THINKING>' + message.thinking + '<END_THINKING>' if message.thinking else '') + "
        "('<START_RESPONSE>' + message['content'] + '<END_RESPONSE>' if message['role'] == 'assistant' "
        "else message['content']) + ",
    )
    marks = ("<START_THINKING>", "<END_THINKING>", "<START_RESPONSE>", "<END_RESPONSE>")
    for special in ((), marks):
        found = spoken(tokenizer_with(template, *special), [ASK, {**ANSWER, "reasoning": "hm"}, *MORE])
        assert found == [
            "<START_THINKING>hm<END_THINKING><START_RESPONSE>It is four.<END_RESPONSE><|im_end|>",
            "<START_RESPONSE>Over the lazy dog.<END_RESPONSE><|im_end|>",
        ]
    opened = template.replace("<|im_start|>assistant\n", "<|im_start|>assistant\n<START_THINKING>")
    found = spoken(tokenizer_with(opened, *marks), [ASK, {**ANSWER, "reasoning": "hm"}])
    assert found == ["hm<END_THINKING><START_RESPONSE>It is four.<END_RESPONSE><|im_end|>"]


def test_a_prompt_that_opens_a_thought_which_history_lacks() -> None:
    """DeepSeek-R1 style: the prompt of a turn is not the beginning of the rendered chat."""
    template = CHATML.replace("assistant\n' }}{% endif", "assistant\n<think>\n' }}{% endif")
    found = spoken(tiny_tokenizer(chat_template=template), [ASK, {**ANSWER, "content": "<b>four"}, *MORE])
    assert found == ["<b>four<|im_end|>", "Over the lazy dog.<|im_end|>"]


def test_system_text_that_only_prompts_hold_comes_from_the_last_prompt() -> None:
    """Mistral v0.3 style: the system text stands before the last user turn, while that is the last of the chat."""
    template = (
        "{% for m in messages if m.role != 'system' %}{% if m.role == 'user' %}[INST] "
        "{% if loop.last and messages[0].role == 'system' %}{{ messages[0].content }}\n\n{% endif %}{{ m.content }}"
        "[/INST]{% else %} {{ m.content }}</s>{% endif %}{% endfor %}"
    )
    tokenizer = tokenizer_with(template, "[INST]", "[/INST]", "</s>")
    messages = [{"role": "system", "content": "Be brief."}, ASK, ANSWER, *MORE]
    text = shown(tokenizer, messages)
    assert text == (
        "[INST] two plus two?[/INST] It is four.</s>[INST] Be brief.\n\nand the fox?[/INST] Over the lazy dog.</s>"
    )
    assert spoken(tokenizer, messages) == [" It is four.</s>", " Over the lazy dog.</s>"]


def test_every_token_that_ends_a_turn_is_supervised_once() -> None:
    two = tokenizer_with(CHATML.replace("<|im_end|>", "</r></t>"), "</r>", "</t>")
    assert spoken(two, [ASK, ANSWER, *MORE]) == ["It is four.</r></t>", "Over the lazy dog.</r></t>"]
    stop = two.convert_tokens_to_ids("</r>")
    assert spoken(two, [ASK, ANSWER], stop_ids=[stop]) == ["It is four.</r>"]  # the target stops there
    apart = tokenizer_with(CHATML.replace("<|im_end|>", "\n</answer>\n</t>"), "</t>")
    assert spoken(apart, [ASK, ANSWER, *MORE])[0] == "It is four.\n</answer>\n</t>"
    after = CHATML.replace("{% if add", "{% if not add_generation_prompt %}{{ '<|endoftext|>' }}{% endif %}{% if add")
    tokenizer = tiny_tokenizer(chat_template=after)  # Phi-3 style: a last token that the model does not write
    tokenizer.eos_token = "<|endoftext|>"
    assert spoken(tokenizer, [ASK, ANSWER, *MORE]) == ["It is four.<|im_end|>", "Over the lazy dog.<|im_end|>"]
    other = CHATML.replace("'<|im_end|>\n'", "('</r>' if loop.last and not add_generation_prompt else '</t>')")
    turns = spoken(tokenizer_with(other, "</r>", "</t>"), [ASK, ANSWER, *MORE])  # gpt-oss style
    assert turns == ["It is four.</t>", "Over the lazy dog.</r>"]


def test_a_turn_that_ends_by_the_next_header_is_supervised_with_that_token() -> None:
    """GLM-4 style: <|user|> and <|observation|> are among the eos of the generation config."""
    template = (
        "{% for m in messages %}<|{{ 'observation' if m.role == 'tool' else m.role }}|>\n{{ m.content }}"
        "{% for c in m.tool_calls or [] %}{{ c.function.name }}\n{{ c.function.arguments | tojson }}{% endfor %}"
        "{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
    )
    tokenizer = tokenizer_with(template, "<|user|>", "<|assistant|>", "<|observation|>")
    stops = tokenizer.convert_tokens_to_ids(["<|user|>", "<|observation|>"])
    agent = [{"role": "assistant", "content": "", "tool_calls": [call(a=2)]}, {"role": "tool", "content": "4"}]
    found = spoken(tokenizer, [ASK, *agent, ANSWER, *MORE], stop_ids=stops)
    assert found == [
        '\nadd\n{"a": 2}<|observation|>',
        "\nIt is four.<|user|>",
        "\nOver the lazy dog.",
    ]


def test_an_answer_that_holds_the_end_of_a_turn_is_dropped() -> None:
    result = outcome(tiny_tokenizer(), [ASK, {**ANSWER, "content": "It is<|im_end|> four."}])
    assert isinstance(result, DropReason)
    assert "<|im_end|>" in result


def test_a_token_across_the_edge_of_a_turn_is_supervised_on_neither_side() -> None:
    """The target sees the prompt's own tokens and would not write one that begins within them."""
    template = (
        "{% for m in messages %}{{ m.role }}: {{ m.content }};{% endfor %}"
        "{% if add_generation_prompt %}assistant: {% endif %}"
    )
    tokenizer = tiny_tokenizer(chat_template=template)
    answer = {"role": "assistant", "content": "the fox"}
    prompt = render_prompt(tokenizer, [ASK])
    document = outcome(tokenizer, [ASK, answer])
    assert isinstance(document, Document)
    assert not isinstance(prompt, DropReason)
    start, _ = document.spans[0]
    assert " the" in [tokenizer.decode([token]) for token in document.input_ids]
    assert document.input_ids[: len(prompt)] != prompt  # " the" has swallowed the prompt's last blank
    assert tokenizer.decode(document.input_ids[:start]).endswith("assistant: the")
    flush = tiny_tokenizer(chat_template=template.replace("assistant: {%", "assistant:{%"))
    assert spoken(flush, [ASK, answer]) == [" the fox"]


# ------------------------------------------------------------------------------- rows of a run


def run_on(folder: Path, config: LlamaConfig | GPT2Config, rows: list[Row], **data: Any) -> Run:
    """A run whose target has a config and a tokenizer, and no weights: none of this needs them."""
    tokenizer = tiny_tokenizer()
    tokenizer.save_pretrained(folder)
    config.save_pretrained(folder)
    GenerationConfig(eos_token_id=[2, 3]).save_pretrained(folder)
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    recipe = {
        "run": {"name": "r", "output_dir": str(folder / "run")},
        "target": {"model": str(folder)},
        "data": {"sources": [{"path": str(folder / "rows.jsonl")}], **data},
        "responses": {"mode": "keep"},
        "speculator": {"type": "eagle3"},
    }
    return Run(Recipe.model_validate(recipe))


@pytest.mark.parametrize("config", [LlamaConfig(max_position_embeddings=128), GPT2Config(n_positions=128)])
def test_kept_rows_are_cut_at_the_targets_own_limit_and_counted(
    tmp_path: Path, config: LlamaConfig | GPT2Config
) -> None:
    long = [ASK, {"role": "assistant", "content": "four " * 300}]
    conversations = [normalised(long, id=str(index)) for index in range(3)] + [normalised([ASK, ANSWER], id="short")]
    notes = Counter[str]()
    documents, dropped = render_kept(run_on(tmp_path, config, []), conversations, notes=notes)
    assert [len(document.input_ids) for document in documents[:3]] == [128] * 3
    assert not dropped
    assert notes == {"rows cut at 128 tokens, the target's own limit": 3}
    notes.clear()
    documents, _ = render_kept(run_on(tmp_path, config, [], max_length=100), conversations, notes=notes)
    assert max(len(document.input_ids) for document in documents) == 100
    assert notes == {"rows cut at 100 tokens, data.max_length": 3}


def test_inspect_counts_what_is_dropped_and_what_is_left_out_on_purpose(tmp_path: Path) -> None:
    rows = [
        {"messages": [ASK, {**ANSWER, "loss": 0.5}], "id": "a"},
        {"messages": [ASK, {**ANSWER, "reasoning": "hm, two"}, *MORE], "id": "b"},
        {"messages": [ASK, {**ANSWER, "reasoning": "hm, two"}], "id": "c"},
        {"messages": [ASK, {"role": "assistant", "content": "", "tool_calls": [call()]}], "id": "d"},
    ]
    run = run_on(tmp_path, LlamaConfig(), rows)
    run.tokenizer.chat_template = THINKING
    run.tokenizer.save_pretrained(tmp_path)
    shown_rows, counts = inspect_rows(run.recipe, 2)
    assert [row["id"] for row in shown_rows] == ["a", "b"]
    assert counts == {
        "kept": 3,
        "dropped": {"the chat template leaves out a tool call, or some of its arguments": 1},
        "notes": {
            "rows whose messages have 'loss', which is not read": 1,
            "thoughts of earlier turns that the chat template leaves out": 1,
        },
    }
