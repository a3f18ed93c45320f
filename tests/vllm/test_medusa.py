"""Exported Medusa heads in real vLLM, through our plugin and through the loader that vLLM 0.32 still has."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from spec_train.serving.contract import installed_vllm
from spec_train.speculators.medusa import Medusa
from tests.vllm.multi_head import Served

pytestmark = pytest.mark.vllm
HEADS: dict[str, dict[str, Any]] = {
    "own output heads": {"num_layers": 2},
    "reduced vocabulary": {"draft_ids": torch.arange(0, 320, 2)},
    "one output head": {"shared_head": True, "bias": False},
}
PLUGIN = ("own output heads", "reduced vocabulary")
NATIVE = ("own output heads", "one output head")  # vLLM's loader never accepts a reduced vocabulary
HAS_LOADER = (installed_vllm() or "").startswith("0.32")


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Served:
    served = Served(tmp_path_factory.mktemp("medusa"), Medusa, HEADS)
    served.run(PLUGIN, NATIVE if HAS_LOADER else ())
    return served


@pytest.mark.parametrize("name", PLUGIN)
def test_vllm_drafts_what_we_draft(served: Served, name: str) -> None:
    served.check(name)


@pytest.mark.skipif(not HAS_LOADER, reason="vLLM has dropped its own loader of Medusa")
@pytest.mark.parametrize("name", NATIVE)
def test_the_same_files_load_natively(served: Served, name: str) -> None:
    served.check(f"{name}, natively")
