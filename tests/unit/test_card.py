"""The card of every kind of export: how it is served, what it descends from, what is said against it."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Any

import pytest
import torch
from huggingface_hub import ModelCard

from spec_train.decoding.trace import Cycle, RequestTrace
from spec_train.errors import UserError
from spec_train.recipe import load_recipe
from spec_train.serving.export import export
from spec_train.serving.facts import public_recipe
from spec_train.serving.publication import publication
from spec_train.speculators import options_class, speculator_class
from spec_train.speculators.head_files import weights_sha256
from spec_train.target import TargetModel
from tests.integration.test_run import write_recipe
from tests.mtp_targets import mtp_target
from tests.results import result_of
from tests.tiny import tiny_tokenizer

OPTIONS: dict[str, dict[str, Any]] = {
    "mlp": {"num_heads": 3, "inner_dim": 32},
    "medusa": {"num_heads": 3},
    "draft_lm": {"start_layers": 2},
    "mtp": {"init": "target_head"},
    "eagle1": {},
}


def exported(kind: str, folder: Path, **changes: Any) -> Path:
    """An untrained speculator as a run would export it."""
    path = write_recipe(folder)
    recipe = load_recipe(path).model_dump(mode="json")
    place = str(mtp_target("mimo", folder)) if kind == "mtp" else recipe["target"]["model"]
    target = TargetModel.load(place)
    options = options_class(kind)(type=kind, **OPTIONS[kind])
    head = speculator_class(kind).from_recipe(options, target, torch.arange(target.vocab_size), 0)
    recipe["speculator"] = {**options.model_dump(mode="json"), **changes}
    serving = head.serving()
    return export(
        serving,
        folder / "run" / "export" / "made",
        format="stitched" if serving.stitched else "plain",
        target_id=place,
        num_draft_tokens=3,
        golden=None,
        provenance={"recipe": public_recipe(recipe), "target": {"name": place}},
        tokenizer=tiny_tokenizer() if kind == "draft_lm" else None,
    )


def result(kind: str, k: int, accepted: int, suite: str = "chat", **changes: Any) -> dict[str, Any]:
    """A result in which every round accepts `accepted` drafts."""
    rounds = [Cycle([1] * k, accepted, accepted, accepted + 1)] * 2
    requests = [RequestTrace(f"{c}{i}", [1], [0] * 5, rounds, category=c) for c in ("a", "b|\nc") for i in range(2)]
    return {**result_of(requests, kind, k, suite), **changes}


def card_of(where: Path, *overrides: str, results: Path | None = None) -> tuple[str, dict[str, Path | bytes]]:
    files = publication(where, "me/head", ["hub.base_model=someone/model", *overrides], results)
    card = files["README.md"]
    assert isinstance(card, bytes)
    return card.decode(), files


def served(card: str) -> list[str]:
    return shlex.split(next(line for line in card.splitlines() if line.startswith("vllm serve")))


@pytest.mark.parametrize("kind", ["mlp", "medusa"])
def test_a_method_of_the_plugin_says_that_it_needs_it(kind: str, tmp_path: Path) -> None:
    card, files = card_of(exported(kind, tmp_path))
    command = served(card)
    assert command[2] == "someone/model"
    assert json.loads(command[4])["model"] == "spec_train.serving.vllm_plugin.SpecTrainProposer"
    assert json.loads(command[6]) == {"spec_train_speculator": "me/head"}
    assert "pip install spec-train" in card
    data = ModelCard(card).data
    assert (data.library_name, data.base_model) == ("spec-train", "someone/model")
    assert "base_model_relation" not in data.to_dict()  # the Hub has no word for a head
    assert not any(name.startswith("tokenizer") for name in files)


def test_a_draft_language_model_is_a_finetune_with_a_tokenizer(tmp_path: Path) -> None:
    card, files = card_of(exported("draft_lm", tmp_path))
    assert {"tokenizer.json", "tokenizer_config.json"} <= set(files)
    assert all(isinstance(content, Path) for name, content in files.items() if name.startswith("tokenizer"))
    data = ModelCard(card).data
    assert (data.library_name, data.base_model, data.base_model_relation) == (
        "transformers",
        "someone/model",
        "finetune",
    )
    assert json.loads(served(card)[4])["method"] == "draft_model"


def test_a_draft_that_starts_from_another_model_descends_from_that(tmp_path: Path) -> None:
    card, _ = card_of(exported("draft_lm", tmp_path, start_layers=None, start_model="someone/small"))
    data = ModelCard(card).data
    assert (data.base_model, data.base_model_relation) == ("someone/small", "finetune")
    assert "A draft language model for [someone/model]" in card
    assert served(card)[2] == "someone/model"


def test_a_stitched_copy_is_served_by_itself(tmp_path: Path) -> None:
    where = exported("mtp", tmp_path)
    card, files = card_of(where)
    assert served(card)[2] == "me/head"
    data = ModelCard(card).data
    assert (data.library_name, data.base_model_relation) == ("transformers", "finetune")
    assert isinstance(files["model.safetensors"], Path)
    nameless = publication(where, "me/head")["README.md"]  # its target needs no name: it is all there
    assert isinstance(nameless, bytes)
    assert served(nameless.decode()) == served(card)
    assert (
        "base_model" not in ModelCard(nameless.decode()).data.to_dict()
        or ModelCard(nameless.decode()).data.base_model is None
    )


def test_a_name_that_vllm_would_misread_is_refused(tmp_path: Path) -> None:
    where = exported("draft_lm", tmp_path)
    with pytest.raises(UserError, match="choose another name"):
        publication(where, "me/eagle3-draft", ["hub.base_model=someone/model"])


def test_tables_of_several_suites_and_what_speaks_against_the_head(tmp_path: Path) -> None:
    where = exported("eagle1", tmp_path)
    slow = {"speed": {"tokens_per_second": 5.0, "baseline_tokens_per_second": 10.0, "speedup": 0.5, "batch_size": 1}}
    seen = {"overlap": {"checked": 4, "exact": 1, "near": 1, "ids": ["asker@example.org"]}}
    wrong = {"lossless": {"checked": 4, "identical": 3, "first_divergence": {"id": "asker@example.org", "position": 1}}}
    results = [
        result("eagle1", 1, 1, **seen),
        result("eagle1", 3, 2, **slow, **wrong),
        result("eagle1", 3, 1, suite="/somewhere/logs.jsonl"),
        result("eagle1", 3, 0, backend="vllm", outputs=[[1, 2]], per_request=["asker"], batch_size=8),
        result("ngram", 3, 3),
        result("mlp", 3, 3),  # another speculator, whose figures are none of this card's
    ]
    weights = weights_sha256(where)
    (tmp_path / "results.json").write_text(json.dumps([{**row, "weights_sha256": weights} for row in results]))
    card, files = card_of(where, results=tmp_path / "results.json")
    pivot = [line for line in card.splitlines() if line.startswith(("| suite | temperature", "| chat | 0 |", "| logs"))]
    assert pivot[:3] == [
        "| suite | temperature | K=1 | K=3 |",
        "| chat | 0 | 2.00 (2.00-2.00) | 3.00 (3.00-3.00) |",
        "| logs | 0 |  | 2.00 (2.00-2.00) |",
    ]
    assert "| chat | 0, in vLLM with 8 at a time |  | 1.00 (1.00-1.00) |" in card
    assert "| chat | b\\| c | 2 | 3.00 (3.00-3.00) |" in card
    assert "2 of the 4 prompts of chat are in the training data (1 exact, 1 near)" in card
    assert "Slower than plain decoding on the machine above: chat K=3 temperature 0 (0.50x)." in card
    assert "ngram with K=3 gave 4.00 tokens a pass on chat at temperature 0, this speculator 3.00 at best." in card
    assert "3 of 4 outputs were token for token those of plain decoding; those that were not: chat K=3 3/4." in card
    assert sorted(name for name in files if name.startswith("eval/")) == [
        "eval/chat-eagle1-k1-t0.json",
        "eval/chat-eagle1-k3-t0-vllm-c8.json",
        "eval/chat-eagle1-k3-t0.json",
        "eval/chat-ngram-k3-t0.json",
        "eval/logs-eagle1-k3-t0.json",
    ]
    for content in (content for content in files.values() if isinstance(content, bytes)):
        assert b"asker" not in content and b"/somewhere" not in content


def test_a_single_conversation_is_published_without_an_interval(tmp_path: Path) -> None:
    """Its figures are shown, with "(-)" for the interval that it has not; a server's sums are not published."""
    whole = result("mlp", 3, 2)
    one = next(iter(whole["by_category"].values()))
    where = exported("mlp", tmp_path)
    weights = weights_sha256(where)
    alone = {**whole, "mean_acceptance_length_ci95": None, "suite": "alone", "weights_sha256": weights}
    alone["by_category"] = {name: {**one, "mean_acceptance_length_ci95": None} for name in ("a", "c")}
    results = tmp_path / "results"
    results.mkdir()
    (results / "alone.json").write_text(json.dumps(alone))
    (results / "served.json").write_text(json.dumps({**alone, "backend": "server", "suite": "served"}))
    card, _ = card_of(where, results=results)
    assert card.count("3.00 (-)") == 4 and "| served |" not in card  # by K, every figure, two categories
    shown = {found.metric_type: found for found in ModelCard(card).data.eval_results}
    assert "ci95" not in shown["mean_acceptance_length"].metric_args
