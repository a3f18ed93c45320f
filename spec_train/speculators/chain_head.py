"""Heads that draft with decoder layers of their own, one depth after another, on top of the target's states.

EAGLE-1, EAGLE-3 and P-EAGLE are one machine; what differs is what a depth reads and where its logits come from:

    f_p          what the head takes from the target at position p                           `first_state`
    (e, f) -> u  what a layer's attention reads, and the residual it is added to             `attention_input`
    h -> f       what depth k > 0 reads of the output of depth k-1 (P-EAGLE: nothing)        `feed_back`
    logits       from the last layer's output                                                `ready`, `draft_logits`

Training-time test (TTT): depth k > 0 runs on the draft's own states, as in serving. A query (k, p) attends to the
depth-0 entries of every position up to p, which come from the target, and to its own entries (1, p) ... (k, p); the
mask is [causal | I | I ...]. The extra terms are plain dot products, so no square mask is built for them. Keys and
values are computed at every position; the last layer's queries, and all that depends on them, where some depth is
supervised.

Shape legend: see `base.py`; further Q query positions, h heads, g key/value heads, d head_dim.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from spec_train.batch import Batch, Features
from spec_train.decoding.sampling import Sampling
from spec_train.errors import UserError
from spec_train.graphs import GraphCache
from spec_train.kv_cache import SlotCache, grouped_attention
from spec_train.speculators.base import GREEDY, Committed, ResponseHits
from spec_train.speculators.distillation import chain_hits
from spec_train.speculators.heads import config_value
from spec_train.speculators.layers import DraftLayer, layer_geometry, ttt_attention
from spec_train.speculators.start import StartableSpeculator
from spec_train.speculators.supervision import Queries, supervised_queries
from spec_train.target import TargetModel

Entries = tuple[Tensor, Tensor]  # keys and values [B, g, positions, d]


@dataclass(frozen=True, kw_only=True)
class LayerConfig:
    """Geometry (from the target) of a head's layers."""

    hidden_size: int
    intermediate_size: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    vocab_size: int
    rms_norm_eps: float
    rope_parameters: dict[str, Any]
    max_position_embeddings: int
    num_layers: int = 1
    norm_before_residual: bool = False
    qk_norm: bool = False
    hidden_act: Literal["silu"] = "silu"

    def llama(self) -> LlamaConfig:
        """The head's layers as a LlamaConfig (rotary embedding, serving config)."""
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

    def serving(self) -> dict[str, Any]:
        """The layers' part of a served config.json."""
        left_out = {"architectures", "transformers_version", "_name_or_path"}
        left_out |= {"bos_token_id", "eos_token_id", "pad_token_id"}  # the target's count
        layer = {key: value for key, value in self.llama().to_dict().items() if key not in left_out}
        layer["rope_theta"] = self.rope_parameters.get("rope_theta")  # older readers look here
        layer["model_type"] = "qwen3" if self.qk_norm else "llama"
        return layer


def served_geometry(layer: dict[str, Any]) -> dict[str, Any]:
    """Keyword arguments of a LayerConfig from the layers' part of a served config.json, Llama's defaults where a key
    is left out. Raises UserError for a key that has none, and for a layer of another kind than ours."""
    needed = ("hidden_size", "intermediate_size", "num_attention_heads", "num_hidden_layers", "vocab_size")
    sizes = {key: int(config_value(layer, key, "EAGLE")) for key in needed}
    if layer.get("hidden_act", "silu") != "silu" or "sliding_attention" in (layer.get("layer_types") or []):
        raise UserError("EAGLE checkpoint: only layers with silu and full attention are supported")
    return {
        **{key: value for key, value in sizes.items() if key != "num_hidden_layers"},
        "num_layers": sizes["num_hidden_layers"],
        "num_key_value_heads": layer.get("num_key_value_heads") or sizes["num_attention_heads"],
        "head_dim": layer.get("head_dim") or sizes["hidden_size"] // sizes["num_attention_heads"],
        "rms_norm_eps": layer.get("rms_norm_eps", 1e-6),
        "rope_parameters": layer.get("rope_parameters") or _old_rope(layer),
        "max_position_embeddings": layer.get("max_position_embeddings", 2048),
        "qk_norm": layer.get("model_type") == "qwen3",
    }


def _old_rope(layer: dict[str, Any]) -> dict[str, Any]:
    """Rotary settings as configs before Transformers 5 hold them; engines take 10,000 where the base is missing."""
    scaling = dict(layer.get("rope_scaling") or {})
    scaling.setdefault("rope_type", scaling.pop("type", "default"))
    return {**scaling, "rope_theta": layer.get("rope_theta", 10000.0)}


def position_limit(config: LayerConfig, target: TargetModel) -> int:
    """max_position_embeddings of a head that is trained on: the target's, which engines ask for and published heads
    often lack, where the rotary embedding does not depend on it."""
    free = config.rope_parameters.get("rope_type", "default") in ("default", "linear", "llama3")
    return target.max_length if free else config.max_position_embeddings


def llama_tensors(target: TargetModel) -> dict[str, Tensor] | None:
    """float32 tensors of the target's last layer by Llama's names, None where the layer is of another kind."""
    source = dict(target.layers[-1].named_parameters())
    names = [f"self_attn.{n}_proj.weight" for n in "qkvo"] + [f"mlp.{n}_proj.weight" for n in ("gate", "up", "down")]
    names += ["input_layernorm.weight", "post_attention_layernorm.weight"]
    if "pre_feedforward_layernorm.weight" in source or any(name not in source for name in names):
        return None
    names += [name for name in ("self_attn.q_norm.weight", "self_attn.k_norm.weight") if name in source]
    return {name: source[name].detach().float() for name in names}


@dataclass
class HeadState:
    """Drafting state: key/value slots by position, the last committed output and its position."""

    cache: SlotCache
    hidden_BH: Tensor
    position_B: Tensor

    def keep_last(self, out_BSH: Tensor, committed: Committed) -> None:
        """Remember each row's output at its last committed position."""
        rows, last = torch.arange(out_BSH.shape[0], device=out_BSH.device), committed.count_B - 1
        self.hidden_BH, self.position_B = out_BSH[rows, last], committed.position_BS[rows, last]

    def select(self, rows: Tensor) -> HeadState:
        """The state of the chosen rows."""
        self.cache.select(rows)
        return HeadState(self.cache, self.hidden_BH[rows], self.position_B[rows])

    def branch(self, rows: Tensor) -> HeadState:
        """A copy of the chosen rows, repeats allowed."""
        return HeadState(self.cache.branch(rows), self.hidden_BH[rows], self.position_B[rows])


@dataclass(frozen=True)
class Context:
    """What deeper depths read of depth 0: each layer's entries at every position, which of them each query may see,
    and the queries' positions in their documents."""

    entries: list[Entries]
    mask_BQT: Tensor
    position_BQ: Tensor


class ChainHead(StartableSpeculator):
    """Training pass, estimate and decoding of such a head. Subclasses own the parameters: `layers` (DraftLayers), and
    the frozen `embedding_VH` of the target."""

    layers: nn.ModuleList
    embedding_VH: Tensor
    gradient_checkpointing = False

    def __init__(self, config: LayerConfig) -> None:
        super().__init__()
        # In a tuple, so that casting the head to bfloat16 leaves the frequencies in float32, as engines have them.
        self._rotary = (LlamaRotaryEmbedding(config.llama()),)
        self.register_buffer("embedding_VH", torch.empty(0), persistent=False)

    @property
    def _layers(self) -> list[DraftLayer]:
        return [cast(DraftLayer, layer) for layer in self.layers]

    @property
    def target(self) -> TargetModel:
        """The target this head was built for."""
        return self._target[0]

    @classmethod
    def check_target(cls, options: Any, target: TargetModel) -> None:
        """See `Speculator.check_target`."""
        super().check_target(options, target)
        if options.start_from is None:
            layer_geometry(target)
            cls.required_features(options, target)

    def borrow(self, target: TargetModel) -> None:
        """Take the frozen embedding of the target (shared storage where dtype and device agree)."""
        self._target = (target,)  # in a tuple: the target must not become a submodule
        self.embedding_VH = target.embedding.weight.detach().to(next(self.parameters()).device)

    # ------------------------------------------------------------------ what a method fills in
    @abstractmethod
    def first_state(self, features: Features) -> Tensor:
        """f [..., H] from the target's states."""

    @abstractmethod
    def draft_logits(self, ready: Tensor) -> Tensor:
        """Draft logits [..., D] of states that are `ready`."""

    def draft_index(self) -> Tensor | None:
        """Index in the draft vocabulary of each target id, -1 outside; None for a whole vocabulary."""
        return None

    def attention_input(self, index: int, embedding: Tensor, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """(what the attention of layer `index` reads, the residual it is added to)."""
        return self._layers[index].attention_input(embedding, hidden)

    def feed_back(self, hidden: Tensor) -> Tensor:
        """What the next depth reads of a layer output."""
        return hidden

    def ready(self, hidden: Tensor) -> Tensor:
        """What the output head reads of a layer output."""
        return hidden

    # ------------------------------------------------------------------ training pass
    def unroll(self, batch: Batch, queries: Queries, depths: int) -> Iterator[Tensor]:
        """States [B, Q, H] of each depth, ready for the output head."""
        ids, length = batch.input_ids_BT, batch.input_ids_BT.shape[1]
        rows = torch.arange(ids.shape[0], device=ids.device)[:, None]
        hidden, context = self._first_depth(batch, queries)
        yield self.ready(hidden)
        own: list[list[Entries]] = [[] for _ in self._layers]
        for k in range(1, depths):
            hidden = self.feed_back(hidden)
            token_BQ = ids[rows, (queries.index_BQ + 1 + k).clamp(max=length - 1)]
            embedding = F.embedding(token_BQ, self.embedding_VH)
            cos_sin = self._cos_sin(hidden, context.position_BQ + k)
            arguments = (hidden, embedding, cos_sin, context.entries, [list(o) for o in own], context.mask_BQT)
            if self.gradient_checkpointing and torch.is_grad_enabled():
                hidden, new = checkpoint(self._next_depth, *arguments, use_reentrant=False)
            else:
                hidden, new = self._next_depth(*arguments)
            for entry, layer_own in zip(new, own, strict=True):
                layer_own.append(entry)
            yield self.ready(hidden)

    def _first_depth(self, batch: Batch, queries: Queries) -> tuple[Tensor, Context]:
        """Depth 0: (layer outputs at the queries, what deeper depths read of it).

        Every layer but the last runs at every position: a later layer's input is needed at every key.
        """
        document, index_BQ = batch.document_BT, queries.index_BQ
        index_T = torch.arange(document.shape[1], device=document.device)
        rows = torch.arange(document.shape[0], device=document.device)[:, None]
        visible_BTT = (document[:, :, None] == document[:, None, :]) & (index_T <= index_T[:, None])
        context = Context([], visible_BTT[rows, index_BQ], batch.position_BT[rows, index_BQ])
        x_BTH = self.first_state(Features(batch.aux_hidden_BTAH, batch.last_hidden_BTH))
        embedding_BTH = F.embedding(F.pad(batch.input_ids_BT[:, 1:], (0, 1)), self.embedding_VH)
        cos_sin_T = self._cos_sin(x_BTH, batch.position_BT)
        for i, layer in enumerate(self._layers[:-1]):
            read_BTU, residual_BTH = self.attention_input(i, embedding_BTH, x_BTH)
            context.entries.append(layer.self_attn.keys_values(read_BTU, *cos_sin_T))
            q = layer.self_attn.queries(read_BTU, *cos_sin_T)
            x_BTH = layer.finish(residual_BTH, ttt_attention(q, *context.entries[i], visible_BTT, []))
        last = self._layers[-1]
        read_BTU, residual_BTH = self.attention_input(len(self._layers) - 1, embedding_BTH, x_BTH)
        context.entries.append(last.self_attn.keys_values(read_BTU, *cos_sin_T))
        q = last.self_attn.queries(read_BTU[rows, index_BQ], *self._cos_sin(x_BTH, context.position_BQ))
        out_BQH = last.finish(
            residual_BTH[rows, index_BQ], ttt_attention(q, *context.entries[-1], context.mask_BQT, [])
        )
        return out_BQH, context

    def _next_depth(
        self,
        hidden_BQH: Tensor,
        embedding_BQH: Tensor,
        cos_sin_Q: tuple[Tensor, Tensor],
        entries: list[Entries],
        own: list[list[Entries]],
        mask_BQT: Tensor,
    ) -> tuple[Tensor, list[Entries]]:
        """Depth k > 0: (outputs, this depth's own key and value in each layer). `own`: those of depths 1 .. k-1."""
        x, new = hidden_BQH, []
        for i, layer in enumerate(self._layers):
            read, residual = self.attention_input(i, embedding_BQH, x)
            new.append(layer.self_attn.keys_values(read, *cos_sin_Q))
            q = layer.self_attn.queries(read, *cos_sin_Q)
            x = layer.finish(residual, ttt_attention(q, *entries[i], mask_BQT, [*own[i], new[i]]))
        return x, new

    def _cos_sin(self, like: Tensor, position: Tensor) -> tuple[Tensor, Tensor]:
        rotary = self._rotary[0]
        if rotary.inv_freq.device != like.device:  # else they are copied over in every pass
            rotary.to(like.device)
        cos, sin = rotary(like.float(), position)
        return cos, sin

    def supervised_counts(self, batch: Batch) -> Tensor:
        """See `Speculator.supervised_counts`."""
        return supervised_queries(batch, self.num_depths).weight_BQK.double().sum((0, 1))

    @torch.no_grad()
    def draft_hits(self, batch: Batch, num_draft_tokens: int, sampling: Sampling = GREEDY) -> list[ResponseHits]:
        """See `Speculator.draft_hits`. Depths beyond those trained are unrolled the same way."""
        queries = supervised_queries(batch, num_draft_tokens)
        states = self.unroll(batch, queries, num_draft_tokens)
        return chain_hits(
            batch, queries, states, lambda _, ready: self.draft_logits(ready), sampling, self.draft_index()
        )

    # ------------------------------------------------------------------ decoding
    @torch.no_grad()
    def begin(self, prompts: list[list[int]], max_length: int) -> HeadState:
        """See `Proposer.begin`."""
        like, size = next(self.parameters()), len(prompts)
        hidden = torch.zeros(size, self.config.hidden_size, device=like.device, dtype=like.dtype)
        position = torch.full((size,), -1, device=like.device)
        graphs, layers = self.target.graphs, len(self.layers)
        cache = graphs.new_cache(self, layers, max_length) if graphs else SlotCache(layers, max_length)
        return HeadState(cache, hidden, position)

    @torch.no_grad()
    def commit(self, state: HeadState, committed: Committed) -> None:
        """See `Proposer.commit`. Verified rows are recomputed from the target's states, never from drafted ones."""
        f_BSH = self.first_state(committed.features)
        out_BSH = self._cached_layers(f_BSH, committed.token_BS, committed.position_BS, state.cache)
        state.keep_last(out_BSH, committed)

    @torch.no_grad()
    def first_logits(self, state: HeadState, num_draft_tokens: int) -> tuple[Any, Tensor]:
        """See `Speculator.first_logits`."""
        return replace(state), self.draft_logits(self.ready(state.hidden_BH))

    @torch.no_grad()
    def next_logits(self, draft: Any, token_B: Tensor, depth: int) -> Tensor:
        """See `Speculator.next_logits`."""
        f_B1H, position_B1 = self.feed_back(draft.hidden_BH)[:, None], (draft.position_B + depth)[:, None]
        draft.hidden_BH = self._cached_layers(f_B1H, token_B[:, None], position_B1, draft.cache)[:, 0]
        return self.draft_logits(self.ready(draft.hidden_BH))

    def branch(self, draft: Any, rows: Tensor) -> Any:
        """See `Speculator.branch`."""
        return draft.branch(rows)

    @torch.no_grad()
    def select(self, state: HeadState, rows: Tensor) -> HeadState:
        """See `Proposer.select`."""
        return state.select(rows)

    def _cached_layers(self, f_BSH: Tensor, token_BS: Tensor, position_BS: Tensor, cache: SlotCache) -> Tensor:
        """Layer outputs [B, S, H] for (token, state) pairs at their positions, on top of the cached ones."""
        limit, compute = int(position_BS.max()) + 1, partial(self._on_cache, cache)
        if isinstance(cache, GraphCache):
            out_BSH = cache.run(compute, (f_BSH, token_BS, position_BS), limit)[0]
            assert out_BSH is not None
            return out_BSH
        cache.place(position_BS, None, limit)
        return compute(f_BSH, token_BS, position_BS, limit)[0]

    def _on_cache(
        self, cache: SlotCache, f_BSH: Tensor, token_BS: Tensor, position_BS: Tensor, slots: int
    ) -> tuple[Tensor]:
        """The layers over a cache that knows where to write; a query sees those of the first `slots` up to its own."""
        mask = (torch.arange(slots, device=position_BS.device)[None, None] <= position_BS[:, :, None])[:, None]
        embedding = F.embedding(token_BS, self.embedding_VH)
        cos_sin = self._cos_sin(f_BSH, position_BS)
        x = f_BSH
        for i, layer in enumerate(self._layers):
            read, residual = self.attention_input(i, embedding, x)
            keys, values = cache.update(*layer.self_attn.keys_values(read, *cos_sin), i)
            context, _ = grouped_attention(layer, layer.self_attn.queries(read, *cos_sin), keys, values, mask)
            x = layer.finish(residual, context.flatten(2))
        return (x,)
