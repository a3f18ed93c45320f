"""Targets with linear attention: states that roll back, documents that do not run into one another, MTP heads on top.

The reference is always a full pass of transformers over the text that was kept, without any cache.
"""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, Qwen3NextConfig, Qwen3NextForCausalLM

from spec_train.batch import FeatureSpec
from spec_train.decoding.engine import plain_decode, speculative_decode
from spec_train.decoding.sampling import Sampling
from spec_train.decoding.tree import tree_decode
from spec_train.decoding.tree_draft import static_tree
from spec_train.errors import UserError
from spec_train.evaluation.costs import measure_costs
from spec_train.evaluation.evaluate import tree_contenders
from spec_train.graphs import Graphs
from spec_train.linear_cache import LinearCache
from spec_train.speculators.draft_lm import DraftLM
from spec_train.speculators.draft_start import DraftLMOptions
from spec_train.speculators.eagle3 import Eagle3, Eagle3Options
from spec_train.speculators.mtp import Mtp, MtpOptions
from spec_train.speculators.ngram import NgramProposer
from spec_train.target import TargetModel
from tests.families import family_target
from tests.parity.test_eagle3 import PROMPTS, packed_batch
from tests.parity.test_enumeration import WORDS, TableDraft, chi_square_p, count_triples, decode, model_joint
from tests.parity.test_mtp import assert_estimate_equals_decode, assert_training_pass_equals_decode, fit
from tests.tiny import tiny_model

STATES = FeatureSpec((), last_hidden=False)


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[TargetModel, Any]:
    folder = tiny_model("qwen3_5", tmp_path_factory.mktemp("target"))
    own = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager", dtype=torch.float32).eval()
    return TargetModel.load(str(folder)), own


@pytest.fixture(scope="module")
def with_head(tmp_path_factory: pytest.TempPathFactory) -> tuple[TargetModel, Mtp]:
    """The family's target, vision tower and all, and the MTP layer that it ships, fitted a little."""
    target = TargetModel.load(str(family_target("qwen3_5", tmp_path_factory.mktemp("family"))))
    head = Mtp.from_recipe(MtpOptions(type="mtp", init="target_head"), target, torch.arange(320), seed=0)
    fit(target, head, steps=100)
    return target, head.eval().requires_grad_(False)


@pytest.mark.parametrize("seed", range(4))
@torch.no_grad()
def test_any_walk_of_passes_is_a_full_pass_over_what_was_kept(pair: tuple[TargetModel, Any], seed: int) -> None:
    """Prompts shorter than the convolution and longer than a chunk; blocks of one to seven tokens of which each row
    keeps a number of its own, none at all included; rows dropped, doubled and branched on the way."""
    target, own = pair
    draw = random.Random(seed)
    texts = [[draw.randrange(320) for _ in range(n)] for n in (1, 2, 70, 3, 17, 64)]
    cache: Any = target.new_cache(160)
    target.prefill(texts, cache, STATES)
    for _ in range(10):
        if draw.random() < 0.4:
            rows = [draw.randrange(len(texts)) for _ in range(draw.randrange(1, 6))]
            texts = [list(texts[i]) for i in rows]
            if draw.random() < 0.5:
                cache.select(torch.tensor(rows))
            else:
                cache = cache.branch(torch.tensor(rows))
        width = draw.randrange(1, 8)
        block = torch.tensor([[draw.randrange(320) for _ in range(width)] for _ in texts])
        start = torch.tensor([len(text) for text in texts])
        last, _ = target.step(block, start[:, None] + torch.arange(width), cache, STATES)
        for row, text in enumerate(texts):
            expected = own(input_ids=torch.tensor([text + block[row].tolist()]), use_cache=False).logits[0, -width:]
            torch.testing.assert_close(target.logits(last[row]), expected, atol=2e-4, rtol=1e-4)
            texts[row] = text + block[row, : draw.randrange(width + 1)].tolist()


@torch.no_grad()
def test_a_branch_leaves_its_origin_alone(pair: tuple[TargetModel, Any]) -> None:
    target, own = pair
    cache = target.new_cache(32)
    target.prefill([[5, 6, 7]], cache, STATES)
    other = cache.branch(torch.tensor([0, 0]))
    target.step(torch.tensor([[8, 9], [10, 11]]), torch.tensor([[3, 4], [3, 4]]), other, STATES)
    last, _ = target.step(torch.tensor([[12]]), torch.tensor([[3]]), cache, STATES)
    expected = own(input_ids=torch.tensor([[5, 6, 7, 12]]), use_cache=False).logits[0, -1]
    torch.testing.assert_close(target.logits(last[0, 0]), expected, atol=2e-4, rtol=1e-4)


def test_a_pass_from_where_no_state_is_kept_is_a_fault(pair: tuple[TargetModel, Any]) -> None:
    """Into the prompt, or over a gap: the text would be wrong without a word."""
    target, _ = pair
    for position in (1, 4):
        cache = target.new_cache(16)
        target.prefill([[5, 6, 7]], cache, STATES)
        with pytest.raises(ValueError, match="into a block of 0"):
            target.step(torch.tensor([[8]]), torch.tensor([[position]]), cache, STATES)


@torch.no_grad()
def test_packed_documents_have_the_states_that_they_have_alone(pair: tuple[TargetModel, Any]) -> None:
    """Several to a row, of lengths that share a pass and that do not, with padding behind them."""
    target, own = pair
    draw = random.Random(0)
    documents = [([draw.randrange(320) for _ in range(n)], 1) for n in (70, 3, 1, 40, 66, 2, 9)]
    batch = packed_batch(documents, 3)
    assert (batch.document_BT == -1).any()
    layers = (0, 2, 3)  # what transformers calls state 4 is behind the final norm
    features = target.features(batch.input_ids_BT, batch.position_BT, batch.document_BT, FeatureSpec(layers, True))
    assert features.aux_hidden is not None
    assert features.last_hidden is not None
    seen = 0
    for row in range(len(batch.input_ids_BT)):
        for number in sorted(set(batch.document_BT[row].tolist())):
            here = batch.document_BT[row] == number
            if number < 0:
                assert not features.last_hidden[row, here].any()
                continue
            alone = own(input_ids=batch.input_ids_BT[row, here][None], output_hidden_states=True, use_cache=False)
            aux = torch.cat([alone.hidden_states[k] for k in layers], dim=-1)[0]
            torch.testing.assert_close(features.aux_hidden[row, here], aux, atol=2e-4, rtol=1e-4)
            logits = target.logits(features.last_hidden[row, here])
            torch.testing.assert_close(logits, alone.logits[0], atol=2e-4, rtol=1e-4)
            seen += 1
    assert seen == len(documents)


@pytest.mark.parametrize("k", [1, 2, 3, 4])
def test_speculation_is_plain_decoding_is_transformers(with_head: tuple[TargetModel, Mtp], k: int) -> None:
    """Ragged prompts in one batch; every fifth token of an answer ends it, in mid-block too."""
    target, head = with_head
    text = plain_decode(target, PROMPTS, sampling=Sampling(), max_new_tokens=30, batch_size=4)
    ends = sorted({request.output_ids[5 * (i + 1)] for i, request in enumerate(text.requests[:2])})
    before, target.eos_token_ids = target.eos_token_ids, frozenset(ends)
    try:
        plain = plain_decode(target, PROMPTS, sampling=Sampling(), max_new_tokens=30, batch_size=4)
        spec = speculative_decode(
            target, head, PROMPTS, num_draft_tokens=k, sampling=Sampling(), max_new_tokens=30, batch_size=4
        )
    finally:
        target.eos_token_ids = before
    for prompt, one, two in zip(PROMPTS, plain.requests, spec.requests, strict=True):
        ids: Any = torch.tensor([prompt])
        generate: Any = target.model.generate
        own = generate(ids, max_new_tokens=30, do_sample=False, eos_token_id=ends, pad_token_id=0)[0, len(prompt) :]
        assert one.output_ids == two.output_ids == own.tolist()
    assert {request.finish_reason for request in spec.requests} == {"stop", "length"}
    cycles = [cycle for request in spec.requests for cycle in request.cycles]
    assert {0, k} <= {cycle.accepted for cycle in cycles}


def test_the_mtp_layer_is_trained_as_it_decodes(with_head: tuple[TargetModel, Mtp]) -> None:
    target, head = with_head
    assert target.linear_layers == [0, 1, 2, 4]
    assert head.config.layout == "qwen3_5"
    assert_training_pass_equals_decode(target, head)
    assert_estimate_equals_decode(target, head)


def test_an_eagle_head_decodes_beside_it_too(pair: tuple[TargetModel, Any]) -> None:
    target, _ = pair
    options = Eagle3Options(type="eagle3", aux_layer_ids=[1, 2, 3])
    head = Eagle3.from_recipe(options, target, torch.arange(320), seed=0).eval()
    plain = plain_decode(target, PROMPTS, sampling=Sampling(), max_new_tokens=20, batch_size=4)
    spec = speculative_decode(
        target, head, PROMPTS, num_draft_tokens=3, sampling=Sampling(), max_new_tokens=20, batch_size=4
    )
    assert [r.output_ids for r in spec.requests] == [r.output_ids for r in plain.requests]
    assert head.serving().config["rope_parameters"] == {"rope_type": "default", "rope_theta": 1e5}


def test_sampled_text_has_the_targets_law(tmp_path: Path) -> None:
    """Three tokens after a prompt, drafts drawn and refused, against exact enumeration with full passes."""
    sizes: dict[str, Any] = {"num_hidden_layers": 2, "hidden_size": 32, "num_attention_heads": 2, "vocab_size": WORDS}
    sizes.update(linear_num_key_heads=1, linear_num_value_heads=2, linear_key_head_dim=16, linear_value_head_dim=16)
    folder = tiny_model("qwen3_5", tmp_path, **sizes, eos_token_id=None, bos_token_id=None)
    target = TargetModel.load(str(folder))
    target.eos_token_ids = frozenset()  # that of the tokenizer would end some texts before their third token
    sampling = Sampling(1.0, draft_sample_method="probabilistic", seed=3)
    trace = decode(target, TableDraft(target), sampling, 5_000)  # type: ignore[no-untyped-call]
    assert chi_square_p(count_triples(trace), model_joint(target, sampling)) > 1e-3  # type: ignore[no-untyped-call]
    assert {0, 1, 2} == {cycle.accepted for request in trace.requests for cycle in request.cycles}


def test_costs_are_measured_while_other_targets_would_be_replayed(pair: tuple[TargetModel, Any]) -> None:
    """The turns before those that count are more then, and a plain step goes on by a position in each."""
    target, _ = pair
    with target.replaying(Graphs(capture=False)):
        costs = measure_costs(target, NgramProposer(1, 3), deepest=2, context=8, batch_sizes=(1,), repeats=1)
    assert 1 in {point["rows"] for point in costs["target_step"]}


def test_what_cannot_work_is_said_in_one_line(pair: tuple[TargetModel, Any], tmp_path: Path) -> None:
    target, _ = pair
    options = {"shape": static_tree([2, 1], []), "sampling": Sampling(), "max_new_tokens": 4}
    speculator: Any = None
    with pytest.raises(UserError, match="trees of drafts need a state for every branch"):
        tree_decode(target, speculator, PROMPTS[:1], **options)  # type: ignore[arg-type]
    with pytest.raises(UserError, match="trees of drafts"):
        tree_contenders(target, speculator, "head", [static_tree([2, 1], [])])
    none = torch.zeros(1, 1, dtype=torch.long)
    with pytest.raises(UserError, match="trees of drafts"):
        target.step_tree(none, none, none.bool()[None], none[0], target.new_cache(4), STATES)
    with pytest.raises(UserError, match="a draft with linear attention layers is not supported"):
        DraftLM.from_recipe(DraftLMOptions(type="draft_lm", start_layers=2), target, torch.arange(320), seed=0)
    draft = DraftLM.from_recipe(DraftLMOptions(type="draft_lm", start_layers=[1]), target, torch.arange(320), seed=0)
    assert not isinstance(draft.body.new_cache(4), LinearCache)
    sizes = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    experts = {"num_experts": 2, "num_experts_per_tok": 1, "moe_intermediate_size": 16, "head_dim": 16}
    heads = {"linear_num_key_heads": 1, "linear_num_value_heads": 1, "num_key_value_heads": 1, "vocab_size": 64}
    kinds = ["linear_attention", "full_attention"]
    model = Qwen3NextForCausalLM(Qwen3NextConfig(**sizes, **experts, **heads, layer_types=kinds))
    model.save_pretrained(tmp_path / "next")
    with pytest.raises(UserError, match="linear attention as in Qwen3NextDecoderLayer is not supported"):
        TargetModel.load(str(tmp_path / "next"))
