"""Linear layers of frozen float32 models on the CPU, with weights laid out once as oneDNN multiplies them.

A decoding pass multiplies a few rows (one token, K + 1 tokens, or a small batch) by every weight of a model. With a
plain row-major weight [out, in] one row takes 1.3 to 1.7 times as long as with a packed one, and four rows about twice
as long. Plain decoding gains as well: the baseline of a speed-up must not be slower than it can be. The packed copy is
made when a weight is first used and doubles its memory; weights beyond `MOST_BYTES` in all stay plain.

The product is that of `F.linear` up to float32 rounding. Anything other than frozen float32 weights on an x86 CPU
outside autograd and autocast takes `F.linear` itself.
"""

from __future__ import annotations

import platform
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

MOST_BYTES = 4 << 30
FEWEST_ROWS = 4  # oneDNN's kernels for fewer rows are slower than the one for four
_SUPPORTED = (
    platform.machine() in ("x86_64", "AMD64")
    and torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
    and hasattr(torch.ops.mkldnn, "_linear_pointwise")
)
_every: weakref.WeakSet[PackedWeight] = weakref.WeakSet()
_enabled = True


class _Identity:
    """Which weight was packed: its storage, held weakly, and the view and version of it. An address tells nothing: the
    next weight may lie where a freed one did. As long as the reference lives, its number is not given to another."""

    def __init__(self, weight: Tensor) -> None:
        self.storage = StorageWeakRef(weight.untyped_storage())  # type: ignore[no-untyped-call]
        self.view = _view(weight)

    def same(self, weight: Tensor) -> bool:
        """Whether `weight` is what was packed."""
        return self.storage.cdata == weight.untyped_storage()._cdata and self.view == _view(weight)

    def equals(self, other: _Identity) -> bool:
        """Whether both are of one weight."""
        return bool(self.storage == other.storage) and self.view == other.view


def _view(weight: Tensor) -> tuple[int, int, torch.Size, tuple[int, ...]]:
    return weight.data_ptr(), weight._version, weight.shape, weight.stride()


class PackedWeight:
    """The packed copy of one weight, for whoever owns the weight to keep. A copy of its owner starts without one."""

    def __init__(self) -> None:
        self.packed: Tensor | None = None
        self.bytes = 0
        self.of: _Identity | None = None
        _every.add(self)

    def __reduce__(self) -> tuple[type[PackedWeight], tuple[()]]:
        return PackedWeight, ()

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        """`F.linear`: x [..., in], weight [out, in], bias [out] -> [..., out]. `weight` may change between calls."""
        count = x.numel() // x.shape[-1]
        if (
            count == 0
            or weight.requires_grad
            or weight.is_inference()  # has no version, so a change would go unseen
            or not weight.dtype == x.dtype == torch.float32
            or torch.is_grad_enabled()
            or torch.is_autocast_enabled("cpu")
            or not _enabled
        ):
            return F.linear(x, weight, bias)
        if self.of is None or not self.of.same(weight):
            self._pack(weight)
        if self.packed is None:
            return F.linear(x, weight, bias)
        rows_NI = x.reshape(count, -1)
        if count < FEWEST_ROWS:
            rows_NI = F.pad(rows_NI, (0, 0, 0, FEWEST_ROWS - count))
        out: Tensor = torch.ops.mkldnn._linear_pointwise(rows_NI, self.packed, bias, "none", [], "")
        return out[:count].view(*x.shape[:-1], -1)

    def _pack(self, weight: Tensor) -> None:
        """Pack `weight`, or leave `packed` at None where that cannot be or there is no room."""
        self.packed, self.bytes = None, 0
        if not _SUPPORTED or type(weight) not in (Tensor, nn.Parameter) or not weight.is_cpu:
            return
        self.of = _Identity(weight)
        for other in _every:
            if other is not self and other.packed is not None and other.of is not None and other.of.equals(self.of):
                self.packed = other.packed  # a head that a draft borrows
                return
        size = weight.numel() * weight.element_size()
        if size + sum(other.bytes for other in _every) <= MOST_BYTES:
            self.packed = torch.ops.mkldnn._reorder_linear_weight(weight.detach(), FEWEST_ROWS)
            self.bytes = size


class PackedLinear(nn.Linear):
    """`nn.Linear` with a `PackedWeight`. Parameters, names and gradients are those of `nn.Linear`."""

    packed: PackedWeight

    def forward(self, input: Tensor) -> Tensor:
        """input [..., in] -> [..., out]."""
        return self.packed.linear(input, self.weight, self.bias)


def pack_linears(model: nn.Module) -> None:
    """Make every plain `nn.Linear` of `model` a `PackedLinear`, in place."""
    for module in model.modules():
        if type(module) is nn.Linear:
            module.__class__ = PackedLinear
            cast(PackedLinear, module).packed = PackedWeight()


@contextmanager
def plain_linears() -> Iterator[None]:
    """Inside, every product is `F.linear`: for comparisons with other tools."""
    global _enabled
    before, _enabled = _enabled, False
    try:
        yield
    finally:
        _enabled = before
