"""Families beside those of the shipped recipes: Transformers' own `generate`, the end of their context, refusals."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from spec_train.decoding.engine import plain_decode, speculative_decode
from spec_train.decoding.sampling import Sampling
from spec_train.errors import UserError
from spec_train.speculators.base import Proposal, Proposer
from spec_train.speculators.ngram import NgramProposer
from spec_train.target import TargetModel
from tests.more_families import CONFIGS, more_family

GREEDY = Sampling()
PROMPTS = [list(range(40, 75)), [7, 9], list(range(100, 111))]
REFUSED = {"falcon_h1": "layers of kind hybrid are not supported"}
OWN_TEST = ("phi3",)  # test_long_rope.py
# Latent attention, learned positions, alibi; the others take what shipped families take.
APART = ("bloom", "deepseek_v2", "deepseek_v3", "gpt2", "opt")


@pytest.mark.parametrize(
    "family",
    [
        pytest.param(family, marks=() if family in APART else pytest.mark.slow)
        for family in CONFIGS
        if family not in (*REFUSED, *OWN_TEST)
    ],
)
def test_a_family_generates_what_transformers_does(family: str, tmp_path: Path) -> None:
    """In a ragged batch, and with prompt lookup's drafts; each row is the model's own answer to it alone."""
    folder = more_family(family, tmp_path)
    own: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
    target = TargetModel.load(str(folder))
    texts = []
    for prompt in PROMPTS:
        text = own.generate(torch.tensor([prompt]), max_new_tokens=16, do_sample=False)[0, len(prompt) :]
        texts.append(text.tolist())
    settings: dict[str, Any] = {"sampling": GREEDY, "max_new_tokens": 16, "batch_size": 3}
    plain = plain_decode(target, PROMPTS, **settings)
    drafted = speculative_decode(target, NgramProposer(), PROMPTS, num_draft_tokens=3, **settings)
    for trace in (plain, drafted):
        assert [request.output_ids for request in trace.requests] == texts


@pytest.mark.parametrize("family", REFUSED)
def test_what_cannot_be_run_is_said_in_one_line(family: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=REFUSED[family]) as caught:
        TargetModel.load(str(more_family(family, tmp_path)))
    assert "\n" not in str(caught.value)


def test_a_family_that_nobody_knows_is_refused_in_one_line(tmp_path: Path) -> None:
    """Falcon with alibi, which it counts off another mask than ours."""
    with pytest.raises(UserError, match="models of type falcon are not supported") as caught:
        TargetModel.load(str(more_family("falcon", tmp_path)))
    assert "\n" not in str(caught.value)


class Constant(Proposer):
    """Drafts the same tokens in every round, to the end of the context and beyond."""

    def begin(self, prompts: list[list[int]], max_length: int) -> Any:
        return torch.tensor([len(prompt) for prompt in prompts])

    def commit(self, state: Any, committed: Any) -> None: ...

    def propose(self, state: Any, num_draft_tokens: int, choose: Any) -> Proposal:
        drafts = torch.full((len(state), num_draft_tokens), 43)
        return Proposal(drafts, torch.full((len(state),), num_draft_tokens))

    def select(self, state: Any, rows: torch.Tensor) -> Any:
        return state[rows]


DYNAMIC = {"rope_parameters": {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 10000.0}}


@pytest.mark.parametrize(("family", "config"), [("gpt2", {}), ("opt", {}), ("llama", DYNAMIC)])
def test_nothing_stands_beyond_the_context(family: str, config: dict[str, Any], tmp_path: Path) -> None:
    """Rows of a batch reach the end of the context at different rounds: a table of positions ends there, and dynamic
    NTK would turn every row by other frequencies from there on."""
    limit = {"n_positions": 40} if family == "gpt2" else {"max_position_embeddings": 40}
    target = TargetModel.load(str(more_family(family, tmp_path, **limit, **config)))
    assert target.max_length == 40
    prompts = [list(range(40, 77)), [41, 42] * 9, list(range(100, 111)), [45, 46, 47] * 4]
    settings: dict[str, Any] = {"sampling": GREEDY, "max_new_tokens": 40}
    alone = [plain_decode(target, [prompt], **settings).requests[0].output_ids for prompt in prompts]
    assert [len(text) for text in alone] == [40 - len(prompt) for prompt in prompts]
    plain = plain_decode(target, prompts, **settings, batch_size=4)
    drafted = speculative_decode(target, Constant(), prompts, num_draft_tokens=5, **settings, batch_size=4)
    for trace in (plain, drafted):
        assert [request.output_ids for request in trace.requests] == alone
