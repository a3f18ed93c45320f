"""What every test against a real vLLM asserts of `compare`'s report."""

from spec_train.decoding.trace import Cycle, DecodeTrace
from spec_train.serving.compare import VllmReport


def assert_same(report: VllmReport, trace: DecodeTrace, min_cycles: int = 40) -> list[Cycle]:
    """Text, every draft of every round and the counters are those of our own decode; its rounds."""
    cycles = [cycle for request in trace.requests for cycle in request.cycles]
    assert report.problems == []
    assert (report.outputs_equal_baseline, report.outputs_equal_ours) == (len(trace.requests), len(trace.requests))
    assert report.cycles == report.cycles_compared == report.cycles_equal == len(cycles) >= min_cycles
    assert report.counters == report.expected_counters
    return cycles
