"""Run vLLM engines in a process of their own and write down what they drafted: `JOB.json OUT.json`.

The engine runs inside this process (VLLM_ENABLE_V1_MULTIPROCESSING=0), so that its scheduler can be watched: each
step's drafts and how many of them were accepted are noted per request, exactly where vLLM counts them. Only token ids
go in and out. The environment and the job come from `processes.run_vllm`.
"""

from __future__ import annotations

import gc
import json
import sys
import time
from pathlib import Path
from typing import Any

PREFIX = "vllm:spec_decode_"
STOP_CHECKS = 2


def main(job_path: str, out_path: str) -> None:
    """Read the job, run its engines one after the other, write the results."""
    job: dict[str, Any] = json.loads(Path(job_path).read_text())
    runs = []
    for arguments in job["engines"]:
        runs.append(run(arguments, job["prompts"], job["max_new_tokens"], job["stop_token_ids"]))
        gc.collect()  # engines hold cycles; the next one wants the memory
    Path(out_path).write_text(json.dumps({"runs": runs}))


def run(
    arguments: dict[str, Any], prompts: list[list[int]], max_new_tokens: int, stop_token_ids: list[int]
) -> dict[str, Any]:
    """One engine over all prompts, greedy; the fields of `processes.VllmRun`."""
    from vllm import LLM, SamplingParams

    started = time.perf_counter()
    engine = LLM(**arguments, **memory())
    loaded = time.perf_counter()
    steps = watch(engine)
    plain = engine.llm_engine.vllm_config.speculative_config is None
    # Stopping is by our own ids alone, which `own_stops` holds against vLLM's.
    sampling = SamplingParams(
        temperature=0.0,
        max_tokens=max_new_tokens,
        ignore_eos=True,
        stop_token_ids=stop_token_ids,
        detokenize=False,
        logprobs=2 if plain else None,
    )
    outputs = engine.generate([{"prompt_token_ids": ids} for ids in prompts], sampling, use_tqdm=False)
    finished = time.perf_counter()
    texts = [list(output.outputs[0].token_ids) for output in outputs]
    return {
        "outputs": texts,
        "own_stops": own_stops(engine, prompts, texts, max_new_tokens) if engine.renderer.tokenizer else None,
        "margins": [_margins(output.outputs[0].logprobs or []) for output in outputs],
        "steps": [steps.get(output.request_id, []) for output in outputs],
        "counters": counters(engine),
        "seconds": {"load": loaded - started, "generate": finished - loaded},
    }


def own_stops(engine: Any, prompts: list[list[int]], texts: list[list[int]], max_new_tokens: int) -> dict[str, Any]:
    """At which ids this engine, with its tokenizer, ends an answer by itself, and the answers that it then gives to the
    `STOP_CHECKS` prompts (indices `requests`) whose `texts` are shortest."""
    from vllm import SamplingParams

    served = SamplingParams()
    model_config = engine.llm_engine.model_config
    served.update_from_generation_config(model_config.try_get_generation_config(), engine.renderer.get_eos_token_id())
    requests = sorted(range(len(prompts)), key=lambda index: len(texts[index]))[:STOP_CHECKS]
    sampling = SamplingParams(temperature=0.0, max_tokens=max_new_tokens, detokenize=False)
    outputs = engine.generate([{"prompt_token_ids": prompts[i]} for i in requests], sampling, use_tqdm=False)
    return {
        "ids": sorted(served.all_stop_token_ids),
        "requests": requests,
        "outputs": [list(output.outputs[0].token_ids) for output in outputs],
    }


def memory() -> dict[str, Any]:
    """On a GPU, leave what other processes hold: vLLM refuses to start if less is free than the share it is given."""
    import torch

    if not torch.cuda.is_available():
        return {}
    free, total = torch.cuda.mem_get_info()
    return {"gpu_memory_utilization": round(0.9 * free / total, 3)}


def watch(engine: Any, plain_rounds: bool = False) -> dict[str, list[dict[str, Any]]]:
    """Note drafts and accepted counts per request id from now on, in the order of the steps.

    `plain_rounds`: steps that gave a request a token without any draft are noted too, the prefill's own left out.
    """
    scheduler = engine.llm_engine.engine_core.engine_core.scheduler
    update = scheduler.update_from_output
    steps: dict[str, list[dict[str, Any]]] = {}
    begun: set[str] = set()  # requests that have their first token

    def noted(scheduled: Any, output: Any) -> Any:
        for request_id, drafts in scheduled.scheduled_spec_decode_tokens.items():
            sampled = output.sampled_token_ids[output.req_id_to_index[request_id]]
            # The engine appends a random suffix to the id that the caller sees.
            entry = {"drafts": [int(token) for token in drafts], "accepted": len(sampled) - 1}
            steps.setdefault(request_id.rsplit("-", 1)[0], []).append(entry)
        if plain_rounds:
            for request_id, row in output.req_id_to_index.items():
                if not output.sampled_token_ids[row] or request_id in scheduled.scheduled_spec_decode_tokens:
                    continue  # part of a prompt, or noted above
                if request_id in begun:
                    steps.setdefault(request_id.rsplit("-", 1)[0], []).append({"drafts": [], "accepted": 0})
                begun.add(request_id)
        return update(scheduled, output)

    scheduler.update_from_output = noted
    return steps


def _margins(logprobs: list[dict[int, Any]]) -> list[float]:
    """How far the second best token is behind the best, at each output position."""
    margins = []
    for entry in logprobs:
        best, second = sorted((token.logprob for token in entry.values()), reverse=True)[:2]
        margins.append(best - second)
    return margins


def counters(engine: Any) -> dict[str, Any]:
    """vLLM's own counters of speculation, without their common prefix."""
    counters = {}
    for metric in engine.get_metrics():
        if metric.name.startswith(PREFIX):
            value = metric.values if hasattr(metric, "values") else metric.value
            counters[metric.name.removeprefix(PREFIX)] = value
    return counters


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2])
