"""Medusa-1 (Cai et al., 2024, arXiv:2401.10774): independent heads on the target's last state, the target frozen.

Equations (h: the target's state after its final norm, head k of n, layers j of a head)

    u^0 = h_p,   u^{j+1} = u^j + SiLU(W^r_{k,j} u^j + b_{k,j})
    logits_k = W_k u                                                    drafts token p+2+k

W^r and b start at zero and W_k at the target's output head, so every head starts as the target's own prediction.
Heads read no token, hence what head 1 drafts knows nothing of what head 0 drafted. `shared_head` keeps one W for all.

vLLM 0.32 has a loader of its own for these files (method medusa), later versions have none; our plugin reads them in
every version. That loader refuses every reduced vocabulary (`token_map`, absolute ids), though it knows the name.

Shape legend: see `base.py`.
"""

from __future__ import annotations

import re
from typing import Any, Literal, Self

import torch
from torch import Tensor, nn

from spec_train.recipe import PositiveInt
from spec_train.speculators.base import ServingCheckpoint
from spec_train.speculators.medusa_heads import MedusaHeads, MedusaShape, heads_from_serving, served_tensors
from spec_train.speculators.multi_head import PROPOSER, MultiHead, MultiHeadOptions
from spec_train.target import TargetModel

__all__ = ["Medusa", "MedusaOptions", "heads_from_serving"]


class MedusaOptions(MultiHeadOptions):
    """Medusa-1. `num_layers`: residual layers of each head; `shared_head`: one output head for all of them."""

    type: Literal["medusa"]
    num_layers: PositiveInt = 1
    bias: bool = True
    shared_head: bool = False


class Medusa(MultiHead):
    """The speculator; see `MultiHead` for how it trains and drafts."""

    kind = "medusa"
    method = "custom_class"
    options = MedusaOptions
    shape_class = MedusaShape
    heads: MedusaHeads

    @classmethod
    def shape_of(cls, options: Any, target: TargetModel) -> MedusaShape:
        """See `MultiHead.shape_of`."""
        return MedusaShape(
            hidden_size=target.hidden_size,
            vocab_size=target.vocab_size,
            num_heads=options.num_heads,
            num_layers=options.num_layers,
            bias=options.bias,
            shared_head=options.shared_head,
        )

    @staticmethod
    def make_heads(shape: MedusaShape, d2t_D: Tensor) -> MedusaHeads:
        """See `MultiHead.make_heads`."""
        return MedusaHeads(shape, d2t_D)

    @staticmethod
    def read_serving(config: dict[str, Any], tensors: dict[str, Tensor]) -> MedusaHeads:
        """See `MultiHead.read_serving`."""
        return heads_from_serving(config, tensors)

    @classmethod
    def from_serving(cls, config: dict[str, Any], tensors: dict[str, Tensor], target: TargetModel) -> Self:
        """See `Speculator.from_serving`. Heads published without an output head of their own share the target's."""
        if not any(re.search(r"(^|\.)(lm_heads\.\d+|\d+\.\d+)\.weight$", name) for name in tensors):
            tensors = {**tensors, "lm_heads.0.weight": target.lm_head.weight.detach().float().cpu()}
            config = {**config, "original_lm_head": True}
        return super().from_serving(config, tensors, target)

    def initialise(self, target: TargetModel, generator: torch.Generator) -> None:
        """Zero residual layers, output heads from the target. Nothing is drawn."""
        for parameter in self.heads.blocks.parameters():
            nn.init.zeros_(parameter)
        for parameter in self.heads.lm_heads.parameters():
            parameter.copy_(self.target_head_DH.float())

    def serving(self) -> ServingCheckpoint:
        """The config and names of vLLM's Medusa."""
        shape = self.config.shape
        config = {
            "architectures": ["MedusaModel"],
            "model_type": "medusa",
            "hidden_size": shape.hidden_size,
            "vocab_size": shape.vocab_size,
            "truncated_vocab_size": self.config.draft_vocab_size,
            "num_heads": shape.num_heads,
            "num_hidden_layers": shape.num_layers,
            "medusa_fc_bias": shape.bias,
            "original_lm_head": shape.shared_head,
        }
        tensors = served_tensors(self.heads)
        return ServingCheckpoint(self.kind, self.method, config, tensors, plugin=PROPOSER)
