"""The acceptance rules: hand-worked rows, and the batched rules against a slow scalar reference."""

import itertools

import pytest
import torch

from spec_train.decoding.sampling import RequestGenerators, Sampling, draw_at, target_probs
from spec_train.decoding.verify import (
    last_accept,
    leading_accepts,
    residual_law,
    verify_block,
    verify_greedy,
    verify_sampled,
)


def reference_round(drafts, target_probs_QV, draft_probs_KV, uniforms):
    """One request, one round, the rule as it is written in the papers; `uniforms` holds len(drafts) + 1 numbers."""
    for place, token in enumerate(drafts):
        target, draft = target_probs_QV[place], torch.zeros(target_probs_QV.shape[-1])
        if draft_probs_KV is None:
            draft[token] = 1.0
        else:
            draft = draft_probs_KV[place]
        if uniforms[place] >= min(1.0, float(target[token] / draft[token])):
            residual = (target - draft).clamp(min=0)
            return place, int(draw_at(residual / residual.sum(), uniforms[-1]))
    return len(drafts), int(draw_at(target_probs_QV[len(drafts)], uniforms[-1]))


def reference_block(drafts, target_probs_QV, draft_probs_KV, uniforms):
    """Algorithm 2 of Sun et al. as it is printed, one request, greedy drafts with their one-hot law."""
    laws = torch.zeros(len(drafts), target_probs_QV.shape[-1], dtype=torch.float64)
    for place, token in enumerate(drafts):
        if draft_probs_KV is None:
            laws[place, token] = 1.0
        else:
            laws[place] = draft_probs_KV[place]
    target, accepted, weights = target_probs_QV.double(), 0, [1.0]
    for i in range(1, len(drafts) + 1):
        token = drafts[i - 1]
        weights.append(min(1.0, weights[-1] * float(target[i - 1, token] / laws[i - 1, token])))
        if i == len(drafts):
            h = weights[i]
        else:
            left = float((weights[i] * target[i] - laws[i]).clamp(min=0).sum())
            h = left / (left + 1 - weights[i])
        if uniforms[i - 1] <= h:
            accepted = i
    law = target[accepted]
    if accepted < len(drafts):
        law = (weights[accepted] * law - laws[accepted]).clamp(min=0)
    return accepted, int(draw_at(law, uniforms[-1]))


def test_only_the_prefix_before_the_first_miss_counts():
    accept = torch.tensor([[1, 0, 1, 1], [1, 1, 1, 0], [0, 1, 1, 1]], dtype=torch.bool)
    assert leading_accepts(accept, torch.tensor([4, 4, 4])).tolist() == [1, 3, 0]
    assert leading_accepts(accept, torch.tensor([4, 2, 0])).tolist() == [1, 2, 0]


def test_the_last_passed_test_counts_whatever_failed_before():
    accept = torch.tensor([[1, 0, 1, 0], [0, 0, 0, 0], [0, 1, 1, 1]], dtype=torch.bool)
    assert last_accept(accept, torch.tensor([4, 4, 4])).tolist() == [3, 0, 4]
    assert last_accept(accept, torch.tensor([2, 0, 1])).tolist() == [1, 0, 0]


def test_greedy_rule_keeps_matches_and_adds_the_targets_own_token():
    choice = torch.tensor([[5, 6, 7, 8], [5, 6, 7, 8], [5, 6, 7, 8], [5, 6, 7, 8]])
    logits = torch.nn.functional.one_hot(choice, 10).float()
    drafts = torch.tensor([[5, 6, 7], [5, 1, 7], [1, 6, 7], [5, 6, 7]])
    accepted, following = verify_greedy(drafts, torch.tensor([3, 3, 3, 2]), logits)
    assert accepted.tolist() == [3, 1, 0, 2]
    assert following.tolist() == [8, 6, 5, 7]  # bonus, corrected, corrected, bonus after a short draft


def test_no_draft_at_all_is_plain_decoding():
    logits = torch.randn(3, 1, 9, generator=torch.Generator().manual_seed(0))
    none, count = torch.zeros(3, 0, dtype=torch.int64), torch.zeros(3, dtype=torch.int64)
    accepted, following = verify_greedy(none, count, logits)
    assert accepted.tolist() == [0, 0, 0]
    assert following.tolist() == logits[:, 0].argmax(-1).tolist()
    probs = target_probs(logits, Sampling(temperature=1.0))
    for rule, draft_probs in itertools.product((verify_sampled, verify_block), (None, torch.zeros(3, 0, 9))):
        accepted, following = rule(none, count, probs, draft_probs, RequestGenerators(Sampling(), range(3)))
        assert accepted.tolist() == [0, 0, 0]
        assert following.tolist() == RequestGenerators(Sampling(), range(3)).draw_rows(probs[:, 0]).tolist()


@pytest.mark.parametrize(("rule", "reference"), [(verify_sampled, reference_round), (verify_block, reference_block)])
@pytest.mark.parametrize("soft", [False, True])
@pytest.mark.parametrize("top_k", [0, 3])
def test_batched_rule_equals_the_scalar_reference(soft, top_k, rule, reference):
    generator = torch.Generator().manual_seed(11)
    B, K, V = 400, 4, 7
    sampling = Sampling(temperature=0.8, top_k=top_k)
    logits = torch.randn(B, K + 1, V, generator=generator) * 2
    target = target_probs(logits, sampling)
    draft = target_probs(logits[:, :K] + torch.randn(B, K, V, generator=generator), sampling)  # close, not equal
    tokens = draw_at(draft, torch.rand(B, K, generator=generator, dtype=torch.float64)) if soft else draft.argmax(-1)
    count = torch.randint(0, K + 1, (B,), generator=generator)
    laws = draft if soft else None
    accepted, following = rule(tokens, count, target, laws, RequestGenerators(Sampling(seed=1), range(B)))

    uniforms = RequestGenerators(Sampling(seed=1), range(B)).uniform(count + 1)
    for row in range(B):
        n = int(count[row])
        expected = reference(
            tokens[row, :n].tolist(), target[row], None if laws is None else laws[row], uniforms[row, : n + 1]
        )
        assert (int(accepted[row]), int(following[row])) == expected
    assert {0, 1, 2, 3, 4} <= set(accepted.tolist())  # every outcome was met


@pytest.mark.parametrize("rule", [verify_sampled, verify_block])
def test_a_requests_outcome_does_not_depend_on_its_neighbours(rule):
    generator = torch.Generator().manual_seed(2)
    target = target_probs(torch.randn(8, 4, 6, generator=generator), Sampling(temperature=1.0))
    tokens = torch.randint(0, 6, (8, 3), generator=generator)
    count = torch.tensor([3, 0, 2, 3, 1, 3, 2, 3])
    together = rule(tokens, count, target, None, RequestGenerators(Sampling(seed=5), range(8)))
    for row in range(8):
        n = int(count[row])
        alone = rule(
            tokens[row : row + 1, :n],
            count[row : row + 1],
            target[row : row + 1, : n + 1],
            None,
            RequestGenerators(Sampling(seed=5), [row]),
        )
        assert [int(x) for x in alone] == [int(x[row]) for x in together]


def test_a_corrected_token_is_never_the_refused_greedy_draft():
    target = torch.tensor([0.5, 0.3, 0.2]).expand(20_000, 2, 3)
    drafts = torch.zeros(20_000, 1, dtype=torch.int64)
    count = torch.ones(20_000, dtype=torch.int64)
    accepted, following = verify_sampled(drafts, count, target, None, RequestGenerators(Sampling(), range(20_000)))
    rejected = accepted == 0
    assert abs(float(rejected.float().mean()) - 0.5) < 0.015
    assert not (following[rejected] == 0).any()
    assert abs(float((following[rejected] == 1).float().mean()) - 0.6) < 0.02


def test_residual_is_clipped_and_survives_equal_laws():
    target, draft = torch.tensor([0.5, 0.3, 0.2]), torch.tensor([0.1, 0.2, 0.7])
    assert torch.allclose(residual_law(target, draft), torch.tensor([0.8, 0.2, 0.0]))
    assert torch.equal(residual_law(target, target), target)


def test_block_verification_of_a_draft_that_is_the_target_keeps_all():
    law = target_probs(torch.randn(500, 4, 6, generator=torch.Generator().manual_seed(4)), Sampling(temperature=1.0))
    drafts = draw_at(law[:, :3], torch.rand(500, 3, generator=torch.Generator().manual_seed(5), dtype=torch.float64))
    count = torch.randint(0, 4, (500,), generator=torch.Generator().manual_seed(6))
    accepted, _ = verify_block(drafts, count, law, law[:, :3], RequestGenerators(Sampling(), range(500)))
    assert torch.equal(accepted, count)


def test_tokens_outside_a_reduced_draft_vocabulary_come_from_the_residual():
    # the draft cannot say token 2; the output law is the target's all the same
    runs = 40_000
    target, draft = torch.tensor([0.2, 0.3, 0.5]), torch.tensor([0.6, 0.4, 0.0])
    generator = torch.Generator().manual_seed(0)
    drafts = draw_at(draft.expand(runs, 3), torch.rand(runs, generator=generator, dtype=torch.float64))[:, None]
    accepted, following = verify_sampled(
        drafts,
        torch.ones(runs, dtype=torch.int64),
        target.expand(runs, 2, 3),
        draft.expand(runs, 1, 3),
        RequestGenerators(Sampling(), range(runs)),
    )
    first = torch.where(accepted == 1, drafts[:, 0], following)
    assert torch.allclose(first.bincount(minlength=3) / runs, target, atol=0.01)
