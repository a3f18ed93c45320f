"""The law of a token: filters against transformers and by hand, draws against the law, generators per request."""

import math

import pytest
import torch
from transformers.generation.logits_process import (
    MinPLogitsWarper,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from spec_train.decoding.sampling import (
    RequestGenerators,
    Sampling,
    draw_at,
    keep_top_k,
    keep_top_k_top_p,
    keep_top_p,
    mask_padding,
    target_probs,
)
from spec_train.errors import UserError


@pytest.mark.parametrize(
    ("settings", "word"),
    [
        ({"temperature": -1.0}, "temperature"),
        ({"temperature": math.nan}, "temperature"),
        ({"temperature": math.inf}, "temperature"),
        ({"top_k": -1}, "top_k"),
        ({"top_p": 0.0}, "top_p"),
        ({"top_p": 1.5}, "top_p"),
        ({"min_p": -0.1}, "min_p"),
        ({"min_p": 1.5}, "min_p"),
        ({"min_p": math.nan}, "min_p"),
        ({"rejection_sample_method": "synthetic"}, "rejection_sample_method"),
        ({"draft_sample_method": "soft"}, "draft_sample_method"),
    ],
)
def test_settings_outside_their_range_are_refused_in_one_line(settings, word):
    with pytest.raises(UserError, match=word) as caught:
        Sampling(**settings)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("temperature", [0.0, 1e-8])
def test_zero_and_tiny_temperature_take_the_argmax(temperature):
    logits = torch.tensor([[1.0, 3.0, 3.0, -2.0], [500.0, -500.0, 0.0, 499.0]])
    probs = target_probs(logits, Sampling(temperature=temperature))
    assert probs.tolist() == [[0, 1, 0, 0], [1, 0, 0, 0]]  # the lower id wins the tie; no division, no NaN


def test_temperature_one_without_filters_is_the_softmax():
    logits = torch.randn(3, 4, 11, generator=torch.Generator().manual_seed(0), dtype=torch.bfloat16)
    probs = target_probs(logits, Sampling(temperature=1.0))
    assert probs.dtype == torch.float32
    assert torch.equal(probs, logits.float().softmax(-1))


@pytest.mark.parametrize("temperature", [0.3, 1.0, 1.7])
@pytest.mark.parametrize(
    ("min_p", "top_k", "top_p"),
    [
        (0, 0, 1.0),
        (0, 3, 1.0),
        (0, 100, 1.0),
        (0, 0, 0.6),
        (0, 0, 1e-6),
        (0, 5, 0.8),
        (0.1, 0, 1.0),
        (1.0, 0, 1.0),
        (0.02, 5, 1.0),
        (0.1, 0, 0.8),
        (0.05, 8, 0.9),
    ],
)
def test_filters_equal_those_of_transformers(temperature, min_p, top_k, top_p):
    generator = torch.Generator().manual_seed(top_k)
    logits = torch.randn(64, 23, generator=generator) * 3
    scores = TemperatureLogitsWarper(temperature)(None, logits)
    if min_p:  # the order is vLLM's
        scores = MinPLogitsWarper(min_p)(None, scores)
    if top_k:
        scores = TopKLogitsWarper(top_k)(None, scores)
    if top_p < 1:
        scores = TopPLogitsWarper(top_p)(None, scores)
    probs = target_probs(logits, Sampling(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p))
    assert torch.equal(probs > 0, torch.isfinite(scores))
    assert torch.allclose(probs, scores.softmax(-1), atol=1e-7)


@pytest.mark.vllm
@pytest.mark.parametrize(("top_k", "top_p"), [(3, 1.0), (0, 0.6), (5, 0.8)])
def test_filters_equal_those_of_vllm(top_k, top_p):
    pytest.importorskip("vllm")
    from vllm.v1.sample.ops.topk_topp_sampler import apply_top_k_top_p_pytorch

    logits = torch.randn(64, 23, generator=torch.Generator().manual_seed(1)) * 3
    logits = (logits * 4).round() / 4  # many ties
    k = torch.full((64,), top_k) if top_k else None
    p = torch.full((64,), top_p) if top_p < 1 else None
    expected = apply_top_k_top_p_pytorch(logits / 0.7, k, p, allow_cpu_sync=True).softmax(-1)
    probs = target_probs(logits, Sampling(temperature=0.7, top_k=top_k, top_p=top_p))
    # which of several equal logits at the top-p edge goes first is the sort's business: compare the laws as sets
    assert torch.allclose(probs.sort(-1).values, expected.sort(-1).values, atol=1e-6)
    if top_p == 1:
        assert torch.equal(probs > 0, expected > 0)


def test_ties_at_the_kth_place_all_stay():
    probs = target_probs(torch.tensor([2.0, 1.0, 1.0, 1.0, 0.0]), Sampling(temperature=1.0, top_k=2))
    assert (probs > 0).tolist() == [True, True, True, True, False]


def test_top_p_keeps_the_smallest_set_that_reaches_the_mass():
    law = torch.tensor([0.5, 0.25, 0.125, 0.125]).log()
    assert (target_probs(law, Sampling(temperature=1.0, top_p=0.7)) > 0).tolist() == [True, True, False, False]
    assert (target_probs(law, Sampling(temperature=1.0, top_p=0.8)) > 0).tolist() == [True, True, False, True]


def test_top_k_comes_before_top_p():
    # of all four, 0.7 needs {0.4, 0.3}; of the top two renormalised (0.57, 0.43) it needs both as well, 0.55 only one
    law = torch.tensor([0.4, 0.3, 0.2, 0.1]).log()
    assert (target_probs(law, Sampling(temperature=1.0, top_k=2, top_p=0.55)) > 0).tolist() == [
        True,
        False,
        False,
        False,
    ]
    assert (target_probs(law, Sampling(temperature=1.0, top_p=0.55)) > 0).tolist() == [True, True, False, False]


def test_min_p_comes_before_top_p():
    # 0.4 of the largest leaves {0.4, 0.3, 0.2}: top-p 0.75 of what is left keeps two, of everything it keeps three
    law = torch.tensor([0.4, 0.3, 0.2, 0.1]).log()
    assert (target_probs(law, Sampling(1.0, top_p=0.75)) > 0).tolist() == [True, True, True, False]
    assert (target_probs(law, Sampling(1.0, top_p=0.75, min_p=0.4)) > 0).tolist() == [True, True, False, False]


def test_min_p_keeps_what_equals_the_largest_and_scales_with_it():
    logits = torch.tensor([[5.0, 5.0, 4.9, -3.0], [0.1, 0.1, 0.0, -8.0]])
    assert (target_probs(logits, Sampling(1.0, min_p=1.0)) > 0).tolist() == [[True, True, False, False]] * 2
    assert (target_probs(logits, Sampling(1.0, min_p=0.5)) > 0).tolist() == [[True, True, True, False]] * 2
    assert target_probs(logits, Sampling(0.0, min_p=0.5)).tolist() == [[1, 0, 0, 0]] * 2


@pytest.mark.parametrize("step", [0.0, 0.25, 1.0], ids=["no ties", "ties", "many ties"])
@pytest.mark.parametrize(("top_k", "top_p"), [(1, 0.5), (3, 0.6), (7, 0.9), (20, 0.97), (49, 0.3), (50, 1e-6)])
def test_top_p_of_the_top_k_needs_no_whole_sort(top_k, top_p, step):
    logits = torch.randn(40, 25, 51, generator=torch.Generator().manual_seed(top_k)) * 2
    if step:
        logits = (logits / step).round() * step
    logits[3] = logits[3].masked_fill(logits[3] < 1, -math.inf)  # fewer than k tokens left by an earlier filter
    logits[4] = 0.0
    logits[3, :, 0] = 2.0
    plain = keep_top_p(keep_top_k(logits, top_k), top_p)
    fast = keep_top_k_top_p(logits, top_k, top_p)
    assert torch.equal(fast, plain)
    assert torch.equal(keep_top_k_top_p(logits[0, 0], top_k, top_p), plain[0, 0])  # alone as in the batch


@pytest.mark.parametrize(
    "sampling", [Sampling(), Sampling(temperature=1.0), Sampling(temperature=1.0, top_k=12, top_p=0.9)]
)
def test_padded_rows_of_the_head_are_no_tokens(sampling):
    logits = torch.zeros(2, 12)
    logits[:, 10:] = 50.0  # what an untrained padding row may hold
    probs = target_probs(logits, sampling, vocab_size=10)
    assert probs[:, 10:].sum() == 0
    assert torch.allclose(probs.sum(-1), torch.ones(2))
    assert mask_padding(logits, None) is logits


def chi_square_p(counts, law):
    """p-value of observed counts against a law, every cell expected at least 5 times."""
    expected = law.double() * counts.sum()
    assert expected.min() >= 5
    statistic = ((counts - expected) ** 2 / expected).sum()
    return float(torch.special.gammaincc(torch.tensor((len(law) - 1) / 2, dtype=torch.float64), statistic / 2))


def test_draws_follow_the_float32_law_where_bfloat16_could_not_tell():
    # logits that are all equal in bfloat16 (spacing 2 at 384) but not in float32
    logits = torch.tensor([384.0, 384.9, 383.4, 384.3])
    assert logits.bfloat16().unique().numel() == 1
    law = target_probs(logits, Sampling(temperature=1.0))
    generator = torch.Generator().manual_seed(3)
    drawn = draw_at(law.expand(50_000, 4), torch.rand(50_000, generator=generator, dtype=torch.float64))
    counts = drawn.bincount(minlength=4).double()
    assert chi_square_p(counts, law) > 1e-3
    assert chi_square_p(counts, torch.full((4,), 0.25)) < 1e-12


def test_no_draw_lands_on_a_token_of_probability_zero():
    law = torch.tensor([0.0, 0.3, 0.0, 0.7, 0.0])
    edge = torch.tensor([0.0, 1 - 2**-53, math.nextafter(1.0, 0.0)], dtype=torch.float64)
    assert draw_at(law.expand(3, 5), edge).tolist() == [1, 3, 3]
    assert draw_at(torch.tensor([[0.0, 2.0, 2.0]]), torch.tensor([0.5])).tolist() == [2]  # any positive sum will do


def test_generators_depend_on_the_request_and_not_on_the_batch():
    law = torch.full((50,), 0.02)
    together = RequestGenerators(Sampling(seed=7), range(6))
    apart = RequestGenerators(Sampling(seed=7), [4])
    counts = torch.tensor([3, 1, 2, 5, 3, 0])
    first = together.uniform(counts)
    assert first.shape == (6, 5)
    assert torch.equal(first[4, :3], apart.uniform(torch.tensor([3]))[0])
    assert first[1, 1:].sum() == 0
    # row 4 alone, after the others have left, goes on where it stood
    rest = together.select(torch.tensor([2, 4]))
    assert rest.draw_rows(law.expand(2, 50))[1] == apart.draw_rows(law.expand(1, 50))[0]
    assert rest.draw(law, 1) == int(apart.draw_rows(law.expand(1, 50)))


def test_seeds_requests_and_streams_do_not_share_numbers():
    numbers = [
        float(RequestGenerators(Sampling(seed=seed), [request], stream).uniform(torch.tensor([1])))
        for seed in range(5)
        for request in range(5)
        for stream in ("target", "draft")
    ]
    assert len(set(numbers)) == 50
