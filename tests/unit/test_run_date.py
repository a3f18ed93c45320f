"""One day for a whole run, where the chat template prints one."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from spec_train.data.chat import render_prompt
from spec_train.data.documents import read_documents
from spec_train.errors import UserError
from spec_train.manifest import read_manifest
from spec_train.recipe import load_recipe
from spec_train.run import DATE_FILE, Run
from spec_train.stages.prompts import prompts
from spec_train.stages.responses import responses
from tests.templates import FAMILIES, available, tokenizer_of
from tests.tiny import CHATML, tiny_model, tiny_tokenizer

DATED = "{{ 'Today is ' + strftime_now('%d %b %Y') + '. ' }}" + CHATML


def recipe_of(folder: Path, template: str, mode: str, *overrides: str) -> Any:
    if not (folder / "llama-0").is_dir():
        tiny_model("llama", folder, chat_template=template)
        rows = [
            {"messages": [{"role": "user", "content": f"say {n}"}, {"role": "assistant", "content": "so"}]}
            for n in range(6)
        ]
        (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        fields = {
            "run": {"name": "dated", "output_dir": str(folder / "out"), "device": "cpu"},
            "target": {"model": str(folder / "llama-0")},
            "data": {
                "sources": [{"path": str(folder / "rows.jsonl")}],
                "held_out": 1,
                "validation": 1,
                "max_length": 80,
            },
            "responses": {"max_new_tokens": 4, "mode": mode},
            "features": {"capture": False},
            "speculator": {"type": "mtp", "ttt_steps": 1},
        }
        (folder / "recipe.yaml").write_text(yaml.safe_dump(fields))
    return load_recipe(folder / "recipe.yaml", overrides)


def make(recipe: Any) -> Run:
    run = Run(recipe)
    prompts(run, False)
    responses(run, False)
    return run


@pytest.mark.parametrize("mode", ["keep", "regenerate"])
def test_a_run_keeps_the_day_on_which_its_answers_were_begun(mode: str, tmp_path: Path) -> None:
    run = make(recipe_of(tmp_path, DATED, mode))
    folder = run.stage_directory("responses")
    assert read_manifest(folder)["outputs"]["date"] == run.date == (folder / DATE_FILE).read_text().strip()
    # As if it had been interrupted on another day, one answer short.
    (folder / DATE_FILE).write_text("2024-03-05\n")
    (folder / "manifest.json").unlink()
    for part in folder.glob("parts-*/*"):
        part.unlink()
    again = make(recipe_of(tmp_path, DATED, mode))
    assert read_manifest(folder)["outputs"]["date"] == again.date == "2024-03-05"
    texts = [run.tokenizer.decode(document.input_ids) for document in read_documents(folder / "train.jsonl")]
    assert texts
    assert all("Today is 05 Mar 2024. " in text for text in texts)
    stamps = {file: file.stat().st_mtime_ns for file in folder.rglob("*.jsonl")}
    make(recipe_of(tmp_path, DATED, mode))  # finished: current on any day
    assert {file: file.stat().st_mtime_ns for file in folder.rglob("*.jsonl")} == stamps
    assert again.prompt_kwargs["date"] == "2024-03-05"


def test_the_recipe_names_the_day(tmp_path: Path) -> None:
    run = make(recipe_of(tmp_path, DATED, "keep", "target.date=2025-01-31"))
    assert run.prompt_kwargs["date"] == "2025-01-31"
    documents = read_documents(run.stage_directory("responses") / "train.jsonl")
    assert all("Today is 31 Jan 2025. " in run.tokenizer.decode(document.input_ids) for document in documents)
    with pytest.raises(UserError, match=r"date = .*2025-01-31"):
        make(recipe_of(tmp_path, DATED, "keep", "target.date=2025-02-01"))
    for wrong in ("soon", "2025-02-30"):
        with pytest.raises(UserError, match=r"target\.date"):
            recipe_of(tmp_path, DATED, "keep", f"target.date={wrong}")


def test_templates_that_print_no_day_are_left_alone(tmp_path: Path) -> None:
    run = make(recipe_of(tmp_path, CHATML, "keep"))
    assert run.date is None
    assert "date" not in run.prompt_kwargs
    assert not (run.stage_directory("responses") / DATE_FILE).exists()


@pytest.mark.parametrize(
    ("name", "expected"), [("gpt-oss", "Current date: 2024-03-05"), ("Llama 3.2", "Today Date: 05 Mar 2024")]
)
def test_published_templates_print_the_day_of_the_run(name: str, expected: str) -> None:
    family = next(family for family in FAMILIES if family.name == name)
    if not available(family):
        pytest.skip("published chat templates are not fetched: make install")
    tokenizer = tokenizer_of(family)
    ids = render_prompt(tokenizer, [{"role": "user", "content": "q"}], date="2024-03-05")
    assert expected in tokenizer.decode(ids)
    assert render_prompt(tiny_tokenizer(), [{"role": "user", "content": "q"}], date="2024-03-05") == render_prompt(
        tiny_tokenizer(), [{"role": "user", "content": "q"}]
    )
