"""The reduced vocabulary of a draft and its two maps."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch

from spec_train.data.documents import Document
from spec_train.data.draft_vocab import choose_draft_vocab, coverage, d2t, t2d
from spec_train.errors import UserError

PAD, BOS, EOS = 0, 1, 2
# Responses use 10 (three times), 11 (twice), 12 and 13 (once, 13 also in the prompt); 20 and 21 are prompt only.
DOCUMENTS = [
    Document("a", [BOS, 20, 20, 13, 10, 11, 10], [(4, 7)]),
    Document("b", [BOS, 21, 20, 11, 12, 10, 13], [(3, 7)]),
]


def choose(size: Any, *, vocab: int = 320, tokenizer_len: int = 320) -> list[int]:
    ids = choose_draft_vocab(DOCUMENTS, vocab, size, special_ids=[EOS], tokenizer_len=tokenizer_len)
    assert ids.dtype == torch.int64
    return ids.tolist()


def test_frequent_response_tokens_first_ties_by_prompt_then_lowest_id() -> None:
    assert choose(1) == [EOS]
    assert choose(3) == [EOS, 10, 11]
    assert choose(4) == [EOS, 10, 11, 13]
    assert choose(6) == [EOS, 10, 11, 12, 13, 20]
    # Seen in prompts: 20 three times, bos twice, 21 once; then the lowest ids that nothing uses.
    assert choose(10) == [PAD, BOS, EOS, 3, 10, 11, 12, 13, 20, 21]


def test_more_ids_than_were_seen_are_filled(caplog: pytest.LogCaptureFixture) -> None:
    """V01: 200 entries from a handful of seen ids: unique, ascending, eos among them; the filler is told."""
    with caplog.at_level(logging.INFO):
        ids = choose(200)
    assert len(ids) == len(set(ids)) == 200
    assert ids == sorted(ids)
    assert EOS in ids
    assert "196 of 200 ids occur in no response" in caplog.text


def test_padding_rows_are_never_chosen(caplog: pytest.LogCaptureFixture) -> None:
    """V04, V09: tokenizer of 310 ids, 320 embedding rows."""
    ids = choose(320, tokenizer_len=310)
    assert ids == list(range(310))
    assert "310 ids instead of 320" in caplog.text


@pytest.mark.parametrize("size", [0, -1, 4.0, 321, True, None, "8"])
def test_nonsense_sizes_are_refused(size: Any) -> None:
    """V06."""
    with pytest.raises(UserError, match="draft_vocab_size must be a whole number from 1 to 320"):
        choose(size)


def test_stop_tokens_must_fit() -> None:
    with pytest.raises(UserError, match="cannot hold the 3 tokens"):
        choose_draft_vocab(DOCUMENTS, 320, 2, special_ids=[0, 1, 2], tokenizer_len=320)


def test_maps_are_offsets_and_membership() -> None:
    """V02."""
    ids = torch.tensor([0, 2, 5, 9])
    assert d2t(ids).tolist() == [0, 1, 3, 6]
    assert d2t(ids).dtype == torch.int64
    assert (torch.arange(4) + d2t(ids)).tolist() == ids.tolist()
    assert t2d(ids, 12).dtype == torch.bool
    assert t2d(ids, 12).nonzero().flatten().tolist() == ids.tolist()
    assert d2t(torch.arange(7)).tolist() == [0] * 7


def test_coverage_counts_response_tokens_only(caplog: pytest.LogCaptureFixture) -> None:
    assert coverage(DOCUMENTS, torch.tensor([10, 11])) == 5 / 7
    assert coverage(DOCUMENTS, [20, 21]) == 0
    assert coverage([], [1]) == 1
    choose(3)
    assert "3 ids cover only 71.4% of the response tokens" in caplog.text
    caplog.clear()
    choose(8)
    assert "cover only" not in caplog.text
