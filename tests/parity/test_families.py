"""Every family of the shipped recipes against transformers' own forward pass and its own greedy generation."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

from spec_train.batch import FeatureSpec
from spec_train.decoding.sampling import Sampling
from spec_train.errors import UserError
from spec_train.target import TargetModel
from tests.families import FAMILIES, family_target

PROMPTS = [list(range(40, 75)), [7, 9], list(range(100, 111))]


@pytest.fixture(scope="module", params=sorted(FAMILIES))
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[TargetModel, Any]:
    """Our target beside the model as transformers loads and runs it."""
    if request.param.endswith("_fp8"):
        pytest.importorskip("compressed_tensors")
    folder = family_target(request.param, tmp_path_factory.mktemp("families"))
    target = TargetModel.load(str(folder))  # first: it makes MiMo known to transformers
    auto = AutoModelForImageTextToText if request.param == "mistral_small" else AutoModelForCausalLM
    own = auto.from_pretrained(folder, attn_implementation="eager", dtype=torch.float32).eval()
    return target, own


def close(ours: torch.Tensor, own: torch.Tensor) -> None:
    assert (ours - own).abs().max() < 1e-4 * float(own.abs().max()), float((ours - own).abs().max())


@torch.no_grad()
def test_states_and_logits_are_the_models_own(pair: tuple[TargetModel, Any]) -> None:
    """Two documents packed into one row: each has the states and logits that it has alone."""
    target, own = pair
    documents = [PROMPTS[0], PROMPTS[2]]
    ids = torch.tensor([documents[0] + documents[1]])
    position = torch.cat([torch.arange(len(d)) for d in documents])[None]
    document = torch.cat([torch.full((len(d),), i) for i, d in enumerate(documents)])[None]
    layers = (0, 1, target.num_layers - 1)
    ours = target.features(ids, position, document, FeatureSpec(layers, last_hidden=True))
    assert ours.aux_hidden is not None
    assert ours.last_hidden is not None
    at = 0
    for tokens in documents:
        expected = own(input_ids=torch.tensor([tokens]), output_hidden_states=True)
        here = slice(at, at + len(tokens))
        close(target.logits(ours.last_hidden[:, here]), expected.logits)
        aux = torch.cat([expected.hidden_states[k] for k in layers], dim=-1)
        close(ours.aux_hidden[:, here], aux)
        at += len(tokens)


@torch.no_grad()
def test_a_ragged_batch_generates_what_the_model_does(pair: tuple[TargetModel, Any]) -> None:
    """Right-padded prefill and cached steps of rows that stand anywhere: greedy text of `generate`, row by row."""
    target, own = pair
    ours = target.generate(PROMPTS, Sampling(), 24)
    for prompt, answer in zip(PROMPTS, ours, strict=True):
        text = own.generate(torch.tensor([prompt]), max_new_tokens=24, do_sample=False)[0, len(prompt) :].tolist()
        assert answer.output_ids == text


@torch.no_grad()
def test_steps_after_rejected_drafts_see_nothing_of_them(pair: tuple[TargetModel, Any]) -> None:
    """Prefill, a step of five tokens of which each row keeps another number, the next step: as one pass over the text
    that was kept."""
    target, own = pair
    spec = FeatureSpec((), last_hidden=False)
    cache = target.new_cache(64)
    target.prefill(PROMPTS, cache, spec)
    lengths = torch.tensor([len(prompt) for prompt in PROMPTS])
    drafts = torch.arange(15).view(3, 5) + 120
    target.step(drafts, lengths[:, None] + torch.arange(5), cache, spec)
    kept = torch.tensor([5, 1, 3])
    more = torch.arange(9).view(3, 3) + 200
    last, _ = target.step(more, (lengths + kept)[:, None] + torch.arange(3), cache, spec)
    for row, prompt in enumerate(PROMPTS):
        text = prompt + drafts[row, : kept[row]].tolist() + more[row].tolist()
        close(target.logits(last[row]), own(input_ids=torch.tensor([text])).logits[0, -3:])


def test_what_a_target_lacks_is_said_in_one_line(tmp_path: Path) -> None:
    """A quantised checkpoint without its library; a model that is no language model."""
    config = json.loads((family_target("llama3", tmp_path) / "config.json").read_text())
    file = tmp_path / "llama3" / "config.json"
    file.write_text(json.dumps({**config, "quantization_config": {"quant_method": "gptq", "bits": 4}}))
    with pytest.raises(UserError, match=r"(?i)cannot be loaded: .*gptq") as caught:
        TargetModel.load(str(file.parent))
    assert "\n" not in str(caught.value)
    file.write_text(json.dumps({"model_type": "vit", "hidden_size": 48}))
    with pytest.raises(UserError, match="vit is not a language model"):
        TargetModel.load(str(file.parent))
