"""MTP (DeepSeek-V3, arXiv:2412.19437; applied recursively as in FastMTP, arXiv:2509.18362).

Equations (h_p: the target's state at position p, x: tokens, E the target's embedding, W_head its output head)

    f^0_p    = h_p
    y^k_p    = W [RMS_h(f^k_p); RMS_e(E x_{p+1+k})]          order of the halves by family, see mtp_layouts.py
    f^{k+1}_p = RMS_final(Layer(y^k_p))                       at RoPE position p+k
    logits   = W_head f^{k+1}_p over the whole vocabulary     drafts token p+2+k

One layer drafts every depth, and only the layer is trained. Training follows serving (the TTT mask of EAGLE-3): a
query (k, p) attends to the depth-0 entries of every position up to p, which come from the target, and to its own
entries (1, p) ... (k, p). FastMTP's own code lets depth k read depth-k entries of earlier positions, which no engine
has. Keys and values are computed at every position, queries only where some depth is supervised.

A fresh head has MiMo's layout, which vLLM runs beside any Llama, Qwen2 or Qwen3 target. `init: target_head` starts
from the MTP layer that the target ships, keeps its layout, and replaces it in a copy of the target.

Shape legend: see `base.py`; further Q query positions, h heads, g key/value heads, d head_dim.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from spec_train.batch import Batch, Features, FeatureSpec
from spec_train.decoding.sampling import Sampling
from spec_train.errors import UserError
from spec_train.kv_cache import SlotCache, grouped_attention
from spec_train.packed import PackedWeight
from spec_train.recipe import PositiveInt, Probability
from spec_train.speculators.base import (
    GREEDY,
    Committed,
    LossOutput,
    ResponseHits,
    ServingCheckpoint,
)
from spec_train.speculators.chain_head import HeadState
from spec_train.speculators.distillation import chain_hits, chain_loss, depth_weights, target_distributions
from spec_train.speculators.head_files import checkpoint_tensors
from spec_train.speculators.heads import load_strictly
from spec_train.speculators.layers import ttt_attention
from spec_train.speculators.mtp_block import MtpBlock, MtpConfig, start_from_last_layer
from spec_train.speculators.mtp_layouts import (
    LAYOUTS,
    Layout,
    check_universal,
    find_head,
    head_geometry,
    is_mimo,
    served_name,
    shipped_head,
    target_folder,
)
from spec_train.speculators.start import StartableSpeculator, StartOptions
from spec_train.speculators.supervision import Queries, supervised_queries
from spec_train.target import TargetModel

TRAINING = ("ttt_steps", "step_weights", "step_decay", "loss", "lk_eta", "gradient_checkpointing")
FASTMTP_DECAY = 0.6


class MtpOptions(StartOptions):
    """MTP. `loss_vocab_size`: tokens that the loss looks at (drafts come from all of them), null for all.
    `step_weights`: `decay` weights depth k by step_decay^k, `fastmtp` by 0.6^k / sum of 0.6^j."""

    of_the_head = ("init",)

    type: Literal["mtp"]
    init: Literal["target_layer", "random", "target_head"] = "target_layer"
    ttt_steps: PositiveInt = 3
    step_weights: Literal["decay", "fastmtp"] = "decay"
    step_decay: Probability = 0.8
    loss: Literal["kl", "lk"] = "kl"
    lk_eta: float = Field(default=3.0, gt=0)
    loss_vocab_size: PositiveInt | None = None
    gradient_checkpointing: bool = False

    def vocab_limit(self) -> int | None:
        """See `SpeculatorOptions.vocab_limit`."""
        return self.loss_vocab_size


class Mtp(StartableSpeculator):
    """The head. Trained: `block`. Borrowed from the target: embedding and output head."""

    kind = "mtp"
    method = "mtp"
    options = MtpOptions

    def __init__(self, config: MtpConfig, loss_ids_D: Tensor) -> None:
        super().__init__()
        self.config = config
        self._packed_head = PackedWeight()
        self.layout: Layout = LAYOUTS[config.layout]
        self.num_depths = config.ttt_steps
        self.feature_spec = _feature_spec(config.reads_pre_norm, config.target_layers)
        self.block = MtpBlock(config, centred=self.layout.centred_norms)
        # In a tuple, so that casting the head to bfloat16 leaves the frequencies in float32, as engines have them.
        self._rotary = (config.rotary(),)
        self.loss_ids_D: Tensor
        self.loss_index_V: Tensor
        self.embedding_VH: Tensor
        self.target_head_VH: Tensor
        self.loss_head_DH: Tensor
        index = torch.full((config.vocab_size,), -1, dtype=torch.long)
        index[loss_ids_D] = torch.arange(len(loss_ids_D))
        self.register_buffer("loss_ids_D", loss_ids_D, persistent=False)
        self.register_buffer("loss_index_V", index, persistent=False)
        for name in ("embedding_VH", "target_head_VH", "loss_head_DH"):
            self.register_buffer(name, torch.empty(0), persistent=False)

    # ------------------------------------------------------------------ construction
    @classmethod
    def check_target(cls, options: Any, target: TargetModel) -> None:
        """See `Speculator.check_target`."""
        super().check_target(options, target)
        if options.start_from is not None:
            return
        if options.init == "target_head":
            shipped_head(target)
        else:
            check_universal(target)

    @classmethod
    def required_features(cls, options: Any, target: TargetModel) -> FeatureSpec:
        """The states that a head beside this target reads."""
        return _feature_spec(is_mimo(target), target.num_layers)

    @classmethod
    def from_recipe(cls, options: Any, target: TargetModel, draft_ids_D: Tensor, seed: int) -> Mtp:
        """A fresh head, or the target's own. `draft_ids_D`: ascending target ids that the loss looks at."""
        training = {name: getattr(options, name) for name in TRAINING}
        if options.init == "target_head":
            layout, tensors = shipped_head(target)
            return cls._from_tensors(layout, tensors, target, draft_ids_D, **training)
        check_universal(target)
        config = mtp_config(LAYOUTS["mimo"], target, stitched=False, **training)
        head = cls(config, draft_ids_D)
        generator = torch.Generator().manual_seed(seed)
        for module in head.modules():
            if isinstance(module, nn.Linear):
                nn.init.normal_(module.weight, std=0.02, generator=generator)
                if module.bias is not None:
                    nn.init.zeros_(module.bias)
        if options.init == "target_layer":
            start_from_last_layer(head.block, target, reads_pre_norm=config.reads_pre_norm)
        head.borrow(target)
        return head

    @classmethod
    def _from_tensors(
        cls, layout: Layout, tensors: dict[str, Tensor], target: TargetModel, loss_ids_D: Tensor, **training: Any
    ) -> Mtp:
        """The head of `tensors`, under our names. Raises UserError for missing, unknown or misshapen ones."""
        stitched = layout.name != "mimo" or is_mimo(target)
        geometry = head_geometry(layout, target)
        query, rows = tensors.get("self_attn.q_proj.weight"), geometry["num_attention_heads"] * geometry["head_dim"]
        form = {
            "qkv_bias": any(f"self_attn.{part}_proj.bias" in tensors for part in "qkv"),
            "qk_norm": any(f"self_attn.{part}_norm.weight" in tensors for part in "qk"),
            "gated": query is not None and query.shape[0] == 2 * rows,
        }
        head = cls(mtp_config(layout, target, stitched=stitched, **form, **training), loss_ids_D)
        wanted = {name: tuple(value.shape) for name, value in head.block.state_dict().items()}
        given = {name: tuple(value.shape) for name, value in tensors.items()}
        if wanted != given:
            wrong = sorted(name for name in wanted.keys() & given.keys() if wanted[name] != given[name])
            raise UserError(
                f"MTP head of {layout.name} layout beside {target.name}: missing tensors "
                f"{sorted(wanted.keys() - given.keys())}, unknown tensors {sorted(given.keys() - wanted.keys())}, "
                f"tensors of another shape {wrong}"
            )
        head.block.load_state_dict(tensors)
        head.borrow(target)
        return head

    def head_options(self) -> dict[str, Any]:
        """See `StartableSpeculator.head_options`: the target decides all of it."""
        return {}

    def continued(self, options: Any, loss_ids_D: Tensor) -> Mtp:
        """See `StartableSpeculator.continued`."""
        training = {name: getattr(options, name) for name in TRAINING}
        head = Mtp(replace(self.config, **training), loss_ids_D)
        head.load_state_dict(self.state_dict())
        head.borrow(self.target)
        return head

    @classmethod
    def from_checkpoint(cls, checkpoint: Path, saved: dict[str, Any], target: TargetModel) -> Mtp:
        """The head of a training checkpoint, frozen, in the target's dtype and on its device."""
        config = MtpConfig(**saved)
        shape = (config.vocab_size, config.hidden_size, config.target_layers)
        if shape != (target.vocab_size, target.hidden_size, target.num_layers):
            raise UserError(
                f"{checkpoint}: trained for a target of vocabulary, width and depth {shape}; {target.name} has "
                f"{(target.vocab_size, target.hidden_size, target.num_layers)}"
            )
        head = cls(config, torch.arange(config.vocab_size))
        load_strictly(head, checkpoint_tensors(checkpoint), str(checkpoint))
        head.to(target.device, target.dtype).borrow(target)
        return head.eval().requires_grad_(False)

    def borrow(self, target: TargetModel) -> None:
        """Take the frozen embedding and output head of the target (shared storage where dtype and device agree)."""
        self._target = (target,)  # in a tuple: the target must not become a submodule
        device = self.loss_ids_D.device
        self.embedding_VH = target.embedding.weight.detach().to(device)
        self.target_head_VH = target.lm_head.weight.detach().to(device)
        whole = len(self.loss_ids_D) == self.config.vocab_size
        self.loss_head_DH = self.target_head_VH if whole else self.target_head_VH[self.loss_ids_D]

    @property
    def target(self) -> TargetModel:
        """The target this head was built for."""
        return self._target[0]

    # ------------------------------------------------------------------ shared forward pieces
    def first_state(self, aux_hidden: Tensor | None, last_hidden: Tensor | None) -> Tensor:
        """f^0 [..., H]: the target's state before or behind its final norm, as the family has it."""
        state = aux_hidden if self.config.reads_pre_norm else last_hidden
        assert state is not None
        return state

    def mix(self, state: Tensor, token: Tensor, position: Tensor) -> Tensor:
        """y [..., H] from a state [..., H], the token that follows it and the RoPE position of the pair."""
        embedding = F.embedding(token, self.embedding_VH)
        if self.layout.zero_first:
            embedding = embedding.masked_fill((position == 0)[..., None], 0.0)
        return self.block.mix(state, embedding, self.layout.embedding_first)

    def _cos_sin(self, like: Tensor, position: Tensor) -> tuple[Tensor, Tensor]:
        cos, sin = self._rotary[0](like.float(), position)
        return cos, sin

    # ------------------------------------------------------------------ training pass
    def unroll(self, batch: Batch, queries: Queries, depths: int) -> Iterator[Tensor]:
        """Normed states [B, Q, H] of each depth, ready for the output head."""
        ids, position, document, index = batch.input_ids_BT, batch.position_BT, batch.document_BT, queries.index_BQ
        length = ids.shape[1]
        rows = torch.arange(ids.shape[0], device=ids.device)[:, None]
        mask_BQT = document[rows, index][:, :, None] == document[:, None, :]
        mask_BQT = mask_BQT & (torch.arange(length, device=ids.device)[None, None] <= index[:, :, None])
        state_BTH = self.first_state(batch.aux_hidden_BTAH, batch.last_hidden_BTH)
        y_BTH = self.mix(state_BTH, F.pad(ids[:, 1:], (0, 1)), position)
        keys, values = self.block.keys_values(y_BTH, *self._cos_sin(y_BTH, position))
        query_position, y_BQH = position[rows, index], y_BTH[rows, index]
        cos_sin = self._cos_sin(y_BQH, query_position)
        q_BhQd, gate = self.block.queries(y_BQH, *cos_sin)
        state = self.block.finish(y_BQH, ttt_attention(q_BhQd, keys, values, mask_BQT, []), gate)
        yield state
        own: list[tuple[Tensor, Tensor]] = []
        for k in range(1, depths):
            token = ids[rows, (index + 1 + k).clamp(max=length - 1)]
            arguments = (state, token, query_position + k, (keys, values), list(own), mask_BQT)
            if self.config.gradient_checkpointing and torch.is_grad_enabled():
                state, entry = checkpoint(self._next_depth, *arguments, use_reentrant=False)
            else:
                state, entry = self._next_depth(*arguments)
            own.append(entry)
            yield state

    def _next_depth(
        self,
        state_BQH: Tensor,
        token_BQ: Tensor,
        position_BQ: Tensor,
        entries: tuple[Tensor, Tensor],
        own: Sequence[tuple[Tensor, Tensor]],
        mask_BQT: Tensor,
    ) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        """Depth k > 0 on the head's own states: (normed states, this depth's own key and value)."""
        y_BQH = self.mix(state_BQH, token_BQ, position_BQ)
        cos_sin = self._cos_sin(y_BQH, position_BQ)
        entry = self.block.keys_values(y_BQH, *cos_sin)
        q_BhQd, gate = self.block.queries(y_BQH, *cos_sin)
        return self.block.finish(y_BQH, ttt_attention(q_BhQd, *entries, mask_BQT, [*own, entry]), gate), entry

    def supervised_counts(self, batch: Batch) -> Tensor:
        """See `Speculator.supervised_counts`."""
        return supervised_queries(batch, self.num_depths).weight_BQK.double().sum((0, 1))

    def depth_weights(self, normalizer_K: Tensor) -> Tensor:
        """float32 [K]: what each depth's summed loss is multiplied by, see `MtpOptions`."""
        if self.config.step_weights == "decay":
            return depth_weights(self.config.step_decay, normalizer_K)
        total = sum(FASTMTP_DECAY**k for k in range(self.num_depths))
        return depth_weights(FASTMTP_DECAY, normalizer_K) / total

    def loss(self, batch: Batch, normalizer: Tensor) -> LossOutput:
        """Sum over depths of weight_k * (weighted mean of the head loss). Metrics by depth: depth_loss, alpha, hit (of
        the tokens that the loss looks at)."""
        queries = supervised_queries(batch, self.num_depths)
        return chain_loss(
            batch,
            queries,
            self.unroll(batch, queries, self.num_depths),
            lambda _depth: self.loss_head_DH,
            distributions=target_distributions(batch, queries, self.loss_head_DH, self.target),
            draft_index_V=self.loss_index_V,
            depth_weight_K=self.depth_weights(normalizer),
            kind=self.config.loss,
            eta=self.config.lk_eta,
        )

    @torch.no_grad()
    def draft_hits(self, batch: Batch, num_draft_tokens: int, sampling: Sampling = GREEDY) -> list[ResponseHits]:
        """See `Speculator.draft_hits`. Depths beyond `ttt_steps` are unrolled the same way."""
        queries = supervised_queries(batch, num_draft_tokens)
        states = self.unroll(batch, queries, num_draft_tokens)
        return chain_hits(batch, queries, states, lambda _, state: self.logits(state), sampling)

    def logits(self, state: Tensor) -> Tensor:
        """Draft logits [..., V] from normed states [..., H]."""
        return self._packed_head.linear(state, self.target_head_VH.to(state.dtype))

    # ------------------------------------------------------------------ decoding
    @torch.no_grad()
    def begin(self, prompts: list[list[int]], max_length: int) -> HeadState:
        """See `Proposer.begin`."""
        device, size = self.embedding_VH.device, len(prompts)
        hidden = torch.zeros(size, self.config.hidden_size, device=device, dtype=self.block.input_proj.weight.dtype)
        return HeadState(SlotCache(1, max_length), hidden, torch.full((size,), -1, device=device))

    @torch.no_grad()
    def commit(self, state: HeadState, committed: Committed) -> None:
        """See `Proposer.commit`. Verified rows are recomputed from the target's states, never from drafted ones."""
        features: Features = committed.features
        first_BSH = self.first_state(features.aux_hidden, features.last_hidden)
        out_BSH = self._cached_block(first_BSH, committed.token_BS, committed.position_BS, state.cache)
        state.keep_last(out_BSH, committed)

    @torch.no_grad()
    def first_logits(self, state: HeadState, num_draft_tokens: int) -> tuple[Any, Tensor]:
        """See `Speculator.first_logits`."""
        return replace(state), self.logits(state.hidden_BH)

    @torch.no_grad()
    def next_logits(self, draft: Any, token_B: Tensor, depth: int) -> Tensor:
        """See `Speculator.next_logits`."""
        position_B1 = (draft.position_B + depth)[:, None]
        draft.hidden_BH = self._cached_block(draft.hidden_BH[:, None], token_B[:, None], position_B1, draft.cache)[:, 0]
        return self.logits(draft.hidden_BH)

    def branch(self, draft: Any, rows: Tensor) -> Any:
        """See `Speculator.branch`."""
        return draft.branch(rows)

    def select(self, state: HeadState, rows: Tensor) -> HeadState:
        """See `Proposer.select`."""
        return state.select(rows)

    def _cached_block(self, state_BSH: Tensor, token_BS: Tensor, position_BS: Tensor, cache: SlotCache) -> Tensor:
        """Normed outputs [B, S, H] for (state, token) pairs at their positions, on top of the cached ones."""
        limit = int(position_BS.max()) + 1
        cache.place(position_BS, None, limit)
        mask = (torch.arange(limit, device=position_BS.device)[None, None] <= position_BS[:, :, None])[:, None]
        y_BSH = self.mix(state_BSH, token_BS, position_BS)
        cos_sin = self._cos_sin(y_BSH, position_BS)
        keys, values = cache.update(*self.block.keys_values(y_BSH, *cos_sin), 0)
        q_BhSd, gate = self.block.queries(y_BSH, *cos_sin)
        context, _ = grouped_attention(self.block, q_BhSd, keys, values, mask)
        return self.block.finish(y_BSH, context.flatten(2), gate)

    # ------------------------------------------------------------------ serving
    def serving(self) -> ServingCheckpoint:
        """The family's names. A fresh head is a folder of its own; the target's own head goes into a copy of the
        target. Raises UserError where vLLM would not run a fresh head beside this target."""
        config = self.config
        tensors = {
            served_name(self.layout, name, config.target_layers): value
            for name, value in self.block.state_dict().items()
        }
        if config.stitched:
            served = json.loads((target_folder(self.target) / "config.json").read_text(encoding="utf-8"))
            served.get("text_config", served)[self.layout.count_key] = 1
            return ServingCheckpoint("mtp", "mtp", served, tensors, stitched=True)
        check_universal(self.target)
        overrides = {LAYOUTS["mimo"].count_key: 1}
        return ServingCheckpoint("mtp", "mtp", config.mimo(), tensors, hf_overrides=overrides)

    @classmethod
    def from_serving(cls, config: dict[str, Any], tensors: dict[str, Tensor], target: TargetModel) -> Mtp:
        """Rebuild a head from an exported config.json and its tensors; those of a whole target may stand beside them.

        Raises UserError for a missing or unknown tensor.
        """
        layout, found = find_head(tensors, target, f"export for {target.name}")
        vocabulary = torch.arange(target.vocab_size)
        return cls._from_tensors(layout, found, target, vocabulary).eval().requires_grad_(False)


def _feature_spec(reads_pre_norm: bool, num_layers: int) -> FeatureSpec:
    """The target's last state: behind its final norm, and before it where the family reads that one."""
    return FeatureSpec((num_layers,) if reads_pre_norm else (), last_hidden=True)


def mtp_config(layout: Layout, target: TargetModel, *, stitched: bool, **choices: Any) -> MtpConfig:
    """Geometry and layout from the target; `choices`: the attention's form and the training options."""
    return MtpConfig(
        **head_geometry(layout, target),
        target_layers=target.num_layers,
        layout=layout.name,
        reads_pre_norm=is_mimo(target),
        stitched=stitched,
        **choices,
    )
