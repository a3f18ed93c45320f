"""How PARD lays out a training pass: one document to a row, the tokens first, then the mask rows depth by depth.

Shape legend: see `base.py`; further Q query positions, R rows (T tokens, then mask rows), D documents.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

from spec_train.batch import Batch
from spec_train.speculators.supervision import Queries


def by_document(batch: Batch) -> Batch:
    """The same documents, one to a row and right-padded, in the same order."""
    place = batch.document_BT >= 0
    row_N, _ = place.nonzero(as_tuple=True)
    key_N = row_N * (batch.document_BT.max() + 1) + batch.document_BT[place]
    starts_N = F.pad(key_N[1:] != key_N[:-1], (1, 0), value=True)[: len(key_N)]
    first_D = starts_N.nonzero()[:, 0]
    inverse_N = starts_N.cumsum(0) - 1
    column_N = torch.arange(len(key_N), device=key_N.device) - first_D[inverse_N]
    shape = (max(1, len(first_D)), 1 + int(column_N.max()) if len(key_N) else 1)

    def spread(value_BT: Tensor, filler: int = 0) -> Tensor:
        out = value_BT.new_full((*shape, *value_BT.shape[2:]), filler)
        out[inverse_N, column_N] = value_BT[place]
        return out

    origins = zip(row_N[first_D].tolist(), batch.document_BT[place][first_D].tolist(), strict=True)
    return Batch(
        input_ids_BT=spread(batch.input_ids_BT),
        position_BT=spread(batch.position_BT),
        document_BT=spread(torch.zeros_like(batch.document_BT), -1),
        loss_weight_BT=spread(batch.loss_weight_BT),
        last_hidden_BTH=None if batch.last_hidden_BTH is None else spread(batch.last_hidden_BTH),
        target_lse_BT=None if batch.target_lse_BT is None else spread(batch.target_lse_BT),
        target_prob_BT=None if batch.target_prob_BT is None else spread(batch.target_prob_BT),
        logits_dtype=batch.logits_dtype,
        row_ids=tuple((batch.row_ids[row][document],) for row, document in origins) if batch.row_ids else (),
    )


def row_places(queries: Queries, length: int, widths: list[int]) -> tuple[Tensor, Tensor]:
    """(position of the last real token that each row knows [B, R], its depth [R]): the T tokens, then for each depth
    k >= 1 the leading `widths[k-1]` queries. A row stands at the sum of the two."""
    index_BQ = queries.index_BQ
    token_BT = torch.arange(length, device=index_BQ.device).expand(len(index_BQ), -1)
    anchor_BR = torch.cat([token_BT, *(index_BQ[:, :width] + 1 for width in widths)], dim=1)
    depths = torch.arange(len(widths) + 1, device=index_BQ.device)
    return anchor_BR, depths.repeat_interleave(torch.tensor([length, *widths], device=index_BQ.device))


def visible_rows(anchor_BR: Tensor, depth_R: Tensor, length: int) -> Tensor:
    """bool [B, R, R], (query, key): the tokens up to the anchor, and the mask rows of the same anchor up to the own
    depth."""
    tokens_BRT = anchor_BR[:, :, None] >= torch.arange(length, device=anchor_BR.device)
    chain_BRM = anchor_BR[:, :, None] == anchor_BR[:, None, length:]
    return torch.cat([tokens_BRT, chain_BRM & (depth_R[:, None] >= depth_R[length:])], dim=-1)


def by_depth(chosen_BQK: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """(row, query, depth) of what is chosen, depth by depth."""
    depth_N, row_N, query_N = chosen_BQK.permute(2, 0, 1).nonzero(as_tuple=True)
    return row_N, query_N, depth_N


def query_parts(queries: Queries, size: int) -> Iterator[Queries]:
    """The queries of every row, `size` at a time."""
    for first in range(0, queries.index_BQ.shape[1], size):
        part = slice(first, first + size)
        yield Queries(
            queries.index_BQ[:, part],
            queries.valid_BQ[:, part],
            queries.predicted_BQK[:, part],
            queries.weight_BQK[:, part],
        )
