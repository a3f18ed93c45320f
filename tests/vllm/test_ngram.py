"""Prompt lookup against vLLM's `method=ngram`: drafts, accepted counts and counters, round by round."""

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from spec_train.decoding.acceptance import vllm_counters
from spec_train.decoding.engine import speculative_decode
from spec_train.decoding.sampling import Sampling
from spec_train.serving.processes import run_vllm
from spec_train.speculators.ngram import NgramProposer
from spec_train.stop_ids import stop_token_ids
from spec_train.target import TargetModel
from tests.tiny import tiny_model

pytest.importorskip("vllm")
pytestmark = pytest.mark.vllm

WINDOWS = [(2, 4), (5, 5), (1, 3)]
PROMPTS = [
    [11, 12, 13, 14, 15, 16, 11, 12, 13, 14, 15],
    [40, 41, 42, 40, 43, 42, 40, 41, 42],
    [7, 7, 7, 7, 7, 7],
    [90, 91, 92, 93],
]
K = 4
NEW_TOKENS = 80


def looping_model(folder: Path) -> Path:
    """A target without attention: its next token depends on the last one alone, so its greedy text runs into a loop,
    where every longer n-gram has been seen before."""
    model = AutoModelForCausalLM.from_pretrained(tiny_model("llama", folder / "plain"))
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.o_proj.weight.zero_()
    model.save_pretrained(folder / "looping")
    return folder / "looping"


# A process each: numba, which vLLM loads for n-grams, keeps a second CPU engine of the same process from starting.
@pytest.mark.parametrize(("shortest", "longest"), WINDOWS)
def test_every_window_drafts_what_vllm_drafts(shortest: int, longest: int, tmp_path: Path) -> None:
    folder = looping_model(tmp_path)
    trace = speculative_decode(
        TargetModel.load(str(folder)),
        NgramProposer(shortest, longest),
        PROMPTS,
        num_draft_tokens=K,
        sampling=Sampling(),
        max_new_tokens=NEW_TOKENS,
    )
    window = {"prompt_lookup_min": shortest, "prompt_lookup_max": longest}
    run = run_vllm(
        str(folder),
        [{"speculative_config": {"method": "ngram", "num_speculative_tokens": K, **window}}],
        PROMPTS,
        max_new_tokens=NEW_TOKENS,
        max_draft_tokens=K,
        stop_token_ids=stop_token_ids(folder),
    )[0]
    assert [request.output_ids for request in trace.requests] == run.outputs
    for request, steps in zip(trace.requests, run.steps, strict=True):
        ours = [(cycle.drafts, cycle.accepted) for cycle in request.cycles if cycle.drafts]
        assert ours == [(step["drafts"], step["accepted"]) for step in steps]
    assert vllm_counters(trace) == run.counters
    assert run.counters["num_accepted_tokens"] > 0
