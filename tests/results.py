"""Evaluation results out of rounds made by hand."""

from __future__ import annotations

from typing import Any

from spec_train.decoding.sampling import Sampling
from spec_train.decoding.trace import DecodeTrace, RequestTrace, Timings
from spec_train.evaluation.metrics import summarise


def result_of(requests: list[RequestTrace], kind: str, k: int, suite: str = "chat", **described: Any) -> dict[str, Any]:
    """What an evaluation would write about `requests`. `described`: further arguments of `metrics.summarise`."""
    settings: dict[str, Any] = {
        "target": "/somewhere/model",
        "speculator": "/somewhere/run/train/checkpoints/step-000010",
        "kind": kind,
        "method": kind,
        "suite": suite,
        "device": "cpu (2 threads)",
        "dtype": "float32",
        "sampling": Sampling(),
    }
    return summarise(DecodeTrace(requests, Timings(), k, 1), **{**settings, **described})
