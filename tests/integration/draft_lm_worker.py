"""Train a small draft language model: `draft_lm_worker.py OUTPUT_DIR TARGET JSON`, the JSON being its options.

"shard", a list of options: instead, compare the gradients of each under FSDP2 with those of the bare module (started
by torchrun).
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from spec_train.batch import Batch
from spec_train.data.batches import build_batch
from spec_train.data.documents import Document
from spec_train.speculators.draft_lm import DraftLM
from spec_train.speculators.draft_start import DraftLMOptions
from spec_train.target import TargetModel
from tests.toy_speculator import toy_train


def documents() -> list[Document]:
    """Twelve documents of different lengths, the answer in the later half."""
    found = []
    for number in range(12):
        tokens = [4 + (7 * number + 3 * t) % 300 for t in range(8 + number)]
        found.append(Document(str(number), tokens, [(4, len(tokens))]))
    return found


def train_draft(output_dir: Path, target_path: str, options: dict[str, Any]) -> None:
    """Four optimiser steps of two micro-batches each, over however many processes there are."""
    target = TargetModel.load(target_path)
    accumulate = options.pop("grad_accum_steps")
    draft = new_draft(target, options)
    spec = DraftLM.required_features(None, target)
    toy_train(
        output_dir,
        documents=documents(),
        held_out=0,
        speculator=draft,
        provider=lambda batch: target.fill_features(batch, spec, torch.float32),
        grad_accum_steps=accumulate,
        max_steps=4,
    )


def new_draft(target: TargetModel, options: dict[str, Any]) -> DraftLM:
    settings: Any = {"type": "draft_lm", "start_layers": 2, **options}
    return DraftLM.from_recipe(DraftLMOptions(**settings), target, torch.arange(0, 320, 2), seed=0)


def compare_shards(output_dir: Path, target: TargetModel, drafts: list[dict[str, Any]]) -> None:
    """Both processes see the same batch, so their mean gradient is that of the bare module."""
    torch.distributed.init_process_group("gloo")
    batch: Batch = build_batch(documents(), [[0, 5], [3, 11]])
    batch = target.fill_features(batch, DraftLM.required_features(None, target), torch.float32)
    for options in drafts:
        plain, sharded = new_draft(target, options), new_draft(target, options)
        fully_shard(sharded, mesh=init_device_mesh("cpu", (2,)))
        losses = []
        for draft in (plain, sharded):
            torch.manual_seed(7)
            loss = draft(batch, plain.supervised_counts(batch))[0]
            loss.backward()
            losses.append(loss.detach())
        torch.testing.assert_close(*losses)
        wanted = {name: p.grad for name, p in plain.named_parameters() if p.requires_grad}
        for name, parameter in sharded.named_parameters():
            if parameter.requires_grad:
                grad: Any = parameter.grad
                torch.testing.assert_close(grad.full_tensor(), wanted[name], rtol=1e-4, atol=1e-6)
    if torch.distributed.get_rank() == 0:
        (output_dir / "ok").write_text(f"{len(drafts)} drafts")
    torch.distributed.destroy_process_group()


def main() -> None:
    output_dir, target_path, options = Path(sys.argv[1]), sys.argv[2], json.loads(sys.argv[3])
    if "shard" in options:
        compare_shards(output_dir, TargetModel.load(target_path), options["shard"])
    else:
        train_draft(output_dir, target_path, options)


if __name__ == "__main__":
    main()
