"""LongRoPE: what a request is answered is its own, whatever it is batched with, up to the switch of its factors, across
it and beyond. The reference is a pass of Transformers over the text so far, alone and without a cache."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from spec_train.batch import FeatureSpec
from spec_train.decoding.engine import plain_decode, speculative_decode
from spec_train.decoding.sampling import Sampling
from spec_train.decoding.tree import tree_decode
from spec_train.decoding.tree_draft import dynamic_tree
from spec_train.speculators.draft_lm import DraftLM
from spec_train.speculators.draft_start import DraftLMOptions
from spec_train.target import TargetModel
from spec_train.training.acceptance import renewal_counts
from tests.more_families import more_family
from tests.parity.test_eagle3 import packed_batch

GREEDY = Sampling()
# Below the switch to the end; across it while decoding, twice; beyond it from the start.
PROMPTS = [list(range(40, 52)), list(range(100, 140)), list(range(60, 104)), list(range(200, 262))]
NEW = 16
SPEC = FeatureSpec((1, 3), last_hidden=True)


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[TargetModel, Any]:
    """A tiny Phi-3 whose factors change after 48 tokens, and the model as Transformers runs it."""
    folder = more_family("phi3", tmp_path_factory.mktemp("long_rope"))
    own = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager", dtype=torch.float32).eval()
    return TargetModel.load(str(folder)), own


@pytest.fixture(scope="module")
def texts(pair: tuple[TargetModel, Any]) -> list[list[int]]:
    """Greedy text of each prompt alone. (With its cache, Transformers 5.19 feeds the token at the switch alone.)"""
    generate: Any = pair[1].generate
    outputs = [
        generate(torch.tensor([prompt]), max_new_tokens=NEW, do_sample=False, use_cache=False)[0] for prompt in PROMPTS
    ]
    return [output[len(prompt) :].tolist() for output, prompt in zip(outputs, PROMPTS, strict=True)]


def noisy_draft(target: TargetModel) -> DraftLM:
    """The target's own layers with noise, so that drafts are right often and wrong often."""
    options = DraftLMOptions(type="draft_lm", start_layers=target.num_layers)
    draft = DraftLM.from_recipe(options, target, torch.arange(target.vocab_size), seed=0).eval().requires_grad_(False)
    draw = torch.Generator().manual_seed(1)
    for parameter in draft.body.layers.parameters():
        parameter += 0.1 * parameter.std() * torch.randn(parameter.shape, generator=draw)
    return draft


@torch.no_grad()
def alone(own: Any, tokens: list[int], first: int) -> Tensor:
    """Logits [S, V] at positions first .. of a text, each from a pass over what precedes it alone."""
    prefixes = [torch.tensor([tokens[:n]]) for n in range(first + 1, len(tokens) + 1)]
    return torch.stack([own(input_ids=prefix, use_cache=False).logits[0, -1] for prefix in prefixes])


@pytest.mark.parametrize("batch_size", [2, 4])
def test_an_answer_does_not_depend_on_its_batch(
    pair: tuple[TargetModel, Any], texts: list[list[int]], batch_size: int
) -> None:
    plain = plain_decode(pair[0], PROMPTS, sampling=GREEDY, max_new_tokens=NEW, batch_size=batch_size)
    assert [request.output_ids for request in plain.requests] == texts


@torch.no_grad()
def test_packed_documents_have_the_states_of_their_own_length(pair: tuple[TargetModel, Any]) -> None:
    """A document below the switch beside one that crosses it: logits at every position are those of the text so far."""
    target, own = pair
    documents = [(list(range(40, 60)), 5), (list(range(100, 160)), 30)]
    batch = packed_batch(documents, 2)
    states = target.features(batch.input_ids_BT, batch.position_BT, batch.document_BT, SPEC)
    assert states.last_hidden is not None
    logits = target.logits(states.last_hidden[0])
    for number, (tokens, _) in enumerate(documents):
        here = logits[batch.document_BT[0] == number]
        torch.testing.assert_close(here, alone(own, tokens, 0), atol=1e-3, rtol=1e-3)


def test_captured_states_are_those_of_a_pass_over_the_text(pair: tuple[TargetModel, Any]) -> None:
    target = pair[0]
    answers = target.generate(PROMPTS, GREEDY, NEW, capture=SPEC, capture_dtype=torch.float32)
    for prompt, answer in zip(PROMPTS, answers, strict=True):
        ids = torch.tensor([prompt + answer.output_ids])
        with torch.no_grad():
            states = target.features(ids, torch.arange(ids.shape[1])[None], torch.zeros_like(ids), SPEC)
        assert answer.features is not None and answer.features.aux_hidden is not None
        assert states.aux_hidden is not None
        torch.testing.assert_close(answer.features.aux_hidden, states.aux_hidden[0, :-1], atol=1e-4, rtol=1e-4)


@torch.no_grad()
def test_a_step_across_the_switch_is_that_of_single_tokens(pair: tuple[TargetModel, Any]) -> None:
    """Six tokens a pass in two rows, of which each keeps another number: one row crosses the switch, goes back below
    it and crosses it again, the other comes to it in the last pass."""
    target, own = pair
    cache, texts = target.new_cache(80), [list(range(40, 100)), list(range(140, 200))]
    target.prefill([texts[0][:44], texts[1][:20]], cache, SPEC)
    for first in ([44, 20], [47, 26], [52, 32], [45, 38], [50, 44]):
        ids = torch.tensor([text[at : at + 6] for text, at in zip(texts, first, strict=True)])
        ids[0, 5] = 7  # a draft that is rejected
        hidden, _ = target.step(ids, torch.tensor(first)[:, None] + torch.arange(6), cache, SPEC)
        for row, at in enumerate(first):
            text = texts[row][:at] + ids[row].tolist()
            torch.testing.assert_close(target.logits(hidden[row]), alone(own, text, at), atol=1e-3, rtol=1e-3)


@pytest.mark.parametrize("batch_size", [1, 4])
def test_drafts_across_the_switch_leave_text_and_estimate_exact(
    pair: tuple[TargetModel, Any], texts: list[list[int]], batch_size: int
) -> None:
    """The draft has the target's factors and a cache of its own; rounds of 4 tokens end before and beyond it."""
    target, k = pair[0], 3
    draft = noisy_draft(target)
    settings: dict[str, Any] = {"sampling": GREEDY, "max_new_tokens": NEW, "batch_size": batch_size}
    trace = speculative_decode(target, draft, PROMPTS, num_draft_tokens=k, **settings)
    assert [request.output_ids for request in trace.requests] == texts
    cycles = [cycle for request in trace.requests for cycle in request.cycles]
    documents = [(prompt + text, len(prompt)) for prompt, text in zip(PROMPTS, texts, strict=True)]
    batch = target.fill_features(packed_batch(documents, 2), FeatureSpec((), last_hidden=True), torch.float32)
    counts = renewal_counts(draft.draft_hits(batch, k), k)
    assert (counts.steps, counts.accepted) == (len(cycles), sum(cycle.kept for cycle in cycles))
    assert 0 < counts.accepted < k * len(cycles)
    trees = tree_decode(target, draft, PROMPTS, shape=dynamic_tree(3, 3, 8), **settings)
    assert [request.output_ids for request in trees.requests] == texts


def test_training_a_draft_sees_the_factors_that_decoding_has(pair: tuple[TargetModel, Any]) -> None:
    """The loss of two packed documents is that of each alone, with a gradient for every layer."""
    target = pair[0]
    options = DraftLMOptions(type="draft_lm", start_layers=[0, 3])
    draft = DraftLM.from_recipe(options, target, torch.arange(target.vocab_size), seed=0)
    documents = [(list(range(40, 60)), 5), (list(range(100, 160)), 30)]
    losses = []
    for packed in ([documents], [[document] for document in documents]):
        batches = [target.fill_features(packed_batch(part, len(part)), SPEC, torch.float32) for part in packed]
        losses.append(sum(draft.loss(batch, torch.tensor([45.0])).loss for batch in batches))
    torch.testing.assert_close(losses[0], losses[1])
    losses[0].backward()
    assert all(parameter.grad is not None and parameter.grad.any() for parameter in draft.body.layers.parameters())
