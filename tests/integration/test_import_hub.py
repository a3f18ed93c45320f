"""A published head by its hub id, downloaded through huggingface_hub from a server that speaks the Hub's protocol."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from huggingface_hub import constants
from safetensors.torch import save_file

from spec_train.errors import UserError
from spec_train.speculators import load_speculator
from spec_train.speculators.head_files import find_head
from spec_train.target import TargetModel
from tests.hub_stand_in import Blob, HubStandIn, Repo
from tests.published import random_tensors, write_head
from tests.tiny import tiny_model

NAME = "someone/some-head"


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[HubStandIn]:
    with HubStandIn({}) as stand_in:
        template = constants.HUGGINGFACE_CO_URL_TEMPLATE.replace(constants.ENDPOINT, stand_in.url)
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
        monkeypatch.setattr(constants, "ENDPOINT", stand_in.url)
        monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
        monkeypatch.delenv("HF_TOKEN", raising=False)
        yield stand_in


def publish(server: HubStandIn, folder: Path) -> Repo:
    repo = server.create(NAME, private=False)
    files = {file.name: Blob(file.read_bytes(), file.suffix != ".json") for file in folder.iterdir()}
    server.store |= {blob.sha256: blob.content for blob in files.values() if blob.lfs}
    repo.add("main", "a head", files)
    return repo


def test_a_hub_id_is_a_head(server: HubStandIn, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The weights come once, of two copies the safetensors; afterwards the cache serves without a network."""
    target = TargetModel.load(str(tiny_model("llama", tmp_path)))
    tensors = random_tensors("eagle3", target.embedding.weight)
    published = write_head(tmp_path / "published", "eagle3", "", tensors)
    repo = publish(server, published)
    folder = find_head(NAME)
    assert {file.name for file in folder.iterdir()} == {"config.json", "pytorch_model.bin"}
    assert folder.name == repo.branches["main"]
    assert torch.equal(load_speculator(folder, target).fc.weight, tensors["fc.weight"])
    save_file(tensors, published / "model.safetensors")
    publish(server, published)
    assert {file.name for file in find_head(NAME).iterdir()} == {"config.json", "model.safetensors"}
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    calls = server.calls.total()
    assert load_speculator(find_head(NAME), target).kind == "eagle3"
    assert server.calls.total() == calls


def test_a_head_that_nobody_has_is_one_line(server: HubStandIn) -> None:
    with pytest.raises(UserError, match=r"speculator.start_from someone/none: no such folder, and the Hub") as error:
        find_head("someone/none", "speculator.start_from ")
    assert "\n" not in str(error.value)
