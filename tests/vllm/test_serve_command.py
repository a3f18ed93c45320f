"""The command that an export prints starts a server that speculates, and `--server URL` measures it: loads, counters,
per-request metrics, errors. Beside it runs a server without a speculator, for the baseline."""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from spec_train.data.chat import load_tokenizer
from spec_train.decoding.sampling import Sampling
from spec_train.errors import UserError
from spec_train.evaluation.evaluate import EvalSettings, Suite, decode_reference, render_suite
from spec_train.evaluation.load_report import load_table
from spec_train.evaluation.server import Server, evaluate_served, with_answers
from spec_train.serving.contract import is_cpu_build, serve_command
from spec_train.serving.export import export, read_export
from spec_train.serving.processes import VLLM_ENVIRONMENT
from spec_train.target import TargetModel
from tests.heads import random_eagle3
from tests.program import spec_train
from tests.tiny import tiny_model
from tests.vllm.test_eagle3 import PROMPTS

pytestmark = pytest.mark.vllm
START_S, K, CONTEXT = 240, 3, 2048
PAGE = Path(__file__).parents[2] / "docs" / "evaluation.md"
TARGET, EXPORT = "path/or/hub-id", "runs/my-model/export/speculators"  # as the page names them


def fetch(url: str, body: dict[str, object] | None = None) -> str:
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, data, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=60) as answer:
        return str(answer.read().decode())


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def wait_until_up(server: subprocess.Popen[bytes], port: int, log: Path, start_s: float = START_S) -> None:
    started = time.monotonic()
    while True:
        try:
            fetch(f"http://127.0.0.1:{port}/health")
            return
        except (urllib.error.URLError, ConnectionError):
            tail = log.read_text()[-3000:]
            assert server.poll() is None, tail
            assert time.monotonic() - started < start_s, tail
            time.sleep(0.5)


class Served:
    """A folder as docs/evaluation.md takes it to be, the ports of the two servers, and the command of the first."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.port, self.plain_port = folder, free_port(), free_port()
        (folder / "path/or").mkdir(parents=True)
        self.target = tiny_model("llama", folder, max_position_embeddings=CONTEXT).rename(folder / TARGET)
        head = random_eagle3(max_position_embeddings=CONTEXT)
        settings: dict[str, Any] = {"format": "speculators", "num_draft_tokens": K, "golden": None, "provenance": {}}
        self.where = export(head, folder / EXPORT, target_id=TARGET, **settings)
        self.command = serve_command(self.where, TARGET, read_export(self.where), K, cpu=is_cpu_build())

    def start(self, command: str, port: int, log: Path, *options: str) -> subprocess.Popen[bytes]:
        words = shlex.split(command)
        if words[0] == "python":
            words[0] = sys.executable
        words += ["--host", "127.0.0.1", "--port", str(port), "--enforce-eager", "--dtype", "float32", *options]
        environment = {**os.environ, **VLLM_ENVIRONMENT, "VLLM_ENABLE_V1_MULTIPROCESSING": "1"}
        with log.open("w") as out:
            return subprocess.Popen(
                words, cwd=self.folder, env=environment, stdout=out, stderr=out, start_new_session=True
            )


def stop(server: subprocess.Popen[bytes]) -> None:
    """End the session that a test started, the engine's process included."""
    os.killpg(server.pid, signal.SIGTERM)
    server.wait(60)


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    served = Served(tmp_path_factory.mktemp("served"))
    plain = serve_command(TARGET, TARGET, {"format": "speculators"}, K, cpu=is_cpu_build())
    with ExitStack() as running:
        log, plain_log = served.folder / "server.log", served.folder / "plain.log"
        server = served.start(served.command, served.port, log, "--per-request-spec-decode-metrics", "summary")
        running.callback(stop, server)
        baseline = served.start(plain, served.plain_port, plain_log)
        running.callback(stop, baseline)
        wait_until_up(server, served.port, log)
        wait_until_up(baseline, served.plain_port, plain_log)
        yield served


def test_printed_command_serves(served: Served) -> None:
    assert served.command in (served.where / "README.md").read_text()
    url = f"http://127.0.0.1:{served.port}"
    model = json.loads(fetch(f"{url}/v1/models"))["data"][0]["id"]
    before = drafted(url)
    body = {"model": model, "prompt": "two plus two", "max_tokens": 12, "temperature": 0, "ignore_eos": True}
    answer = json.loads(fetch(f"{url}/v1/completions", body))
    assert answer["usage"]["completion_tokens"] == 12
    assert drafted(url) - before >= K
    assert drafted(url) % K == 0


def drafted(url: str) -> float:
    found = re.search(r"^vllm:spec_decode_num_draft_tokens_total\{.*\} (\S+)$", fetch(f"{url}/metrics"), re.MULTILINE)
    assert found is not None
    return float(found[1])


def test_a_running_server_is_measured(served: Served) -> None:
    with pytest.raises(UserError, match="cannot be reached"):
        Server(f"http://127.0.0.1:{free_port()}", TARGET)
    server = Server(f"http://127.0.0.1:{served.port}", TARGET)
    suite = Suite("tiny", list("abcd"), [""] * 4, PROMPTS)
    settings: dict[str, Any] = {"concurrency": [1, 4], "max_new_tokens": 24}
    results = evaluate_served(server, None, str(served.where), suite, [Sampling()], **settings)
    for result in results:
        own = [entry for entry in result["per_request"] if entry]
        assert own
        assert sum(entry["num_spec_steps"] for entry in own) == result["vllm_counters"]["num_drafts"]
        assert (
            sum(entry["num_accepted_draft_tokens"] for entry in own) == result["vllm_counters"]["num_accepted_tokens"]
        )
        assert sum(entry["num_draft_tokens"] for entry in own) == result["num_draft_tokens_total"]
        assert result["others_tokens"] == 0
        assert 0 < result["speed"]["ttft_ms"] <= result["speed"]["ttft_ms_p95"]
    assert [result["speed"]["concurrency"] for result in results] == [1, 4]
    assert results[0]["vllm_counters"] == results[1]["vllm_counters"]  # greedy: load changes no draft
    assert load_table(results, "served").row_count == 2
    with pytest.raises(UserError, match="drafts too"):
        evaluate_served(server, server, "ngram", suite, [Sampling()], concurrency=[4], max_new_tokens=24)
    check_later_turns(server, served.target, served.folder)
    plain = Server(f"http://127.0.0.1:{served.plain_port}", TARGET)
    with pytest.raises(UserError, match="drafted nothing"):
        evaluate_served(plain, None, "ngram", suite, [Sampling()], concurrency=[4], max_new_tokens=4)
    with pytest.raises(UserError, match="answers 400"):
        server.complete([5] * 3000, Sampling(), 0, 8, "x")  # beyond the context


def check_later_turns(server: Server, target: Path, folder: Path) -> None:
    """Second and third turns hold the server's own answers, as our own evaluation has them, and go out as prompts of
    their own; one that would not fit into the server's context with its answer is left out."""
    turns = [["one two three", "say that again", "and again"], ["two plus two?"], ["hello", "x" * CONTEXT]]
    file = folder / "turns.jsonl"
    file.write_text("".join(json.dumps({"id": f"q{i}", "turns": texts}) + "\n" for i, texts in enumerate(turns)))
    suite = render_suite(str(file), load_tokenizer(str(target)), {})
    ours = decode_reference(TargetModel.load(str(target)), suite, EvalSettings(Sampling(), 8, 4)).suite
    whole = with_answers(server, suite, Sampling(), 4, 8)
    assert server.context == CONTEXT
    left = [(name, prompt) for name, prompt in zip(ours.ids, ours.prompts, strict=True) if len(prompt) + 8 <= CONTEXT]
    assert list(zip(whole.ids, whole.prompts, strict=True)) == left
    assert whole.ids == ["q0/1", "q1", "q2/1", "q0/2", "q0/3"]
    (result,) = evaluate_served(server, None, "ngram", suite, [Sampling()], concurrency=[4], max_new_tokens=8)
    assert result["num_prompts"] == 5


def test_the_documented_command_measures_both(served: Served) -> None:
    """As docs/evaluation.md has it, but for the ports and fewer, shorter answers."""
    (line,) = re.findall(r"^spec-train eval .* --server .*$", PAGE.read_text().replace("\\\n", ""), re.MULTILINE)
    line = line.replace("localhost:8000", f"127.0.0.1:{served.port}")
    line = line.replace("localhost:8001", f"127.0.0.1:{served.plain_port}")
    line = line.replace("--max-prompts 20", "--max-prompts 4 --max-new-tokens 16 --json served.json")
    shown = spec_train(served.folder, *shlex.split(line)[1:])
    assert shown.returncode == 0, shown.stderr
    results = json.loads((served.folder / "served.json").read_text())
    assert [result["speed"]["concurrency"] for result in results] == [1, 8]
    for result in results:
        assert result["type"] == "eagle3"
        assert result["lossless"] == {"checked": 4, "identical": 4}
        assert result["speed"]["speedup"] > 0
