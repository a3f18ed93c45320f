"""Packing: which documents share a micro-batch, and the tensors they become.

Shape legend: B rows, T tokens in a row, t tokens of one document, A aux layers, H hidden size.
A plan is a list of micro-batches, a micro-batch a list of rows, a row the indices of the documents packed into it.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor

from spec_train.batch import Batch
from spec_train.errors import UserError

if TYPE_CHECKING:
    from spec_train.data.documents import Document
    from spec_train.data.features import DocumentFeatures

Rows = list[list[int]]
Normalization = Literal["token", "sequence"]

WINDOW_MICRO_BATCHES = 16  # documents are sorted by length only inside a window, so that the order stays random


def plan_epoch(
    lengths: Sequence[int], *, micro_batch_tokens: int, seed: int, epoch: int, multiple_of: int = 1
) -> list[Rows]:
    """The micro-batches of one epoch, each document in exactly one of them.

    lengths             tokens of each document, at least 1
    micro_batch_tokens  the most rows x width of a micro-batch; a longer document gets a micro-batch of its own
    multiple_of         gradient accumulation steps x processes. An optimiser step takes that many consecutive
                        micro-batches, so the plan is filled up to a multiple of it with empty ones (`[]`), which
                        build_batch turns into work of weight zero: every process takes part in every step.

    Depends on nothing but its arguments, so a resumed run sees the very same epoch.
    """
    rng = random.Random(f"plan {seed} {epoch}")
    order = list(range(len(lengths)))
    rng.shuffle(order)
    plan: list[Rows] = []
    window: list[int] = []
    window_tokens = 0
    for index in order:
        if lengths[index] < 1:
            raise UserError(f"document {index} has no tokens; leave it out of the data")
        window.append(index)
        window_tokens += lengths[index]
        if window_tokens >= WINDOW_MICRO_BATCHES * micro_batch_tokens:
            plan.extend(_pack_window(window, lengths, micro_batch_tokens))
            window, window_tokens = [], 0
    plan.extend(_pack_window(window, lengths, micro_batch_tokens))
    rng.shuffle(plan)
    plan.extend([] for _ in range(-len(plan) % multiple_of))
    return plan


def _pack_window(window: list[int], lengths: Sequence[int], micro_batch_tokens: int) -> list[Rows]:
    """First-fit decreasing: the longest document left sets the width of a micro-batch, shorter ones fill its rows."""
    waiting = sorted(window, key=lambda index: -lengths[index])
    micro_batches = []
    while waiting:
        width = lengths[waiting[0]]
        rows: Rows = [[] for _ in range(max(1, micro_batch_tokens // width))]
        free = [width] * len(rows)
        left = []
        for index in waiting:
            row = next((r for r, space in enumerate(free) if space >= lengths[index]), None)
            if row is None:
                left.append(index)
            else:
                rows[row].append(index)
                free[row] -= lengths[index]
        micro_batches.append([row for row in rows if row])
        waiting = left
    return micro_batches


def build_batch(
    documents: Sequence[Document],
    rows: Rows,
    features: Callable[[Document], DocumentFeatures] | None = None,
    normalization: Normalization = "token",
) -> Batch:
    """The tensors of one micro-batch on the CPU, rows right-padded with zeros (see Batch for every field).

    features       hidden states of a document; None leaves them out, for `add_features` or the target to fill in
    normalization  "token": every response token weighs 1. "sequence": every document weighs 1, shared by its tokens

    Empty `rows` (see plan_epoch) give the first document with all weights zero: tensors of the usual shapes, so that a
    process without work runs the same collectives as the others and adds nothing.
    """
    empty = not rows
    if empty:
        rows = [[0]]
    width = max(sum(len(documents[index].input_ids) for index in row) for row in rows)
    input_ids_BT = torch.zeros(len(rows), width, dtype=torch.int64)
    position_BT = torch.zeros(len(rows), width, dtype=torch.int64)
    document_BT = torch.full((len(rows), width), -1, dtype=torch.int64)
    loss_weight_BT = torch.zeros(len(rows), width, dtype=torch.float32)
    for b, row in enumerate(rows):
        start = 0
        for place, index in enumerate(row):
            document = documents[index]
            end = start + len(document.input_ids)
            input_ids_BT[b, start:end] = torch.tensor(document.input_ids, dtype=torch.int64)
            position_BT[b, start:end] = torch.arange(end - start)
            document_BT[b, start:end] = place
            if not empty:
                loss_weight_BT[b, start:end] = _loss_weights(document, normalization)
            start = end
    row_ids = tuple(tuple(documents[index].id for index in row) for row in rows)
    batch = Batch(input_ids_BT, position_BT, document_BT, loss_weight_BT, row_ids=row_ids)
    if features is None:
        return batch
    by_id = {documents[index].id: documents[index] for row in rows for index in row}
    return add_features(batch, lambda document_id: features(by_id[document_id]))


def _loss_weights(document: Document, normalization: Normalization) -> Tensor:
    """float32 [t]: 1 (or 1/number of response tokens) at response tokens, 0 elsewhere."""
    weights = torch.zeros(len(document.input_ids), dtype=torch.float32)
    for start, end in document.spans:
        weights[start:end] = 1.0
    if normalization == "sequence":
        weights /= weights.sum().clamp(min=1.0)
    return weights


def add_features(batch: Batch, read: Callable[[str], DocumentFeatures]) -> Batch:
    """`batch` with stored hidden states: `read(document id)` gives tensors over t positions of that document, where t
    is its length or one less (nothing is predicted from the last token). Zeros elsewhere; the stored dtype is kept.

    Raises UserError where the stored states are of another length than the document.
    """
    fields: dict[str, Tensor] = {}
    for b, (ids, document_T) in enumerate(zip(batch.row_ids, batch.document_BT.tolist(), strict=True)):
        start = 0
        for place, document_id in enumerate(ids):
            stored = read(document_id)
            length = document_T.count(place)
            for name, values in (
                ("aux_hidden_BTAH", stored.aux_hidden),
                ("last_hidden_BTH", stored.last_hidden),
                ("target_lse_BT", stored.target_lse),
            ):
                if values is None:
                    continue
                if len(values) not in (length, length - 1):
                    raise UserError(
                        f"stored features of document {document_id!r} cover {len(values)} positions but it has "
                        f"{length} tokens; delete the features directory and run the features stage again"
                    )
                if name not in fields:
                    fields[name] = torch.zeros(*batch.input_ids_BT.shape, *values.shape[1:], dtype=values.dtype)
                fields[name][b, start : start + len(values)] = values
            start += length
    device = batch.input_ids_BT.device
    moved: dict[str, Any] = {name: values.to(device) for name, values in fields.items()}
    return replace(batch, **moved)
