"""Reload an export in a fresh process, from files alone, and draft its golden sample again: `JOB.json OUT.json`."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from spec_train.errors import UserError
from spec_train.serving.export import GOLDEN_FILE
from spec_train.serving.golden import draft
from spec_train.speculators import load_speculator
from spec_train.speculators.base import Speculator
from spec_train.speculators.head_files import export_tensors
from spec_train.target import TargetModel


def main(job_path: str, out_path: str) -> None:
    """Read the job {export_dir, target_dir, dtype, device}; write {error} or the differences found."""
    job: dict[str, str] = json.loads(Path(job_path).read_text())
    try:
        target = TargetModel.load(job["target_dir"], dtype=getattr(torch, job["dtype"]), device=job["device"])
        result = reload(Path(job["export_dir"]), target)
    except UserError as error:
        result = {"error": str(error)}
    Path(out_path).write_text(json.dumps(result))


def reload(export_dir: Path, target: TargetModel) -> dict[str, Any]:
    """`max_difference`, `largest`: of the draft logits of the golden sample; `drafts_equal`: its greedy drafts are the
    same (all None without a sample). Raises UserError for a tensor that is missing or unknown, and for an embedding
    that is not the target's."""
    speculator = load_speculator(export_dir, target)
    result: dict[str, Any] = dict.fromkeys(("max_difference", "largest", "drafts_equal"))
    result["tensors"] = len(export_tensors(export_dir))
    if (export_dir / GOLDEN_FILE).is_file():
        golden = read_golden(export_dir / GOLDEN_FILE, speculator)
        again = draft(speculator, golden, target.device)
        if again["draft_logits"].shape != golden["draft_logits"].shape:
            raise UserError(
                f"{export_dir / GOLDEN_FILE}: holds draft logits of shape {list(golden['draft_logits'].shape)}, "
                f"the head gives {list(again['draft_logits'].shape)}; export again"
            )
        result["largest"] = float(golden["draft_logits"].abs().max())
        result["max_difference"] = float((again["draft_logits"] - golden["draft_logits"]).abs().max())
        result["drafts_equal"] = torch.equal(again["draft_ids"], golden["draft_ids"])
    return result


def read_golden(file: Path, speculator: Speculator) -> dict[str, Tensor]:
    """The tensors of a golden sample, see `golden.make_golden`. Raises UserError where one that the speculator needs is
    missing, or the file is damaged."""
    try:
        golden: dict[str, Tensor] = load_file(file)
    except SafetensorError as error:
        raise UserError(f"{file}: cannot be read ({error}); export again") from None
    spec = speculator.feature_spec
    needed = {"token_ids", "draft_ids", "draft_logits"}
    needed |= ({"aux_hidden"} if spec.aux_layer_ids else set()) | ({"last_hidden"} if spec.last_hidden else set())
    if missing := sorted(needed - golden.keys()):
        raise UserError(f"{file}: lacks {', '.join(missing)}; export again")
    return golden


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2])
