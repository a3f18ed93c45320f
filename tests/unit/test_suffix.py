"""Suffix decoding: worked examples with figures of arctic-inference 0.1.1 (the program that vLLM calls), that program
itself on random sequences where it is installed, and the life of a request in the decoder."""

import random
import time

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from spec_train.decoding.engine import plain_decode, speculative_decode
from spec_train.decoding.sampling import Sampling
from spec_train.errors import UserError
from spec_train.speculators.base import Committed, Features
from spec_train.speculators.suffix import SuffixProposer
from spec_train.target import TargetModel
from tests.tiny import tiny_model


def answer(proposer, prompt, *rounds):
    """One request of its own; returns it with the tokens of all rounds taken in."""
    request = proposer._start(prompt)
    for tokens in rounds:
        request.pending += tokens
        proposer._absorb(request)
    return request


@pytest.mark.parametrize(
    ("tokens", "options", "expected"),
    [
        ([1, 2, 3, 4, 1, 2, 3], {}, [4, 1, 2]),  # a match of 3: probabilities 1/2 each, and 3 tokens at most
        ([1, 2, 3, 4, 1, 2, 3], {"max_tree_depth": 3, "max_spec_factor": 4.0}, [4, 1]),  # match + draft fit the tree
        ([1, 2, 3, 4, 5, 6, 1, 2, 3, 4, 5, 6], {}, [1, 2, 3, 4, 5, 6]),
        ([1, 2, 3, 9, 1, 2, 4, 9, 1, 2, 4, 9, 1, 2], {"max_spec_factor": 2.0}, [4, 9, 1, 2, 4, 9]),
        # 1/2 falls under 0.6; the unbroken match of 3 before it scores 2/3 each
        ([1, 2, 3, 9, 1, 2, 4, 9, 1, 2, 4, 9, 1, 2], {"max_spec_factor": 2.0, "min_token_prob": 0.6}, [4, 9, 1, 2]),
        ([7, 5, 7, 6, 7, 5, 7], {"max_spec_factor": 4.0}, [6, 7, 5, 7]),
        ([7, 5, 7, 6, 7, 5, 7, 6], {"max_spec_factor": 4.0}, [7, 5, 7, 6]),
        ([7], {}, []),
        ([7, 8, 9], {}, []),
    ],
)
def test_worked_examples(tokens, options, expected):
    proposer = SuffixProposer(**options)
    assert proposer.draft(answer(proposer, tokens[:-1], tokens[-1:]), 8) == expected


def test_earlier_outputs_are_drafted_from_until_they_leave_the_cache():
    def after(cached, *earlier):
        proposer = SuffixProposer(max_cached_requests=cached, max_spec_factor=3.0)
        for output in earlier:
            answer(proposer, [9], output)
        return proposer, proposer.draft(answer(proposer, [8, 1], [2]), 8)

    proposer, drafts = after(3, [1, 2, 3, 4], [1, 2, 5, 6])
    assert drafts == [3, 4]  # both followed "1 2" once; the first seen leads
    assert after(2, [1, 2, 3, 4], [1, 2, 5, 6])[1] == [5, 6]  # the oldest output made room
    assert after(0, [1, 2, 3, 4])[1] == []
    proposer.reset()
    assert proposer.draft(answer(proposer, [8, 1], [2]), 8) == []


def test_a_request_drafts_from_others_that_are_still_decoded_but_not_from_their_prompts():
    proposer = SuffixProposer(max_spec_factor=3.0)
    state = proposer.begin([[5, 2, 7], [2, 2]], 40)
    commit(proposer, state, [[2, 7, 3], [2, 7, 0]], [[0, 1, 2], [0, 1, 0]], [3, 2])
    assert proposer.propose(state, 4, unused).count_B.tolist() == [0, 0]  # "2 7" stands in the other's prompt
    commit(proposer, state, [[1, 6, 8, 9], [4, 1, 6, 0]], [[3, 4, 5, 6], [2, 3, 4, 0]], [4, 3])
    proposal = proposer.propose(state, 4, unused)
    assert proposal.count_B.tolist() == [0, 2]
    assert proposal.token_BK[1, :2].tolist() == [8, 9]
    # the first row is over: its last tokens are taken, what it writes while it rides along is not
    commit(proposer, state, [[2], [3]], [[7], [5]], [1, 1])
    commit(proposer, state, [[5], [3]], [[7], [5]], [1, 1])
    commit(proposer, state, [[5, 6, 7], [3, 0, 0]], [[7, 8, 9], [5, 0, 0]], [3, 1])  # be it more than its last round
    proposer.finish(state, [0], committed([[5], [3]], [[7], [5]], [1, 1]))
    left = proposer.select(state, torch.tensor([1]))
    commit(proposer, left, [[9, 2]], [[6, 7]], [2])
    assert state.requests[0].shared.tokens == [3, 1, 6, 8, 9, 2]
    assert left.requests[0].local.tokens == [2, 2, 7, 4, 1, 6]  # the other's last three wait for its next draft
    proposer.propose(left, 4, unused)
    assert left.requests[0].local.tokens == [2, 2, 7, 4, 1, 6, 3, 9, 2]


def unused(logits_BD):
    raise AssertionError("suffix decoding has no logits to choose from")


def committed(tokens, positions, counts):
    return Committed(torch.tensor(tokens), torch.tensor(positions), torch.tensor(counts), Features(None, None))


def commit(proposer, state, tokens, positions, counts):
    proposer.commit(state, committed(tokens, positions, counts))


class Remembering(SuffixProposer):
    """Keeps what was taken into the global tree of the last run."""

    def outputs(self):
        return [request.shared.tokens for request in self.cached]


@pytest.mark.parametrize("batch_size", [1, 3])
def test_decoding_is_lossless_and_every_output_reaches_the_cache(batch_size, tmp_path):
    target = TargetModel.load(str(tiny_model("llama", tmp_path)))
    prompts = [[3, 4, 5, 3, 4], [9, 8, 7], [1, 2, 1, 2, 1, 2], [3, 4, 5, 3, 4]]
    plain = plain_decode(target, prompts, sampling=Sampling(), max_new_tokens=24)
    proposer = Remembering()
    how = {"num_draft_tokens": 4, "sampling": Sampling(), "max_new_tokens": 24, "batch_size": batch_size}
    traces = []
    for _ in range(2):
        proposer.reset()
        traces.append(speculative_decode(target, proposer, prompts, **how))
    for trace in traces:
        assert [r.output_ids for r in trace.requests] == [r.output_ids for r in plain.requests]
        assert sum(cycle.accepted for r in trace.requests for cycle in r.cycles) > 0
    # the second run starts as cold as the first
    assert [r.cycles for r in traces[0].requests] == [r.cycles for r in traces[1].requests]
    kept = sorted(tokens[:24] for tokens in proposer.outputs())  # the last round's may reach beyond the limit
    assert kept == sorted(r.output_ids for r in plain.requests)
    if batch_size == 1:  # the same prompt again is drafted from the first answer to it
        first, again = traces[0].requests[0], traces[0].requests[3]
        assert len(again.cycles) < len(first.cycles)


def test_rows_that_ride_along_leave_nothing_in_the_cache(tmp_path):
    """Seven requests of one batch end in different rounds; each is in the tree as far as its last round went."""
    folder = tiny_model("llama", tmp_path, seed=1)
    weights = load_file(folder / "model.safetensors")
    # Without attention a token follows from the one before it, so answers run in circles and drafts are accepted.
    for name, value in weights.items():
        value.mul_("o_proj" not in name)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    prompts = [
        [145, 12, 24],
        [108, 135],
        [164, 190, 293, 24, 314, 256],
        [225, 193, 278, 94, 109],
        [303, 152, 7, 73, 80],
    ]
    prompts += [[173, 175, 191, 50], [21, 24, 141, 86]]
    proposer = Remembering()
    how = {"num_draft_tokens": 6, "sampling": Sampling(), "max_new_tokens": 8, "batch_size": 7}
    trace = speculative_decode(TargetModel.load(str(folder)), proposer, prompts, **how)
    outputs = {
        tuple(request.local.tokens[: len(request.local.tokens) - len(request.shared.tokens)]): request.shared.tokens
        for request in proposer.cached
    }
    assert min(len(request.cycles) for request in trace.requests) < 5 < max(len(r.cycles) for r in trace.requests)
    for request in trace.requests:
        kept = outputs[tuple(request.prompt_ids)]
        assert kept[:8] == request.output_ids
        assert len(kept) == 1 + sum(cycle.accepted + 1 for cycle in request.cycles)


def test_a_draft_over_two_thousand_tokens_takes_under_a_millisecond():
    generator = np.random.default_rng(0)
    phrases = [generator.integers(0, 5000, size=30).tolist() for _ in range(20)]
    tokens = [token for i in generator.integers(0, 20, size=80) for token in phrases[i]][:2000]
    proposer = SuffixProposer()
    for start in range(0, 2000, 500):
        request = answer(proposer, tokens[start:], tokens[:start])
    times = []
    for token in tokens[:40]:
        request.pending.append(token)
        begun = time.perf_counter()
        proposer._absorb(request)
        proposer.draft(request, 8)
        times.append(time.perf_counter() - begun)
    assert sorted(times)[20] < 1e-3


@pytest.mark.parametrize("options", [{"max_tree_depth": 0}, {"max_cached_requests": -1}, {"min_token_prob": 1.5}])
def test_impossible_parameters_are_refused(options):
    with pytest.raises(UserError, match=next(iter(options))):
        SuffixProposer(**options)


@pytest.mark.vllm
def test_drafts_equal_those_of_arctic_inference():
    cache = pytest.importorskip("arctic_inference.suffix_decoding.cache")
    draw = random.Random(0)
    drafted = 0
    for _ in range(40):
        depth, cached, factor = draw.choice([2, 4, 24]), draw.choice([0, 1, 3, 100]), draw.choice([0.5, 1.0, 4.0])
        probability, vocab, k = draw.choice([0.0, 0.1, 0.5]), draw.choice([2, 5, 20]), draw.choice([1, 4, 16])
        theirs = cache.SuffixDecodingCache(max_tree_depth=depth, max_cached_requests=cached)
        ours = SuffixProposer(depth, cached, factor, probability)
        phrases = [[draw.randrange(vocab) for _ in range(9)] for _ in range(4)]
        live = {}
        for step in range(200):
            if (len(live) < 3 and draw.random() < 0.3) or not live:
                prompt = draw.choice(phrases) + [draw.randrange(vocab) for _ in range(9)]
                theirs.start_request(step, prompt)
                live[step] = ours._start(prompt)
            for name, request in list(live.items()):
                phrase = draw.choice(phrases) if draw.random() < 0.5 else [draw.randrange(vocab) for _ in range(9)]
                new = phrase[: draw.randint(1, 5)]
                theirs.add_active_response(name, new)
                request.pending += new
                ours._absorb(request)
                settings = {"max_spec_factor": factor, "min_token_prob": probability, "max_spec_tokens": k}
                expected = theirs.speculate(name, request.local.tokens[-depth:], **settings).token_ids
                assert ours.draft(request, k) == expected
                drafted += bool(expected)
                if draw.random() < 0.05:
                    theirs.stop_request(name)
                    del live[name]
    assert drafted > 5000
