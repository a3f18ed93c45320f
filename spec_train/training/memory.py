"""How much memory a micro-batch takes beside weights, gradients and optimiser, estimated without running one.

What a head keeps for its backward pass differs from method to method, so it is not written down in formulas. A few
short micro-batches are run, all tensors that come alive are counted, and the peaks are carried over to the real size.
Of one row of w tokens they are a + b w + c w^2 (c from attention), which three widths determine; further rows add
b w + c w^2 each, as attention does not cross rows. a is what is held a slice at a time, such as chunks of logits, so
the short batches must fill a slice. The peaks of the target's pass, the loss and the backward pass are carried over by
themselves: which of them is the highest may depend on the size.

Not counted: what a kernel allocates inside itself, and what an allocator keeps for later.

Shape legend: P phases of a step, W widths.
"""

from __future__ import annotations

import random
import weakref
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from spec_train.batch import Batch, FeatureSpec
from spec_train.data.batches import build_batch
from spec_train.data.documents import Document
from spec_train.speculators.base import Speculator
from spec_train.target import LSE_CHUNK, TargetModel

MARGIN = 0.15  # how far the estimate may be off, see tests/parity/test_memory.py
# Of the short rows. Each fills the slices of the fused loss (`losses.CHUNK`) a few times over, so that at none of them
# another place of the step is the highest than at full size; the target's pass has no slices but those added below.
HEAD_WIDTHS = (640, 832, 1024)
TARGET_WIDTHS = (256, 384, 512)


@dataclass(frozen=True)
class StepShape:
    """A micro-batch: `rows` of `width` tokens. `online`: the target runs in every step; `dtype`: of the states."""

    rows: int
    width: int
    online: bool
    dtype: torch.dtype
    precision: Literal["bf16", "fp32"]


Peaks = npt.NDArray[np.float64]
Measure = Callable[[TargetModel, Speculator, StepShape], Peaks]


def activation_bytes(target: TargetModel, head: Speculator, shape: StepShape) -> int:
    """Bytes that such a micro-batch takes at most beside weights, gradients and optimiser, its states included, with
    every token supervised. `head` is in float32 on the target's device; its gradients are dropped."""
    peak = carried_over(head_peaks, target, head, shape, HEAD_WIDTHS).max()
    if shape.online:
        peak = max(peak, carried_over(target_peaks, target, head, shape, TARGET_WIDTHS).max())
        tokens = shape.rows * shape.width
        # Then the states are there, and a slice of logits with its float32 copy and exponentials.
        states = tokens * (len(head.feature_spec.aux_layer_ids) + 1) * target.hidden_size * shape.dtype.itemsize
        peak = max(peak, states + min(LSE_CHUNK, tokens) * target.vocab_size * (target.dtype.itemsize + 8))
    return int(peak)


def carried_over(
    measure: Measure, target: TargetModel, head: Speculator, shape: StepShape, widths: tuple[int, int, int]
) -> Peaks:
    """Peaks of a micro-batch of that shape, from smaller ones (itself where it is small)."""
    if shape.width > widths[-1]:
        peaks_WP = np.stack([measure(target, head, replace(shape, rows=1, width=width)) for width in widths])
        share_W = np.array(widths) / shape.width
        a_P, b_P, c_P = np.linalg.solve(np.vander(share_W, increasing=True), peaks_WP)
        whole_P: Peaks = a_P + shape.rows * (b_P + c_P.clip(min=0))
        return whole_P
    few = -(-widths[0] // shape.width)
    if shape.rows <= 2 * few:
        return measure(target, head, shape)
    some_P, twice_P = (measure(target, head, replace(shape, rows=rows)) for rows in (few, 2 * few))
    more_P: Peaks = some_P + (twice_P - some_P) * (shape.rows - few) / few
    return more_P


def target_peaks(target: TargetModel, head: Speculator, shape: StepShape) -> Peaks:
    """[1]: the peak of the target's pass, without the logits that follow it."""
    batch = _batch(target, shape)
    live = LiveTensors()
    with live:
        spec = FeatureSpec(head.feature_spec.aux_layer_ids, last_hidden=True)
        target.features(batch.input_ids_BT, batch.position_BT, batch.document_BT, spec)
    return np.array([live.take_peak()], dtype=np.float64)


def head_peaks(target: TargetModel, head: Speculator, shape: StepShape) -> Peaks:
    """[2]: the peaks of the loss and of its backward pass, on random states."""
    batch = _batch(target, shape)
    counts = head.supervised_counts(batch)
    trained = [parameter for parameter in head.parameters() if parameter.requires_grad]
    for parameter in trained:
        parameter.grad = torch.zeros_like(parameter)  # counted with the weights, so not among what comes alive
    head.train()
    live = LiveTensors()
    with torch.random.fork_rng(), live:
        torch.manual_seed(0)
        layers = len(head.feature_spec.aux_layer_ids)
        state = torch.zeros(shape.rows, shape.width, target.hidden_size, dtype=shape.dtype, device=target.device)
        filled = replace(
            batch,
            aux_hidden_BTAH=torch.randn_like(torch.cat([state] * layers, -1)) if layers else None,
            last_hidden_BTH=torch.randn_like(state),
            target_lse_BT=torch.full_like(batch.loss_weight_BT, 20.0),
            logits_dtype=target.dtype,
        )
        del state
        live.take_peak()
        with torch.autocast(target.device.type, torch.bfloat16, enabled=shape.precision == "bf16"):
            loss = head(filled, counts.clamp(min=1))[0]
        of_loss = live.take_peak()
        loss.backward()
        of_backward = live.take_peak()
    for parameter in trained:
        parameter.grad = None
    return np.array([of_loss, of_backward], dtype=np.float64)


def _batch(target: TargetModel, shape: StepShape) -> Batch:
    """Random tokens, all supervised but the first of each row."""
    ids = random.Random(0).choices(range(target.vocab_size), k=shape.width)
    documents = [Document(str(row), ids, [(1, shape.width)]) for row in range(shape.rows)]
    return build_batch(documents, [[row] for row in range(shape.rows)]).to(target.device)


class LiveTensors(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the bytes of tensors that are made under it and still alive. Tensors from outside count nothing."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._live = self._peak = 0
        self._known: weakref.WeakSet[Any] = weakref.WeakSet()

    def take_peak(self) -> int:
        """The most bytes that were alive at once since the last call."""
        peak, self._peak = self._peak, self._live
        return peak

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for given in tree_leaves((args, kwargs)):
            if isinstance(given, Tensor):
                self._known.add(given.untyped_storage())
        result = func(*args, **(kwargs or {}))
        for made in tree_leaves(result):
            if isinstance(made, Tensor) and (storage := made.untyped_storage()) not in self._known:
                self._known.add(storage)
                self._live += storage.nbytes()
                self._peak = max(self._peak, self._live)
                weakref.finalize(storage, self._freed, storage.nbytes())
        return result

    def _freed(self, count: int) -> None:
        self._live -= count
