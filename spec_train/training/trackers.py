"""TensorBoard and Weights & Biases: one run each, however often training is killed and resumed.

log.jsonl, cut back to the checkpoint that training goes on from, says what happened. TensorBoard's file has every point
before that, and what a killed process wrote beyond is dropped (`purge_step`). W&B may lack the last seconds before the
kill: what is missing is sent again from the log, and offline, where W&B cannot say what it has, the whole log is; the
files of earlier processes are removed then.

What is sent: figures and the configuration, nothing else. W&B would add the command line, the console and the source.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from spec_train.errors import UserError

PROJECT = "spec-train"  # at W&B, unless WANDB_PROJECT names another


def check_trackers(trackers: Sequence[str]) -> None:
    """Raises UserError if a tracker's package is missing."""
    for tracker in trackers:
        spec = importlib.util.find_spec(tracker)
        # A mere directory of that name (wandb/ holds offline runs) has no origin.
        if spec is None or spec.origin is None:
            raise UserError(f"train.trackers names {tracker}, which is not installed: pip install {tracker}")


class Trackers:
    """The trackers of a run; none where `names` is empty, as it is on other processes than the main one.

    names      of "tensorboard", "wandb"
    directory  gets tensorboard/ and wandb/
    run_id     identity of the run over resumes
    step       optimiser steps taken before this process
    logged     figures of those steps, as `log` takes them
    config     nested, shown by both; its `name` is what W&B calls the run
    """

    def __init__(
        self,
        names: Sequence[str],
        directory: Path,
        run_id: str,
        step: int,
        logged: Mapping[int, Mapping[str, float]],
        config: Mapping[str, Any],
    ) -> None:
        self._writer: Any = None
        self._wandb: Any = None
        if "tensorboard" in names:
            from torch.utils.tensorboard import SummaryWriter

            self._writer = SummaryWriter(str(directory / "tensorboard"), purge_step=step + 1 if step else 0)
            lines = "\n".join(f"    {name}: {value}" for name, value in flat(config).items())
            self._writer.add_text("config", lines, global_step=step)
        if "wandb" in names:
            self._wandb = _start_wandb(directory, run_id, config)
            self._first = self._wandb.step  # the first step that W&B has not yet
            for earlier, values in logged.items():
                self._log_wandb(earlier, values)
            if self._offline:
                for part in (directory / "wandb").glob(f"offline-run-*-{run_id}"):
                    if part != self._part:
                        shutil.rmtree(part)

    @property
    def _offline(self) -> bool:
        return bool(self._wandb.settings.mode == "offline")

    @property
    def _part(self) -> Path:
        """Where W&B keeps what this process sends."""
        return Path(self._wandb.dir).parent

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """All figures of a step, `group/name` each."""
        if self._writer is not None:
            for name, value in values.items():
                self._writer.add_scalar(name, value, global_step=step)
            self._writer.flush()
        if self._wandb is not None:
            self._log_wandb(step, values)

    def _log_wandb(self, step: int, values: Mapping[str, float]) -> None:
        # A step taken twice gives the same figures.
        if step >= self._first:
            self._wandb.log(dict(values), step=step, commit=True)

    def close(self, failed: bool) -> None:
        """Write what is left and say where an offline run lies."""
        if self._writer is not None:
            self._writer.close()
        if self._wandb is not None:
            offline, part = self._offline, self._part
            self._wandb.finish(exit_code=int(failed))
            if offline:
                Console(stderr=True).print(
                    f"wandb: offline, nothing was sent; to send this run: wandb sync {part}",
                    markup=False, highlight=False, soft_wrap=True,
                )  # fmt: skip


def _start_wandb(directory: Path, run_id: str, config: Mapping[str, Any]) -> Any:
    """Offline where WANDB_MODE says so or nobody is logged in. Raises UserError where W&B does not start."""
    # Its reports of its own errors go to the network, offline or not.
    os.environ.setdefault("WANDB_ERROR_REPORTING", "false")
    import wandb

    mode: Any = os.environ.get("WANDB_MODE", "online")
    try:
        if mode == "online" and not wandb.login(prompt=False, verify=False):
            mode = "offline"  # asking for a key would hold up a run that nobody watches
        settings = wandb.Settings(
            console="off", disable_git=True, save_code=False, silent=mode == "offline", x_disable_meta=True
        )
        run = wandb.init(
            project=os.environ.get("WANDB_PROJECT", PROJECT), name=config.get("name"), id=run_id, resume="allow",
            dir=str(directory), mode=mode, settings=settings,
        )  # fmt: skip
    except (wandb.errors.Error, ValueError) as error:  # ValueError: an environment variable that W&B does not know
        reason = " ".join(str(error).split())
        raise UserError(
            f"train.trackers: W&B does not start ({reason}); set WANDB_MODE=offline in the environment, or mend it"
        ) from None
    run.config.update(dict(config), allow_val_change=True)  # type: ignore[no-untyped-call]
    return run


def flat(config: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested mappings as one of dotted names."""
    found: dict[str, Any] = {}
    for name, value in config.items():
        found |= flat(value, f"{prefix}{name}.") if isinstance(value, Mapping) else {f"{prefix}{name}": value}
    return found
