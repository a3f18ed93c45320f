"""Traces on disk, and a run that was interrupted inside a suite."""

import json

import pytest

from spec_train.decoding.acceptance import vllm_counters
from spec_train.decoding.engine import speculative_decode
from spec_train.decoding.sampling import Sampling
from spec_train.errors import UserError
from spec_train.evaluation.evaluate import EvalSettings, Suite, evaluate_suite, ngram_contender
from spec_train.evaluation.traces import partial_path, read_trace, resumable_decode, trace_path, write_trace
from spec_train.speculators.ngram import NgramProposer
from spec_train.target import TargetModel
from tests.tiny import tiny_model

PROMPTS = [[5, 6, 7, 5, 6, 7, 5], [20, 21, 22], list(range(30, 50)), [7, 7, 7, 7, 7], [100, 3]]
SUITE = Suite("small", [f"q{i}" for i in range(5)], ["a", "b", "a", "b", "a"], PROMPTS)
SAMPLING = Sampling(temperature=0.8, seed=3)


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    return TargetModel.load(str(tiny_model("llama", tmp_path_factory.mktemp("llama"))))


def decode(target, chunk):
    return speculative_decode(
        target, NgramProposer(1, 3), **SUITE.part(chunk), num_draft_tokens=3, sampling=SAMPLING, max_new_tokens=12
    )


def test_a_trace_tells_ids_text_and_counts(target, tmp_path):
    trace = decode(target, range(5))
    write_trace(tmp_path / "traces" / "x.jsonl", trace.requests)
    back = read_trace(tmp_path / "traces" / "x.jsonl")
    assert [(r.id, r.category, r.output_ids, r.prompt_tokens) for r in back] == [
        (r.id, r.category, r.output_ids, len(r.prompt_ids)) for r in trace.requests
    ]
    counts = vllm_counters(trace)
    cycles = [cycle for request in back for cycle in request.cycles]
    assert sum(drafted > 0 for drafted, *_ in cycles) == counts["num_drafts"] > 0
    assert sum(accepted for _, accepted, _, _ in cycles) == counts["num_accepted_tokens"]
    (tmp_path / "x.jsonl").write_text('{"id": "q"}\n')
    with pytest.raises(UserError, match="line 1"):
        read_trace(tmp_path / "x.jsonl")
    with pytest.raises(UserError, match="no trace"):
        read_trace(tmp_path / "y.jsonl")


def test_an_interrupted_decode_goes_on_where_it_stopped(target, tmp_path):
    whole = decode(target, range(5))
    partial, seen = tmp_path / "traces" / ".x.partial", []

    def until_killed(chunk):
        if len(seen) == 2:
            raise KeyboardInterrupt
        seen.append(chunk)
        return decode(target, chunk)

    with pytest.raises(KeyboardInterrupt):
        resumable_decode(until_killed, PROMPTS, 2, 3, partial=partial, settings={"k": 3})
    with partial.open("a") as file:
        file.write('{"indices": [2], "reque')  # the line that the kill tore

    again, told = [], []

    def rest(chunk):
        again.append(chunk)
        return decode(target, chunk)

    trace = resumable_decode(rest, PROMPTS, 2, 3, partial=partial, settings={"k": 3}, on_progress=told.append)
    assert len(seen) == 2 and len(again) == 1
    assert trace.requests == whole.requests  # prompts, text, every round, in the order given
    assert sum(told) == sum(len(trace.requests[i].output_ids) for chunk in seen for i in chunk)
    stored = [json.loads(line) for line in partial.read_text().splitlines()]
    assert len(stored) == 4  # settings and three batches, the torn line gone
    assert trace.timings.total == pytest.approx(sum(batch["timings"]["total"] for batch in stored[1:]))
    again.clear()
    resumable_decode(rest, PROMPTS, 2, 3, partial=partial, settings={"k": 4})
    assert len(again) == 3  # other settings: nothing of it may be used


def test_a_suite_leaves_results_and_traces_and_no_partial(target, tmp_path):
    settings = EvalSettings(Sampling(), max_new_tokens=10, batch_size=2, speed_prompts=2, speed_rounds=3)
    (result,) = evaluate_suite(
        target, [ngram_contender(1, 3, [2])], SUITE, settings, target_name="tiny", directory=tmp_path
    )
    (path,) = tmp_path.glob("*.json")
    traced = read_trace(trace_path(path))
    kept = sum(cycle[2] for request in traced for cycle in request.cycles)
    assert kept == result["num_accepted_draft_tokens"]
    speed = result["speed"]
    assert (speed["rounds"], speed["batch_size"], speed["batched"]["batch_size"]) == (3, 1, 2)
    assert speed["batched"]["tokens_per_second"] > 0 and 0 < speed["overhead_share"] < 1
    plain = read_trace(tmp_path / "traces" / "small-plain-k0-t0.jsonl")
    assert [r.output_ids for r in plain] == [r.output_ids for r in traced]
    assert not partial_path(trace_path(path)).exists() and len(list((tmp_path / "traces").iterdir())) == 2
