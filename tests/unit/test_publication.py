"""What is published for an export: the files, and a card whose every figure stands in a result."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from huggingface_hub import ModelCard, metadata_load

from spec_train.errors import UserError
from spec_train.serving.card import edited_by_hand
from spec_train.serving.export import export
from spec_train.serving.publication import publication
from tests.unit.test_export import random_eagle3


@pytest.fixture
def head(tmp_path: Path) -> Path:
    return export(
        random_eagle3(),
        tmp_path / "run" / "export" / "plain",
        format="plain",
        target_id="someone/model",
        num_draft_tokens=3,
        golden={"token_ids": torch.arange(5)},
        provenance={},
    )


def text_of(files: dict[str, Path | bytes], name: str) -> str:
    content = files[name]
    return (content if isinstance(content, bytes) else content.read_bytes()).decode()


def test_the_exports_own_files_are_published_as_they_are(head: Path) -> None:
    files = publication(head, "me/head")
    own = {path.relative_to(head).as_posix() for path in head.rglob("*") if path.is_file()}
    assert {name for name, content in files.items() if isinstance(content, Path)} == own - {"README.md"}
    assert set(files) == own


def test_a_card_without_a_run_says_what_is_not_known(head: Path, tmp_path: Path) -> None:
    card = text_of(publication(head, "me/head"), "README.md")
    assert "vllm serve someone/model --speculative-config" in card and '"model": "me/head"' in card
    assert "Not measured." in card
    (tmp_path / "README.md").write_text(card)
    assert metadata_load(tmp_path / "README.md")["base_model"] == "someone/model"
    assert ModelCard(card).data.base_model == "someone/model"


def test_a_changed_card_is_noticed(head: Path) -> None:
    card = text_of(publication(head, "me/head"), "README.md")
    assert not edited_by_hand(card)
    assert edited_by_hand(card.replace("someone", "somebody"))
    assert edited_by_hand("# A card of my own\n")


def test_what_does_not_belong_to_an_export_is_refused(head: Path) -> None:
    (head / "optimizer.pt").write_bytes(b"")
    with pytest.raises(UserError, match="not a file of the export"):
        publication(head, "me/head")


def test_a_local_target_needs_its_hub_id(tmp_path: Path) -> None:
    target = tmp_path / "target"
    target.mkdir()
    (target / "README.md").write_text("---\nlicense: llama3.1\n---\n")
    where = export(
        random_eagle3(),
        tmp_path / "run" / "export" / "speculators",
        format="speculators",
        target_id=str(target),
        num_draft_tokens=3,
        golden=None,
        provenance={},
    )
    with pytest.raises(UserError, match="local folder"):
        publication(where, "me/head")
    files = publication(where, "me/head", ["hub.base_model=someone/model"])
    config: dict[str, Any] = json.loads(text_of(files, "config.json"))
    assert config["speculators_config"]["verifier"]["name_or_path"] == "someone/model"
    assert ModelCard(text_of(files, "README.md")).data.license == "llama3.1"
    assert not any(str(tmp_path) in text_of(files, name) for name in files if not name.endswith(".safetensors"))
