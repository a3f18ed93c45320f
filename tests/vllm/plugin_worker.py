"""Run vLLM engines over requests of unequal progress and note every proposal: `JOB.json OUT.json`.

A run of the job is {"arguments": of LLM, "requests": [{"prompt": ids, "max_tokens": n, ...of SamplingParams}]}.
"""

from __future__ import annotations

import gc
import json
import sys
from pathlib import Path
from typing import Any


def main(job_path: str, out_path: str) -> None:
    """Read the job, run its engines one after the other, write the results."""
    results = []
    for run in json.loads(Path(job_path).read_text())["runs"]:
        results.append(serve(run["arguments"], run["requests"]))
        gc.collect()
    Path(out_path).write_text(json.dumps({"runs": results}))


def serve(arguments: dict[str, Any], requests: list[dict[str, Any]]) -> dict[str, Any]:
    """One engine over all requests, submitted at once."""
    from vllm import LLM, SamplingParams

    engine = LLM(**arguments)
    steps = watch(engine.llm_engine.engine_core.engine_core.model_executor.driver_worker.worker.model_runner)
    prompts = [{"prompt_token_ids": request.pop("prompt")} for request in requests]
    common = {"temperature": 0.0, "ignore_eos": True, "detokenize": False}
    outputs = engine.generate(prompts, [SamplingParams(**common, **request) for request in requests], use_tqdm=False)
    numbers = {output.request_id: number for number, output in enumerate(outputs)}
    for step in steps:
        for row in step:  # the engine appends a random suffix to the id that the caller sees
            row["request"] = numbers[row["request"].rsplit("-", 1)[0]]
    return {
        "outputs": [list(output.outputs[0].token_ids) for output in outputs],
        "logprobs": [flat(output.outputs[0].logprobs) for output in outputs],
        "prompt_logprobs": [flat(output.prompt_logprobs) for output in outputs],
        "steps": steps,
        "counters": {metric.name: metric.value for metric in engine.get_metrics() if hasattr(metric, "value")},
    }


def flat(logprobs: list[dict[int, Any] | None] | None) -> list[list[float]]:
    """The log-probabilities of each position, best first."""
    positions = [position for position in logprobs or [] if position is not None]
    return [sorted((entry.logprob for entry in position.values()), reverse=True) for position in positions]


def watch(runner: Any) -> list[list[dict[str, Any]]]:
    """Note each step's requests: tokens so far, of these new ones, drafts that were scheduled, drafts proposed."""
    steps: list[list[dict[str, Any]]] = []
    if runner.speculative_config is None:
        return steps
    propose = runner.drafter.propose

    def noted(sampled: list[list[int]], lengths: Any, tokens: Any, slot_mappings: Any = None) -> list[list[int]]:
        scheduled = runner.drafter.step.num_drafts
        drafts: list[list[int]] = propose(sampled, lengths, tokens, slot_mappings=slot_mappings)
        steps.append(
            [
                {
                    "request": runner.input_batch.req_ids[i],
                    "tokens": tokens[i, : lengths[i]].tolist(),
                    "new": len(new),
                    "scheduled": scheduled[i],
                    "drafts": drafts[i],
                }
                for i, new in enumerate(sampled)
            ]
        )
        return drafts

    runner.drafter.propose = noted
    return steps


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2])
