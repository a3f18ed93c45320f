"""Reload an export in a fresh process, from files alone, and draft its golden sample again: `JOB.json OUT.json`."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from spec_train.errors import UserError
from spec_train.serving.export import GOLDEN_FILE
from spec_train.serving.golden import draft
from spec_train.speculators import load_speculator
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
        golden = load_file(export_dir / GOLDEN_FILE)
        again = draft(speculator, golden, target.device)
        result["largest"] = float(golden["draft_logits"].abs().max())
        result["max_difference"] = float((again["draft_logits"] - golden["draft_logits"]).abs().max())
        result["drafts_equal"] = torch.equal(again["draft_ids"], golden["draft_ids"])
    return result


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2])
