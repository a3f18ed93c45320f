"""EAGLE-1 (Li et al., 2024, arXiv:2401.15077): one decoder layer that predicts the target's next hidden state.

Equations (h_p: the target's state after its final norm at position p, x: tokens, Emb and W_head of the target, frozen)

    f^0_p   = h_p
    u^k_p   = W_fc [Emb(x_{p+1+k}); f^k_p]                    W_fc: H x 2H, no bias
    h^k_p   = Layer(u^k_p) at RoPE position p+k               a Llama layer whose attention reads u^k_p without a norm
    logits  = W_head h^k_p over the whole vocabulary          no final norm; drafts token p+2+k
    f^{k+1}_p = h^k_p

The paper regresses h^k_p on h_{p+1+k} (smooth L1, weight 1) with a cross entropy of weight 0.1, at depth 0 and with
noise on the features. Here the head loss has weight 1 and the regression `feature_loss_weight` (10 is the paper's
balance, 0 leaves it out), and the depths are unrolled as in serving, which the noise stood in for.

The head loss is taken over the `loss_vocab_size` tokens that answers use most; drafts come from the whole vocabulary.

Shape legend: see `base.py`; further Q query positions.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, Self

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor, nn

from spec_train.batch import Batch, Features, FeatureSpec
from spec_train.errors import UserError
from spec_train.packed import PackedWeight
from spec_train.recipe import NonNegative, PositiveInt, Probability
from spec_train.speculators.base import LossOutput, ServingCheckpoint
from spec_train.speculators.chain_head import ChainHead, LayerConfig, llama_tensors, position_limit, served_geometry
from spec_train.speculators.distillation import chain_loss, depth_weights, target_distributions
from spec_train.speculators.head_files import checkpoint_tensors
from spec_train.speculators.heads import load_strictly
from spec_train.speculators.layers import DraftLayer, layer_geometry
from spec_train.speculators.losses import LossKind
from spec_train.speculators.start import StartOptions
from spec_train.speculators.supervision import supervised_queries
from spec_train.target import TargetModel

TRAINING = ("ttt_steps", "step_decay", "loss", "lk_eta", "feature_loss_weight", "gradient_checkpointing")
OUTPUT_SCALE = 0.1  # of what a fresh layer adds to the residual, which is normed here and not in the target


class Eagle1Options(StartOptions):
    """EAGLE-1. `loss_vocab_size` null takes the loss over the target's whole vocabulary."""

    of_the_head = ("num_layers", "init")

    type: Literal["eagle1"]
    num_layers: PositiveInt = 1
    ttt_steps: PositiveInt = 3
    step_decay: Probability = 0.8
    loss_vocab_size: PositiveInt | None = None
    loss: Literal["kl", "lk"] = "kl"
    lk_eta: float = Field(default=3.0, gt=0)
    feature_loss_weight: NonNegative = 0.1
    init: Literal["target_layer", "random"] = "target_layer"
    gradient_checkpointing: bool = False

    def vocab_limit(self) -> int | None:
        """See `SpeculatorOptions.vocab_limit`."""
        return self.loss_vocab_size


@dataclass(frozen=True, kw_only=True)
class Eagle1Config(LayerConfig):
    """Geometry (from the target) and options (from the recipe) of a head; saved beside every checkpoint."""

    ttt_steps: int = 3
    step_decay: float = 0.8
    loss: LossKind = "kl"
    lk_eta: float = 3.0
    feature_loss_weight: float = 0.0
    gradient_checkpointing: bool = False


class Eagle1(ChainHead):
    """The head. Trained: fc, layers. Borrowed from the target: embedding and output head."""

    kind = "eagle1"
    method = "eagle"
    options = Eagle1Options
    config: Eagle1Config
    feature_spec = FeatureSpec((), last_hidden=True)

    def __init__(self, config: Eagle1Config) -> None:
        super().__init__(config)
        self.config = config
        self._packed_head = PackedWeight()
        self.num_depths = config.ttt_steps
        self.gradient_checkpointing = config.gradient_checkpointing
        self.fc = nn.Linear(2 * config.hidden_size, config.hidden_size, bias=False)
        layers = [DraftLayer(config, first=False) for _ in range(config.num_layers)]
        layers[0].add_module("input_layernorm", nn.Identity())
        self.layers = nn.ModuleList(layers)
        self.head_VH: Tensor
        self.loss_head_DH: Tensor
        self.loss_index_V: Tensor
        for name in ("head_VH", "loss_head_DH", "loss_index_V"):
            self.register_buffer(name, torch.empty(0), persistent=False)

    # ------------------------------------------------------------------ construction
    @classmethod
    def required_features(cls, options: Any, target: TargetModel) -> FeatureSpec:
        """The state after the final norm."""
        return cls.feature_spec

    @classmethod
    def from_recipe(cls, options: Any, target: TargetModel, draft_ids_D: Tensor, seed: int) -> Self:
        """A fresh head. `draft_ids_D`: ascending target ids that the loss is taken over. It starts from the target's
        own state, and from its last layer where that is one of Llama's kind.

        Raises UserError for rotary embeddings that the head cannot copy."""
        training = {name: getattr(options, name) for name in TRAINING}
        config = Eagle1Config(**layer_geometry(target), num_layers=options.num_layers, **training)
        generator = torch.Generator().manual_seed(seed)
        head = cls(config)
        for module in head.modules():
            if isinstance(module, nn.Linear):
                nn.init.normal_(module.weight, std=0.02, generator=generator)
        head.borrow(target, draft_ids_D)
        with torch.no_grad():
            _start_from_target(head, target, options.init == "target_layer", generator)
        return head

    def head_options(self) -> dict[str, Any]:
        """See `StartableSpeculator.head_options`."""
        return {"num_layers": self.config.num_layers}

    def continued(self, options: Any, loss_ids_D: Tensor) -> Self:
        """See `StartableSpeculator.continued`."""
        training = {name: getattr(options, name) for name in TRAINING}
        limit = position_limit(self.config, self.target)
        head = type(self)(replace(self.config, **training, max_position_embeddings=limit))
        head.load_state_dict(self.state_dict())
        head.borrow(self.target, loss_ids_D)
        return head

    @classmethod
    def from_checkpoint(cls, checkpoint: Path, saved: dict[str, Any], target: TargetModel) -> Self:
        """The head of a training checkpoint, frozen, in the target's dtype and on its device."""
        head = cls(Eagle1Config(**saved))
        load_strictly(head, checkpoint_tensors(checkpoint), str(checkpoint))
        return head._frozen(target, str(checkpoint)).to(target.device, target.dtype)

    def _frozen(self, target: TargetModel, where: str) -> Self:
        config = self.config
        if (config.vocab_size, config.hidden_size) != (target.vocab_size, target.hidden_size):
            raise UserError(
                f"{where}: trained for a target of vocabulary {config.vocab_size} and width {config.hidden_size}; "
                f"{target.name} has {target.vocab_size} and {target.hidden_size}"
            )
        self.borrow(target)
        return self.eval().requires_grad_(False)

    def borrow(self, target: TargetModel, loss_ids_D: Tensor | None = None) -> None:
        """Take the target's embedding and output head; `loss_ids_D`: the tokens of the loss, null for all."""
        super().borrow(target)
        device = self.fc.weight.device
        self.head_VH = target.lm_head.weight.detach().to(device)
        ids = torch.arange(target.vocab_size) if loss_ids_D is None else loss_ids_D
        whole = len(ids) == target.vocab_size
        self.loss_head_DH = self.head_VH if whole else self.head_VH[ids.to(device)]
        # Looked up by target id: the index among the tokens of the loss, -1 outside.
        self.loss_index_V = torch.full((target.vocab_size,), -1, device=device)
        self.loss_index_V[ids.to(device)] = torch.arange(len(ids), device=device)

    # ------------------------------------------------------------------ the parts of a depth
    def first_state(self, features: Features) -> Tensor:
        """f^0 [..., H]: the target's state after its final norm."""
        hidden = features.last_hidden
        assert hidden is not None
        return hidden if torch.is_autocast_enabled(hidden.device.type) else hidden.to(self.fc.weight.dtype)

    def attention_input(self, index: int, embedding: Tensor, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """The first layer reads W_fc [embedding; state]."""
        if index == 0:
            hidden = self.fc(torch.cat([embedding.to(hidden.dtype), hidden], dim=-1))
        return self._layers[index].attention_input(embedding, hidden)

    def draft_logits(self, ready: Tensor) -> Tensor:
        """Logits [..., V]: the target's output head, without the scaling or capping that the target may add, as
        engines have it. Neither moves the argmax."""
        return self._packed_head.linear(ready, self.head_VH.to(ready.dtype))

    # ------------------------------------------------------------------ loss
    def loss(self, batch: Batch, normalizer: Tensor) -> LossOutput:
        """Sum over depths of decay^k * (weighted mean of the head loss + feature_loss_weight * smooth L1).

        Metrics by depth: depth_loss, alpha, hit, and feature_loss where it has a weight."""
        queries = supervised_queries(batch, self.num_depths)
        depth_weight_K = depth_weights(self.config.step_decay, normalizer)
        rows = torch.arange(batch.input_ids_BT.shape[0], device=batch.input_ids_BT.device)[:, None]
        regression: list[Tensor] = []

        def regressed() -> Iterator[Tensor]:
            """The states of each depth, held against the target's state that they predict on the way."""
            assert batch.last_hidden_BTH is not None
            for k, state_BQH in enumerate(self.unroll(batch, queries, self.num_depths)):
                if self.config.feature_loss_weight > 0:
                    weight_BQ = queries.weight_BQK[..., k]
                    chosen = weight_BQ > 0
                    wanted_NH = batch.last_hidden_BTH[rows, queries.predicted_BQK[..., k] - 1][chosen]
                    gap_NH = F.smooth_l1_loss(state_BQH[chosen].float(), wanted_NH.float(), reduction="none")
                    regression.append((gap_NH.mean(-1) * weight_BQ[chosen]).sum())
                yield state_BQH

        out = chain_loss(
            batch,
            queries,
            regressed(),
            lambda _depth: self.loss_head_DH,
            distributions=target_distributions(batch, queries, self.loss_head_DH, self.target),
            draft_index_V=self.loss_index_V,
            depth_weight_K=depth_weight_K,
            kind=self.config.loss,
            eta=self.config.lk_eta,
        )
        if not regression:
            return out
        feature_K = torch.stack(regression)
        total = out.loss + self.config.feature_loss_weight * (feature_K * depth_weight_K).sum()
        sums = {**out.sums, "feature_loss": feature_K.detach().double()}
        return LossOutput(total, sums, {**out.counts, "feature_loss": out.counts["hit"]})

    # ------------------------------------------------------------------ serving
    def serving(self) -> ServingCheckpoint:
        """`method=eagle` names. The engine takes embedding and output head from the target, and refuses a file with
        an `lm_head.weight`; the speculators format has no EAGLE-1."""
        config = {**self.config.serving(), "architectures": ["LlamaForCausalLM"]}
        return ServingCheckpoint("eagle1", "eagle", config, dict(self.state_dict()))

    @classmethod
    def from_serving(cls, config: dict[str, Any], tensors: dict[str, Tensor], target: TargetModel) -> Self:
        """Rebuild a head from an exported config.json and its tensors. Raises UserError for a missing or unknown
        tensor, and for a target of another size."""
        head = cls(Eagle1Config(**served_geometry(config)))
        load_strictly(head, tensors, "eagle1")  # engines know no fc.bias either
        return head._frozen(target, "exported eagle1 head")


def _start_from_target(head: Eagle1, target: TargetModel, copy_layer: bool, generator: torch.Generator) -> None:
    """W_fc passes the state on and mixes in a random image of the embedding, a quarter of the state in size; the first
    layer is the target's last one, its output scaled down."""
    size, final = head.config.hidden_size, getattr(target.decoder, "norm", None)
    state_rms = _rms(final.weight) if final is not None else 1.0
    spread = 0.25 * state_rms / (_rms(target.embedding.weight) * size**0.5)
    head.fc.weight[:, :size].normal_(std=spread, generator=generator)
    head.fc.weight[:, size:] += torch.eye(size)
    source = llama_tensors(target) if copy_layer else None
    own = dict(head._layers[0].named_parameters())
    if source is None or any(own[name].shape != value.shape for name, value in source.items() if name in own):
        return
    # The attention now reads a state in the scale of the final norm, not of the layer's own norm.
    read_scale = _rms(source["input_layernorm.weight"]) / state_rms
    for name, parameter in own.items():
        reads = name.startswith("self_attn.") and "o_proj" not in name
        writes = "o_proj" in name or "down_proj" in name
        parameter.copy_(source[name] * (read_scale if reads else OUTPUT_SCALE if writes else 1.0))


def _rms(tensor: Tensor) -> float:
    return float(tensor.float().pow(2).mean().sqrt().clamp(min=1e-6))
