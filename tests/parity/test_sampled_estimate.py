"""Estimates of drafts drawn from the draft's own law: the laws are the decoder's, and so are the rounds."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from spec_train.batch import Features
from spec_train.decoding.acceptance import drafted_rounds
from spec_train.decoding.engine import plain_decode, speculative_decode
from spec_train.decoding.sampling import Sampling, target_probs
from spec_train.decoding.trace import RequestTrace
from spec_train.evaluation.estimate import estimator, replay
from spec_train.evaluation.evaluate import (
    EvalSettings,
    Suite,
    evaluate_suite,
    ngram_contender,
    speculator_contender,
    suffix_contender,
)
from spec_train.evaluation.metrics import acceptance_interval
from spec_train.speculators import speculator_class
from spec_train.speculators.base import Chooser, Committed, Proposal, Proposer, Speculator
from spec_train.speculators.distillation import add_target_probs
from spec_train.speculators.ngram import NgramProposer
from spec_train.speculators.suffix import SuffixProposer
from spec_train.target import TargetModel
from tests.chain_heads import randomise_norms
from tests.parity.test_eagle3 import packed_batch
from tests.tiny import tiny_model

PROMPTS = [[5, 6, 7, 8, 9, 10, 11], [20, 21, 22], list(range(30, 50))]
DRAWN = Sampling(0.6, top_k=40, draft_sample_method="probabilistic", seed=3)  # the filter is the target's alone
METHODS: dict[str, dict[str, Any]] = {
    "eagle3": {"num_layers": 2},
    "eagle1": {},
    "peagle": {},
    "mtp": {},
    "mlp": {},
    "medusa": {},
    "draft_lm": {"start_layers": 2},
    "pard": {"start_layers": 2},
}
REDUCED = ("eagle3", "peagle", "mlp", "medusa")  # methods whose drafts may be confined to a part of the vocabulary


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> TargetModel:
    return TargetModel.load(str(tiny_model("llama", tmp_path_factory.mktemp("llama"))))


@pytest.fixture(scope="module")
def draft(target: TargetModel) -> Speculator:
    """The target itself with noise on its weights: alike, but not too much."""
    near = fresh("draft_lm", target, start_layers=4)
    noise = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in near.parameters():
            parameter.add_(0.02 * torch.randn(parameter.shape, generator=noise))
    return near


@pytest.fixture(scope="module")
def repetitive(tmp_path_factory: pytest.TempPathFactory) -> TargetModel:
    """A target whose greedy text repeats itself, so that looking up pays."""
    folder = tmp_path_factory.mktemp("repetitive")
    return TargetModel.load(str(tiny_model("llama", folder, num_hidden_layers=2, initializer_range=0.1)))


def fresh(kind: str, target: TargetModel, ids: torch.Tensor | None = None, **options: Any) -> Speculator:
    cls = speculator_class(kind)
    vocabulary = torch.arange(target.vocab_size) if ids is None else ids
    speculator = cls.from_recipe(cls.options(type=kind, **options), target, vocabulary, 0)
    if kind != "draft_lm":  # it has the target's
        randomise_norms(speculator)
    return speculator.eval().requires_grad_(False)


def step_by_step(
    target: TargetModel, speculator: Speculator, text: RequestTrace, depths: int, sampling: Sampling
) -> list[list[float]]:
    """draft_probs / target_probs of the next `depths` tokens from every state of a response, as the decoder drafts."""
    ids, prompt = text.prompt_ids + text.output_ids, len(text.prompt_ids)
    batch = target.fill_features(packed_batch([(ids, prompt)], 1), speculator.feature_spec, torch.float32)
    assert batch.last_hidden_BTH is not None
    target_law_TV = target_probs(target.logits(batch.last_hidden_BTH[0]), sampling)
    rows = []
    for p in range(prompt - 1, len(ids) - 2):  # the token at p+1 is known
        known = [None if x is None else x[:, : p + 1] for x in (batch.aux_hidden_BTAH, batch.last_hidden_BTH)]
        state = speculator.begin([ids[: p + 1]], len(ids) + depths + 1)
        places = torch.arange(p + 1)[None]
        speculator.commit(
            state, Committed(torch.tensor([ids[1 : p + 2]]), places, torch.tensor([p + 1]), Features(*known))
        )
        proposal, logits_BD = speculator.first_logits(state, depths)
        ratios = []
        for k in range(min(depths, len(ids) - 2 - p)):
            place = p + 2 + k
            if k > 0:
                logits_BD = speculator.next_logits(proposal, torch.tensor([ids[place - 1]]), k)
            law_BV = speculator.full_law(target_probs(logits_BD, sampling.drafts))
            ratios.append(float(law_BV[0, ids[place]]) / float(target_law_TV[place - 1, ids[place]]))
        rows.append(ratios + [0.0] * (depths - len(ratios)))
    return rows


def kept_token_wise(ratios: list[float]) -> list[float]:
    kept, out = 1.0, []
    for ratio in ratios:
        kept *= min(1.0, ratio)
        out.append(kept)
    return out


def kept_by_block(ratios: list[float]) -> list[float]:
    """Test j passes with weight_j where the later ones are averaged over: weight_j times what the drafts are worth."""
    weight, product, out = 1.0, 1.0, []
    for ratio in ratios:
        weight, product = min(1.0, weight / ratio) if ratio else 1.0, product * ratio
        out.append(product * weight)
    return out


@pytest.mark.parametrize(
    ("kind", "reduced"), [*((kind, False) for kind in METHODS), *((kind, True) for kind in REDUCED)]
)
def test_laws_along_the_text_are_those_of_drafting_step_by_step(target: TargetModel, kind: str, reduced: bool) -> None:
    """Every method, three tokens deep, behind another document in the row; with half of the vocabulary too."""
    speculator = fresh(kind, target, torch.arange(0, 320, 2) if reduced else None, **METHODS[kind])
    texts = plain_decode(target, PROMPTS, sampling=DRAWN, max_new_tokens=9, batch_size=3).requests
    packed = packed_batch([(r.prompt_ids + r.output_ids, len(r.prompt_ids)) for r in texts], 2)
    batch = add_target_probs(target.fill_features(packed, speculator.feature_spec, torch.float32), target, DRAWN)
    ratios = [step_by_step(target, speculator, text, 3, DRAWN) for text in texts]
    assert reduced == any(ratio == 0 for rows in ratios for row in rows[:-2] for ratio in row)
    for rule, kept in (("standard", kept_token_wise), ("block", kept_by_block)):
        found = speculator.draft_hits(batch, 3, replace(DRAWN, rejection_sample_method=rule))
        for response, rows in zip(found, ratios, strict=True):
            expected = torch.tensor([kept(row) for row in rows], dtype=torch.float64)
            torch.testing.assert_close(response.survival_MK, expected, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize(
    ("drafts", "rule"), [("greedy", "standard"), ("probabilistic", "standard"), ("probabilistic", "block")]
)
def test_a_long_run_of_the_decoder_agrees(target: TargetModel, draft: Speculator, drafts: Any, rule: Any) -> None:
    """Plainly sampled text and an independent speculative decode of the same prompts, 360 answers each: the difference
    lies within the 95% interval of both together, for the acceptance length and for every position."""
    sampling = Sampling(0.5, top_p=0.9, draft_sample_method=drafts, rejection_sample_method=rule, seed=5)
    prompts = [[4 + i % 12, 40 + i % 7, 90] for i in range(360)]
    settings: dict[str, Any] = {"max_new_tokens": 14, "batch_size": 120}
    texts = plain_decode(target, prompts, sampling=replace(sampling, seed=6), **settings).requests
    figures = estimator(target, draft, texts, sampling=sampling, max_draft_tokens=3, batch_size=120)(3)
    decoded = speculative_decode(target, draft, prompts, num_draft_tokens=3, sampling=sampling, **settings).requests
    rounds = drafted_rounds(decoded)
    tau = 1 + sum(cycle.kept for cycle in rounds) / len(rounds)
    (low, high), (left, right) = figures["renewal_ci95"], acceptance_interval(decoded)
    allowed = ((high - low) ** 2 + (right - left) ** 2) ** 0.5 / 2
    assert abs(figures["renewal"] - tau) < allowed < 0.12
    assert 1.2 < figures["renewal"] < figures["position_average"]
    for i, rate in enumerate(figures["acceptance_rate_per_position"]):
        assert rate == pytest.approx(sum(cycle.kept > i for cycle in rounds) / len(rounds), abs=0.04)
    both = figures["by_draft_sample_method"]
    assert both[drafts]["renewal"] == figures["renewal"]
    assert abs(both["greedy"]["renewal"] - both["probabilistic"]["renewal"]) > 0.1


def replayed_and_decoded(
    target: TargetModel, proposer: Proposer, num_draft_tokens: int, batch_size: int, new_tokens: int = 40
) -> tuple[list[Any], list[Any]]:
    """(drafts offered, drafts kept, tokens) of every round, replayed on the plain text and decoded, greedily."""
    settings: dict[str, Any] = {"sampling": Sampling(), "max_new_tokens": new_tokens, "batch_size": batch_size}
    prompts = [*PROMPTS, [7, 7, 7, 7], [5, 6, 7, 8, 9, 10, 11]]
    texts = plain_decode(target, prompts, **settings).requests
    walked = replay(proposer, texts, num_draft_tokens, batch_size=batch_size, max_length=target.max_length)
    proposer.reset()
    decoded = speculative_decode(target, proposer, prompts, num_draft_tokens=num_draft_tokens, **settings).requests
    rounds = [[[(c.drafts, c.kept, c.emitted) for c in r.cycles] for r in side] for side in (walked, decoded)]
    assert sum(kept for request in rounds[1] for _, kept, _ in request) > 10
    return rounds[0], rounds[1]


@pytest.mark.parametrize("batch_size", [1, 3])
@pytest.mark.parametrize("num_draft_tokens", [3, 5])
def test_replayed_rounds_are_those_of_a_decode(repetitive: TargetModel, num_draft_tokens: int, batch_size: int) -> None:
    """Prompt lookup and suffix decoding by each request's own tree, round by round, at temperature 0."""
    for proposer in (NgramProposer(1, 3), SuffixProposer(max_cached_requests=0)):
        walked, decoded = replayed_and_decoded(repetitive, proposer, num_draft_tokens, batch_size)
        assert walked == decoded


def test_replay_learns_from_the_requests_beside_it(repetitive: TargetModel) -> None:
    """With the tree over all outputs only the tokens that a decode throws away at the end of an answer are missing;
    the last prompt, which another request has had, is drafted better for it."""
    walked, decoded = replayed_and_decoded(repetitive, SuffixProposer(), 3, batch_size=3)
    rounds = [sum(map(len, side)) for side in (walked, decoded)]
    assert abs(rounds[0] - rounds[1]) <= 2
    alone, _ = replayed_and_decoded(repetitive, SuffixProposer(max_cached_requests=0), 3, batch_size=3)
    assert rounds[0] < sum(map(len, alone))


class Repeat(Proposer):
    """Drafts the last token again and again, however much room there is."""

    def begin(self, prompts: list[list[int]], max_length: int) -> Any:
        return {"last_B": torch.zeros(len(prompts), dtype=torch.int64)}

    def commit(self, state: Any, committed: Committed) -> None:
        state["last_B"] = committed.token_BS.gather(1, committed.count_B[:, None] - 1)[:, 0]

    def propose(self, state: Any, num_draft_tokens: int, choose: Chooser) -> Proposal:
        last_B = state["last_B"]
        return Proposal(last_B[:, None].expand(-1, num_draft_tokens), torch.full_like(last_B, num_draft_tokens))

    def select(self, state: Any, rows: torch.Tensor) -> Any:
        return {"last_B": state["last_B"][rows]}


def test_a_replay_stays_within_the_context(tmp_path: Any) -> None:
    shape = {"num_hidden_layers": 2, "initializer_range": 0.1, "max_position_embeddings": 32}
    small = TargetModel.load(str(tiny_model("llama", tmp_path, **shape)))
    walked, decoded = replayed_and_decoded(small, Repeat(), 5, batch_size=2)
    assert walked == decoded
    assert min(len(drafts) for request in decoded for drafts, _, _ in request) < 5  # the context ends within a round


def test_every_chain_of_an_evaluation_has_its_estimate(target: TargetModel, draft: Speculator) -> None:
    """The block of the JSON, for a speculator and for both baselines; at temperature 0 it is the decode."""
    suite = Suite("two", ["a", "b"], ["x", "x"], [[5, 6, 7, 8, 9], [7, 7, 7, 7]])
    contenders = [
        speculator_contender(draft, "draft", [2, 3]),
        ngram_contender(1, 3, [3]),
        suffix_contender(SuffixProposer(max_cached_requests=0), [3]),
    ]
    for sampling in (Sampling(), replace(DRAWN, rejection_sample_method="block")):
        settings = EvalSettings(sampling, 12, 2, speed_prompts=0)
        for result in evaluate_suite(target, contenders, suite, settings, target_name="tiny"):
            estimate, k, own = result["estimate"], result["num_draft_tokens"], result["type"] == "draft_lm"
            rates = estimate["acceptance_rate_per_position"]
            assert len(rates) == len(estimate["conditional_acceptance_rate_per_position"]) == k
            assert estimate["renewal"] == pytest.approx(1 + sum(rates))
            assert estimate["renewal_ci95"] or not own  # prompt lookup may draft for one of the two prompts alone
            low, high = estimate["renewal_ci95"] or (estimate["renewal"], estimate["renewal"])
            assert low <= estimate["renewal"] <= high
            assert (estimate["position_average"] is not None) == (estimate["independent"] is not None) == own
            assert (estimate["by_draft_sample_method"] is not None) == (own and not sampling.greedy)
            if sampling.greedy:
                assert estimate["renewal"] == result["mean_acceptance_length"]
                assert estimate["renewal_steps"] == result["num_spec_steps"]
                assert estimate["renewal_accepted"] == result["num_accepted_draft_tokens"]
                assert rates == result["acceptance_rate_per_position"]
                conditional = result["conditional_acceptance_rate_per_position"]
                assert estimate["conditional_acceptance_rate_per_position"] == conditional
