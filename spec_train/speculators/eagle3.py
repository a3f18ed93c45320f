"""EAGLE-3 (Li et al., 2025, arXiv:2503.01840): one decoder layer that drafts from the target's own hidden states.

Equations (g_p: states of A target layers at position p, x: tokens, W_fc: H x A*H_target, no bias)

    f^0_p   = W_fc [g^1_p; ...; g^A_p]
    u^k_p   = [RMS_in(Emb(x_{p+1+k})); RMS_hid(f^k_p)]                      the layer's attention reads 2H
    h^k_p   = Layer(u^k_p, residual f^k_p) at RoPE position p+k
    logits  = W_head RMS_norm(h^k_p) over the draft vocabulary               drafts token p+2+k
    f^{k+1}_p = h^k_p                                                        the recurrent state is pre-norm

Training-time test (TTT): depth k > 0 runs on the draft's own states, as in serving. A query (k, p) attends to the
depth-0 entries of every position up to p, which come from the target, and to its own entries (1, p) ... (k, p); the
mask is [causal | I | I ...]. The extra terms are plain dot products, so no square mask is built for them. Keys and
values are computed at every position, queries only where some depth is supervised.

EAGLE-3.1 options: `norm_before_fc` (RMSNorm over the concatenation), `fc_norm` (one RMSNorm per aux state),
`norm_output` (feed the normed state back), `norm_before_residual` (the residual is RMS_hid(f)).

Shape legend: see `base.py`; further Q query positions, h heads, g key/value heads, d head_dim.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal, cast

import torch
import torch.nn.functional as F
from pydantic import Field, field_validator
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from spec_train.batch import Batch, FeatureSpec
from spec_train.errors import UserError
from spec_train.kv_cache import SlotCache, grouped_attention
from spec_train.recipe import PositiveInt, Probability, SpeculatorOptions
from spec_train.speculators.base import (
    Chooser,
    Committed,
    LossOutput,
    Proposal,
    ResponseHits,
    ServingCheckpoint,
    Speculator,
)
from spec_train.speculators.distillation import chain_hits, chain_loss, depth_weights, target_distributions
from spec_train.speculators.layers import DraftLayer, RMSNorm, layer_geometry, ttt_attention
from spec_train.speculators.losses import LossKind
from spec_train.speculators.supervision import Queries, supervised_queries
from spec_train.target import TargetModel


class Eagle3Options(SpeculatorOptions):
    """EAGLE-3. `draft_vocab_size` null keeps the target's vocabulary; `aux_layer_ids` null takes the default ids."""

    type: Literal["eagle3"]
    num_layers: PositiveInt = 1
    ttt_steps: PositiveInt = 4
    step_decay: Probability = 0.8
    draft_vocab_size: PositiveInt | None = None
    aux_layer_ids: list[Annotated[int, Field(ge=0)]] | None = Field(default=None, min_length=1)
    loss: Literal["kl", "lk"] = "kl"
    lk_eta: float = Field(default=3.0, gt=0)
    norm_before_fc: bool = False
    fc_norm: bool = False
    norm_output: bool = False
    norm_before_residual: bool = False
    init: Literal["target_layer", "random"] = "target_layer"
    gradient_checkpointing: bool = False

    @field_validator("aux_layer_ids")
    @classmethod
    def _distinct(cls, ids: list[int] | None) -> list[int] | None:
        if ids is not None and len(set(ids)) != len(ids):
            raise ValueError(f"must not name a layer twice, got {ids}")
        return ids

    def vocab_limit(self) -> int | None:
        """See `SpeculatorOptions.vocab_limit`."""
        return self.draft_vocab_size

    def feature_options(self) -> dict[str, Any]:
        """See `SpeculatorOptions.feature_options`."""
        return {"aux_layer_ids": self.aux_layer_ids}


@dataclass(frozen=True)
class Eagle3Config:
    """Geometry (from the target) and options (from the recipe) of a head; saved beside every checkpoint."""

    hidden_size: int
    intermediate_size: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    vocab_size: int
    draft_vocab_size: int
    target_hidden_size: int
    aux_layer_ids: tuple[int, ...]
    rms_norm_eps: float
    rope_parameters: dict[str, Any]
    max_position_embeddings: int
    num_layers: int = 1
    ttt_steps: int = 4
    step_decay: float = 0.8
    loss: LossKind = "kl"
    lk_eta: float = 3.0
    norm_before_fc: bool = False
    fc_norm: bool = False
    norm_output: bool = False
    norm_before_residual: bool = False
    gradient_checkpointing: bool = False
    hidden_act: Literal["silu"] = field(default="silu")

    def llama(self) -> LlamaConfig:
        """The head's layer as a LlamaConfig (rotary embedding, serving config)."""
        return LlamaConfig(
            hidden_size=self.hidden_size,
            intermediate_size=self.intermediate_size,
            num_hidden_layers=self.num_layers,
            num_attention_heads=self.num_attention_heads,
            num_key_value_heads=self.num_key_value_heads,
            head_dim=self.head_dim,
            vocab_size=self.vocab_size,
            rms_norm_eps=self.rms_norm_eps,
            rope_parameters=dict(self.rope_parameters),
            max_position_embeddings=self.max_position_embeddings,
            hidden_act=self.hidden_act,
            attention_bias=False,
            mlp_bias=False,
            tie_word_embeddings=False,
        )


def default_aux_layer_ids(num_layers: int) -> tuple[int, ...]:
    """vLLM's default (2, n//2, n-3) where those are distinct, else three ids spread over a shallow target."""
    ids = tuple(sorted({2, num_layers // 2, num_layers - 3}))
    if len(ids) == 3 and ids[0] > 0:
        return ids
    return tuple(sorted({max(1, num_layers // 3), max(1, 2 * num_layers // 3), num_layers}))


@dataclass
class _State:
    """Drafting state: key/value slots by position, the last committed output and its position."""

    cache: SlotCache
    hidden_BH: Tensor
    position_B: Tensor


class Eagle3(Speculator):
    """The head. Trained: fc, layers, norm, lm_head. Borrowed from the target: embedding and rows of its output head."""

    kind = "eagle3"
    method = "eagle3"
    options = Eagle3Options

    def __init__(self, config: Eagle3Config, draft_ids_D: Tensor) -> None:
        super().__init__()
        self.config = config
        self.num_depths = config.ttt_steps
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
        # In a tuple, so that casting the head to bfloat16 leaves the frequencies in float32, as engines have them.
        self._rotary = (LlamaRotaryEmbedding(config.llama()),)
        self.d2t: Tensor
        self.draft_index_V: Tensor
        self.embedding_VH: Tensor
        self.target_head_DH: Tensor
        self.register_buffer("d2t", draft_ids_D - torch.arange(len(draft_ids_D)))
        # Looked up by target id: the index in the draft vocabulary, -1 outside.
        index = torch.full((config.vocab_size,), -1, dtype=torch.long)
        index[draft_ids_D] = torch.arange(len(draft_ids_D))
        self.register_buffer("draft_index_V", index, persistent=False)
        self.register_buffer("embedding_VH", torch.empty(0), persistent=False)
        self.register_buffer("target_head_DH", torch.empty(0), persistent=False)

    @property
    def _layers(self) -> list[DraftLayer]:
        return [cast(DraftLayer, layer) for layer in self.layers]

    @property
    def draft_ids_D(self) -> Tensor:
        """Target ids of the draft vocabulary, ascending."""
        return self.d2t + torch.arange(len(self.d2t), device=self.d2t.device)

    # ------------------------------------------------------------------ construction
    @classmethod
    def required_features(cls, options: Any, target: TargetModel) -> FeatureSpec:
        """The states that a head with these recipe options reads."""
        return FeatureSpec(aux_layer_ids(options.aux_layer_ids, target.num_layers), last_hidden=True)

    @classmethod
    def from_recipe(cls, options: Any, target: TargetModel, draft_ids_D: Tensor, seed: int) -> Eagle3:
        """A fresh head from the recipe's `speculator` section. `draft_ids_D`: ascending target ids it may propose."""
        config = eagle3_config(options, target, len(draft_ids_D))
        return cls.from_target(config, target, draft_ids_D, options.init, seed)

    @classmethod
    def from_target(
        cls, config: Eagle3Config, target: TargetModel, draft_ids_D: Tensor, init: str, seed: int
    ) -> Eagle3:
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

    @classmethod
    def from_checkpoint(cls, checkpoint: Path, saved: dict[str, Any], target: TargetModel) -> Eagle3:
        """The head of a training checkpoint, frozen, in the target's dtype and on its device."""
        config = Eagle3Config(**{**saved, "aux_layer_ids": tuple(saved["aux_layer_ids"])})
        tensors = load_file(checkpoint / "model.safetensors")
        if config.vocab_size != target.vocab_size or config.target_hidden_size != target.hidden_size:
            raise UserError(
                f"{checkpoint}: trained for a target of vocabulary {config.vocab_size} and width "
                f"{config.target_hidden_size}; {target.name} has {target.vocab_size} and {target.hidden_size}"
            )
        head = cls(config, tensors["d2t"] + torch.arange(len(tensors["d2t"])))
        head.load_state_dict(tensors)
        head.to(target.device, target.dtype).borrow(target)
        return head.eval().requires_grad_(False)

    def borrow(self, target: TargetModel) -> None:
        """Take the frozen embedding and output rows of the target (shared storage where dtype and device agree)."""
        self._target = (target,)  # in a tuple: the target must not become a submodule
        device = self.d2t.device
        self.embedding_VH = target.embedding.weight.detach().to(device)
        rows = target.lm_head.weight.detach()[self.draft_ids_D.to(target.device)]
        self.target_head_DH = rows.to(device)

    @property
    def target(self) -> TargetModel:
        """The target this head was built for."""
        return self._target[0]

    # ------------------------------------------------------------------ shared forward pieces
    def project(self, aux_hidden: Tensor) -> Tensor:
        """f^0 [..., H] from concatenated aux states [..., A*H_target]."""
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
        return self.norm(hidden) if self.config.norm_output else hidden

    def _cos_sin(self, like: Tensor, position: Tensor) -> tuple[Tensor, Tensor]:
        cos, sin = self._rotary[0](like.float(), position)
        return cos, sin

    # ------------------------------------------------------------------ training pass
    def unroll(self, batch: Batch, queries: Queries, depths: int) -> Iterator[Tensor]:
        """Normed states [B, Q, H] of each depth, ready for the output head."""
        assert batch.aux_hidden_BTAH is not None
        ids, position = batch.input_ids_BT, batch.position_BT
        length = ids.shape[1]
        f_BTH = self.project(batch.aux_hidden_BTAH)
        next_ids = F.pad(ids[:, 1:], (0, 1))
        rows = torch.arange(ids.shape[0], device=ids.device)[:, None]
        index = queries.index_BQ
        document = batch.document_BT
        mask_BQT = document[rows, index][:, :, None] == document[:, None, :]
        mask_BQT = mask_BQT & (torch.arange(length, device=ids.device)[None, None] <= index[:, :, None])
        hidden, query_position = f_BTH[rows, index], position[rows, index]
        cos_sin_T = self._cos_sin(f_BTH, position)
        embedding_BTH = F.embedding(next_ids, self.embedding_VH)
        embedding = F.embedding(ids[rows, (index + 1).clamp(max=length - 1)], self.embedding_VH)
        cos_sin = self._cos_sin(hidden, query_position)
        hidden, entries = self._first_depth(hidden, embedding, cos_sin, f_BTH, embedding_BTH, cos_sin_T, mask_BQT)
        yield self.norm(hidden)
        own: list[list[tuple[Tensor, Tensor]]] = [[] for _ in self._layers]
        for k in range(1, depths):
            hidden = self.feed_back(hidden)
            embedding = F.embedding(ids[rows, (index + 1 + k).clamp(max=length - 1)], self.embedding_VH)
            cos_sin = self._cos_sin(hidden, query_position + k)
            if self.config.gradient_checkpointing and torch.is_grad_enabled():
                hidden, new = checkpoint(
                    self._next_depth,
                    hidden,
                    embedding,
                    cos_sin,
                    entries,
                    [list(o) for o in own],
                    mask_BQT,
                    use_reentrant=False,
                )
            else:
                hidden, new = self._next_depth(hidden, embedding, cos_sin, entries, own, mask_BQT)
            for entry, layer_own in zip(new, own, strict=True):
                layer_own.append(entry)
            yield self.norm(hidden)

    def _first_depth(
        self,
        hidden_BQH: Tensor,
        embedding_BQH: Tensor,
        cos_sin_Q: tuple[Tensor, Tensor],
        f_BTH: Tensor,
        embedding_BTH: Tensor,
        cos_sin_T: tuple[Tensor, Tensor],
        mask_BQT: Tensor,
    ) -> tuple[Tensor, list[tuple[Tensor, Tensor]]]:
        """Depth 0: (outputs at the queries, each layer's keys and values at every position).

        With several layers every position is a query, so a later layer's input is known at every key.
        """
        x, entries = hidden_BQH, []
        for i, layer in enumerate(self._layers):
            read, residual = layer.attention_input(embedding_BQH, x)
            source = layer.attention_input(embedding_BTH, f_BTH)[0] if i == 0 else read
            entries.append(layer.self_attn.keys_values(source, *cos_sin_T))
            q = layer.self_attn.queries(read, *cos_sin_Q)
            x = layer.finish(residual, ttt_attention(q, *entries[i], mask_BQT, []))
        return x, entries

    def _next_depth(
        self,
        hidden_BQH: Tensor,
        embedding_BQH: Tensor,
        cos_sin_Q: tuple[Tensor, Tensor],
        entries: list[tuple[Tensor, Tensor]],
        own: list[list[tuple[Tensor, Tensor]]],
        mask_BQT: Tensor,
    ) -> tuple[Tensor, list[tuple[Tensor, Tensor]]]:
        """Depth k > 0 on the draft's own states: (outputs, this depth's own key and value in each layer)."""
        x, new = hidden_BQH, []
        for i, layer in enumerate(self._layers):
            read, residual = layer.attention_input(embedding_BQH, x)
            new.append(layer.self_attn.keys_values(read, *cos_sin_Q))
            q = layer.self_attn.queries(read, *cos_sin_Q)
            x = layer.finish(residual, ttt_attention(q, *entries[i], mask_BQT, [*own[i], new[i]]))
        return x, new

    def supervised_counts(self, batch: Batch) -> Tensor:
        """See `Speculator.supervised_counts`."""
        return supervised_queries(batch, self.num_depths).weight_BQK.double().sum((0, 1))

    def loss(self, batch: Batch, normalizer: Tensor) -> LossOutput:
        """Sum over depths of decay^k * (weighted mean of the head loss). Metrics by depth: depth_loss, alpha, hit."""
        queries = supervised_queries(batch, self.num_depths, everywhere=self.config.num_layers > 1)
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

    @torch.no_grad()
    def draft_hits(self, batch: Batch, num_draft_tokens: int) -> list[ResponseHits]:
        """See `Speculator.draft_hits`. Depths beyond `ttt_steps` are unrolled the same way."""
        queries = supervised_queries(batch, num_draft_tokens, everywhere=self.config.num_layers > 1)
        return chain_hits(batch, queries, map(self._drafted, self.unroll(batch, queries, num_draft_tokens)))

    def _drafted(self, state_BQH: Tensor) -> Tensor:
        """Greedy drafts in target ids [B, Q], a row of the batch at a time: logits are wide."""
        best_BQ = torch.stack([self.lm_head(state_QH).argmax(-1) for state_QH in state_BQH.unbind()])
        return best_BQ + self.d2t[best_BQ]

    # ------------------------------------------------------------------ decoding
    @torch.no_grad()
    def begin(self, prompts: list[list[int]], max_length: int) -> _State:
        """See `Proposer.begin`."""
        device, size = self.d2t.device, len(prompts)
        cache = SlotCache(self.config.num_layers, max_length)
        hidden = torch.zeros(size, self.config.hidden_size, device=device, dtype=self.fc.weight.dtype)
        return _State(cache, hidden, torch.full((size,), -1, device=device))

    @torch.no_grad()
    def commit(self, state: _State, committed: Committed) -> None:
        """See `Proposer.commit`. Verified rows are recomputed from the target's states, never from drafted ones."""
        assert committed.features.aux_hidden is not None
        f_BSH = self.project(committed.features.aux_hidden)
        out_BSH = self._cached_layers(f_BSH, committed.token_BS, committed.position_BS, state.cache)
        rows, last = torch.arange(out_BSH.shape[0], device=out_BSH.device), committed.count_B - 1
        state.hidden_BH, state.position_B = out_BSH[rows, last], committed.position_BS[rows, last]

    @torch.no_grad()
    def propose(self, state: _State, num_draft_tokens: int, choose: Chooser) -> Proposal:
        """See `Proposer.propose`."""
        hidden_BH = state.hidden_BH
        tokens: list[Tensor] = []
        laws: list[Tensor] = []
        for k in range(num_draft_tokens):
            if k > 0:
                f_B1H = self.feed_back(hidden_BH)[:, None]
                position_B1 = (state.position_B + k)[:, None]
                hidden_BH = self._cached_layers(f_B1H, tokens[-1][:, None], position_B1, state.cache)[:, 0]
            index_B, probs_BD = choose(self.lm_head(self.norm(hidden_BH)))
            tokens.append(index_B + self.d2t[index_B])
            if probs_BD is not None:
                law = probs_BD.new_zeros(probs_BD.shape[0], self.config.vocab_size)
                laws.append(law.index_copy_(1, self.draft_ids_D, probs_BD))
        count = torch.full_like(state.position_B, num_draft_tokens)
        return Proposal(torch.stack(tokens, 1), count, torch.stack(laws, 1) if laws else None)

    def select(self, state: _State, rows: Tensor) -> _State:
        """See `Proposer.select`."""
        state.cache.select(rows)
        return _State(state.cache, state.hidden_BH[rows], state.position_B[rows])

    def _cached_layers(self, f_BSH: Tensor, token_BS: Tensor, position_BS: Tensor, cache: SlotCache) -> Tensor:
        """Layer outputs [B, S, H] for (token, state) pairs at their positions, on top of the cached ones."""
        limit = int(position_BS.max()) + 1
        cache.place(position_BS, None, limit)
        mask = (torch.arange(limit, device=position_BS.device)[None, None] <= position_BS[:, :, None])[:, None]
        embedding = F.embedding(token_BS, self.embedding_VH)
        cos_sin = self._cos_sin(f_BSH, position_BS)
        x = f_BSH
        for i, layer in enumerate(self._layers):
            read, residual = layer.attention_input(embedding, x)
            keys, values = cache.update(*layer.self_attn.keys_values(read, *cos_sin), i)
            context, _ = grouped_attention(layer, layer.self_attn.queries(read, *cos_sin), keys, values, mask)
            x = layer.finish(residual, context.flatten(2))
        return x

    # ------------------------------------------------------------------ serving
    def serving(self) -> ServingCheckpoint:
        """Plain `method=eagle3` names and the speculators form; see the vLLM contract in `serving/contract.py`."""
        config = self.config
        tensors = {name: value for name, value in self.state_dict().items() if name != "d2t"}
        reduced = config.draft_vocab_size != config.vocab_size
        if reduced:
            tensors["d2t"] = self.d2t
            tensors["t2d"] = torch.zeros(config.vocab_size, dtype=torch.bool, device=self.d2t.device)
            tensors["t2d"][self.draft_ids_D] = True
        ids = list(config.aux_layer_ids)
        layer = {
            key: value
            for key, value in config.llama().to_dict().items()
            if key
            not in {
                "architectures",
                "transformers_version",
                "_name_or_path",
                "bos_token_id",
                "eos_token_id",
                "pad_token_id",
            }
        }
        layer["rope_theta"] = config.rope_parameters.get("rope_theta")  # older readers look here
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
            "architectures": ["LlamaForCausalLMEagle3"],
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

    @classmethod
    def from_serving(cls, config: dict[str, Any], tensors: dict[str, Tensor], target: TargetModel) -> Eagle3:
        """Rebuild a head from an exported config.json and its tensors (either format, `midlayer.` or `layers.0.`).

        Raises UserError for a missing or unknown tensor.
        """
        layer = config.get("transformer_layer_config", config)
        ids = config["eagle_aux_hidden_state_layer_ids"]
        head_config = Eagle3Config(
            hidden_size=layer["hidden_size"],
            intermediate_size=layer["intermediate_size"],
            num_attention_heads=layer["num_attention_heads"],
            num_key_value_heads=layer["num_key_value_heads"],
            head_dim=layer.get("head_dim") or layer["hidden_size"] // layer["num_attention_heads"],
            vocab_size=layer["vocab_size"],
            draft_vocab_size=config["draft_vocab_size"],
            target_hidden_size=config.get("target_hidden_size") or layer["hidden_size"],
            aux_layer_ids=tuple(sorted(ids)),
            rms_norm_eps=layer["rms_norm_eps"],
            rope_parameters=layer.get("rope_parameters") or {"rope_type": "default", "rope_theta": layer["rope_theta"]},
            max_position_embeddings=layer["max_position_embeddings"],
            num_layers=layer["num_hidden_layers"],
            norm_before_fc=bool(config.get("norm_before_fc")),
            fc_norm=bool(config.get("fc_norm")),
            norm_output=bool(config.get("norm_output")),
            # Absent, the speculators format means True and the plain one False.
            norm_before_residual=bool(config.get("norm_before_residual", "speculators_model_type" in config)),
        )
        renamed = {name.replace("midlayer.", "layers.0."): value for name, value in tensors.items()}
        renamed.pop("t2d", None)
        d2t = renamed.get("d2t")
        if d2t is None:
            d2t = renamed["d2t"] = torch.zeros(head_config.draft_vocab_size, dtype=torch.long)
        head = cls(head_config, d2t + torch.arange(len(d2t)))
        missing, unexpected = set(head.state_dict()) - set(renamed), set(renamed) - set(head.state_dict())
        if missing or unexpected:
            raise UserError(
                f"exported EAGLE-3 head: missing tensors {sorted(missing)}, unknown tensors {sorted(unexpected)}"
            )
        head.load_state_dict(renamed)
        head.borrow(target)
        return head.eval().requires_grad_(False)


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
        **layer_geometry(target),
        draft_vocab_size=draft_vocab_size,
        target_hidden_size=target.hidden_size,
        aux_layer_ids=aux_layer_ids(options.aux_layer_ids, target.num_layers),
        num_layers=options.num_layers,
        ttt_steps=options.ttt_steps,
        step_decay=options.step_decay,
        loss=options.loss,
        lk_eta=options.lk_eta,
        norm_before_fc=options.norm_before_fc,
        fc_norm=options.fc_norm,
        norm_output=options.norm_output,
        norm_before_residual=options.norm_before_residual,
        gradient_checkpointing=options.gradient_checkpointing,
    )


def _copy_last_layer(head: Eagle3, target: TargetModel) -> None:
    """Start the first draft layer from the target's last one where names and shapes agree (Llama-like targets)."""
    source = dict(target.layers[-1].named_parameters())
    first = head._layers[0]
    hidden = head.config.hidden_size
    names = [f"self_attn.{n}_proj.weight" for n in "qkvo"] + [f"mlp.{n}_proj.weight" for n in ("gate", "up", "down")]
    own = dict(first.named_parameters())
    same_kind = all(name in source for name in [*names, "input_layernorm.weight", "post_attention_layernorm.weight"])
    if not same_kind or "pre_feedforward_layernorm.weight" in source:
        return
    for name in names:
        value = source[name].float()
        if name.startswith("self_attn.") and "o_proj" not in name:
            if own[name].shape == (value.shape[0], 2 * hidden):
                own[name].mul_(0.5)[:, hidden:] += value.to(own[name].device)
        elif own[name].shape == value.shape:
            own[name].copy_(value)
    first.hidden_norm.weight.copy_(source["input_layernorm.weight"].float())
    first.post_attention_layernorm.weight.copy_(source["post_attention_layernorm.weight"].float())
    final = getattr(target.decoder, "norm", None)
    if final is not None and final.weight.shape == head.norm.weight.shape:
        head.norm.weight.copy_(final.weight.float())
