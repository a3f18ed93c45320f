"""The one place that knows how the engines differ: a single process, DDP, FSDP2, DeepSpeed ZeRO.

The training loop is the same for all; what is done differently (backward, clipping, gathering full tensors) is here.
"""

from __future__ import annotations

import atexit
import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from accelerate.utils import DistributedDataParallelKwargs, DistributedType, GradientAccumulationPlugin
from safetensors.torch import load_file
from torch import Tensor
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy
from torch.distributed.tensor import DTensor

from spec_train.errors import UserError
from spec_train.speculators.base import Speculator
from spec_train.training.checkpoint import OPTIMIZER_FILE

if TYPE_CHECKING:
    from spec_train.recipe import OptimSection

ENGINE_DIR, ENGINE_TAG = "deepspeed", "state"  # where DeepSpeed's own files lie inside a checkpoint
FULL = StateDictOptions(full_state_dict=True, cpu_offload=True)


def make_accelerator(precision: Literal["bf16", "fp32"], device: Literal["auto", "cpu", "cuda"]) -> Accelerator:
    """An Accelerator that neither accumulates nor averages by itself: both are the training loop's business.

    Raises UserError where `device` is cuda and there is none.
    """
    if device == "cuda" and not torch.cuda.is_available():
        raise UserError("run.device is cuda but torch sees no GPU; set run.device to auto or cpu")
    deepspeed = os.environ.get("ACCELERATE_USE_DEEPSPEED", "false").lower() == "true"
    on_cpu = device == "cpu" or not torch.cuda.is_available()
    # Accelerate remembers the settings of an earlier run in this process and would refuse other ones.
    AcceleratorState._reset_state(reset_partial_state=not torch.distributed.is_initialized())
    return Accelerator(
        mixed_precision="bf16" if precision == "bf16" else "no",
        cpu=on_cpu and not deepspeed,  # under DeepSpeed the flag would switch the engine off
        # Given as a plugin, the launcher's environment cannot replace the 1.
        gradient_accumulation_plugin=GradientAccumulationPlugin(num_steps=1),
        # The only buffers are frozen tensors of the target, equal everywhere: broadcasting them costs gigabytes a step.
        kwargs_handlers=[DistributedDataParallelKwargs(broadcast_buffers=False, gradient_as_bucket_view=True)],
    )


def prepare(accelerator: Accelerator, speculator: Speculator, optim: OptimSection) -> tuple[Any, Any]:
    """The wrapped model and its AdamW (no weight decay on vectors: norms and biases)."""
    parameters = [parameter for parameter in speculator.parameters() if parameter.requires_grad]
    groups = [
        {"params": [parameter for parameter in parameters if parameter.ndim >= 2], "weight_decay": optim.weight_decay},
        {"params": [parameter for parameter in parameters if parameter.ndim < 2], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(
        [group for group in groups if group["params"]],
        lr=optim.lr,
        betas=(optim.betas[0], optim.betas[1]),
        eps=optim.eps,
        fused=accelerator.device.type in ("cpu", "cuda"),
    )
    if accelerator.distributed_type == DistributedType.DEEPSPEED:
        # The launcher's values would silently win over ours: accumulation and clipping are set here, once.
        accelerator.state.deepspeed_plugin.deepspeed_config.update(
            train_micro_batch_size_per_gpu=1,
            gradient_accumulation_steps=1,
            gradient_clipping=optim.max_grad_norm,
        )
    if accelerator.distributed_type == DistributedType.FSDP and accelerator.mixed_precision == "bf16":
        # Inputs keep their dtype (weights, logsumexp and counts are float32 and float64); gradients reduce in float32.
        accelerator.state.fsdp_plugin.mixed_precision_policy = MixedPrecisionPolicy(
            param_dtype=torch.bfloat16, reduce_dtype=torch.float32, cast_forward_inputs=False
        )
    if accelerator.distributed_type == DistributedType.FSDP:
        # One unit: a speculator is small and calls into its layers' parts, past the hooks that inner units rely on.
        accelerator.state.fsdp_plugin.auto_wrap_policy = None
    with warnings.catch_warnings():
        # torch 2.13 renames broadcast_buffers; older ones know no other name.
        warnings.filterwarnings("ignore", message=".*broadcast_buffers", category=FutureWarning)
        model, prepared = accelerator.prepare(speculator, optimizer)
    if _zero_stage(accelerator) == 3:
        import deepspeed

        # Losses read weights without calling their module; the root's hooks then gather them.
        for parameter in speculator.parameters():
            deepspeed.zero.register_external_parameter(speculator, parameter)
    return model, prepared


def backward(accelerator: Accelerator, model: Any, loss: Tensor, last: bool) -> None:
    """Add the gradients of one micro-batch; the `last` one of a window also lets them be averaged over processes.
    Under DeepSpeed the last one takes the optimiser step too."""
    if accelerator.distributed_type == DistributedType.DEEPSPEED:
        model.set_gradient_accumulation_boundary(is_boundary=last)
        model.backward(loss)
        if last:
            model.step()
    else:
        accelerator.backward(loss)


def undone(accelerator: Accelerator) -> str:
    """What became of a step whose loss is found not to be finite once `backward` is through, in words."""
    if accelerator.distributed_type == DistributedType.DEEPSPEED:
        return "no checkpoint holds this step"
    return "this step was not taken or saved"


def synchronised_only(accelerator: Accelerator, model: Any, last: bool) -> Any:
    """A context for forward and backward of a micro-batch: processes exchange gradients in the `last` one only."""
    return nullcontext() if last else accelerator.no_sync(model)


def clip_gradients(accelerator: Accelerator, model: Any, max_norm: float) -> Tensor:
    """Clip the window's gradients and return their norm before clipping, over all parameters of all processes."""
    norm = accelerator.clip_grad_norm_(model.parameters(), max_norm)
    if isinstance(norm, DTensor):
        norm = norm.full_tensor()
    return torch.as_tensor(norm, dtype=torch.float64, device=accelerator.device)


@contextmanager
def gathered(accelerator: Accelerator, model: Any) -> Iterator[None]:
    """Full weights on every process, to call methods of the bare speculator other than `forward`. All processes enter
    and leave together."""
    shards = [module for module in model.modules() if isinstance(module, FSDPModule)]
    if _zero_stage(accelerator) == 3:
        import deepspeed

        with deepspeed.zero.GatheredParameters(list(model.parameters())):
            yield
        return
    for shard in shards:
        shard.unshard()
    yield
    for shard in shards:
        shard.reshard()


def model_tensors(accelerator: Accelerator, model: Any) -> dict[str, Tensor]:
    """The full trained weights, on the main process (elsewhere possibly nothing). Called by all processes."""
    if accelerator.distributed_type == DistributedType.DEEPSPEED:
        with gathered(accelerator, model):
            return {name: tensor.detach().cpu().clone() for name, tensor in model.module.state_dict().items()}
    tensors: Any = get_model_state_dict(model, options=FULL)
    return dict(tensors)


def optimizer_tensors(accelerator: Accelerator, model: Any, optimizer: Any) -> dict[str, Tensor] | None:
    """The full optimiser state as `<parameter>/<state>`, on the main process; None under DeepSpeed, which writes its
    own files. Called by all processes."""
    if accelerator.distributed_type == DistributedType.DEEPSPEED:
        return None
    whole: Any = get_optimizer_state_dict(model, optimizer.optimizer, options=FULL)
    state = whole.get("state", {})
    return {f"{name}/{key}": value for name, values in state.items() for key, value in values.items()}


def save_engine_state(accelerator: Accelerator, model: Any, directory: Path) -> None:
    """What only the engine itself can write: DeepSpeed's partitioned optimiser. Called by all processes."""
    if accelerator.distributed_type == DistributedType.DEEPSPEED:
        model.save_checkpoint(str(directory / ENGINE_DIR), tag=ENGINE_TAG, save_latest=False)


def load_optimizer(accelerator: Accelerator, model: Any, optimizer: Any, directory: Path) -> None:
    """Restore the optimiser from a checkpoint directory. Called by all processes, after `prepare`.

    Raises UserError where the checkpoint was written by another engine.
    """
    deepspeed = accelerator.distributed_type == DistributedType.DEEPSPEED
    needed = directory / (ENGINE_DIR if deepspeed else OPTIMIZER_FILE)
    if not needed.exists():
        raise UserError(f"{needed} is missing: resume with the accelerate config that the run was started with")
    if deepspeed:
        model.load_checkpoint(str(needed), tag=ENGINE_TAG)
        return
    whole = StateDictOptions(full_state_dict=True)
    full: Any = get_optimizer_state_dict(model, optimizer.optimizer, options=whole)
    state: dict[str, dict[str, Tensor]] = {}
    for path, tensor in load_file(needed).items():
        name, key = path.rsplit("/", 1)
        state.setdefault(name, {})[key] = tensor
    full["state"] = state
    set_optimizer_state_dict(model, optimizer.optimizer, full, options=whole)


def _zero_stage(accelerator: Accelerator) -> int:
    if accelerator.distributed_type != DistributedType.DEEPSPEED:
        return 0
    return int(accelerator.state.deepspeed_plugin.zero_stage)


def _leave_gloo() -> None:
    """A process that ends inside a Gloo group may abort ("terminate called without an active exception"), and the
    launcher then reports a failure. A group that the end of training has left is gone already."""
    if torch.distributed.is_initialized() and torch.distributed.get_backend() == "gloo":
        torch.distributed.destroy_process_group()


atexit.register(_leave_gloo)


def broadcast_flag(flag: bool, device: Literal["auto", "cpu", "cuda"]) -> bool:
    """`flag` of the main process, on every process. Called by all of them."""
    from accelerate import PartialState
    from accelerate.utils import broadcast_object_list

    deepspeed = os.environ.get("ACCELERATE_USE_DEEPSPEED", "false").lower() == "true"
    on_cpu = device == "cpu" or not torch.cuda.is_available()
    PartialState(cpu=on_cpu and not deepspeed)
    return bool(broadcast_object_list([flag])[0])
