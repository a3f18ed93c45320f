"""EAGLE-3 (Li et al., 2025, arXiv:2503.01840): one decoder layer that drafts from the target's own hidden states.

Equations (g_p: states of A target layers at position p, x: tokens, W_fc: H x A*H_target, no bias)

    f^0_p   = W_fc [g^1_p; ...; g^A_p]
    u^k_p   = [RMS_in(Emb(x_{p+1+k})); RMS_hid(f^k_p)]                      the layer's attention reads 2H
    h^k_p   = Layer(u^k_p, residual f^k_p) at RoPE position p+k
    logits  = W_head RMS_norm(h^k_p) over the draft vocabulary               drafts token p+2+k
    f^{k+1}_p = h^k_p                                                        the recurrent state is pre-norm

The training pass (TTT) and decoding are those of every head of this kind: see `chain_head.py`.

EAGLE-3.1 options: `norm_before_fc` (RMSNorm over the concatenation), `fc_norm` (one RMSNorm per aux state),
`norm_output` (feed the normed state back), `norm_before_residual` (the residual is RMS_hid(f)).

Shape legend: see `base.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, Self

import torch
from pydantic import Field, field_validator
from torch import Tensor, nn

from spec_train.batch import Batch, Features, FeatureSpec
from spec_train.data.draft_vocab import drafted_ids
from spec_train.errors import UserError
from spec_train.recipe import PositiveInt, Probability, SpeculatorOptions
from spec_train.speculators.base import LossOutput, ServingCheckpoint
from spec_train.speculators.chain_head import ChainHead, LayerConfig, llama_tensors, position_limit, served_geometry
from spec_train.speculators.distillation import chain_loss, depth_weights, target_distributions
from spec_train.speculators.head_files import checkpoint_tensors, find_head, read_json
from spec_train.speculators.heads import load_strictly
from spec_train.speculators.layers import DraftLayer, RMSNorm, layer_geometry
from spec_train.speculators.losses import LossKind
from spec_train.speculators.start import KEY, StartOptions, is_checkpoint
from spec_train.speculators.supervision import Queries, supervised_queries
from spec_train.target import TargetModel


class AuxHeadOptions(StartOptions):
    """What EAGLE-3 and P-EAGLE share. `draft_vocab_size` null keeps the target's vocabulary; `aux_layer_ids` null
    takes the default ids."""

    of_the_head = (
        *("num_layers", "draft_vocab_size", "aux_layer_ids", "norm_before_fc", "fc_norm", "norm_before_residual"),
        *("qk_norm", "init", "norm_output", "mask_token_id"),
    )

    num_layers: PositiveInt = 1
    step_decay: Probability = 0.8
    draft_vocab_size: PositiveInt | None = None
    aux_layer_ids: list[Annotated[int, Field(ge=0)]] | None = Field(default=None, min_length=1)
    loss: Literal["kl", "lk"] = "kl"
    lk_eta: float = Field(default=3.0, gt=0)
    norm_before_fc: bool = False
    fc_norm: bool = False
    norm_before_residual: bool = False
    qk_norm: bool = False
    init: Literal["target_layer", "random"] = "target_layer"

    @field_validator("aux_layer_ids")
    @classmethod
    def _distinct(cls, ids: list[int] | None) -> list[int] | None:
        if ids is not None and len(set(ids)) != len(ids):
            raise ValueError(f"must not name a layer twice, got {ids}")
        return ids

    def vocab_limit(self) -> int | None:
        """See `SpeculatorOptions.vocab_limit`."""
        return self.draft_vocab_size if self.start_from is None else None

    def feature_options(self) -> dict[str, Any]:
        """See `SpeculatorOptions.feature_options`."""
        return {"aux_layer_ids": self.aux_layer_ids}


class Eagle3Options(AuxHeadOptions):
    """EAGLE-3."""

    type: Literal["eagle3"]
    ttt_steps: PositiveInt = 4
    norm_output: bool = False
    gradient_checkpointing: bool = False


@dataclass(frozen=True, kw_only=True)
class Eagle3Config(LayerConfig):
    """Geometry (from the target) and options (from the recipe) of a head; saved beside every checkpoint."""

    draft_vocab_size: int
    target_hidden_size: int
    aux_layer_ids: tuple[int, ...]
    ttt_steps: int = 4
    step_decay: float = 0.8
    loss: LossKind = "kl"
    lk_eta: float = 3.0
    norm_before_fc: bool = False
    fc_norm: bool = False
    norm_output: bool = False
    gradient_checkpointing: bool = False


def default_aux_layer_ids(num_layers: int) -> tuple[int, ...]:
    """vLLM's default (2, n//2, n-3) where those are distinct, else three ids spread over a shallow target."""
    ids = tuple(sorted({2, num_layers // 2, num_layers - 3}))
    if len(ids) == 3 and ids[0] > 0:
        return ids
    return tuple(sorted({max(1, num_layers // 3), max(1, 2 * num_layers // 3), num_layers}))


class Eagle3(ChainHead):
    """The head. Trained: fc, layers, norm, lm_head. Borrowed from the target: embedding and rows of its output head."""

    kind = "eagle3"
    method = "eagle3"
    options: ClassVar[type[SpeculatorOptions]] = Eagle3Options
    config_class: ClassVar[type[Eagle3Config]] = Eagle3Config
    config: Eagle3Config

    def __init__(self, config: Eagle3Config, draft_ids_D: Tensor) -> None:
        super().__init__(config)
        self.config = config
        self.num_depths = config.ttt_steps
        self.gradient_checkpointing = config.gradient_checkpointing
        self.feature_spec = FeatureSpec(config.aux_layer_ids, last_hidden=True)
        num_aux, width = len(config.aux_layer_ids), config.target_hidden_size
        if config.norm_before_fc:
            self.input_norm = RMSNorm(num_aux * width, config.rms_norm_eps)
        if config.fc_norm:
            self.fc_norm = nn.ModuleList([RMSNorm(width, config.rms_norm_eps) for _ in range(num_aux)])
        self.fc = nn.Linear(num_aux * width, config.hidden_size, bias=False)
        self.layers = nn.ModuleList([DraftLayer(config, first=i == 0) for i in range(config.num_layers)])
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.lm_head = nn.Linear(config.hidden_size, config.draft_vocab_size, bias=False)
        self.d2t: Tensor
        self.draft_index_V: Tensor
        self.target_head_DH: Tensor
        self.register_buffer("d2t", draft_ids_D - torch.arange(len(draft_ids_D)))
        # Looked up by target id: the index in the draft vocabulary, -1 outside.
        index = torch.full((config.vocab_size,), -1, dtype=torch.long)
        index[draft_ids_D] = torch.arange(len(draft_ids_D))
        self.register_buffer("draft_index_V", index, persistent=False)
        self.register_buffer("target_head_DH", torch.empty(0), persistent=False)

    @property
    def draft_ids_D(self) -> Tensor:
        """Target ids of the draft vocabulary, ascending."""
        return self.d2t + torch.arange(len(self.d2t), device=self.d2t.device)

    # ------------------------------------------------------------------ construction
    @classmethod
    def required_features(cls, options: Any, target: TargetModel) -> FeatureSpec:
        """The states that a head with these recipe options reads, or the one that it starts from."""
        ids = options.aux_layer_ids
        if options.start_from is not None:
            folder = find_head(options.start_from, f"{KEY} ")
            if is_checkpoint(folder):
                ids = read_json(folder / "speculator.json")["config"].get("aux_layer_ids")
            else:
                ids = cls._served_fields(read_json(folder / "config.json"), target)["aux_layer_ids"]
        return FeatureSpec(aux_layer_ids(ids, target.num_layers), last_hidden=True)

    @classmethod
    def from_recipe(cls, options: Any, target: TargetModel, draft_ids_D: Tensor, seed: int) -> Self:
        """A fresh head from the recipe's `speculator` section. `draft_ids_D`: ascending target ids it may propose."""
        config = eagle3_config(options, target, len(draft_ids_D))
        return cls.from_target(config, target, draft_ids_D, options.init, seed)

    @classmethod
    def from_target(cls, config: Eagle3Config, target: TargetModel, draft_ids_D: Tensor, init: str, seed: int) -> Self:
        """A fresh head: output rows and final norm from the target, the layer from its last layer where it fits."""
        generator = torch.Generator().manual_seed(seed)
        head = cls(config, draft_ids_D)
        for module in head.modules():
            if isinstance(module, nn.Linear):
                nn.init.normal_(module.weight, std=0.02, generator=generator)
        head.borrow(target)
        with torch.no_grad():
            if config.hidden_size == target.hidden_size:
                # Start near the last aux state: the others join as their columns grow.
                head.fc.weight.mul_(0.25)[:, -target.hidden_size :] += torch.eye(target.hidden_size)
                head.lm_head.weight.copy_(target.lm_head.weight[draft_ids_D.to(target.device)].float())
            if init == "target_layer":
                _copy_last_layer(head, target)
        return head

    def head_options(self) -> dict[str, Any]:
        """See `StartableSpeculator.head_options`."""
        config = self.config
        names = ("num_layers", "draft_vocab_size", "norm_before_fc", "fc_norm", "norm_before_residual", "qk_norm")
        own = {name: getattr(config, name) for name in (*names, "norm_output")}
        return {**own, "aux_layer_ids": list(config.aux_layer_ids)}

    def training_options(self, options: Any) -> dict[str, Any]:
        """The fields of the config that say how a head is trained."""
        names = ("ttt_steps", "step_decay", "loss", "lk_eta", "gradient_checkpointing")
        return {name: getattr(options, name) for name in names}

    def continued(self, options: Any, loss_ids_D: Tensor) -> Self:
        """See `StartableSpeculator.continued`. The map between the vocabularies stays the head's own."""
        limit = position_limit(self.config, self.target)
        config = replace(self.config, **self.training_options(options), max_position_embeddings=limit)
        head = type(self)(config, self.draft_ids_D.cpu())
        head.load_state_dict(self.state_dict())
        head.borrow(self.target)
        return head

    def drafted_ids(self) -> Tensor | None:
        """See `StartableSpeculator.drafted_ids`."""
        return self.draft_ids_D

    @classmethod
    def from_checkpoint(cls, checkpoint: Path, saved: dict[str, Any], target: TargetModel) -> Self:
        """The head of a training checkpoint, frozen, in the target's dtype and on its device."""
        config = cls.config_class(**{**saved, "aux_layer_ids": tuple(saved["aux_layer_ids"])})
        tensors, where = checkpoint_tensors(checkpoint), str(checkpoint)
        cls.check_fits(config, target, where)
        head = cls(config, drafted_ids(tensors.get("d2t"), None, config.vocab_size, where, config.draft_vocab_size))
        load_strictly(head, tensors, str(checkpoint))
        head.to(target.device, target.dtype).borrow(target)
        return head.eval().requires_grad_(False)

    @classmethod
    def check_fits(cls, config: Any, target: TargetModel, where: str) -> None:
        """Raises UserError, begun with `where`, for a head of a target of another size."""
        if (config.vocab_size, config.target_hidden_size) != (target.vocab_size, target.hidden_size):
            raise UserError(
                f"{where}: trained for a target of vocabulary {config.vocab_size} and width "
                f"{config.target_hidden_size}; {target.name} has {target.vocab_size} and {target.hidden_size}"
            )

    def borrow(self, target: TargetModel) -> None:
        """Take the frozen embedding and output rows of the target (shared storage where dtype and device agree)."""
        super().borrow(target)
        rows = target.lm_head.weight.detach()[self.draft_ids_D.to(target.device)]
        self.target_head_DH = rows.to(self.d2t.device)

    # ------------------------------------------------------------------ the parts of a depth
    def first_state(self, features: Features) -> Tensor:
        """f^0 [..., H] from concatenated aux states [..., A*H_target]."""
        assert features.aux_hidden is not None
        return self.project(features.aux_hidden)

    def project(self, aux_hidden: Tensor) -> Tensor:
        """[..., A*H_target] -> [..., H]."""
        x = aux_hidden.to(self.fc.weight.dtype) if not torch.is_autocast_enabled(aux_hidden.device.type) else aux_hidden
        if self.config.norm_before_fc:
            x = self.input_norm(x)
        if self.config.fc_norm:
            chunks = x.chunk(len(self.config.aux_layer_ids), dim=-1)
            x = torch.cat([norm(chunk) for norm, chunk in zip(self.fc_norm, chunks, strict=True)], dim=-1)
        out: Tensor = self.fc(x)
        return out

    def feed_back(self, hidden: Tensor) -> Tensor:
        """What the next depth reads: the layer's output, normed only with `norm_output`."""
        return self.ready(hidden) if self.config.norm_output else hidden

    def ready(self, hidden: Tensor) -> Tensor:
        """What the output head reads: the normed state."""
        out: Tensor = self.norm(hidden)
        return out

    def draft_logits(self, ready: Tensor) -> Tensor:
        """Logits [..., D] over the draft vocabulary."""
        out: Tensor = self.lm_head(ready)
        return out

    def draft_index(self) -> Tensor | None:
        """See `ChainHead.draft_index`."""
        return self.draft_index_V

    def target_ids(self, index: Tensor) -> Tensor:
        """Target ids of draft-vocabulary indices."""
        return index + self.d2t[index]

    def full_law(self, probs_BD: Tensor) -> Tensor:
        """A law over the draft vocabulary as one over the target's [B, V]."""
        law = probs_BD.new_zeros(probs_BD.shape[0], self.config.vocab_size)
        return law.index_copy_(1, self.draft_ids_D, probs_BD)

    # ------------------------------------------------------------------ loss
    def loss(self, batch: Batch, normalizer: Tensor) -> LossOutput:
        """Sum over depths of decay^k * (weighted mean of the head loss). Metrics by depth: depth_loss, alpha, hit."""
        return self.loss_of(batch, supervised_queries(batch, self.num_depths), normalizer)

    def loss_of(self, batch: Batch, queries: Queries, normalizer: Tensor) -> LossOutput:
        """`loss` over given queries."""
        return chain_loss(
            batch,
            queries,
            self.unroll(batch, queries, self.num_depths),
            lambda _depth: self.lm_head.weight,
            distributions=target_distributions(batch, queries, self.target_head_DH, self.target),
            draft_index_V=self.draft_index_V,
            depth_weight_K=depth_weights(self.config.step_decay, normalizer),
            kind=self.config.loss,
            eta=self.config.lk_eta,
        )

    # ------------------------------------------------------------------ serving
    def serving(self) -> ServingCheckpoint:
        """Plain `method=eagle3` names and the speculators form; see the vLLM contract in `serving/contract.py`."""
        config, tensors, layer = self.config, self._served_tensors(), self.config.serving()
        ids = list(config.aux_layer_ids)
        flags = {
            name: getattr(config, name) for name in ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")
        }
        shared = {
            "draft_vocab_size": config.draft_vocab_size,
            "target_hidden_size": config.target_hidden_size,
            "eagle_aux_hidden_state_layer_ids": ids,
            **flags,
        }
        plain = {
            **layer,
            **shared,
            "architectures": ["Eagle3Qwen3ForCausalLM" if config.qk_norm else "LlamaForCausalLMEagle3"],
            "num_aux_hidden_states": len(ids),
            "eagle_config": {
                "eagle_aux_hidden_state_layer_ids": ids,
                "use_aux_hidden_state": True,
                "norm_before_fc": config.norm_before_fc,
            },
        }
        speculators = {
            **shared,
            "architectures": ["Eagle3Speculator"],
            "speculators_model_type": "eagle3",
            "transformer_layer_config": {**layer, "num_aux_hidden_states": len(ids)},
        }
        return ServingCheckpoint("eagle3", "eagle3", plain, midlayer_names(tensors), speculators, tensors)

    def _served_tensors(self) -> dict[str, Tensor]:
        """The head's tensors; the maps between vocabularies only where it has one of its own."""
        tensors = {name: value for name, value in self.state_dict().items() if name != "d2t"}
        if self.config.draft_vocab_size != self.config.vocab_size:
            tensors["d2t"] = self.d2t
            tensors["t2d"] = torch.zeros(self.config.vocab_size, dtype=torch.bool, device=self.d2t.device)
            tensors["t2d"][self.draft_ids_D] = True
        return tensors

    @classmethod
    def from_serving(cls, config: dict[str, Any], tensors: dict[str, Tensor], target: TargetModel) -> Self:
        """Rebuild a head from an exported config.json and its tensors (either format, `midlayer.` or `layers.0.`).

        Raises UserError for a missing, unknown or misshapen tensor, for a map between the vocabularies that engines
        would misread (absolute ids, or none beside a reduced vocabulary), and for a target of another size.
        """
        head_config, where = cls.config_class(**cls._served_fields(config, target)), f"exported {cls.kind} head"
        cls.check_fits(head_config, target, where)
        renamed = {name.replace("midlayer.", "layers.0."): value for name, value in tensors.items()}
        t2d, d2t = renamed.pop("t2d", None), renamed.get("d2t")
        if d2t is None and head_config.draft_vocab_size != head_config.vocab_size:
            raise UserError(
                f"{where}: drafts from {head_config.draft_vocab_size} of {head_config.vocab_size} "
                "tokens and has no d2t to say which; engines would take the first ones: use a file that holds it"
            )
        if d2t is None:
            d2t = renamed["d2t"] = torch.zeros(head_config.draft_vocab_size, dtype=torch.long)
        head = cls(head_config, drafted_ids(d2t, t2d, head_config.vocab_size, where, head_config.draft_vocab_size))
        load_strictly(head, renamed, cls.kind)
        head.borrow(target)
        return head.eval().requires_grad_(False)

    @classmethod
    def _served_fields(cls, config: dict[str, Any], target: TargetModel) -> dict[str, Any]:
        """The fields of our config that an exported config.json holds. Official heads leave the layer ids to vLLM,
        which takes three by the target's depth."""
        layer = config.get("transformer_layer_config", config)
        eagle = config.get("eagle_config") or {}
        if eagle.get("use_aux_hidden_state") is False:
            raise UserError("EAGLE checkpoint: use_aux_hidden_state is false; heads that read one state are EAGLE-1's")
        ids = config.get("eagle_aux_hidden_state_layer_ids") or eagle.get("eagle_aux_hidden_state_layer_ids")
        return {
            **served_geometry(layer),
            "draft_vocab_size": config.get("draft_vocab_size") or layer["vocab_size"],
            "target_hidden_size": config.get("target_hidden_size") or layer["hidden_size"],
            "aux_layer_ids": aux_layer_ids(ids, target.num_layers),
            "norm_before_fc": bool(eagle.get("norm_before_fc", config.get("norm_before_fc"))),
            "fc_norm": bool(config.get("fc_norm")),
            "norm_output": bool(config.get("norm_output")),
            # Absent, the speculators format means True for EAGLE-3, and the plain one False.
            "norm_before_residual": bool(
                config.get("norm_before_residual", config.get("speculators_model_type") == "eagle3")
            ),
        }


def aux_layer_ids(chosen: Sequence[int] | None, num_layers: int) -> tuple[int, ...]:
    """The recipe's ids, ascending, or the default. Raises UserError for ids that the target does not have."""
    ids = tuple(sorted(chosen)) if chosen else default_aux_layer_ids(num_layers)
    if len(set(ids)) != len(ids) or ids[0] < 0 or ids[-1] > num_layers:
        raise UserError(
            f"speculator.aux_layer_ids {list(ids)}: ids must be distinct and lie in 0..{num_layers}, the target's depth"
        )
    return ids


def midlayer_names(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Tensors as EAGLE's own files name them, where the first layer is `midlayer.` and not `layers.0.`."""
    return {
        f"midlayer.{name.removeprefix('layers.0.')}" if name.startswith("layers.0.") else name: value
        for name, value in tensors.items()
    }


def eagle3_config(options: Any, target: TargetModel, draft_vocab_size: int) -> Eagle3Config:
    """Geometry from the target, options from the recipe's `speculator` section.

    Raises UserError for aux ids outside the target and for rotary embeddings that the head cannot copy.
    """
    return Eagle3Config(
        **aux_head_fields(options, target, draft_vocab_size),
        ttt_steps=options.ttt_steps,
        norm_output=options.norm_output,
        gradient_checkpointing=options.gradient_checkpointing,
    )


def aux_head_fields(options: Any, target: TargetModel, draft_vocab_size: int) -> dict[str, Any]:
    """The fields of an Eagle3Config that follow from the target and `AuxHeadOptions`."""
    names = ["num_layers", "step_decay", "loss", "lk_eta", "qk_norm"]
    names += ["norm_before_fc", "fc_norm", "norm_before_residual"]
    return {
        **layer_geometry(target),
        "draft_vocab_size": draft_vocab_size,
        "target_hidden_size": target.hidden_size,
        "aux_layer_ids": aux_layer_ids(options.aux_layer_ids, target.num_layers),
        **{name: getattr(options, name) for name in names},
    }


def _copy_last_layer(head: Eagle3, target: TargetModel) -> None:
    """Start the first draft layer from the target's last one where names and shapes agree (Llama-like targets)."""
    source = llama_tensors(target)
    if source is None:
        return
    first = head._layers[0]
    hidden = head.config.hidden_size
    own = dict(first.named_parameters())
    for name, value in source.items():
        if "layernorm" in name or name not in own:
            continue
        if name.startswith("self_attn.") and "o_proj" not in name:
            if own[name].shape == (value.shape[0], 2 * hidden):
                own[name].mul_(0.5)[:, hidden:] += value.to(own[name].device)
        elif own[name].shape == value.shape:
            own[name].copy_(value)
    first.hidden_norm.weight.copy_(source["input_layernorm.weight"])
    first.post_attention_layernorm.weight.copy_(source["post_attention_layernorm.weight"])
    final = getattr(target.decoder, "norm", None)
    if final is not None and final.weight.shape == head.norm.weight.shape:
        head.norm.weight.copy_(final.weight.float())
