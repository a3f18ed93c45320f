"""Where a request ends: an EOS in mid-block, the length limit, the target's context. Text and counts must be exact.

The drafts come from a script: the target's own greedy text (everything is accepted) or that text with every third token
spoilt. So each round's outcome is known beforehand.
"""

import json

import pytest
import torch

from spec_train.decoding.acceptance import vllm_counters
from spec_train.decoding.engine import plain_decode, speculative_decode
from spec_train.decoding.sampling import Sampling
from spec_train.errors import UserError
from spec_train.evaluation.metrics import compare_lossless, summarise
from spec_train.speculators.base import Proposal, Proposer
from spec_train.speculators.eagle3 import Eagle3, Eagle3Options, eagle3_config
from spec_train.speculators.ngram import NgramProposer
from spec_train.target import TargetModel
from tests.tiny import tiny_model, tiny_tokenizer

PROMPTS = [[5, 6, 7, 8, 9, 10, 11], [20, 21, 22], list(range(30, 60)), [7, 7, 7, 7, 7], [100, 3]]
LONG = 40


@pytest.fixture(scope="module", params=["llama", "qwen3_5"])
def target(tmp_path_factory, request):
    """Keys and values alone, and beside them a running state that rejected drafts would spoil."""
    return TargetModel.load(str(tiny_model(request.param, tmp_path_factory.mktemp("target"))))


@pytest.fixture(scope="module")
def texts(target):
    """The target's greedy answers, far longer than any test needs."""
    return [r.output_ids for r in plain_decode(target, PROMPTS, sampling=Sampling(), max_new_tokens=LONG).requests]


class Script(Proposer):
    """Drafts the continuation it is given for each prompt; with `spoil`, every third token of it is wrong."""

    def __init__(self, texts, spoil=False):
        self.texts = {tuple(prompt): text for prompt, text in zip(PROMPTS, texts, strict=True)}
        self.spoil = spoil

    def begin(self, prompts, max_length):
        scripts = torch.tensor([[*self.texts[tuple(prompt)], *[0] * 8] for prompt in prompts])
        if self.spoil:
            scripts[:, 2::3] = (scripts[:, 2::3] + 1) % 320
        start = torch.tensor([len(prompt) for prompt in prompts])
        return {"script": scripts, "start": start, "known": start}

    def commit(self, state, committed):
        last = committed.position_BS.gather(1, committed.count_B[:, None] - 1)[:, 0]
        state["known"] = last + 2

    def propose(self, state, num_draft_tokens, choose):
        place = (state["known"] - state["start"])[:, None] + torch.arange(num_draft_tokens)
        drafts = state["script"].gather(1, place.clamp(max=state["script"].shape[1] - 1))
        return Proposal(drafts, torch.full((len(drafts),), num_draft_tokens))

    def select(self, state, rows):
        return {name: value[rows] for name, value in state.items()}


def check_accounts(trace):
    """Every token belongs to the prefill or to one round, and kept drafts are part of what was emitted."""
    for request in trace.requests:
        assert 1 + sum(cycle.emitted for cycle in request.cycles) == len(request.output_ids)
        for cycle in request.cycles:
            assert 0 <= cycle.kept <= cycle.accepted <= len(cycle.drafts)
            assert cycle.kept <= cycle.emitted <= cycle.kept + 1
            assert cycle.emitted >= 1
        at = 1
        for cycle in request.cycles:  # kept drafts stand in the text
            assert request.output_ids[at : at + cycle.kept] == cycle.drafts[: cycle.kept]
            at += cycle.emitted


@pytest.mark.parametrize("batch_size", [1, 3, 5])
@pytest.mark.parametrize("spoil", [False, True], ids=["oracle", "spoilt"])
@pytest.mark.parametrize("temperature", [0.0, 1e-8])
def test_greedy_text_is_the_targets_own(target, texts, spoil, batch_size, temperature):
    sampling = Sampling(temperature=temperature)
    trace = speculative_decode(
        target,
        Script(texts, spoil),
        PROMPTS,
        num_draft_tokens=4,
        sampling=sampling,
        max_new_tokens=21,
        batch_size=batch_size,
    )
    assert [request.output_ids for request in trace.requests] == [text[:21] for text in texts]
    check_accounts(trace)
    counts = vllm_counters(trace)
    if spoil:
        assert counts["num_accepted_tokens_per_pos"][2] == 0  # of three drafts in a row one is wrong
        assert counts["num_accepted_tokens"] > 0
    else:  # an oracle: K + 1 tokens a round
        assert counts["num_accepted_tokens"] == counts["num_draft_tokens"] == 4 * 4 * len(PROMPTS)
        assert all(cycle.emitted == 5 for request in trace.requests for cycle in request.cycles)


@pytest.mark.parametrize("max_new_tokens", [1, 2, 5, 7])
@pytest.mark.parametrize("spoil", [False, True], ids=["oracle", "spoilt"])
def test_exactly_the_tokens_that_were_asked_for(target, texts, max_new_tokens, spoil):
    trace = speculative_decode(
        target,
        Script(texts, spoil),
        PROMPTS,
        num_draft_tokens=4,
        sampling=Sampling(),
        max_new_tokens=max_new_tokens,
        batch_size=2,
    )
    assert [request.output_ids for request in trace.requests] == [text[:max_new_tokens] for text in texts]
    assert {request.finish_reason for request in trace.requests} == {"length"}
    check_accounts(trace)


def test_a_cut_round_keeps_both_counts(target, texts):
    trace = speculative_decode(
        target, Script(texts), PROMPTS[:1], num_draft_tokens=4, sampling=Sampling(), max_new_tokens=8
    )
    first, last = trace.requests[0].cycles
    assert (first.accepted, first.kept, first.emitted) == (4, 4, 5)
    assert (last.accepted, last.kept, last.emitted) == (4, 2, 2)  # eight tokens: 1 + 5 + 2
    result = summarise(
        trace,
        target="t",
        speculator="s",
        kind="oracle",
        method="oracle",
        suite="x",
        device="cpu",
        dtype="float32",
        sampling=Sampling(),
    )
    assert (result["num_spec_steps"], result["num_accepted_draft_tokens"]) == (2, 6)
    assert result["vllm_counters"]["num_accepted_tokens"] == 8
    assert result["mean_acceptance_length"] == 4.0
    assert result["tokens_per_step"] == 3.5


@pytest.mark.parametrize("place", [0, 1, 2, 6])
@pytest.mark.parametrize("spoil", [False, True], ids=["oracle", "spoilt"])
def test_an_eos_in_mid_block_ends_the_text(target, texts, monkeypatch, place, spoil):
    """The 1st, 2nd, 3rd and 7th token of every answer in turn are terminators, several ids at once."""
    terminators = frozenset(text[place] for text in texts)
    expected = [text[: 1 + next(i for i, token in enumerate(text) if token in terminators)] for text in texts]
    monkeypatch.setattr(target, "eos_token_ids", terminators)
    plain = plain_decode(target, PROMPTS, sampling=Sampling(), max_new_tokens=LONG, batch_size=2)
    trace = speculative_decode(
        target,
        Script(texts, spoil),
        PROMPTS,
        num_draft_tokens=4,
        sampling=Sampling(),
        max_new_tokens=LONG,
        batch_size=2,
    )
    assert [request.output_ids for request in trace.requests] == expected
    assert {request.finish_reason for request in trace.requests} == {"stop"}
    assert compare_lossless(plain.requests, trace.requests)["identical"] == len(PROMPTS)
    check_accounts(trace)
    assert max(len(text) for text in expected) > 1 or place == 0


@pytest.mark.parametrize("kind", ["eagle3", "ngram"])
def test_rows_that_end_with_the_prefill_leave_the_rest_alone(target, texts, monkeypatch, kind):
    """Their state is dropped before the proposer has seen a single verified token."""
    options = Eagle3Options(type="eagle3", aux_layer_ids=[1, 2, 4])
    ids = torch.arange(target.vocab_size)
    head = Eagle3.from_target(eagle3_config(options, target, len(ids)), target, ids, options.init, seed=0)
    monkeypatch.setattr(target, "eos_token_ids", frozenset({texts[1][0], texts[3][0]}))
    trace = speculative_decode(
        target,
        head.eval() if kind == "eagle3" else NgramProposer(1, 3),
        PROMPTS,
        num_draft_tokens=3,
        sampling=Sampling(),
        max_new_tokens=12,
        batch_size=5,
    )
    plain = plain_decode(target, PROMPTS, sampling=Sampling(), max_new_tokens=12, batch_size=5)
    assert compare_lossless(plain.requests, trace.requests)["identical"] == len(PROMPTS)
    assert [len(trace.requests[i].output_ids) for i in (1, 3)] == [1, 1]
    check_accounts(trace)


@pytest.mark.parametrize("spoil", [False, True], ids=["oracle", "spoilt"])
def test_the_targets_context_is_the_last_limit(tmp_path, spoil):
    target = TargetModel.load(str(tiny_model("llama", tmp_path, max_position_embeddings=32)))
    assert target.max_length == 32
    prompt = PROMPTS[2]
    assert len(prompt) == 30
    plain = plain_decode(target, [prompt], sampling=Sampling(), max_new_tokens=20)
    texts = [plain.requests[0].output_ids if p == prompt else [0, 0] for p in PROMPTS]
    trace = speculative_decode(
        target, Script(texts, spoil), [prompt], num_draft_tokens=4, sampling=Sampling(), max_new_tokens=20
    )
    assert len(trace.requests[0].output_ids) == 2
    # 31 tokens are known when the only round begins: of the four drafts one has a place.
    assert [len(cycle.drafts) for cycle in trace.requests[0].cycles] == [1]
    assert compare_lossless(plain.requests, trace.requests)["identical"] == 1
    check_accounts(trace)
    with pytest.raises(UserError, match="32 tokens"):
        speculative_decode(
            target, Script(texts), [[1] * 32], num_draft_tokens=4, sampling=Sampling(), max_new_tokens=20
        )


def test_one_token_answers_need_no_round(target, texts):
    trace = speculative_decode(
        target, Script(texts), PROMPTS, num_draft_tokens=4, sampling=Sampling(), max_new_tokens=1, batch_size=5
    )
    assert [request.output_ids for request in trace.requests] == [text[:1] for text in texts]
    assert not any(request.cycles for request in trace.requests)
    assert vllm_counters(trace)["num_drafts"] == trace.timings.target_steps == 0


def test_an_empty_prompt_is_one_clear_error(target, texts):
    for decode in (
        lambda: plain_decode(target, [PROMPTS[1], []], sampling=Sampling(), max_new_tokens=4, batch_size=2),
        lambda: speculative_decode(
            target, Script(texts), [[]], num_draft_tokens=4, sampling=Sampling(), max_new_tokens=4
        ),
    ):
        with pytest.raises(UserError, match="prompt") as error:
            decode()
        assert "\n" not in str(error.value)


@pytest.mark.parametrize("kind", ["mistral", "gemma3_text"])
@pytest.mark.parametrize("batch_size", [1, 3])
def test_a_sliding_window_that_the_text_outgrows(tmp_path, kind, batch_size):
    """The window is 16 tokens, the longest text 54: rejected drafts and old tokens are both out of sight."""
    target = TargetModel.load(str(tiny_model(kind, tmp_path)))
    assert 16 in target.windows.values()
    plain = plain_decode(target, PROMPTS, sampling=Sampling(), max_new_tokens=24)
    texts = [request.output_ids for request in plain.requests]
    spec = speculative_decode(
        target,
        Script(([*text, *[0] * 24][:24] for text in texts), spoil=True),
        PROMPTS,
        num_draft_tokens=4,
        sampling=Sampling(),
        max_new_tokens=24,
        batch_size=batch_size,
    )
    assert compare_lossless(plain.requests, spec.requests)["identical"] == len(PROMPTS)
    assert 0 < vllm_counters(spec)["num_accepted_tokens"] < vllm_counters(spec)["num_draft_tokens"]
    check_accounts(spec)


def test_every_eos_of_the_generation_config_ends_an_answer(target, tmp_path, texts):
    """The ids are read from the checkpoint, beside its tokenizer's own; the drafts run on past them."""
    folder = tiny_model("qwen3_5" if target.linear_layers else "llama", tmp_path)
    ends = sorted({texts[0][3], texts[2][2]})
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": ends}))
    target = TargetModel.load(str(folder))
    assert target.eos_token_ids == {*ends, tiny_tokenizer().eos_token_id}
    plain = plain_decode(target, PROMPTS, sampling=Sampling(), max_new_tokens=LONG, batch_size=5)
    spec = speculative_decode(
        target, Script(texts), PROMPTS, num_draft_tokens=6, sampling=Sampling(), max_new_tokens=LONG, batch_size=5
    )
    assert compare_lossless(plain.requests, spec.requests)["identical"] == len(PROMPTS)
    stopped = [request for request in spec.requests if request.finish_reason == "stop"]
    assert {request.output_ids[-1] for request in stopped} == set(ends)
    assert any(cycle.accepted > cycle.kept for request in stopped for cycle in request.cycles)
    check_accounts(spec)
