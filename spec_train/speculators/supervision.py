"""Which positions are drafted from, what each depth is held against, and what came of it.

The one alignment rule (see `base.py`) is written here once, for every method that drafts k tokens from a position.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from spec_train.batch import Batch
from spec_train.decoding.sampling import Sampling
from spec_train.speculators.base import GREEDY, ResponseHits


@dataclass(frozen=True)
class Queries:
    """Positions that some depth supervises, gathered per row and right-padded.

    index_BQ int64 positions in the row; predicted_BQK the position each depth predicts (clamped into the row);
    weight_BQK float32 loss weight of that token, 0 where the document has ended or the query is padding.
    """

    index_BQ: Tensor
    valid_BQ: Tensor
    predicted_BQK: Tensor
    weight_BQK: Tensor


def supervised_queries(batch: Batch, depths: int, everywhere: bool = False) -> Queries:
    """Which positions draft, and what each depth is held against. `everywhere` keeps every position as a query."""
    document, weight = batch.document_BT, batch.loss_weight_BT
    length = document.shape[1]
    index_T = torch.arange(length, device=document.device)
    predicted_TK = index_T[:, None] + 2 + torch.arange(depths, device=document.device)
    inside = predicted_TK < length
    predicted_TK = predicted_TK.clamp(max=length - 1)
    same = (document[:, predicted_TK] == document[:, :, None]) & (document >= 0)[:, :, None] & inside
    weight_BTK = weight[:, predicted_TK] * same
    wanted = torch.ones_like(document, dtype=torch.bool) if everywhere else (weight_BTK > 0).any(-1)
    count_B = wanted.sum(1)
    width = max(1, int(count_B.max()))
    order = torch.argsort(~wanted, dim=1, stable=True)[:, :width]  # wanted positions first, ascending
    valid = torch.arange(width, device=document.device)[None] < count_B[:, None]
    weight_BQK = weight_BTK.gather(1, order[..., None].expand(-1, -1, depths)) * valid[..., None]
    return Queries(order, valid, predicted_TK[order], weight_BQK)


def survival(ratio_MK: Tensor, block: bool) -> Tensor:
    """float64 [M, K]: the probability that a round keeps at least k+1 drafts, given the text that it left.

    ratio_MK is draft_probs / target_probs of the text's tokens, each law given the text before it. With r_1 r_2 ... one
    row of it, and R_j = r_1 ... r_j, the rules of `decoding/verify.py` give

        token by token   P(kept >= j) = prod_{i<=j} min(1, r_i)
        block            P(kept >= j) = min(1, R_1, ..., R_j)

    For the first, a draft is emitted with probability min(draft, target), and the token, accepted or not, has the
    target's law. For the second, test j lets drafts of probability R_j * target pass with weight_j, and
    R_j * weight_j is that running minimum. One-hot drafts have r = 1 / target or 0, for which 1 or 0 may stand.
    """
    ratio_MK = ratio_MK.double()
    if not block:
        return ratio_MK.clamp(max=1.0).cumprod(1)
    kept_M, product_M, out = ratio_MK.new_ones(len(ratio_MK)), ratio_MK.new_ones(len(ratio_MK)), []
    for ratio_M in ratio_MK.unbind(1):
        product_M = (product_M * ratio_M).clamp(max=torch.finfo(torch.float64).max)  # infinity times 0 is no number
        kept_M = torch.minimum(kept_M, product_M)
        out.append(kept_M)
    return torch.stack(out, 1) if out else ratio_MK


def response_hits(batch: Batch, ratio_BTK: Tensor, sampling: Sampling = GREEDY) -> list[ResponseHits]:
    """Cut ratios by position ([B, T, K], see `survival`; position p drafts p+2 ...) into responses, one for each
    supervised span.

    A response at positions s .. e-1 has decoding states p = s-1 .. e-3: the token at p+1 is known, p+2 is drafted.
    Depths that would read beyond the response are never kept.
    """
    block = sampling.rejection_sample_method == "block"
    out: list[ResponseHits] = []
    supervised = (batch.loss_weight_BT > 0).tolist()
    documents = batch.document_BT.tolist()
    starts_document = (batch.position_BT == 0).tolist()
    for row, (flags, docs) in enumerate(zip(supervised, documents, strict=True)):
        start = None
        # Nothing predicts the first token of a document.
        flags = [flag and not first for flag, first in zip(flags, starts_document[row], strict=True)]
        for t in range(len(flags) + 1):
            inside = t < len(flags) and flags[t] and (start is None or docs[t] == docs[start])
            if inside and start is None:
                start = t
            elif not inside and start is not None:
                name = batch.row_ids[row][docs[start]] if batch.row_ids else str(docs[start])
                states = ratio_BTK[row, start - 1 : t - 2].clone() if t - start > 1 else ratio_BTK[row, :0]
                for m in range(states.shape[0]):  # state m+1 tokens known: depth k drafts response token m+1+k
                    states[m, max(0, t - start - 1 - m) :] = 0
                out.append(ResponseHits(name, survival(states, block)))
                start = t if t < len(flags) and flags[t] else None
    return out
