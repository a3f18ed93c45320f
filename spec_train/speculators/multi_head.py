"""What MLP speculators and Medusa share: one head for each draft token, all started from one state of the target.

Head k (0-based) starts from the target's state after its final norm at position p, may read the tokens up to p+1+k,
and drafts the token at p+2+k. A method adds its heads (see `heads.py`), how they are initialised and how they are
served. Nothing is cached: a draft needs the last verified state and the last token only.

Two stages, as IBM trains: a run on ground-truth text (responses.mode keep, speculator.loss ce), then one on the
target's own answers with `start_from` naming the checkpoint or export of the first.

Shape legend: see `base.py`; further Q query positions, r the width that the output heads read.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, ClassVar, Literal, Self

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor

from spec_train.batch import Batch, FeatureSpec
from spec_train.data.draft_vocab import drafted_ids
from spec_train.decoding.sampling import Sampling
from spec_train.errors import UserError
from spec_train.recipe import PositiveInt, Probability
from spec_train.speculators.base import GREEDY, Committed, LossOutput, ResponseHits
from spec_train.speculators.distillation import chain_hits, chain_loss, depth_weights, target_distributions
from spec_train.speculators.head_files import checkpoint_tensors
from spec_train.speculators.heads import DraftHeads, State, check_depth, load_strictly
from spec_train.speculators.start import StartableSpeculator, StartOptions
from spec_train.speculators.supervision import Queries, supervised_queries
from spec_train.target import TargetModel

PROPOSER = "spec_train.serving.vllm_plugin.SpecTrainProposer"  # what drafts for these heads in vLLM


class MultiHeadOptions(StartOptions):
    """`draft_vocab_size` null keeps the target's vocabulary."""

    of_the_head = (
        *("num_heads", "draft_vocab_size", "inner_dim", "tie_weights", "scale_input", "cell", "tie_lstm_embs"),
        *("num_layers", "bias", "shared_head"),
    )

    num_heads: PositiveInt = 3
    step_decay: Probability = 0.8
    draft_vocab_size: PositiveInt | None = None
    loss: Literal["ce", "kl", "lk"] = "kl"
    lk_eta: float = Field(default=3.0, gt=0)

    def vocab_limit(self) -> int | None:
        """See `SpeculatorOptions.vocab_limit`."""
        return self.draft_vocab_size if self.start_from is None else None

    def max_draft_tokens(self) -> int | None:
        """See `SpeculatorOptions.max_draft_tokens`."""
        return self.num_heads if self.start_from is None or "num_heads" in self.model_fields_set else None


@dataclass(frozen=True)
class MultiHeadConfig:
    """Geometry of the heads and what they are trained with; saved beside every checkpoint."""

    shape: Any
    draft_vocab_size: int
    step_decay: float = 0.8
    loss: Literal["ce", "kl", "lk"] = "kl"
    lk_eta: float = 3.0


@dataclass
class _State:
    """Drafting state: the target's state that produced the last token, and that token."""

    hidden_BH: Tensor
    token_B: Tensor


@dataclass
class _Draft:
    """A draft under way: the state that the heads run on."""

    running: State


class MultiHead(StartableSpeculator):
    """Trained: the heads. Borrowed from the target: rows of its output head, to learn from."""

    shape_class: ClassVar[type]

    def __init__(self, config: MultiHeadConfig, heads: DraftHeads) -> None:
        super().__init__()
        self.config, self.heads = config, heads
        self.num_depths = self.max_draft_tokens = heads.num_heads
        self.feature_spec = FeatureSpec((), last_hidden=True)
        ids = heads.draft_ids_D
        # Looked up by target id: the index in the draft vocabulary, -1 outside.
        index = torch.full((config.shape.vocab_size,), -1, dtype=torch.long)
        index[ids] = torch.arange(len(ids))
        self.draft_index_V: Tensor
        self.target_head_DH: Tensor
        self.register_buffer("draft_index_V", index, persistent=False)
        self.register_buffer("target_head_DH", torch.empty(0), persistent=False)

    # ------------------------------------------------------------------ what a method adds
    @classmethod
    @abstractmethod
    def shape_of(cls, options: Any, target: TargetModel) -> Any:
        """The heads' geometry. Raises UserError for options that make no heads."""

    @staticmethod
    @abstractmethod
    def make_heads(shape: Any, d2t_D: Tensor) -> DraftHeads:
        """Heads of a geometry, not yet initialised."""

    @staticmethod
    @abstractmethod
    def read_serving(config: dict[str, Any], tensors: dict[str, Tensor]) -> DraftHeads:
        """The heads of an exported or published checkpoint. Raises UserError."""

    @abstractmethod
    def initialise(self, target: TargetModel, generator: torch.Generator) -> None:
        """Fill the heads' weights in place. Called without gradients."""

    # ------------------------------------------------------------------ construction
    @classmethod
    def required_features(cls, options: Any, target: TargetModel) -> FeatureSpec:
        """See `Speculator.required_features`: the state after the final norm."""
        return FeatureSpec((), last_hidden=True)

    @classmethod
    def from_recipe(cls, options: Any, target: TargetModel, draft_ids_D: Tensor, seed: int) -> Self:
        """See `Speculator.from_recipe`."""
        shape = cls.shape_of(options, target)
        config = MultiHeadConfig(shape, len(draft_ids_D), options.step_decay, options.loss, options.lk_eta)
        speculator = cls(config, cls.make_heads(shape, draft_ids_D - torch.arange(len(draft_ids_D))))
        speculator.borrow(target)
        with torch.no_grad():
            speculator.initialise(target, torch.Generator().manual_seed(seed))
        return speculator

    @classmethod
    def _checkpoint_heads(cls, checkpoint: Path, saved: dict[str, Any]) -> DraftHeads:
        held = {name.removeprefix("heads."): value for name, value in checkpoint_tensors(checkpoint).items()}
        shape, where = cls.shape_class(**saved["shape"]), str(checkpoint)
        drafted_ids(held.get("d2t"), None, shape.vocab_size, where, saved["draft_vocab_size"])
        heads = cls.make_heads(shape, held["d2t"])
        load_strictly(heads, held, where)
        return heads

    def head_options(self) -> dict[str, Any]:
        """See `StartableSpeculator.head_options`."""
        own = asdict(self.config.shape)
        del own["hidden_size"], own["vocab_size"]  # the target's
        return {**own, "draft_vocab_size": self.config.draft_vocab_size}

    def continued(self, options: Any, loss_ids_D: Tensor) -> Self:
        """See `StartableSpeculator.continued`. The map between the vocabularies stays the heads' own."""
        config = replace(self.config, step_decay=options.step_decay, loss=options.loss, lk_eta=options.lk_eta)
        heads = self.make_heads(config.shape, self.heads.d2t.cpu())
        heads.load_state_dict(self.heads.state_dict())
        speculator = type(self)(config, heads)
        speculator.borrow(self._target[0])
        return speculator

    def drafted_ids(self) -> Tensor | None:
        """See `StartableSpeculator.drafted_ids`."""
        return self.heads.draft_ids_D

    @classmethod
    def from_checkpoint(cls, checkpoint: Path, saved: dict[str, Any], target: TargetModel) -> Self:
        """See `Speculator.from_checkpoint`."""
        heads = cls._checkpoint_heads(checkpoint, saved)
        head = cls._frozen(MultiHeadConfig(**{**saved, "shape": heads.shape}), heads, target, str(checkpoint))
        return head.to(target.device, target.dtype)

    @classmethod
    def from_serving(cls, config: dict[str, Any], tensors: dict[str, Tensor], target: TargetModel) -> Self:
        """See `Speculator.from_serving`; published checkpoints of other tools are read too."""
        heads = cls.read_serving(config, tensors)
        return cls._frozen(MultiHeadConfig(heads.shape, len(heads.d2t)), heads, target, "the checkpoint")

    @classmethod
    def _frozen(cls, config: MultiHeadConfig, heads: DraftHeads, target: TargetModel, where: str) -> Self:
        shape = config.shape
        if (shape.vocab_size, shape.hidden_size) != (target.vocab_size, target.hidden_size):
            raise UserError(
                f"{where}: made for a target of vocabulary {shape.vocab_size} and width {shape.hidden_size}; "
                f"{target.name} has {target.vocab_size} and {target.hidden_size}"
            )
        speculator = cls(config, heads)
        speculator.borrow(target)
        return speculator.eval().requires_grad_(False)

    def borrow(self, target: TargetModel) -> None:
        """Take the rows of the target's output head for the draft vocabulary, frozen."""
        self._target = (target,)  # in a tuple: the target must not become a submodule
        rows = target.lm_head.weight.detach()[self.heads.draft_ids_D.to(target.device)]
        self.target_head_DH = rows.to(self.heads.d2t.device)

    # ------------------------------------------------------------------ training pass
    def unroll(self, batch: Batch, queries: Queries, depths: int) -> Iterator[Tensor]:
        """States [B, Q, r] that the output head of each depth reads; every depth is fed the text's own tokens."""
        assert batch.last_hidden_BTH is not None
        check_depth(depths, self.heads.num_heads)
        ids, index = batch.input_ids_BT, queries.index_BQ
        rows = torch.arange(ids.shape[0], device=ids.device)[:, None]
        hidden = batch.last_hidden_BTH[rows, index]
        if not torch.is_autocast_enabled(hidden.device.type):
            hidden = hidden.to(self.heads.output_head(0).dtype)
        state = self.heads.start(hidden)
        for k in range(depths):
            state = self.heads.step(state, ids[rows, (index + 1 + k).clamp(max=ids.shape[1] - 1)], k)
            yield state[0]

    def supervised_counts(self, batch: Batch) -> Tensor:
        """See `Speculator.supervised_counts`."""
        return supervised_queries(batch, self.num_depths).weight_BQK.double().sum((0, 1))

    def loss(self, batch: Batch, normalizer: Tensor) -> LossOutput:
        """Sum over heads of decay^k * (weighted mean of the head loss). Metrics by depth: depth_loss, alpha, hit."""
        queries = supervised_queries(batch, self.num_depths)
        return chain_loss(
            batch,
            queries,
            self.unroll(batch, queries, self.num_depths),
            self.heads.output_head,
            distributions=target_distributions(batch, queries, self.target_head_DH, self._target[0]),
            draft_index_V=self.draft_index_V,
            depth_weight_K=depth_weights(self.config.step_decay, normalizer),
            kind=self.config.loss,
            eta=self.config.lk_eta,
        )

    @torch.no_grad()
    def draft_hits(self, batch: Batch, num_draft_tokens: int, sampling: Sampling = GREEDY) -> list[ResponseHits]:
        """See `Speculator.draft_hits`. Raises UserError for more tokens than there are heads."""
        queries = supervised_queries(batch, num_draft_tokens)
        states = self.unroll(batch, queries, num_draft_tokens)
        return chain_hits(batch, queries, states, self._logits, sampling, self.draft_index_V)

    def _logits(self, k: int, state: Tensor) -> Tensor:
        """Draft logits [..., D] of head k."""
        return F.linear(state, self.heads.output_head(k))

    # ------------------------------------------------------------------ decoding
    @torch.no_grad()
    def begin(self, prompts: list[list[int]], max_length: int) -> _State:
        """See `Proposer.begin`."""
        weight = self.heads.output_head(0)
        hidden = torch.zeros(len(prompts), self.config.shape.hidden_size, dtype=weight.dtype, device=weight.device)
        return _State(hidden, torch.zeros(len(prompts), dtype=torch.long, device=weight.device))

    @torch.no_grad()
    def commit(self, state: _State, committed: Committed) -> None:
        """See `Proposer.commit`: only the last verified position matters."""
        assert committed.features.last_hidden is not None
        rows, last = torch.arange(len(committed.count_B), device=committed.count_B.device), committed.count_B - 1
        state.hidden_BH = committed.features.last_hidden[rows, last].to(self.heads.output_head(0).dtype)
        state.token_B = committed.token_BS[rows, last]

    @torch.no_grad()
    def first_logits(self, state: _State, num_draft_tokens: int) -> tuple[Any, Tensor]:
        """See `Speculator.first_logits`. Raises UserError for more tokens than there are heads."""
        check_depth(num_draft_tokens, self.heads.num_heads)
        draft = _Draft(self.heads.start(state.hidden_BH))
        return draft, self.next_logits(draft, state.token_B, 0)

    @torch.no_grad()
    def next_logits(self, draft: Any, token_B: Tensor, depth: int) -> Tensor:
        """See `Speculator.next_logits`."""
        draft.running = self.heads.step(draft.running, token_B, depth)
        return self._logits(depth, draft.running[0])

    def branch(self, draft: Any, rows: Tensor) -> Any:
        """See `Speculator.branch`."""
        read, further = draft.running
        return _Draft((read[rows], further[rows]))

    def target_ids(self, index: Tensor) -> Tensor:
        """Target ids of draft-vocabulary indices."""
        return index + self.heads.d2t[index]

    def full_law(self, probs_BD: Tensor) -> Tensor:
        """A law over the draft vocabulary as one over the target's [B, V]."""
        law = probs_BD.new_zeros(probs_BD.shape[0], self.config.shape.vocab_size)
        return law.index_copy_(1, self.heads.draft_ids_D, probs_BD)

    def select(self, state: _State, rows: Tensor) -> _State:
        """See `Proposer.select`."""
        return _State(state.hidden_BH[rows], state.token_B[rows])
