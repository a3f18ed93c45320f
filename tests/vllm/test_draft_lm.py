"""Draft language models in real vLLM: layers of the target, merged adapters, another family that is padded otherwise.

The target's vocabulary is padded beyond its tokenizer and its head is its embedding. The drafts are fitted a little to
the target's answers to the very prompts: right often, and wrong often enough.
"""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch

from spec_train.decoding.engine import speculative_decode
from spec_train.decoding.sampling import Sampling
from spec_train.serving.compare import compare
from spec_train.serving.contract import engine_arguments
from spec_train.serving.export import export, read_export
from spec_train.serving.golden import make_golden
from spec_train.serving.processes import run_vllm
from spec_train.serving.verify import check_files, check_reload
from spec_train.speculators import load_speculator
from spec_train.stop_ids import stop_token_ids
from spec_train.target import TargetModel
from tests.parity.test_draft_lm import LORA, answers, draft_for, fit
from tests.tiny import tiny_model
from tests.vllm_report import assert_same

pytestmark = pytest.mark.vllm
K, NEW_TOKENS = 3, 32
DRAW = random.Random(0)
PROMPTS = [[DRAW.randrange(4, 320) for _ in range(length)] for length in (5, 9, 13, 17, 24)]


def test_vllm_drafts_what_we_draft(tmp_path: Path) -> None:
    path = tiny_model("llama", tmp_path, tie_word_embeddings=True, vocab_size=384)
    other = tiny_model("qwen3", tmp_path, seed=1, vocab_size=336, num_hidden_layers=1, hidden_size=96)
    target = TargetModel.load(str(path))
    batch, even = answers(target, PROMPTS, NEW_TOKENS), torch.arange(0, 320, 2)
    starts: dict[str, dict[str, Any]] = {
        "layers": {"loss": "jsd"},
        "merged-adapters": {"lora": LORA, "start_layers": [0, 3]},
        "padded-otherwise": {"start_layers": None, "start_model": str(other)},
    }
    arguments: list[dict[str, Any]] = [{}]
    traces = {}
    for name, changes in starts.items():
        draft = draft_for(target, even if name == "layers" else None, **changes)
        fit(draft, batch, 60)
        golden = make_golden(draft.eval(), target, PROMPTS[0])
        settings: dict[str, Any] = {"target_id": str(path), "num_draft_tokens": K, "golden": golden}
        where = export(draft.serving(), tmp_path / name, format="plain", provenance={}, **settings)
        assert check_files(where, path, read_export(where), None) == []
        traces[name] = speculative_decode(
            target,
            load_speculator(where, target),  # what the files hold
            PROMPTS,
            num_draft_tokens=K,
            sampling=Sampling(),
            max_new_tokens=NEW_TOKENS,
            batch_size=len(PROMPTS),
        )
        arguments.append(engine_arguments(where, str(path), read_export(where), K))
    assert check_reload(where, path, "float32", "cpu").problems == []
    baseline, *runs = run_vllm(
        str(path),
        arguments,
        PROMPTS,
        max_new_tokens=NEW_TOKENS,
        max_draft_tokens=K,
        stop_token_ids=stop_token_ids(path),
    )
    for (name, trace), vllm_run in zip(traces.items(), runs, strict=True):
        run = compare(baseline, vllm_run, trace, "test")
        assert run.problems == [], name
        cycles = assert_same(run, trace)
        assert run.near_ties == 0
        per_position = run.counters["num_accepted_tokens_per_pos"]
        assert 0 < per_position[-1] < per_position[0] < run.counters["num_drafts"] == len(cycles)
        # vLLM picks from all rows, we from those of the tokenizer: a padded row is never the largest.
        assert max(token for cycle in cycles for token in cycle.drafts) < 320
