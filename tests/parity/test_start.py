"""Training that goes on from a trained head: the head decides what it is, the recipe how it is trained."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import load_file, save_file

from spec_train.batch import FeatureSpec
from spec_train.data.batches import build_batch
from spec_train.errors import UserError
from spec_train.pipeline import run_all
from spec_train.recipe import dump_recipe, load_recipe
from spec_train.run import Run
from spec_train.serving.export import export
from spec_train.speculators import load_speculator, options_class, speculator_class
from spec_train.speculators.base import Speculator
from spec_train.speculators.mtp import Mtp, MtpOptions
from spec_train.speculators.start import start_head
from spec_train.stages.common import documents_of
from spec_train.stages.evaluate import best_checkpoint
from spec_train.target import TargetModel
from spec_train.training.acceptance import renewal_counts
from tests.chain_heads import answers, fit
from tests.integration.test_run import write_recipe
from tests.mtp_targets import mtp_target
from tests.published import METHOD, random_tensors, write_head
from tests.tiny import tiny_model

IDS = torch.arange(320)
K = 3


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> TargetModel:
    return TargetModel.load(str(tiny_model("llama", tmp_path_factory.mktemp("target"))))


def written(folder: Path, layout: str, target: TargetModel, **changes: Any) -> Path:
    tensors = random_tensors(layout, target.embedding.weight)
    return write_head(folder / layout.replace(" ", "-"), layout, target.name, tensors, **changes)


def options_of(kind: str, folder: Path, **options: Any) -> Any:
    return options_class(kind)(type=kind, start_from=str(folder), **options)


def exported(head: Speculator, target: TargetModel, folder: Path) -> Path:
    served = head.serving()
    form = "stitched" if served.stitched else "plain"
    settings: dict[str, Any] = {"target_id": target.name, "num_draft_tokens": K, "golden": None, "provenance": {}}
    return export(served, folder, format=form, **settings)


def acceptance(head: Speculator, batch: Any) -> float:
    counts = renewal_counts(head.draft_hits(batch, K), K)
    return 1 + counts.accepted / counts.steps


@pytest.mark.parametrize("layout", ["eagle3", "specforge", "speculators", "eagle1", "ibm", "arctic", "medusa"])
def test_a_published_head_trains_on_and_serves_again(layout: str, target: TargetModel, tmp_path: Path) -> None:
    """It begins as the very head; on the target's own answers its acceptance rises; its export reads back the same."""
    folder, kind = written(tmp_path, layout, target), METHOD.get(layout, layout)
    before = load_speculator(folder, target)
    head = start_head(options_of(kind, folder, step_decay=1.0), target, IDS)
    assert head.state_dict().keys() == before.state_dict().keys()
    assert all(torch.equal(value, before.state_dict()[name]) for name, value in head.state_dict().items())
    assert all(parameter.requires_grad and parameter.dtype == torch.float32 for parameter in head.parameters())
    batch = answers(target, head)
    start = acceptance(head, batch)
    assert start == acceptance(before, batch)
    fit(head, batch, 40, rate=1e-2)
    assert acceptance(head, batch) > start + 0.5
    again = load_speculator(exported(head.eval(), target, tmp_path / "again"), target)
    assert all(torch.equal(value, again.state_dict()[name]) for name, value in head.state_dict().items())
    if head.drafted_ids() is not None:
        assert torch.equal(head.drafted_ids(), load_speculator(folder, target).drafted_ids())  # the map is kept


@pytest.mark.parametrize("kind", ["eagle3", "peagle", "eagle1", "mlp", "medusa", "mtp"])
@pytest.mark.parametrize("form", ["checkpoint", "export"])
def test_our_own_heads_go_on(kind: str, form: str, target: TargetModel, tmp_path: Path) -> None:
    """A checkpoint is taken in float32 whatever the target's dtype, an export with what its files hold."""
    ids = torch.arange(0, 320, 2) if kind in ("eagle3", "peagle", "mlp", "medusa") else IDS
    first = speculator_class(kind).from_recipe(options_class(kind)(type=kind), target, ids, seed=1)
    torch.manual_seed(0)
    with torch.no_grad():
        for parameter in first.parameters():
            parameter.add_(0.01 * torch.randn_like(parameter))
    folder = tmp_path / "first"
    beside = target
    if form == "checkpoint":
        folder.mkdir()
        (folder / "speculator.json").write_text(json.dumps({"type": kind, "config": asdict(first.config)}))
        save_file({n: v.contiguous().clone() for n, v in first.state_dict().items()}, folder / "model.safetensors")
        beside = TargetModel.load(target.name, dtype=torch.bfloat16)
    else:
        exported(first.eval(), target, folder)
    head = start_head(options_of(kind, folder, loss="lk"), beside, IDS)
    assert head.config.loss == "lk"
    own = head.state_dict()
    assert own.keys() == first.state_dict().keys()
    assert all(torch.equal(value, own[name]) for name, value in first.state_dict().items())
    assert head.feature_spec == first.feature_spec
    assert head.feature_spec == type(head).required_features(options_of(kind, folder), beside)


def test_an_mtp_layer_inside_a_whole_model_goes_on(tmp_path: Path) -> None:
    """From our export, which is a copy of the target, or from a checkpoint that ships one."""
    target = TargetModel.load(str(mtp_target("qwen3_5", tmp_path)))
    shipped = Mtp.from_recipe(MtpOptions(type="mtp", init="target_head"), target, IDS, seed=0)
    for folder in (exported(shipped, target, tmp_path / "copy"), Path(target.name)):
        head = start_head(options_of("mtp", folder, ttt_steps=2), target, IDS)
        assert (head.config.layout, head.config.stitched, head.num_depths) == ("qwen3_5", True, 2)
        assert all(torch.equal(value, shipped.state_dict()[name]) for name, value in head.state_dict().items())


@pytest.mark.parametrize(
    ("layout", "options", "message"),
    [
        ("specforge", {"aux_layer_ids": [1, 2, 4]}, r"speculator.aux_layer_ids is \[1, 2, 4\], but .* has \[1, 3, 4\]"),
        ("specforge", {"draft_vocab_size": 100}, r"speculator.draft_vocab_size is 100, but .* has 240"),
        ("specforge", {"num_layers": 2}, r"speculator.num_layers is 2, but .* has 1"),
        ("speculators", {"norm_before_residual": False}, r"speculator.norm_before_residual is False, but .* has True"),
        ("ibm", {"num_heads": 4}, r"speculator.num_heads is 4, but .* has 3"),
        ("ibm", {"scale_input": False}, r"speculator.scale_input is False, but .* has True"),
        ("medusa", {"shared_head": True}, r"speculator.shared_head is True, but .* has False"),
        ("eagle1", {"num_layers": 2}, r"speculator.num_layers is 2, but .* has 1"),
    ],
    ids=str,
)
def test_a_recipe_that_contradicts_the_head_is_refused(
    layout: str, options: dict[str, Any], message: str, target: TargetModel, tmp_path: Path
) -> None:
    folder, kind = written(tmp_path, layout, target), METHOD.get(layout, layout)
    with pytest.raises(UserError, match=message) as error:
        start_head(options_of(kind, folder, **options), target, IDS)
    assert "\n" not in str(error.value)


def test_a_start_of_another_kind_or_place_is_refused(target: TargetModel, tmp_path: Path) -> None:
    folder = written(tmp_path, "eagle1", target)
    with pytest.raises(UserError, match=r"speculator.start_from .* holds a eagle1, speculator.type is eagle3"):
        start_head(options_of("eagle3", folder), target, IDS)
    with pytest.raises(UserError, match=r"speculator.start_from .*/none: no such folder"):
        start_head(options_of("eagle1", tmp_path / "none"), target, IDS)
    other = TargetModel.load(str(tiny_model("llama", tmp_path, hidden_size=96)))
    with pytest.raises(UserError, match="is not the embedding of"):
        start_head(options_of("eagle1", folder), other, IDS)
    with pytest.raises(ValueError, match="init says how a fresh one begins"):
        options_of("eagle3", folder, init="random")


# ------------------------------------------------------------------ a whole run
def test_a_run_shows_the_head_before_and_after(tmp_path: Path) -> None:
    """The estimate at step 0, the row of the start in the evaluation, its files in the manifest, an export after it."""
    path = write_recipe(tmp_path)
    fields = yaml.safe_load(path.read_text())
    target = TargetModel.load(fields["target"]["model"])
    folder = written(tmp_path, "specforge", target)
    fields["speculator"] = {"type": "eagle3", "ttt_steps": 3, "start_from": str(folder)}
    path.write_text(yaml.safe_dump(fields))
    recipe = load_recipe(path)
    run_all(recipe, force=set())
    directory = Run(recipe).directory
    lines = [json.loads(line) for line in (directory / "train" / "log.jsonl").read_text().splitlines()]
    result = json.loads((directory / "train" / "result.json").read_text())
    assert lines[0]["step"] == 0
    assert lines[0]["renewal@3"] == result["start_value"]
    (document,) = documents_of(Run(recipe), "validation")  # what training is judged on
    text = target.fill_features(build_batch([document], [[0]]), FeatureSpec((1, 3, 4), True), torch.float32)
    untrained = start_head(recipe.speculator, target, IDS)
    trained = load_speculator(best_checkpoint(Run(recipe)), target)
    for head, value in ((untrained, result["start_value"]), (trained, result["best_value"])):
        assert renewal_counts(head.draft_hits(text, 3), 3).mean_acceptance_length == pytest.approx(value)
    start = json.loads((directory / "eval" / "held_out-eagle3_start-k3-t0.json").read_text())
    after = json.loads((directory / "eval" / "held_out-eagle3-k3-t0.json").read_text())
    for row in (start, after):
        assert row["mean_acceptance_length"] == pytest.approx(row["estimate"]["renewal"])
    assert start["lossless"]["identical"] == after["lossless"]["identical"] == 4
    manifest = json.loads((directory / "train" / "manifest.json").read_text())
    assert manifest["inputs"]["start"]["name"] == str(folder)
    assert len(manifest["inputs"]["start"]["weights"]) == len(manifest["inputs"]["start"]["config.json"]) == 64
    served = json.loads((directory / "export" / "plain" / "config.json").read_text())
    assert served["eagle_aux_hidden_state_layer_ids"] == [1, 3, 4]
    d2t = load_file(directory / "export" / "plain" / "model.safetensors")["d2t"]
    assert torch.equal(d2t, load_file(folder / "model.safetensors")["d2t"])

    # The resolved recipe leaves to the head what the recipe did, and reads back; another head is another run.
    resolved = yaml.safe_load(dump_recipe(recipe))["speculator"]
    assert {"num_layers", "aux_layer_ids", "draft_vocab_size", "init"}.isdisjoint(resolved)
    (tmp_path / "resolved.yaml").write_text(dump_recipe(recipe))
    assert load_recipe(tmp_path / "resolved.yaml") == recipe
    tensors = load_file(folder / "model.safetensors")
    save_file({**tensors, "norm.weight": tensors["norm.weight"] + 1}, folder / "model.safetensors")
    with pytest.raises(UserError, match=r"stage (features|train) .*start"):
        run_all(recipe, force=set())
