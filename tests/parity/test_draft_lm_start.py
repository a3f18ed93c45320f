"""Where a draft starts: which layers, which sizes, whose tokenizer, and rows that are padding (V04, V05, V09)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from pydantic import ValidationError
from transformers import AutoModelForCausalLM

from spec_train.batch import FeatureSpec
from spec_train.decoding.engine import plain_decode, speculative_decode
from spec_train.decoding.sampling import Sampling
from spec_train.errors import UserError
from spec_train.speculators.draft_lm import DraftLM
from spec_train.speculators.draft_start import DraftLMOptions, DraftShape, choose_layers
from spec_train.target import TargetModel
from tests.parity.test_draft_lm import LORA, PROMPTS, answers, draft_for, fit
from tests.tiny import tiny_model

GREEDY = Sampling()


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> TargetModel:
    return TargetModel.load(str(tiny_model("llama", tmp_path_factory.mktemp("llama"))))


def test_chosen_layers() -> None:
    assert choose_layers(8, "evenly", 30) == [0, 4, 8, 12, 17, 21, 25, 29]
    assert choose_layers(3, "first_last", 30) == [0, 1, 29]
    assert choose_layers(1, "evenly", 30) == choose_layers(1, "first_last", 30) == [0]
    assert choose_layers(4, "evenly", 4) == choose_layers(4, "first_last", 4) == [0, 1, 2, 3]
    with pytest.raises(UserError, match="the target has 4 layers"):
        choose_layers(5, "evenly", 4)


@pytest.mark.parametrize("kind", ["llama", "qwen3", "mistral", "gemma3_text", "gemma3", "gpt_neox"])
def test_all_layers_of_the_target_are_the_target(kind: str, tmp_path: Path) -> None:
    """Such a draft is right every time: nothing of a family is lost (windows, norms, scales, rotary settings)."""
    target = TargetModel.load(str(tiny_model(kind, tmp_path)))
    draft = draft_for(target, start_layers=4)
    trace = speculative_decode(
        target, draft, PROMPTS, num_draft_tokens=3, sampling=GREEDY, max_new_tokens=24, batch_size=4
    )
    assert all(cycle.accepted == len(cycle.drafts) for request in trace.requests for cycle in request.cycles)
    served = draft.serving()
    path = tmp_path / "served"
    rebuilt = DraftLM.from_serving(served.config, served.tensors, target)
    model: Any = rebuilt.body.model
    model.save_pretrained(path)  # whatever Transformers itself makes of config and weights
    ids = torch.tensor([PROMPTS[2]])
    with torch.no_grad():
        theirs = AutoModelForCausalLM.from_pretrained(path)(ids).logits
        assert torch.allclose(theirs, target.model(ids).logits, atol=1e-4)


def test_layer_lists_are_cut_with_the_layers(tmp_path: Path) -> None:
    target = TargetModel.load(str(tiny_model("gemma3_text", tmp_path, num_hidden_layers=5)))
    kinds = target.config.layer_types
    config = draft_for(target, start_layers=[1, 2, 4]).serving().config
    assert config["layer_types"] == [kinds[i] for i in (1, 2, 4)]
    assert config["num_hidden_layers"] == 3


@pytest.mark.parametrize("tied", [False, True])
def test_serving_round_trip(tied: bool, tmp_path: Path) -> None:
    """Tied drafts carry one matrix, others two; a LoRA draft comes back as plain weights that draft the same."""
    target = TargetModel.load(str(tiny_model("llama", tmp_path, tie_word_embeddings=tied)))
    batch = answers(target, PROMPTS, 12)
    for changes in ({}, {"train_embeddings": True}, {"lora": LORA}, {"start_layers": None, "shape": {"num_layers": 1}}):
        draft = draft_for(target, **changes)
        fit(draft, batch, 5)
        served = draft.serving()
        assert ("lm_head.weight" in served.tensors) != tied
        assert served.config["vocab_size"] == target.config.vocab_size
        again = DraftLM.from_serving(json.loads(json.dumps(served.config)), served.tensors, target)
        tensors = again.serving().tensors
        assert tensors.keys() == served.tensors.keys()
        assert all(torch.equal(tensors[name], value) for name, value in served.tensors.items())
        with torch.no_grad():
            difference = again.packed_states(batch) - draft.eval().packed_states(batch)
        assert float(difference.abs().max()) < 1e-4
    served.tensors.pop("model.norm.weight")
    with pytest.raises(UserError, match=r"missing tensors \['model.norm.weight'\]"):
        DraftLM.from_serving(served.config, served.tensors, target)
    with pytest.raises(UserError, match="300 rows, the target has 320"):
        DraftLM.from_serving({**served.config, "vocab_size": 300}, served.tensors, target)


def test_what_is_trained_and_saved(target: TargetModel) -> None:
    """The target's embedding is borrowed unless it is to be trained; adapters leave the rest frozen."""
    borrowed = draft_for(target)
    assert borrowed.body.embedding.weight.data_ptr() == target.embedding.weight.data_ptr()
    assert not any("embed" in name or "lm_head" in name for name in borrowed.state_dict())
    whole = draft_for(target, train_embeddings=True)
    assert {"decoder.embed_tokens.weight", "lm_head.weight"} <= {
        n for n, p in whole.named_parameters() if p.requires_grad
    }
    adapted = draft_for(target, lora={**LORA, "target_modules": ["q_proj", "v_proj"]})
    trained = {name for name, p in adapted.named_parameters() if p.requires_grad}
    assert len(trained) == 2 * 2 * 2 and all("lora_" in name for name in trained)
    with pytest.raises(UserError, match=r"speculator.lora.target_modules \['no_such'\]"):
        draft_for(target, lora={**LORA, "target_modules": ["no_such"]})


def test_a_start_is_a_function_of_the_seed(target: TargetModel) -> None:
    options = DraftLMOptions(type="draft_lm", shape=DraftShape(num_layers=2, hidden_size=32))
    state = torch.random.get_rng_state()
    drafts = [DraftLM.from_recipe(options, target, torch.arange(320), seed) for seed in (1, 1, 2)]
    assert torch.equal(state, torch.random.get_rng_state())
    first, second, other = (draft.state_dict()["decoder.layers.0.mlp.up_proj.weight"] for draft in drafts)
    assert torch.equal(first, second) and not torch.equal(first, other)
    assert first.shape == (64, 32)  # narrower by half, with an embedding of its own
    assert "decoder.embed_tokens.weight" in drafts[0].state_dict()


def test_rotary_frequencies_stay_in_float32(target: TargetModel) -> None:
    draft = draft_for(target)
    before = draft.body.decoder.rotary_emb.inv_freq.clone()
    draft.to(torch.bfloat16)
    assert draft.decoder.layers[0].mlp.up_proj.weight.dtype == torch.bfloat16
    assert torch.equal(draft.body.decoder.rotary_emb.inv_freq, before)


@pytest.mark.parametrize(("target_rows", "draft_rows"), [(384, 336), (336, 384), (384, 320)])
def test_rows_that_are_padding(target_rows: int, draft_rows: int, tmp_path: Path) -> None:
    """The tokenizer has 320 ids. A draft padded otherwise than the target trains, decodes and is served at the
    target's width, and never drafts an id beyond the tokenizer, not even through an engine that picks from all rows."""
    target = TargetModel.load(str(tiny_model("llama", tmp_path, vocab_size=target_rows)))
    other = tiny_model("qwen3", tmp_path, seed=1, vocab_size=draft_rows, num_hidden_layers=1)
    draft = draft_for(target, start_layers=None, start_model=str(other))
    batch = answers(target, PROMPTS, 24)
    fit(draft, batch, 30)
    trace = speculative_decode(
        target, draft, PROMPTS, num_draft_tokens=3, sampling=GREEDY, max_new_tokens=24, batch_size=4
    )
    drafts = [token for request in trace.requests for cycle in request.cycles for token in cycle.drafts]
    assert max(drafts) < 320
    sampling = Sampling(temperature=1.0, draft_sample_method="probabilistic", seed=1)
    speculative_decode(target, draft, PROMPTS[:2], num_draft_tokens=2, sampling=sampling, max_new_tokens=6)
    served = draft.serving()
    assert served.config["vocab_size"] == target_rows == served.tensors["lm_head.weight"].shape[0]
    with torch.no_grad():
        hidden = draft.packed_states(batch).flatten(0, 1)
        assert torch.equal(
            (hidden @ served.tensors["lm_head.weight"].T).argmax(-1), draft.draft_logits(hidden).argmax(-1)
        )


def test_another_tokenizer_is_refused(target: TargetModel, tmp_path: Path) -> None:
    other = tiny_model("llama", tmp_path, seed=1)
    file = other / "tokenizer.json"
    content = json.loads(file.read_text())
    vocab = content["model"]["vocab"]
    (a, id_a), (b, id_b) = list(vocab.items())[50:52]
    vocab[a], vocab[b] = id_b, id_a
    file.write_text(json.dumps(content))
    with pytest.raises(UserError, match=f"tokenizers differ: id {min(id_a, id_b)} is"):
        draft_for(target, start_layers=None, start_model=str(other))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "exactly one of start_model, start_layers and shape"),
        ({"start_layers": 2, "start_model": "x"}, "exactly one"),
        ({"start_layers": []}, "at least one layer"),
        ({"start_layers": 2, "lora": {}, "train_embeddings": True}, "frozen"),
        ({"shape": {"num_layers": 1}, "lora": {}}, "lora"),
        ({"start_layers": 2, "on_policy_fraction": 1.0}, "on_policy_fraction"),
        ({"start_layers": 2, "loss": "jsd", "jsd_beta": 1.0}, "jsd_beta"),
    ],
)
def test_bad_options(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        DraftLMOptions(type="draft_lm", **options)


def test_bad_starts(target: TargetModel, tmp_path: Path) -> None:
    for changes, message in (
        ({"start_layers": [0, 4]}, r"start_layers \[0, 4\]: ids must be distinct and lie in 0..3"),
        ({"start_layers": None, "start_model": str(tmp_path / "none")}, "cannot be loaded"),
        (
            {"start_layers": None, "shape": {"num_layers": 1, "num_attention_heads": 3, "num_key_value_heads": 2}},
            "3 att",
        ),
        ({"start_layers": None, "shape": {"num_layers": 1, "hidden_size": 32}, "train_embeddings": False}, "width"),
    ):
        with pytest.raises(UserError, match=message):
            draft_for(target, **changes)
    assert DraftLM.required_features(None, target) == FeatureSpec((), last_hidden=True)
    assert plain_decode(target, [[5]], sampling=GREEDY, max_new_tokens=1).requests[0].output_ids
