"""MLP speculator (Wertheimer et al., 2024, arXiv:2404.19124): a small recurrent cell that reads its own drafts.

Equations (h: the target's state after its final norm, x: tokens, E_i: embeddings, n heads, r inner width; norm is
x / rms(x) * weight + bias, GELU is exact)

    s_0      = h_p, with `scale_input` RMS(h_p) / sqrt(2)
    s_{i+1}  = GELU(norm_i(W_i s_i + a E_i[x_{p+1+i}]))                 a = emb_weight / state_weight
    logits   = H_i s_{i+1}                                              drafts token p+2+i
    state_weight = 0.5^(0.5/n), emb_weight = sqrt((1 - state_weight^2) r / 2)

Tied heads share E, norm and H, and all W but the first. Tensor names and config are IBM's. A reduced head
(`draft_vocab_size`) adds `d2t`, which only our own readers know; embeddings always cover the whole vocabulary.

The cell `sum_lstm` (Arctic; always tied) has four gates of W s + a E[x] and a cell state c, c_0 = 0:

    c <- c * sigmoid(forget) + GELU(norm_cell(cell)) * sigmoid(input);   s <- GELU(norm_state(c)) * sigmoid(output)

Shape legend: see `base.py`.
"""

from __future__ import annotations

from typing import Any, Literal

import torch
from pydantic import model_validator
from torch import Tensor, nn

from spec_train.recipe import PositiveInt
from spec_train.speculators.base import ServingCheckpoint
from spec_train.speculators.mlp_heads import (
    Cell,
    LstmHeads,
    MlpHeads,
    MlpShape,
    heads_from_serving,
    make_heads,
    served_tensors,
)
from spec_train.speculators.multi_head import PROPOSER, MultiHead, MultiHeadOptions
from spec_train.target import TargetModel

__all__ = ["Mlp", "MlpOptions", "heads_from_serving"]


class MlpOptions(MultiHeadOptions):
    """MLP speculator. `inner_dim` null takes the target's width, so that its embedding and head can be taken over."""

    type: Literal["mlp"]
    inner_dim: PositiveInt | None = None
    tie_weights: bool = True
    scale_input: bool = False
    cell: Cell = "mlp"
    tie_lstm_embs: bool = True

    @model_validator(mode="after")
    def _tied_heads(self) -> MlpOptions:
        if self.tie_weights and self.num_heads == 1:
            raise ValueError("asks for tie_weights with a single head; set tie_weights=false or num_heads to 2 or more")
        if self.cell == "sum_lstm" and not self.tie_weights:
            raise ValueError("asks for cell sum_lstm with tie_weights=false; that cell is always tied")
        return self


class Mlp(MultiHead):
    """The speculator; see `MultiHead` for how it trains and drafts."""

    kind = "mlp"
    method = "custom_class"
    options = MlpOptions
    shape_class = MlpShape
    heads: MlpHeads | LstmHeads

    @classmethod
    def shape_of(cls, options: Any, target: TargetModel) -> MlpShape:
        """See `MultiHead.shape_of`."""
        return MlpShape(
            hidden_size=target.hidden_size,
            inner_dim=options.inner_dim or target.hidden_size,
            vocab_size=target.vocab_size,
            num_heads=options.num_heads,
            tie_weights=options.tie_weights,
            scale_input=options.scale_input,
            cell=options.cell,
            tie_lstm_embs=options.cell == "sum_lstm" and options.tie_lstm_embs,
        )

    @staticmethod
    def make_heads(shape: MlpShape, d2t_D: Tensor) -> MlpHeads | LstmHeads:
        """See `MultiHead.make_heads`."""
        return make_heads(shape, d2t_D)

    @staticmethod
    def read_serving(config: dict[str, Any], tensors: dict[str, Tensor]) -> MlpHeads | LstmHeads:
        """See `MultiHead.read_serving`."""
        return heads_from_serving(config, tensors)

    def initialise(self, target: TargetModel, generator: torch.Generator) -> None:
        """N(0, 1/sqrt(r)) as IBM has it; where widths agree, embedding, output head and a first W from the target."""
        inner = self.config.shape.inner_dim
        for module in self.heads.modules():
            if isinstance(module, (nn.Linear, nn.Embedding)):
                nn.init.normal_(module.weight, std=inner**-0.5, generator=generator)
        if inner != target.hidden_size:
            return
        embedding_VH = target.embedding.weight.float()
        # The sum is balanced for rows of length about 1, whatever the scale of the target's own.
        embedding_VH = embedding_VH / embedding_VH.norm(dim=-1).mean()
        for name, module in self.heads.named_modules():
            if isinstance(module, nn.Embedding):
                module.weight.copy_(embedding_VH)
            elif isinstance(module, nn.Linear) and name.startswith("head."):
                module.weight.copy_(self.target_head_DH.float())
            elif isinstance(module, nn.Linear) and self.config.shape.cell == "mlp":
                module.weight.mul_(0.1).add_(torch.eye(inner))

    def head_options(self) -> dict[str, Any]:
        """See `StartableSpeculator.head_options`."""
        own = super().head_options()
        if self.config.shape.cell == "mlp":
            del own["tie_lstm_embs"]  # means nothing here
        return own

    def serving(self) -> ServingCheckpoint:
        """IBM's config and names; Arctic's for the cell sum_lstm."""
        shape = self.config.shape
        n = shape.num_heads
        config: dict[str, Any] = {
            "architectures": ["MLPSpeculatorPreTrainedModel"],
            "model_type": "mlp_speculator",
            "vocab_size": shape.vocab_size,
            "emb_dim": shape.hidden_size,
            "inner_dim": shape.inner_dim,
            "n_predict": n,
            "tie_weights": shape.tie_weights,
            "scale_input": shape.scale_input,
            # One candidate: a chain, not a tree.
            "top_k_tokens_per_head": [1] * n,
            "n_candidates": 1,
        }
        if shape.cell == "sum_lstm":
            width = str(shape.inner_dim)
            config |= {
                "architectures": ["ArcticLSTMSpeculatorPreTrainedModel"],
                "method": "sum_lstm",
                "tie_lstm_embs": shape.tie_lstm_embs,
                "input_hidden_dim": shape.hidden_size,
                **dict.fromkeys(("inner_dim", "emb_dim", "proj_dim"), width),
            }
        tensors = served_tensors(self.heads)
        return ServingCheckpoint(self.kind, self.method, config, tensors, plugin=PROPOSER)
