"""What is published of a whole run: nothing of this machine or of the data, and no figure that was not measured."""

from __future__ import annotations

import json
import shlex
from pathlib import Path

import pytest
import yaml
from huggingface_hub import ModelCard
from markdown_it import MarkdownIt

from spec_train.errors import UserError
from spec_train.evaluation.report import result_name
from spec_train.manifest import atomic_write_json
from spec_train.pipeline import run_all
from spec_train.recipe import load_recipe
from spec_train.serving.facts import read_facts
from spec_train.serving.publication import publication
from spec_train.speculators import recorded_prompt
from tests.integration.test_run import write_recipe

HUB = ["hub.base_model=someone/tiny-llama", "hub.license=mit", "hub.tags=[tiny]", "hub.language=[en]"]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a finished run, with results at two K and two temperatures."""
    folder = tmp_path_factory.mktemp("published")
    path = write_recipe(folder, eval={"num_draft_tokens": [1, 3], "temperature": [0.0, 0.7], "speed_rounds": 1})
    (folder / "notes.md").write_text("A word of my own.\n")
    overrides = [f"hub.card_notes={folder / 'notes.md'}", "train.epochs=2", "data.sources.0.license=CC0-1.0"]
    run_all(load_recipe(path, [*overrides, "target.system_prompt=Be brief."]), force=set())
    return folder / "run"


def published(run: Path, form: str, overrides: list[str] = HUB) -> dict[str, str]:
    """The text files of a publication."""
    files = publication(run / "export" / form, "me/tiny-head", overrides)
    texts = {name: content for name, content in files.items() if not name.endswith(".safetensors")}
    return {name: (c if isinstance(c, bytes) else c.read_bytes()).decode() for name, c in texts.items()}


@pytest.mark.parametrize("form", ["plain", "speculators"])
def test_nothing_of_this_machine_or_of_the_data_is_published(run: Path, form: str) -> None:
    texts = published(run, form)
    assert {"README.md", "recipe.yaml", "config.json", "export.json", "eval/held_out-eagle3-k3-t0.json"} <= set(texts)
    for name, text in texts.items():
        assert str(run.parent) not in text, name
        assert "question number" not in text, name
        assert "prompts.jsonl-" not in text, name  # ids of the user's rows


def test_the_published_recipe_is_the_runs_own(run: Path, tmp_path: Path) -> None:
    (tmp_path / "recipe.yaml").write_text(published(run, "plain")["recipe.yaml"])
    (tmp_path / "prompts.jsonl").write_text("")
    again, first = load_recipe(tmp_path / "recipe.yaml"), load_recipe(run / "recipe.yaml")
    assert again.target.model == "someone/tiny-llama"
    assert again.data.sources[0].path == str(tmp_path / "prompts.jsonl")
    for section in ("responses", "features", "speculator", "optim", "train", "eval", "export"):
        assert getattr(again, section) == getattr(first, section)


def test_every_figure_of_the_metadata_stands_in_a_result(run: Path) -> None:
    texts = published(run, "plain")
    card = ModelCard(texts["README.md"])  # parses and checks the model-index
    measured = {}
    for name, text in texts.items():
        if name.startswith("eval/"):
            assert name == f"eval/{result_name(json.loads(text))}"
            result, original = json.loads(text), json.loads((run / name).read_text())
            assert result["mean_acceptance_length"] == original["mean_acceptance_length"]
            measured[result["type"], result["num_draft_tokens"], result["temperature"]] = result
    assert len(measured) == 8  # the head and prompt lookup
    figures = {
        "mean_acceptance_length": lambda result: result["mean_acceptance_length"],
        "tokens_per_step": lambda result: result["tokens_per_step"],
        "speedup": lambda result: result["speed"]["speedup"],
    }
    seen = set()
    for shown in card.data.eval_results:
        args = shown.metric_args
        key = ("eagle3", args["num_draft_tokens"], args["temperature"])
        assert shown.metric_value == figures[shown.metric_type](measured[key])
        if shown.metric_type == "mean_acceptance_length":
            assert args["ci95"] == measured[key]["mean_acceptance_length_ci95"]
        seen.add((*key, shown.metric_type))
    assert len(seen) == 2 * 2 * 3
    assert ModelCard(str(card)).data.to_dict() == card.data.to_dict()


def test_the_card_says_what_the_hub_indexes_and_what_a_reader_needs(run: Path) -> None:
    text = published(run, "plain")["README.md"]
    data = ModelCard(text).data
    assert (data.base_model, data.license, data.language) == ("someone/tiny-llama", "mit", ["en"])
    assert (data.library_name, data.pipeline_tag) == ("vllm", "text-generation")
    assert set(data.tags) == {"speculative-decoding", "eagle3", "vllm", "spec-train", "tiny"}
    command = next(line for line in text.splitlines() if line.startswith("vllm serve"))
    assert shlex.split(command)[:3] == ["vllm", "serve", "someone/tiny-llama"]
    assert json.loads(shlex.split(command)[4])["model"] == "me/tiny-head"
    result = json.loads((run / "eval" / "held_out-eagle3-k3-t0.json").read_text())
    low, high = result["mean_acceptance_length_ci95"]
    row = next(line for line in text.splitlines() if line.startswith("| held_out | 0 |"))
    assert row.endswith(f"| {result['mean_acceptance_length']:.2f} ({low:.2f}-{high:.2f}) |")
    for fact in ("A word of my own.", "CC0-1.0", "19 to train on, 1 to choose"):
        assert fact in text
    assert "8 of 8 outputs were token for token" in text  # greedy, at both K
    assert "None of the 4 prompts of held_out is in the training data." in text
    assert "Not run in vLLM before it was published" in text


def test_the_system_prompt_is_published_only_where_the_recipe_says_so(
    run: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    kept_back = published(run, "plain")
    assert not [name for name, text in kept_back.items() if "Be brief." in text]
    assert "a system prompt that is not published" in kept_back["README.md"]
    assert "lacks target.system_prompt" in kept_back["README.md"]
    assert any(
        "hub.publish_system_prompt=true" in line for line in read_facts(run / "export" / "plain", "me/h", HUB).unknown
    )
    (tmp_path / "export.json").write_text(kept_back["export.json"])
    assert "system_prompt" not in recorded_prompt(tmp_path)
    assert "a system prompt that is not published" in caplog.text  # whoever measures it is told
    shown = published(run, "plain", [*HUB, "hub.publish_system_prompt=true"])
    assert "the system prompt `Be brief.`" in shown["README.md"]
    assert yaml.safe_load(shown["recipe.yaml"])["target"]["system_prompt"] == "Be brief."
    assert recorded_prompt(run / "export" / "plain")["system_prompt"] == "Be brief."  # here nothing is kept back


@pytest.mark.parametrize("form", ["plain", "speculators"])
def test_the_card_renders(run: Path, form: str) -> None:
    text = published(run, form)["README.md"].split("\n---\n", 1)[1]
    tokens = MarkdownIt("commonmark").enable("table").parse(text)
    assert sum(token.type == "table_open" for token in tokens) == 4
    assert [t.content for t in tokens if t.type == "fence" and t.content.startswith("vllm serve")]
    for line in (line for line in text.splitlines() if line.startswith("|")):
        assert not line.startswith("||") and line.endswith("|")
    rows, width = [], 0
    for line in text.splitlines():  # every row has the cells of its header
        if not line.startswith("|"):
            width = 0
            continue
        cells = line.replace("\\|", "").count("|")
        width = width or cells
        rows.append((cells, width))
    assert all(cells == width for cells, width in rows)


def test_an_evaluation_of_another_training_is_refused(run: Path) -> None:
    """test_stale.py makes one by training anew."""
    result = run / "eval" / "held_out-eagle3-k3-t0.json"
    before = result.read_text()
    try:
        atomic_write_json(result, {**json.loads(before), "weights_sha256": "0" * 64})
        with pytest.raises(
            UserError, match=r"held_out-eagle3-k3-t0\.json: its figures are not of the weights in .*plain"
        ):
            read_facts(run / "export" / "plain", "me/tiny-head", HUB)
    finally:
        result.write_text(before)


def test_only_the_hub_section_can_still_be_set(run: Path) -> None:
    with pytest.raises(UserError, match="only hub"):
        published(run, "plain", ["train.epochs=3"])
    with pytest.raises(UserError, match="license other needs license_name"):
        published(run, "plain", ["hub.license=other"])
    with pytest.raises(UserError, match="looks like an access token"):
        published(run, "plain", [*HUB, "hub.tags=[hf_" + "a" * 30 + "]"])
