"""Reload an export in a fresh process, from files alone, and draft its golden sample again: `JOB.json OUT.json`."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from safetensors.torch import load_file

from spec_train.errors import UserError
from spec_train.serving.export import GOLDEN_FILE
from spec_train.serving.golden import draft
from spec_train.speculators.eagle3 import Eagle3
from spec_train.target import TargetModel


def main(job_path: str, out_path: str) -> None:
    """Read the job {export_dir, target_dir}; write {error} or the differences found."""
    job: dict[str, str] = json.loads(Path(job_path).read_text())
    try:
        result = reload(Path(job["export_dir"]), job["target_dir"])
    except UserError as error:
        result = {"error": str(error)}
    Path(out_path).write_text(json.dumps(result))


def reload(export_dir: Path, target_dir: str) -> dict[str, Any]:
    """Largest difference of the draft log-probabilities, and whether the drafts are the same (None without a golden
    sample); `embedding_equal`: a shipped embedding is the target's own, bit by bit (None if none is shipped)."""
    target = TargetModel.load(target_dir)
    speculator = Eagle3.from_export(export_dir, target)
    result: dict[str, Any] = {"tensors": 0, "max_difference": None, "drafts_equal": None, "embedding_equal": None}
    weights = load_file(export_dir / "model.safetensors")
    result["tensors"] = len(weights)
    if "embed_tokens.weight" in weights:
        own, shared = weights["embed_tokens.weight"], target.embedding.weight
        result["embedding_equal"] = own.shape == shared.shape and bool((own.to(shared.dtype) == shared).all())
    if (export_dir / GOLDEN_FILE).is_file():
        golden = load_file(export_dir / GOLDEN_FILE)
        again = draft(speculator, golden, target.device)
        result["max_difference"] = float((again["draft_logprobs"] - golden["draft_logprobs"]).abs().max())
        result["drafts_equal"] = bool((again["draft_ids"] == golden["draft_ids"]).all())
    return result


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2])
