"""EAGLE-1 heads in real vLLM: it takes embedding and output head from the target, and drafts what we draft."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from spec_train.speculators.eagle import Eagle1, Eagle1Options
from spec_train.target import TargetModel
from tests.chain_heads import randomise_norms
from tests.tiny import tiny_model
from tests.vllm.chained import assert_served_as_trained

pytestmark = pytest.mark.vllm
SCALED = {"rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}


@pytest.mark.parametrize(
    ("kind", "layers", "changes"),
    [
        ("llama", 1, {}),
        ("qwen3", 2, {"rope_parameters": {**SCALED, "original_max_position_embeddings": 32}, "vocab_size": 384}),
    ],
    ids=["one layer, llama", "two layers, scaled qwen3 with a padded vocabulary"],
)
def test_vllm_drafts_what_we_draft(kind: str, layers: int, changes: dict[str, Any], tmp_path: Path) -> None:
    target = TargetModel.load(str(tiny_model(kind, tmp_path, **changes)))
    # The loss leaves tokens out; drafts come from the whole vocabulary, in vLLM as here.
    options = Eagle1Options(type="eagle1", num_layers=layers)
    head = Eagle1.from_recipe(options, target, torch.arange(0, 300), seed=0)
    randomise_norms(head)
    assert not {"embed_tokens.weight", "lm_head.weight", "norm.weight"} & set(head.serving().tensors)
    assert_served_as_trained(head, target, tmp_path, ["plain"], k=3)
