"""Read the sources; split off the held-out conversations."""

from __future__ import annotations

from typing import Any

from spec_train.data.prompts import load_conversations, split_held_out, write_conversations
from spec_train.manifest import Stage
from spec_train.run import Run, source_fingerprints
from spec_train.stages.common import make_stage


def prompts(run: Run, force: bool) -> None:
    """Make the stage where needed."""
    recipe = run.recipe
    data = recipe.data.model_dump(mode="json", exclude={"max_length", "last_turn_only"})
    inputs = {
        "data": data,
        "source_files": source_fingerprints(recipe),
        "mode": recipe.responses.mode,
        "seed": recipe.run.seed,
    }

    def work(stage: Stage) -> tuple[dict[str, Any], dict[str, Any]]:
        conversations, dropped = load_conversations(
            recipe.data.sources,
            mode=recipe.responses.mode,
            max_drop_rate=recipe.data.max_drop_rate,
            seed=recipe.run.seed,
        )
        training, held_out = split_held_out(conversations, recipe.data.held_out, recipe.run.seed)
        write_conversations(stage.directory / "train.jsonl", training)
        write_conversations(stage.directory / "held_out.jsonl", held_out)
        counts = {"train": len(training), "held_out": len(held_out), "dropped": dict(dropped)}
        return {}, counts

    make_stage(run, "prompts", inputs, force, work)
