"""Hold drafts of several depths against the target's own distribution, and count the hits along responses.

Shared by every method that drafts K tokens from the target's states: what differs between them is how the states of
each depth come about. Shape legend: see `base.py`; further M positions whose next token is supervised.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch import Tensor

from spec_train.batch import Batch
from spec_train.speculators.base import LossOutput, ResponseHits
from spec_train.speculators.losses import LossKind, fused_head_loss, restricted_target_probs, sum_plogp
from spec_train.speculators.supervision import Queries, response_hits
from spec_train.target import TargetModel


@torch.no_grad()
def target_distributions(
    batch: Batch, queries: Queries, target_head_DH: Tensor, target: TargetModel
) -> tuple[Tensor, Tensor]:
    """(target probabilities [M, D] of every supervised token, index_BT of the row for the position it comes from).

    A token at position t is predicted by the target's state at t-1; depths share one copy of each distribution.
    `target_head_DH`: rows of the target's output head for the D tokens that the draft is confined to. Probabilities
    are those of the full vocabulary and never renormalised over D.
    """
    assert batch.last_hidden_BTH is not None and batch.target_lse_BT is not None
    rows = torch.arange(batch.input_ids_BT.shape[0], device=batch.input_ids_BT.device)[:, None]
    needed = torch.zeros_like(batch.input_ids_BT, dtype=torch.bool)
    source_BQK = queries.predicted_BQK - 1
    supervised = queries.weight_BQK > 0
    needed[rows[..., None].expand_as(source_BQK)[supervised], source_BQK[supervised]] = True
    index_BT = needed.flatten().cumsum(0).view_as(needed) - 1
    device_type = batch.input_ids_BT.device.type
    dtype = torch.get_autocast_dtype(device_type) if torch.is_autocast_enabled(device_type) else torch.float32
    with torch.autocast(device_type, enabled=False):
        logits = batch.last_hidden_BTH[needed].to(dtype) @ target_head_DH.to(dtype).T
        probs = restricted_target_probs(target.scale_logits(logits), batch.target_lse_BT[needed], dtype)
    return probs, index_BT


def depth_weights(step_decay: float, normalizer_K: Tensor) -> Tensor:
    """float32 [K]: decay^k / normalizer_k, 0 for a depth that supervises nothing."""
    decay_K = step_decay ** torch.arange(len(normalizer_K), device=normalizer_K.device)
    weight_K = decay_K / normalizer_K.clamp(min=1e-9)
    return torch.where(normalizer_K > 0, weight_K, torch.zeros_like(weight_K)).float()


def chain_loss(
    batch: Batch,
    queries: Queries,
    state_BQH_by_depth: Iterable[Tensor],
    head_of_depth: Callable[[int], Tensor],
    *,
    distributions: tuple[Tensor, Tensor],
    draft_index_V: Tensor,
    depth_weight_K: Tensor,
    kind: LossKind,
    eta: float,
) -> LossOutput:
    """Sum over depths of weight_k * (sum of the head loss). Metrics by depth: depth_loss, alpha, hit.

    state_BQH_by_depth  states of each depth, ready for the output head, [B, Q, H]
    head_of_depth       the output head [D, H] of a depth
    distributions       see `target_distributions`
    draft_index_V       index in the draft vocabulary of each target id, -1 outside
    depth_weight_K      see `depth_weights`
    """
    rows = torch.arange(batch.input_ids_BT.shape[0], device=batch.input_ids_BT.device)[:, None]
    target_probs_MD, probs_index_BT = distributions
    plogp_M = sum_plogp(target_probs_MD)
    total: Tensor = torch.zeros((), device=batch.input_ids_BT.device)
    sums: dict[str, list[Tensor]] = {"depth_loss": [], "alpha": [], "hit": []}
    counts = []
    for k, state_BQH in enumerate(state_BQH_by_depth):
        weight_BQ = queries.weight_BQK[..., k]
        chosen = weight_BQ > 0
        predicted = queries.predicted_BQK[..., k]
        label_N = draft_index_V[batch.input_ids_BT[rows, predicted][chosen]]
        weight_N = weight_BQ[chosen]
        source_N = probs_index_BT[rows, predicted - 1][chosen]
        out = fused_head_loss(
            state_BQH[chosen],
            head_of_depth(k),
            target_probs_MD[source_N],
            plogp_M[source_N],
            weight_N * depth_weight_K[k],
            label_N,
            kind,
            eta,
        )
        total = total + out.total
        for name, value_N in (("depth_loss", out.loss_N), ("alpha", out.alpha_N), ("hit", out.hit_N)):
            sums[name].append((value_N.double() * weight_N).sum())
        counts.append(weight_N.double().sum())
    count_K = torch.stack(counts)
    return LossOutput(total, {name: torch.stack(values) for name, values in sums.items()}, dict.fromkeys(sums, count_K))


def chain_hits(batch: Batch, queries: Queries, drafted_BQ_by_depth: Iterable[Tensor]) -> list[ResponseHits]:
    """Compare teacher-forced drafts (target ids [B, Q], one tensor per depth) with the text, cut into responses."""
    rows = torch.arange(batch.input_ids_BT.shape[0], device=batch.input_ids_BT.device)[:, None]
    depths = queries.predicted_BQK.shape[-1]
    hit_BTK = torch.zeros(*batch.input_ids_BT.shape, depths, dtype=torch.bool, device=rows.device)
    for k, drafted_BQ in enumerate(drafted_BQ_by_depth):
        token_BQ = batch.input_ids_BT[rows, queries.predicted_BQK[..., k]]
        hit_BQ = (drafted_BQ == token_BQ) & (queries.weight_BQK[..., k] > 0)
        hit_BTK[..., k].scatter_(1, queries.index_BQ, hit_BQ & queries.valid_BQ)
    return response_hits(batch, hit_BTK.cpu())
