"""Hold drafts of several depths against the target's own distribution, and count the hits along responses.

Shared by every method that drafts K tokens from the target's states: what differs between them is how the states of
each depth come about. Shape legend: see `base.py`; further M positions whose next token is supervised.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from spec_train.batch import Batch
from spec_train.decoding.sampling import Sampling, target_probs
from spec_train.speculators.base import LossOutput, ResponseHits
from spec_train.speculators.losses import LossKind, fused_head_loss, restricted_target_probs, sum_plogp
from spec_train.speculators.supervision import Queries, response_hits
from spec_train.target import TargetModel

ROWS = 256  # rows of full-vocabulary logits held at once


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
    device = batch.input_ids_BT.device
    dtype = compute_dtype(device)
    with torch.autocast(device.type, enabled=False):
        logits = target.head_logits(batch.last_hidden_BTH[needed], target_head_DH.to(batch.logits_dtype or dtype))
        probs = restricted_target_probs(logits, batch.target_lse_BT[needed], dtype)
    return probs, index_BT


def compute_dtype(device: torch.device) -> torch.dtype:
    """What matrix products run in: the autocast dtype, else float32."""
    on = torch.is_autocast_enabled(device.type)
    return torch.get_autocast_dtype(device.type) if on else torch.float32


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


@torch.no_grad()
def add_target_probs(batch: Batch, target: TargetModel, sampling: Sampling) -> Batch:
    """`batch` with the target's probability of every supervised token under `sampling`."""
    assert batch.last_hidden_BTH is not None
    predicts = F.pad((batch.loss_weight_BT * (batch.position_BT > 0))[:, 1:] > 0, (0, 1))
    prob_BT = torch.zeros_like(batch.loss_weight_BT)
    token_N = F.pad(batch.input_ids_BT[:, 1:], (0, 1))[predicts]
    hidden = torch.split(batch.last_hidden_BTH[predicts], ROWS)
    laws = (target_probs(target.logits(part_NH), sampling) for part_NH in hidden)
    tokens = torch.split(token_N, ROWS)
    prob_BT[predicts] = torch.cat([law.gather(1, part[:, None])[:, 0] for law, part in zip(laws, tokens, strict=True)])
    return replace(batch, target_prob_BT=F.pad(prob_BT[:, :-1], (1, 0)))


def draft_ratios(
    batch: Batch,
    place_N: tuple[Tensor, Tensor],
    state_NH: Tensor,
    logits_of: Callable[[Tensor], Tensor],
    sampling: Sampling,
    draft_index_V: Tensor | None = None,
) -> Tensor:
    """float32 [N]: draft_probs / target_probs of the tokens at `place_N` (row, position), drafted from `state_NH`.

    For greedy drafts 1 where the argmax is that token, else 0. A token outside the draft vocabulary is never drafted.
    `logits_of` states gives draft logits [n, D]; `draft_index_V` as in `chain_loss`, None for the target's own ids.
    """
    token_N = batch.input_ids_BT[place_N]
    index_N = token_N if draft_index_V is None else draft_index_V[token_N]
    probs = []
    for part_NH, part_N in zip(torch.split(state_NH, ROWS), torch.split(index_N, ROWS), strict=True):
        logits_ND = logits_of(part_NH)
        inside_N = (part_N >= 0) & (part_N < logits_ND.shape[-1])
        index_N1 = part_N.where(inside_N, torch.zeros_like(part_N))[:, None]
        if sampling.greedy_drafts:
            prob_N = (logits_ND.argmax(-1) == index_N1[:, 0]).float()
        else:
            prob_N = target_probs(logits_ND, sampling.drafts).gather(1, index_N1)[:, 0]
        probs.append(prob_N * inside_N)
    if sampling.greedy_drafts:
        return torch.cat(probs)
    assert batch.target_prob_BT is not None
    target_prob_N = batch.target_prob_BT[place_N]
    return torch.where(target_prob_N > 0, torch.cat(probs) / target_prob_N, 0.0)


def chain_ratios(
    batch: Batch,
    queries: Queries,
    state_BQH_by_depth: Iterable[Tensor],
    logits_of_depth: Callable[[int, Tensor], Tensor],
    sampling: Sampling,
    draft_index_V: Tensor | None = None,
) -> Tensor:
    """float32 [B, T, K]: `draft_ratios` of the K tokens drafted from each position, 0 where nothing is supervised.

    state_BQH_by_depth  states of each depth, fed the text's own tokens: inside a round all drafts before the one that
                        is judged were accepted, so they are the text
    logits_of_depth     draft logits [n, D] of a depth from such states
    """
    rows = torch.arange(batch.input_ids_BT.shape[0], device=batch.input_ids_BT.device)[:, None]
    ratio_BTK = torch.zeros(*batch.input_ids_BT.shape, queries.predicted_BQK.shape[-1], device=rows.device)
    for k, state_BQH in enumerate(state_BQH_by_depth):
        chosen_BQ = queries.weight_BQK[..., k] > 0
        place_N = rows.expand_as(chosen_BQ)[chosen_BQ], queries.predicted_BQK[..., k][chosen_BQ]
        ratio_BQ = torch.zeros_like(queries.weight_BQK[..., k])
        logits_of = partial(logits_of_depth, k)
        ratio_BQ[chosen_BQ] = draft_ratios(batch, place_N, state_BQH[chosen_BQ], logits_of, sampling, draft_index_V)
        ratio_BTK[..., k].scatter_(1, queries.index_BQ, ratio_BQ)
    return ratio_BTK


def chain_hits(
    batch: Batch,
    queries: Queries,
    state_BQH_by_depth: Iterable[Tensor],
    logits_of_depth: Callable[[int, Tensor], Tensor],
    sampling: Sampling,
    draft_index_V: Tensor | None = None,
) -> list[ResponseHits]:
    """`chain_ratios` cut into responses: what `Speculator.draft_hits` returns."""
    ratio_BTK = chain_ratios(batch, queries, state_BQH_by_depth, logits_of_depth, sampling, draft_index_V)
    return response_hits(batch, ratio_BTK.cpu(), sampling)
