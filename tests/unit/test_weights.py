"""Files that are not whole: a tensor that is missing, misshapen or too many, and a vocabulary map that is not sound, in
a target, a model that a draft starts from, a training checkpoint and an export. All are refused by name; nothing is
drawn at random, and nothing reads the wrong rows."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from spec_train.errors import UserError
from spec_train.serving.export import export
from spec_train.speculators import load_speculator, speculator_class
from spec_train.speculators.base import Speculator
from spec_train.speculators.draft_start import start_from_model
from spec_train.target import TargetModel
from spec_train.training.checkpoint import load_weights, write_speculator
from tests import families
from tests.tiny import VOCAB_SIZE, tiny_model

OPTIONS: dict[str, dict[str, Any]] = {
    "eagle3": {"draft_vocab_size": 96},
    "eagle1": {},
    "peagle": {"draft_vocab_size": 96, "num_layers": 1},
    "mtp": {},
    "mlp": {"tie_weights": False, "draft_vocab_size": 96},
    "medusa": {"draft_vocab_size": 96},
    "draft_lm": {"start_layers": 1, "train_embeddings": True},
    "pard": {"start_layers": 1, "train_embeddings": True},
}
SOME_IDS = torch.arange(96) * 3 + 5
Change = Callable[[dict[str, Tensor]], object]


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> TargetModel:
    return TargetModel.load(str(tiny_model("llama", tmp_path_factory.mktemp("target"))))


@pytest.fixture(scope="module")
def heads(target: TargetModel) -> dict[str, Speculator]:
    """A fresh speculator of every method."""
    made = {}
    for kind, options in OPTIONS.items():
        cls = speculator_class(kind)
        ids = SOME_IDS if "draft_vocab_size" in options else torch.arange(VOCAB_SIZE)
        made[kind] = cls.from_recipe(cls.options(type=kind, **options), target, ids, 0)
    return made


def write_checkpoint(head: Speculator, folder: Path) -> Path:
    folder.mkdir()
    write_speculator(folder, head.state_dict(), {"type": head.kind, "config": asdict(head.config)})
    return folder


def write_export(head: Speculator, folder: Path, target: TargetModel, *, published: bool = False) -> Path:
    """An export of ours; `published`: as another tool would leave it, without a list of what must be there."""
    export(
        head.serving(), folder, format="plain", target_id=target.name, num_draft_tokens=2, golden=None, provenance={}
    )
    if published:
        (folder / "export.json").unlink()
    return folder


class Edited:
    """A checkpoint whose tensors are changed one way after another, each time from what they were."""

    def __init__(self, folder: Path) -> None:
        self.file = folder / "model.safetensors"
        self.tensors = load_file(self.file)

    def write(self, change: Change) -> None:
        tensors = {name: value.clone() for name, value in self.tensors.items()}
        change(tensors)
        save_file(tensors, self.file, metadata={"format": "pt"})


def faults_of(tensors: dict[str, Tensor], extra: str = "one.too.many") -> Iterator[tuple[str, Change]]:
    """(the name that a refusal must hold, a change): each tensor left out, given a row more, and one too many."""
    for name, value in tensors.items():
        yield name, lambda held, name=name: held.pop(name)
        yield name, lambda held, name=name, value=value: held.update({name: torch.cat([value, value[:1]])})
    yield extra, lambda held: held.update({extra: torch.ones(2)})


# ------------------------------------------------------------------ heads and drafts
@pytest.mark.parametrize("kind", OPTIONS)
def test_a_checkpoint_that_is_not_whole(
    kind: str, heads: dict[str, Speculator], target: TargetModel, tmp_path: Path
) -> None:
    folder = write_checkpoint(heads[kind], tmp_path / "step-000001")
    assert load_speculator(folder, target).kind == kind
    edited = Edited(folder)
    for name, change in faults_of(edited.tensors):
        edited.write(change)
        with pytest.raises(UserError) as refused:
            load_speculator(folder, target)
        assert name.removeprefix("heads.") in str(refused.value)
        assert "\n" not in str(refused.value)


@pytest.mark.parametrize("kind", OPTIONS)
@pytest.mark.parametrize("published", [False, True])
def test_an_export_that_is_not_whole(
    kind: str, published: bool, heads: dict[str, Speculator], target: TargetModel, tmp_path: Path
) -> None:
    folder = write_export(heads[kind], tmp_path / "out", target, published=published)
    assert load_speculator(folder, target).kind == kind
    edited = Edited(folder)
    # Those of a whole target may stand beside an MTP head.
    extra = "model.mtp_layers.0.one.too.many" if kind == "mtp" else "one.too.many"
    for name, change in faults_of(edited.tensors, extra):
        if name in ("t2d", "d2t", "token_map") and published:
            continue  # see the maps below; t2d may be missing, engines do not read it
        edited.write(change)
        with pytest.raises(UserError) as refused:
            load_speculator(folder, target)
        # Some readers speak of a tensor by their own name for it.
        own = re.sub(r"^midlayer\.|^model\.mtp_layers\.0\.|^model\.", "", name)
        assert own in str(refused.value)
        assert "\n" not in str(refused.value)


@pytest.mark.parametrize("kind", OPTIONS)
def test_damaged_files_are_refused(
    kind: str, heads: dict[str, Speculator], target: TargetModel, tmp_path: Path
) -> None:
    folder = write_checkpoint(heads[kind], tmp_path / "step-000001")
    (folder / "model.safetensors").write_bytes((folder / "model.safetensors").read_bytes()[:-100])
    with pytest.raises(UserError, match=r"model\.safetensors: cannot be read"):
        load_speculator(folder, target)
    (folder / "model.safetensors").unlink()
    with pytest.raises(UserError, match=r"has no model\.safetensors"):
        load_speculator(folder, target)


def test_adapters_that_are_not_whole(target: TargetModel, tmp_path: Path) -> None:
    cls = speculator_class("draft_lm")
    options = cls.options(type="draft_lm", start_layers=1, lora={"rank": 2})  # type: ignore[call-arg]
    folder = write_checkpoint(cls.from_recipe(options, target, torch.arange(VOCAB_SIZE), 0), tmp_path / "step-000001")
    edited = Edited(folder)
    for name, change in faults_of(edited.tensors):
        if ".lora_" in name:
            edited.write(change)
            with pytest.raises(UserError, match=re.escape(name)):
                load_speculator(folder, target)
    stray = "decoder.layers.0.input_layernorm.lora_A.default.weight"
    edited.write(lambda held: held.update({stray: torch.ones(2, 2)}))
    with pytest.raises(UserError, match=re.escape(stray)):
        load_speculator(folder, target)


# ------------------------------------------------------------------ maps between the vocabularies
def moved(value: int) -> Change:
    """The map's sixth entry made to mean the target id `value`."""

    def change(held: dict[str, Tensor]) -> None:
        for name in ("heads.d2t", "d2t"):
            if name in held:
                held[name][5] = value - 5
        if "token_map" in held:
            held["token_map"][5] = value

    return change


def recast(make: Callable[[Tensor], Tensor]) -> Change:
    """The map in another form."""

    def change(held: dict[str, Tensor]) -> None:
        for name in ("heads.d2t", "d2t", "token_map"):
            if name in held:
                held[name] = make(held[name])

    return change


MAP_FAULTS: dict[str, Change] = {
    "negative": moved(-1),
    "repeated": moved(int(SOME_IDS[4])),
    "beyond": moved(VOCAB_SIZE),
    "descending": recast(lambda held: held.flip(0)),
    "rounded": recast(lambda held: held.to(torch.bfloat16)),
    "narrow": recast(lambda held: held.to(torch.int32)),
    "a table": recast(lambda held: held[:, None]),
}


@pytest.mark.parametrize("fault", MAP_FAULTS)
@pytest.mark.parametrize("kind", ["eagle3", "peagle", "mlp", "medusa"])
def test_maps_that_are_not_sound(
    kind: str, fault: str, heads: dict[str, Speculator], target: TargetModel, tmp_path: Path
) -> None:
    checkpoint = write_checkpoint(heads[kind], tmp_path / "step-000001")
    exported = write_export(heads[kind], tmp_path / "out", target)
    for folder in (checkpoint, exported):
        edited = Edited(folder)
        edited.write(MAP_FAULTS[fault])
        with pytest.raises(UserError, match=r"d2t|token_map"):
            load_speculator(folder, target)
    served = heads[kind].serving()
    tensors = {name: value.clone() for name, value in served.tensors.items()}
    MAP_FAULTS[fault](tensors)
    served.tensors.update(tensors)
    with pytest.raises(UserError, match=r"cannot export .*d2t"):
        export(
            served, tmp_path / "new", format="plain", target_id=target.name, num_draft_tokens=2, golden=None,
            provenance={},
        )  # fmt: skip
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize("kind", ["eagle3", "peagle", "mlp", "medusa"])
def test_absolute_ids_are_not_taken_for_offsets(
    kind: str, heads: dict[str, Speculator], target: TargetModel, tmp_path: Path
) -> None:
    folder = write_checkpoint(heads[kind], tmp_path / "step-000001")
    edited = Edited(folder)
    edited.write(recast(lambda held: held + torch.arange(96)))
    with pytest.raises(UserError, match="absolute ids"):
        load_speculator(folder, target)
    edited.write(recast(lambda held: held[:-1]))
    with pytest.raises(UserError, match="d2t maps 95 tokens, the draft vocabulary has 96"):
        load_speculator(folder, target)


@pytest.mark.parametrize("token", [99999, VOCAB_SIZE, -1, 3.5, "7", True])
@pytest.mark.parametrize("kind", ["peagle", "pard"])
def test_mask_tokens_that_the_target_lacks(
    kind: str, token: object, heads: dict[str, Speculator], target: TargetModel, tmp_path: Path
) -> None:
    checkpoint = write_checkpoint(heads[kind], tmp_path / "step-000001")
    saved = json.loads((checkpoint / "speculator.json").read_text())
    saved["config"]["mask_token_id"] = token
    (checkpoint / "speculator.json").write_text(json.dumps(saved))
    exported = write_export(heads[kind], tmp_path / "out", target)
    config = {**json.loads((exported / "config.json").read_text()), "pard_token": token}
    (exported / "config.json").write_text(json.dumps(config))
    for folder in (checkpoint, exported):
        with pytest.raises(UserError, match=rf"mask_token_id {token!r} is not an id of the target"):
            load_speculator(folder, target)
    served = heads[kind].serving()
    served.config["pard_token"] = token
    with pytest.raises(UserError, match=r"cannot export .*mask_token_id"):
        export(
            served, tmp_path / "new", format="plain", target_id=target.name, num_draft_tokens=2, golden=None,
            provenance={},
        )  # fmt: skip


@pytest.mark.parametrize("size", [0, VOCAB_SIZE + 1, "many"])
def test_drafted_ids_that_the_target_lacks(
    size: object, heads: dict[str, Speculator], target: TargetModel, tmp_path: Path
) -> None:
    folder = write_checkpoint(heads["draft_lm"], tmp_path / "step-000001")
    saved = json.loads((folder / "speculator.json").read_text())
    saved["config"]["real_vocab_size"] = size
    (folder / "speculator.json").write_text(json.dumps(saved))
    with pytest.raises(UserError, match="drafts ids below"):
        load_speculator(folder, target)


def test_training_does_not_go_on_with_another_map(
    heads: dict[str, Speculator], target: TargetModel, tmp_path: Path
) -> None:
    """What is looked up by target id is built from the run's own map; one read from a file would disagree with it."""
    folder = write_checkpoint(heads["eagle3"], tmp_path / "step-000001")
    load_weights(heads["eagle3"], folder)
    Edited(folder).write(moved(int(SOME_IDS[5]) + 1))
    with pytest.raises(UserError, match="d2t maps to other tokens"):
        load_weights(heads["eagle3"], folder)


# ------------------------------------------------------------------ targets and models that drafts start from
def refusal(folder: Path) -> str:
    with pytest.raises(UserError) as refused:
        TargetModel.load(str(folder))
    assert "\n" not in str(refused.value)
    return str(refused.value)


@pytest.mark.parametrize("kind", ["llama", "qwen3_5", "gemma3", "gpt_neox"])
def test_a_target_that_is_not_whole(kind: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Under the family's own names, a text model inside a multimodal one included, and without a table in the log."""
    folder = tiny_model(kind, tmp_path)
    edited = Edited(folder)
    name = next(
        name for name in edited.tensors if re.search(r"layers\.1\.mlp\.(down_proj|dense_4h_to_h)\.weight", name)
    )
    end = name[name.index("layers.1.") :]
    edited.write(lambda held: held.pop(name))
    assert f"{end}, which would be drawn at random" in refusal(folder)
    edited.write(lambda held: held.update({name: held[name][:-1].clone()}))
    assert re.search(rf"{end} has shape \[\d+, 128\], config\.json asks for \[\d+, 128\]", refusal(folder))
    later = name.replace("layers.1.", "layers.4.")
    for extra in (f"{name.removesuffix('weight')}scale", name.replace("mlp.", "mlp.norm_"), later):
        edited.write(lambda held, extra=extra: held.update({extra: torch.ones(2)}))
        assert f"{extra[extra.index('layers.') :]}, for which its config.json has no place" in refusal(folder)
    assert "LOAD REPORT" not in caplog.text


def test_an_output_head_is_tied_only_where_the_config_says_so(tmp_path: Path) -> None:
    folder = tiny_model("llama", tmp_path)
    edited = Edited(folder)
    edited.write(lambda held: held.pop("lm_head.weight"))
    assert "lacks lm_head.weight, which would be drawn at random; " in refusal(folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "tie_word_embeddings": True}))
    tied = TargetModel.load(str(folder))
    assert tied.lm_head.weight.data_ptr() == tied.embedding.weight.data_ptr()
    edited.write(lambda held: held.pop("model.embed_tokens.weight"))  # the other name of the same tensor
    assert torch.equal(TargetModel.load(str(folder)).embedding.weight, edited.tensors["lm_head.weight"])
    edited.write(lambda held: [held.pop(name) for name in ("lm_head.weight", "model.embed_tokens.weight")])
    assert "lacks lm_head.weight, model.embed_tokens.weight, which" in refusal(folder)
    edited.write(lambda held: None)  # both, and they differ: both are kept, as in Transformers and vLLM
    assert torch.equal(TargetModel.load(str(folder)).lm_head.weight, edited.tensors["lm_head.weight"])
    nested = tiny_model("gemma3", tmp_path, tie_word_embeddings=True)
    assert not any("lm_head" in name for name in load_file(nested / "model.safetensors"))
    config = json.loads((nested / "config.json").read_text())
    for one in (config, config["text_config"]):
        one["tie_word_embeddings"] = True
    (nested / "config.json").write_text(json.dumps(config))
    TargetModel.load(str(nested))
    for one in (config, config["text_config"]):
        one["tie_word_embeddings"] = False
    (nested / "config.json").write_text(json.dumps(config))
    assert "lacks lm_head.weight" in refusal(nested)


UNREAD = {
    "MTP of its own": ["mtp.fc.weight", "model.mtp_layers.0.input_proj.weight"],
    "MTP as a further layer": ["model.layers.4.eh_proj.weight", "model.layers.4.mlp.down_proj.weight"],
    "a tower": ["model.visual.blocks.0.attn.weight", "vision_tower.patch.weight", "audio_tower.x.weight"],
    "old buffers": ["model.layers.0.self_attn.rotary_emb.inv_freq"],
    "another head": ["score.weight", "v_head.summary.weight"],
}


@pytest.mark.parametrize("names", UNREAD.values(), ids=list(UNREAD))
def test_what_no_text_goes_through_is_passed_over(names: list[str], target: TargetModel, tmp_path: Path) -> None:
    folder = tmp_path / "copy"
    shutil.copytree(target.name, folder)
    Edited(folder).write(lambda held: held.update({name: torch.ones(3) for name in names}))
    loaded = TargetModel.load(str(folder))
    assert torch.equal(loaded.lm_head.weight, target.lm_head.weight)


def test_experts_and_files_that_are_not_whole(tmp_path: Path) -> None:
    families.qwen3_moe().save_pretrained(tmp_path)
    edited = Edited(tmp_path)
    name = "model.layers.0.mlp.experts.1.gate_proj.weight"
    edited.write(lambda held: held.pop(name))
    assert "model.layers.0.mlp.experts.gate_up_proj cannot be put together" in refusal(tmp_path)
    edited.write(lambda held: [held.pop(name.replace("gate", part)) for part in ("gate", "up", "down")])
    assert "model.layers.0.mlp.experts.down_proj has shape" in refusal(tmp_path)
    edited.file.write_bytes(edited.file.read_bytes()[:-100])
    assert "a weight file is damaged" in refusal(tmp_path)


def test_a_start_model_that_is_not_whole(target: TargetModel, tmp_path: Path) -> None:
    folder = tiny_model("llama", tmp_path, seed=1, num_hidden_layers=2)
    assert start_from_model(str(folder), target).config.num_hidden_layers == 2
    edited = Edited(folder)
    name = "model.layers.1.self_attn.o_proj.weight"
    for change in (
        lambda held: held.pop(name),
        lambda held: held.update({name: held[name][:-1].clone()}),
        lambda held: held.update({name.replace("weight", "bias"): torch.ones(64)}),
    ):
        edited.write(change)
        with pytest.raises(UserError, match=r"^speculator\.start_model .*layers\.1\.self_attn\.o_proj\."):
            start_from_model(str(folder), target)
