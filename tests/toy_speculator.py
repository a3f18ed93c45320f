"""The smallest speculator that trains, for tests of the loop around it: linear heads on the target's last state."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor, nn

from spec_train.batch import Batch
from spec_train.data.documents import Document
from spec_train.decoding.sampling import Sampling
from spec_train.recipe import OptimSection, TrainSection
from spec_train.speculators.base import GREEDY, LossOutput, ResponseHits, ServingCheckpoint, Speculator
from spec_train.speculators.distillation import chain_hits
from spec_train.speculators.supervision import supervised_queries
from spec_train.training.trainer import TrainResult, train

VOCAB, HIDDEN, DEPTHS = 23, 8, 2


class ToySpeculator(Speculator):
    """Depth k (0-based) reads the state at p and scores the token at p+2+k."""

    num_depths = DEPTHS

    def __init__(self, seed: int = 0, dropout: float = 0.1) -> None:
        super().__init__()
        self.dropout = dropout
        self.mix = nn.Linear(HIDDEN, HIDDEN, bias=False)
        self.scale = nn.Parameter(torch.ones(HIDDEN))
        self.heads = nn.ModuleList([nn.Linear(HIDDEN, VOCAB, bias=False) for _ in range(DEPTHS)])
        generator = torch.Generator().manual_seed(seed)
        for parameter in self.parameters():
            parameter.data.normal_(generator=generator).mul_(0.3)
        self.register_buffer("frozen", torch.arange(5.0), persistent=False)

    def _weight(self, batch: Batch, depth: int) -> Tensor:
        shift = depth + 2
        same = batch.document_BT[:, shift:] == batch.document_BT[:, :-shift]
        return batch.loss_weight_BT[:, shift:] * same

    def supervised_counts(self, batch: Batch) -> Tensor:
        return torch.stack([self._weight(batch, depth).double().sum() for depth in range(DEPTHS)])

    def _logits(self, batch: Batch, depth: int) -> Tensor:
        assert batch.last_hidden_BTH is not None
        # Dropout draws random numbers: a resumed run must draw the same ones.
        state = F.dropout(self.mix(batch.last_hidden_BTH.to(self.mix.weight.dtype)), self.dropout, self.training)
        logits: Tensor = self.heads[depth](torch.tanh(state * self.scale))
        return logits

    def loss(self, batch: Batch, normalizer: Tensor) -> LossOutput:
        sums, counts, total = [], [], torch.zeros(())
        for depth in range(DEPTHS):
            logits = self._logits(batch, depth)[:, : -(depth + 2)].float()
            nll = F.cross_entropy(logits.transpose(1, 2), batch.input_ids_BT[:, depth + 2 :], reduction="none")
            weight = self._weight(batch, depth)
            total = total + (nll * weight).sum() / normalizer[depth].float()
            sums.append((nll * weight).sum().double())
            counts.append(weight.sum().double())
        return LossOutput(total, {"depth_loss": torch.stack(sums)}, {"depth_loss": torch.stack(counts)})

    @torch.no_grad()
    def draft_hits(self, batch: Batch, num_draft_tokens: int, sampling: Sampling = GREEDY) -> list[ResponseHits]:
        queries = supervised_queries(batch, num_draft_tokens, everywhere=True)
        drafted = (self._logits(batch, k) for k in range(min(num_draft_tokens, DEPTHS)))
        return chain_hits(batch, queries, drafted, lambda _, logits: logits, sampling)

    def serving(self) -> ServingCheckpoint:
        raise NotImplementedError

    begin = commit = propose = select = first_logits = next_logits = branch = None  # type: ignore[assignment]
    required_features = from_recipe = from_checkpoint = from_serving = None  # type: ignore[assignment]


def toy_states(batch: Batch) -> Batch:
    """The provider: a fixed random state for every token id."""
    table = torch.randn(VOCAB, HIDDEN, generator=torch.Generator().manual_seed(5))
    return replace(batch, last_hidden_BTH=table[batch.input_ids_BT])


def toy_documents(count: int, seed: int = 0) -> list[Document]:
    """Documents of 6 to 29 tokens that count upwards, the answer in the later part."""
    generator = torch.Generator().manual_seed(seed)
    documents = []
    for i in range(count):
        length, first, prompt = (int(x) for x in torch.randint(6, 30, (3,), generator=generator))
        tokens = [(first + t) % VOCAB for t in range(length)]
        documents.append(Document(f"doc-{i}", tokens, [(min(prompt, length - 3), length)]))
    return documents


def mean_weight(checkpoint: Path) -> dict[str, float]:
    """In place of a decode: a figure that tells whether the whole weights arrived."""
    tensors = load_file(checkpoint / "model.safetensors")
    return {"decode@2": float(torch.cat([tensor.flatten() for tensor in tensors.values()]).double().mean())}


def toy_train(
    output_dir: Path, *, held_out: int = 6, documents: list[Document] | None = None, **changes: Any
) -> TrainResult:
    """Train a ToySpeculator; `changes` are fields of the train section, `optim` (a dict), `provider`, `speculator`,
    `decode`."""
    provider = changes.pop("provider", toy_states)
    optim = OptimSection(**{"lr": 0.02, **changes.pop("optim", {})})
    speculator = changes.pop("speculator", None) or ToySpeculator()
    decode = changes.pop("decode", None)
    settings = {"epochs": 2, "micro_batch_tokens": 64, "precision": "fp32", "save_every": 4, "log_every": 1}
    return train(
        speculator,
        toy_documents(30) if documents is None else documents,
        toy_documents(held_out, seed=1),
        provider,
        optim=optim,
        train=TrainSection(**{**settings, **changes}),
        seed=3,
        device="cpu",
        num_draft_tokens=(2, 1),
        output_dir=output_dir,
        speculator_config={"type": "toy"},
        run_config={"name": "toy"},
        decode=decode,
    )
