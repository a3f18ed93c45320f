"""P-EAGLE heads in real vLLM, in both formats: one parallel pass drafts what ours drafts."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from spec_train.speculators.peagle import PEagle, PEagleOptions
from spec_train.target import TargetModel
from tests.chain_heads import randomise_norms
from tests.tiny import tiny_model
from tests.vllm.chained import assert_served_as_trained

pytestmark = pytest.mark.vllm


def test_vllm_drafts_what_we_draft(tmp_path: Path) -> None:
    """With every option that changes a number, a draft vocabulary of its own, and K beyond the depths trained."""
    target = TargetModel.load(str(tiny_model("llama", tmp_path)))
    options = PEagleOptions(
        type="peagle",
        aux_layer_ids=[0, 1, 3, 4],
        num_layers=2,
        num_depths=4,
        norm_before_fc=True,
        fc_norm=True,
        norm_before_residual=True,
    )
    head = PEagle.from_recipe(options, target, torch.arange(0, 300), seed=0)
    randomise_norms(head)
    assert head.config.mask_token_id == 319
    assert_served_as_trained(head, target, tmp_path, ["plain", "speculators"], k=5)
