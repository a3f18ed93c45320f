"""Run one vLLM engine in a process of its own and write down what it drafted: `python -m ... JOB.json OUT.json`.

The engine runs inside this process (VLLM_ENABLE_V1_MULTIPROCESSING=0), so that its scheduler can be watched: each
step's drafts and how many of them were accepted are noted per request, exactly where vLLM counts them. Only token ids
go in and out. The environment is set by `verify.run_vllm`, which writes the job.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

PREFIX = "vllm:spec_decode_"


def main(job_path: str, out_path: str) -> None:
    """Read the job, run it, write the result."""
    job: dict[str, Any] = json.loads(Path(job_path).read_text())
    from vllm import LLM, SamplingParams

    started = time.perf_counter()
    engine = LLM(**job["engine"], **_memory())
    loaded = time.perf_counter()
    steps = _watch(engine)
    # Stopping is by token id alone: vLLM would otherwise add the tokenizer's EOS to the ids our decoder stops at.
    sampling = SamplingParams(
        temperature=0.0,
        max_tokens=job["max_new_tokens"],
        ignore_eos=True,
        stop_token_ids=job["stop_token_ids"],
        detokenize=False,
    )
    prompts = [{"prompt_token_ids": ids} for ids in job["prompts"]]
    outputs = engine.generate(prompts, sampling, use_tqdm=False)
    finished = time.perf_counter()
    result = {
        "outputs": [list(output.outputs[0].token_ids) for output in outputs],
        "steps": [steps.get(output.request_id, []) for output in outputs],
        "counters": _counters(engine),
        "seconds": {"load": loaded - started, "generate": finished - loaded},
    }
    Path(out_path).write_text(json.dumps(result))


def _memory() -> dict[str, Any]:
    """On a GPU, leave what other processes hold: vLLM refuses to start if less is free than the share it is given."""
    import torch

    if not torch.cuda.is_available():
        return {}
    free, total = torch.cuda.mem_get_info()
    return {"gpu_memory_utilization": round(0.9 * free / total, 3)}


def _watch(engine: Any) -> dict[str, list[dict[str, Any]]]:
    """Note drafts and accepted counts per request id from now on, in the order of the steps."""
    scheduler = engine.llm_engine.engine_core.engine_core.scheduler
    update = scheduler.update_from_output
    steps: dict[str, list[dict[str, Any]]] = {}

    def noted(scheduled: Any, output: Any) -> Any:
        for request_id, drafts in scheduled.scheduled_spec_decode_tokens.items():
            sampled = output.sampled_token_ids[output.req_id_to_index[request_id]]
            # The scheduler appends a random suffix to the id that the caller sees.
            entry = {"drafts": [int(token) for token in drafts], "accepted": len(sampled) - 1}
            steps.setdefault(request_id.rsplit("-", 1)[0], []).append(entry)
        return update(scheduled, output)

    scheduler.update_from_output = noted
    return steps


def _counters(engine: Any) -> dict[str, Any]:
    """vLLM's own counters of speculation, without their common prefix."""
    counters = {}
    for metric in engine.get_metrics():
        if metric.name.startswith(PREFIX):
            value = metric.values if hasattr(metric, "values") else metric.value
            counters[metric.name.removeprefix(PREFIX)] = value
    return counters


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2])
