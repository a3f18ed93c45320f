"""A whole run on tiny targets: prompts to a checkpoint that serves, interrupted, repeated, changed."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import load_file

from spec_train.data.documents import read_documents
from spec_train.data.prompts import SPLITS
from spec_train.errors import UserError
from spec_train.manifest import read_manifest
from spec_train.pipeline import evaluate_checkpoint, run_all, run_features, run_prompts, run_responses, run_train
from spec_train.recipe import Recipe, load_recipe
from spec_train.run import Run
from spec_train.stages.common import documents_of, eval_sampling
from spec_train.stages.features import feature_reader, feature_spec
from spec_train.stages.train import sampled_answers
from tests.tiny import tiny_model

ROOT = Path(__file__).parents[2]
STAGES = ("prompts", "responses", "features", "train", "eval", "export", "verify")


def write_recipe(folder: Path, kind: str = "llama", **sections: Any) -> Path:
    target = tiny_model(kind, folder / "targets")
    rows = [{"prompt": f"question number {n}, what is {n} and {n + 3}?"} for n in range(24)]
    (folder / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    recipe: dict[str, Any] = {
        "run": {"name": "tiny", "output_dir": str(folder / "run"), "device": "cpu"},
        "target": {"model": str(target)},
        "data": {"sources": [{"path": str(folder / "prompts.jsonl")}], "held_out": 4, "max_length": 160},
        "responses": {"max_new_tokens": 24, "batch_size": 8},
        "features": {"mode": "offline", "dtype": "float32"},
        "speculator": {"type": "eagle3", "ttt_steps": 3, "draft_vocab_size": 200, "aux_layer_ids": [1, 2, 4]},
        "optim": {"lr": 3e-3},
        "train": {"epochs": 4, "micro_batch_tokens": 600, "precision": "fp32", "save_every": 5, "log_every": 5},
        "eval": {"num_draft_tokens": [3], "batch_size": 3, "speed_prompts": 1, "measure_costs": False},
        "export": {"vllm": "off"},
    }
    for name, values in sections.items():
        recipe[name].update(values)
    path = folder / "recipe.yaml"
    path.write_text(yaml.safe_dump(recipe))
    return path


def modified(directory: Path) -> dict[str, int]:
    return {str(p): p.stat().st_mtime_ns for p in sorted(directory.rglob("*")) if p.is_file() and p.name != ".lock"}


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The recipe of a run that has gone through every stage."""
    path = write_recipe(tmp_path_factory.mktemp("run"))
    run_all(load_recipe(path), force=set())
    return path


def test_a_run_is_lossless_and_its_estimate_is_its_decode(finished: Path) -> None:
    run = Run(load_recipe(finished))
    results = {p.name: json.loads(p.read_text()) for p in (run.directory / "eval").glob("held_out-*.json")}
    eagle, ngram = results["held_out-eagle3-k3-t0.json"], results["held_out-ngram-k3-t0.json"]
    for result in (eagle, ngram):
        assert result["lossless"] == {"checked": 4, "identical": 4, "first_divergence": None}
        assert result["speed"]["tokens_per_second"] > 0
    assert eagle["estimate"]["renewal_steps"] == eagle["num_spec_steps"]
    assert eagle["estimate"]["renewal_accepted"] == eagle["num_accepted_draft_tokens"]
    assert eagle["estimate"]["renewal"] == eagle["mean_acceptance_length"]
    report = json.loads((run.directory / "verify" / "report.json").read_text())
    assert [form["format"] for form in report] == ["speculators", "plain"]
    assert all(form["reload"]["problems"] == [] for form in report)


def test_the_training_log_shows_estimates_beside_a_decode(finished: Path) -> None:
    log = Run(load_recipe(finished)).directory / "train" / "log.jsonl"
    lines = [json.loads(line) for line in log.read_text().splitlines()]
    evaluations = [line for line in lines if "renewal@3" in line]
    assert evaluations
    for line in evaluations:
        assert {"position_average@3", "conditional_acceptance_1"} <= line.keys()
        assert line["decode@3"] == line["decode_renewal@3"]
        assert line["decode_text_equal"] == 1.0


def test_answers_are_estimated_on_at_the_temperature_they_were_sampled_at(tmp_path: Path) -> None:
    """Greedy answers, the data's own, and those under other settings than the evaluation's give no such estimate."""
    path = write_recipe(tmp_path)

    def estimated_at(*overrides: str) -> float | None:
        recipe = load_recipe(path, overrides)
        samplings = [eval_sampling(recipe, temperature) for temperature in recipe.eval.temperature if temperature]
        found = sampled_answers(Run(recipe), samplings)
        return None if found is None else found.sampling.temperature

    both = ("responses.temperature=0.7", "responses.top_p=0.9", "eval.temperature=[0.0, 0.3, 0.7]")
    assert estimated_at(*both, "eval.top_p=0.9") == 0.7
    assert estimated_at(*both) is None
    assert estimated_at(*both, "eval.top_p=0.9", "eval.min_p=0.1") is None
    assert estimated_at(*both, "eval.top_p=0.9", "responses.mode=keep") is None
    assert estimated_at("eval.temperature=[0.0, 0.7]") is None


def test_held_out_prompts_are_not_trained_on(finished: Path) -> None:
    run = Run(load_recipe(finished))
    prompts = [{tuple(d.input_ids[: d.spans[0][0]]) for d in documents_of(run, s)} for s in SPLITS]
    assert [len(rows) for rows in prompts] == [19, 1, 4]
    assert len(set.union(*prompts)) == 24


def test_held_out_rows_never_choose_the_checkpoint(tmp_path: Path) -> None:
    sections: dict[str, Any] = {"data": {"validation": 0}, "train": {"max_steps": 2, "eval_every": 1}}
    recipe = load_recipe(write_recipe(tmp_path, **sections))
    for stage in (run_prompts, run_responses, run_features, run_train):
        stage(recipe, False)
    outputs = read_manifest(Run(recipe).directory / "train")["outputs"]
    assert outputs["best_value"] is None
    assert outputs["best_checkpoint"] == outputs["last_checkpoint"]


def test_a_finished_run_is_left_alone(finished: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = Run(load_recipe(finished))
    before = {stage: modified(run.directory / stage) for stage in STAGES}
    run_all(load_recipe(finished), force=set())
    assert {stage: modified(run.directory / stage) for stage in STAGES} == before
    assert capsys.readouterr().err.count(": current") == len(STAGES)


@pytest.mark.parametrize(
    ("override", "stage", "field"),
    [
        ("target.system_prompt=other", "responses", "chat_template"),
        ("speculator.draft_vocab_size=100", "train", "draft_vocab_size"),
        ("speculator.aux_layer_ids=[1, 2, 3]", "features", "aux_layer_ids"),
        ("data.held_out=5", "prompts", "held_out"),
        ("eval.batch_size=2", "eval", "batch_size"),
    ],
)
def test_a_stage_made_from_other_inputs_is_refused(finished: Path, override: str, stage: str, field: str) -> None:
    recipe = load_recipe(finished, [override])
    before = modified(Path(recipe.run.output_dir))
    with pytest.raises(UserError, match=rf"stage {stage} .*{field}") as caught:
        run_all(recipe, force=set())
    assert "\n" not in str(caught.value)
    assert modified(Path(recipe.run.output_dir)) == before


def test_changed_target_weights_are_noticed(finished: Path, tmp_path: Path) -> None:
    other = tiny_model("llama", tmp_path, seed=1)
    with pytest.raises(UserError, match=r"stage responses .*target"):
        run_responses(load_recipe(finished, [f"target.model={other}"]))


def test_captured_states_equal_a_pass_over_the_text(finished: Path) -> None:
    """States kept while answers are generated in ragged batches are those of each document run alone (D08)."""
    run = Run(load_recipe(finished))
    target = run.target()
    reader = feature_reader(run, "float32")
    spec = feature_spec(run, target)
    assert read_manifest(run.directory / "features")["counts"] == {"captured": 24, "computed": 0}
    for document in documents_of(run, "train")[:5]:
        ids = torch.tensor([document.input_ids])
        states = target.features(ids, torch.arange(ids.shape[1])[None], torch.zeros_like(ids), spec)
        stored = reader.read(document.id, document.input_ids)
        assert stored.aux_hidden is not None and stored.last_hidden is not None and stored.target_lse is not None
        assert states.aux_hidden is not None and states.last_hidden is not None
        assert torch.allclose(stored.aux_hidden, states.aux_hidden[0, :-1], atol=1e-4)
        assert torch.allclose(stored.last_hidden, states.last_hidden[0, :-1], atol=1e-4)
        start = document.spans[0][0] - 1
        lse = target.logsumexp(states.last_hidden[0, start:-1])
        assert torch.allclose(stored.target_lse[start:], lse, atol=1e-4)


def test_only_lost_features_are_made_again(tmp_path: Path) -> None:
    """A deleted and a truncated shard are rewritten, and nothing else (D06)."""
    path = write_recipe(tmp_path, features={"capture": False}, train={"micro_batch_tokens": 300})
    recipe = load_recipe(path)
    run_all_until(recipe, "features")
    store = tmp_path / "run" / "features"
    shards = sorted(store.glob("*.safetensors"))
    assert len(shards) >= 4
    shards[0].unlink()
    shards[1].write_bytes(shards[1].read_bytes()[:100])
    (store / "manifest.json").unlink()
    before = modified(store)
    run_features(recipe)
    changed = {Path(p).name for p, stamp in modified(store).items() if before.get(p) != stamp}
    assert changed - {"index.json", "manifest.json", "inputs.json", "recipe.yaml"} == {shards[0].name, shards[1].name}


def run_all_until(recipe: Recipe, last: str) -> None:
    from spec_train.pipeline import STAGES as FUNCTIONS

    run = Run(recipe)
    for name, stage in FUNCTIONS.items():
        stage(run, False)
        if name == last:
            return


def test_online_and_offline_training_agree(finished: Path, tmp_path: Path) -> None:
    """The same head comes out of stored float32 states and of states computed while training.

    Answers that are decoded in batches and a pass over the text round states differently, by about 1e-6. AdamW divides
    each gradient by its own size, so where a gradient is hardly more than rounding its weight may move by a share of
    the learning rate, 3e-3: after these 12 steps by 1e-4 at most. States rounded to bfloat16 move one by 5e-3.
    """
    online = load_recipe(finished, ["features.mode=online", f"run.output_dir={tmp_path / 'online'}"])
    run_all_until(online, "train")
    weights = [
        load_file(Path(read_manifest(d / "train")["outputs"]["last_checkpoint"]) / "model.safetensors")
        for d in (Path(load_recipe(finished).run.output_dir), tmp_path / "online")
    ]
    for name, value in weights[0].items():
        torch.testing.assert_close(value.float(), weights[1][name].float(), atol=4e-4, rtol=0, msg=name)


def test_a_checkpoint_and_its_exports_evaluate_alike(finished: Path) -> None:
    """A training checkpoint and both exports give one and the same acceptance, without a recipe."""
    recipe = load_recipe(finished)
    run = Run(recipe)
    prompts = run.directory.parent / "prompts.jsonl"
    best = read_manifest(run.directory / "train")["outputs"]["best_checkpoint"]
    places = [best, str(run.directory / "export" / "plain"), str(run.directory / "export" / "speculators")]
    seen = []
    for place in places:
        (result,) = evaluate_checkpoint(
            place, str(recipe.target.model), str(prompts), [3], [0.0], max_prompts=3, max_new_tokens=20, speed_prompts=0
        )
        assert result["lossless"]["identical"] == 3
        seen.append((result["num_spec_steps"], result["num_accepted_draft_tokens"]))
    assert len(set(seen)) == 1


@pytest.mark.parametrize("kind", ["mistral", "gpt_neox"])  # the families of shipped recipes: test_recipes.py
def test_other_targets_go_the_whole_way(kind: str, tmp_path: Path) -> None:
    path = write_recipe(tmp_path, kind, train={"epochs": 1}, eval={"speed_prompts": 0}, export={"formats": ["plain"]})
    run_all(load_recipe(path), force=set())
    result = json.loads((tmp_path / "run" / "eval" / "held_out-eagle3-k3-t0.json").read_text())
    assert result["lossless"]["identical"] == 4
    assert result["estimate"]["renewal"] == result["mean_acceptance_length"]


def test_conversations_are_kept_and_counted(tmp_path: Path) -> None:
    """responses.mode keep: the data's own answers, supervised by offsets; unusable rows are counted (D01)."""
    rows = [
        {"messages": []},
        {"messages": [{"role": "system", "content": "s"}]},
        {"messages": [{"role": "user", "content": "hello"}]},
        *(
            {"messages": [{"role": "user", "content": f"ask {n}"}, {"role": "assistant", "content": f"answer {n}"}]}
            for n in range(6)
        ),
    ]
    path = write_recipe(
        tmp_path, responses={"mode": "keep"}, data={"held_out": 2}, train={"epochs": 1}, eval={"speed_prompts": 0}
    )
    (tmp_path / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    run_all_until(load_recipe(path), "responses")  # test_stale.py goes the whole way with rows of the data's own
    manifest = read_manifest(tmp_path / "run" / "prompts")
    assert [manifest["counts"][split] for split in SPLITS] == [3, 1, 2]
    assert sum(manifest["counts"]["dropped"].values()) == 3
    documents = read_documents(tmp_path / "run" / "responses" / "train.jsonl")
    assert all(document.num_response_tokens > 0 for document in documents)


def test_killed_at_random_points_a_run_ends_like_an_undisturbed_one(tmp_path: Path, finished: Path) -> None:
    """SIGKILL the whole pipeline again and again, then let it finish: weights and figures are the same, bit for bit."""
    recipe = load_recipe(finished)
    command = [sys.executable, "-m", "spec_train", "run", str(finished), f"run.output_dir={tmp_path / 'run'}"]
    rng = random.Random(0)
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    for _ in range(3):
        process = subprocess.Popen(
            command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True
        )
        time.sleep(rng.uniform(4.0, 11.0))
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    outputs = []
    for directory in (Path(recipe.run.output_dir), tmp_path / "run"):
        checkpoint = Path(read_manifest(directory / "train")["outputs"]["last_checkpoint"])
        result = json.loads((directory / "eval" / "held_out-eagle3-k3-t0.json").read_text())
        counts = (result["num_spec_steps"], result["num_accepted_draft_tokens"], result["num_output_tokens"])
        outputs.append(((checkpoint / "model.safetensors").read_bytes(), counts))
    assert outputs[0] == outputs[1]
