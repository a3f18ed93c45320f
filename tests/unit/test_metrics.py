"""Metrics on rounds worked by hand: what is counted, what is cut, and what vLLM would count."""

import json
from dataclasses import replace

import pytest

from spec_train.decoding.acceptance import decoded_length, vllm_counters
from spec_train.decoding.sampling import Sampling
from spec_train.decoding.trace import Cycle, DecodeTrace, RequestTrace, Timings
from spec_train.evaluation.metrics import (
    acceptance_interval,
    compare_lossless,
    explain_speed,
    position_intervals,
    speed_summary,
    summarise,
    tokens_per_step,
)


def cycle(drafted, accepted, kept=None, emitted=None):
    """A round; unless said otherwise everything accepted is kept and one token is added."""
    kept = accepted if kept is None else kept
    return Cycle(list(range(drafted)), accepted, kept, kept + 1 if emitted is None else emitted)


def request(*cycles, name="a", category="", prompt=(1, 2), output=None):
    """A request whose output is the prefill's token and what its rounds emitted, unless given."""
    output = list(range(1 + sum(c.emitted for c in cycles))) if output is None else list(output)
    return RequestTrace(name, list(prompt), output, list(cycles), "length", category)


def trace(*requests, k=4, timings=None, batch_size=1):
    return DecodeTrace(list(requests), timings or Timings(), k, batch_size)


def summary(*requests, k=4, **named):
    settings = {"target": "t", "speculator": "s", "suite": "x", "device": "cpu", "dtype": "float32"}
    settings |= {"kind": "eagle3", "method": "eagle3"}
    return summarise(trace(*requests, k=k), sampling=Sampling(), **settings, **named)


def test_accepted_per_step_tokens_per_step_and_rate_are_three_figures():
    result = summary(request(cycle(4, 4), cycle(4, 0), cycle(4, 2)))
    assert result["num_accepted_draft_tokens"] / result["num_spec_steps"] == 2.0
    assert result["mean_acceptance_length"] == 3.0
    assert result["tokens_per_step"] == 3.0
    assert result["draft_acceptance_rate"] == 0.5
    assert result["num_draft_tokens_total"] == 12
    assert result["num_output_tokens"] == 10  # nine from the rounds, one from the prefill


def test_survival_is_unconditional_and_its_factors_are_conditional():
    result = summary(request(cycle(4, 1), cycle(4, 3), cycle(4, 0)))
    assert result["acceptance_rate_per_position"] == pytest.approx([2 / 3, 1 / 3, 1 / 3, 0])
    assert result["conditional_acceptance_rate_per_position"] == pytest.approx([2 / 3, 1 / 2, 1, 0])
    product = 1.0
    for survival, factor in zip(
        result["acceptance_rate_per_position"], result["conditional_acceptance_rate_per_position"], strict=True
    ):
        product *= factor
        assert survival == pytest.approx(product)
    assert sum(result["acceptance_rate_per_position"]) + 1 == pytest.approx(result["mean_acceptance_length"])


def test_a_last_round_cut_by_the_limit_keeps_what_the_user_received():
    # four drafts accepted, room for two tokens: both are drafts, the bonus token is cut as well
    result = summary(request(cycle(4, 2), cycle(4, 4, kept=2, emitted=2)))
    assert result["num_accepted_draft_tokens"] == 4
    assert result["mean_acceptance_length"] == 3.0
    assert result["tokens_per_step"] == 2.5
    assert result["num_output_tokens"] == 6
    assert result["acceptance_rate_per_position"] == [1, 1, 0, 0]
    assert result["vllm_counters"] == {
        "num_drafts": 2,
        "num_draft_tokens": 8,
        "num_accepted_tokens": 6,
        "num_accepted_tokens_per_pos": [2, 2, 1, 1],
    }


def test_an_eos_in_mid_block_ends_the_count():
    # the second of three accepted drafts is the EOS
    result = summary(request(cycle(3, 3, kept=2, emitted=2)), k=3)
    assert (result["num_accepted_draft_tokens"], result["num_output_tokens"]) == (2, 3)
    assert result["vllm_counters"]["num_accepted_tokens"] == 3


def test_an_eos_as_corrected_token_costs_no_draft():
    result = summary(request(cycle(3, 1)), k=3)
    assert result["num_accepted_draft_tokens"] == 1
    assert result["tokens_per_step"] == 2.0


def test_rounds_without_a_draft_are_steps_but_no_speculative_steps():
    result = summary(request(cycle(0, 0), cycle(2, 2), cycle(0, 0), cycle(4, 0)))
    assert result["num_spec_steps"] == 2
    assert result["num_draft_tokens_total"] == 6
    assert result["mean_acceptance_length"] == 2.0
    assert result["tokens_per_step"] == 6 / 4
    assert result["acceptance_rate_per_position"] == [0.5, 0.5, 0, 0]
    assert result["vllm_counters"]["num_drafts"] == 2


def test_no_round_at_all():
    result = summary(request(output=[3]), request(cycle(0, 0), name="b"))
    assert (result["num_spec_steps"], result["mean_acceptance_length"]) == (0, 1.0)
    assert (result["mean_acceptance_length_ci95"], result["acceptance_rate_per_position_ci95"]) == (None, None)
    assert result["draft_acceptance_rate"] == 0.0
    assert result["acceptance_rate_per_position"] == [0.0] * 4
    assert tokens_per_step([]) == 1.0


def test_sums_over_sums_and_not_means_of_means():
    requests = [request(cycle(4, 4)), request(*[cycle(4, 0)] * 3, name="b")]
    assert summary(*requests)["mean_acceptance_length"] == 2.0  # the mean over prompts would be 3


def test_interval_is_reproducible_covers_and_shrinks():
    varied = [request(*[cycle(4, i % 5)] * (1 + i % 3), name=str(i)) for i in range(20)]
    low, high = acceptance_interval(varied)
    assert [low, high] == acceptance_interval(varied)
    assert low < summary(*varied)["mean_acceptance_length"] < high
    wide = high - low
    low, high = acceptance_interval(varied * 9)
    assert 0.2 * wide < high - low < 0.5 * wide  # a third, as the square root says
    same = acceptance_interval([request(cycle(4, 2), name=str(i)) for i in range(5)])
    assert same == [3.0, 3.0]


def coins(count, rounds=1, **named):
    """Requests of which every other one accepts all four drafts of each round, the rest none: their means are a fair
    coin's, with a standard deviation of 2 drafts a request."""
    return [request(*[cycle(4, 4 * (i % 2))] * rounds, name=str(i), **named) for i in range(count)]


@pytest.mark.parametrize("rounds", [1, 25])
def test_the_interval_is_a_95_percent_one_over_prompts(rounds):
    """400 fair coins: 1.96 standard errors of 2 / 20 drafts on either side, however many equal rounds a prompt has."""
    low, high = acceptance_interval(coins(400, rounds))
    assert (high - low) / 2 == pytest.approx(1.96 * 0.1, rel=0.08)
    assert (high + low) / 2 == pytest.approx(3.0, abs=0.02)
    first, *_ = position_intervals(coins(400, rounds), 4)
    assert (first[1] - first[0]) / 2 == pytest.approx(1.96 * 0.025, rel=0.08)


def test_turns_of_a_conversation_are_one_cluster():
    """Two turns that resemble each other tell no more than one: twice the prompts, the same interval."""
    alone = coins(100)
    turns = [replace(one, id=f"{one.id}/{turn}", conversation=one.id) for one in alone for turn in (1, 2)]
    assert acceptance_interval(turns) == acceptance_interval(alone)
    assert position_intervals(turns, 4) == position_intervals(alone, 4)
    result = summary(*turns)
    assert (result["num_prompts"], result["num_conversations"]) == (200, 100)
    unmarked = acceptance_interval([replace(one, conversation="") for one in turns])
    assert unmarked[1] - unmarked[0] < 0.8 * (acceptance_interval(turns)[1] - acceptance_interval(turns)[0])


@pytest.mark.parametrize(
    "requests",
    [
        [request(cycle(4, 2), cycle(4, 0))],
        [request(cycle(4, 2)), request(cycle(4, 1), name="b", output=[1]), request(cycle(0, 0), name="c")][::2],
        [RequestTrace(f"q/{i}", [1], [0], [cycle(4, i)], conversation="q") for i in (1, 2)],
    ],
    ids=["one prompt", "one that drafted", "two turns"],
)
def test_one_conversation_has_no_interval(requests):
    assert (acceptance_interval(requests), position_intervals(requests, 4)) == (None, None)
    result = summary(*[replace(one, category="math") for one in requests], request(cycle(4, 4), name="z"))
    assert result["by_category"]["math"]["mean_acceptance_length_ci95"] is None
    assert result["mean_acceptance_length_ci95"] is not None
    assert json.loads(json.dumps(result)) == result


def test_short_answers_receive_less_than_the_acceptance_length():
    """Three answers that end with an EOS among the drafts: vLLM's count has a token more for each than users got."""
    short = [request(cycle(3, 0), cycle(3, 3, kept=2, emitted=2), name=str(i)) for i in range(3)]
    result = summary(*short, k=3)
    assert result["mean_acceptance_length"] == 1 + 2 / 2
    assert result["tokens_per_drafted_round"] == result["tokens_per_step"] == (1 + 2) / 2
    assert decoded_length(short) == 2.0
    undrafted = summary(request(cycle(0, 0), cycle(3, 3)), k=3)  # plain steps are in tokens_per_step alone
    assert (undrafted["tokens_per_drafted_round"], undrafted["tokens_per_step"]) == (4.0, 2.5)


def test_categories_and_the_fixed_fields():
    result = summary(
        request(cycle(4, 4), category="math"),
        request(cycle(4, 0), cycle(4, 1), name="b", category="chat"),
        request(cycle(4, 2), name="c"),
        lossless={"checked": 3, "identical": 3, "first_divergence": None},
        versions={"torch": "x"},
    )
    assert list(result["by_category"]) == ["math", "chat"]
    assert result["by_category"]["math"]["mean_acceptance_length"] == 5.0
    assert result["by_category"]["chat"]["mean_acceptance_length"] == 1.5
    assert json.loads(json.dumps(result)) == result
    fixed = """target speculator method suite backend device dtype num_draft_tokens temperature top_k top_p min_p
        draft_sample_method rejection_sample_method batch_size seed num_prompts num_output_tokens
        num_spec_steps num_draft_tokens_total num_accepted_draft_tokens
        mean_acceptance_length mean_acceptance_length_ci95 draft_acceptance_rate acceptance_rate_per_position
        conditional_acceptance_rate_per_position lossless speed estimate by_category versions"""
    assert set(fixed.split()) <= set(result)


def test_lossless_counts_and_names_the_first_divergence():
    plain = [request(output=[1, 2, 3]), request(name="b", output=[4, 5, 6]), request(name="c", output=[7, 8])]
    same = [request(output=[1, 2, 3]), request(name="b", output=[4, 5, 6]), request(name="c", output=[7, 8])]
    assert compare_lossless(plain, same) == {"checked": 3, "identical": 3, "first_divergence": None}
    other = [request(output=[1, 2, 3]), request(name="b", output=[4, 9, 6]), request(name="c", output=[7, 8, 9])]
    assert compare_lossless(plain, other) == {
        "checked": 3,
        "identical": 1,
        "first_divergence": {"id": "b", "position": 1, "plain": 5, "spec": 9},
    }
    longer = [request(output=[1, 2, 3, 4]), *same[1:]]  # text that runs past the end is a difference
    assert compare_lossless(plain, longer)["first_divergence"] == {"id": "a", "position": 3, "plain": None, "spec": 4}


def test_lossless_refuses_other_requests():
    with pytest.raises(ValueError, match="same requests"):
        compare_lossless([request(name="a")], [request(name="b")])
    with pytest.raises(ValueError, match="same requests"):
        compare_lossless([request(prompt=(1,))], [request(prompt=(2,))])


def timed(output_tokens, rounds, total, prefill, target, draft, verify=0.0):
    timings = Timings(total, prefill, target, draft, verify, target_steps=rounds, draft_steps=rounds)
    return trace(request(output=range(output_tokens)), timings=timings)


def test_speed_by_hand():
    usual = timed(101, 100, total=2.1, prefill=0.1, target=2.0, draft=0.0)
    fast = timed(101, 40, total=1.3, prefill=0.1, target=1.0, draft=0.12, verify=0.06)
    disturbed = timed(101, 100, total=9.1, prefill=0.9, target=8.2, draft=0.0)
    plain, spec = [usual, disturbed, usual], [fast] * 3  # the median round is an undisturbed one
    speed = speed_summary(plain, spec)
    assert speed["tokens_per_second"] == pytest.approx(101 / 1.3)
    assert speed["baseline_tokens_per_second"] == pytest.approx(101 / 2.1)
    assert speed["speedup"] == pytest.approx(2.1 / 1.3)
    assert speed["ttft_ms"] == pytest.approx(100)
    assert speed["tpot_ms"] == pytest.approx(12)
    assert speed["target_step_ms"] == pytest.approx(25)
    assert speed["baseline_target_step_ms"] == pytest.approx(20)
    assert speed["draft_ms"] == pytest.approx(3)
    assert speed["verify_ms"] == pytest.approx(1.5)
    assert speed["overhead_ms"] == pytest.approx(2)
    assert speed["overhead_share"] == pytest.approx(0.08 / 1.2)
    assert (speed["baseline_ttft_ms"], speed["baseline_tpot_ms"]) == pytest.approx((100, 20))
    assert speed["rounds"] == 3
    assert speed["plain_steps_per_round"] == pytest.approx(2.5)
    text = explain_speed(speed, 2.5, num_draft_tokens=4)
    for part in ("29.5 ms", "1.48 times a plain step of 20.0 ms", "replaces 2.50 plain steps", "is 1.69x as fast"):
        assert part in text
    assert "no gain here (0.81x), mostly for the cost of the wider target pass" in explain_speed(speed, 1.2, 4)
    assert "mostly for the cost of drafting" in explain_speed({**speed, "draft_ms": 30.0}, 1.2, 4)
    assert "no speed to explain" in explain_speed({**speed, "baseline_target_step_ms": 0.0}, 1.2, 4)


def test_a_batchs_time_between_tokens_is_a_requests_own():
    requests = [request(name=str(i), output=range(11)) for i in range(4)]
    run = trace(*requests, timings=Timings(1.2, 0.2, 1.0, target_steps=10), batch_size=4)
    assert speed_summary([run], [run])["tpot_ms"] == pytest.approx(100)  # ten steps of 100 ms each, for every row


def test_the_slowest_row_of_a_batch_decides():
    # one request needs 2 rounds for its ten tokens, the other 10: the batch runs 10 rounds, as plain decoding does
    requests = [request(name="a", output=range(11)), request(name="b", output=range(11))]
    run = trace(*requests, timings=Timings(1.0, 0.0, 1.0, target_steps=10), batch_size=2)
    assert speed_summary([run], [run])["plain_steps_per_round"] == 1.0


@pytest.mark.vllm
def test_counters_equal_those_of_vllms_own_class():
    metrics = pytest.importorskip("vllm.v1.spec_decode.metrics")
    requests = [request(cycle(4, 4, kept=1, emitted=1), cycle(0, 0), cycle(2, 1)), request(cycle(4, 0), cycle(3, 3))]
    theirs = metrics.SpecDecodingStats.new(4)
    for one in requests:
        for step in one.cycles:
            if step.drafts:  # the scheduler skips a step without drafts
                theirs.observe_draft(len(step.drafts), step.accepted)
    ours = vllm_counters(trace(*requests))
    assert ours == {name: getattr(theirs, name) for name in ours}
