"""A pushed head that our plugin drafts for is named by its repository, as its card's command has it."""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from spec_train.manifest import package_versions
from spec_train.serving.contract import is_cpu_build
from spec_train.serving.export import export
from spec_train.speculators.mlp import Mlp
from spec_train.target import TargetModel
from tests.hub_stand_in import Blob, HubStandIn
from tests.tiny import tiny_model
from tests.vllm.test_pushed import START_S, TOKEN, served_environment
from tests.vllm.test_serve_command import fetch, free_port, wait_until_up

pytestmark = pytest.mark.vllm


def printed_command(card: str) -> list[str]:
    """The words of the command in the card that suits the vLLM that is installed."""
    blocks = re.findall(r"^```bash\n(.+)\n```$", card, re.MULTILINE)
    start = "python -m vllm" if is_cpu_build() else "vllm serve"
    words = shlex.split(next(block for block in blocks if block.startswith(start)))
    return [sys.executable if word == "python" else word for word in words]


def test_the_plugin_fetches_a_pushed_head(tmp_path: Path) -> None:
    path = tiny_model("llama", tmp_path)
    target = TargetModel.load(str(path))
    options = Mlp.options(type="mlp", num_heads=3, inner_dim=32)
    where = export(
        Mlp.from_recipe(options, target, torch.arange(target.vocab_size), 0).serving(),
        tmp_path / "export" / "plain",
        format="plain",
        target_id="someone/model",
        num_draft_tokens=3,
        golden=None,
        provenance={"versions": package_versions()},
    )
    with HubStandIn({TOKEN: ("me", "write")}) as hub:
        weights = {file.name: Blob(file.read_bytes(), file.suffix == ".safetensors") for file in path.iterdir()}
        hub.create("someone/model", private=False).add("main", "weights", weights)
        hub.store.update({blob.sha256: blob.content for blob in weights.values()})
        environment = served_environment(hub, tmp_path)
        push = [sys.executable, "-m", "spec_train", "push", str(where), "me/head", "hub.license=mit"]
        subprocess.run(push, env=environment, check=True)
        command = printed_command(hub.repos["me/head"].files["README.md"].decode())
        assert drafted_tokens(command, environment, tmp_path / "server.log") >= 3


def drafted_tokens(command: list[str], environment: dict[str, str], log_file: Path) -> float:
    """Serve, ask for 12 tokens, and return how many the server says that it drafted."""
    port = free_port()
    options = ["--host", "127.0.0.1", "--port", str(port), "--enforce-eager", "--max-model-len", "128"]
    with log_file.open("w") as log:
        server = subprocess.Popen([*command, *options], env=environment, stdout=log, stderr=log, start_new_session=True)
        try:
            wait_until_up(server, port, log_file, START_S)
            model = json.loads(fetch(f"http://127.0.0.1:{port}/v1/models"))["data"][0]["id"]
            body = {"model": model, "prompt": "two plus two", "max_tokens": 12, "temperature": 0, "ignore_eos": True}
            answer = json.loads(fetch(f"http://127.0.0.1:{port}/v1/completions", body))
            assert answer["usage"]["completion_tokens"] == 12
            metrics = fetch(f"http://127.0.0.1:{port}/metrics")
        finally:
            os.killpg(server.pid, signal.SIGTERM)  # the session that this test started, engine process included
            server.wait(60)
    drafted = re.search(r"^vllm:spec_decode_num_draft_tokens_total\{.*\} (\S+)$", metrics, re.MULTILINE)
    assert drafted is not None
    return float(drafted[1])
