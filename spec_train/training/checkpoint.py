"""Checkpoints that are complete or absent: written under a temporary name, verified by reading back, then renamed.

`<root>/step-000200/` holds

  model.safetensors      trained weights, full shapes whatever the sharding was
  optimizer.safetensors  `<parameter>/<state>` tensors (under DeepSpeed its own files in `deepspeed/` instead)
  speculator.json        the configuration that builds the module
  state.json             TrainState
  complete.json          {file: bytes}, written last; a directory without it, or that differs from it, is ignored

and `<root>/best.json` names the best of them.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import uuid
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from spec_train.errors import UserError
from spec_train.manifest import atomic_write_json, atomic_write_text

MODEL_FILE = "model.safetensors"
OPTIMIZER_FILE = "optimizer.safetensors"
SPECULATOR_FILE = "speculator.json"
STATE_FILE = "state.json"
COMPLETE_FILE = "complete.json"
BEST_FILE = "best.json"
IDENTITY_FILE = "run_id.txt"


@dataclass
class TrainState:
    """Where a run stands. Everything else follows from the recipe: the data order and the learning rate are functions
    of the step, and random numbers are seeded anew in every micro-batch.

    plan            what fixes the data order; a resumed run must agree with it
    run_id          identity at the trackers, kept over resumes
    step            optimiser steps taken
    trained_tokens  supervised tokens seen
    seconds         spent, summed over resumes
    log_bytes       length of log.jsonl; what follows was written by steps that are taken again
    best_step, best_value  the best evaluation so far, None before the first
    start_value     the evaluation before the first step, where training goes on from a trained head
    """

    plan: dict[str, Any]
    run_id: str
    step: int = 0
    trained_tokens: int = 0
    seconds: float = 0.0
    log_bytes: int = 0
    best_step: int | None = None
    best_value: float | None = None
    start_value: float | None = None


def run_identity(directory: Path) -> str:
    """The identity of the run in `directory`, from its first start on, be there a checkpoint or not."""
    file = directory / IDENTITY_FILE
    if not file.is_file():
        directory.mkdir(parents=True, exist_ok=True)
        atomic_write_text(file, uuid.uuid4().hex + "\n")
    return file.read_text(encoding="utf-8").strip()


def checkpoint_path(root: Path, step: int) -> Path:
    """The directory of the checkpoint after `step` optimiser steps."""
    return root / f"step-{step:06d}"


def temporary_path(root: Path, step: int) -> Path:
    """Where that checkpoint is written before it is complete."""
    return root / f"step-{step:06d}.tmp"


def clear_leftovers(root: Path) -> None:
    """Remove what a killed process was writing: half-written checkpoints and temporary files."""
    for path in root.glob("*.tmp"):
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink()


def begin_checkpoint(temporary: Path) -> None:
    """A fresh directory for `finish_checkpoint`; what an interrupted attempt left there is removed."""
    if temporary.exists():
        shutil.rmtree(temporary)
    temporary.mkdir(parents=True)


def finish_checkpoint(
    temporary: Path,
    state: TrainState,
    model: Mapping[str, Tensor],
    shapes: Mapping[str, torch.Size],
    optimizer: Mapping[str, Tensor] | None,
    speculator_config: Mapping[str, Any],
) -> Path:
    """Fill `temporary`, verify it, give it its final name and return that.

    shapes  what `model` must hold, taken before any sharding; a missing, empty, misshapen or non-finite tensor raises
            ValueError and leaves nothing behind (a sharding engine that hands out empty shells is caught here)
    """
    try:
        check_tensors(model, shapes)
        if optimizer is not None:
            check_tensors(optimizer, {name: tensor.shape for name, tensor in optimizer.items()})
            _write_tensors(temporary / OPTIMIZER_FILE, optimizer)
        write_speculator(temporary, model, speculator_config)
        atomic_write_json(temporary / STATE_FILE, asdict(state))
        files = sorted(path for path in temporary.rglob("*") if path.is_file())
        atomic_write_json(
            temporary / COMPLETE_FILE, {path.relative_to(temporary).as_posix(): path.stat().st_size for path in files}
        )
    except (ValueError, OSError):
        shutil.rmtree(temporary, ignore_errors=True)
        raise
    final = temporary.with_suffix("")
    if final.exists():
        shutil.rmtree(final)
    os.replace(temporary, final)
    return final


def write_speculator(directory: Path, model: Mapping[str, Tensor], speculator_config: Mapping[str, Any]) -> None:
    """The two files that a speculator is built from again: its weights and its configuration."""
    _write_tensors(directory / MODEL_FILE, model)
    atomic_write_json(directory / SPECULATOR_FILE, dict(speculator_config))


def check_tensors(tensors: Mapping[str, Tensor], shapes: Mapping[str, torch.Size]) -> None:
    """Raises ValueError unless `tensors` are exactly those of `shapes`, none empty and all finite."""
    missing, extra = sorted(shapes.keys() - tensors.keys()), sorted(tensors.keys() - shapes.keys())
    if missing or extra:
        raise ValueError(f"refusing to save: tensors missing {missing}, unexpected {extra}")
    for name, tensor in tensors.items():
        if tensor.numel() == 0 or tensor.shape != shapes[name]:
            raise ValueError(f"refusing to save: {name} has shape {tuple(tensor.shape)}, not {tuple(shapes[name])}")
        if tensor.is_floating_point() and not bool(torch.isfinite(tensor).all()):
            raise ValueError(f"refusing to save: {name} is not finite")


def _write_tensors(path: Path, tensors: Mapping[str, Tensor]) -> None:
    """Save and compare with what the file gives back. Clones: views would drag along or share their storage."""
    copies = {name: tensor.detach().cpu().contiguous().clone() for name, tensor in tensors.items()}
    save_file(copies, path)
    with safe_open(path, framework="pt") as file:
        for name, tensor in copies.items():
            if not torch.equal(file.get_tensor(name), tensor):
                raise OSError(f"{path}: {name} differs from what was written; check the disk")


def is_complete(checkpoint: Path) -> bool:
    """Whether every file that `complete.json` lists is there in full."""
    marker = checkpoint / COMPLETE_FILE
    if not marker.is_file():
        return False
    sizes = json.loads(marker.read_text(encoding="utf-8"))
    return all((checkpoint / name).is_file() and (checkpoint / name).stat().st_size == sizes[name] for name in sizes)


def latest_checkpoint(root: Path) -> Path | None:
    """The complete checkpoint with the highest step. Links, other names and half-written directories are ignored."""
    if not root.is_dir():
        return None
    steps = {
        int(match[1]): path
        for path in root.iterdir()
        if (match := re.fullmatch(r"step-(\d+)", path.name)) and path.is_dir() and not path.is_symlink()
    }
    return next((steps[step] for step in sorted(steps, reverse=True) if is_complete(steps[step])), None)


def best_checkpoint(root: Path) -> Path | None:
    """The checkpoint that best.json names, the latest one where no evaluation ever ran, None where there is none.

    Raises UserError if best.json names a checkpoint that is gone."""
    if not (root / BEST_FILE).is_file():
        return latest_checkpoint(root)
    path = checkpoint_path(root, json.loads((root / BEST_FILE).read_text(encoding="utf-8"))["step"])
    if not is_complete(path):
        raise UserError(
            f"{root / BEST_FILE} names {path.name}, which is missing or incomplete; train again to restore it"
        )
    return path


def mark_best(root: Path, state: TrainState, metric: str) -> None:
    """Write best.json from `state`, or remove it where nothing was evaluated yet."""
    if state.best_step is None:
        (root / BEST_FILE).unlink(missing_ok=True)
    else:
        atomic_write_json(root / BEST_FILE, {"step": state.best_step, "metric": metric, "value": state.best_value})


def prune_checkpoints(root: Path, keep: int, best_step: int | None) -> None:
    """Remove all but the `keep` newest complete checkpoints and the best one."""
    complete = [path for path in root.glob("step-*") if path.name[5:].isdigit() and is_complete(path)]
    complete.sort(key=lambda path: int(path.name[5:]))
    kept = set(complete[-keep:])
    if best_step is not None:
        kept.add(checkpoint_path(root, best_step))
    for path in complete:
        if path not in kept:
            # Unmark first: a removal that is cut short must not leave something that looks complete.
            (path / COMPLETE_FILE).unlink()
            shutil.rmtree(path)


def load_state(checkpoint: Path) -> TrainState:
    """The TrainState of a complete checkpoint."""
    return TrainState(**json.loads((checkpoint / STATE_FILE).read_text(encoding="utf-8")))


def load_weights(module: nn.Module, checkpoint: Path) -> None:
    """Load model.safetensors into a freshly built speculator, strictly: same names, same shapes. Raises UserError."""
    path = checkpoint / MODEL_FILE
    try:
        tensors = load_file(path)
    except (OSError, SafetensorError) as error:
        raise UserError(f"{path}: cannot be read ({error}); give the directory of a checkpoint") from None
    own = module.state_dict()
    missing, extra = sorted(own.keys() - tensors.keys()), sorted(tensors.keys() - own.keys())
    if missing or extra:
        raise UserError(f"{path}: tensors missing {missing}, unexpected {extra}; it belongs to another speculator")
    for name, tensor in tensors.items():
        if tensor.shape != own[name].shape:
            raise UserError(
                f"{path}: {name} has shape {tuple(tensor.shape)}, the speculator needs {tuple(own[name].shape)}; "
                "it belongs to another configuration"
            )
        if not tensor.is_floating_point() and not torch.equal(tensor, own[name].cpu()):
            raise UserError(
                f"{path}: {name} maps to other tokens than the run's own draft vocabulary; it belongs to another run, "
                "or is damaged"
            )
    module.load_state_dict(tensors)
