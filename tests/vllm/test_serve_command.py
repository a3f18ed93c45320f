"""The command that an export prints starts a server that speculates."""

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
from pathlib import Path

import pytest

from spec_train.serving.contract import is_cpu_build, serve_command
from spec_train.serving.export import export, read_export
from spec_train.serving.processes import VLLM_ENVIRONMENT
from tests.heads import random_eagle3
from tests.tiny import tiny_model

pytestmark = pytest.mark.vllm
START_S = 240


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


def test_printed_command_serves(tmp_path: Path) -> None:
    target = tiny_model("llama", tmp_path)
    where = export(
        random_eagle3(),
        tmp_path / "head",
        format="speculators",
        target_id=str(target),
        num_draft_tokens=3,
        golden=None,
        provenance={},
    )
    command = serve_command(where, str(target), read_export(where), 3, cpu=is_cpu_build())
    assert command in (where / "README.md").read_text()
    port = free_port()
    words = shlex.split(command)
    if words[0] == "python":
        words[0] = sys.executable
    options = ["--host", "127.0.0.1", "--port", str(port), "--enforce-eager", "--max-model-len", "128"]
    environment = {**os.environ, **VLLM_ENVIRONMENT, "VLLM_ENABLE_V1_MULTIPROCESSING": "1"}
    log = (tmp_path / "server.log").open("w")
    server = subprocess.Popen([*words, *options], env=environment, stdout=log, stderr=log, start_new_session=True)
    try:
        wait_until_up(server, port, tmp_path / "server.log")
        model = json.loads(fetch(f"http://127.0.0.1:{port}/v1/models"))["data"][0]["id"]
        body = {"model": model, "prompt": "two plus two", "max_tokens": 12, "temperature": 0, "ignore_eos": True}
        answer = json.loads(fetch(f"http://127.0.0.1:{port}/v1/completions", body))
        assert answer["usage"]["completion_tokens"] == 12
        metrics = fetch(f"http://127.0.0.1:{port}/metrics")
        drafted = re.search(r"^vllm:spec_decode_num_draft_tokens_total\{.*\} (\S+)$", metrics, re.MULTILINE)
        assert drafted is not None
        assert float(drafted[1]) >= 3
        assert float(drafted[1]) % 3 == 0
    finally:
        os.killpg(server.pid, signal.SIGTERM)  # the session that this test started, engine process included
        server.wait(60)
        log.close()
