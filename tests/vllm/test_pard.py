"""PARD drafts in real vLLM: the trained row of the mask token beside a head that stays as it was."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from spec_train.speculators.pard import Pard, PardOptions
from spec_train.target import TargetModel
from tests.chain_heads import answers, fit
from tests.tiny import tiny_model
from tests.vllm.chained import NEW_TOKENS, PROMPTS, assert_served_as_trained

pytestmark = pytest.mark.vllm


def draft_for(target: TargetModel, ids: int, **changes: Any) -> Pard:
    options = PardOptions(**{"type": "pard", "num_depths": 4, "step_decay": 1.0, **changes})
    return Pard.from_recipe(options, target, torch.arange(ids), seed=0)


def test_layers_of_a_tied_target(tmp_path: Path) -> None:
    """The mask token is a token like others, whose row of the head must survive; K beyond the depths trained."""
    target = TargetModel.load(str(tiny_model("llama", tmp_path, tie_word_embeddings=True)))
    draft = draft_for(target, 300, start_layers=2)
    assert draft.config.mask_token_id == 319
    assert_served_as_trained(draft, target, tmp_path, ["plain"], k=5)


def test_another_family_that_is_padded_otherwise(tmp_path: Path) -> None:
    """The mask token is a padding row of the target, which the draft's own vocabulary lacks."""
    target = TargetModel.load(str(tiny_model("llama", tmp_path, vocab_size=384)))
    other = tiny_model("qwen3", tmp_path, seed=1, vocab_size=336, num_hidden_layers=1, hidden_size=96)
    draft = draft_for(target, 320, start_model=str(other))
    assert draft.config.mask_token_id == 383
    fit(draft, answers(target, draft, PROMPTS[:3], NEW_TOKENS), 100)  # it starts from nothing of the target
    assert_served_as_trained(draft, target, tmp_path, ["plain"], k=3)
