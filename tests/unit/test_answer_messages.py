"""Later turns: earlier answers and calls stand in the prompt as the family's own server puts them."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from spec_train.data.answer_messages import answer_message, same_calls
from spec_train.data.responses import AnswerSettings, generate_responses
from spec_train.data.rows import Conversation, DropReason, usable_for_answers
from spec_train.decoding.sampling import Sampling
from spec_train.decoding.trace import RequestTrace
from spec_train.evaluation.turns import FollowUp, Suite, add_turn, next_turn
from tests.scripted import ScriptedTarget
from tests.templates import FAMILIES, Family, available, tokenizer_of
from tests.tiny import tiny_tokenizer

SETTINGS = AnswerSettings(Sampling(), 400, 40000, 2, {})
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "add",
            "description": "Adds.",
            "parameters": {"type": "object", "properties": {"a": {"type": "integer", "description": "first"}}},
        },
    }
]
CALL = {"id": "abcdefghi", "type": "function", "function": {"name": "add", "arguments": {"a": 1}}}
ASKED = {"role": "user", "content": "the first question"}
NEXT = {"role": "user", "content": "the second question"}
RESULT = {"role": "tool", "content": "7", "name": "add", "tool_call_id": "abcdefghi"}
DEEPSEEK_CALL = "<\uff5ctool▁calls▁begin\uff5c><\uff5ctool▁call▁begin\uff5c>{}<\uff5ctool▁call▁end\uff5c>"

# family, answer, (thought, content), how it stands in the next turn's prompt
TEXTS = [
    ("gpt-oss", "<|channel|>analysis<|message|>mull<|end|><|start|>assistant<|channel|>final<|message|>said<|return|>",
     ("mull", "said"), "<|start|>assistant<|channel|>final<|message|>said<|end|><|start|>user"),
    ("Qwen3", "<think>\nmull\n</think>\n\nsaid<|im_end|>", ("\nmull\n", "\n\nsaid"),
     "assistant\n\n\nsaid<|im_end|>\n<|im_start|>user"),
    ("DeepSeek R1", "<think>\nmull\n</think>\n\nsaid<\uff5cend▁of▁sentence\uff5c>", (None, "\n\nsaid"),
     "<\uff5cAssistant\uff5c>\n\nsaid<\uff5cend▁of▁sentence\uff5c><\uff5cUser\uff5c>"),
    ("DeepSeek V3.1", "said<\uff5cend▁of▁sentence\uff5c>", (None, "said"),
     "<\uff5cAssistant\uff5c></think>said<\uff5cend▁of▁sentence\uff5c><\uff5cUser\uff5c>"),
    ("Command R7B", "<|START_THINKING|>mull<|END_THINKING|><|START_RESPONSE|>said<|END_RESPONSE|><|END_OF_TURN_TOKEN|>",
     (None, "said"), "<|START_RESPONSE|>said<|END_RESPONSE|><|END_OF_TURN_TOKEN|><|START_OF_TURN_TOKEN|>"),
    ("Mistral Nemo", "said</s>", (None, "said"), "[/INST]said</s>[AVAILABLE_TOOLS]"),
    ("Llama 3.1, 3.3", "said<|eot_id|>", (None, "said"), "\n\nsaid<|eot_id|><|start_header_id|>user"),
]  # fmt: skip
# family, answer, how the call stands in the prompt of the answer to its result
CALLS = [
    ("gpt-oss", "<|channel|>analysis<|message|>mull<|end|><|start|>assistant<|channel|>commentary to=functions.add "
     '<|constrain|>json<|message|>{"a":1}<|call|>',
     '<|channel|>analysis<|message|>mull<|end|><|start|>assistant to=functions.add<|channel|>commentary json<|message|>'
     '{"a": 1}<|call|><|start|>functions.add to=assistant'),
    ("Qwen3", '<think>\nmull\n</think>\n\n<tool_call>\n{"name": "add", "arguments": {"a":1}}\n</tool_call><|im_end|>',
     '<think>\nmull\n</think>\n\n<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call><|im_end|>\n'),
    ("Qwen2.5", '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call><|im_end|>',
     '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call><|im_end|>\n'),
    ("Qwen3-Coder", "<tool_call>\n<function=add>\n<parameter=a>\n1\n</parameter>\n</function>\n</tool_call><|im_end|>",
     "<tool_call>\n<function=add>\n<parameter=a>\n1\n</parameter>\n</function>\n</tool_call><|im_end|>\n"),
    ("Mistral Nemo", '[TOOL_CALLS][{"name": "add", "arguments": {"a":1}}]</s>',
     '[TOOL_CALLS][{"name": "add", "arguments": {"a": 1}, "id": "abcdefghi"}]</s>[TOOL_RESULTS]'),
    ("Command A, tool use", '<|START_THINKING|>mull<|END_THINKING|><|START_ACTION|>[\n    {"tool_call_id": "0", '
     '"tool_name": "add", "parameters": {"a":1}}\n]<|END_ACTION|><|END_OF_TURN_TOKEN|>',
     '<|START_THINKING|>mull<|END_THINKING|><|START_ACTION|>['),
    ("DeepSeek V3.1", DEEPSEEK_CALL.format('add<\uff5ctool▁sep\uff5c>{"a":1}')
     + "<\uff5ctool▁calls▁end\uff5c><\uff5cend▁of▁sentence\uff5c>",
     DEEPSEEK_CALL.format('add<\uff5ctool▁sep\uff5c>{"a": 1}')
     + "<\uff5ctool▁calls▁end\uff5c><\uff5cend▁of▁sentence\uff5c>"),
    ("Llama 3.1, 3.3", '<|python_tag|>{"name": "add", "parameters": {"a":1}}<|eom_id|>',
     '{"name": "add", "parameters": {"a": 1}}<|eot_id|><|start_header_id|>ipython'),
]  # fmt: skip


def family_named(name: str) -> Family:
    family = next(family for family in FAMILIES if family.name == name)
    if not available(family):
        pytest.skip("published chat templates are not fetched: make install")
    return family


def told(tokenizer: Any, family: Family, answer: str, messages: list[Any], folder: Path) -> tuple[Any, ...]:
    """(answered prompts, what was dropped, notes) of a row of two turns; the second answer is the same again."""
    target = ScriptedTarget(tokenizer, {"": answer}, family.stops)
    notes = Counter[str]()
    documents, dropped = generate_responses(
        target,
        tokenizer,
        [Conversation("r", messages, TOOLS)],
        SETTINGS,
        folder,
        notes=notes,  # type: ignore[arg-type]
    )
    assert [tokenizer.decode(d.input_ids[d.spans[0][0] :]) for d in documents] == [answer] * len(documents)
    return target.prompts, dict(dropped), dict(notes)


@pytest.mark.parametrize(("name", "answer", "said", "expected"), TEXTS, ids=[entry[0] for entry in TEXTS])
def test_an_earlier_answer_stands_as_its_server_puts_it(
    name: str, answer: str, said: tuple[str | None, str], expected: str, tmp_path: Path
) -> None:
    family = family_named(name)
    tokenizer = tokenizer_of(family)
    prompts, dropped, _ = told(tokenizer, family, answer, [ASKED, {"role": "assistant", "content": ""}, NEXT], tmp_path)
    assert dropped == {}
    assert len(prompts) == 2
    before, found, _ = prompts[1].partition(expected)
    assert found, prompts[1]
    assert "mull" not in prompts[1]
    assert before.count("the first question") == 1
    prompt = tokenizer.encode(prompts[0], add_special_tokens=False)
    ids = tokenizer.encode(answer, add_special_tokens=False)
    stops = tokenizer.convert_tokens_to_ids(list(family.stops))
    message = answer_message(tokenizer, prompt, ids, stops, tools=TOOLS)
    assert not isinstance(message, DropReason)
    assert (message.get("reasoning_content"), message["content"]) == said
    suite = Suite("s", [], [], [])
    conversation = Conversation("r", [ASKED, {"role": "assistant", "content": ""}, NEXT], TOOLS)
    add_turn(suite, FollowUp(conversation, 1, -1, tokenizer, {}, stops))
    (again,) = next_turn(suite, [RequestTrace("r", suite.prompts[0], ids)], 40000).prompts
    assert tokenizer.decode(again) == prompts[1]


@pytest.mark.parametrize(("name", "answer", "expected"), CALLS, ids=[entry[0] for entry in CALLS])
def test_a_result_stands_behind_the_targets_own_equal_call(
    name: str, answer: str, expected: str, tmp_path: Path
) -> None:
    family = family_named(name)
    tokenizer = tokenizer_of(family)
    row = [ASKED, {"role": "assistant", "content": "", "tool_calls": [CALL]}, RESULT]
    prompts, dropped, notes = told(tokenizer, family, answer, row, tmp_path)
    assert (dropped, notes) == ({}, {})
    assert len(prompts) == 2
    assert expected in prompts[1], prompts[1]
    assert prompts[1].index(expected) < prompts[1].rindex("7")
    # A later turn of a suite: the gap is the target's call, and the row has its result.
    stops = tokenizer.convert_tokens_to_ids(list(family.stops))
    suite = Suite("s", [], [], [])
    add_turn(suite, FollowUp(Conversation("r", [ASKED, {"role": "assistant", "content": ""}, RESULT], TOOLS),
                             1, -1, tokenizer, {}, stops))  # fmt: skip
    ids = tokenizer.encode(answer, add_special_tokens=False)
    (again,) = next_turn(suite, [RequestTrace("r", suite.prompts[0], ids)], 40000).prompts
    assert tokenizer.decode(again) == prompts[1]


# family, answer, content, arguments of its calls of `add`
PARSED = [
    ("DeepSeek V3", "so: " + DEEPSEEK_CALL.format('function<\uff5ctool▁sep\uff5c>add\n```json\n{"a": 1}\n```')
     + "<\uff5ctool▁calls▁end\uff5c><\uff5cend▁of▁sentence\uff5c>", "so: ", [{"a": 1}]),
    ("DeepSeek V3.1", DEEPSEEK_CALL.format('add<\uff5ctool▁sep\uff5c>{"a": 1}')
     + '<\uff5ctool▁call▁begin\uff5c>add<\uff5ctool▁sep\uff5c>{"a": 2}<\uff5ctool▁call▁end\uff5c>'
     "<\uff5ctool▁calls▁end\uff5c><\uff5cend▁of▁sentence\uff5c>", "", [{"a": 1}, {"a": 2}]),
    ("gpt-oss", ' to=functions.add<|channel|>commentary json<|message|>{"a": {"b": []}}<|call|>', "",
     [{"a": {"b": []}}]),
    ("Mistral Small", 'so[TOOL_CALLS]add[ARGS]{"a": 1}[TOOL_CALLS]add{"a": 2}</s>', "so", [{"a": 1}, {"a": 2}]),
    ("Llama 3.1, 3.3", '{"name": "add", "parameters": {"a": 1}}; {"name": "add", "arguments": {"a": 2}}<|eot_id|>', "",
     [{"a": 1}, {"a": 2}]),
    ("Llama 3.1, 3.3", 'as JSON: {"name": "add"}<|eot_id|>', 'as JSON: {"name": "add"}', []),
    ("Qwen2.5", 'so\n<tool_call>\n{"name": "add", "arguments": "{\\"a\\": 1}"}\n</tool_call><|im_end|>', "so\n",
     [{"a": 1}]),
    ("Qwen3-Coder", "<tool_call>\n<function=add>\n<parameter=a>\n1\n</parameter>\n<parameter=b>\nx y\n</parameter>\n"
     "</function>\n</tool_call><|im_end|>", "", [{"a": 1, "b": "x y"}]),
    ("GLM-4.5", "\n\nso\n<tool_call>add\n<arg_key>a</arg_key>\n<arg_value>1</arg_value>\n</tool_call><|observation|>",
     "so", [{"a": 1}]),
]  # fmt: skip


@pytest.mark.parametrize(("name", "answer", "content", "arguments"), PARSED)
def test_calls_are_read_in_the_familys_form(name: str, answer: str, content: str, arguments: list[Any]) -> None:
    family = family_named(name)
    tokenizer = tokenizer_of(family)
    stops = tokenizer.convert_tokens_to_ids(list(family.stops))
    ids = tokenizer.encode(answer, add_special_tokens=False)
    message = answer_message(tokenizer, [5], ids, stops, tools=TOOLS)
    assert not isinstance(message, DropReason), message
    calls = message.get("tool_calls", [])
    assert message["content"] == content
    assert [call["function"] for call in calls] == [{"name": "add", "arguments": each} for each in arguments]
    assert all(len(call["id"]) == 9 and call["id"].isalnum() for call in calls)
    assert len({call["id"] for call in calls}) == len(calls)


# ------------------------------------------------------------------------------------------- rows with tools

TOOL_CHAT = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}{% for c in m.tool_calls or [] %}<tool_call>"
    "{{ {'name': c.function.name, 'arguments': c.function.arguments} | tojson }}</tool_call>{% endfor %}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def tool_call(name: str, **arguments: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "arguments": arguments}}


def written(name: str, arguments: str) -> str:
    return f'<tool_call>{{"name": "{name}", "arguments": {arguments}}}</tool_call><|im_end|>'


AGENT_ROW = [
    {"role": "user", "content": "begin"},
    {"role": "assistant", "content": "", "tool_calls": [tool_call("a", x=1, y=[2])]},
    {"role": "tool", "content": "result-a"},
    {"role": "assistant", "content": "", "tool_calls": [tool_call("b", z="q")]},
    {"role": "tool", "content": "result-b"},
    {"role": "assistant", "content": "the data's answer"},
]


def answers_of(replies: dict[str, str], row: list[Any], folder: Path, **changes: Any) -> tuple[Any, ...]:
    tokenizer = tiny_tokenizer(chat_template=TOOL_CHAT)
    target = ScriptedTarget(tokenizer, replies, ["<|im_end|>"])
    conversation = usable_for_answers(Conversation("r", row))
    assert isinstance(conversation, Conversation)
    notes = Counter[str]()
    documents, dropped = generate_responses(
        target,
        tokenizer,
        [conversation],
        SETTINGS,
        folder,
        notes=notes,  # type: ignore[arg-type]
    )
    return target.prompts, [tokenizer.decode(d.input_ids[slice(*d.spans[0])]) for d in documents], dropped, notes


def test_every_place_of_an_agent_row_is_answered(tmp_path: Path) -> None:
    """The first call equals the row's in another spelling; the second does not, so the row's stands as context."""
    replies = {
        "begin": written("a", '{"y":[2],"x":1}'),
        "result-a": written("b", '{"z": "else"}'),
        "result-b": "done<|im_end|>",
    }
    prompts, answers, dropped, notes = answers_of(replies, AGENT_ROW, tmp_path)
    assert answers == list(replies.values())
    assert not dropped
    assert dict(notes) == {"tool results that stand behind the row's own call: the target called otherwise": 1}
    assert prompts[2] == (
        "<|im_start|>user\nbegin<|im_end|>\n"
        '<|im_start|>assistant\n<tool_call>{"name": "a", "arguments": {"x": 1, "y": [2]}}</tool_call><|im_end|>\n'
        "<|im_start|>tool\nresult-a<|im_end|>\n"
        '<|im_start|>assistant\n<tool_call>{"name": "b", "arguments": {"z": "q"}}</tool_call><|im_end|>\n'
        "<|im_start|>tool\nresult-b<|im_end|>\n<|im_start|>assistant\n"
    )
    assert "the data's answer" not in "".join(prompts)


@pytest.mark.parametrize(
    ("reply", "row", "reason"),
    [
        ("<|im_end|>", [ASKED, {"role": "assistant", "content": "x"}, NEXT], "after an empty answer"),
        (written("a", "{}"), [ASKED, {"role": "assistant", "content": "x"}, NEXT],
         "whose result the row does not hold"),
        ("<tool_call>{broken</tool_call><|im_end|>", [ASKED, {"role": "assistant", "content": "x"}, NEXT],
         "the target's own call of a tool, which cannot be read"),
        ("a <|im_start|> b<|im_end|>", [ASKED, {"role": "assistant", "content": "x"}, NEXT],
         "an answer that holds <|im_start|>, in a form that is not known"),
        ("said<|im_end|>", [ASKED, {"role": "assistant", "content": "x"}, {"role": "tool", "content": "7"}],
         "a tool's result that no call stands before"),
    ],
)  # fmt: skip
def test_turns_that_cannot_follow_are_counted(reply: str, row: list[Any], reason: str, tmp_path: Path) -> None:
    longer = [*row, {"role": "assistant", "content": "y"}, {"role": "user", "content": "third"}]
    _, answers, dropped, _ = answers_of({"": reply}, longer, tmp_path)
    assert answers == [reply]
    ((found, count),) = dropped.items()
    assert reason in found
    assert count == 2  # with the first answer, every place of the row


def test_calls_are_the_same_where_names_and_json_values_are() -> None:
    own = [tool_call("a", x=1, y={"b": [1, 2], "c": None})]
    assert same_calls(own, [{"function": {"name": "a", "arguments": '{"y": {"c": null, "b": [1, 2]}, "x": 1}'}}])
    assert not same_calls(own, [tool_call("a", x="1", y={"b": [1, 2], "c": None})])
    assert not same_calls(own, [tool_call("b", x=1, y={"b": [1, 2], "c": None})])
    assert not same_calls(own, own * 2)
    assert not same_calls([*own, tool_call("c")], [tool_call("c"), *own])


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        ("a thought</think>said<|im_end|>", ("a thought", "said")),
        ("<think>cut off", ("cut off", "")),
        ("said<|im_end|>", (None, "said")),
    ],
)
def test_thoughts_whose_opening_is_missing_or_that_nobody_closes(answer: str, expected: tuple[str | None, str]) -> None:
    thinking = TOOL_CHAT.replace("{{ m.content }}", "<think>{{ m.reasoning_content }}</think>{{ m.content }}")
    tokenizer = tiny_tokenizer(chat_template=thinking)
    message = answer_message(tokenizer, [5], tokenizer.encode(answer), [2])
    assert not isinstance(message, DropReason)
    assert (message.get("reasoning_content"), message["content"]) == expected
    plain = answer_message(tiny_tokenizer(), [5], tokenizer.encode("a</think>b"), [2])
    assert plain == {"role": "assistant", "content": "a</think>b"}  # no form of this target: its words
