"""Run the workers of verification in processes of their own, with JSON files in and out.

A vLLM engine takes over its process (threads, memory, signal handlers) and a reload must not see anything that the
trainer left in memory; so neither runs here.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import spec_train

RELOAD_WORKER = "spec_train.serving.reload_worker"
VLLM_WORKER = "spec_train.serving.vllm_worker"
TIMEOUT_S = 1800.0
TAIL_LINES = 12
MAX_NUM_SEQS = 8
# One process, so that the engine can be watched; no network, no telemetry; the CPU's cores stay shared.
VLLM_ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
}


@dataclass(frozen=True)
class VllmRun:
    """One engine's work. `outputs`: token ids per request; `margins`: per output token the gap of the two best
    log-probabilities (without speculation only); `steps`: per request its cycles, {"drafts": [...], "accepted": n};
    `counters`: vLLM's own; `seconds` of {"load", "generate"}. `own_stops`: where vLLM ends answers by itself, {"ids",
    "requests", "outputs"}; only of an engine with its tokenizer."""

    outputs: list[list[int]]
    margins: list[list[float]]
    steps: list[list[dict[str, Any]]]
    counters: dict[str, Any]
    seconds: dict[str, float]
    own_stops: dict[str, Any] | None = None


def needed_positions(prompts: list[list[int]], max_new_tokens: int, num_draft_tokens: int) -> int:
    """The `max_model_len` at which nothing is cut short. A step holds a request's tokens, K drafts that may outrun its
    limit, and K more to be drafted; vLLM skips drafting for the whole batch (it proposes zeros) where one does not fit.
    """
    return max(map(len, prompts)) + max_new_tokens + 3 * (num_draft_tokens + 1)


def run_worker(module: str, job: dict[str, Any], environment: dict[str, str], timeout_s: float) -> dict[str, Any]:
    """Run `python -m module JOB OUT` and return what it wrote. Raises RuntimeError with the end of its stderr."""
    # A clone that is not installed is importable here through the working directory or sys.path: hand that on.
    root = str(Path(spec_train.__file__).parent.parent)
    path = os.pathsep.join([root, *filter(None, [os.environ.get("PYTHONPATH")])])
    with tempfile.TemporaryDirectory(prefix="spec-train-") as folder:
        job_path, out_path = Path(folder, "job.json"), Path(folder, "out.json")
        job_path.write_text(json.dumps(job))
        command = [sys.executable, "-m", module, str(job_path), str(out_path)]
        try:
            done = subprocess.run(
                command,
                env={**os.environ, **environment, "PYTHONPATH": path},
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                text=True,
                errors="replace",
                timeout=timeout_s,
                check=False,
            )
        except subprocess.TimeoutExpired as error:
            tail = _tail(error.stderr.decode(errors="replace") if isinstance(error.stderr, bytes) else error.stderr)
            raise RuntimeError(
                f"{module} did not finish in {timeout_s:.0f} s; the end of its output:\n{tail}"
            ) from None
        if done.returncode != 0 or not out_path.is_file():
            raise RuntimeError(
                f"{module} failed with status {done.returncode}; the end of its output:\n{_tail(done.stderr)}"
            )
        result: dict[str, Any] = json.loads(out_path.read_text())
        return result


def engine_arguments(
    model: str, length: int, max_num_seqs: int, dtype: str = "float32", seed: int = 0
) -> dict[str, Any]:
    """What every engine is started with whose rounds are to be compared with ours. `length`: see `needed_positions`."""
    return {
        "model": model,
        "dtype": dtype,
        "max_model_len": length,
        "max_num_seqs": max_num_seqs,
        "max_num_batched_tokens": max(2048, length),
        "enable_prefix_caching": False,
        "async_scheduling": False,  # the scheduler sees drafts only where it waits for them
        "disable_log_stats": False,
        "generation_config": "vllm",  # no sampling defaults of the target
        "skip_tokenizer_init": True,
        "seed": seed,
    }


def run_vllm(
    model: str,
    speculations: list[dict[str, Any]],
    prompts: list[list[int]],
    *,
    max_new_tokens: int,
    max_draft_tokens: int,
    stop_token_ids: list[int],
    dtype: str = "float32",
    timeout_s: float = TIMEOUT_S,
) -> list[VllmRun]:
    """Decode `prompts` (token ids) greedily, once for each of `speculations`, in one process.

    A speculation is a dict of engine arguments laid over the common ones: {} for none, {"speculative_config": ...} for
    the plain format, {"model": ...} for the speculators format.
    """
    length = needed_positions(prompts, max_new_tokens, max_draft_tokens)
    engine = {**engine_arguments(model, length, MAX_NUM_SEQS, dtype), "enforce_eager": True}
    job = {
        "engines": [{**engine, **speculation} for speculation in speculations],
        "prompts": prompts,
        "max_new_tokens": max_new_tokens,
        "stop_token_ids": stop_token_ids,
    }
    return [VllmRun(**run) for run in run_worker(VLLM_WORKER, job, VLLM_ENVIRONMENT, timeout_s)["runs"]]


def _tail(text: str | None) -> str:
    return "\n".join((text or "").rstrip().splitlines()[-TAIL_LINES:])
