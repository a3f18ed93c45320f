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
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Self

import torch
from torch import Tensor, nn

from spec_train.batch import Batch, Features, FeatureSpec
from spec_train.decoding.sampling import Sampling
from spec_train.errors import UserError
from spec_train.recipe import SpeculatorOptions
from spec_train.target import TargetModel

__all__ = ["Batch", "FeatureSpec", "Features"]  # re-exported: one import for whoever writes a speculator

GREEDY = Sampling()


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

    survival_MK [n-1, K] float64: row m-1 is the state in which m response tokens are known; column k is the
    probability that a round which starts there keeps at least k+1 drafts, given the text (see `supervision.survival`).
    For greedy drafts that is 1 where the argmax for the response tokens m .. m+k (0-based) are those tokens, else 0.
    0 beyond the end of the response.
    """

    document_id: str
    survival_MK: Tensor


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
    """A speculator in the form that an engine loads.

    kind                 our name of the method, written to export.json, by which the export is read again
    method               vLLM's name of it
    config, tensors      the plain config.json and tensor names
    speculators_config   the config.json of the speculators format, None where that format has no form for the method
    speculators_tensors  tensor names in that format, None where they are the plain ones
    speculative_config   further keys that vLLM's speculative config needs, such as parallel_drafting
    hf_overrides         what must be added to the target's config when it is served
    plugin               dotted name of the class in our vLLM plugin that drafts, where vLLM itself cannot
    stitched             the tensors replace those of the same name in a copy of the target, which then needs no second
                         folder (an MTP head that the target ships)
    """

    kind: str
    method: str
    config: dict[str, Any]
    tensors: dict[str, Tensor]
    speculators_config: dict[str, Any] | None = None
    speculators_tensors: dict[str, Tensor] | None = None
    speculative_config: dict[str, Any] = field(default_factory=dict)
    hf_overrides: dict[str, Any] = field(default_factory=dict)
    plugin: str | None = None
    stitched: bool = False


Chooser = Callable[[Tensor], tuple[Tensor, Tensor | None]]
"""Picks one draft token per row from draft logits [B, D]: (index [B] int64, float32 law [B, D] it was drawn from, or
None for the argmax). Made by the decoder from the request's sampling settings, so every method drafts by one rule."""


class Proposer(ABC):
    """What the decoder needs: begin a batch of requests, take verified tokens, draft.

    The decoder calls `begin` once per batch, then for every cycle `commit` (first the whole prompt plus the first
    sampled token, later the tokens the target accepted) and `propose`. Rows that finish are dropped with `select`.
    """

    feature_spec: FeatureSpec = FeatureSpec(aux_layer_ids=(), last_hidden=False)

    remembers: ClassVar[bool] = False  # whether drafts depend on the requests decoded before

    def reset(self) -> None:  # noqa: B027  (most proposers remember nothing)
        """A measurement starts: forget the requests of earlier ones."""

    @abstractmethod
    def begin(self, prompts: list[list[int]], max_length: int) -> Any:
        """A fresh state for `prompts` (token ids), each of which may grow to `max_length` tokens."""

    @abstractmethod
    def commit(self, state: Any, committed: Committed) -> None:
        """Add verified tokens to `state`, overwriting whatever was drafted at their positions."""

    @abstractmethod
    def propose(self, state: Any, num_draft_tokens: int, choose: Chooser) -> Proposal:
        """Draft `num_draft_tokens` tokens after the last committed one. `state` may be scribbled on beyond it."""

    def finish(self, state: Any, rows: list[int], committed: Committed) -> None:  # noqa: B027
        """The requests of `rows` are over and about to be dropped; `committed` holds their last tokens, for a proposer
        that learns from one request for the next."""

    @abstractmethod
    def select(self, state: Any, rows: Tensor) -> Any:
        """The state of the chosen rows (int64 indices)."""


class Speculator(nn.Module, Proposer):
    """A trained proposer. One subclass, one file, one method.

    Frozen tensors borrowed from the target (embedding, output head) are non-persistent buffers: they are never
    trained, saved or sharded.
    """

    kind: ClassVar[str]  # our name of the method
    method: ClassVar[str]  # vLLM's name of it
    options: ClassVar[type[SpeculatorOptions]]  # the recipe's `speculator` section
    config: Any  # a dataclass; saved beside every checkpoint
    num_depths: int  # depths trained at once (TTT steps, heads)
    max_draft_tokens: int | None = None  # the deepest draft; None where it drafts on and on

    @classmethod
    def check_target(cls, options: Any, target: TargetModel) -> None:
        """Raise UserError where a speculator with these recipe options cannot be trained beside `target`, of which
        config, modules and shapes are read alone: it may be an `outline` without weights."""
        if target.lm_head.bias is not None:
            raise UserError(
                f"target {target.name}: its output head ({target.config.model_type}) has a bias, which no speculator "
                "here is trained with"
            )

    @classmethod
    @abstractmethod
    def required_features(cls, options: Any, target: TargetModel) -> FeatureSpec:
        """The hidden states that a speculator with these recipe options reads."""

    @classmethod
    @abstractmethod
    def from_recipe(cls, options: Any, target: TargetModel, draft_ids_D: Tensor, seed: int) -> Self:
        """A fresh speculator, trainable parameters in float32. `options`: the recipe's `speculator` section;
        `draft_ids_D`: ascending target ids that it may propose, or is trained on (`SpeculatorOptions.vocab_limit`)."""

    @classmethod
    @abstractmethod
    def from_checkpoint(cls, checkpoint: Path, saved: dict[str, Any], target: TargetModel) -> Self:
        """The speculator of a training checkpoint, frozen, in the target's dtype and on its device. `saved`: its
        `config` as JSON. Raises UserError where it does not go with the target."""

    @classmethod
    @abstractmethod
    def from_serving(cls, config: dict[str, Any], tensors: dict[str, Tensor], target: TargetModel) -> Self:
        """Rebuild a speculator from an exported config.json and its tensors. Raises UserError for a missing or unknown
        tensor."""

    @abstractmethod
    def supervised_counts(self, batch: Batch) -> Tensor:
        """float64 [num_depths]: the sum of loss weights supervised at each depth. Needs no features, so the trainer
        can normalise over a whole accumulation window before the first backward pass."""

    @abstractmethod
    def loss(self, batch: Batch, normalizer: Tensor) -> LossOutput:
        """The training loss, each depth divided by its entry of `normalizer` [num_depths] (see supervised_counts)."""

    @abstractmethod
    def draft_hits(self, batch: Batch, num_draft_tokens: int, sampling: Sampling = GREEDY) -> list[ResponseHits]:
        """Teacher-forced drafts from every decoding state of every response in `batch`, `num_draft_tokens` deep.

        `sampling`: how drafts are picked and judged. Where they are drawn from the draft's own law, `batch` needs
        `target_prob_BT` of the same settings."""

    @abstractmethod
    def serving(self) -> ServingCheckpoint:
        """Names, shapes and config of the exported checkpoint (VLLM contract)."""

    # ------------------------------------------------------------------ drafting, token by token
    @abstractmethod
    def first_logits(self, state: Any, num_draft_tokens: int) -> tuple[Any, Tensor]:
        """(a draft begun from `state`, logits [B, D] of its first token). The draft may go up to `num_draft_tokens`
        deep; what it writes lies beyond the committed tokens of `state`."""

    @abstractmethod
    def next_logits(self, draft: Any, token_B: Tensor, depth: int) -> Tensor:
        """Logits [B, D] of draft token `depth` (0-based, at least 1), `token_B` (target ids) being the one before it.
        `draft` is moved along."""

    @abstractmethod
    def branch(self, draft: Any, rows: Tensor) -> Any:
        """A copy of the chosen rows of a draft (int64 indices, repeats allowed); `draft` stays as it is."""

    def target_ids(self, index: Tensor) -> Tensor:
        """Target ids of draft-vocabulary indices."""
        return index

    def full_law(self, probs_BD: Tensor) -> Tensor:
        """A law over the draft vocabulary as one over the target's [B, V]."""
        return probs_BD

    @torch.no_grad()
    def propose(self, state: Any, num_draft_tokens: int, choose: Chooser) -> Proposal:
        """See `Proposer.propose`: a chain, each token chosen from the logits that the one before it leads to."""
        tokens: list[Tensor] = []
        laws: list[Tensor] = []
        draft, logits_BD = self.first_logits(state, num_draft_tokens)
        for depth in range(num_draft_tokens):
            if depth > 0:
                logits_BD = self.next_logits(draft, tokens[-1], depth)
            index_B, probs_BD = choose(logits_BD)
            tokens.append(self.target_ids(index_B))
            if probs_BD is not None:
                laws.append(self.full_law(probs_BD))
        token_BK = torch.stack(tokens, 1)
        count_B = torch.full_like(token_BK[:, 0], num_draft_tokens)
        return Proposal(token_BK, count_B, torch.stack(laws, 1) if laws else None)

    def forward(self, batch: Batch, normalizer: Tensor) -> tuple[Tensor, dict[str, Tensor], dict[str, Tensor]]:
        """(loss, sums, counts) of `loss`, under the name that DDP, FSDP and DeepSpeed hook. Plain containers: FSDP and
        ZeRO look for the tensors whose backward they must prepare, and do not look inside a dataclass."""
        output = self.loss(batch, normalizer)
        return output.loss, output.sums, output.counts
