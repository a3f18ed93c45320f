"""What `parallel` does for FSDP2, on two CPU processes: `fsdp_worker.py DIRECTORY`, started by torchrun."""

from __future__ import annotations

import copy
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from accelerate import Accelerator
from torch.distributed import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from spec_train.batch import Batch
from spec_train.data.batches import build_batch
from spec_train.training import checkpoint as ckpt
from spec_train.training import parallel
from tests.toy_speculator import ToySpeculator, toy_documents, toy_states


def sharded(seed: int) -> tuple[ToySpeculator, Any]:
    model = ToySpeculator(seed, dropout=0)
    fully_shard(model, mesh=init_device_mesh("cpu", (2,)))
    return model, SimpleNamespace(optimizer=torch.optim.AdamW(model.parameters(), lr=0.01, fused=True))


def batches() -> list[Batch]:
    documents = toy_documents(12)
    return [toy_states(build_batch(documents, [[i, i + 1], [i + 2]])) for i in range(0, 12, 3)]


def main() -> None:
    accelerator = Accelerator(cpu=True)
    rank, world = accelerator.process_index, accelerator.num_processes
    plain = ToySpeculator(0, dropout=0)
    plain_optimizer = torch.optim.AdamW(plain.parameters(), lr=0.01, fused=True)
    model, optimizer = sharded(0)
    assert all(isinstance(parameter, DTensor) for parameter in model.parameters())
    normalizer = torch.stack([plain.supervised_counts(batch) for batch in batches()]).sum(0)
    for _ in range(3):
        for batch in batches():
            plain(batch, normalizer)[0].backward()
        plain_norm = torch.nn.utils.clip_grad_norm_(plain.parameters(), 0.1)
        plain_optimizer.step()
        plain_optimizer.zero_grad()
        mine = batches()[rank::world]
        for index, batch in enumerate(mine):
            model.set_requires_gradient_sync(index == len(mine) - 1)
            parallel.backward(accelerator, model, model(batch, normalizer)[0] * world, index == len(mine) - 1)
        norm = parallel.clip_gradients(accelerator, model, 0.1)
        torch.testing.assert_close(norm, plain_norm.double(), rtol=1e-5, atol=0)
        optimizer.optimizer.step()
        optimizer.optimizer.zero_grad()

    with parallel.gathered(accelerator, model), torch.no_grad():
        hits = model.eval().draft_hits(batches()[rank], 2)  # other data on either process
        expected = plain.eval().draft_hits(batches()[rank], 2)
    assert all(torch.equal(a.survival_MK, b.survival_MK) for a, b in zip(hits, expected, strict=True))
    assert all(isinstance(parameter, DTensor) for parameter in model.parameters())

    weights = parallel.model_tensors(accelerator, model)
    state = parallel.optimizer_tensors(accelerator, model, optimizer)
    shapes = {name: tensor.shape for name, tensor in plain.state_dict().items()}
    directory = Path(sys.argv[1])
    temporary = ckpt.temporary_path(directory, 3)
    if accelerator.is_main_process:
        for name, tensor in plain.state_dict().items():
            torch.testing.assert_close(weights[name], tensor, rtol=0, atol=1e-6)
        ckpt.begin_checkpoint(temporary)
        ckpt.finish_checkpoint(temporary, ckpt.TrainState({}, "r", step=3), weights, shapes, state, {})
    accelerator.wait_for_everyone()

    other, other_optimizer = sharded(1)
    parallel.load_optimizer(accelerator, other, other_optimizer, ckpt.checkpoint_path(directory, 3))
    again = parallel.optimizer_tensors(accelerator, other, other_optimizer)
    if accelerator.is_main_process:
        assert state is not None
        assert again is not None
        assert state.keys() == again.keys()
        assert {name.rsplit("/", 1)[1] for name in state} == {"step", "exp_avg", "exp_avg_sq"}
        assert all(torch.equal(state[name], again[name]) for name in state)
        reloaded = copy.deepcopy(plain)
        ckpt.load_weights(reloaded, ckpt.checkpoint_path(directory, 3))
        (directory / "ok").write_text(f"{world} processes")
    accelerator.end_training()


if __name__ == "__main__":
    main()
