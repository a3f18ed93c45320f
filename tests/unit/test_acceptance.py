"""Acceptance estimates: what the walk along a text says is what the decoder does, in expectation to the last digit."""

from functools import cache
from itertools import pairwise, product

import pytest
import torch

from spec_train.speculators.base import ResponseHits
from spec_train.training.acceptance import (
    independent_length,
    position_average,
    renewal_counts,
    renewal_interval,
)

# A target and a greedy draft that know the last token only: laws [last][next], and the draft's pick.
TARGET = ((0.6, 0.3, 0.1), (0.2, 0.2, 0.6), (0.5, 0.25, 0.25))
PICK = (0, 1, 2)
LENGTH = 6  # tokens of a response, its first one from the prefill


def decoder_expectation(num_draft_tokens, picks=PICK):
    """(E[rounds], E[kept drafts]) by playing the decoder's own rule: accept the pick x with probability target[x], else
    draw from the target without x."""

    @cache
    def state(last, known):
        if known >= LENGTH:
            return 0.0, 0.0
        return play(last, known, 0)

    @cache
    def play(last, known, drafted):
        """The rest of a round that has kept `drafted` so far, `known` tokens with them."""
        law, pick = TARGET[last], picks[last]
        if known >= LENGTH:  # the length limit cut the round off
            return 1.0, 0.0
        if drafted == num_draft_tokens:
            follow = [(law[token], state(token, known + 1)) for token in range(3)]
            return 1 + sum(p * r for p, (r, _) in follow), sum(p * k for p, (_, k) in follow)
        rounds, kept = play(pick, known + 1, drafted + 1)
        rounds, kept = law[pick] * rounds, law[pick] * (kept + 1)
        for token in range(3):
            if token != pick:
                later, more = state(token, known + 1)
                rounds, kept = rounds + law[token] * (1 + later), kept + law[token] * more
        return rounds, kept

    first = [state(token, 1) for token in range(3)]
    return sum(r for r, _ in first) / 3, sum(k for _, k in first) / 3


def hits_of(text, num_draft_tokens, picks=PICK):
    """Teacher-forced: depth k reads the text's own tokens."""
    rows = [
        [m + k < LENGTH and picks[text[m + k - 1]] == text[m + k] for k in range(num_draft_tokens)]
        for m in range(1, LENGTH)
    ]
    return ResponseHits("a", torch.tensor(rows))


def walk_expectation(num_draft_tokens, length=renewal_counts):
    """(E[rounds], E[kept drafts]) of the walk, over every text by its probability (uniform first token)."""
    rounds = kept = 0.0
    for text in product(range(3), repeat=LENGTH):
        weight = 1 / 3
        for before, after in pairwise(text):
            weight *= TARGET[before][after]
        counts = length([hits_of(text, num_draft_tokens)], num_draft_tokens)
        rounds, kept = rounds + weight * counts.steps, kept + weight * counts.accepted
    return rounds, kept


@pytest.mark.parametrize("num_draft_tokens", [1, 2, 3])
def test_walk_on_sampled_texts_has_the_decoders_expectation(num_draft_tokens):
    assert walk_expectation(num_draft_tokens) == pytest.approx(decoder_expectation(num_draft_tokens), abs=1e-12)


def test_the_expectation_would_notice_another_draft():
    assert walk_expectation(2) != pytest.approx(decoder_expectation(2, picks=(0, 2, 2)), abs=1e-3)


def test_averages_overstate_where_hard_regions_are_visited_more_often():
    hits = torch.tensor([[True] * 3] * 12 + [[False] * 3] * 6)
    for m in range(12):  # the last hits before the hard region
        hits[m, max(0, 12 - m) :] = False
    responses = [ResponseHits("a", hits)]
    assert renewal_counts(responses, 3).mean_acceptance_length < position_average(responses, 3)
    assert independent_length(responses, 3) == pytest.approx(sum((12 / 18) ** i for i in range(4)))


def test_interval_holds_the_estimate_and_closes_where_responses_agree():
    same = [ResponseHits(str(i), torch.tensor([[True], [True], [False]])) for i in range(4)]
    length = renewal_counts(same, 1).mean_acceptance_length
    assert renewal_interval(same, 1) == pytest.approx((length, length))
    mixed = [ResponseHits(str(i), torch.full((6, 2), i % 2 == 0)) for i in range(20)]
    low, high = renewal_interval(mixed, 2)
    assert low < renewal_counts(mixed, 2).mean_acceptance_length < high
    assert renewal_interval([], 2) == (1.0, 1.0)
