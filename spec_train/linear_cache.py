"""The running state of gated delta rule layers ("linear attention"), kept so that it can be rolled back.

Source: Yang, Kautz, Hatamizadeh 2024, "Gated Delta Networks" (arXiv 2412.06464), as Qwen3.5 has it. With the decay
exp(g_t), the strength of a write b_t, the normed key k_t and query q_t, and the value v_t of position t:

    q_t, k_t, v_t  from a causal convolution over the last W inputs
    S_t = exp(g_t) S_{t-1} + b_t k_t (v_t - exp(g_t) S_{t-1}^T k_t)^T
    o_t = S_t^T q_t / sqrt(d)

Attention leaves rejected drafts unread; a state that has read them must be undone. Kept is the state before the last
block (the tokens of one pass), with what the block wrote. A pass that begins inside that block first writes the tokens
that stayed once more, with b = 0 and g = 0 for the others, which changes nothing: rows may keep different numbers of
them, and the padding of a prompt is passed over in the same way. Nothing goes back into a prompt, so of a prompt only
the state behind its last token is kept.

Shape legend: B rows, S tokens of a pass, W width of the convolution, C its channels, h heads, d head_dim.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import torch
from torch import Tensor, nn
from transformers.models.qwen3_5.modeling_qwen3_5 import (
    Qwen3_5GatedDeltaNet,
    causal_conv1d_fn,
    torch_chunk_gated_delta_rule,
    torch_recurrent_gated_delta_rule,
)
from transformers.models.qwen3_5_moe.modeling_qwen3_5_moe import Qwen3_5MoeGatedDeltaNet

from spec_train.errors import UserError
from spec_train.kv_cache import SlotCache

FEW = 16  # tokens up to which they are taken one after another; more in chunks of 64


@dataclass(frozen=True)
class _Block:
    """What one layer keeps of the last pass.

    inputs_BTC     of the convolution: the W - 1 before the block, then the block's own
    before, after  state [B, h, d, d] before the block's first token (None: the empty one) and after its last
    writes         keys, values [B, S, h, d], g and b [B, S, h] of the block's tokens; None where none can be undone
    """

    inputs_BTC: Tensor
    before: Tensor | None
    after: Tensor
    writes: tuple[Tensor, Tensor, Tensor, Tensor] | None

    def select(self, rows: Tensor) -> _Block:
        """The given rows (int64 indices)."""
        return _Block(
            self.inputs_BTC[rows],
            None if self.before is None else self.before[rows],
            self.after[rows],
            None if self.writes is None else tuple(part[rows] for part in self.writes),  # type: ignore[arg-type]
        )


class LinearCache(SlotCache):
    """A `SlotCache` for targets that also have layers with a running state.

    A pass may begin at any position of the last one, or right behind it; each row at its own.
    """

    def __init__(self, num_layers: int, max_length: int) -> None:
        super().__init__(num_layers, max_length)
        self._blocks: list[_Block | None] = [None] * num_layers
        self._first_B: Tensor | None = None  # position at which the last block begins
        self._length = 0  # its tokens
        self._kept_B: Tensor | None = None  # how many of them stay; None: all of them, in every row
        self._count_B: Tensor | None = None  # tokens of a pending prompt that are not padding

    def place(self, position_BS: Tensor, start: int | None, limit: int, count_B: Tensor | None = None) -> None:
        """See `SlotCache.place`. A row may begin anywhere within its last block, or right behind it."""
        super().place(position_BS, start, limit)
        first_B = position_BS[:, 0]
        if self._first_B is not None:
            kept_B = first_B - self._first_B
            fewest, most = torch.stack(torch.aminmax(kept_B)).tolist()
            if fewest < 0 or most > self._length:
                raise ValueError(f"a pass {fewest} to {most} tokens into a block of {self._length}")
            self._kept_B = None if fewest == self._length else kept_B
        self._count_B = count_B
        self._first_B = first_B if count_B is None else first_B + count_B
        self._length = position_BS.shape[1] if count_B is None else 0

    def begin(self, layer: int, before: int) -> tuple[Tensor | None, Tensor | None]:
        """Where the pending pass takes up `layer`: its last `before` inputs [B, before, C] and its state [B, h, d, d];
        (None, None) at the beginning of the text."""
        block = self._blocks[layer]
        if block is None:
            return None, None
        if self._kept_B is None:
            return block.inputs_BTC[:, block.inputs_BTC.shape[1] - before :], block.after
        assert block.writes is not None
        keys, values, g_BSh, b_BSh = block.writes
        stays_BS1 = (torch.arange(keys.shape[1], device=keys.device) < self._kept_B[:, None])[..., None]
        _, state = delta_rule(keys, keys, values, g_BSh * stays_BS1, b_BSh * stays_BS1, block.before)
        return _window(block.inputs_BTC, self._kept_B, before), state

    def keep(
        self, layer: int, inputs_BTC: Tensor, before: Tensor | None, after: Tensor, writes: tuple[Tensor, ...]
    ) -> None:
        """What `layer` made of the pending pass, see `_Block`."""
        if self._count_B is None:
            keys, values, g_BSh, b_BSh = writes
            self._blocks[layer] = _Block(inputs_BTC, before, after, (keys, values, g_BSh, b_BSh))
        else:
            width = inputs_BTC.shape[1] - writes[0].shape[1]
            self._blocks[layer] = _Block(_window(inputs_BTC, self._count_B, width), None, after, None)

    def real_BS1(self, length: int) -> Tensor | None:
        """Which tokens of the pending pass are not padding, [B, S, 1]; None where all are."""
        if self._count_B is None:
            return None
        return (torch.arange(length, device=self._count_B.device) < self._count_B[:, None])[..., None]

    def select(self, rows: Tensor) -> None:
        """See `SlotCache.select`."""
        super().select(rows)
        self._blocks = [None if block is None else block.select(rows) for block in self._blocks]
        if self._first_B is not None:
            self._first_B = self._first_B[rows]


def _window(inputs_BTC: Tensor, skip_B: Tensor, width: int) -> Tensor:
    """[B, width, C] of each row, behind its first `skip_B` entries."""
    rows = torch.arange(len(skip_B), device=skip_B.device)[:, None]
    return inputs_BTC[rows, skip_B[:, None] + torch.arange(width, device=skip_B.device)]


def delta_rule(
    query: Tensor, key: Tensor, value: Tensor, g_BSh: Tensor, b_BSh: Tensor, state: Tensor | None
) -> tuple[Tensor, Tensor]:
    """(o [B, S, h, d], the state behind the last token [B, h, d, d]), see the module's equations; query, key and value
    [B, S, h, d] before their norms. Transformers' functions, which take fused kernels where those are installed."""
    rule: Any = torch_recurrent_gated_delta_rule if key.shape[1] <= FEW else torch_chunk_gated_delta_rule
    if query.dtype == torch.float32:
        rule = inspect.unwrap(rule)  # the fused kernels refuse it
    out, after = rule(
        query,
        key,
        value,
        g=g_BSh,
        beta=b_BSh,
        initial_state=state,
        output_final_state=True,
        use_qk_l2norm_in_kernel=True,
    )
    return out, after


class _Rollback:
    """The layer with our own pass, but for padding that a mask tells and for the caches of Transformers."""

    def forward(
        self, hidden_states: Tensor, cache_params: Any = None, attention_mask: Tensor | None = None, **kwargs: Any
    ) -> Tensor:
        """[B, S, H] -> [B, S, H]."""
        if attention_mask is None and (cache_params is None or isinstance(cache_params, LinearCache)):
            return linear_pass(self, hidden_states, cache_params)
        own: Tensor = super().forward(hidden_states, cache_params, attention_mask, **kwargs)  # type: ignore[misc]
        return own


class _Dense(_Rollback, Qwen3_5GatedDeltaNet):  # type: ignore[misc]  # transformers is untyped
    pass


class _Moe(_Rollback, Qwen3_5MoeGatedDeltaNet):  # type: ignore[misc]
    pass


def roll_back(layers: Iterable[nn.Module], name: str) -> None:
    """Let these decoder layers keep their state in a `LinearCache`, in place. Raises UserError for layers of a family
    whose linear attention is another one."""
    for layer in layers:
        inner = getattr(layer, "linear_attn", None)
        if type(inner) is Qwen3_5GatedDeltaNet:
            inner.__class__ = _Dense
        elif type(inner) is Qwen3_5MoeGatedDeltaNet:
            inner.__class__ = _Moe
        elif not isinstance(inner, _Rollback):
            raise UserError(
                f"target {name}: linear attention as in {type(layer).__name__} is not supported; that of Qwen3.5 is"
            )


def linear_pass(layer: Any, hidden_BSH: Tensor, cache: LinearCache | None) -> Tensor:
    """One pass of a gated delta rule layer [B, S, H] -> [B, S, H] that takes up the state where the cache has it and
    leaves there what may have to be undone. Without a cache the text begins here."""
    batch, length, _ = hidden_BSH.shape
    inputs_BSC = layer.in_proj_qkv(hidden_BSH)
    gate = layer.in_proj_z(hidden_BSH).view(batch, length, -1, layer.head_v_dim)
    b_BSh = layer.in_proj_b(hidden_BSH).sigmoid()
    g_BSh = -layer.A_log.float().exp() * nn.functional.softplus(layer.in_proj_a(hidden_BSH).float() + layer.dt_bias)
    taps = layer.conv_kernel_size - 1
    window_BWC, state, real_BS1 = None, None, None
    if cache is not None:
        real_BS1 = cache.real_BS1(length)
        window_BWC, state = cache.begin(layer.layer_idx, taps)
    if real_BS1 is not None:
        b_BSh, g_BSh = b_BSh * real_BS1, g_BSh * real_BS1
    if window_BWC is None:
        window_BWC = inputs_BSC.new_zeros(batch, taps, inputs_BSC.shape[-1])
    inputs_BTC = torch.cat([window_BWC, inputs_BSC], dim=1)
    mixed_BCT = causal_conv1d_fn(
        inputs_BTC.transpose(1, 2), layer.conv1d.weight.squeeze(1), layer.conv1d.bias, activation=layer.activation
    )
    sizes = [layer.key_dim, layer.key_dim, layer.value_dim]
    query, key, value = mixed_BCT[:, :, taps:].transpose(1, 2).split(sizes, dim=-1)
    query, key = (part.reshape(batch, length, -1, layer.head_k_dim) for part in (query, key))
    value = value.reshape(batch, length, -1, layer.head_v_dim)
    if (groups := layer.num_v_heads // layer.num_k_heads) > 1:
        query, key = (part.repeat_interleave(groups, dim=2) for part in (query, key))
    out, after = delta_rule(query, key, value, g_BSh, b_BSh, state)
    if cache is not None:
        cache.keep(layer.layer_idx, inputs_BTC, state, after, (key, value, g_BSh, b_BSh))
    normed = layer.norm(out.reshape(-1, layer.head_v_dim), gate.reshape(-1, layer.head_v_dim))
    mixed: Tensor = layer.out_proj(normed.view(batch, length, -1))
    return mixed


# ------------------------------------------------------------------------------------------ packed rows
def by_document(
    states: Callable[[Tensor, Tensor], tuple[Tensor, Tensor | None]],
    input_ids_BT: Tensor,
    position_BT: Tensor,
    document_BT: Tensor,
) -> list[Tensor | None]:
    """What `states` (of ids and positions) gives for packed rows, computed with a row for each document, since a state
    would run on from one into the next; zeros at padding (document -1). There is at least one document.

    Documents none of which is shorter than half of another share a pass; what stands behind one reaches none of it.
    """
    length, device = input_ids_BT.shape[1], input_ids_BT.device
    spans = []  # row, first position, end
    for b, documents in enumerate(document_BT.tolist()):
        for document, part in groupby(range(length), documents.__getitem__):
            if document >= 0:
                places = list(part)
                spans.append((b, places[0], places[-1] + 1))
    spans.sort(key=lambda span: span[1] - span[2])
    found: list[Tensor | None] = [None, None]
    while spans:
        width = spans[0][2] - spans[0][1]
        together = [span for span in spans if 2 * (span[2] - span[1]) >= width]
        spans = spans[len(together) :]
        ids, position = (torch.zeros(len(together), width, dtype=torch.long, device=device) for _ in range(2))
        for row, (b, begin, end) in enumerate(together):
            ids[row, : end - begin] = input_ids_BT[b, begin:end]
            position[row, : end - begin] = position_BT[b, begin:end]
        for i, values in enumerate(states(ids, position)):
            if values is None:
                continue
            whole = found[i]
            if whole is None:
                whole = found[i] = values.new_zeros(*input_ids_BT.shape, values.shape[-1])
            for row, (b, begin, end) in enumerate(together):
                whole[b, begin:end] = values[row, : end - begin]
    return found
