"""Read the sources; split off the held-out conversations and those that choose the checkpoint."""

from __future__ import annotations

from collections import Counter
from typing import Any

from spec_train.data.prompts import load_conversations, split_conversations, write_conversations
from spec_train.manifest import Stage, file_digests
from spec_train.run import Run
from spec_train.stages.common import make_stage
from spec_train.stages.inputs import prompts_inputs


def prompts(run: Run, force: bool) -> None:
    """Make the stage where needed. Later stages depend on its files of conversations."""
    recipe = run.recipe

    def work(stage: Stage) -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]]:
        notes: Counter[str] = Counter()
        conversations, dropped = load_conversations(
            recipe.data.sources,
            mode=recipe.responses.mode,
            max_drop_rate=recipe.data.max_drop_rate,
            seed=recipe.run.seed,
            notes=notes,
        )
        splits = split_conversations(
            conversations, held_out=recipe.data.held_out, validation=recipe.data.validation, seed=recipe.run.seed
        )
        counts: dict[str, Any] = {
            split: write_conversations(stage.directory / f"{split}.jsonl", rows) for split, rows in splits.items()
        }
        counts |= {"dropped": dict(dropped), "notes": dict(notes)}
        return {}, counts, file_digests(stage.directory.glob("*.jsonl"))

    make_stage(run, "prompts", prompts_inputs, force, work)
