"""Pushed, then served from the Hub's stand-in by the command in the card, copied as it stands."""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time
import urllib.error
from pathlib import Path

import pytest
import torch

from spec_train.manifest import package_versions
from spec_train.serving.contract import is_cpu_build
from spec_train.serving.export import export
from spec_train.serving.processes import VLLM_ENVIRONMENT
from spec_train.speculators.base import ServingCheckpoint
from spec_train.speculators.mlp import Mlp
from spec_train.target import TargetModel
from tests.heads import random_eagle3
from tests.hub_stand_in import Blob, HubStandIn
from tests.tiny import tiny_model
from tests.vllm.test_serve_command import START_S, fetch, free_port

pytestmark = pytest.mark.vllm
TOKEN = "hf_abcdefghijklmnopqrstuvwxyz012345"
OPTIONS = ["--host", "127.0.0.1", "--enforce-eager", "--max-model-len", "128"]


def speculator(form: str, target: Path) -> ServingCheckpoint:
    """A head that vLLM knows, or one that our plugin drafts for."""
    if form == "speculators":
        return random_eagle3()
    loaded = TargetModel.load(str(target))
    options = Mlp.options(type="mlp", num_heads=3, inner_dim=32)
    return Mlp.from_recipe(options, loaded, torch.arange(loaded.vocab_size), 0).serving()


def printed_command(card: str) -> list[str]:
    """The words of the command in the card that suits the vLLM that is installed."""
    blocks = re.findall(r"^```bash\n(.+)\n```$", card, re.MULTILINE)
    start = "python -m vllm" if is_cpu_build() else "vllm serve"
    words = shlex.split(next(block for block in blocks if block.startswith(start)))
    return [sys.executable if word == "python" else word for word in words]


@pytest.mark.parametrize("form", ["speculators", "plain"])
def test_the_cards_command_serves_what_was_pushed(form: str, tmp_path: Path) -> None:
    target = tiny_model("llama", tmp_path)
    where = export(
        speculator(form, target),
        tmp_path / "export" / form,
        format=form,  # type: ignore[arg-type]
        target_id="someone/model",
        num_draft_tokens=3,
        golden=None,
        provenance={"versions": package_versions()},
    )
    with HubStandIn({TOKEN: ("me", "write")}) as server:
        weights = {path.name: Blob(path.read_bytes(), path.suffix == ".safetensors") for path in target.iterdir()}
        server.create("someone/model", private=False).add("main", "weights", weights)
        for blob in weights.values():
            server.store[blob.sha256] = blob.content
        environment = {
            **os.environ,
            **VLLM_ENVIRONMENT,
            **{"HF_ENDPOINT": server.url, "HF_TOKEN": TOKEN, "HF_HOME": str(tmp_path / "home")},
            **{"HF_HUB_DISABLE_XET": "1", "HF_HUB_OFFLINE": "0", "TRANSFORMERS_OFFLINE": "0"},
            "VLLM_ENABLE_V1_MULTIPROCESSING": "1",
        }
        push = [sys.executable, "-m", "spec_train", "push", str(where), "me/head", "hub.license=mit"]
        subprocess.run(push, env=environment, check=True)
        card = server.repos["me/head"].files["README.md"].decode()
        assert drafted_tokens(printed_command(card), environment, tmp_path / "server.log") >= 3


def drafted_tokens(command: list[str], environment: dict[str, str], log_file: Path) -> float:
    """Serve, ask for 12 tokens, and return how many the server says that it drafted."""
    port = free_port()
    with log_file.open("w") as log:
        words = [*command, *OPTIONS, "--port", str(port)]
        server = subprocess.Popen(words, env=environment, stdout=log, stderr=log, start_new_session=True)
        try:
            started = time.monotonic()
            while not answers(f"http://127.0.0.1:{port}/health"):
                assert server.poll() is None, log_file.read_text()[-3000:]
                assert time.monotonic() - started < START_S, log_file.read_text()[-3000:]
                time.sleep(0.5)
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


def answers(url: str) -> bool:
    try:
        fetch(url)
    except (urllib.error.URLError, ConnectionError):
        return False
    return True
