"""A copy of the target's folder with some of its tensors replaced: how a head that ships with its target is served."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from spec_train.errors import UserError

# Weights in other forms would be stale beside the stitched ones; the rest of a checkpoint is small text.
OTHER_WEIGHTS = (".bin", ".pt", ".pth", ".gguf", ".msgpack", ".h5", ".onnx")


def copy_target(source: Path, directory: Path, tensors: Mapping[str, Tensor], config: Mapping[str, Any]) -> None:
    """Copy the checkpoint folder `source` into `directory`, with `tensors` in the place of those of the same name.

    `config`: keys laid over the target's config.json. Shards that hold none of the tensors are copied as they are.
    Raises UserError where `source` is no local safetensors checkpoint or lacks one of the tensors.
    """
    shards = sorted(source.glob("*.safetensors")) if source.is_dir() else []
    if not shards:
        raise UserError(f"{source}: a head is stitched into a local folder of safetensors files; download the target")
    held: dict[Path, list[str]] = {}
    for shard in shards:
        with safe_open(shard, framework="pt") as file:
            held[shard] = [name for name in file.keys() if name in tensors]  # noqa: SIM118 - not a dict
    missing = sorted(set(tensors) - {name for names in held.values() for name in names})
    if missing:
        raise UserError(
            f"{source} does not hold {missing[0]} (and {len(missing) - 1} more) that the head would replace"
        )
    for path in sorted(source.iterdir()):
        if path.is_file() and path.suffix not in OTHER_WEIGHTS and not held.get(path):
            shutil.copy2(path, directory / path.name)
    for shard, names in held.items():
        if not names:
            continue
        weights = load_file(shard)
        for name in names:
            if weights[name].shape != tensors[name].shape:
                raise UserError(
                    f"{shard}: {name} has shape {list(weights[name].shape)}, the head {list(tensors[name].shape)}"
                )
            weights[name] = tensors[name]  # as trained: rounded to the target's precision it would draft otherwise
        save_file(weights, directory / shard.name, metadata={"format": "pt"})
        with safe_open(directory / shard.name, framework="pt") as file:
            if not all(torch.equal(file.get_tensor(name), weights[name]) for name in names):
                raise OSError(f"{directory / shard.name} differs from what was written; check the disk")
    target_config = json.loads((source / "config.json").read_text(encoding="utf-8"))
    (directory / "config.json").write_text(
        json.dumps({**target_config, **config}, indent=2, sort_keys=True) + "\n", encoding="utf-8"
    )
