"""Heads in the layouts that other tools publish: read as they stand, refused where an engine would misread them."""

from __future__ import annotations

import os
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from spec_train.decoding.engine import plain_decode, speculative_decode
from spec_train.decoding.sampling import Sampling
from spec_train.errors import UserError
from spec_train.speculators import load_speculator
from spec_train.speculators.head_files import find_head
from spec_train.target import TargetModel
from tests.published import LAYOUTS, METHOD, config_of, published_name, random_tensors, write_head
from tests.tiny import tiny_model

PROMPTS = [[5, 6, 7, 8, 9], list(range(30, 50))]


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> TargetModel:
    return TargetModel.load(str(tiny_model("llama", tmp_path_factory.mktemp("target"))))


def written(folder: Path, layout: str, target: TargetModel, changes: dict[str, Any] | None = None) -> Path:
    tensors = random_tensors(layout, target.embedding.weight)
    return write_head(folder / layout.replace(" ", "-"), layout, target.name, tensors, **(changes or {}))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_published_head_is_read_whole(layout: str, target: TargetModel, tmp_path: Path) -> None:
    """Every tensor lands where it belongs, and decoding with the head leaves the text alone."""
    head = load_speculator(written(tmp_path, layout, target), target)
    assert head.kind == METHOD.get(layout, layout.split()[0])
    tensors = random_tensors(layout, target.embedding.weight)
    seen = {"embed_tokens.weight", "t2d", "d2t"}
    for name, value in head.state_dict().items():
        for published in published_name(layout, name):
            assert torch.equal(value, tensors[published]), published
            seen.add(published)
    if layout == "arctic":
        seen |= {f"speculator.{name}" for name in ("input_emb.0.weight", "cell_emb.0.weight", "output_emb.0.weight")}
        seen |= {f"speculator.head.{i}.weight" for i in (1, 2)}
    assert set(tensors) <= seen
    if "d2t" in tensors:
        assert torch.equal(head.target_ids(torch.arange(240)), torch.arange(240) + tensors["d2t"])
    settings: dict[str, Any] = {"sampling": Sampling(), "max_new_tokens": 8, "batch_size": 2}
    trace = speculative_decode(target, head, PROMPTS, num_draft_tokens=3, **settings)
    plain = plain_decode(target, PROMPTS, **settings)
    assert [request.output_ids for request in trace.requests] == [request.output_ids for request in plain.requests]


def test_the_config_decides_what_the_head_reads(target: TargetModel, tmp_path: Path) -> None:
    """Layer ids stand at the top, under eagle_config, or nowhere: then they are the engine's own for this depth."""
    ids = {name: load_speculator(written(tmp_path, name, target), target).config.aux_layer_ids for name in LAYOUTS[:4]}
    assert ids == {
        "eagle3": (1, 2, 4),
        "eagle3 qwen3": (1, 2, 4),
        "specforge": (1, 3, 4),
        "speculators": (1, 2, 4),
    }
    config = config_of("eagle3", "")
    del config["rope_theta"]  # official heads leave it out, and engines take 10,000
    config |= {"rope_scaling": {"type": "linear", "factor": 2.0}, "rope_theta": 5e5}
    scaled = write_head(tmp_path / "scaled", "eagle3", "", random_tensors("eagle3", target.embedding.weight), **config)
    rope = load_speculator(scaled, target).config.rope_parameters
    assert rope == {"rope_type": "linear", "factor": 2.0, "rope_theta": 5e5}


def test_the_file_of_medusa_counts_its_heads(target: TargetModel, tmp_path: Path) -> None:
    """Published configs count two of the heads in the file; heads without an output head share the target's."""
    head = load_speculator(written(tmp_path, "medusa", target), target)
    assert head.max_draft_tokens == 3
    blocks = {n: v for n, v in random_tensors("medusa", target.embedding.weight).items() if "linear" in n}
    named = {f"medusa_head.{name}": value for name, value in blocks.items()}
    shared = load_speculator(write_head(tmp_path / "shared", "medusa", "", named, medusa_num_heads=3), target)
    assert shared.config.shape.shared_head
    assert torch.equal(shared.heads.output_head(2), target.lm_head.weight)


def test_the_embedding_may_be_a_copy_in_another_precision(target: TargetModel, tmp_path: Path) -> None:
    tensors = random_tensors("eagle1", target.embedding.weight)
    half = {**tensors, "embed_tokens.weight": tensors["embed_tokens.weight"].half()}
    head = load_speculator(write_head(tmp_path / "half", "eagle1", "", half), target)
    assert head.embedding_VH.data_ptr() == target.embedding.weight.data_ptr()  # the target's own, not a copy


def absolute(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {**tensors, "d2t": tensors["t2d"].nonzero()[:, 0]}


def without(tensors: dict[str, Tensor], *names: str) -> dict[str, Tensor]:
    return {name: value for name, value in tensors.items() if name not in names}


REFUSED: list[tuple[str, Any, dict[str, Any], str]] = [
    ("eagle3", absolute, {}, r"d2t must be offsets.*looks like absolute ids"),
    ("eagle3", lambda t: without(t, "d2t", "t2d"), {}, r"drafts from 240 of 320 tokens and has no d2t"),
    ("eagle3", lambda t: without(t, "midlayer.hidden_norm.weight"), {}, r"missing tensors \['layers.0.hidden_norm"),
    ("specforge", lambda t: {**t, "extra.weight": torch.ones(2)}, {}, r"unknown tensors \['extra.weight'\]"),
    ("specforge", dict, {"hidden_size": 32}, r"width 32; .* has 320 and 64"),
    ("specforge", dict, {"vocab_size": 384}, r"vocabulary 384 and width 64; .* has 320 and 64"),
    ("specforge", dict, {"intermediate_size": 96}, r"down_proj.weight has shape \(64, 128\), its config asks for"),
    ("specforge", dict, {"hidden_act": "gelu"}, r"only layers with silu"),
    ("speculators", lambda t: {**t, "embed_tokens.weight": torch.ones(320, 64)}, {}, r"is not the embedding of"),
    ("speculators", dict, {"speculators_model_type": "dflash"}, r"speculators_model_type 'dflash' is not known"),
    ("eagle1", lambda t: {**t, "fc.bias": torch.ones(64)}, {}, r"unknown tensors \['fc.bias'\]"),
    ("ibm", lambda t: {**t, "speculator.emb.2.weight": torch.ones(320, 48)}, {}, r"differs from another copy"),
    ("ibm", lambda t: {**t, "speculator.emb.3.weight": torch.ones(320, 48)}, {}, r"unknown tensors \['emb.3.weight'\]"),
    ("ibm untied", lambda t: without(t, "speculator.ln.1.bias"), {}, r"missing tensors \['ln.1.bias'\]"),
    ("arctic", dict, {"vocab_size": 330}, r"has shape \(320, 64\)"),
    ("medusa", lambda t: without(t, "1.0.linear.bias"), {}, r"missing tensors \['blocks.1.layers.0.bias'\]"),
]


@pytest.mark.parametrize(("layout", "change", "config", "message"), REFUSED, ids=[case[-1] for case in REFUSED])
def test_what_engines_would_misread_is_refused(
    layout: str, change: Any, config: dict[str, Any], message: str, target: TargetModel, tmp_path: Path
) -> None:
    tensors = change(random_tensors(layout, target.embedding.weight))
    with pytest.raises(UserError, match=message) as error:
        load_speculator(write_head(tmp_path / "head", layout, target.name, tensors, **config), target)
    assert "\n" not in str(error.value)


class _Payload:
    """Unpickled, it would leave a file behind."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return (Path.touch, (self.path,))


def test_nothing_is_unpickled(target: TargetModel, tmp_path: Path) -> None:
    folder = written(tmp_path, "eagle3", target)
    (folder / "pytorch_model.bin").write_bytes(pickle.dumps(_Payload(tmp_path / "touched"), protocol=2))
    with pytest.raises(UserError, match="never unpickled") as error:
        load_speculator(folder, target)
    assert "\n" not in str(error.value)
    assert not (tmp_path / "touched").exists()
    torch.save({"fc.weight": torch.ones(2), "epoch": 3}, folder / "pytorch_model.bin")
    with pytest.raises(UserError, match="is not a table of named tensors"):
        load_speculator(folder, target)


def test_a_hub_id_that_cannot_be_had_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    for name, message in (("someone/some-head", "the Hub does not give it"), ("runs/a/b", "no such folder; give that")):
        with pytest.raises(UserError, match=message) as error:
            find_head(name)
        assert "\n" not in str(error.value)
    assert find_head(os.fspath(tmp_path)) == tmp_path
