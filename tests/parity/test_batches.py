"""A batch of requests at different positions gives exactly the tokens that each request gets on its own, in float32."""

import pytest
import torch

from spec_train.decoding.engine import plain_decode, speculative_decode
from spec_train.decoding.sampling import Sampling
from spec_train.speculators.eagle3 import Eagle3, Eagle3Options, eagle3_config
from spec_train.speculators.ngram import NgramProposer
from spec_train.target import TargetModel
from tests.tiny import tiny_model

PROMPTS = [
    [5 + i % 3 for i in range(n)] if n % 2 else [(7 * n + 3 * i) % 300 + 4 for i in range(n)] for n in range(2, 10)
]
GREEDY, SAMPLED = Sampling(), Sampling(temperature=0.2, top_p=0.9, draft_sample_method="probabilistic", seed=5)


@pytest.fixture(scope="module", params=["llama", "gemma3_text"])
def target(request, tmp_path_factory):
    return TargetModel.load(str(tiny_model(request.param, tmp_path_factory.mktemp(request.param), num_hidden_layers=2)))


def proposer(kind, target):
    if kind == "ngram":
        return NgramProposer(1, 3)
    options = Eagle3Options(type="eagle3", aux_layer_ids=[0, 1, 2])
    ids = torch.arange(target.vocab_size)
    return Eagle3.from_target(eagle3_config(options, target, len(ids)), target, ids, options.init, seed=0).eval()


@pytest.mark.parametrize("sampling", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
@pytest.mark.parametrize("kind", ["ngram", "eagle3"])
def test_a_ragged_batch_of_eight_equals_single_requests(target, kind, sampling):
    def run(batch_size):
        return speculative_decode(
            target, proposer(kind, target), PROMPTS, num_draft_tokens=3, sampling=sampling, max_new_tokens=24,
            batch_size=batch_size,
        )  # fmt: skip

    single, batch = run(1), run(8)
    assert batch.requests == single.requests  # text, reasons and every round
    if kind == "ngram" and sampling.greedy:
        progress = {len(request.cycles) for request in batch.requests}
        assert len(progress) > 1  # the rows really stood at different positions
    if sampling.greedy:
        plain = plain_decode(target, PROMPTS, sampling=sampling, max_new_tokens=24, batch_size=8)
        assert [r.output_ids for r in plain.requests] == [r.output_ids for r in single.requests]


def test_a_round_without_a_draft_is_a_plain_step(target):
    """Where no row has a draft the target's pass is one token wide, and no wider than the longest draft elsewhere."""
    widths, step = [], target.step

    class Counting:
        """Sees the width of each pass on its way to the target."""

        def __getattr__(self, name):
            return getattr(target, name)

        def step(self, tokens, *rest):
            widths.append(tokens.shape[1])
            return step(tokens, *rest)

    trace = speculative_decode(
        Counting(), NgramProposer(2, 3), PROMPTS[:1], num_draft_tokens=4, sampling=GREEDY, max_new_tokens=16
    )
    assert widths == [1 + len(cycle.drafts) for cycle in trace.requests[0].cycles]
    assert 1 in widths
