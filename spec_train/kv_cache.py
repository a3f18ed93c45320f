"""Keys and values by position, and the attention that reads them. Shared by the target and by heads that draft.

Shape legend: see `batch.py`; further S new positions, T cached ones, d head_dim.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AttentionInterface
from transformers.cache_utils import Cache
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask

GROUPED_ATTENTION = "spec_train_grouped"


def grouped_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """Scaled dot-product attention that folds the query heads of a group into the query axis.

    With an explicit mask the stock path copies every key and value once per query head, which dominates a decoding
    step; folding computes the same kernel without the copy. query [B, heads, S, d], key [B, kv_heads, T, d], value
    [B, kv_heads, T, v], where latent attention has v unlike d -> [B, S, heads, v].
    """
    batch, heads, length, dim = query.shape
    kv_heads = key.shape[1]
    groups = heads // kv_heads
    folded = query.reshape(batch, kv_heads, groups * length, dim)
    mask = attention_mask
    if mask is None and length > 1:  # Transformers leaves the mask out where plain causal attention is meant
        mask = torch.ones(length, key.shape[2], dtype=torch.bool, device=query.device).tril(key.shape[2] - length)[
            None, None
        ]
    if mask is not None and groups > 1 and mask.shape[-2] > 1:  # one query's mask serves every head as it is
        mask = mask.expand(batch, -1, -1, -1).repeat(1, 1, groups, 1)
    out = F.scaled_dot_product_attention(folded, key, value, attn_mask=mask, scale=scaling)
    return out.view(batch, heads, length, value.shape[-1]).transpose(1, 2).contiguous(), None


AttentionInterface.register(GROUPED_ATTENTION, grouped_attention)
AttentionMaskInterface.register(GROUPED_ATTENTION, sdpa_mask)


class SlotCache(Cache):  # type: ignore[misc]  # transformers is untyped
    """A key/value cache whose rows stand at different lengths and roll back for free.

    The entry of position p lives in slot p of its row, and a query at position p sees the slots up to p only. Rejected
    drafts therefore need no cropping: they lie beyond every later query until a real token overwrites them.
    """

    def __init__(self, num_layers: int, max_length: int) -> None:
        super().__init__(layers=[])
        self.max_length = max_length
        self._keys: list[Tensor | None] = [None] * num_layers
        self._values: list[Tensor | None] = [None] * num_layers
        self._slots: tuple[Tensor, Tensor] | None = None  # rows [B, 1] and slots [B, S] of the next write
        self._start: int | None = None
        self._limit = 0

    def place(self, position_BS: Tensor, start: int | None, limit: int, count_B: Tensor | None = None) -> None:
        """Say where the next forward pass writes. `start`: first slot if all rows write the same range, else None;
        `limit`: one more than the highest slot in use; `count_B`: tokens of a row that are not padding (None: all),
        for caches to which padding makes a difference."""
        if start is None and position_BS.shape[0] == 1 and int(position_BS[0, 0]) + position_BS.shape[1] == limit:
            start = limit - position_BS.shape[1]  # a single row writes one range, unless padding shares a slot
        self._start, self._limit = start, limit
        rows = torch.arange(position_BS.shape[0], device=position_BS.device)[:, None]
        self._slots = None if start is not None else (rows, position_BS)

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *_: Any, **__: Any
    ) -> tuple[Tensor, Tensor]:
        """Write [B, kv_heads, S, d] states into their slots; return the keys and values of all slots in use."""
        keys, values = self._keys[layer_idx], self._values[layer_idx]
        if keys is None or values is None:
            batch, heads, _s, dim = key_states.shape
            keys = key_states.new_zeros(batch, heads, self.max_length, dim)
            values = value_states.new_zeros(batch, heads, self.max_length, value_states.shape[-1])
            self._keys[layer_idx], self._values[layer_idx] = keys, values
        if self._start is not None:
            end = self._start + key_states.shape[2]
            keys[:, :, self._start : end] = key_states
            values[:, :, self._start : end] = value_states
        else:
            assert self._slots is not None
            rows, slots = self._slots
            keys[rows, :, slots] = key_states.transpose(1, 2)
            values[rows, :, slots] = value_states.transpose(1, 2)
        return keys[:, :, : self._limit], values[:, :, : self._limit]

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Slots in use before the pending forward pass (Transformers asks; positions are always given explicitly)."""
        return 0

    def branch(self, rows: Tensor) -> SlotCache:
        """A copy of the given rows (int64 indices, repeats allowed); this cache stays as it is."""
        branched = copy.copy(self)
        branched.select(rows)
        return branched

    def move(self, source_BS: Tensor, target_BS: Tensor) -> None:
        """Copy the entries of slots `source_BS` of each row into its slots `target_BS`, all read before any is
        written. Tokens keep the position they were computed at."""
        rows = torch.arange(source_BS.shape[0], device=source_BS.device)[:, None]
        for entries in (*self._keys, *self._values):
            if entries is not None:
                entries[rows, :, target_BS] = entries[rows, :, source_BS]

    def select(self, rows: Tensor) -> None:
        """Keep only the given rows (int64 indices), in that order."""
        self._keys = [None if k is None else k[rows] for k in self._keys]
        self._values = [None if v is None else v[rows] for v in self._values]
