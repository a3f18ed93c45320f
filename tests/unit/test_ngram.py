"""Prompt lookup: hand-worked cases, the decoder's contract, and vLLM's own function on random sequences."""

import numpy as np
import pytest
import torch

from spec_train.errors import UserError
from spec_train.speculators.base import Committed, Features
from spec_train.speculators.ngram import NgramProposer, lookup


def draft(tokens, min_n, max_n, k):
    return lookup(np.array(tokens, dtype=np.int64), min_n, max_n, k).tolist()


@pytest.mark.parametrize(
    ("tokens", "min_n", "max_n", "k", "expected"),
    [
        ([1, 2, 3, 4, 1, 2], 2, 2, 3, [3, 4, 1]),
        ([1, 2, 3, 4, 1, 2], 3, 3, 3, []),  # no trigram twice
        ([1, 2, 7, 1, 2, 8, 1, 2], 2, 2, 2, [7, 1]),  # the earliest of two occurrences
        ([9, 2, 7, 1, 2, 8, 1, 2], 1, 2, 2, [8, 1]),  # the longer match wins over an earlier shorter one
        ([4, 4, 4, 4], 1, 2, 5, [4, 4]),  # overlap allowed; two tokens follow the earliest match
        ([5], 1, 3, 3, []),
        ([5, 5], 1, 3, 3, [5]),
        ([5, 6, 7], 1, 3, 3, []),
    ],
)
def test_lookup_by_hand(tokens, min_n, max_n, k, expected):
    assert draft(tokens, min_n, max_n, k) == expected


def unused(logits_BD):
    raise AssertionError("prompt lookup has no logits to choose from")


def committed(tokens, positions, counts):
    return Committed(torch.tensor(tokens), torch.tensor(positions), torch.tensor(counts), Features(None, None))


def test_commits_are_written_where_they_stand():
    proposer = NgramProposer(2, 3)
    prompts = [[1, 2, 3, 1], [7, 8, 9]]
    state = proposer.begin(prompts, max_length=12)
    # the whole prompt from its second token on, plus the first sampled token
    proposer.commit(state, committed([[2, 3, 1, 2], [8, 9, 5, 0]], [[0, 1, 2, 3], [0, 1, 2, 0]], [4, 3]))
    proposal = proposer.propose(state, 3, unused)
    assert proposal.count_B.tolist() == [3, 0]
    assert proposal.token_BK[0].tolist() == [3, 1, 2]
    assert proposal.probs_BKV is None
    # a round that keeps one draft and adds a corrected token, then one that only adds a token
    proposer.commit(state, committed([[3, 6], [7, 0]], [[4, 5], [3, 0]], [2, 1]))
    proposer.commit(state, committed([[1], [8]], [[6], [4]], [1, 1]))
    assert state.token_BL[0, : state.length_B[0]].tolist() == [1, 2, 3, 1, 2, 3, 6, 1]
    assert state.token_BL[1, : state.length_B[1]].tolist() == [7, 8, 9, 5, 7, 8]
    proposal = proposer.propose(state, 4, unused)
    assert proposal.count_B.tolist() == [0, 4]
    assert proposal.token_BK[1].tolist() == [9, 5, 7, 8]

    last = proposer.select(state, torch.tensor([1]))
    proposer.commit(last, committed([[9]], [[5]], [1]))
    assert proposer.propose(last, 2, unused).token_BK.tolist() == [[5, 7]]
    assert state.length_B.tolist() == [8, 6]  # a selection is its own state


@pytest.mark.parametrize(("min_n", "max_n"), [(0, 2), (3, 2), (-1, -1)])
def test_impossible_ngram_lengths_are_refused(min_n, max_n):
    with pytest.raises(UserError, match="ngram_min"):
        NgramProposer(min_n, max_n)


@pytest.mark.vllm
def test_lookup_equals_vllms_proposer():
    ngram_proposer = pytest.importorskip("vllm.v1.spec_decode.ngram_proposer")
    find = ngram_proposer._find_longest_matched_ngram_and_propose_tokens
    generator = np.random.default_rng(0)
    drafted = 0
    for _ in range(3000):
        tokens = generator.integers(0, generator.integers(2, 6), size=generator.integers(1, 40))
        min_n = int(generator.integers(1, 4))
        max_n = int(generator.integers(min_n, 6))
        k = int(generator.integers(1, 6))
        room = int(generator.integers(0, 8))  # positions left; the decoder cuts drafts to them
        theirs = find(tokens, min_n, max_n, len(tokens) + room, k).tolist()
        assert lookup(tokens, min_n, max_n, k).tolist()[:room] == theirs, (tokens.tolist(), min_n, max_n, k, room)
        drafted += bool(theirs)
    assert drafted > 1500
