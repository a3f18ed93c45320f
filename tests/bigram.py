"""A whole method in one module, as a newcomer would add it: a bigram table that drafts from the last token alone."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor, nn

from spec_train.batch import Batch, FeatureSpec
from spec_train.decoding.sampling import Sampling
from spec_train.recipe import PositiveInt, SpeculatorOptions
from spec_train.speculators.base import (
    GREEDY,
    Committed,
    LossOutput,
    ResponseHits,
    ServingCheckpoint,
    Speculator,
)
from spec_train.speculators.distillation import chain_hits
from spec_train.speculators.supervision import supervised_queries
from spec_train.target import TargetModel


class BigramOptions(SpeculatorOptions):
    """The `speculator` section of a recipe."""

    type: Literal["bigram"]
    width: PositiveInt = 32


@dataclass(frozen=True)
class BigramConfig:
    vocab_size: int
    width: int


class Bigram(Speculator):
    """logits of x_{t+1} = W E[x_t]."""

    kind = "bigram"
    method = "custom_class"
    options = BigramOptions
    num_depths = 1
    feature_spec = FeatureSpec((), last_hidden=False)

    def __init__(self, config: BigramConfig) -> None:
        super().__init__()
        self.config = config
        self.embedding = nn.Embedding(config.vocab_size, config.width)
        self.head = nn.Linear(config.width, config.vocab_size, bias=False)

    @classmethod
    def required_features(cls, options: Any, target: TargetModel) -> FeatureSpec:
        return FeatureSpec((), last_hidden=True)

    @classmethod
    def from_recipe(cls, options: Any, target: TargetModel, draft_ids_D: Tensor, seed: int) -> Bigram:
        table = cls(BigramConfig(target.vocab_size, options.width))
        generator = torch.Generator().manual_seed(seed)
        for parameter in table.parameters():
            parameter.data.normal_(std=0.1, generator=generator)
        return table

    @classmethod
    def from_checkpoint(cls, checkpoint: Path, saved: dict[str, Any], target: TargetModel) -> Bigram:
        return cls.from_serving(saved, load_file(checkpoint / "model.safetensors"), target)

    @classmethod
    def from_serving(cls, config: dict[str, Any], tensors: dict[str, Tensor], target: TargetModel) -> Bigram:
        table = cls(BigramConfig(config["vocab_size"], config["width"]))
        table.load_state_dict(tensors)
        return table.to(target.device, target.dtype).eval().requires_grad_(False)

    def supervised_counts(self, batch: Batch) -> Tensor:
        return supervised_queries(batch, 1).weight_BQK.double().sum((0, 1))

    def loss(self, batch: Batch, normalizer: Tensor) -> LossOutput:
        queries = supervised_queries(batch, 1)
        rows = torch.arange(len(batch.input_ids_BT))[:, None]
        known_BQ = batch.input_ids_BT[rows, queries.predicted_BQK[..., 0] - 1]
        token_BQ = batch.input_ids_BT[rows, queries.predicted_BQK[..., 0]]
        loss_BQ = F.cross_entropy(self.head(self.embedding(known_BQ)).transpose(1, 2), token_BQ, reduction="none")
        weighted = (loss_BQ * queries.weight_BQK[..., 0]).sum()
        count = queries.weight_BQK.double().sum((0, 1))
        return LossOutput(
            weighted / normalizer[0].float(), {"depth_loss": weighted.double()[None]}, {"depth_loss": count}
        )

    def _next(self, token: Tensor) -> Tensor:
        logits: Tensor = self.head(self.embedding(token))
        return logits

    @torch.no_grad()
    def draft_hits(self, batch: Batch, num_draft_tokens: int, sampling: Sampling = GREEDY) -> list[ResponseHits]:
        queries = supervised_queries(batch, num_draft_tokens)
        rows = torch.arange(len(batch.input_ids_BT))[:, None]
        known = [batch.input_ids_BT[rows, queries.predicted_BQK[..., k] - 1] for k in range(num_draft_tokens)]
        return chain_hits(batch, queries, known, lambda _, token: self._next(token), sampling)

    def begin(self, prompts: list[list[int]], max_length: int) -> Tensor:
        return torch.tensor([prompt[-1] for prompt in prompts])

    def commit(self, state: Tensor, committed: Committed) -> None:
        state.copy_(committed.token_BS[torch.arange(len(state)), committed.count_B - 1])

    def first_logits(self, state: Tensor, num_draft_tokens: int) -> tuple[Any, Tensor]:
        return None, self._next(state)

    def next_logits(self, draft: Any, token_B: Tensor, depth: int) -> Tensor:
        return self._next(token_B)

    def branch(self, draft: Any, rows: Tensor) -> Any:
        return None

    def select(self, state: Tensor, rows: Tensor) -> Tensor:
        return state[rows]

    def serving(self) -> ServingCheckpoint:
        config = {"architectures": ["Bigram"], "vocab_size": self.config.vocab_size, "width": self.config.width}
        return ServingCheckpoint(self.kind, self.method, config, dict(self.state_dict()))
