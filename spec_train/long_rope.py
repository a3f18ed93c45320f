"""LongRoPE, whose rotary frequencies depend on how long a text is, with an answer for each request that is its own.

Up to the original limit L of the model all tokens are rotated by its short factors, in a longer text all of them by its
long ones (Ding et al. 2024, arXiv:2402.13753). Transformers looks at the longest row of a batch, so a short request
would get other answers beside a long one. Here the state at position p is that of the text 0 .. p alone: under the
short factors for p < L, under the long ones from there on, with all that precedes it computed under the long ones too.
That is what Transformers' `generate` gives a lone request; Phi-3 drops its cache at the switch. vLLM takes the long
factors for every request where max_model_len is above L, else the short ones.

So a pass that reaches L is two passes, of which each position takes its own, and a request has two caches. The second
one stays empty until the request reaches L, and is then filled from the tokens, which the cache remembers.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from spec_train.errors import UserError
from spec_train.kv_cache import SlotCache


def switch_of(config: Any, name: str) -> int | None:
    """The position from which on a target of this (text) config takes its long factors; None where none ever does."""
    rope = getattr(config, "rope_parameters", None) or {}
    parts = [rope, *(part for part in rope.values() if isinstance(part, dict))]
    kinds = [part for part in parts if part.get("rope_type") == "longrope"]
    limits = {int(part["original_max_position_embeddings"]) for part in kinds}
    if len(limits) > 1:
        raise UserError(f"target {name}: layers with LongRoPE of several original limits are not supported")
    limit = min(limits, default=None)
    return None if limit is None or limit >= int(config.max_position_embeddings) else limit


class SwitchCache(SlotCache):
    """A `SlotCache` of entries under the short factors, with another one, `long`, of those under the long factors.

    `token_BT` holds the token of every slot, `filled_B` up to which slot `long` has each row's entries.
    """

    def __init__(self, num_layers: int, max_length: int) -> None:
        super().__init__(num_layers, max_length)
        self.long = SlotCache(num_layers, max_length)
        self.token_BT: Tensor | None = None
        self.filled_B: Tensor | None = None
        self._pending: tuple[Tensor, int | None, int] | None = None

    def place(self, position_BS: Tensor, start: int | None, limit: int, count_B: Tensor | None = None) -> None:
        """See `SlotCache.place`."""
        super().place(position_BS, start, limit)
        self.long.place(position_BS, start, limit)
        self._pending, first_B = (position_BS, start, limit), position_BS[:, 0]
        self.filled_B = torch.zeros_like(first_B) if self.filled_B is None else torch.minimum(self.filled_B, first_B)

    def remember(self, token_BS: Tensor) -> None:
        """The tokens of the pending pass."""
        assert self._pending is not None
        if self.token_BT is None:
            self.token_BT = token_BS.new_zeros(token_BS.shape[0], self.max_length)
        self.token_BT.scatter_(1, self._pending[0], token_BS)

    @contextmanager
    def catching_up(self, needs_B: Tensor) -> Iterator[tuple[Tensor, Tensor] | None]:
        """Inside, `long` takes in what it lacks before the pending pass of the rows that need it: the given (tokens,
        slots) [B, W], or None where nothing lacks. After it, it is set for the pending pass.

        A last column stands in the last slot, so that the pass is one under the long factors. Like what rows that lack
        fewer write behind theirs, its entries lie beyond every query until the request's own tokens overwrite them.
        """
        assert self._pending is not None and self.filled_B is not None and self.token_BT is not None
        first_B, size = self._pending[0][:, 0], self._pending[0].shape[1]
        width = int((first_B - self.filled_B).where(needs_B, 0).max())
        lacking = None
        if width > 0:
            slot_BW = self.filled_B[:, None] + torch.arange(width, device=first_B.device)
            slot_BW = F.pad(slot_BW, (0, 1), value=self.max_length).clamp(max=self.max_length - 1)
            self.long.place(slot_BW, None, self.max_length)
            lacking = self.token_BT.gather(1, slot_BW), slot_BW
        yield lacking
        self.long.place(*self._pending)
        self.filled_B = torch.where(needs_B, first_B + size, self.filled_B)

    def move(self, source_BS: Tensor, target_BS: Tensor) -> None:
        """See `SlotCache.move`."""
        super().move(source_BS, target_BS)
        self.long.move(source_BS, target_BS)
        assert self.token_BT is not None
        self.token_BT.scatter_(1, target_BS, self.token_BT.gather(1, source_BS))

    def select(self, rows: Tensor) -> None:
        """See `SlotCache.select`."""
        super().select(rows)
        self.long = self.long.branch(rows)  # a copy of this cache shares it
        self.token_BT = None if self.token_BT is None else self.token_BT[rows]
        self.filled_B = None if self.filled_B is None else self.filled_B[rows]
