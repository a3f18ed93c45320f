"""Decode a suite in a vLLM engine, in a process of its own, at one or more loads: `JOB.json OUT.json`.

The engine runs inside this process, as in `vllm_worker`, so that each round of each request is seen as well as
counted. How many requests run together is set in the scheduler between two loads: one engine serves them all.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

from spec_train.serving.vllm_worker import counters, memory, watch

WARM_UP_TOKENS = 8


def main(job_path: str, out_path: str) -> None:
    """Read the job, run its engine, write the results."""
    job: dict[str, Any] = json.loads(Path(job_path).read_text())
    if job["repair_cpu_sampling"]:
        from spec_train.serving.vllm_plugin.cpu_sampling import repair

        repair()
    Path(out_path).write_text(json.dumps({"loads": run(job["arguments"], job["loads"], job)}))


def run(arguments: dict[str, Any], loads: list[int], job: dict[str, Any]) -> list[dict[str, Any]]:
    """One engine over all prompts at each of `loads` (requests that run together).

    Gives the fields of `evaluation.vllm_backend.LoadRun` for each.
    """
    import torch
    from vllm import LLM, SamplingParams

    engine = LLM(**arguments, enforce_eager=not torch.cuda.is_available(), **memory())
    steps = watch(engine, plain_rounds=True)
    scheduler: Any = engine.llm_engine.engine_core.engine_core.scheduler
    if not hasattr(scheduler, "max_num_active_reqs"):
        raise RuntimeError("this vLLM's scheduler has no limit of running requests that is known here: use vLLM 0.32")
    common = {
        "temperature": job["temperature"],
        "top_k": job["top_k"],
        "top_p": job["top_p"],
        "min_p": job["min_p"],
        "ignore_eos": True,  # the target's own ids below are all that ends an answer
        "stop_token_ids": job["stop_token_ids"],
        "detokenize": False,
    }
    prompts = [{"prompt_token_ids": ids} for ids in job["prompts"]]
    # Other text than the suite's, so that nothing which learns from earlier requests (suffix decoding) has seen it.
    warm_up = [{"prompt_token_ids": ids[::-1]} for ids in job["prompts"][: max(loads)]]
    engine.generate(warm_up, SamplingParams(max_tokens=WARM_UP_TOKENS, **common), use_tqdm=False)
    runs = []
    for concurrency in loads:
        scheduler.max_num_active_reqs = concurrency
        settings = [SamplingParams(max_tokens=job["max_new_tokens"], seed=seed, **common) for seed in job["seeds"]]
        before = counters(engine)
        started = time.perf_counter()
        outputs = engine.generate(prompts, settings, use_tqdm=False)
        seconds = time.perf_counter() - started
        runs.append(
            {
                "concurrency": concurrency,
                "outputs": [list(output.outputs[0].token_ids) for output in outputs],
                "finish_reasons": [output.outputs[0].finish_reason for output in outputs],
                "steps": [steps.get(output.request_id, []) for output in outputs],
                "counters": difference(before, counters(engine)),
                "per_request": [speculation(output.outputs[0]) for output in outputs],
                "ttft_s": [output.metrics.first_token_ts - output.metrics.scheduled_ts for output in outputs],
                "decode_s": [output.metrics.last_token_ts - output.metrics.first_token_ts for output in outputs],
                "seconds": seconds,
            }
        )
    return runs


def speculation(completion: Any) -> dict[str, Any] | None:
    """vLLM's own account of one request, None where it drafted nothing or the version keeps none."""
    found = getattr(completion, "spec_decode_metrics", None)
    return None if found is None else dict(found.to_dict())


def difference(before: dict[str, Any], after: dict[str, Any]) -> dict[str, Any]:
    """What was counted in between; vectors by position."""
    return {
        name: [b - a for a, b in zip(before[name], value, strict=True)]
        if isinstance(value, list)
        else value - before[name]
        for name, value in after.items()
    }


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2])
