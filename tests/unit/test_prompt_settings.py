"""System prompt, template arguments and sampling of a recipe reach answers, suites and the evaluation of an export."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from spec_train.data.chat import load_tokenizer
from spec_train.data.documents import read_documents
from spec_train.decoding.engine import plain_decode
from spec_train.decoding.sampling import Sampling
from spec_train.evaluation.evaluate import render_suite
from spec_train.pipeline import evaluate_checkpoint
from spec_train.recipe import load_recipe
from spec_train.run import Run
from spec_train.serving.export import export
from spec_train.speculators import recorded_prompt
from spec_train.stages.evaluate import suite_of
from spec_train.stages.prompts import prompts
from spec_train.stages.responses import responses
from spec_train.target import TargetModel
from tests.heads import random_eagle3
from tests.tiny import CHATML, tiny_model

TONED = "{{ '<' + (tone or 'none') + '>' }}" + CHATML
PROMPT = {"system_prompt": "Be kind.", "chat_template_kwargs": {"tone": "soft"}}
OPENING = "<soft><|im_start|>system\nBe kind.<|im_end|>\n<|im_start|>user\n"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A target whose answers end after a few tokens, prompts with answers, and a suite."""
    path = tiny_model("llama", tmp_path, chat_template=TONED)
    (path / "generation_config.json").write_text(json.dumps({"eos_token_id": list(range(4, 60))}))
    rows = [[{"role": "user", "content": f"say {n}"}, {"role": "assistant", "content": "so"}] for n in range(8)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps({"messages": row}) + "\n" for row in rows))
    (tmp_path / "asked.jsonl").write_text("".join(json.dumps({"prompt": f"tell {n}"}) + "\n" for n in range(9)))
    return tmp_path


def recipe_of(folder: Path, **answers: Any) -> Any:
    fields = {
        "run": {"name": "toned", "output_dir": str(folder / "out"), "device": "cpu", "seed": 5},
        "target": {"model": str(folder / "llama-0"), **PROMPT},
        "data": {"sources": [{"path": str(folder / "rows.jsonl")}], "held_out": 1, "validation": 1},
        "responses": {"max_new_tokens": 8, **answers},
        "features": {"capture": False},
        "speculator": {"type": "mtp", "ttt_steps": 1},
        "eval": {"suites": [str(folder / "asked.jsonl")]},
    }
    (folder / "recipe.yaml").write_text(yaml.safe_dump(fields))
    return load_recipe(folder / "recipe.yaml")


@pytest.mark.parametrize("mode", ["keep", "regenerate"])
def test_answers_and_suites_of_a_run_have_its_prompt_and_sampling(mode: str, folder: Path) -> None:
    sampling = {"temperature": 1.3, "top_k": 20, "top_p": 0.9} if mode == "regenerate" else {}
    run = Run(recipe_of(folder, mode=mode, **sampling))
    prompts(run, False)
    responses(run, False)
    documents = read_documents(run.stage_directory("responses") / "train.jsonl")
    assert len(documents) == 6
    assert all(run.tokenizer.decode(document.input_ids).startswith(OPENING + "say ") for document in documents)
    suite = suite_of(run, str(folder / "asked.jsonl"))
    assert [run.tokenizer.decode(ids) for ids in suite.prompts] == [
        f"{OPENING}tell {n}<|im_end|>\n<|im_start|>assistant\n" for n in range(9)
    ]
    if mode == "regenerate":
        drawn, other = (
            [
                run.target().generate([d.input_ids[: d.spans[0][0]]], s, 8, request_indices=[place])[0].output_ids
                for place, d in enumerate(documents)
            ]
            for s in (Sampling(1.3, 20, 0.9, seed=5 * 1009), Sampling(seed=5 * 1009))
        )
        assert [document.input_ids[document.spans[0][0] :] for document in documents] == drawn != other


def test_an_export_is_evaluated_on_prompts_like_those_it_was_trained_on(folder: Path) -> None:
    path = folder / "llama-0"
    where = export(
        random_eagle3(), folder / "head", format="plain", target_id=str(path), num_draft_tokens=2, golden=None,
        provenance={"recipe": {"target": PROMPT}, "date": "2024-03-05"},
    )  # fmt: skip
    assert recorded_prompt(where) == {**PROMPT, "date": "2024-03-05"}
    (folder / "checkpoint").mkdir()
    (folder / "checkpoint" / "speculator.json").write_text(json.dumps({"type": "eagle3", "prompt": PROMPT}))
    assert recorded_prompt(folder / "checkpoint") == PROMPT
    (result,) = evaluate_checkpoint(
        str(where), str(path), str(folder / "asked.jsonl"), [2], [0.0], max_new_tokens=16, speed_prompts=0, device="cpu"
    )
    target, tokenizer = TargetModel.load(str(path), dtype=torch.float32), load_tokenizer(str(path))
    lengths = []
    for prompt in (PROMPT, {}, {**PROMPT, "system_prompt": None}, {**PROMPT, "chat_template_kwargs": {}}):
        suite = render_suite(str(folder / "asked.jsonl"), tokenizer, prompt)
        plain = plain_decode(target, suite.prompts, sampling=Sampling(), max_new_tokens=16)
        lengths.append(sum(len(request.output_ids) for request in plain.requests))
    assert result["num_output_tokens"] == lengths[0]
    assert lengths[0] not in lengths[1:]
