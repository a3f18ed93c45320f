"""Bundled prompts and evaluation suites."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from spec_train.assets import asset_path, resolve_path
from spec_train.data.prompts import load_conversations, split_conversations
from spec_train.errors import UserError
from spec_train.evaluation.suites import bundled_suites, load_suite, read_suite, suite_facts
from spec_train.recipe import BUNDLED_SUITES, Source
from tests.unit.test_packages import write_wheel

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize(("suite", "count", "category"), [("gsm8k", 1319, "math"), ("humaneval", 164, "code")])
def test_bundled_suites_load_whole(suite: str, count: int, category: str) -> None:
    conversations = load_suite(suite)
    assert len(conversations) == count
    assert {c.category for c in conversations} == {category}
    assert len({c.id for c in conversations}) == count
    assert all([m["role"] for m in c.messages] == ["user"] and c.messages[0]["content"].strip() for c in conversations)


def test_names_agree_with_the_recipe() -> None:
    assert {"held_out", *bundled_suites()} == set(BUNDLED_SUITES)


def test_every_suite_file_is_valid_and_states_licence_and_hash() -> None:
    for name in bundled_suites():
        suite = read_suite(asset_path(f"eval/suites/{name}.yaml"))
        assert suite.license and suite.description and suite.prompts
        for source in suite.sources:
            if source.path is not None:
                licence = resolve_path(source.path).with_suffix(".LICENSE").read_text()
                assert (
                    "Apache License" if suite.license == "Apache-2.0" else "Permission is hereby granted"
                ) in licence
            else:
                assert source.package is not None and source.sha256 is not None
        assert all(part.suite in bundled_suites() for part in suite.include)


@pytest.mark.parametrize("name", ["gsm8k", "humaneval", "json", "repetitive"])
def test_stated_count_is_the_number_of_bundled_prompts(name: str) -> None:
    facts = suite_facts(name)
    assert (facts.prompts, facts.origin) == (len(load_suite(name)), "bundled")


def test_own_prompts_are_varied() -> None:
    for name, categories in (("json", 4), ("repetitive", 3)):
        conversations = load_suite(name)
        assert len({c.messages[0]["content"] for c in conversations}) == len(conversations) == 32
        assert len({c.category for c in conversations}) == categories
    assert sum(c.tools is not None for c in load_suite("json")) == 4


def test_suite_from_a_package_keeps_the_place_of_the_first_answer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The shape of MT-Bench: the second turn follows an answer that does not exist yet."""
    write_wheel(
        tmp_path, {"tiny_prompts/q.jsonl": b'{"question_id": 81, "category": "writing", "turns": ["a", "b"]}\n'}
    )
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    monkeypatch.setenv("SPEC_TRAIN_CACHE", str(tmp_path / "cache"))
    (tmp_path / "two.yaml").write_text(
        "description: two turns\nlicense: MIT\nsources: [{package: tiny-prompts==1.0, member: tiny_prompts/q.jsonl}]\n"
    )
    (conversation,) = load_suite(str(tmp_path / "two.yaml"))
    assert (conversation.id, conversation.category) == ("81", "writing")
    assert [(m["role"], m["content"]) for m in conversation.messages] == [
        ("user", "a"),
        ("assistant", ""),
        ("user", "b"),
    ]


def test_template_reads_nested_records_evenly(tmp_path: Path) -> None:
    document = {
        "data": [
            {"title": t, "paragraphs": [{"context": f"{t} text", "qas": [{"question": f"{t}{i}?"} for i in range(4)]}]}
            for t in "AB"
        ]
    }
    (tmp_path / "d.json").write_text(json.dumps(document))
    source = f"path: {tmp_path}/d.json, records: data.paragraphs.qas, category: rag"
    head = "description: x\nlicense: MIT\nsources:\n"
    file = tmp_path / "s.yaml"
    file.write_text(f'{head}  - {{{source}, sample: 4, template: "{{context}}: {{question}}"}}\n')
    found = load_suite(str(file))
    assert [c.messages[0]["content"] for c in found] == ["A text: A0?", "A text: A2?", "B text: B0?", "B text: B2?"]
    assert {c.category for c in found} == {"rag"} and found[1].id == "s-3"
    file.write_text(f'{head}  - {{{source}, template: "{{answer}}"}}\n')
    with pytest.raises(UserError, match="template names 'answer', a field"):
        load_suite(str(file))


def test_include_renames_categories_and_keeps_ids_apart(tmp_path: Path) -> None:
    file = tmp_path / "mixed.yaml"
    file.write_text(
        "description: x\nlicense: MIT\ninclude:\n"
        "  - {suite: gsm8k, sample: 3, category: mathematical reasoning}\n  - {suite: json, sample: 2}\n"
    )
    found = load_suite(str(file))
    assert [c.category for c in found[:3]] == ["mathematical reasoning"] * 3
    assert len({c.id for c in found}) == 5 and found[3].id == "json-json-0"
    file.write_text("description: x\nlicense: MIT\ninclude: [{suite: nothing}]\n")
    with pytest.raises(UserError, match="include names nothing; bundled suites are"):
        load_suite(str(file))


def test_request_logs_of_every_shape(tmp_path: Path) -> None:
    ask = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "hi"}]
    tools = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}]
    lines = [
        {"messages": [*ask, {"role": "assistant", "content": "hello"}], "tools": tools, "category": "support"},
        {
            "id": "r-1",
            "category": "chat",
            "request": {"model": "m", "messages": ask, "temperature": 0.5, "tools": tools},
        },
        {"custom_id": "r-2", "method": "POST", "url": "/v1/chat/completions", "body": {"messages": ask}},
        {"id": "r-3", "request": {"method": "POST", "body": json.dumps({"messages": ask})}},
        {"prompt": "hi", "category": "search"},
    ]
    (tmp_path / "log.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    found = load_suite(str(tmp_path / "log.jsonl"))
    assert [c.messages for c in found[:4]] == [ask] * 4
    assert [c.id for c in found] == ["log.jsonl-1", "r-1", "r-2", "r-3", "log.jsonl-5"]
    assert [c.category for c in found] == ["support", "chat", "", "", "search"]
    assert [c.tools for c in found] == [tools, tools, None, None, None]


def test_suite_from_a_jsonl_path_cuts_the_last_answer_off(tmp_path: Path) -> None:
    rows = [
        '{"question": "two plus two?", "answer": "four"}',
        '{"messages": [{"from": "user", "value": "a"}, {"from": "gpt", "value": "b"}, {"from": "user", "value": "c"}]}',
    ]
    (tmp_path / "own.jsonl").write_text("\n".join(rows))
    short, long = load_suite(str(tmp_path / "own.jsonl"))
    assert [m["content"] for m in short.messages] == ["two plus two?"]
    assert [m["content"] for m in long.messages] == ["a", "b", "c"]


def test_unknown_or_broken_suites(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="neither a file nor one of gsm8k, humaneval, ifbench"):
        load_suite("gsm9k")
    (tmp_path / "bad.yaml").write_text("description: x\nlicense: MIT\nsources: [{path: a, hub: b}]\n")
    with pytest.raises(UserError, match=r"bad\.yaml: sources\.0: .*exactly one of path, hub and package"):
        load_suite(str(tmp_path / "bad.yaml"))


def test_the_prompts_that_the_quickstart_trains_on_leave_sixty_untouched() -> None:
    conversations, dropped = load_conversations([Source(path="asset:data/gsm8k.jsonl", category="math")])
    assert not dropped
    splits = split_conversations(conversations, held_out=60, validation=0, seed=0)
    assert {name: len(rows) for name, rows in splits.items()} == {"train": 1259, "validation": 0, "held_out": 60}


def test_assets_are_found_in_a_clone_and_in_the_wheel_layout(tmp_path: Path) -> None:
    assert asset_path("eval/suites/gsm8k.yaml") == ROOT / "eval/suites/gsm8k.yaml"
    for outside in ("../x", "no/such/file", "/etc/passwd"):
        with pytest.raises(UserError, match="no such bundled file"):
            asset_path(outside)
    package = tmp_path / "spec_train"
    package.mkdir()
    for module in ("__init__.py", "assets.py", "errors.py"):
        shutil.copy(ROOT / "spec_train" / module, package / module)
    shutil.copytree(ROOT / "eval", package / "_assets" / "eval")
    code = "from spec_train.assets import asset_path; print(asset_path('eval/suites/gsm8k.yaml'))"
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=True)
    assert Path(done.stdout.strip()) == package / "_assets/eval/suites/gsm8k.yaml"


@pytest.mark.parametrize(
    ("script", "command"),
    [("data/build_prompts.py", "prompts"), ("data/build_responses.py", "responses"), ("eval/run_suites.py", "eval")],
)
def test_stage_scripts_run_by_path_and_shadow_nothing(script: str, command: str, tmp_path: Path) -> None:
    assert Path(script).stem not in sys.stdlib_module_names
    done = subprocess.run(
        [sys.executable, str(ROOT / script), "--help"], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    words = done.stdout.split()
    assert words[words.index("Usage:") : words.index("Usage:") + 3] == ["Usage:", "spec-train", command]
    # The command itself runs, not only its help: a recipe that is not there is one line and status 2.
    missing = subprocess.run(
        [sys.executable, str(ROOT / script), "nowhere.yaml"], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert missing.returncode == 2
    assert "nowhere.yaml" in missing.stderr
