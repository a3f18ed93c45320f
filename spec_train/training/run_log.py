"""What a training run tells the world: log.jsonl, trackers and a progress bar, all from the main process."""

from __future__ import annotations

import importlib.util
import json
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from accelerate import Accelerator
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from spec_train.errors import UserError
from spec_train.training.checkpoint import TrainState


def check_trackers(trackers: list[str]) -> None:
    """Raises UserError if a tracker's package is missing (Accelerate would drop it without a word)."""
    for tracker in trackers:
        spec = importlib.util.find_spec(tracker)
        if (
            spec is None or spec.origin is None
        ):  # a mere directory of that name (wandb/ holds offline runs) has no origin
            raise UserError(f"train.trackers names {tracker}, which is not installed: pip install {tracker}")


class RunLog:
    """Writes are no-ops on other processes than the main one, so callers need not ask.

    log.jsonl is cut back to `state.log_bytes`: lines beyond were written by steps that are taken again. `config` goes
    to the trackers.
    """

    def __init__(
        self, accelerator: Accelerator, path: Path, state: TrainState, total_steps: int, config: Mapping[str, Any]
    ) -> None:
        self._accelerator = accelerator
        self._main = accelerator.is_main_process
        self._path = path
        self._acceptance = "-"
        if self._main:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.touch()
            os.truncate(path, min(state.log_bytes, path.stat().st_size))
        self._progress = Progress(
            TextColumn("step {task.completed:.0f}/{task.total:.0f}"),
            BarColumn(),
            TextColumn("{task.fields[figures]}"),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
            console=Console(stderr=True),
            disable=not self._main,
        )
        self._task: TaskID = self._progress.add_task("train", total=total_steps, completed=state.step, figures="")
        self._init_trackers(state, config)

    def _init_trackers(self, state: TrainState, config: Mapping[str, Any]) -> None:
        if not self._accelerator.log_with:
            return
        self._accelerator.init_trackers(
            "spec-train",
            config={key: value for key, value in config.items() if isinstance(value, (int, float, str, bool))},
            init_kwargs={
                "wandb": {"id": state.run_id, "resume": "allow", "dir": str(self._path.parent)},
                "tensorboard": {"purge_step": state.step + 1},
            },
        )

    def __enter__(self) -> RunLog:
        self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._progress.stop()
        self._accelerator.end_training()  # flushes the trackers and closes the process group

    def advance(self, step: int) -> None:
        """Move the progress bar to `step`."""
        self._progress.update(self._task, completed=step)

    def write(
        self, step: int, group: Literal["train", "eval"], values: Mapping[str, float], acceptance: float | None = None
    ) -> None:
        """One line of log.jsonl and one point of every tracker at `step`; trackers show the names as `group/name`.
        `acceptance` goes on the progress bar."""
        if acceptance is not None:
            self._acceptance = f"{acceptance:.3f}"
        if self._main:
            with self._path.open("a", encoding="utf-8") as file:
                file.write(json.dumps({"step": step, **values}) + "\n")
            if "loss" in values:
                figures = (
                    f"loss {values['loss']:.4f}  acceptance {self._acceptance}  {values['tokens_per_second']:.0f} tok/s"
                )
                self._progress.update(self._task, figures=figures)
        if self._accelerator.log_with:
            self._accelerator.log({f"{group}/{name}": value for name, value in values.items()}, step=step)

    def bytes_written(self) -> int:
        """Length of log.jsonl now."""
        return self._path.stat().st_size if self._main else 0


class Clock:
    """Seconds since the start of this process's part of the run, on top of what earlier parts took."""

    def __init__(self, spent: float) -> None:
        self._start = time.monotonic() - spent

    def seconds(self) -> float:
        """Total seconds so far."""
        return time.monotonic() - self._start
