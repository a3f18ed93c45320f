"""Packing: which documents share a micro-batch, and the tensors they become.

Shape legend: B rows, T tokens in a row, t tokens of one document, A aux layers, H hidden size.
A plan is a list of optimiser steps, a step a list of micro-batches, a micro-batch a list of rows, a row the indices of
the documents packed into it.
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

WINDOW_STEPS = 32  # about so many steps share a window: documents are sorted by length only inside it
WIDE = 1024  # rows up to this width have room for two of their longest documents, see row_shape


def plan_epoch(
    lengths: Sequence[int],
    supervised: Sequence[int],
    *,
    micro_batch_tokens: int,
    seed: int,
    epoch: int,
    per_step: int = 1,
) -> list[list[Rows]]:
    """The optimiser steps of one epoch, each document in exactly one of them. A step is `per_step` micro-batches.

    lengths             tokens of each document, at least 1
    supervised          tokens of each document that count in the loss
    micro_batch_tokens  the most rows x width of a micro-batch; a longer document gets a micro-batch of its own
    per_step            gradient accumulation steps x processes. A step without documents for so many has empty
                        micro-batches (`[]`), which build_batch turns into work of weight zero: every process takes part
                        in every step.

    Steps are of like size, the last one too: a loss is a mean over a step, so a token of a small step would weigh more.
    The documents of a window are dealt out to as few steps as hold them, in groups of like length, one of each group
    to every step, and the most supervised document of a group to the step that has the least. Documents that do not
    fit into a row beside others, or hold a large part of a step's supervised tokens, leave differences.

    Depends on nothing but its arguments, so a resumed run sees the very same epoch.
    """
    for index, length in enumerate(lengths):
        if length < 1:
            raise UserError(f"document {index} has no tokens; leave it out of the data")
    rng = random.Random(f"plan {seed} {epoch}")
    capacity = per_step * micro_batch_tokens
    steps: list[_Step] = []
    for window in _windows(lengths, WINDOW_STEPS * capacity, rng):
        count = -(-sum(min(lengths[index], micro_batch_tokens) for index in window) // capacity)
        while (dealt := _deal(window, count, lengths, supervised, micro_batch_tokens, per_step, rng)) is None:
            count += 1
        steps.extend(dealt)
    rng.shuffle(steps)
    return [step.micro_batches(rng) for step in steps]


def row_shape(length: int, micro_batch_tokens: int) -> tuple[int, int]:
    """Rows of a micro-batch, and their width at most, where `length` is the longest document in it.

    A row as wide as its longest document rarely holds two of like length, and every fifth token becomes padding, so
    short ones get rows for two. Long ones do not: attention grows with the width.
    """
    rows = max(1, micro_batch_tokens // (2 * length if 2 * length <= WIDE else length))
    return rows, max(length, micro_batch_tokens // rows)


def _windows(lengths: Sequence[int], window_tokens: int, rng: random.Random) -> list[list[int]]:
    """All documents in random order, cut into windows of equal tokens, `window_tokens` or up to twice as many."""
    order = list(range(len(lengths)))
    rng.shuffle(order)
    total, before = sum(lengths), 0
    windows: list[list[int]] = [[] for _ in range(max(1, total // window_tokens))]
    for index in order:
        windows[before * len(windows) // total].append(index)
        before += lengths[index]
    return [window for window in windows if window]  # one document may be longer than a window


def _deal(
    window: list[int],
    count: int,
    lengths: Sequence[int],
    supervised: Sequence[int],
    micro_batch_tokens: int,
    per_step: int,
    rng: random.Random,
) -> list[_Step] | None:
    """The documents of a window in `count` steps of like size; None where they do not fit."""
    by_length = sorted(window, key=lambda index: -lengths[index])
    groups = [by_length[start : start + count] for start in range(0, len(by_length), count)]
    steps = [_Step(per_step, micro_batch_tokens) for _ in range(count)]
    for place, group in enumerate(groups):
        rng.shuffle(group)
        rng.shuffle(steps)
        # Every other group stays shuffled: where one window holds all documents, epochs would else put the same ones
        # together. The last group evens out.
        if (len(groups) - place) % 2:
            group.sort(key=lambda index: -supervised[index])
            steps.sort(key=lambda step: step.supervised)
        for index, step in zip(group, steps, strict=False):  # the last group may be smaller
            if step.add(index, lengths[index], supervised[index]):
                continue
            others = sorted(steps, key=lambda step: step.supervised)
            if not any(other.add(index, lengths[index], supervised[index]) for other in others):
                return None
    return steps


class _Step:
    """An optimiser step that is being filled, longest documents first: each goes to the fullest row with room for it
    in the first micro-batch that has one, or opens the next micro-batch."""

    def __init__(self, per_step: int, micro_batch_tokens: int) -> None:
        self.per_step, self.micro_batch_tokens = per_step, micro_batch_tokens
        self.supervised = 0
        self._rows: list[Rows] = []  # by micro-batch, rows that are still empty included
        self._free: list[list[int]] = []  # tokens left in each of these rows

    def add(self, index: int, length: int, supervised: int) -> bool:
        """Put the document in where it fits, and say whether it did."""
        place = next((place for place, free in enumerate(self._free) if max(free) >= length), len(self._free))
        if place == self.per_step:
            return False
        if place == len(self._free):
            rows, width = row_shape(length, self.micro_batch_tokens)
            self._rows.append([[] for _ in range(rows)])
            self._free.append([width] * rows)
        free = self._free[place]
        row = min((row for row, space in enumerate(free) if space >= length), key=lambda row: free[row])
        self._rows[place][row].append(index)
        free[row] -= length
        self.supervised += supervised
        return True

    def micro_batches(self, rng: random.Random) -> list[Rows]:
        """`per_step` of them in random order, so that no process always has the longest documents, or none."""
        found: list[Rows] = [[row for row in rows if row] for rows in self._rows]
        found += [[] for _ in range(self.per_step - len(found))]
        rng.shuffle(found)
        return found


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
    return add_features(batch, lambda document_id, _: features(by_id[document_id]))


def _loss_weights(document: Document, normalization: Normalization) -> Tensor:
    """float32 [t]: 1 (or 1/number of response tokens) at response tokens, 0 elsewhere."""
    weights = torch.zeros(len(document.input_ids), dtype=torch.float32)
    for start, end in document.spans:
        weights[start:end] = 1.0
    if normalization == "sequence":
        weights /= weights.sum().clamp(min=1.0)
    return weights


def add_features(batch: Batch, read: Callable[[str, list[int]], DocumentFeatures]) -> Batch:
    """`batch` with stored hidden states: `read(document id, its tokens)` gives tensors over t positions of that
    document, where t is its length or one less (nothing is predicted from the last token). Zeros elsewhere; the stored
    dtype is kept.

    Raises UserError where the stored states are of another length than the document.
    """
    fields: dict[str, Tensor] = {}
    logits_dtype: torch.dtype | None = None
    for b, (ids, document_T) in enumerate(zip(batch.row_ids, batch.document_BT.tolist(), strict=True)):
        start = 0
        for place, document_id in enumerate(ids):
            length = document_T.count(place)
            stored = read(document_id, batch.input_ids_BT[b, start : start + length].tolist())
            logits_dtype = getattr(stored, "logits_dtype", None)
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
    return replace(batch, logits_dtype=logits_dtype, **moved)
