"""Bundled prompts and evaluation suites."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from spec_train.assets import asset_path, resolve_path
from spec_train.data.prompts import load_conversations, split_held_out
from spec_train.errors import UserError
from spec_train.evaluation.suites import Suite, bundled_suites, load_suite
from spec_train.recipe import BUNDLED_SUITES, Source
from spec_train.recipe_file import parse_yaml
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


def test_every_suite_file_is_valid_and_its_bundled_prompts_carry_a_licence() -> None:
    for name in bundled_suites():
        suite = Suite.model_validate(parse_yaml(asset_path(f"eval/suites/{name}.yaml")))
        for source in suite.sources:
            if source.path is not None:
                prompts = resolve_path(source.path)
                assert "Permission is hereby granted" in prompts.with_suffix(".LICENSE").read_text()
            else:
                assert source.sha256 is not None


def test_suite_from_a_package_asks_the_first_turn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The shape of MT-Bench: the second turn would follow an answer that does not exist yet."""
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
    assert conversation.messages == [{"role": "user", "content": "a"}]


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
    with pytest.raises(UserError, match="neither a file nor one of gsm8k, humaneval, mt_bench"):
        load_suite("gsm9k")
    (tmp_path / "bad.yaml").write_text("description: x\nlicense: MIT\nsources: [{path: a, hub: b}]\n")
    with pytest.raises(UserError, match=r"bad\.yaml: sources\.0: .*exactly one of path, hub and package"):
        load_suite(str(tmp_path / "bad.yaml"))


def test_the_prompts_that_the_quickstart_trains_on_leave_sixty_untouched() -> None:
    conversations, dropped = load_conversations([Source(path="asset:data/gsm8k.jsonl", category="math")])
    assert not dropped
    training, held_out = split_held_out(conversations, 60, seed=0)
    assert (len(training), len(held_out)) == (1259, 60)


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


@pytest.mark.parametrize("script", ["data/build_prompts.py", "data/build_responses.py", "eval/run_suites.py"])
def test_stage_scripts_run_by_path_and_shadow_nothing(script: str, tmp_path: Path) -> None:
    assert Path(script).stem not in sys.stdlib_module_names
    done = subprocess.run(
        [sys.executable, str(ROOT / script), "--help"], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "RECIPE" in done.stdout or "Usage" in done.stdout
