"""The tensors that travel from the target to a speculator.

Shape legend: B rows of a batch, T tokens in a row, A aux layers, H hidden size.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class FeatureSpec:
    """Which hidden states of the target a method needs.

    `aux_layer_ids`: ascending ids in vLLM's numbering: id k is the residual stream after k layers, 0 the embeddings,
    n (the number of layers) the last layer's output *before* the final norm. `last_hidden`: the state after the final
    norm, the one the target's output head reads.
    """

    aux_layer_ids: tuple[int, ...] = ()
    last_hidden: bool = True


@dataclass(frozen=True)
class Features:
    """Hidden states of the target. `aux_hidden` [..., A*H] (ascending ids, concatenated), `last_hidden` [..., H]."""

    aux_hidden: Tensor | None
    last_hidden: Tensor | None

    def select(self, rows: Tensor) -> Features:
        """The features of chosen rows of the leading dimension."""
        return Features(
            None if self.aux_hidden is None else self.aux_hidden[rows],
            None if self.last_hidden is None else self.last_hidden[rows],
        )


@dataclass(frozen=True)
class Batch:
    """One micro-batch of packed documents.

    input_ids_BT      int64; padding is found by `document_BT`, never by its id
    position_BT       int64; restarts at 0 in every document
    document_BT       int64; the index of the document inside its row, -1 for padding
    loss_weight_BT    float32; weight of the token *at* this position as a prediction target: 0 for prompt and padding,
                      1 for response tokens (token mean) or 1/(response tokens of its document) (sequence mean)
    aux_hidden_BTAH   target states of FeatureSpec.aux_layer_ids, concatenated
    last_hidden_BTH   target state after its final norm
    target_lse_BT     float32; logsumexp over the whole target vocabulary of the logits *from* this position, which come
                      from the very states of `last_hidden_BTH`, multiplied in `logits_dtype`
    logits_dtype      what states and output head are multiplied in wherever target_lse_BT is used: logits of another
                      precision would give probabilities that do not sum to 1. None: that of the training pass
    target_prob_BT    float32; probability of the token *at* this position under the sampling settings that an estimate
                      is made for; 0 where nothing is supervised (see `distillation.add_target_probs`)
    row_ids           for each row the ids of its documents, in order
    """

    input_ids_BT: Tensor
    position_BT: Tensor
    document_BT: Tensor
    loss_weight_BT: Tensor
    aux_hidden_BTAH: Tensor | None = None
    last_hidden_BTH: Tensor | None = None
    target_lse_BT: Tensor | None = None
    target_prob_BT: Tensor | None = None
    row_ids: tuple[tuple[str, ...], ...] = ()
    logits_dtype: torch.dtype | None = None

    def to(self, device: torch.device | str) -> Batch:
        """The same batch on another device."""
        moved: dict[str, Any] = {
            name: value.to(device, non_blocking=True)
            for name, value in self.__dict__.items()
            if isinstance(value, Tensor)
        }
        return replace(self, **moved)
