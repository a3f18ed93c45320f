"""The commands on a tiny target: what they print, what scripts may rely on, and what they leave on disk."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml

from tests.program import spec_train
from tests.tiny import tiny_model


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A working directory with a tiny target, chats of which one is unusable, and a recipe."""
    folder = tmp_path_factory.mktemp("work")
    tiny_model("llama", folder).rename(folder / "target")
    chats = [
        [{"role": "user", "content": f"What is {n} plus two?"}, {"role": "assistant", "content": f"{n + 2} it is."}]
        for n in range(8)
    ]
    rows = [json.dumps({"id": f"row-{n}", "messages": chat}) for n, chat in enumerate(chats)]
    rows.append(json.dumps({"id": "broken", "messages": []}))
    (folder / "chats.jsonl").write_text("\n".join(rows) + "\n")
    recipe = {
        "run": {"name": "tiny", "device": "cpu"},
        "target": {"model": "target"},
        "data": {"sources": [{"path": "chats.jsonl"}], "held_out": 2, "max_length": 128},
        "responses": {"mode": "keep"},
        "speculator": {"type": "eagle3", "ttt_steps": 2},
    }
    (folder / "r.yaml").write_text(yaml.safe_dump(recipe))
    return folder


def test_inspect_json_is_rows_then_counts_and_nothing_else(folder: Path) -> None:
    result = spec_train(folder, "inspect", "r.yaml", "-n", "2", "--json")
    assert result.returncode == 0, result.stderr
    *rows, counts = [json.loads(line) for line in result.stdout.splitlines()]
    assert len(rows) == 2
    for row in rows:
        assert list(row) == ["id", "input_ids", "loss_mask", "text", "supervised_text"]
        assert len(row["input_ids"]) == len(row["loss_mask"])
        assert set(row["loss_mask"]) == {0, 1}
        assert row["supervised_text"].startswith(f"{int(row['id'][-1]) + 2} it is.")
        assert "What is" in row["text"]
        assert "What is" not in row["supervised_text"]
    assert counts["kept"] == 8
    assert sum(counts["dropped"].values()) == 1


def test_inspect_marks_the_supervised_tokens(folder: Path) -> None:
    result = spec_train(folder, "inspect", "r.yaml", "-n", "1", FORCE_COLOR="1", TERM="xterm-256color")
    assert result.returncode == 0, result.stderr
    green, dim = "\x1b[1;32m", "\x1b[2m"
    assert f"{green}2 it is." in result.stdout
    assert f"{dim}<|im_start|>user" in result.stdout
    assert "kept 8, dropped: 1 " in result.stdout


def test_a_stage_is_made_once_and_refused_for_other_inputs(folder: Path) -> None:
    first = spec_train(folder, "prompts", "r.yaml")
    assert first.returncode == 0, first.stderr
    assert first.stdout == "prompts: see runs/tiny/prompts\n"
    manifest = folder / "runs" / "tiny" / "prompts" / "manifest.json"
    made = json.loads(manifest.read_text())
    again = spec_train(folder, "prompts", "r.yaml")
    assert again.returncode == 0
    assert json.loads(manifest.read_text()) == made
    other = spec_train(folder, "prompts", "r.yaml", "data.held_out=3")
    assert other.returncode == 2
    assert other.stderr.count("\n") == 1
    assert "held_out = 2, now it is 3" in other.stderr
    forced = spec_train(folder, "prompts", "r.yaml", "data.held_out=3", "--force")
    assert forced.returncode == 0, forced.stderr
    assert len((folder / "runs" / "tiny" / "prompts" / "held_out.jsonl").read_text().splitlines()) == 3


def test_an_unwritable_run_directory_is_one_line(folder: Path) -> None:
    (folder / "file").write_text("")
    result = spec_train(folder, "prompts", "r.yaml", "run.output_dir=file/run")
    assert result.returncode == 2
    assert result.stderr.count("\n") == 1
    assert "file/run" in result.stderr
    assert "cannot be written" in result.stderr


def test_eval_without_a_recipe_writes_the_result_format(folder: Path) -> None:
    (folder / "suite.jsonl").write_text('{"prompt": "What is two plus two?"}\n{"prompt": "Hello there"}\n')
    where = ["--target", "target", "--suite", "suite.jsonl", "--json", "out.json"]
    how = ["--num-draft-tokens", "2", "3", "--temperature", "0", "--max-new-tokens", "64"]
    result = spec_train(folder, "eval", "ngram", *where, *how)
    assert result.returncode == 0, result.stderr
    results = json.loads((folder / "out.json").read_text())
    assert [entry["num_draft_tokens"] for entry in results] == [2, 3]
    for entry in results:
        assert entry["method"] == "ngram"
        assert entry["num_prompts"] == 2
        assert entry["lossless"]["identical"] == entry["lossless"]["checked"] == 2
        steps, accepted = entry["num_spec_steps"], entry["num_accepted_draft_tokens"]
        assert steps > 0
        assert entry["mean_acceptance_length"] == pytest.approx(1 + accepted / steps)
    assert "out.json" in result.stdout


def test_eval_options_of_sampling_reach_the_decoder(folder: Path) -> None:
    (folder / "one.jsonl").write_text('{"prompt": "Hello there"}\n')
    where = ["--target", "target", "--suite", "one.jsonl", "--json", "sampled.json", "--max-new-tokens", "16"]
    filters = ["--temperature", "1", "--top-k", "20", "--top-p", "0.9", "--min-p", "0.05"]
    rule = ["--draft-sample-method", "probabilistic", "--rejection-sample-method", "block"]
    result = spec_train(folder, "eval", "ngram", *where, "--num-draft-tokens", "2", *filters, *rule)
    assert result.returncode == 0, result.stderr
    (entry,) = json.loads((folder / "sampled.json").read_text())
    assert (entry["temperature"], entry["top_k"], entry["top_p"], entry["min_p"]) == (1.0, 20, 0.9, 0.05)
    assert (entry["draft_sample_method"], entry["rejection_sample_method"]) == ("probabilistic", "block")
    assert entry["lossless"] is None
