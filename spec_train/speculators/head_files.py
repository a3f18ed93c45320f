"""The files of a trained head: where they lie, every tensor in them, and which method they belong to.

Read are our own exports and the layouts that other tools publish, each in the form that vLLM reads too:

  speculators         config.json with `speculators_model_type`, `layers.0.*`     eagle3, peagle
  EAGLE-3, SpecForge  architectures LlamaForCausalLMEagle3, `midlayer.*`          eagle3; peagle with a mask token
  EAGLE-1             config.json of a Llama, `fc.weight` and `layers.0.*`        eagle1
  IBM, Arctic         model_type mlp_speculator                                   mlp
  Medusa              model_type medusa, or `medusa_num_heads` (FasterDecoding)   medusa
  MTP                 `model.mtp_layers.*`, `mtp.*`                               mtp
  anything else       a causal language model                                     draft_lm; pard with a mask token

Weights are safetensors, or files of `torch.save` that hold nothing but tensors: nothing is ever unpickled.
"""

from __future__ import annotations

import hashlib
import json
import pickle
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from spec_train.errors import UserError
from spec_train.manifest import file_sha256, json_sha256

if TYPE_CHECKING:
    from torch import Tensor

HUB_ID = r"[A-Za-z0-9][\w.-]*/[\w.-]+"
OPTIMIZER = "optimizer.safetensors"  # beside the weights of a training checkpoint
WEIGHTS = ("*.safetensors", "*.bin", "*.pt")  # what is looked for, best first; others than the first found are copies


def find_head(name: str, key: str = "") -> Path:
    """The folder of a head: `name` itself, or a snapshot of the hub repository of that id. Raises UserError, its line
    begun with `key`, the recipe's word for it."""
    folder = Path(name).expanduser()
    if folder.is_dir():
        return folder
    if not re.fullmatch(HUB_ID, name):
        raise UserError(f"{key}{name}: no such folder; give that of a checkpoint or export, or a hub id, OWNER/NAME")
    from huggingface_hub import snapshot_download

    try:
        snapshot = Path(snapshot_download(name, allow_patterns=["*.json", "*.safetensors"]))
        if not weight_files(snapshot):
            snapshot = Path(snapshot_download(name, allow_patterns=["*.json", *WEIGHTS]))
        return snapshot
    except (OSError, ValueError) as error:  # offline, not found, no access, or not a valid id
        first = str(error).strip().splitlines()[0]
        raise UserError(
            f"{key}{name}: no such folder, and the Hub does not give it ({first}); give a folder, or fetch it online"
        ) from error


def weight_files(folder: Path) -> list[Path]:
    """The files that hold the tensors; empty where there are none."""
    for pattern in WEIGHTS:
        if files := sorted(path for path in folder.glob(pattern) if path.name != "training_args.bin"):
            return files
    return []


def weights_sha256(folder: Path) -> str:
    """sha256 over the contents of a head's weight files, all of every file: which weights a result or export is of."""
    return json_sha256([file_sha256(path) for path in weight_files(folder) if path.name != OPTIMIZER])


def state_sha256(tensors: Mapping[str, Tensor]) -> str:
    """The same of tensors in memory: names, types, shapes and bytes."""
    import torch

    digest = hashlib.sha256()
    for name, tensor in sorted(tensors.items()):
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
        digest.update(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().data)
    return digest.hexdigest()


def export_tensors(folder: Path) -> dict[str, Tensor]:
    """Every tensor of an export; of a stitched copy of the target those of the head. Raises UserError where one that
    export.json lists is missing, and for a file that holds other things than tensors."""
    description = read_json(folder / "export.json") if (folder / "export.json").is_file() else {"tensors": {}}
    listed, stitched = description["tensors"], description.get("format") == "stitched"
    tensors: dict[str, Tensor] = {}
    for file in weight_files(folder):
        tensors.update(_file_tensors(file, set(listed) if stitched else None))
    missing = sorted(set(listed) - set(tensors))
    if missing:
        raise UserError(f"{folder}: {missing[0]} is missing, which export.json lists; export again")
    return tensors


def checkpoint_tensors(folder: Path) -> dict[str, Tensor]:
    """Every tensor of a training checkpoint. Raises UserError where there is no file of them, or a damaged one."""
    file = folder / "model.safetensors"
    if not file.is_file():
        raise UserError(f"{folder}: has no {file.name}; give the folder of a whole checkpoint")
    return _file_tensors(file, None)


def _file_tensors(file: Path, wanted: set[str] | None) -> dict[str, Tensor]:
    """The tensors of one file, on the CPU; `wanted`: only those. Raises UserError."""
    import torch
    from safetensors import SafetensorError, safe_open

    if file.suffix == ".safetensors":
        try:
            with safe_open(file, framework="pt") as opened:
                names = [name for name in opened.keys() if wanted is None or name in wanted]  # noqa: SIM118 - no dict
                return {name: opened.get_tensor(name) for name in names}
        except SafetensorError as error:
            raise UserError(f"{file}: cannot be read ({error}); fetch it again") from None
    try:
        loaded = torch.load(file, map_location="cpu", weights_only=True)
    except (pickle.UnpicklingError, EOFError, RuntimeError, ValueError):
        raise UserError(
            f"{file}: is damaged or holds more than tensors, which is never unpickled; use a safetensors file"
        ) from None
    if not isinstance(loaded, dict) or not all(isinstance(value, torch.Tensor) for value in loaded.values()):
        raise UserError(f"{file}: is not a table of named tensors; save the head's state_dict alone")
    return loaded


def head_type(folder: Path, config: dict[str, Any], names: Iterable[str]) -> str:
    """The method of an export: as our export.json says, else as config and tensor names show. Raises UserError for a
    method that is not known here."""
    if (folder / "export.json").is_file():
        return str(read_json(folder / "export.json")["type"])
    if "speculators_model_type" in config:
        kind = str(config["speculators_model_type"])
        if kind not in ("eagle3", "peagle"):
            raise UserError(f"{folder}: speculators_model_type {kind!r} is not known; eagle3 and peagle are")
        return kind
    names, architectures = list(names), " ".join(config.get("architectures") or [])
    parallel = any(config.get(key) is not None for key in ("pard_token", "mask_token_id", "ptd_token_id"))
    if "eagle3" in architectures.lower() or "draft_vocab_size" in config:
        return "peagle" if parallel else "eagle3"
    if config.get("model_type") == "mlp_speculator":
        return "mlp"
    if config.get("model_type") == "medusa" or "medusa_num_heads" in config:
        return "medusa"
    if "MiMo" in architectures or any(name.startswith(("model.mtp_layers.", "mtp.")) for name in names):
        return "mtp"
    if "fc.weight" in names or any(name.startswith("layers.0.") for name in names):  # a language model has a prefix
        return "eagle1"
    return "pard" if parallel else "draft_lm"


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object in a file. Raises UserError where it is none."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UserError(f"{path}: cannot be read as JSON ({error})") from None
    if not isinstance(value, dict):
        raise UserError(f"{path}: is not a JSON object")
    return value
