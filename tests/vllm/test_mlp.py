"""Exported MLP speculators in real vLLM through our plugin: they draft what our decoder drafts, and leave the text."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from spec_train.serving.verify import verify_export
from spec_train.speculators.mlp import Mlp
from tests.vllm.multi_head import NEW_TOKENS, PROMPTS, K, Served

pytestmark = pytest.mark.vllm
HEADS: dict[str, dict[str, Any]] = {
    "tied": {},
    "own weights, scaled input, reduced vocabulary": {
        "tie_weights": False,
        "scale_input": True,
        "draft_ids": torch.arange(0, 320, 2),
    },
    "sum_lstm": {"cell": "sum_lstm", "inner_dim": 48},
}


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Served:
    served = Served(tmp_path_factory.mktemp("mlp"), Mlp, HEADS)
    served.run(list(HEADS))
    return served


@pytest.mark.parametrize("name", HEADS)
def test_vllm_drafts_what_we_draft(served: Served, name: str) -> None:
    served.check(name)


def test_an_export_verifies_from_its_files(served: Served) -> None:
    """A fresh process gives the same drafts of the golden sample; other drafts than vLLM's are told apart."""
    report = verify_export(
        served.folders["tied"],
        served.path,
        prompts=PROMPTS,
        max_new_tokens=NEW_TOKENS,
        num_draft_tokens=K,
        expected_trace=None,
        vllm="off",
    )
    assert report.problems == []
    assert report.reload.drafts_equal is True
    served.traces["mistaken"], served.runs["mistaken"] = served.traces["tied"], served.runs["sum_lstm"]
    assert "vLLM drafts other tokens" in served.report("mistaken").problems[0]
