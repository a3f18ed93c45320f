"""What every speculator is: the tensors it sees, the loss it returns, how it drafts, how it is served.

Shape legend (suffixes on names, here and in every speculator):
  B rows of a batch, T tokens in a row, Q query positions in a row, K draft tokens, N flattened positions,
  A aux layers, H hidden size, V target vocabulary, D draft vocabulary, S newly committed tokens.

Alignment, once and for all: the hidden state at position p and the token at p+1 predict the token at p+2;
depth k (0-based) predicts p+2+k. A prediction is supervised when the *predicted* token is a response token
of the same document.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

if TYPE_CHECKING:
    from spec_train.decoding.sampling import Sampling


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
    target_lse_BT     float32; logsumexp over the whole target vocabulary of the logits *from* this position
    row_ids           for each row the ids of its documents, in order
    """

    input_ids_BT: Tensor
    position_BT: Tensor
    document_BT: Tensor
    loss_weight_BT: Tensor
    aux_hidden_BTAH: Tensor | None = None
    last_hidden_BTH: Tensor | None = None
    target_lse_BT: Tensor | None = None
    row_ids: tuple[tuple[str, ...], ...] = ()

    def to(self, device: torch.device | str) -> Batch:
        """The same batch on another device."""
        moved = {
            name: value.to(device, non_blocking=True)
            for name, value in self.__dict__.items()
            if isinstance(value, Tensor)
        }
        return replace(self, **moved)


@dataclass(frozen=True)
class LossOutput:
    """`loss`: differentiable scalar. `sums` / `counts`: float64 tensors of equal shape by metric name; a metric is
    sum/count after both are added over micro-batches and ranks, so averages are exact."""

    loss: Tensor
    sums: dict[str, Tensor] = field(default_factory=dict)
    counts: dict[str, Tensor] = field(default_factory=dict)


@dataclass(frozen=True)
class ResponseHits:
    """Teacher-forced drafts along one response of n tokens, the raw material of acceptance estimates.

    hit_MK [n-1, K] bool: row m-1 is the state in which m response tokens are known; column k tells whether the
    draft's argmax for response token m+k (0-based) is that token. False beyond the end of the response.
    """

    document_id: str
    hit_MK: Tensor


@dataclass(frozen=True)
class Committed:
    """Tokens that the target has verified since the last commit, one row per request, right-padded.

    token_BS      int64; token_BS[b, i] is the token *after* the position whose features stand beside it (x_{p+1})
    position_BS   int64; p, the position of the features (the token itself stands at p+1)
    count_B       int64; valid entries of each row, at least 1
    features      of positions p, leading shape [B, S]
    """

    token_BS: Tensor
    position_BS: Tensor
    count_B: Tensor
    features: Features


@dataclass(frozen=True)
class Proposal:
    """`token_BK` int64 drafts in target ids; `count_B` how many of them are real (n-gram may offer fewer than K);
    `probs_BKV` float32, the law each token was drawn from over the target vocabulary, None for a greedy draft."""

    token_BK: Tensor
    count_B: Tensor
    probs_BKV: Tensor | None = None


@dataclass(frozen=True)
class ServingCheckpoint:
    """A speculator in the form that an engine loads: `method` is vLLM's name, `config` the plain config.json,
    `tensors` the plain tensor names, `speculators_config` the config.json of the speculators format or None."""

    method: str
    config: dict[str, Any]
    tensors: dict[str, Tensor]
    speculators_config: dict[str, Any] | None = None


class Proposer(ABC):
    """What the decoder needs: begin a batch of requests, take verified tokens, draft.

    The decoder calls `begin` once per batch, then for every cycle `commit` (first the whole prompt plus the first
    sampled token, later the tokens the target accepted) and `propose`. Rows that finish are dropped with `select`.
    """

    feature_spec: FeatureSpec = FeatureSpec(aux_layer_ids=(), last_hidden=False)

    @abstractmethod
    def begin(self, prompts: list[list[int]], max_length: int) -> Any:
        """A fresh state for `prompts` (token ids), each of which may grow to `max_length` tokens."""

    @abstractmethod
    def commit(self, state: Any, committed: Committed) -> None:
        """Add verified tokens to `state`, overwriting whatever was drafted at their positions."""

    @abstractmethod
    def propose(self, state: Any, num_draft_tokens: int, sampling: Sampling) -> Proposal:
        """Draft `num_draft_tokens` tokens after the last committed one. `state` may be scribbled on beyond it."""

    @abstractmethod
    def select(self, state: Any, rows: Tensor) -> Any:
        """The state of the chosen rows (int64 indices)."""


class Speculator(nn.Module, Proposer):
    """A trained proposer. One subclass, one file, one method.

    Frozen tensors borrowed from the target (embedding, output head) are non-persistent buffers: they are never
    trained, saved or sharded.
    """

    config: Any
    num_depths: int  # depths trained at once (TTT steps, heads)

    @abstractmethod
    def supervised_counts(self, batch: Batch) -> Tensor:
        """float64 [num_depths]: the sum of loss weights supervised at each depth. Needs no features, so the trainer
        can normalise over a whole accumulation window before the first backward pass."""

    @abstractmethod
    def loss(self, batch: Batch, normalizer: Tensor) -> LossOutput:
        """The training loss, each depth divided by its entry of `normalizer` [num_depths] (see supervised_counts)."""

    @abstractmethod
    def draft_hits(self, batch: Batch, num_draft_tokens: int) -> list[ResponseHits]:
        """Teacher-forced drafts from every decoding state of every response in `batch`, `num_draft_tokens` deep."""

    @abstractmethod
    def serving(self) -> ServingCheckpoint:
        """Names, shapes and config of the exported checkpoint (VLLM contract)."""

    def forward(self, batch: Batch, normalizer: Tensor) -> LossOutput:
        """`loss`, under the name that DDP, FSDP and DeepSpeed hook."""
        return self.loss(batch, normalizer)
