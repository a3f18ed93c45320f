"""Stored hidden states: of the right target, precision and layers, and of these very tokens."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from spec_train.data.documents import Document
from spec_train.data.features import DocumentFeatures, FeatureReader, FeatureStore, StoreHeader, store_digest
from spec_train.errors import UserError

HEADER = StoreHeader("llama 123", "float32", (1, 2), 4, "float32")


def document(name: str, *ids: int) -> Document:
    return Document(name, list(ids), [(1, len(ids))])


def states(of: Document, value: float) -> DocumentFeatures:
    """Every number of them is `value`."""
    t = len(of.input_ids) - 1
    return DocumentFeatures(torch.full((t, 8), value), torch.full((t, 4), value), torch.full((t,), value))


def add(store: FeatureStore, shard: str, value: float, *documents: Document) -> None:
    store.add(shard, [(one, states(one, value)) for one in documents])


def value_of(store: FeatureStore | FeatureReader, of: Document) -> float:
    layers: Any = (HEADER.aux_layer_ids,) if isinstance(store, FeatureStore) else ()
    read = store.read(of.id, of.input_ids, *layers)
    assert read.last_hidden is not None and read.last_hidden.shape == (len(of.input_ids) - 1, 4)
    return float(read.last_hidden[0, 0])


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"target": "llama 124"}, "target = llama 123, the run needs llama 124"),
        ({"computed_in": "bfloat16"}, "computed_in = float32, the run needs bfloat16"),
        ({"dtype": "bfloat16"}, "dtype = float32, the run needs bfloat16"),
        ({"aux_layer_ids": (1, 3)}, r"aux_layer_ids = \(1, 2\), the run needs \(1, 3\)"),
        ({"hidden_size": 8}, "hidden_size = 4, the run needs 8"),
    ],
)
def test_states_of_something_else_are_refused(tmp_path: Path, change: dict[str, Any], said: str) -> None:
    add(FeatureStore(tmp_path, HEADER), "a", 1.0, document("a", 1, 2, 3))
    assert "a" in FeatureStore(tmp_path, HEADER)
    with pytest.raises(UserError, match=said):
        FeatureStore(tmp_path, replace(HEADER, **change))


def test_states_of_other_tokens_are_not_read(tmp_path: Path) -> None:
    """The same id and the same length do not make the same document."""
    captured, asked = document("a", 1, 2, 3, 9), document("a", 1, 2, 3, 5)
    store = FeatureStore(tmp_path, HEADER)
    add(store, "part", 1.0, captured)
    assert value_of(store, captured) == 1.0
    with pytest.raises(UserError, match=r"features of document 'a' are of other tokens.*--force features"):
        value_of(store, asked)


def test_of_several_stores_the_one_with_these_tokens_is_read(tmp_path: Path) -> None:
    captured, asked = document("a", 1, 2, 3, 9), document("a", 1, 2, 3, 5)
    stores = [FeatureStore(tmp_path / name, HEADER) for name in ("captured", "computed")]
    reader = FeatureReader(stores, HEADER.aux_layer_ids)
    add(stores[0], "part", 1.0, captured)
    assert reader.missing([asked]) == [asked]
    add(stores[1], "part", 2.0, asked)
    assert reader.missing([asked]) == []
    assert value_of(reader, asked) == 2.0
    with pytest.raises(UserError, match="of other tokens"):
        value_of(reader, document("a", 1, 2, 3, 7))


def test_the_newest_states_win_after_opening_again_too(tmp_path: Path) -> None:
    """A resume with larger batches writes other documents under a name that is already there."""
    a, b, c = document("a", 1, 2, 3), document("b", 4, 5, 6), document("c", 7, 8, 9)
    store = FeatureStore(tmp_path, HEADER)
    add(store, "part-0", 1.0, a)
    add(store, "part-1", 1.0, b, c)
    add(store, "part-0", 2.0, a, b)
    for opened in (store, FeatureStore(tmp_path, HEADER)):
        assert [value_of(opened, one) for one in (a, b, c)] == [2.0, 2.0, 1.0]
    add(store, "part-0", 3.0, a, b, c)  # now nothing of the other shard is left
    assert sorted(path.name for path in tmp_path.glob("*.safetensors")) == ["part-0.safetensors"]
    opened = FeatureStore(tmp_path, HEADER)
    assert [value_of(opened, one) for one in (a, b, c)] == [3.0, 3.0, 3.0]
    add(opened, "part-0", 4.0, a)
    assert [one in FeatureStore(tmp_path, HEADER) for one in "abc"] == [True, False, False]


def test_the_digest_of_a_store_is_that_of_its_contents(tmp_path: Path) -> None:
    digests = []
    for name, value in (("one", 1.0), ("two", 1.0), ("three", 2.0)):
        add(FeatureStore(tmp_path / name, HEADER), "part", value, document("a", 1, 2, 3))
        digests.append(store_digest(tmp_path / name))
    assert digests[0] == digests[1] != digests[2]
    assert store_digest(tmp_path / "none") is None
