"""What a training run tells the world: log.jsonl, trackers and a progress bar, all from the main process."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from accelerate import Accelerator
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from spec_train.training.checkpoint import TrainState
from spec_train.training.trackers import Trackers


class RunLog:
    """Writes are no-ops on other processes than the main one, so callers need not ask.

    log.jsonl is cut back to `state.log_bytes`: lines beyond were written by steps that are taken again. `config` goes
    to the trackers.
    """

    def __init__(
        self,
        accelerator: Accelerator,
        path: Path,
        state: TrainState,
        total_steps: int,
        trackers: Sequence[str],
        config: Mapping[str, Any],
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
        self._points: dict[str, float] = {}
        self._trackers = Trackers(
            trackers if self._main else (), path.parent, state.run_id, state.step, self._logged(), config
        )

    def __enter__(self) -> RunLog:
        self._progress.start()
        return self

    def __exit__(self, failure: type[BaseException] | None, *_: object) -> None:
        self._progress.stop()
        self._trackers.close(failed=failure is not None)
        self._accelerator.end_training()  # closes the process group

    def write(
        self,
        step: int,
        group: Literal["train", "eval"],
        values: Mapping[str, float],
        acceptance: float | None = None,
    ) -> None:
        """A line of log.jsonl, and points of the trackers, as `group/name`; `acceptance` goes on the progress bar."""
        if acceptance is not None:
            self._acceptance = f"{acceptance:.3f}"
        if not self._main:
            return
        self._points |= _named(group, values)
        with self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps({"step": step, **values}) + "\n")
        if group == "train":
            figures = (
                f"loss {values['loss']:.4f}  acceptance {self._acceptance}  {values['tokens_per_second']:.0f} tok/s"
            )
            self._progress.update(self._task, figures=figures)

    def end_step(self, step: int) -> None:
        """Everything of `step` is written: send it to the trackers and move the progress bar."""
        if self._points:
            self._trackers.log(step, self._points)
            self._points = {}
        self._progress.update(self._task, completed=step)

    def _logged(self) -> dict[int, dict[str, float]]:
        """What log.jsonl holds, by step, under the trackers' names."""
        found: dict[int, dict[str, float]] = {}
        for line in self._path.read_text(encoding="utf-8").splitlines() if self._main else ():
            values = json.loads(line)
            step = values.pop("step")
            found.setdefault(step, {}).update(_named("train" if "loss" in values else "eval", values))
        return found

    def bytes_written(self) -> int:
        """Length of log.jsonl now."""
        return self._path.stat().st_size if self._main else 0


def _named(group: Literal["train", "eval"], values: Mapping[str, float]) -> dict[str, float]:
    return {f"{group}/{name}": value for name, value in values.items()}


class Clock:
    """Seconds since the start of this process's part of the run, on top of what earlier parts took."""

    def __init__(self, spent: float) -> None:
        self._start = time.monotonic() - spent

    def seconds(self) -> float:
        """Total seconds so far."""
        return time.monotonic() - self._start
