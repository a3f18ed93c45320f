"""Answers that the draft writes itself, held against the target's laws at the same places (on-policy distillation:
Agarwal et al., 2024, arXiv:2306.13649).

Shape legend: see `base.py`; further R chosen documents, L tokens in the longest of them.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from spec_train.batch import Batch, FeatureSpec

if TYPE_CHECKING:
    from spec_train.speculators.draft_lm import DraftLM

Answer = tuple[int, int, int, int, int]  # row, first column, length; first supervised token and the end of the last one


def with_own_answers(draft: DraftLM, batch: Batch, fraction: float) -> Batch:
    """`batch` with the supervised tokens of a `fraction` of its documents drawn from the draft at temperature 1.

    A document keeps its length: nothing after an end of sequence is supervised any more. Documents and tokens are
    drawn from torch's generators, which the trainer seeds in every micro-batch. All processes take the same number of
    steps, as ZeRO-3 gathers weights layer by layer.
    """
    found = _answers(batch)
    chosen = [answer for answer, draw in zip(found, torch.rand(len(found)).tolist(), strict=True) if draw < fraction]
    device = batch.input_ids_BT.device
    steps = _most_of_all_processes(max((end - first for *_, first, end in chosen), default=0), device)
    if steps == 0:
        return batch
    row_R, start_R, length_R, first_R, _ = torch.tensor(chosen or [(0, 0, 1, 1, 1)], device=device).unbind(1)
    index_L = torch.arange(int(length_R.max()), device=device)
    valid_RL = index_L < length_R[:, None]
    column_RL = (start_R[:, None] + index_L).clamp(max=batch.input_ids_BT.shape[1] - 1)
    ids_RL = batch.input_ids_BT[row_R[:, None], column_RL]
    weight_RL = batch.loss_weight_BT[row_R[:, None], column_RL] * (valid_RL & (index_L > 0))
    _write(draft, ids_RL, weight_RL > 0, first_R, steps)
    if not chosen:  # only kept the other processes company
        return batch
    ends_RL = torch.isin(ids_RL, torch.tensor(sorted(draft.target.eos_token_ids), device=device)) & (weight_RL > 0)
    weight_RL = weight_RL * (ends_RL.cumsum(1) - ends_RL.long() == 0)
    answers = Batch(ids_RL, index_L.expand_as(ids_RL), torch.where(valid_RL, 0, -1), weight_RL)
    assert batch.last_hidden_BTH is not None and batch.target_lse_BT is not None
    with torch.autocast(device.type, enabled=False):
        filled = draft.target.fill_features(
            answers, FeatureSpec((), last_hidden=True), batch.last_hidden_BTH.dtype, batch.logits_dtype
        )
    assert filled.last_hidden_BTH is not None and filled.target_lse_BT is not None
    places = row_R[:, None].expand_as(ids_RL)[valid_RL], column_RL[valid_RL]
    return replace(
        batch,
        input_ids_BT=batch.input_ids_BT.index_put(places, ids_RL[valid_RL]),
        loss_weight_BT=batch.loss_weight_BT.index_put(places, weight_RL[valid_RL]),
        last_hidden_BTH=batch.last_hidden_BTH.index_put(places, filled.last_hidden_BTH[valid_RL]),
        target_lse_BT=batch.target_lse_BT.index_put(places, filled.target_lse_BT[valid_RL]),
    )


def _answers(batch: Batch) -> list[Answer]:
    """Every document that supervises a token."""
    found = []
    supervised_BT = ((batch.loss_weight_BT > 0) & (batch.position_BT > 0)).cpu()
    for row, (document_T, supervised_T) in enumerate(zip(batch.document_BT.cpu(), supervised_BT, strict=True)):
        for document in range(int(document_T.max()) + 1):
            columns = (document_T == document).nonzero()[:, 0]
            places = supervised_T[columns].nonzero()[:, 0].tolist()
            if places:
                found.append((row, int(columns[0]), len(columns), places[0], places[-1] + 1))
    return found


@torch.no_grad()
def _write(draft: DraftLM, ids_RL: Tensor, wanted_RL: Tensor, first_R: Tensor, steps: int) -> None:
    """Replace the `wanted_RL` tokens of `ids_RL` in place, one position of every document in a step."""
    rows, (_, length), device = torch.arange(len(ids_RL), device=ids_RL.device), ids_RL.shape, ids_RL.device
    training = draft.training
    draft.eval()  # a layer that recomputes its activations would leave the cache out
    on, dtype = torch.is_autocast_enabled(device.type), torch.get_autocast_dtype(device.type)
    # Without a cache of cast weights: those cast here would carry no gradient, and the loss would use them again.
    with torch.autocast(device.type, dtype=dtype, enabled=on, cache_enabled=False):
        cache = draft.body.new_cache(length)
        position = torch.arange(int(first_R.max()), device=device).expand(len(ids_RL), -1)
        hidden_RH = draft.cached_states(ids_RL[:, : position.shape[1]], position, cache)[rows, first_R - 1]
        for step in range(steps):
            place_R = (first_R + step).clamp(max=length - 1)
            wanted_R = wanted_RL[rows, place_R] & (first_R + step < length)
            drawn_R = torch.multinomial(draft.draft_logits(hidden_RH).float().softmax(-1), 1)[:, 0]
            token_R = torch.where(wanted_R, drawn_R, ids_RL[rows, place_R])
            ids_RL[rows, place_R] = token_R
            hidden_RH = draft.cached_states(token_R[:, None], place_R[:, None], cache)[:, 0]
    draft.train(training)


def _most_of_all_processes(value: int, device: torch.device) -> int:
    if not torch.distributed.is_initialized():
        return value
    most = torch.tensor([value], device=device)
    torch.distributed.all_reduce(most, torch.distributed.ReduceOp.MAX)
    return int(most)
