"""Write what vLLM loads, in every format that the recipe names."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from spec_train.manifest import Stage, file_digests, read_manifest, weights_fingerprint
from spec_train.run import Run
from spec_train.serving.export import EXPORT_FILE
from spec_train.speculators import load_speculator
from spec_train.stages.common import make_stage
from spec_train.stages.evaluate import best_checkpoint
from spec_train.stages.inputs import data_provenance, export_inputs

NOT_TRAINING = ("best_checkpoint", "last_checkpoint", "weights_sha256")  # of what training left: places and identity
GOLDEN_TEXT = "The quick brown fox jumps over the lazy dog, and the dog does not mind."


def export(run: Run, force: bool) -> None:
    """Make the stage where needed. What it made are the files of every format but for provenance and README.md, which
    name places and times; weights count by their fingerprint, since a stitched copy of the target may be huge, and by
    the checkpoint that they were written from."""
    recipe = run.recipe

    def work(stage: Stage) -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]]:
        import torch

        from spec_train.serving.contract import serve_command
        from spec_train.serving.export import available_formats, read_export
        from spec_train.serving.export import export as write_export
        from spec_train.serving.facts import card_notes, public_recipe
        from spec_train.serving.golden import make_golden

        checkpoint = best_checkpoint(run)
        target = run.target("float32")
        head = load_speculator(checkpoint, target).float()
        ids = run.tokenizer(GOLDEN_TEXT, add_special_tokens=False)["input_ids"]
        golden = make_golden(head, target, ids)
        train = read_manifest(run.directory / "train")
        provenance = {
            "recipe": public_recipe(recipe.model_dump(mode="json")),
            "checkpoint": checkpoint.name,
            "train": train["outputs_sha256"],
            "weights_sha256": train["outputs"]["weights_sha256"],
            "training": {key: train["outputs"][key] for key in train["outputs"] if key not in NOT_TRAINING},
            "data": data_provenance(run),
            "notes": card_notes(recipe.hub),
            "versions": train["versions"],
            "git_revision": train["git_revision"],
            "target": run.target_identity,
            "torch": torch.__version__,
            **({} if run.date is None else {"date": run.date}),
        }
        commands = {}
        made: dict[str, Any] = {"weights_sha256": train["outputs"]["weights_sha256"]}
        serving = head.serving()
        for form in recipe.export.formats or available_formats(serving):
            folder = write_export(
                serving,
                stage.directory / form,
                format=form,
                target_id=run.target_path,
                num_draft_tokens=recipe.export.verify_num_draft_tokens,
                golden=golden,
                provenance=provenance,
                tokenizer=run.tokenizer if serving.method == "draft_model" else None,
            )
            k = recipe.export.verify_num_draft_tokens
            commands[form] = serve_command(folder, run.target_path, read_export(folder), k)
            made[form] = _made(folder, read_export(folder))
        return {"serve": commands}, {}, made

    make_stage(run, "export", export_inputs, force, work)


def _made(folder: Path, description: dict[str, Any]) -> dict[str, Any]:
    """What later stages depend on in one format."""
    files = [path for path in folder.rglob("*") if path.is_file() and path.suffix in (".json", ".jinja", ".txt")]
    about = {key: value for key, value in description.items() if key not in ("provenance", "version")}
    return {
        **file_digests(path for path in files if path.name != EXPORT_FILE),
        EXPORT_FILE: about,
        "golden": weights_fingerprint(str(folder / "golden")),
        "weights": weights_fingerprint(str(folder)),
    }
