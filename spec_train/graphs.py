"""Decoding passes of fixed shape: captured once as CUDA graphs, then replayed.

A pass of a decoder over a few tokens starts hundreds of small kernels, and on a GPU starting them takes longer than
their work. A CUDA graph starts them all at once, but does the same work on the same addresses each time. So a pass here

    reads   static tensors, into which every call copies its tokens and positions
    writes  its keys and values by index tensors into buffers that outlive a request (`Buffers`)
    sees    the first `bucket(limit)` slots, of which a mask made from the positions hides those beyond each query

There is one static pass for each (shapes of the inputs, slots, states asked for). Prompts' own passes, trees and passes
of more than `MOST_ROWS` tokens a row run as without graphs, and so do the first `eager_passes` of each shape: a capture
takes about as long as a few of them. Rows that leave a batch are dropped in place, so what is captured stays valid.

A model whose control flow depends on its data (experts picked one by one, rotary frequencies that change with the
length) cannot be captured. The pass before the capture runs with every wait for the device forbidden, which finds that
out; such a model goes on without graphs, and one line says so.

Without `capture` the same static pass is computed anew at each call, on any device.

Shape legend: see `kv_cache.py`.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from rich.console import Console
from torch import Tensor, nn

from spec_train.kv_cache import SlotCache

MOST_ROWS = 16  # tokens of a row: a pass over more is bound by its work
MOST_PASSES = 128  # captured on one set of buffers; each takes memory of the device

Outputs = tuple[Tensor | None, ...]
Compute = Callable[..., Outputs]  # (*inputs, slots) -> outputs


def bucket(length: int) -> int:
    """Slots of a static pass that needs `length` of them: 128, 256, 512, then multiples of 512."""
    if length > 512:
        return -(-length // 512) * 512
    return max(128, 1 << (length - 1).bit_length())


class Recorded(Protocol):
    """Work that was captured on fixed tensors."""

    def replay(self) -> None:
        """Do it again, on what these tensors hold now."""


@dataclass
class StaticPass:
    """One pass of fixed shape. `rows_B1`: the rows that its index tensors name; `graph` is None without capture."""

    inputs: tuple[Tensor, ...]
    rows_B1: Tensor
    graph: Recorded | None = None
    outputs: Outputs = ()


class Buffers:
    """Keys and values of every layer at addresses that stay, and the passes captured on them."""

    def __init__(self, rows: int, slots: int, num_layers: int) -> None:
        self.rows, self.slots = rows, slots
        self.keys: list[Tensor | None] = [None] * num_layers
        self.values: list[Tensor | None] = [None] * num_layers
        self.passes: dict[Hashable, StaticPass] = {}
        self.seen: Counter[Hashable] = Counter()
        self.user: weakref.ref[GraphCache] | None = None

    @property
    def free(self) -> bool:
        """True where no living cache uses them."""
        return self.user is None or self.user() is None

    def layer(self, index: int, key_states: Tensor, value_states: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values [B, kv_heads, slots, d] of a layer, for a batch as large as that of the states."""
        keys, values = self.keys[index], self.values[index]
        if keys is None or values is None:
            with torch.inference_mode(False):  # they serve callers inside and outside of it
                keys, values = (
                    states.new_zeros(self.rows, states.shape[1], self.slots, states.shape[3])
                    for states in (key_states, value_states)
                )
            self.keys[index], self.values[index] = keys, values
        return keys[: key_states.shape[0]], values[: key_states.shape[0]]

    def clear(self) -> None:
        """Forget the entries of the last request: a masked entry adds nothing only where it is finite."""
        for entries in (*self.keys, *self.values):
            if entries is not None:
                entries.zero_()


class Graphs:
    """The buffers and static passes of models that decode: a target, and the drafts beside it.

    `capture`: record passes as CUDA graphs, or compute them anew at each call. Weights may change in place, but a model
    that moves to another device or dtype needs new `Graphs`.
    """

    def __init__(self, capture: bool = True, eager_passes: int = 2) -> None:
        self.capture, self.eager_passes = capture, eager_passes
        self.refused: weakref.WeakSet[nn.Module] = weakref.WeakSet()
        self._buffers: weakref.WeakKeyDictionary[nn.Module, list[Buffers]] = weakref.WeakKeyDictionary()
        self._stream: Any = None
        self._pool: Any = None

    def new_cache(self, owner: nn.Module, num_layers: int, max_length: int) -> GraphCache:
        """An empty cache for requests of at most `max_length` tokens, for the layers of `owner`."""
        return GraphCache(self, owner, num_layers, max_length)

    def passes(self, owner: nn.Module) -> int:
        """How many static passes of `owner` there are now."""
        return sum(len(buffers.passes) for buffers in self._buffers.get(owner, ()))

    def lend(self, cache: GraphCache, owner: nn.Module, num_layers: int, rows: int, slots: int) -> Buffers:
        """Buffers of at least that size, to `cache` for as long as it lives."""
        owned = self._buffers.setdefault(owner, [])
        fitting = [b for b in owned if b.free and b.rows >= rows and b.slots >= slots]
        if not fitting:  # free ones that the new ones can stand in for are given up
            owned[:] = [b for b in owned if not (b.free and b.rows <= rows and b.slots <= slots)]
            fitting = [Buffers(rows, slots, num_layers)]
            owned.append(fitting[0])
        chosen = min(fitting, key=lambda b: b.rows * b.slots)
        chosen.clear()
        chosen.user = weakref.ref(cache)
        return chosen

    def record(self, owner: nn.Module, static: StaticPass, run: Callable[[], Outputs]) -> bool:
        """Capture `run` for `static`; False where `owner` cannot be captured, which is said once."""
        try:
            static.graph, static.outputs = self.captured(run, static.rows_B1.device)
        except RuntimeError as error:  # what PyTorch raises for work that cannot be captured, and for want of memory
            self.refused.add(owner)
            why = str(error).strip().splitlines()[0]
            line = f"cuda graphs: {type(owner).__name__} cannot be captured and decodes without them ({why})"
            Console(stderr=True).print(line, style="yellow", markup=False, soft_wrap=True)
            return False
        return True

    def captured(self, run: Callable[[], Outputs], device: torch.device) -> tuple[Recorded, Outputs]:
        """The work of `run` as a graph, and the tensors it leaves its outputs in. Raises RuntimeError where that cannot
        be: where `run` waits for the device, and where memory is short."""
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.device(device):
            if self._stream is None:
                self._stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
                self._pool = torch.cuda.graph_pool_handle()
            self._stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(self._stream), _no_waiting():
                run()  # allocates and compiles what a first pass does, and finds waits before a capture does
            torch.cuda.current_stream().wait_stream(self._stream)
            # One pool for all: passes follow one another, and results are copied out before the next one.
            with torch.cuda.graph(graph, pool=self._pool, stream=self._stream):
                outputs = run()
        return graph, outputs


class GraphCache(SlotCache):
    """A `SlotCache` on lent buffers, whose small passes are static ones."""

    def __init__(self, graphs: Graphs, owner: nn.Module, num_layers: int, max_length: int) -> None:
        super().__init__(num_layers, max_length)
        self._graphs, self._owner = graphs, owner
        self._buffers: Buffers | None = None

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """See `SlotCache.update`. The first batch says how large the buffers must be."""
        if self._buffers is None:
            rows, slots = key_states.shape[0], bucket(self.max_length)
            self._buffers = self._graphs.lend(self, self._owner, len(self._keys), rows, slots)
        if self._keys[layer_idx] is None:
            entries = self._buffers.layer(layer_idx, key_states, value_states)
            self._keys[layer_idx], self._values[layer_idx] = entries
        return super().update(key_states, value_states, layer_idx, *args, **kwargs)

    def run(self, compute: Compute, inputs: tuple[Tensor, ...], limit: int, asked: Hashable = ()) -> Outputs:
        """compute(*inputs, slots), a pass that hands its keys and values to `update`.

        The last of `inputs` are the positions [B, S], and `limit` is one more than the highest. `asked`: whatever else
        changes what `compute` does. The outputs are the caller's own.
        """
        buffers, position_BS = self._buffers, inputs[-1]
        static = None
        if buffers is not None and position_BS.shape[1] <= MOST_ROWS:
            slots = min(bucket(limit), buffers.slots)
            static = self._static_pass(buffers, compute, inputs, slots, asked)
        if static is None:
            self.place(position_BS, None, limit)
            return compute(*inputs, limit)
        if static.graph is not None:
            static.graph.replay()
        else:
            static.outputs = self._compute(compute, static, slots)
        return tuple(None if output is None else output.clone() for output in static.outputs)

    def _static_pass(
        self, buffers: Buffers, compute: Compute, inputs: tuple[Tensor, ...], slots: int, asked: Hashable
    ) -> StaticPass | None:
        """The static pass for these inputs, which it has taken in; None where there is to be none."""
        key = (*((x.shape, x.dtype) for x in inputs), slots, asked)
        buffers.seen[key] += 1
        static = buffers.passes.get(key)
        if static is None:
            graphs = self._graphs
            early = buffers.seen[key] <= graphs.eager_passes
            if early or self._owner in graphs.refused or len(buffers.passes) >= MOST_PASSES:
                return None
            with torch.inference_mode(False):
                fixed = tuple(x.new_zeros(x.shape) for x in inputs)
                rows_B1 = torch.arange(inputs[-1].shape[0], device=inputs[-1].device)[:, None]
            static = StaticPass(fixed, rows_B1)
        for fixed_input, given in zip(static.inputs, inputs, strict=True):
            fixed_input.copy_(given)
        if key not in buffers.passes:
            # The capture is preceded by a pass that is computed, on the very slots that the replay writes again.
            if self._graphs.capture and not self._graphs.record(
                self._owner, static, lambda: self._compute(compute, static, slots)
            ):
                return None
            buffers.passes[key] = static
        return static

    def _compute(self, compute: Compute, static: StaticPass, slots: int) -> Outputs:
        self._start, self._limit, self._slots = None, slots, (static.rows_B1, static.inputs[-1])
        return compute(*static.inputs, slots)

    def branch(self, rows: Tensor) -> SlotCache:
        """See `SlotCache.branch`. The copy has storage of its own and is not static."""
        branched = SlotCache(len(self._keys), self.max_length)
        branched._keys, branched._values = self._keys, self._values
        branched.select(rows)
        return branched

    def select(self, rows: Tensor) -> None:
        """Keep only the given rows (int64 indices, at most as many as there are), moved up within the buffers."""
        for entries in (self._keys, self._values):
            for index, entry in enumerate(entries):
                if entry is not None:
                    entry[: len(rows)] = entry[rows]  # the right-hand side is a copy
                    entries[index] = entry[: len(rows)]


@contextmanager
def _no_waiting() -> Iterator[None]:
    """Inside, an operation that would wait for the device raises RuntimeError."""
    before = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode(before)
