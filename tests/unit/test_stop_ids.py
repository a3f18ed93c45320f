"""An answer ends where vLLM ends it: at every eos of the generation config and at the tokenizer's."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from spec_train.data.chat import load_tokenizer
from spec_train.decoding.engine import plain_decode
from spec_train.decoding.sampling import Sampling
from spec_train.errors import UserError
from spec_train.recipe import load_recipe
from spec_train.recipe_doctor import diagnose
from spec_train.stop_ids import stop_sources, stop_token_ids
from spec_train.target import TargetModel
from tests.tiny import tiny_model, tiny_tokenizer

PROMPT = [5, 77, 140, 9, 300, 12]


def write(folder: Path, name: str, **values: Any) -> None:
    (folder / name).write_text(json.dumps(values))


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({"model_type": "llama", "eos_token_id": [9, 3]}, [3, 9]),
        ({"model_type": "gemma3", "eos_token_id": 7, "text_config": {"model_type": "gemma3_text"}}, [7]),
        ({"eos_token_id": None, "text_config": {"eos_token_id": 7}}, [7]),
        ({"model_type": "gemma3", "eos_token_id": None, "text_config": {"eos_token_id": 7}}, [7]),
    ],
)
def test_a_config_stands_in_for_a_missing_generation_config(
    config: dict[str, Any], expected: list[int], tmp_path: Path
) -> None:
    write(tmp_path, "config.json", **config)
    assert stop_token_ids(tmp_path) == expected
    write(tmp_path, "generation_config.json", eos_token_id=[12, 4])
    assert stop_token_ids(tmp_path) == [4, 12]
    tiny_tokenizer().save_pretrained(tmp_path)
    assert stop_sources(tmp_path) == {"generation_config.json": [4, 12], "tokenizer": [2]}
    assert stop_token_ids(tmp_path) == [2, 4, 12]


def test_a_folder_without_any_config_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="its config cannot be read"):
        stop_token_ids(tmp_path)


@pytest.fixture
def chat_tuned(tmp_path: Path) -> Path:
    """The fourth token of its answer is the tokenizer's eos; the generation config still has the base model's."""
    path = tiny_model("llama", tmp_path)
    write(path, "generation_config.json", eos_token_id=3)
    tokenizer = load_tokenizer(str(path))
    told = plain_decode(TargetModel.load(str(path)), [PROMPT], sampling=Sampling(), max_new_tokens=4)
    tokenizer.eos_token = tokenizer.convert_ids_to_tokens(told.requests[0].output_ids[3])
    tokenizer.save_pretrained(path)
    return path


def test_the_target_stops_at_the_tokenizers_eos(chat_tuned: Path) -> None:
    target = TargetModel.load(str(chat_tuned))
    end = load_tokenizer(str(chat_tuned)).eos_token_id
    assert target.eos_token_ids == {3, end}
    (answer,) = target.generate([PROMPT], Sampling(), 12)
    assert (answer.output_ids[-1], len(answer.output_ids), answer.finish_reason) == (end, 4, "stop")


def test_doctor_says_where_the_ends_differ(chat_tuned: Path, tmp_path: Path) -> None:
    (tmp_path / "prompts.jsonl").write_text("".join(json.dumps({"prompt": f"say {n}"}) + "\n" for n in range(4)))
    write(
        tmp_path,
        "recipe.yaml",
        run={"name": "doctor", "output_dir": str(tmp_path / "out"), "device": "cpu"},
        target={"model": str(chat_tuned)},
        data={"sources": [{"path": str(tmp_path / "prompts.jsonl")}], "held_out": 1, "max_length": 80},
        speculator={"type": "mtp", "ttt_steps": 1},
    )
    (found,) = [c for c in diagnose(load_recipe(tmp_path / "recipe.yaml"), steps=1).checks if c.name == "stops"]
    end = load_tokenizer(str(chat_tuned)).eos_token_id
    assert found.state == "note"
    assert "<|endoftext|> (3) in generation_config.json;" in found.text
    assert f"({end}) in tokenizer: an answer ends at any of them" in found.text
