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
            "train": run.made_from("train"),
            "training": {key: value for key, value in train["outputs"].items() if not key.endswith("_checkpoint")},
            "data": data_provenance(run),
            "notes": card_notes(recipe.hub),
            "versions": train["versions"],
            "git_revision": train["git_revision"],
            "target": run.target_identity,
            "torch": torch.__version__,
            **({} if run.date is None else {"date": run.date}),
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
                tokenizer=run.tokenizer if serving.method == "draft_model" else None,
            )
            k = recipe.export.verify_num_draft_tokens
            commands[form] = serve_command(folder, run.target_path, read_export(folder), k)
        return {"serve": commands}, {}

    make_stage(run, "export", inputs, force, work)


def data_provenance(run: Run) -> dict[str, Any]:
    """What the speculator was trained on: counts with drop reasons, and the sources' hashes in the recipe's order."""
    prompts, responses = (read_manifest(run.stage_directory(name)) for name in ("prompts", "responses"))
    dropped = {reason.split(" (first: ")[0]: n for reason, n in prompts["counts"]["dropped"].items()}  # names no file
    return {
        "prompts": {**prompts["counts"], "dropped": dropped},
        "responses": responses["counts"],
        "source_files": prompts["inputs"]["source_files"],
    }
