"""Conditional drop (COD): train deeper depths of a parallel drafter at fewer positions, without bias.

A method that drafts K tokens in one pass computes one row for every (query, depth): K times the rows of the text. COD
(An et al., 2025, arXiv:2504.18583) keeps the rows of depth k at a share r_k = max(r^k, r_min) of the queries. A row
reads the rows of the same query at lower depths, so what is kept must be nested.

Here each query of a row of the batch draws one number u, uniform on [0, 1) and spread evenly over the queries; depth k
of it is kept where u < r_k. As r_k never rises with k, this is nested by construction, and about r_k of the queries
are kept at every depth. A kept loss weight is divided by r_k, the chance that it is kept: the expected loss is that of
all rows, so it is normalised by the full count of supervised tokens (`supervised_counts`).

Shape legend: see `base.py`; further Q query positions.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from spec_train.speculators.supervision import Queries


def retention_by_depth(rate: float, minimum: float, depths: int) -> Tensor:
    """float32 [K]: r_k = max(rate^k, minimum), 1 at depth 0."""
    return (rate ** torch.arange(depths)).clamp(min=minimum)


def drop_rows(supervised_BQK: Tensor, retention_K: Tensor) -> Tensor:
    """The supervised predictions that are kept, bool [B, Q, K], by torch's global generator (the trainer seeds it).

    Each is kept with probability `retention_K` (which must not rise with k), about that share of each row's queries;
    a query that is kept at a depth keeps every lower depth that it supervises.
    """
    drawn_BQ = supervised_BQK.any(-1)
    # Queries in a random order, those that supervise nothing last; place i of n stands for u in [i/n, (i+1)/n).
    key_BQ = torch.rand(drawn_BQ.shape, device=drawn_BQ.device).masked_fill(~drawn_BQ, 2.0)
    place_BQ = key_BQ.argsort(1).argsort(1)
    offset_B1 = torch.rand(drawn_BQ.shape[0], 1, device=drawn_BQ.device)
    u_BQ = (place_BQ + offset_B1) / drawn_BQ.sum(1, keepdim=True).clamp(min=1)
    return supervised_BQK & (u_BQ[..., None] < retention_K.to(u_BQ.device))


def chain_rows(chosen_BQK: Tensor) -> Tensor:
    """The rows that must be computed for the predictions in `chosen_BQK`, bool [B, Q, K]: each with its own chain, the
    rows of the same query at every lower depth. A row at depth k > 0 implies the row at depth k-1."""
    return chosen_BQK.flip(-1).cummax(-1).values.flip(-1)


def retain(queries: Queries, retention_K: Tensor) -> Queries:
    """`queries` after the drop, weights divided by the chance of being kept, in descending order of chain length.

    The rows of a depth are then leading queries of every row of the batch: depth k needs only the first
    `depth_width(queries, k)` of them.
    """
    chosen_BQK = drop_rows(queries.weight_BQK > 0, retention_K)
    order_BQ = chain_rows(chosen_BQK).sum(-1).argsort(dim=1, descending=True, stable=True)
    weight_BQK = torch.where(chosen_BQK, queries.weight_BQK / retention_K.to(queries.weight_BQK.device), 0.0)
    grid = order_BQ[..., None].expand_as(weight_BQK)
    return replace(
        queries,
        index_BQ=queries.index_BQ.gather(1, order_BQ),
        valid_BQ=queries.valid_BQ.gather(1, order_BQ),
        predicted_BQK=queries.predicted_BQK.gather(1, grid),
        weight_BQK=weight_BQK.gather(1, grid),
    )


def depth_width(queries: Queries, depth: int) -> int:
    """How many leading queries hold every row of `depth` that some prediction at this depth or a deeper one needs.
    At least 1, so that every parameter stays part of the loss."""
    needed_Q = (queries.weight_BQK[..., depth:] > 0).any(-1).any(0)
    return max(1, int(needed_Q.nonzero().max()) + 1) if bool(needed_Q.any()) else 1
