"""PARD (An et al., 2025, arXiv:2504.18583): a draft language model that drafts all K tokens in one pass.

Equations (m: the mask token; a row is a token at a RoPE position; p: see the alignment rule in `base.py`)

    row (p, 0)      token x_{p+1} at position p+1, an ordinary row of a causal language model;  drafts token p+2
    row (p, i > 0)  token m at position p+1+i;                                                  drafts token p+2+i
    logits          W_head Draft(row) over the whole vocabulary

Row (p, i) sees the tokens x_0 ... x_{p+1} and its own chain (p, 1) ... (p, i). In serving that is plain causal
attention over [x_0 ... x_{p+1}, m, m, ...]; in training the mask rows of every p stand behind one copy of the text. No
row waits for the output of another, so K may exceed the depths trained. Deep rows are dropped at random (`cod.py`).

The mask token has no meaning of its own, so its embedding is a trained vector (`mask_embedding`) even where the rest of
the embedding is frozen or the target's. It is served as that row of the draft's own embedding. A head tied to the
embedding would take the row up and might then draft the mask token; an export is therefore never tied.

Rows of packed documents are laid out one document to a row: attention with an explicit mask costs the square of a row.

Shape legend: see `base.py`; further Q query positions, R rows (T tokens, then mask rows), D tokens of the loss.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any, Literal, Self

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor, nn

from spec_train.batch import Batch
from spec_train.data.draft_vocab import token_problem
from spec_train.decoding.sampling import Sampling
from spec_train.errors import UserError
from spec_train.kv_cache import SlotCache
from spec_train.recipe import Probability
from spec_train.speculators import load_speculator
from spec_train.speculators.base import GREEDY, Committed, LossOutput, ResponseHits, ServingCheckpoint
from spec_train.speculators.cod import depth_width, retain, retention_by_depth
from spec_train.speculators.distillation import chain_ratios, compute_dtype, depth_weights
from spec_train.speculators.draft_lm import DraftLM
from spec_train.speculators.draft_start import DraftLMConfig, DraftLMOptions, build_model, draft_config, start
from spec_train.speculators.losses import fused_head_loss, sum_plogp
from spec_train.speculators.pard_rows import by_depth, by_document, query_parts, row_places, visible_rows
from spec_train.speculators.peagle import mask_token_id
from spec_train.speculators.supervision import Queries, response_hits, supervised_queries
from spec_train.target import TargetModel

HIT_ROWS = 2048  # mask rows behind one copy of the text when hits are counted


class PardOptions(DraftLMOptions):
    """PARD. It starts as a draft language model does; `start_model` may also be a checkpoint or an export of a trained
    `draft_lm`, which is the paper's way.

    `num_depths`: drafts trained at once; `retention`, `retention_min`: the share of positions at which depth i is
    trained is max(retention^i, retention_min). `step_decay`^i weighs the mean loss of depth i; the paper's mean over
    all kept rows is step_decay = retention. `mask_token_id` null chooses one, see `peagle.mask_token_id`.
    """

    type: Literal["pard"]  # type: ignore[assignment]
    num_depths: int = Field(default=8, ge=2)
    retention: Probability = 0.7
    retention_min: Probability = 0.2
    step_decay: Probability = 0.7
    mask_token_id: int | None = Field(default=None, ge=0)
    on_policy_fraction: float = Field(default=0.0, ge=0, le=0)  # answers of its own are not written in parallel

    def start_is_baseline(self) -> bool:
        """See `SpeculatorOptions.start_is_baseline`: no start knows what a mask row means."""
        return False


@dataclass(frozen=True, kw_only=True)
class PardConfig(DraftLMConfig):
    """A DraftLMConfig with what concerns the mask rows."""

    mask_token_id: int
    num_depths: int = 8
    retention: float = 1.0
    retention_min: float = 1.0
    step_decay: float = 1.0


@dataclass
class PardState:
    """Drafting state: the draft's own keys and values, and the committed tokens that it has not read yet.

    `first_B1` is the first token of each prompt until the first commit, which brings the others.
    """

    cache: SlotCache
    token_BS: Tensor
    position_BS: Tensor
    count_B: Tensor
    first_B1: Tensor | None
    read: bool = True


class Pard(DraftLM):
    """The draft: a draft language model's modules and `mask_embedding`."""

    kind = "pard"
    options = PardOptions
    config_class = PardConfig
    config: PardConfig

    def __init__(self, config: PardConfig, model: Any, loss_ids_D: Tensor) -> None:
        super().__init__(config, model, loss_ids_D)
        self.num_depths = config.num_depths
        self.mask_embedding = nn.Parameter(torch.zeros(self.body.hidden_size))
        self.body.embedding.register_forward_hook(self._put_mask_embedding)

    def _put_mask_embedding(self, embedding: Any, inputs: tuple[Tensor], output: Tensor) -> Tensor:
        """Every look-up of the mask token gives the trained vector; some families scale what they look up."""
        mask = self.mask_embedding * getattr(embedding, "embed_scale", 1.0)
        return torch.where((inputs[0] == self.config.mask_token_id)[..., None], mask.to(output.dtype), output)

    # ------------------------------------------------------------------ construction
    @classmethod
    def from_recipe(cls, options: Any, target: TargetModel, draft_ids_D: Tensor, seed: int) -> Pard:
        """See `Speculator.from_recipe`. Raises UserError for a mask token that the target lacks or may produce."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            model, shared = start_from_draft(options.start_model, target) or (start(options, target), False)
            plain = draft_config(options, model, target)
            if shared and not options.train_embeddings:
                plain = replace(plain, borrows=True, train_embeddings=False)
            mask = mask_token_id(options.mask_token_id, target, draft_ids_D)
            config = PardConfig(
                **_plain_fields(asdict(plain)),
                mask_token_id=mask,
                num_depths=options.num_depths,
                retention=options.retention,
                retention_min=options.retention_min,
                step_decay=options.step_decay,
            )
            # The mean of what the text is made of: a plausible "some token", where a padding row may be all zero.
            mean_H = model.get_input_embeddings().weight.detach()[draft_ids_D].float().mean(0)
            draft = cls(config, model, draft_ids_D)
        with torch.no_grad():
            draft.mask_embedding.copy_(mean_H)
        draft.borrow(target)
        return draft

    @classmethod
    def from_checkpoint(cls, checkpoint: Path, saved: dict[str, Any], target: TargetModel) -> Self:
        """See `Speculator.from_checkpoint`."""
        if problem := token_problem(saved.get("mask_token_id"), target.vocab_size):
            raise UserError(f"{checkpoint}: {problem}")
        return super().from_checkpoint(checkpoint, saved, target)

    # ------------------------------------------------------------------ training pass
    def depth_states(self, batch: Batch, queries: Queries, depths: int) -> Iterator[Tensor]:
        """States [B, Q, H] of each depth, ready for the output head; 0 beyond the queries that a depth needs.
        `batch` holds one document to a row, see `by_document`."""
        widths = [depth_width(queries, k) for k in range(1, depths)]
        length = batch.input_ids_BT.shape[1]
        anchor_BR, depth_R = row_places(queries, length, widths)
        ids_BR = F.pad(batch.input_ids_BT, (0, sum(widths)), value=self.config.mask_token_id)
        state_BRH = self.hidden_states(ids_BR, anchor_BR + depth_R, visible_rows(anchor_BR, depth_R, length))
        rows = torch.arange(len(ids_BR), device=ids_BR.device)[:, None]
        # Row (p, 0) is the token at p+1; there is none behind the last token, which supervises nothing.
        yield state_BRH[rows, (queries.index_BQ + 1).clamp(max=length - 1)]
        for state_BWH in torch.split(state_BRH[:, length:], widths, dim=1):
            yield F.pad(state_BWH, (0, 0, 0, queries.index_BQ.shape[1] - state_BWH.shape[1]))

    def supervised_counts(self, batch: Batch) -> Tensor:
        """See `Speculator.supervised_counts`."""
        return supervised_queries(batch, self.num_depths).weight_BQK.double().sum((0, 1))

    def loss(self, batch: Batch, normalizer: Tensor) -> LossOutput:
        """Sum over depths of step_decay^k * (weighted mean of the head loss). Metrics by depth: depth_loss, alpha, hit.

        In training mode deep rows are dropped; what is left is scaled up to the same expected loss, so `normalizer`
        counts every supervised token.
        """
        config, batch = self.config, by_document(batch)
        queries = supervised_queries(batch, self.num_depths)
        if self.training:
            queries = retain(queries, retention_by_depth(config.retention, config.retention_min, self.num_depths))
        states = self.depth_states(batch, queries, self.num_depths)
        chosen_BQK = queries.weight_BQK > 0
        hidden_NH = torch.cat([state_BQH[chosen_BQK[..., k]] for k, state_BQH in enumerate(states)])
        hidden_NH = hidden_NH.to(compute_dtype(hidden_NH.device))
        # From here on N counts the depths one after another.
        row_N, query_N, depth_N = by_depth(chosen_BQK)
        weight_N = queries.weight_BQK[row_N, query_N, depth_N]
        predicted_N = queries.predicted_BQK[row_N, query_N, depth_N]
        # A token at position t is predicted by the target's state at t-1; depths share one copy of each law.
        needed_BT = torch.zeros_like(batch.input_ids_BT, dtype=torch.bool)
        needed_BT[row_N, predicted_N - 1] = True
        source_N = (needed_BT.flatten().cumsum(0).view_as(needed_BT) - 1)[row_N, predicted_N - 1]
        probs_MD = self.target_probs(batch, needed_BT, hidden_NH.dtype)
        out = fused_head_loss(
            hidden_NH,
            self.loss_head(),
            probs_MD[source_N],
            sum_plogp(probs_MD)[source_N],
            weight_N * depth_weights(config.step_decay, normalizer)[depth_N],
            self.loss_index_V[batch.input_ids_BT[row_N, predicted_N]],
            config.loss,
            config.lk_eta,
            config.jsd_beta,
            config.temperature / self.logit_scale,
        )

        def total(value_N: Tensor) -> Tensor:
            return torch.zeros_like(normalizer).index_add(0, depth_N, value_N.double() * weight_N)

        sums = {"depth_loss": total(out.loss_N), "alpha": total(out.alpha_N), "hit": total(out.hit_N)}
        return LossOutput(out.total, sums, dict.fromkeys(sums, total(torch.ones_like(weight_N))))

    @torch.no_grad()
    def draft_hits(self, batch: Batch, num_draft_tokens: int, sampling: Sampling = GREEDY) -> list[ResponseHits]:
        """See `Speculator.draft_hits`. Depths beyond `num_depths` are drafted the same way."""
        batch = by_document(batch)
        queries = supervised_queries(batch, num_draft_tokens)
        ratio_BTK = torch.zeros(*batch.input_ids_BT.shape, num_draft_tokens, device=batch.input_ids_BT.device)
        for part in query_parts(queries, max(1, HIT_ROWS // num_draft_tokens)):
            states = self.depth_states(batch, part, num_draft_tokens)
            ratio_BTK += chain_ratios(batch, part, states, lambda _, state: self.draft_logits(state), sampling)
        return response_hits(batch, ratio_BTK.cpu(), sampling)

    # ------------------------------------------------------------------ decoding
    @torch.no_grad()
    def begin(self, prompts: list[list[int]], max_length: int) -> Any:
        """See `Proposer.begin`."""
        device = self.loss_ids_D.device
        first_B1 = torch.tensor([[prompt[0]] for prompt in prompts], device=device)
        nothing = torch.zeros(len(prompts), 0, dtype=torch.long, device=device)
        self.body.graphs = self.target.graphs
        cache = self.body.new_cache(max_length)
        return PardState(cache, nothing, nothing, torch.zeros(len(prompts), dtype=torch.long, device=device), first_B1)

    @torch.no_grad()
    def commit(self, state: Any, committed: Committed) -> None:
        """See `Proposer.commit`. The tokens are read by `propose`, in the same pass as the mask tokens."""
        if not state.read:
            self.cached_states(state.token_BS, state.position_BS, state.cache)
        token_BS, position_BS, count_B = committed.token_BS, committed.position_BS + 1, committed.count_B
        if state.first_B1 is not None:
            token_BS = torch.cat([state.first_B1, token_BS], dim=1)
            position_BS = F.pad(position_BS, (1, 0))
            count_B, state.first_B1 = count_B + 1, None
        state.token_BS, state.position_BS, state.count_B, state.read = token_BS, position_BS, count_B, False

    @torch.no_grad()
    def first_logits(self, state: Any, num_draft_tokens: int) -> tuple[Any, Tensor]:
        """See `Speculator.first_logits`: one pass over the tokens committed last and K-1 mask tokens. The slots of the
        latter are overwritten when tokens are committed there. A draft is the logits [B, K, V]."""
        masks, width = num_draft_tokens - 1, state.token_BS.shape[1]
        column = torch.arange(width + masks, device=state.token_BS.device)
        count_B1 = state.count_B[:, None]
        token_BS = F.pad(state.token_BS, (0, masks)).masked_fill(column >= count_B1, self.config.mask_token_id)
        position_BS = state.position_BS[:, :1] + column
        # Rows of unequal length end in padding, whose entries go to one slot that no real row sees.
        real_BS = column < count_B1 + masks
        position_BS = position_BS.where(real_BS, position_BS[real_BS].max() + 1)
        hidden_BSH = self.cached_states(token_BS, position_BS, state.cache)
        state.read = True
        drafting_BK = count_B1 - 1 + torch.arange(num_draft_tokens, device=column.device)
        rows_B1 = torch.arange(len(token_BS), device=column.device)[:, None]
        logits_BKV = self.draft_logits(hidden_BSH[rows_B1, drafting_BK])  # at once: the head is read once
        return logits_BKV, logits_BKV[:, 0]

    def next_logits(self, draft: Any, token_B: Tensor, depth: int) -> Tensor:
        """See `Speculator.next_logits`; the token before is not read."""
        logits_BV: Tensor = draft[:, depth]
        return logits_BV

    def branch(self, draft: Any, rows: Tensor) -> Any:
        """See `Speculator.branch`."""
        return draft[rows]

    @torch.no_grad()
    def select(self, state: Any, rows: Tensor) -> Any:
        """See `Proposer.select`."""
        state.cache.select(rows)
        first_B1 = None if state.first_B1 is None else state.first_B1[rows]
        return PardState(
            state.cache, state.token_BS[rows], state.position_BS[rows], state.count_B[rows], first_B1, state.read
        )

    # ------------------------------------------------------------------ serving
    def serving(self) -> ServingCheckpoint:
        """A plain Hugging Face checkpoint with the mask token's id and its trained row, head and embedding apart."""
        served = super().serving()
        names = {module: name for name, module in self.decoder.named_modules()}
        embedding = f"{self._prefix}.{names[self.body.embedding]}.weight"
        table_VH = served.tensors[embedding]
        row_H = self.mask_embedding.detach().to(table_VH.dtype)
        table_VH = table_VH.index_copy(
            0, torch.tensor([self.config.mask_token_id], device=table_VH.device), row_H[None]
        )
        head = {f"{self._head_name}.weight": served.tensors[embedding]} if self.lm_head is None else {}
        return replace(
            served,
            config={**served.config, "tie_word_embeddings": False, "pard_token": self.config.mask_token_id},
            tensors={**served.tensors, embedding: table_VH, **head},
            speculative_config={"parallel_drafting": True},
        )

    @classmethod
    def from_serving(cls, config: dict[str, Any], tensors: dict[str, Tensor], target: TargetModel) -> Pard:
        """Rebuild a draft from a Hugging Face checkpoint. Raises UserError as `DraftLM.from_serving` does, or where the
        config names no mask token."""
        names = ("mask_token_id", "pard_token", "ptd_token_id")  # in the order in which vLLM looks
        ids = [config[name] for name in names if config.get(name) is not None]
        if not ids:
            raise UserError("exported pard draft: config.json names no pard_token (or mask_token_id, ptd_token_id)")
        if problem := token_problem(ids[0], target.vocab_size):
            raise UserError(f"exported pard draft: {problem}")
        model_config = {name: value for name, value in config.items() if name not in names}
        plain = DraftLM.from_serving(model_config, tensors, target)
        fields_of_plain = _plain_fields(asdict(plain.config))
        draft = cls(PardConfig(**fields_of_plain, mask_token_id=ids[0]), plain.body.model, plain.loss_ids_D)
        with torch.no_grad():
            draft.mask_embedding.copy_(plain.body.embedding.weight[ids[0]])
        draft.borrow(target)
        return draft.eval().requires_grad_(False)


def start_from_draft(path: str | None, target: TargetModel) -> tuple[Any, bool] | None:
    """(the model of a trained `draft_lm`, float32, on the CPU; whether embedding and head are the target's own).

    None where `path` is neither a checkpoint nor an export of ours. Raises UserError where it is that of another
    method, or does not go with the target.
    """
    if path is None or not any((Path(path) / name).is_file() for name in ("speculator.json", "export.json")):
        return None
    draft = load_speculator(Path(path), target)
    if draft.kind != DraftLM.kind:
        raise UserError(f"speculator.start_model {path}: holds a {draft.kind}; give that of a draft_lm")
    served = draft.serving()
    model = build_model({name: value for name, value in served.config.items() if name != "architectures"})
    own = model.state_dict()
    with torch.no_grad():
        for name, value in served.tensors.items():
            own[name].copy_(value)
    pairs = (
        (model.get_input_embeddings().weight, target.embedding.weight),
        (model.get_output_embeddings().weight, target.lm_head.weight),
    )
    return model, all(torch.equal(mine.cpu(), theirs.float().cpu()) for mine, theirs in pairs)


def _plain_fields(saved: dict[str, Any]) -> dict[str, Any]:
    """What a PardConfig shares with a DraftLMConfig."""
    return {field.name: saved[field.name] for field in fields(DraftLMConfig)}
