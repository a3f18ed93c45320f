"""Reading conversations: every common shape, every reason to drop a row, and an honest split."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest

from spec_train.data.chat import render
from spec_train.data.documents import Document, read_documents, write_documents
from spec_train.data.prompts import (
    load_conversations,
    read_conversations,
    split_conversations,
    write_conversations,
)
from spec_train.data.rows import Conversation, conversation_from_row
from spec_train.errors import UserError
from spec_train.recipe import Source
from tests.tiny import tiny_tokenizer

USER = {"role": "user", "content": "two plus two?"}
ANSWER = {"role": "assistant", "content": "four"}


def jsonl(path: Path, *rows: Any) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def load(
    path: Path, mode: Any = "keep", *, max_drop_rate: float = 1.0, **fields: Any
) -> tuple[list[Conversation], Any]:
    return load_conversations([Source(path=str(path), **fields)], mode=mode, max_drop_rate=max_drop_rate)


def one(row: Any) -> Conversation:
    conversation = conversation_from_row(row)
    assert isinstance(conversation, Conversation), conversation
    return conversation


def test_unusable_rows_are_counted_by_reason(tmp_path: Path) -> None:
    """D01: empty, system only, assistant first, user only, good."""
    file = jsonl(
        tmp_path / "a.jsonl",
        [],
        {"messages": [{"role": "system", "content": "s"}]},
        {"messages": [ANSWER, USER, ANSWER]},
        {"messages": [USER]},
        {"messages": [USER, ANSWER]},
    )
    kept, dropped = load(file)
    assert [conversation.id for conversation in kept] == ["a.jsonl-5"]
    assert sorted(dropped.values()) == [1, 1, 1, 1]
    told = " | ".join(dropped)
    for reason, line in (("no messages", 1), ("no user turn", 2), ("the first turn is the assistant's", 3)):
        assert f"{reason} (first: {file}:{line})" in told
    assert "no assistant turn" in told
    # A lone user turn is exactly what regeneration needs.
    assert [conversation.id for conversation in load(file, "regenerate")[0]] == ["a.jsonl-4", "a.jsonl-5"]


def test_too_many_dropped_rows_stop_the_run(tmp_path: Path) -> None:
    file = jsonl(tmp_path / "a.jsonl", {"messages": []}, {"messages": []}, {"messages": [USER, ANSWER]})
    with pytest.raises(UserError, match=r"2 of 3 rows .*max_drop_rate 0\.5 .*2 x no messages"):
        load(file, max_drop_rate=0.5)
    with pytest.raises(UserError, match=r"no usable row is left .*1 x no messages"):
        load(jsonl(tmp_path / "b.jsonl", {"messages": []}))
    with pytest.raises(UserError, match="the sources are empty"):
        load(jsonl(tmp_path / "c.jsonl"))


def test_tool_turns_survive_whatever_their_spelling(tmp_path: Path) -> None:
    """D02, D03: roles, calls, ids and tools are kept; arguments as object or JSON text give the same in any order."""

    def row(arguments: Any, content: Any) -> dict[str, Any]:
        call = {"id": "c1", "type": "function", "function": {"name": "add", "arguments": arguments}}
        reply = {"role": "tool", "tool_call_id": "c1", "name": "add", "content": content}
        return {
            "messages": [USER, {"role": "assistant", "content": None, "tool_calls": [call]}, reply, ANSWER],
            "tools": json.dumps([{"name": "add", "parameters": {}}]),
        }

    rows = [row({"a": 2, "b": None}, "4"), row('{"a": 2, "b": null}', [{"type": "text", "text": "4"}])]
    forward, _ = load(jsonl(tmp_path / "f.jsonl", *rows))
    backward, _ = load(jsonl(tmp_path / "b.jsonl", *reversed(rows)))
    chats = [conversation.messages for conversation in forward + backward]
    assert all(messages == chats[0] for messages in chats)
    assert [message["role"] for message in chats[0]] == ["user", "assistant", "tool", "assistant"]
    assert chats[0][1] == {
        "role": "assistant",
        "content": "",
        "tool_calls": [{"id": "c1", "type": "function", "function": {"name": "add", "arguments": {"a": 2, "b": None}}}],
    }
    assert chats[0][2] == {"role": "tool", "content": "4", "tool_call_id": "c1", "name": "add"}
    assert forward[0].tools == [{"type": "function", "function": {"name": "add", "parameters": {}}}]


def test_sharegpt_keeps_all_turns_roles_and_the_system_text() -> None:
    """D04."""
    turns = [
        {"from": who, "value": f"{who} {i}"} for i, who in enumerate(["human", "gpt", "human", "gpt", "human", "gpt"])
    ]
    for key in ("system", "system_prompt"):
        conversation = one({key: "Be brief.", "conversations": turns})
        assert conversation.messages[0] == {"role": "system", "content": "Be brief."}
        assert [m["role"] for m in conversation.messages[1:]] == ["user", "assistant"] * 3
        assert [m["content"] for m in conversation.messages[1:]] == [turn["value"] for turn in turns]
        document = render(tiny_tokenizer(), conversation, max_length=4096)
        assert isinstance(document, Document)
        assert len(document.spans) == 3


def test_shapes_are_found_row_by_row_and_unknown_roles_named(tmp_path: Path) -> None:
    """D05: four shapes in one file, function_call and observation turns, and an odd role with its line."""
    call = {"from": "function_call", "value": '{"name": "add", "arguments": {"a": 2}}'}
    file = jsonl(
        tmp_path / "mixed.jsonl",
        {"conversations": [{"from": "human", "value": "hi"}, {"from": "gpt", "value": "hello"}]},
        {"conversations": [USER, ANSWER]},
        {"messages": [{"from": "human", "value": "hi"}, ANSWER]},
        {
            "conversations": [
                {"from": "human", "value": "hi"},
                call,
                {"from": "observation", "value": {"sum": 4}},
                ANSWER,
            ]
        },
        {"conversations": [{"from": "narrator", "value": "Once"}, ANSWER]},
    )
    kept, dropped = load(file)
    assert len(kept) == 4
    assert list(dropped) == [f"unknown role 'narrator' (first: {file}:5)"]
    assert kept[3].messages[1]["tool_calls"][0]["function"] == {"name": "add", "arguments": {"a": 2}}
    assert kept[3].messages[2] == {"role": "tool", "content": '{"sum": 4}'}


@pytest.mark.parametrize(
    ("row", "asked"),
    [
        ({"prompt": "hi"}, ["hi"]),
        ({"question": "hi", "answer": "ho"}, ["hi"]),
        ({"instruction": "add", "input": "2 2", "output": "4"}, ["add\n\n2 2"]),
        ({"instruction": "add", "input": "", "output": "4"}, ["add"]),
        ({"turns": ["hi", "and you?"]}, ["hi", "and you?"]),
        ({"prompt": [USER], "completion": [ANSWER]}, ["two plus two?"]),
    ],
)
def test_prompt_forms(row: dict[str, Any], asked: list[str], tmp_path: Path) -> None:
    (conversation,), _ = load(jsonl(tmp_path / "p.jsonl", row), "regenerate")
    assert [m["content"] for m in conversation.messages if m["role"] == "user"] == asked
    assert conversation.messages[-1]["role"] == "user"
    if "answer" in row or "output" in row or "completion" in row:
        (kept,), _ = load(tmp_path / "p.jsonl", "keep")
        assert kept.messages[-1]["role"] == "assistant"


def test_regeneration_cuts_trailing_answers_and_keeps_the_places_of_earlier_ones(tmp_path: Path) -> None:
    file = jsonl(tmp_path / "a.jsonl", {"messages": [USER, ANSWER, USER, ANSWER, ANSWER]}, {"text": "plain"})
    (conversation,), dropped = load(file, "regenerate")
    assert [message["role"] for message in conversation.messages] == ["user", "assistant", "user"]
    assert "plain text holds no prompt" in next(iter(dropped))
    assert load(file, "keep")[0][1].text == "plain"


def test_odd_rows_never_crash() -> None:
    odd: list[Any] = [
        3, None, "x", {}, {"messages": "hi"}, {"messages": [3]}, {"messages": [{"content": "x"}]},
        {"messages": [{"role": 7, "content": "x"}]}, {"messages": [{"role": "user", "content": {"a": 1}}]},
        {"messages": [{"role": "user", "content": [{"type": "image"}]}]}, {"text": ""}, {"prompt": 5},
        {"messages": [USER, {"role": "assistant", "tool_calls": [{"function": {}}]}]}, {"turns": []},
        {"messages": [USER, {"role": "assistant", "content": "x", "weight": 0.5}]}, {"text": "\ud800"},
        {"messages": [USER, ANSWER], "tools": "not json"}, {"messages": [{"role": "user", "content": "\ud800"}]},
    ]  # fmt: skip
    for row in odd:
        outcome = conversation_from_row(row)
        assert isinstance(outcome, str) or not outcome.messages, row


def test_broken_lines_are_named(tmp_path: Path) -> None:
    file = tmp_path / "broken.jsonl"
    file.write_text('{"prompt": "a"}\n\n{"prompt": \n', encoding="utf-8")
    with pytest.raises(UserError, match=r"broken\.jsonl:3: not a line of JSON"):
        load(file, "regenerate")
    file.write_bytes(b'{"prompt": "a"}\n{"prompt": "\xff"}\n')
    with pytest.raises(UserError, match="not UTF-8"):
        load(file, "regenerate")
    with pytest.raises(UserError, match="no such file"):
        load(tmp_path / "absent.jsonl")
    with pytest.raises(UserError, match="unknown kind of file"):
        load(jsonl(tmp_path / "rows.csv"))


def test_file_kinds_give_the_same_rows(tmp_path: Path) -> None:
    rows = [{"id": f"r{i}", "messages": [USER, {**ANSWER, "content": f"é {i}"}]} for i in range(3)]
    files = [jsonl(tmp_path / "a.jsonl", *rows), tmp_path / "a.jsonl.gz", tmp_path / "a.json", tmp_path / "a.parquet"]
    files[1].write_bytes(gzip.compress(files[0].read_bytes()))
    files[2].write_text(json.dumps(rows, indent=1), encoding="utf-8")
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), files[3])
    read = [[(c.id, c.messages) for c in load(file)[0]] for file in files]
    assert all(conversations == read[0] for conversations in read)
    assert len(read[0]) == 3
    (tmp_path / "bad.parquet").write_text("no")
    with pytest.raises(UserError, match="not a readable Parquet file"):
        load(tmp_path / "bad.parquet")


def test_field_format_limit_category_and_ids(tmp_path: Path) -> None:
    file = jsonl(tmp_path / "a.jsonl", *({"id": "same", "q": f"question {i}", "category": "own"} for i in range(5)))
    kept, _ = load(file, "regenerate", field="q", limit=3)
    assert [c.id for c in kept] == ["same", "same#2", "same#3"]
    assert {c.category for c in kept} == {"own"}
    assert {c.category for c in load(file, "regenerate", field="q", category="math")[0]} == {"math"}
    texts, _ = load(file, "keep", field="q", format="text")
    assert texts[0].text == "question 0"
    with pytest.raises(UserError, match="5 x no field 'r'"):
        load(file, "regenerate", field="r")
    with pytest.raises(UserError, match="none of the fields messages"):
        load(file, "regenerate", format="messages")


def test_weight_repeats_or_thins_out_a_source(tmp_path: Path) -> None:
    file = jsonl(tmp_path / "a.jsonl", *({"prompt": f"question {i}"} for i in range(10)))
    counts = {weight: len(load(file, "regenerate", weight=weight)[0]) for weight in (0.3, 1.0, 2.5)}
    assert counts == {0.3: 3, 1.0: 10, 2.5: 25}
    ids = [c.id for c in load(file, "regenerate", weight=2.5)[0]]
    assert len(set(ids)) == 25
    assert ids == [c.id for c in load(file, "regenerate", weight=2.5)[0]]


def test_held_out_is_disjoint_deterministic_and_free_of_duplicates() -> None:
    conversations = [
        Conversation(f"c{i}", [{"role": "user", "content": f"Question  {i % 15}" if i < 20 else f"question {i}"}])
        for i in range(30)
    ]

    def split_held_out(
        rows: list[Conversation], held_out: float, seed: int
    ) -> tuple[list[Conversation], list[Conversation]]:
        splits = split_conversations(rows, held_out=held_out, validation=0, seed=seed)
        assert splits["validation"] == []
        return splits["train"], splits["held_out"]

    training, held_out = split_held_out(conversations, 8, seed=1)
    assert len(held_out) == 8
    assert [c.id for c in sorted(training + held_out, key=lambda c: int(c.id[1:]))] == [c.id for c in conversations]

    def key(c: Conversation) -> str:
        return " ".join(c.messages[0]["content"].lower().split())

    assert not {key(c) for c in training} & {key(c) for c in held_out}
    assert split_held_out(conversations, 8, seed=1) == (training, held_out)
    assert split_held_out(conversations, 8, seed=2)[1] != held_out
    assert len(split_held_out(conversations, 0.1, seed=0)[1]) == 3
    assert split_held_out(conversations, 0, seed=0) == (conversations, [])
    with pytest.raises(UserError, match="asks for 30 conversations and there are 30"):
        split_held_out(conversations, 30, seed=0)
    with pytest.raises(UserError, match="every prompt occurs more than 1 times"):
        split_held_out([conversations[0]] * 3, 1, seed=0)


def test_validation_rows_come_out_of_the_training_rows_and_leave_the_held_out_ones_alone() -> None:
    conversations = [Conversation(f"c{i}", [{"role": "user", "content": f"question {i // 2}"}]) for i in range(60)]
    plain = split_conversations(conversations, held_out=10, validation=0, seed=3)
    for validation, count in ((6, 6), (0.1, 5 - 1), (0.01, 2)):  # prompts occur twice each
        splits = split_conversations(conversations, held_out=10, validation=validation, seed=3)
        assert splits["held_out"] == plain["held_out"]
        assert len(splits["validation"]) == count
        prompts = [{c.messages[0]["content"] for c in rows} for rows in splits.values()]
        assert not prompts[0] & prompts[1]
        assert not prompts[0] & prompts[2]
        assert sum(map(len, splits.values())) == 60
    same = [conversations[0]] * 3
    assert split_conversations(same, held_out=0, validation=0.02, seed=0)["train"] == same
    with pytest.raises(UserError, match=r"data\.validation asks for 50 conversations and there are 50"):
        split_conversations(conversations, held_out=10, validation=50, seed=0)
    many = [Conversation(f"c{i}", [{"role": "user", "content": str(i)}]) for i in range(40_000)]
    assert len(split_conversations(many, held_out=0, validation=0.02, seed=0)["validation"]) == 500


@pytest.mark.parametrize("seed", range(8))
def test_rows_that_begin_with_the_same_prompt_stay_in_one_split(seed: int) -> None:
    """`regenerate` makes the same first document of "Q" and of "Q, then R"."""
    conversations = []
    for i in range(10):
        opening = {"role": "user", "content": f"Question {i}"}
        conversations.append(Conversation(f"short{i}", [opening]))
        more = [opening, {"role": "assistant", "content": ""}, {"role": "user", "content": f"and {i}?"}]
        conversations.append(Conversation(f"long{i}", more))
    splits = split_conversations(conversations, held_out=6, validation=4, seed=seed)
    where = {c.id: name for name, rows in splits.items() for c in rows}
    assert {name: len(rows) for name, rows in splits.items()} == {"train": 10, "validation": 4, "held_out": 6}
    assert all(where[f"short{i}"] == where[f"long{i}"] for i in range(10))


def test_arrow_nulls_are_not_taken_for_data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Arrow gives every struct of a column the same keys; the rows of JSON lines, Parquet and the Hub are equal."""
    monkeypatch.setenv("HF_HOME", str(tmp_path / "cache"))

    def row(name: str, parameter: str) -> dict[str, Any]:
        schema = {"type": "string", "enum": ["a", "b"]} if name == "f" else {"type": "int"}
        tool = {"name": name, "parameters": {"type": "object", "properties": {parameter: schema}}}
        call = {"function": {"name": name, "arguments": {parameter: "a"}}}
        turns = [USER, {"role": "assistant", "content": "", "tool_calls": [call]}, {"role": "tool", "content": "1"}]
        return {"messages": [*turns, ANSWER], "tools": [{"type": "function", "function": tool}]}

    rows = [row("f", "city"), row("g", "count")]
    folder = tmp_path / "set"
    folder.mkdir()
    lines = jsonl(folder / "rows.jsonl", *rows)
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "rows.parquet")
    expected = [(c.messages, c.tools) for c in load(lines, "keep")[0]]
    assert expected[0][1] == rows[0]["tools"]
    for source in (Source(path=str(tmp_path / "rows.parquet")), Source(hub=str(folder))):
        found, _ = load_conversations([source], mode="keep")
        assert [(c.messages, c.tools) for c in found] == expected


def test_conversations_and_documents_survive_a_file(tmp_path: Path) -> None:
    conversations = [
        Conversation("é", [USER, ANSWER], tools=[{"a": 1}], category="x"),
        Conversation("t", [], text="plain"),
    ]
    assert write_conversations(tmp_path / "c.jsonl", conversations) == 2
    assert read_conversations(tmp_path / "c.jsonl") == conversations
    documents = [Document("é", [1, 2, 3, 4], [(1, 2), (3, 4)], "math", "s"), Document("empty", [5], [])]
    assert write_documents(tmp_path / "d.jsonl", documents) == 2
    assert read_documents(tmp_path / "d.jsonl") == documents
    assert documents[0].loss_mask == [0, 1, 0, 1]
    assert not list(tmp_path.glob("*.tmp"))
    for broken in (
        '{"id": "a"}',
        '{"id": "a", "input_ids": [1], "spans": [[0, 2]]}',
        "{",
        '{"id":"a","input_ids":[-1],"spans":[]}',
    ):
        with open(tmp_path / "d.jsonl", "a", encoding="utf-8") as file:
            file.write(broken + "\n")
        with pytest.raises(UserError, match=r"d\.jsonl:3: not a document"):
            read_documents(tmp_path / "d.jsonl")
        write_documents(tmp_path / "d.jsonl", documents)


def test_hub_source_reads_through_datasets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`datasets` takes a local folder where it takes a Hub id."""
    monkeypatch.setenv("HF_HOME", str(tmp_path / "cache"))
    folder = tmp_path / "set"
    folder.mkdir()
    jsonl(folder / "train.jsonl", {"question": "hi"}, {"question": "ho"})
    kept, _ = load_conversations([Source(hub=str(folder))])
    assert [c.messages[0]["content"] for c in kept] == ["hi", "ho"]
    with pytest.raises(UserError, match="split nope: cannot be loaded"):
        load_conversations([Source(hub=str(folder), split="nope")])
