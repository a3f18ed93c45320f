"""Exported Medusa heads and MLP speculators in real vLLM, through our plugin, and Medusa through the loader that vLLM
0.32 still has: they draft what our decoder drafts, and leave the text. One process of vLLM serves them all."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch

from spec_train.decoding.engine import speculative_decode
from spec_train.decoding.sampling import Sampling
from spec_train.decoding.trace import DecodeTrace
from spec_train.serving.compare import VllmReport, compare
from spec_train.serving.contract import engine_arguments, installed_vllm
from spec_train.serving.export import export, read_export
from spec_train.serving.golden import make_golden
from spec_train.serving.processes import VllmRun, run_vllm
from spec_train.serving.verify import verify_export
from spec_train.speculators import load_speculator
from spec_train.speculators.medusa import Medusa
from spec_train.speculators.mlp import Mlp
from spec_train.speculators.multi_head import MultiHead
from spec_train.stop_ids import stop_token_ids
from spec_train.target import TargetModel
from tests import multi_head as shared
from tests.tiny import tiny_model
from tests.vllm_report import assert_same

pytestmark = pytest.mark.vllm
K, NEW_TOKENS = 3, 24
DRAW = random.Random(0)
PROMPTS = [[DRAW.randrange(4, 320) for _ in range(length)] for length in (5, 9, 13, 17, 30)]
HEADS: dict[str, tuple[type[MultiHead], dict[str, Any]]] = {
    "medusa, own output heads": (Medusa, {"num_layers": 2}),
    "medusa, reduced vocabulary": (Medusa, {"draft_ids": torch.arange(0, 320, 2)}),
    "medusa, one output head": (Medusa, {"shared_head": True, "bias": False}),
    "mlp, tied": (Mlp, {}),
    "mlp, own weights, scaled input, reduced vocabulary": (
        Mlp,
        {"tie_weights": False, "scale_input": True, "draft_ids": torch.arange(0, 320, 2)},
    ),
    "mlp, sum_lstm": (Mlp, {"cell": "sum_lstm", "inner_dim": 48}),
}
PLUGIN = [name for name in HEADS if name != "medusa, one output head"]
NATIVE = ["medusa, own output heads", "medusa, one output head"]  # vLLM's loader never accepts a reduced vocabulary
HAS_LOADER = (installed_vllm() or "").startswith("0.32")


class Served:
    """One target, and vLLM that serves it without a speculator and then with each of several, as their READMEs say;
    those of NATIVE also with vLLM's own loader of Medusa."""

    def __init__(self, folder: Path) -> None:
        self.path = tiny_model("llama", folder)
        self.target = TargetModel.load(str(self.path))
        known = shared.answers(self.target, PROMPTS[:3])  # right often on these, hardly ever on the others
        self.folders: dict[str, Path] = {}
        self.traces: dict[str, DecodeTrace] = {}
        for number, (name, (cls, options)) in enumerate(HEADS.items()):
            speculator = shared.fresh(cls, self.target, loss="ce", **options)
            shared.fit(speculator, known, steps=60, lr=1e-2)
            self.folders[name] = export(
                speculator.serving(),
                folder / f"heads-{number}",
                format="plain",
                target_id=str(self.path),
                num_draft_tokens=K,
                golden=make_golden(speculator, self.target, PROMPTS[0]),
                provenance={},
            )
            self.traces[name] = self.decode(name)
        arguments = {
            name: engine_arguments(self.folders[name], str(self.path), read_export(self.folders[name]), K)
            for name in PLUGIN
        }
        for name in NATIVE if HAS_LOADER else ():
            own = {"method": "medusa", "model": str(self.folders[name]), "num_speculative_tokens": K}
            arguments[f"{name}, natively"] = {"speculative_config": own}
            self.traces[f"{name}, natively"] = self.traces[name]
        self.baseline, *runs = run_vllm(
            str(self.path),
            [{}, *arguments.values()],
            PROMPTS,
            max_new_tokens=NEW_TOKENS,
            max_draft_tokens=K,
            stop_token_ids=stop_token_ids(self.path),
        )
        self.runs: dict[str, VllmRun] = dict(zip(arguments, runs, strict=True))

    def decode(self, name: str) -> DecodeTrace:
        """Our own decoding with the heads as the files have them."""
        speculator = load_speculator(self.folders[name], self.target)
        settings: dict[str, Any] = {"num_draft_tokens": K, "max_new_tokens": NEW_TOKENS, "batch_size": len(PROMPTS)}
        return speculative_decode(self.target, speculator, PROMPTS, sampling=Sampling(), **settings)

    def report(self, name: str) -> VllmReport:
        """What `spec-train verify` finds."""
        return compare(self.baseline, self.runs[name], self.traces[name], "test")

    def check(self, name: str) -> None:
        """Text, every draft of every round and the counters are equal, in rounds that accept nothing and all."""
        cycles = assert_same(self.report(name), self.traces[name])
        assert {0, K} <= {cycle.accepted for cycle in cycles}


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Served:
    return Served(tmp_path_factory.mktemp("heads"))


@pytest.mark.parametrize("name", PLUGIN)
def test_vllm_drafts_what_we_draft(served: Served, name: str) -> None:
    served.check(name)


@pytest.mark.skipif(not HAS_LOADER, reason="vLLM has dropped its own loader of Medusa")
@pytest.mark.parametrize("name", NATIVE)
def test_the_same_files_load_natively(served: Served, name: str) -> None:
    served.check(f"{name}, natively")


def test_an_export_verifies_from_its_files(served: Served) -> None:
    """A fresh process gives the same drafts of the golden sample; other drafts than vLLM's are told apart."""
    report = verify_export(
        served.folders["mlp, tied"],
        served.path,
        prompts=PROMPTS,
        max_new_tokens=NEW_TOKENS,
        num_draft_tokens=K,
        expected_trace=None,
        vllm="off",
    )
    assert report.problems == []
    assert report.reload.drafts_equal is True
    served.traces["mistaken"], served.runs["mistaken"] = served.traces["mlp, tied"], served.runs["mlp, sum_lstm"]
    assert "vLLM drafts other tokens" in served.report("mistaken").problems[0]
