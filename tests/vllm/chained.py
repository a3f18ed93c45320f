"""A head fitted to the answers of some prompts, exported, read back, and served by vLLM beside our decoder."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

from spec_train.decoding.engine import speculative_decode
from spec_train.decoding.sampling import Sampling
from spec_train.serving.export import export
from spec_train.serving.golden import make_golden
from spec_train.serving.verify import verify_exports
from spec_train.speculators import load_speculator
from spec_train.speculators.base import Speculator
from spec_train.target import TargetModel
from tests.chain_heads import answers, fit

NEW_TOKENS = 32
DRAW = random.Random(0)
PROMPTS = [[DRAW.randrange(4, 320) for _ in range(length)] for length in (5, 9, 13, 17, 24)]


def assert_served_as_trained(head: Speculator, target: TargetModel, folder: Path, formats: list[Any], k: int) -> None:
    """Fit `head`, export it in each format, and let vLLM decode: text without speculation, every draft of every cycle
    and the counters are ours, over enough cycles, some with all and some with none of their drafts accepted."""
    fit(head, answers(target, head, PROMPTS[:3], NEW_TOKENS), 60)  # right often on these, seldom on the others
    head.eval().requires_grad_(False)
    golden = make_golden(head, target, PROMPTS[0])
    settings: dict[str, Any] = {"target_id": target.name, "num_draft_tokens": k, "golden": golden, "provenance": {}}
    exports = [export(head.serving(), folder / f"head-{format}", format=format, **settings) for format in formats]
    trace = speculative_decode(
        target,
        load_speculator(exports[0], target),
        PROMPTS,
        num_draft_tokens=k,
        sampling=Sampling(),
        max_new_tokens=NEW_TOKENS,
        batch_size=len(PROMPTS),
    )
    reports = verify_exports(
        exports,
        Path(target.name),
        prompts=PROMPTS,
        max_new_tokens=NEW_TOKENS,
        num_draft_tokens=k,
        expected_trace=trace,
        vllm="require",
    )
    cycles = [cycle for request in trace.requests for cycle in request.cycles]
    assert {0, k} <= {cycle.accepted for cycle in cycles}
    for report in reports:
        assert report.problems == []
        assert report.reload.drafts_equal
        run = report.vllm
        assert run is not None
        assert (run.outputs_equal_baseline, run.outputs_equal_ours, run.near_ties) == (len(PROMPTS), len(PROMPTS), 0)
        assert run.cycles == run.cycles_compared == run.cycles_equal == len(cycles) >= 40
        assert run.counters == run.expected_counters
        assert run.counters["num_drafts"] == len(cycles)
