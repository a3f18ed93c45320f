"""P-EAGLE (AWS, amazon/gpt-oss-20b-p-eagle): EAGLE-3 that drafts all K tokens in one pass.

Equations (notation of `eagle3.py`; m: the mask token, g_m: `mask_hidden` [1, A*H_target], learned)

    row (p, 0)      reads (Emb(x_{p+1}), W_fc g_p) at RoPE position p: an ordinary EAGLE-3 row; drafts token p+2
    row (p, i > 0)  reads (Emb(m), W_fc g_m) at RoPE position p+i;                             drafts token p+2+i
    logits          W_head RMS_norm(h^i_p) over the draft vocabulary

Row (p, i) sees the depth-0 rows of every position up to p and its own chain (p, 1) ... (p, i): the mask of EAGLE-3's
TTT, but no row waits for the output of another. All mask rows read the same, so in the first layer they share their
projections and differ by rotation alone; one row is read back for each draft, and K may exceed the depths trained.

Deep rows are dropped at random in training (`cod.py`), which leaves the expected loss as it is.

Shape legend: see `base.py`; further Q query positions.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, Literal, Self

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor, nn

from spec_train.batch import Batch
from spec_train.data.draft_vocab import token_problem
from spec_train.errors import UserError
from spec_train.recipe import PositiveInt, Probability
from spec_train.speculators.base import LossOutput, ServingCheckpoint
from spec_train.speculators.chain_head import Entries, HeadState
from spec_train.speculators.cod import depth_width, retain, retention_by_depth
from spec_train.speculators.eagle3 import AuxHeadOptions, Eagle3, Eagle3Config, aux_head_fields
from spec_train.speculators.supervision import Queries, supervised_queries
from spec_train.target import TargetModel


class PEagleOptions(AuxHeadOptions):
    """P-EAGLE. `num_depths`: drafts trained at once; `retention`, `retention_min`: the share of positions at which
    depth i is trained is max(retention^i, retention_min); `mask_token_id` null chooses one, see `mask_token_id`."""

    type: Literal["peagle"]
    num_layers: PositiveInt = 2
    num_depths: int = Field(default=5, ge=2)
    retention: Probability = 0.8
    retention_min: Probability = 0.2
    mask_token_id: int | None = Field(default=None, ge=0)


@dataclass(frozen=True, kw_only=True)
class PEagleConfig(Eagle3Config):
    """An Eagle3Config whose `ttt_steps` are the depths trained at once."""

    mask_token_id: int
    retention: float = 1.0
    retention_min: float = 1.0


class PEagle(Eagle3):
    """The head: EAGLE-3's modules and `mask_hidden`."""

    kind = "peagle"
    options = PEagleOptions
    config_class = PEagleConfig
    config: PEagleConfig

    def __init__(self, config: PEagleConfig, draft_ids_D: Tensor) -> None:
        super().__init__(config, draft_ids_D)
        self.mask_hidden = nn.Parameter(torch.zeros(1, self.fc.in_features))

    @classmethod
    def from_recipe(cls, options: Any, target: TargetModel, draft_ids_D: Tensor, seed: int) -> Self:
        """A fresh head. Raises UserError for a mask token that the target lacks or that could be drafted."""
        config = PEagleConfig(
            **aux_head_fields(options, target, len(draft_ids_D)),
            ttt_steps=options.num_depths,
            mask_token_id=mask_token_id(options.mask_token_id, target, draft_ids_D),
            retention=options.retention,
            retention_min=options.retention_min,
        )
        head = cls.from_target(config, target, draft_ids_D, options.init, seed)
        with torch.no_grad():  # not zero, where the gradient of a norm is without bounds
            nn.init.normal_(head.mask_hidden, std=0.25, generator=torch.Generator().manual_seed(seed))
        return head

    @classmethod
    def check_fits(cls, config: Any, target: TargetModel, where: str) -> None:
        """See `Eagle3.check_fits`; the mask token must be one of the target's."""
        super().check_fits(config, target, where)
        if problem := token_problem(config.mask_token_id, target.vocab_size):
            raise UserError(f"{where}: {problem}")

    def head_options(self) -> dict[str, Any]:
        """See `StartableSpeculator.head_options`."""
        return {**super().head_options(), "mask_token_id": self.config.mask_token_id}

    def training_options(self, options: Any) -> dict[str, Any]:
        """See `Eagle3.training_options`."""
        names = ("step_decay", "loss", "lk_eta", "retention", "retention_min")
        return {"ttt_steps": options.num_depths, **{name: getattr(options, name) for name in names}}

    def _mask_input(self) -> tuple[Tensor, Tensor]:
        """(state, embedding) that every mask row reads, [1, 1, H] each."""
        return self.project(self.mask_hidden)[None], self.embedding_VH[self.config.mask_token_id][None, None]

    # ------------------------------------------------------------------ training pass
    def unroll(self, batch: Batch, queries: Queries, depths: int) -> Iterator[Tensor]:
        """States [B, Q, H] of each depth, ready for the output head; 0 beyond the queries that a depth needs."""
        out_BQH, context = self._first_depth(batch, queries)
        yield self.ready(out_BQH)
        state, embedding = self._mask_input()
        own: list[list[Entries]] = [[] for _ in self._layers]
        for k in range(1, depths):
            width = depth_width(queries, k)
            cos_sin = self._cos_sin(state, context.position_BQ[:, :width] + k)
            leading = [[(key[:, :, :width], value[:, :, :width]) for key, value in layer_own] for layer_own in own]
            out, new = self._next_depth(
                state, embedding, cos_sin, context.entries, leading, context.mask_BQT[:, :width]
            )
            for entry, layer_own in zip(new, own, strict=True):
                layer_own.append(entry)
            yield F.pad(self.ready(out), (0, 0, 0, queries.index_BQ.shape[1] - width))

    def loss(self, batch: Batch, normalizer: Tensor) -> LossOutput:
        """See `Eagle3.loss`. In training mode deep rows are dropped; what is left is scaled up to the same expected
        loss, so `normalizer` counts every supervised token."""
        queries = supervised_queries(batch, self.num_depths)
        if self.training:
            config = self.config
            queries = retain(queries, retention_by_depth(config.retention, config.retention_min, self.num_depths))
        return self.loss_of(batch, queries, normalizer)

    # ------------------------------------------------------------------ decoding
    @torch.no_grad()
    def first_logits(self, state: HeadState, num_draft_tokens: int) -> tuple[Any, Tensor]:
        """See `Speculator.first_logits`. The first draft comes from the committed row, the others from one pass; a
        draft is the layer outputs [B, K, H]."""
        out_BKH = state.hidden_BH[:, None]
        if num_draft_tokens > 1:
            f_11H, _ = self._mask_input()
            later_K = torch.arange(1, num_draft_tokens, device=state.position_B.device)
            position_BK = state.position_B[:, None] + later_K
            token_BK = torch.full_like(position_BK, self.config.mask_token_id)
            f_BKH = f_11H.expand(*position_BK.shape, -1)
            later_BKH = self._cached_layers(f_BKH, token_BK, position_BK, state.cache)
            out_BKH = torch.cat([out_BKH, later_BKH], dim=1)
        return out_BKH, self.next_logits(out_BKH, state.position_B, 0)

    @torch.no_grad()
    def next_logits(self, draft: Any, token_B: Tensor, depth: int) -> Tensor:
        """See `Speculator.next_logits`; the token before is not read."""
        return self.draft_logits(self.ready(draft[:, depth]))

    def branch(self, draft: Any, rows: Tensor) -> Any:
        """See `Speculator.branch`."""
        return draft[rows]

    # ------------------------------------------------------------------ serving
    def serving(self) -> ServingCheckpoint:
        """EAGLE-3's files with `mask_hidden` and the mask token's id; vLLM is told to draft in parallel."""
        served, mask = super().serving(), {"mask_token_id": self.config.mask_token_id}
        assert served.speculators_config is not None
        # vLLM reads `fc_norm` of this form in the layer's part only, and knows no fed-back state to norm.
        speculators = {key: value for key, value in served.speculators_config.items() if key != "norm_output"}
        layer = {**speculators["transformer_layer_config"], "fc_norm": self.config.fc_norm}
        names = {"architectures": ["PEagleSpeculator"], "speculators_model_type": "peagle"}
        return replace(
            served,
            kind="peagle",
            config={**served.config, "pard_token": self.config.mask_token_id},
            speculators_config={**speculators, **names, **mask, "transformer_layer_config": layer},
            speculative_config={"parallel_drafting": True},
        )

    @classmethod
    def _served_fields(cls, config: dict[str, Any], target: TargetModel) -> dict[str, Any]:
        """See `Eagle3._served_fields`; the mask token has several names."""
        ids = [config[key] for key in ("mask_token_id", "pard_token", "ptd_token_id") if config.get(key) is not None]
        if not ids:
            raise UserError("exported peagle head: config.json names no mask_token_id (or pard_token, ptd_token_id)")
        return {**super()._served_fields(config, target), "mask_token_id": ids[0]}


def mask_token_id(chosen: int | None, target: TargetModel, draft_ids_D: Tensor) -> int:
    """The token that stands where no token is known yet.

    Given null, it is the highest id outside the draft vocabulary whose embedding is not all zero: a padding row of the
    target or its rarest token. Where the draft vocabulary is the target's, it is the pad token if there is one that
    ends no answer, else the highest id. A prompt may hold the token: `mask_hidden` still tells a mask row apart.
    Raises UserError for an id that the target's embedding lacks or that a reduced draft vocabulary holds.
    """
    rows, drafted = target.embedding.weight, set(draft_ids_D.tolist())
    whole = len(drafted) == target.vocab_size
    if chosen is not None:
        if chosen >= rows.shape[0] or (chosen in drafted and not whole):
            raise UserError(
                f"speculator.mask_token_id {chosen}: must be below {rows.shape[0]} and outside the draft vocabulary; "
                "null chooses one"
            )
        return chosen
    pad = getattr(target.config, "pad_token_id", None)
    if whole and isinstance(pad, int) and 0 <= pad < rows.shape[0] and pad not in target.eos_token_ids:
        return pad
    usable = [token for token in range(rows.shape[0]) if whole or token not in drafted]
    return next((token for token in reversed(usable) if bool(rows[token].any())), usable[-1])
