"""Write what vLLM loads, in every format that the recipe names."""

from __future__ import annotations

from typing import Any

from spec_train.manifest import Stage, read_manifest
from spec_train.run import Run
from spec_train.speculators import load_speculator
from spec_train.stages.common import make_stage
from spec_train.stages.evaluate import best_checkpoint

GOLDEN_TEXT = "The quick brown fox jumps over the lazy dog, and the dog does not mind."


def export(run: Run, force: bool) -> None:
    """Make the stage where needed."""
    recipe = run.recipe
    inputs = {
        "train": run.made_from("train"),
        "formats": recipe.export.formats,
        "num_draft_tokens": recipe.export.verify_num_draft_tokens,
        "target": run.target_path,
    }

    def work(stage: Stage) -> tuple[dict[str, Any], dict[str, Any]]:
        import torch

        from spec_train.serving.export import available_formats, read_export
        from spec_train.serving.export import export as write_export
        from spec_train.serving.golden import make_golden

        checkpoint = best_checkpoint(run)
        target = run.target("float32")
        head = load_speculator(checkpoint, target).float()
        ids = run.tokenizer(GOLDEN_TEXT, add_special_tokens=False)["input_ids"]
        golden = make_golden(head, target, ids)
        train = read_manifest(run.directory / "train")
        provenance = {
            "recipe": recipe.model_dump(mode="json"),
            "checkpoint": checkpoint.name,
            "training": train["outputs"],
            "versions": train["versions"],
            "git_revision": train["git_revision"],
            "target": run.target_identity,
            "torch": torch.__version__,
        }
        commands = {}
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
            )
            commands[form] = read_export(folder)["serve"]
        return {"serve": commands}, {}

    make_stage(run, "export", inputs, force, work)
