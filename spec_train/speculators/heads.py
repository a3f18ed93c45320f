"""What small multi-head drafters share: K steps from one target state, an output head for each, a draft vocabulary.

The heads are plain modules that need no target: training wraps them (`multi_head.py`), an engine's plugin runs them as
they are. Shape legend: see `base.py`; further r the width of the state that the output heads read.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from spec_train.errors import UserError

State = tuple[Tensor, Tensor]
"""(what the output head reads [..., r], what further steps need besides it)."""


class DraftHeads(nn.Module, ABC):
    """Heads that draft up to `num_heads` tokens from one target state after its final norm.

    `d2t` int64 [D]: what to add to an index of the output heads to get the target id, 0 with a whole vocabulary.
    """

    output_heads: ClassVar[str]  # the list that holds the output heads, by its name
    num_heads: int
    shape: Any  # a dataclass of JSON-able fields, among them hidden_size and vocab_size of the target
    d2t: Tensor

    def __init__(self, num_heads: int, d2t_D: Tensor) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.register_buffer("d2t", d2t_D.to(torch.int64))

    @abstractmethod
    def start(self, hidden: Tensor) -> State:
        """The state before the first step, from target states [..., H]."""

    @abstractmethod
    def step(self, state: State, token: Tensor, k: int) -> State:
        """The state of head k, 0-based, given the token before the one it drafts (target ids [...])."""

    @abstractmethod
    def output_head(self, k: int) -> Tensor:
        """The weight [D, r] of head k."""

    @property
    def draft_ids_D(self) -> Tensor:
        """Target ids of the draft vocabulary, ascending."""
        return self.d2t + torch.arange(len(self.d2t), device=self.d2t.device)

    @torch.no_grad()
    def draft(self, hidden_BH: Tensor, token_B: Tensor, num_draft_tokens: int) -> Tensor:
        """Greedy drafts int64 [B, K] in target ids.

        `hidden_BH`: the target's states after the final norm that produced `token_B` (int64), the tokens just sampled.
        Raises UserError for more tokens than there are heads.
        """
        check_depth(num_draft_tokens, self.num_heads)
        state, tokens = self.start(hidden_BH.to(self.output_head(0).dtype)), [token_B]
        for k in range(num_draft_tokens):
            state = self.step(state, tokens[-1], k)
            index_B = F.linear(state[0], self.output_head(k)).argmax(-1)
            tokens.append(index_B + self.d2t[index_B])
        return torch.stack(tokens[1:], dim=1)


def check_depth(num_draft_tokens: int, num_heads: int) -> None:
    """Raises UserError where more tokens are asked for than there are heads."""
    if num_draft_tokens > num_heads:
        raise UserError(
            f"{num_draft_tokens} draft tokens were asked for, this speculator has {num_heads} heads: ask for at most "
            f"{num_heads}"
        )


def load_strictly(heads: nn.Module, tensors: dict[str, Tensor], method: str) -> None:
    """Load tensors by the module's own names. Raises UserError for a missing, unknown or misshapen one."""
    own = heads.state_dict()
    missing, unknown = sorted(own.keys() - tensors.keys()), sorted(tensors.keys() - own.keys())
    if missing or unknown:
        raise UserError(f"{method} checkpoint: missing tensors {missing}, unknown tensors {unknown}")
    for name, value in tensors.items():
        if value.shape != own[name].shape:
            raise UserError(
                f"{method} checkpoint: {name} has shape {tuple(value.shape)}, its config asks for "
                f"{tuple(own[name].shape)}"
            )
    heads.load_state_dict(tensors)


def config_value(config: dict[str, Any], key: str, method: str) -> Any:
    """A key that a served config.json must have. Raises UserError."""
    if key not in config:
        raise UserError(f"{method} checkpoint: config.json has no {key}")
    return config[key]
