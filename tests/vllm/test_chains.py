"""EAGLE-1, P-EAGLE and PARD in real vLLM: fitted to the answers of some prompts, exported, read back, and served beside
our decoder.

EAGLE-1 takes embedding and output head from the target. P-EAGLE drafts in one parallel pass, in both formats. PARD has
the trained row of its mask token beside a head that stays as it was. One process of vLLM serves all targets, each
without a speculator and then with its exports.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from spec_train.decoding.engine import speculative_decode
from spec_train.decoding.sampling import Sampling
from spec_train.decoding.trace import DecodeTrace
from spec_train.serving.compare import compare
from spec_train.serving.contract import engine_arguments
from spec_train.serving.export import export, read_export
from spec_train.serving.golden import make_golden
from spec_train.serving.processes import VllmRun, run_vllm
from spec_train.serving.verify import check_files, check_reload
from spec_train.speculators import load_speculator
from spec_train.speculators.base import Speculator
from spec_train.speculators.eagle import Eagle1, Eagle1Options
from spec_train.speculators.pard import Pard, PardOptions
from spec_train.speculators.peagle import PEagle, PEagleOptions
from spec_train.target import TargetModel
from tests.chain_heads import answers, fit, randomise_norms
from tests.tiny import tiny_model
from tests.vllm_report import assert_same

pytestmark = pytest.mark.vllm
NEW_TOKENS = 32
DRAW = random.Random(0)
PROMPTS = [[DRAW.randrange(4, 320) for _ in range(length)] for length in (5, 9, 13, 17, 24)]
SCALED = {"rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
SCALED_QWEN3 = {"rope_parameters": {**SCALED, "original_max_position_embeddings": 32}, "vocab_size": 384}


def eagle1(target: TargetModel, folder: Path, layers: int) -> Speculator:
    """The loss leaves tokens out; drafts come from the whole vocabulary, in vLLM as here."""
    options = Eagle1Options(type="eagle1", num_layers=layers)
    head = Eagle1.from_recipe(options, target, torch.arange(0, 300), seed=0)
    randomise_norms(head)
    assert not {"embed_tokens.weight", "lm_head.weight", "norm.weight"} & set(head.serving().tensors)
    return head


def peagle(target: TargetModel, folder: Path) -> Speculator:
    """With every option that changes a number, and a draft vocabulary of its own."""
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
    return head


def pard_of_layers(target: TargetModel, folder: Path) -> Speculator:
    """Layers of a tied target. The mask token is a token like others, whose row of the head must survive."""
    options = PardOptions(type="pard", num_depths=4, step_decay=1.0, start_layers=2)
    draft = Pard.from_recipe(options, target, torch.arange(300), seed=0)
    assert draft.config.mask_token_id == 319
    return draft


def pard_of_another_family(target: TargetModel, folder: Path) -> Speculator:
    """Padded otherwise: the mask token is a padding row of the target, which the draft's own vocabulary lacks."""
    other = tiny_model("qwen3", folder, seed=1, vocab_size=336, num_hidden_layers=1, hidden_size=96)
    options = PardOptions(type="pard", num_depths=4, step_decay=1.0, start_model=str(other))
    draft = Pard.from_recipe(options, target, torch.arange(320), seed=0)
    assert draft.config.mask_token_id == 383
    fit(draft, answers(target, draft, PROMPTS[:3], NEW_TOKENS), 100)  # it starts from nothing of the target
    return draft


# case: kind of target and its config, the fresh head, formats, K (5: beyond the depths that were trained)
CASES: dict[str, tuple[str, dict[str, Any], Callable[[TargetModel, Path], Speculator], list[Any], int]] = {
    "eagle1": ("llama", {}, lambda target, folder: eagle1(target, folder, 1), ["plain"], 3),
    "eagle1, two layers": ("qwen3", SCALED_QWEN3, lambda target, folder: eagle1(target, folder, 2), ["plain"], 3),
    "peagle": ("llama", {}, peagle, ["plain", "speculators"], 5),
    "pard": ("llama", {"tie_word_embeddings": True}, pard_of_layers, ["plain"], 5),
    "pard, another family": ("llama", {"vocab_size": 384}, pard_of_another_family, ["plain"], 3),
}
RELOADED = ("eagle1", "peagle", "pard")


class Served:
    """The targets with their exported heads, our own decoding with what the files hold, and vLLM's."""

    def __init__(self, root: Path) -> None:
        self.exports: dict[str, list[Path]] = {}
        self.traces: dict[str, DecodeTrace] = {}
        self.targets: dict[str, Path] = {}
        engines: list[dict[str, Any]] = []
        for number, (case, (kind, config, fresh, formats, k)) in enumerate(CASES.items()):
            target = TargetModel.load(str(tiny_model(kind, root / f"{number}", **config)))
            self.targets[case] = Path(target.name)
            head = fresh(target, root)
            fit(head, answers(target, head, PROMPTS[:3], NEW_TOKENS), 60)  # right often on these, seldom on the others
            head.eval().requires_grad_(False)
            settings: dict[str, Any] = {"target_id": target.name, "num_draft_tokens": k, "provenance": {}}
            settings["golden"] = make_golden(head, target, PROMPTS[0])
            self.exports[case] = [
                export(head.serving(), root / f"head-{number}-{format}", format=format, **settings)
                for format in formats
            ]
            self.traces[case] = speculative_decode(
                target,
                load_speculator(self.exports[case][0], target),
                PROMPTS,
                num_draft_tokens=k,
                sampling=Sampling(),
                max_new_tokens=NEW_TOKENS,
                batch_size=len(PROMPTS),
            )
            engines.append({"model": target.name})
            for where in self.exports[case]:
                assert check_files(where, self.targets[case], read_export(where), None) == []
                engines.append(engine_arguments(where, target.name, read_export(where), k))
        deepest = max(k for *_, k in CASES.values())
        runs = iter(
            run_vllm("", engines, PROMPTS, max_new_tokens=NEW_TOKENS, max_draft_tokens=deepest, stop_token_ids=[2])
        )
        self.runs: dict[str, tuple[VllmRun, list[VllmRun]]] = {
            case: (next(runs), [next(runs) for _ in exports]) for case, exports in self.exports.items()
        }


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Served:
    return Served(tmp_path_factory.mktemp("chains"))


@pytest.mark.parametrize("case", CASES)
def test_vllm_drafts_what_we_draft(served: Served, case: str) -> None:
    """Text without speculation, every draft of every cycle and the counters are ours, over enough cycles, some with all
    and some with none of their drafts accepted."""
    k, trace = CASES[case][-1], served.traces[case]
    baseline, runs = served.runs[case]
    for vllm_run in runs:
        run = compare(baseline, vllm_run, trace, "test")
        cycles = assert_same(run, trace)
        assert {0, k} <= {cycle.accepted for cycle in cycles}
        assert run.near_ties == 0
        assert run.counters["num_drafts"] == len(cycles)


@pytest.mark.parametrize("case", RELOADED)
def test_a_fresh_process_drafts_the_golden_sample_again(served: Served, case: str) -> None:
    report = check_reload(served.exports[case][-1], served.targets[case], "float32", "cpu")
    assert report.problems == []
    assert report.drafts_equal
