"""`--server URL` against a real vLLM server: loads, counters, per-request metrics, errors."""

from __future__ import annotations

import json
import os
import shlex
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from spec_train.data.chat import load_tokenizer
from spec_train.decoding.sampling import Sampling
from spec_train.errors import UserError
from spec_train.evaluation.evaluate import EvalSettings, Suite, decode_reference, render_suite
from spec_train.evaluation.load_report import load_table
from spec_train.evaluation.server import Server, evaluate_served, with_answers
from spec_train.serving.processes import VLLM_ENVIRONMENT
from spec_train.target import TargetModel
from tests.tiny import tiny_model
from tests.vllm.test_eagle3 import PROMPTS
from tests.vllm.test_serve_command import free_port, wait_until_up

pytestmark = pytest.mark.vllm
CONFIG = '{"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_min": 1, "prompt_lookup_max": 3}'


def check_later_turns(server: Server, target: Path, folder: Path) -> None:
    """Second and third turns hold the server's own answers, as our own evaluation has them, and go out as prompts of
    their own; one that would not fit into the server's context with its answer is left out."""
    turns = [["one two three", "say that again", "and again"], ["two plus two?"], ["hello", "x" * 100]]
    file = folder / "turns.jsonl"
    file.write_text("".join(json.dumps({"id": f"q{i}", "turns": texts}) + "\n" for i, texts in enumerate(turns)))
    suite = render_suite(str(file), load_tokenizer(str(target)), {})
    ours = decode_reference(TargetModel.load(str(target)), suite, EvalSettings(Sampling(), 8, 4)).suite
    whole = with_answers(server, suite, Sampling(), 4, 8)
    fits = [len(prompt) + 8 <= server.context == 128 for prompt in ours.prompts]
    assert fits.count(False) >= 1
    assert whole.ids == [name for name, fit in zip(ours.ids, fits, strict=True) if fit]
    assert whole.ids == ["q0/1", "q1", "q2/1", "q0/2", "q0/3"]
    assert whole.prompts == [prompt for prompt, fit in zip(ours.prompts, fits, strict=True) if fit]
    (result,) = evaluate_served(server, None, "ngram", suite, [Sampling()], concurrency=[4], max_new_tokens=8)
    assert result["num_prompts"] == 5


def test_a_running_server(tmp_path: Path) -> None:
    target = tiny_model("llama", tmp_path)
    port = free_port()
    options = f"--host 127.0.0.1 --port {port} --enforce-eager --max-model-len 128 --dtype float32"
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(target)]
    command += [*shlex.split(options), "--speculative-config", CONFIG, "--per-request-spec-decode-metrics", "summary"]
    environment = {**os.environ, **VLLM_ENVIRONMENT, "VLLM_ENABLE_V1_MULTIPROCESSING": "1"}
    url = f"http://127.0.0.1:{port}"
    with pytest.raises(UserError, match="cannot be reached"):
        Server(url, str(target))
    log = (tmp_path / "server.log").open("w")
    process = subprocess.Popen(command, env=environment, stdout=log, stderr=log, start_new_session=True)
    try:
        wait_until_up(process, port, tmp_path / "server.log")
        server = Server(url, str(target))
        suite = Suite("tiny", list("abcd"), [""] * 4, PROMPTS)
        settings: dict[str, Any] = {"concurrency": [1, 4], "max_new_tokens": 24}
        results = evaluate_served(server, None, "ngram", suite, [Sampling()], **settings)
        for result in results:
            own = [entry for entry in result["per_request"] if entry]
            assert own
            assert sum(entry["num_spec_steps"] for entry in own) == result["vllm_counters"]["num_drafts"]
            assert (
                sum(entry["num_accepted_draft_tokens"] for entry in own)
                == result["vllm_counters"]["num_accepted_tokens"]
            )
            assert sum(entry["num_draft_tokens"] for entry in own) == result["num_draft_tokens_total"]
            assert result["others_tokens"] == 0
            assert 0 < result["speed"]["ttft_ms"] <= result["speed"]["ttft_ms_p95"]
        assert [result["speed"]["concurrency"] for result in results] == [1, 4]
        assert results[0]["vllm_counters"] == results[1]["vllm_counters"]  # greedy: load changes no draft
        assert load_table(results, "served").row_count == 2
        check_later_turns(server, target, tmp_path)
        with pytest.raises(UserError, match="drafts too"):
            evaluate_served(server, server, "ngram", suite, [Sampling()], concurrency=[4], max_new_tokens=24)
        with pytest.raises(UserError, match="answers 400"):
            server.complete([5] * 200, Sampling(), 0, 8, "x")  # beyond the context
    finally:
        os.killpg(process.pid, signal.SIGTERM)  # the session that this test started, engine process included
        process.wait(60)
        log.close()
