"""Where real vLLM ends an answer by itself is where ours ends."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from spec_train.data.chat import load_tokenizer
from spec_train.decoding.engine import plain_decode
from spec_train.decoding.sampling import Sampling
from spec_train.serving.compare import stop_problems
from spec_train.serving.verify import baseline_run
from spec_train.stop_ids import stop_token_ids
from spec_train.target import TargetModel
from tests.tiny import tiny_model

pytest.importorskip("vllm")
pytestmark = pytest.mark.vllm

PROMPTS = [[5, 77, 140, 9, 300, 12], [40, 41, 42, 43], [90, 91, 92, 93, 94]]


def test_vllm_stops_where_we_stop(tmp_path: Path) -> None:
    """A generation config of the base model beside a chat tokenizer: the first answer ends at the tokenizer's eos, the
    second at the generation config's, the third at the limit."""
    path = tiny_model("llama", tmp_path)
    answers = [
        request.output_ids
        for request in plain_decode(
            TargetModel.load(str(path)), PROMPTS, sampling=Sampling(), max_new_tokens=12
        ).requests
    ]
    (path / "generation_config.json").write_text(json.dumps({"eos_token_id": [3, answers[1][5]]}))
    tokenizer = load_tokenizer(str(path))
    tokenizer.eos_token = tokenizer.convert_ids_to_tokens(answers[0][3])
    tokenizer.save_pretrained(path)
    stops = stop_token_ids(path)
    assert stops == sorted({3, answers[1][5], answers[0][3]})
    ours = plain_decode(TargetModel.load(str(path)), PROMPTS, sampling=Sampling(), max_new_tokens=12)
    run = baseline_run(path, PROMPTS, max_new_tokens=12, max_draft_tokens=0)
    assert run.outputs == [request.output_ids for request in ours.requests]
    assert [len(text) for text in run.outputs[:2]] == [4, 6]
    assert run.own_stops is not None
    assert len(run.own_stops["requests"]) == 2
    assert stop_problems(run, stops) == []
    assert "vLLM ends answers at the ids" in stop_problems(run, stops[1:])[0]
    longer = replace(run, outputs=[[*text, 9] for text in run.outputs])  # as if ours had gone on
    assert "where vLLM stops by itself" in stop_problems(longer, stops)[0]
