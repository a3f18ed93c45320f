"""Acceptance estimates: what the laws along a text say is what the decoder does, in expectation to the last digit."""

from collections.abc import Callable
from functools import cache
from itertools import product

import pytest
import torch
from torch import Tensor

from spec_train.batch import Batch
from spec_train.decoding.sampling import Sampling
from spec_train.decoding.verify import added_law, block_tests, token_tests
from spec_train.speculators.base import ResponseHits
from spec_train.speculators.supervision import response_hits, survival
from spec_train.training.acceptance import (
    expected_rounds,
    independent_length,
    position_average,
    renewal_counts,
    renewal_interval,
)

# A target and a draft that know the last two tokens: laws [before][last][next].
VOCAB, LENGTH = 3, 5  # LENGTH: tokens of a response, its first one from the prefill
Law = Callable[[tuple[int, ...]], Tensor]
RANDOM = torch.Generator().manual_seed(7)
TARGET = (1.5 * torch.randn(VOCAB, VOCAB, VOCAB, generator=RANDOM, dtype=torch.float64)).softmax(-1)
DRAFT = (1.5 * torch.randn(VOCAB, VOCAB, VOCAB, generator=RANDOM, dtype=torch.float64)).softmax(-1)


def target_law(text: tuple[int, ...]) -> Tensor:
    return TARGET[text[-2], text[-1]]


def filtered_target_law(text: tuple[int, ...]) -> Tensor:
    """The likeliest two tokens alone; the draft does not know of the filter."""
    law = TARGET[text[-2], text[-1]].clone()
    law[law.argmin()] = 0
    return law / law.sum()


def draft_law(text: tuple[int, ...]) -> Tensor:
    return DRAFT[text[-2], text[-1]]


def reduced_draft_law(text: tuple[int, ...]) -> Tensor:
    """Token 2 is not in the draft's vocabulary."""
    law = DRAFT[text[-2], text[-1]].clone()
    law[2] = 0
    return law / law.sum()


def greedy_draft_law(text: tuple[int, ...]) -> Tensor:
    return torch.nn.functional.one_hot(DRAFT[text[-2], text[-1]].argmax(), VOCAB).double()


def decoder_expectation(target: Law, draft: Law, num_draft_tokens: int, block: bool) -> list[float]:
    """[E rounds, E rounds that keep at least 1 draft, 2, ...] by playing the decoder's own rules over every draft,
    every outcome of its tests and every added token. The first token of a response is uniform, after a 0."""
    count_B = torch.tensor([num_draft_tokens])

    @cache
    def rest(text: tuple[int, ...], known: int) -> Tensor:
        """`text`: the last two tokens, which is all that the laws look at; `known` tokens of the response stand."""
        if known >= LENGTH:
            return torch.zeros(1 + num_draft_tokens, dtype=torch.float64)
        total = torch.zeros(1 + num_draft_tokens, dtype=torch.float64)
        for drafts in product(range(VOCAB), repeat=num_draft_tokens):
            prefixes = [text + drafts[:i] for i in range(num_draft_tokens + 1)]
            laws_BKV = torch.stack([draft(prefix) for prefix in prefixes[:-1]])[None]
            targets_BQV = torch.stack([target(prefix) for prefix in prefixes])[None]
            draft_BK = torch.tensor([drafts])
            chance = float(laws_BKV[0].gather(1, draft_BK[0][:, None]).prod())
            if chance == 0:
                continue
            weight_BQ = None
            if block:
                tests_BK, weight_BQ = block_tests(draft_BK, count_B, targets_BQV, laws_BKV)
            else:
                tests_BK = token_tests(draft_BK, targets_BQV, laws_BKV)
            for accepted, likely in enumerate(outcomes(tests_BK[0].tolist(), block)):
                if likely == 0:
                    continue
                law_V = added_law(draft_BK, count_B, torch.tensor([accepted]), targets_BQV, laws_BKV, weight_BQ)[0]
                law_V = law_V / law_V.sum()
                kept, after = min(accepted, LENGTH - known), (*text, *drafts[:accepted])
                round_ = torch.tensor([1.0] + [float(kept > i) for i in range(num_draft_tokens)], dtype=torch.float64)
                later = sum(law_V[v] * rest((after[-1], v), known + accepted + 1) for v in range(VOCAB))
                total = total + chance * likely * (round_ + later)
        return total

    start = sum(rest((0, token), 1) for token in range(VOCAB)) / VOCAB
    return torch.as_tensor(start).tolist()


def outcomes(tests: list[float], block: bool) -> list[float]:
    """The probability of 0, 1, ... accepted drafts from those of their tests."""
    if block:  # the last test that passes
        found, none_later = [], 1.0
        for test in reversed(tests):
            found.append(none_later * test)
            none_later *= 1 - test
        return [none_later, *reversed(found)]
    found, alive = [], 1.0
    for test in tests:
        found.append(alive * (1 - test))
        alive *= test
    return [*found, alive]


def text_expectation(target: Law, draft: Law, num_draft_tokens: int, block: bool) -> list[float]:
    """The same from the laws along every text that the target may write, by its probability."""
    responses, weights = [], []
    for text in product(range(VOCAB), repeat=LENGTH):
        known, weight = (0, *text), 1 / VOCAB
        ratio_L = torch.zeros(LENGTH, dtype=torch.float64)  # entry i: that of response token i
        for i in range(1, LENGTH):
            chance = target(known[: i + 1])[text[i]]
            weight *= float(chance)
            ratio_L[i] = draft(known[: i + 1])[text[i]] / chance if chance > 0 else 0
        ratio_MK = torch.zeros(LENGTH - 1, num_draft_tokens, dtype=torch.float64)
        for m, k in product(range(1, LENGTH), range(num_draft_tokens)):
            if m + k < LENGTH:
                ratio_MK[m - 1, k] = ratio_L[m + k]
        responses.append(ResponseHits(str(text), survival(ratio_MK, block)))
        weights.append(weight)
    assert sum(weights) == pytest.approx(1)
    steps_R, survived_RK = expected_rounds(responses, num_draft_tokens)
    return [float(weights @ steps_R), *(weights @ survived_RK).tolist()]


@pytest.mark.parametrize("block", [False, True])
@pytest.mark.parametrize("draft", [draft_law, reduced_draft_law, greedy_draft_law])
@pytest.mark.parametrize("num_draft_tokens", [1, 2, 3])
def test_texts_tell_the_decoders_expectation(num_draft_tokens: int, draft: Law, block: bool) -> None:
    for target in (target_law, filtered_target_law):
        found = text_expectation(target, draft, num_draft_tokens, block)
        assert found == pytest.approx(decoder_expectation(target, draft, num_draft_tokens, block), abs=1e-10)


def test_the_expectation_would_notice_another_law() -> None:
    """Another draft, the other rule, or the average of what texts might have been."""
    played = decoder_expectation(target_law, draft_law, 3, block=False)
    assert text_expectation(target_law, reduced_draft_law, 3, block=False) != pytest.approx(played, abs=1e-3)
    assert text_expectation(target_law, draft_law, 3, block=True) != pytest.approx(played, abs=1e-3)

    def overlap(text: tuple[int, ...]) -> Tensor:
        """What stands for the token that was drawn is the mean over tokens that might have been."""
        return target_law(text) * torch.minimum(target_law(text), draft_law(text)).sum()

    assert text_expectation(target_law, overlap, 3, block=False) != pytest.approx(played, abs=1e-3)


def test_block_verification_keeps_at_least_as_many() -> None:
    ratio_MK = torch.rand(200, 5, generator=RANDOM, dtype=torch.float64) * 2
    assert (survival(ratio_MK, block=True) >= survival(ratio_MK, block=False) - 1e-12).all()
    assert torch.equal(survival(ratio_MK[:, :1], block=True), survival(ratio_MK[:, :1], block=False))
    assert survival(torch.tensor([[1e300, 1e300, 0.0]], dtype=torch.float64), block=True).tolist() == [[1, 1, 0]]


def walked(hit_MK: Tensor, num_draft_tokens: int) -> tuple[int, list[int]]:
    """The plain walk of a greedy draft: (rounds, rounds that kept at least 1, 2, ... drafts)."""
    state, rounds, survived = 0, 0, [0] * num_draft_tokens
    while state < len(hit_MK):
        kept = 0
        while kept < num_draft_tokens and state + kept < len(hit_MK) and hit_MK[state, kept]:
            survived[kept] += 1
            kept += 1
        state, rounds = state + kept + 1, rounds + 1
    return rounds, survived


def test_greedy_drafts_are_walked_to_the_last_token() -> None:
    """Responses of many lengths at once, one of them empty; whole numbers come out."""
    hits = [torch.rand(n, 4, generator=RANDOM) < 0.6 for n in [0, 1, 2, *range(3, 40)] * 8]  # more than one chunk
    for hit_MK in hits:
        for m in range(len(hit_MK)):
            hit_MK[m, len(hit_MK) - m :] = False
    responses = [ResponseHits("a", survival(hit_MK, block=False)) for hit_MK in hits]
    for num_draft_tokens in (1, 3, 4):
        walks = [walked(hit_MK, num_draft_tokens) for hit_MK in hits]
        counts = renewal_counts(responses, num_draft_tokens)
        assert counts.steps == sum(rounds for rounds, _ in walks)
        assert list(counts.survived) == [sum(column) for column in zip(*(kept for _, kept in walks), strict=True)]
        assert counts.accepted + counts.steps >= counts.emitted == sum(map(len, hits))
    with pytest.raises(ValueError, match="4 depths were drafted, 5 are needed"):
        renewal_counts(responses, 5)


def test_ratios_are_cut_at_the_end_of_a_response() -> None:
    """Two documents in a row: state m of a response of n tokens keeps at most n-m drafts."""
    document = torch.tensor([[0] * 6 + [1] * 4 + [-1]])
    position = torch.tensor([[*range(6), *range(4), 0]])
    weight = torch.tensor([[0, 0, 1, 1, 1, 1, 0, 1, 1, 1, 0]], dtype=torch.float32)
    batch = Batch(torch.zeros_like(document), position, document, weight)
    first, second = response_hits(batch, torch.full((1, 11, 3), 0.5), Sampling())
    assert first.survival_MK.tolist() == [[0.5, 0.25, 0.125], [0.5, 0.25, 0], [0.5, 0, 0]]
    assert second.survival_MK.tolist() == [[0.5, 0.25, 0], [0.5, 0, 0]]


def test_averages_overstate_where_hard_regions_are_visited_more_often() -> None:
    hits = torch.tensor([[1.0] * 3] * 12 + [[0.0] * 3] * 6, dtype=torch.float64)
    for m in range(12):  # the last hits before the hard region
        hits[m, max(0, 12 - m) :] = 0
    responses = [ResponseHits("a", hits)]
    assert renewal_counts(responses, 3).mean_acceptance_length < position_average(responses, 3)
    assert independent_length(responses, 3) == pytest.approx(sum((12 / 18) ** i for i in range(4)))


def test_interval_holds_the_estimate_and_closes_where_responses_agree() -> None:
    same = [ResponseHits(str(i), torch.tensor([[1.0], [1.0], [0.0]], dtype=torch.float64)) for i in range(4)]
    length = renewal_counts(same, 1).mean_acceptance_length
    assert renewal_interval(same, 1) == pytest.approx((length, length))
    mixed = [ResponseHits(str(i), torch.full((6, 2), 0.5 * (i % 2), dtype=torch.float64)) for i in range(20)]
    low, high = renewal_interval(mixed, 2)
    assert low < renewal_counts(mixed, 2).mean_acceptance_length < high
    assert renewal_interval([], 2) is None
    assert renewal_interval(mixed[:1], 2) is None
    turns = [ResponseHits(str(i // 2), one.survival_MK) for i, one in enumerate(one for one in mixed for _ in range(2))]
    assert renewal_interval(turns, 2) == renewal_interval(mixed, 2)
