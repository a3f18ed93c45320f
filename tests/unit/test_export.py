"""The contract refuses what vLLM would load wrongly, and the exporter writes all or nothing."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from spec_train.errors import UserError
from spec_train.serving import contract, eagle3_contract
from spec_train.serving.export import GOLDEN_FILE, export, is_export, read_export
from spec_train.speculators.base import ServingCheckpoint
from tests.heads import random_eagle3


def problems(head: ServingCheckpoint) -> list[str]:
    return eagle3_contract.check_eagle3(head.config, head.tensors)


def write(head: ServingCheckpoint, directory: Path, **changes: Any) -> Path:
    settings: dict[str, Any] = {
        "format": "plain",
        "target_id": "someone/model",
        "num_draft_tokens": 3,
        "golden": None,
        "provenance": {"run": "test"},
    }
    return export(head, directory, **{**settings, **changes})


HEADS = {
    "reduced vocabulary": random_eagle3(),
    "full vocabulary": random_eagle3(draft_vocab=320),
    "qwen3": random_eagle3(kind="qwen3"),
    "every option": random_eagle3(norm_before_fc=True, fc_norm=True, norm_output=True, norm_before_residual=True),
    "four aux layers": random_eagle3(aux_ids=(0, 1, 2, 4)),
}


@pytest.mark.parametrize("name", HEADS)
def test_contract_accepts_good_heads(name: str) -> None:
    assert problems(HEADS[name]) == []


def test_contract_reads_both_spellings_of_the_first_layer() -> None:
    head = random_eagle3()
    renamed = {name.replace("midlayer.", "layers.0."): tensor for name, tensor in head.tensors.items()}
    assert eagle3_contract.check_eagle3(head.config, renamed) == []
    unknown = {name.replace("midlayer.", "layer0."): tensor for name, tensor in head.tensors.items()}
    assert any("is missing" in problem for problem in eagle3_contract.check_eagle3(head.config, unknown))
    assert "both" in eagle3_contract.check_eagle3(head.config, {**renamed, **head.tensors})[0]


def test_head_dim_is_read_and_not_computed() -> None:
    head = random_eagle3()  # hidden 64, 4 heads, head_dim 32: the quotient would be 16
    assert head.tensors["midlayer.self_attn.q_proj.weight"].shape == (128, 128)
    head.config["head_dim"] = 16
    assert any("self_attn.q_proj.weight has shape [128, 128]" in problem for problem in problems(head))


def with_absolute_d2t(tensors: dict[str, Tensor]) -> None:
    tensors["d2t"] = tensors["d2t"] + torch.arange(len(tensors["d2t"]))


TENSOR_FAULTS = {
    "absolute d2t": (with_absolute_d2t, "d2t must be offsets"),
    "d2t missing": (lambda t: t.pop("d2t"), "d2t is missing"),
    "t2d missing": (lambda t: t.pop("t2d"), "t2d is missing"),
    "d2t of 32 bits": (lambda t: t.update(d2t=t["d2t"].int()), "int64"),
    "d2t repeats an id": (lambda t: t["d2t"].__setitem__(1, t["d2t"][0] - 1), "ascending, unique"),
    "d2t beyond the vocabulary": (lambda t: t["d2t"].__setitem__(-1, 320), "below 320"),
    "t2d of another type": (lambda t: t.update(t2d=t["t2d"].to(torch.uint8)), "not bool"),
    "t2d marks other ids": (lambda t: t["t2d"].logical_not_(), "does not mark exactly"),
    "lm_head of the target's size": (lambda t: t.update({"lm_head.weight": torch.ones(320, 64)}), "lm_head.weight has"),
    "tensor missing": (lambda t: t.pop("midlayer.hidden_norm.weight"), "hidden_norm.weight is missing"),
    "tensor empty": (lambda t: t.update({"fc.weight": torch.empty(0)}), "fc.weight is empty"),
    "tensor unknown": (lambda t: t.update({"optimizer.step": torch.ones(1)}), "optimizer.step is a tensor that vLLM"),
    "bias not declared": (lambda t: t.update({"fc.bias": torch.ones(64)}), "fc.bias is a tensor that vLLM"),
    "not a number": (lambda t: t["norm.weight"].__setitem__(3, float("nan")), "norm.weight holds values that are not"),
    "embedding of the draft's size": (lambda t: t.update({"embed_tokens.weight": torch.ones(96, 64)}), "[320, 64]"),
}


@pytest.mark.parametrize("name", TENSOR_FAULTS)
def test_contract_refuses_tensors(name: str) -> None:
    break_it, message = TENSOR_FAULTS[name]
    head = random_eagle3()
    break_it(head.tensors)
    assert message in "\n".join(problems(head))


CONFIG_FAULTS: dict[str, tuple[dict[str, Any], str]] = {
    "teacher layer among the ids": ({"eagle_aux_hidden_state_layer_ids": [1, 2, 3, 4]}, "num_aux_hidden_states is 3"),
    "ids that differ inside": ({"eagle_config": {"use_aux_hidden_state": True}}, "eagle_config.eagle_aux"),
    "ids descending": ({"eagle_aux_hidden_state_layer_ids": [4, 2, 1]}, "ascending"),
    "ids missing": ({"eagle_aux_hidden_state_layer_ids": None}, "lacks eagle_aux_hidden_state_layer_ids"),
    "count missing": ({"num_aux_hidden_states": None}, "lacks num_aux_hidden_states"),
    "flag missing": ({"norm_output": None}, "lacks norm_output"),
    "flag set without its tensor": ({"norm_before_fc": True}, "input_norm.weight is missing"),
    "unknown flag": ({"norm_everything": True}, "'norm_everything'"),
    "base class": ({"architectures": ["LlamaForCausalLM"]}, "architectures"),
    "no architecture": ({"architectures": []}, "architectures"),
    "another model type": ({"model_type": "mistral"}, "model_type 'mistral'"),
    "tied": ({"tie_word_embeddings": True}, "tie_word_embeddings"),
    "quantised target's config": ({"quantization_config": {"quant_method": "fp8"}}, "quantization_config"),
    "no limit": ({"max_position_embeddings": None}, "lacks max_position_embeddings"),
    "no theta": ({"rope_parameters": {"rope_type": "default"}}, "rope_theta"),
    "two thetas": ({"rope_theta": 5e5}, "contradicts"),
    "attention bias without tensors": ({"attention_bias": True}, "self_attn.q_proj.bias is missing"),
}


@pytest.mark.parametrize("name", CONFIG_FAULTS)
def test_contract_refuses_configs(name: str) -> None:
    changes, message = CONFIG_FAULTS[name]
    head = random_eagle3()
    head.config.update(changes)
    assert message in "\n".join(problems(head))


def test_full_vocabulary_has_no_map() -> None:
    head = random_eagle3(draft_vocab=320)
    assert "d2t" not in head.tensors
    head.tensors["d2t"] = torch.zeros(320, dtype=torch.int64)
    assert any("d2t is a tensor that vLLM does not know" in problem for problem in problems(head))


def test_head_is_held_against_its_target() -> None:
    config = random_eagle3().config
    target = {"vocab_size": 320, "hidden_size": 64, "num_hidden_layers": 4, "max_position_embeddings": 512}
    assert eagle3_contract.check_target(config, target) == []
    assert eagle3_contract.check_target(config, {"text_config": target}) == []
    for key, value, message in (
        ("vocab_size", 384, "vocab_size is 320"),
        ("hidden_size", 128, "width 64"),
        ("num_hidden_layers", 3, "exceed the target's 3 layers"),
        ("max_position_embeddings", 4096, "max_position_embeddings is 512"),
    ):
        assert message in eagle3_contract.check_target(config, {**target, key: value})[0]


@pytest.mark.parametrize("flag", eagle3_contract.EAGLE3_FLAGS)
def test_flags_reach_vllm_through_the_speculators_form(flag: str) -> None:
    head = random_eagle3(**{flag: True})
    assert head.speculators_config is not None
    form = {**head.speculators_config, "speculators_config": {"proposal_methods": [{"speculative_tokens": 3}]}}
    form["speculators_config"]["verifier"] = {"name_or_path": "someone/model"}
    assert eagle3_contract.check_speculators(form, head.config) == []
    dropped = {key: value for key, value in form.items() if key != flag}
    found = eagle3_contract.check_speculators(dropped, head.config)
    if flag == "norm_before_residual":  # vLLM takes it for true here, unlike in the plain form
        assert found == []
        assert eagle3_contract.check_speculators(dropped, random_eagle3().config)[0].startswith(
            "norm_before_residual reaches"
        )
    else:
        assert found[0].startswith(f"{flag} reaches vLLM as False")


def test_speculators_form_needs_target_and_count() -> None:
    head = random_eagle3()
    assert head.speculators_config is not None
    found = "\n".join(eagle3_contract.check_speculators(head.speculators_config, head.config))
    assert "speculative_tokens is missing" in found
    assert "verifier.name_or_path is missing" in found


def test_paths_and_versions() -> None:
    assert contract.path_problem("eagle3", "runs/eagle3-a/export") is None
    assert "for eagle3, not draft_model" in (contract.path_problem("draft_model", "runs/EAGLE3-a/export") or "")
    assert contract.version_problem("eagle3", "0.33.0") is None
    assert contract.version_problem("medusa", "0.33.0") is None  # through the plugin
    native = contract.version_problem("medusa (native)", "0.33.0") or ""
    assert "does not load medusa" in native and "plugin" in native
    assert contract.version_problem("mlp_speculator (native)", "0.32.0") is not None
    assert contract.version_problem("eagle3", "0.40.1") is None
    assert contract.cpu_head_dim_problem({"hidden_size": 64, "num_attention_heads": 4, "head_dim": 32}) is None
    assert "head_dim 16" in (contract.cpu_head_dim_problem({"hidden_size": 64, "num_attention_heads": 4}) or "")


def test_plain_export(tmp_path: Path) -> None:
    head = random_eagle3()
    golden = {"token_ids": torch.arange(5)}
    where = write(head, tmp_path / "out", golden=golden)
    assert sorted(path.name for path in where.glob("*.safetensors")) == ["model.safetensors"]  # all that vLLM loads
    weights = load_file(where / "model.safetensors")
    assert set(weights) == set(head.tensors)
    assert all(torch.equal(weights[name], head.tensors[name]) for name in weights)
    assert json.loads((where / "config.json").read_text()) == head.config
    assert torch.equal(load_file(where / GOLDEN_FILE)["token_ids"], golden["token_ids"])
    command = (
        "vllm serve someone/model --speculative-config "
        f'\'{{"method": "eagle3", "model": "{where}", "num_speculative_tokens": 3}}\''
    )
    assert f"\n{command}\n" in (where / "README.md").read_text()
    assert command in (where / "README.md").read_text()
    assert read_export(where)["provenance"] == {"run": "test"}


def test_speculators_export_names_target_and_count(tmp_path: Path) -> None:
    target = tmp_path / "target"
    target.mkdir()
    head = random_eagle3()
    where = write(head, tmp_path / "out", format="speculators", target_id=str(target), num_draft_tokens=5)
    inner = json.loads((where / "config.json").read_text())["speculators_config"]
    assert inner["verifier"]["name_or_path"] == str(target)
    assert inner["proposal_methods"][0]["speculative_tokens"] == 5
    assert f"\nvllm serve {where}\n" in (where / "README.md").read_text()
    names = set(load_file(where / "model.safetensors"))
    assert "layers.0.hidden_norm.weight" in names
    assert not any(name.startswith("midlayer.") for name in names)


def test_views_and_shared_tensors_are_written_whole_and_small(tmp_path: Path) -> None:
    head = random_eagle3(draft_vocab=320)
    table = torch.randn(100_000, 64)
    head.tensors["lm_head.weight"] = table[:320]  # a view of something large
    head.tensors["embed_tokens.weight"] = table[:320]  # and shared
    where = write(head, tmp_path / "out")
    assert (where / "model.safetensors").stat().st_size < 1_000_000
    assert torch.equal(load_file(where / "model.safetensors")["embed_tokens.weight"], table[:320])


def test_refused_head_leaves_nothing(tmp_path: Path) -> None:
    head = random_eagle3()
    head.tensors["fc.weight"] = torch.empty(0)
    with pytest.raises(UserError, match=r"fc\.weight is empty"):
        write(head, tmp_path / "out")
    assert list(tmp_path.iterdir()) == []


def test_only_exports_are_replaced(tmp_path: Path) -> None:
    where = write(random_eagle3(seed=1), tmp_path / "out")
    assert is_export(where)
    again = random_eagle3(seed=2)
    write(again, where)
    assert torch.equal(load_file(where / "model.safetensors")["fc.weight"], again.tensors["fc.weight"])
    assert [path.name for path in tmp_path.iterdir()] == ["out"]

    foreign = tmp_path / "thesis"
    foreign.mkdir()
    (foreign / "chapter1.txt").write_text("years of work")
    with pytest.raises(UserError, match="not an export"):
        write(again, foreign)
    assert (foreign / "chapter1.txt").read_text() == "years of work"
    with pytest.raises(UserError, match="not an export"):
        read_export(foreign)


def test_speculators_format_needs_its_form(tmp_path: Path) -> None:
    head = random_eagle3()
    bare = ServingCheckpoint(head.kind, head.method, head.config, head.tensors)
    with pytest.raises(UserError, match=r"export\.formats"):
        write(bare, tmp_path / "out", format="speculators")
