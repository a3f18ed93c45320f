"""`spec-train doctor RECIPE`: passes where a run can work, and names the stage where it cannot."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from typer.testing import CliRunner

from spec_train.batch import Batch, FeatureSpec
from spec_train.cli import app
from spec_train.data.documents import Document
from spec_train.recipe import load_recipe
from spec_train.recipe_doctor import diagnose
from spec_train.run import Run
from spec_train.serving.contract import target_problem
from spec_train.stages.train import new_speculator
from spec_train.target import TargetModel
from spec_train.training.overfit import answer_of, overfit
from tests.tiny import tiny_model

SPECULATORS: dict[str, dict[str, Any]] = {
    "eagle3": {"type": "eagle3", "ttt_steps": 2, "draft_vocab_size": 200},
    "mtp": {"type": "mtp", "ttt_steps": 2},
    "mlp": {"type": "mlp", "num_heads": 2, "draft_vocab_size": 200},
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("doctor")
    tiny_model("llama", folder)
    (folder / "prompts.jsonl").write_text("".join(json.dumps({"prompt": f"say {n}"}) + "\n" for n in range(8)))
    return folder


def recipe_of(folder: Path, kind: str, **target: Any) -> Path:
    fields = {
        "run": {"name": "doctor", "output_dir": str(folder / "out"), "device": "cpu"},
        "target": {"model": str(folder / "llama-0"), **target},
        "data": {"sources": [{"path": str(folder / "prompts.jsonl")}], "held_out": 2, "max_length": 80},
        "responses": {"max_new_tokens": 16},
        "speculator": SPECULATORS[kind],
        "eval": {"num_draft_tokens": [2]},
        "export": {"verify_num_draft_tokens": 2},
    }
    path = folder / f"{kind}.yaml"
    path.write_text(yaml.safe_dump(fields))
    return path


@pytest.mark.parametrize("kind", sorted(SPECULATORS))
def test_a_recipe_that_works_passes_every_check(folder: Path, kind: str) -> None:
    diagnosis = diagnose(load_recipe(recipe_of(folder, kind)), steps=800)
    states = {check.name: (check.state, check.text) for check in diagnosis.checks}
    assert diagnosis.ok, states
    assert list(states) == ["target", "data", "disk", "vllm", "mask", "memory", "gate"]
    assert states["gate"][1].endswith("of at most 3.00")  # K + 1: 15 tokens after the first, in five rounds
    assert [supervised for _, supervised in diagnosis.preview] == [False, True]
    assert diagnosis.preview[0][0].endswith("<|im_start|>assistant\n")
    assert not (folder / "out").exists()


class Shifted(TargetModel):
    """A target whose states, or of them only those that the head reads, stand one place too late."""

    only_aux = False

    def fill_features(self, batch: Batch, spec: FeatureSpec, dtype: torch.dtype) -> Batch:
        filled = super().fill_features(batch, spec, dtype)
        assert filled.last_hidden_BTH is not None
        assert filled.aux_hidden_BTAH is not None
        late = replace(filled, aux_hidden_BTAH=filled.aux_hidden_BTAH.roll(1, dims=1))
        return late if self.only_aux else replace(late, last_hidden_BTH=filled.last_hidden_BTH.roll(1, dims=1))


@pytest.mark.parametrize(("only_aux", "stage"), [(False, "alignment"), (True, "decoding")])
def test_a_shifted_target_is_found_out(folder: Path, only_aux: bool, stage: str) -> None:
    run = Run(load_recipe(recipe_of(folder, "eagle3")))
    target = run.target()
    document = answer_of(target, list(b"say something"), 2, 17)
    shifted = Shifted(target.model, target.name, target.device)
    shifted.only_aux = only_aux
    result = overfit(shifted, document, new_speculator(run, [document], [document])[0], num_draft_tokens=2, steps=400)
    assert result.suspect is not None
    assert result.suspect.startswith(f"{stage}: ")
    assert "\n" not in result.suspect


def test_a_mask_without_enough_tokens_is_found_out(folder: Path) -> None:
    run = Run(load_recipe(recipe_of(folder, "eagle3")))
    answer = answer_of(run.target(), list(b"say something"), 2, 17)
    empty = Document("empty", answer.input_ids[:3], [(0, 1)])  # the span of a prompt, where nothing can be predicted
    head, _ = new_speculator(run, [answer], [answer])
    assert (overfit(run.target(), empty, head, num_draft_tokens=2, steps=20).suspect or "").startswith("mask: ")


def test_the_command_says_what_fails_and_returns_1(folder: Path) -> None:
    recipe = recipe_of(folder, "eagle3", chat_template=str(folder / "none.jinja"))
    (folder / "none.jinja").write_text("{{ raise_exception('no chats here') }}")
    shown = CliRunner().invoke(app, ["doctor", str(recipe), "--json"])
    assert shown.exit_code == 1
    report = json.loads(shown.stdout.splitlines()[-1])
    assert report["ok"] is False
    assert report["checks"][-1]["name"] == "gate"
    assert "no chats here" in report["checks"][-1]["text"]
    lines = CliRunner().invoke(app, ["doctor", str(recipe), "target.model=nobody/nothing"])
    assert lines.exit_code == 1
    assert "fail  plan" in lines.stdout


def test_targets_that_vllm_serves_in_another_way_are_named() -> None:
    assert "--model-impl transformers" in (target_problem("eagle3", "gemma3") or "")
    assert target_problem("eagle3", "llama") is None
    assert target_problem("mlp", "gemma3") is None
