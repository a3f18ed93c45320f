"""What every stage shares: when it is skipped, refused, continued or made, and what earlier stages left."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console

from spec_train.data.documents import Document, read_documents
from spec_train.errors import UserError
from spec_train.manifest import Stage, run_lock
from spec_train.recipe import Recipe
from spec_train.run import Run

if TYPE_CHECKING:
    from spec_train.data.prompts import Split
    from spec_train.decoding.sampling import Sampling

Inputs = Callable[[Run], dict[str, Any]]
"""Everything that a stage's result depends on, what earlier stages made included; see `manifest.Stage`. Raises
UserError where an earlier stage is missing, or is not what the recipe asks for."""

Work = Callable[[Stage], tuple[dict[str, Any], dict[str, Any], dict[str, Any]]]
"""Does a stage's work in its directory; returns (outputs, counts, made), see `manifest.Stage.finish`."""


def make_stage(run: Run, name: str, inputs: Inputs, force: bool, work: Work) -> None:
    """Skip, refuse, continue or make one stage. Under a launcher only the main process keeps the books, and the
    others wait until it has decided."""
    if not run.is_main:
        if _agree(run, False):
            work(run.stage(name, {}))
        return
    console = Console(stderr=True)
    with ExitStack() as lock:
        try:
            lock.enter_context(run_lock(run.stage_directory(name).parent))
            stage = run.stage(name, inputs(run))
            if force:
                stage.discard()
            needed = not stage.is_current()
            if needed:
                stage.begin()
                run.save_recipe(stage.directory)
        except UserError:
            _agree(run, False)  # the others wait for an answer
            raise
        _agree(run, needed)
        if not needed:
            console.print(f"{name}: current", style="dim", markup=False, soft_wrap=True)
            return
        console.print(f"{name}: working in {stage.directory}", style="bold", markup=False, soft_wrap=True)
        outputs, counts, made = work(stage)
        stage.finish(outputs, counts, made)
        said = ", ".join(f"{key} {value:,}" for key, value in counts.items() if isinstance(value, int))
        console.print(f"{name}: done{f' ({said})' if said else ''}", markup=False, soft_wrap=True)
        for reason, count in counts.get("dropped", {}).items():
            console.print(f"  dropped {count}: {reason}", markup=False, soft_wrap=True)
        for note, count in counts.get("notes", {}).items():
            console.print(f"  {count} {note}", markup=False, soft_wrap=True)


def _agree(run: Run, needed: bool) -> bool:
    """The main process's decision, on every process of a launch."""
    if int(os.environ.get("WORLD_SIZE", "1")) == 1:
        return needed
    from spec_train.training.parallel import broadcast_flag

    return broadcast_flag(needed, run.recipe.run.device)


def is_finished(directory: Path) -> bool:
    """Whether the stage in `directory` has its manifest."""
    return (directory / "manifest.json").is_file()


def documents_of(run: Run, split: Split) -> list[Document]:
    """The documents of a split of the responses stage."""
    return read_documents(run.stage_directory("responses") / f"{split}.jsonl")


def eval_sampling(recipe: Recipe, temperature: float) -> Sampling:
    """The recipe's settings of an evaluation at one of its temperatures."""
    from spec_train.decoding.sampling import Sampling

    section = recipe.eval
    return Sampling(
        temperature,
        section.top_k,
        section.top_p,
        section.draft_sample_method,
        recipe.run.seed,
        section.min_p,
        section.rejection_sample_method,
    )
