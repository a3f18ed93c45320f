"""Heads in published layouts in real vLLM: our reader and vLLM take the very same folder, and draft the same.

The folders are written by hand (tests/published.py). A random head is hardly ever right, so each is trained on first
and written again in its layout: some rounds then accept all drafts, some none. vLLM serves EAGLE heads itself; IBM's
and Medusa's, which stock vLLM no longer loads, are drafted for by our plugin, from the published folder as it stands.
"""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch

from spec_train.decoding.engine import speculative_decode
from spec_train.decoding.sampling import Sampling
from spec_train.decoding.trace import DecodeTrace
from spec_train.serving.compare import compare
from spec_train.serving.contract import PLUGIN_KEY
from spec_train.serving.processes import VllmRun, run_vllm
from spec_train.speculators import load_speculator, options_class
from spec_train.speculators.multi_head import PROPOSER
from spec_train.speculators.start import start_head
from spec_train.stop_ids import stop_token_ids
from spec_train.target import TargetModel
from tests.chain_heads import answers, fit
from tests.published import METHOD, random_tensors, republished, write_head
from tests.tiny import tiny_model
from tests.vllm_report import assert_same

pytestmark = pytest.mark.vllm
K, NEW_TOKENS = 3, 24
DRAW = random.Random(0)
PROMPTS = [[DRAW.randrange(4, 320) for _ in range(length)] for length in (5, 9, 13, 17, 30)]
LAYOUTS = ("eagle3", "specforge", "speculators", "eagle1", "ibm", "medusa")


def arguments(layout: str, folder: Path) -> dict[str, Any]:
    """The engine arguments that somebody would give who knows the layout."""
    drafts = {"num_speculative_tokens": K}
    if layout == "speculators":
        return {"model": str(folder), "speculative_config": drafts}
    if layout in ("ibm", "medusa"):
        plugin = {"method": "custom_class", "model": PROPOSER, **drafts}
        return {"speculative_config": plugin, "additional_config": {PLUGIN_KEY: str(folder)}}
    method = "eagle" if layout == "eagle1" else "eagle3"
    return {"speculative_config": {"method": method, "model": str(folder), **drafts}}


class Served:
    """Our decoding with each head, and one process of vLLM with each, after one without."""

    def __init__(self, root: Path) -> None:
        # Deep enough for three distinct layers of vLLM's default, which an official head without ids gets.
        path = tiny_model("llama", root, num_hidden_layers=8)
        self.target = TargetModel.load(str(path))
        self.traces: dict[str, DecodeTrace] = {}
        speculations: list[dict[str, Any]] = [{}]
        for number, layout in enumerate(LAYOUTS):
            folder = self.write_trained(root / f"head-{number}", layout)
            speculations.append(arguments(layout, folder))
            settings: dict[str, Any] = {"num_draft_tokens": K, "max_new_tokens": NEW_TOKENS, "batch_size": 5}
            head = load_speculator(folder, self.target)
            self.traces[layout] = speculative_decode(self.target, head, PROMPTS, sampling=Sampling(), **settings)
        self.baseline, *runs = run_vllm(
            str(path),
            speculations,
            PROMPTS,
            max_new_tokens=NEW_TOKENS,
            max_draft_tokens=K,
            stop_token_ids=stop_token_ids(path),
        )
        self.runs: dict[str, VllmRun] = dict(zip(LAYOUTS, runs, strict=True))

    def write_trained(self, folder: Path, layout: str) -> Path:
        """A head in `layout` that is right often on some of the prompts and seldom on the others."""
        tensors = random_tensors(layout, self.target.embedding.weight)
        first = write_head(folder / "random", layout, self.target.name, tensors)
        kind = METHOD.get(layout, layout)
        options = options_class(kind)(type=kind, start_from=str(first), step_decay=1.0)  # type: ignore[call-arg]
        head = start_head(options, self.target, torch.arange(320))
        fit(head, answers(self.target, head, PROMPTS[:3], NEW_TOKENS), 60, rate=1e-2)
        again = republished(layout, tensors, head.state_dict())
        return write_head(folder / "trained", layout, self.target.name, again)


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Served:
    return Served(tmp_path_factory.mktemp("published"))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_vllm_drafts_what_we_draft(served: Served, layout: str) -> None:
    """Text, every draft of every round and the counters are equal."""
    trace = served.traces[layout]
    report = compare(served.baseline, served.runs[layout], trace, "test")
    cycles = assert_same(report, trace)
    assert {0, K} <= {cycle.accepted for cycle in cycles}
