"""The store of hidden states on disk: sharded safetensors, one index, resumable, checked when opened.

A shard holds whole documents, under the document's id: `<id>/aux_hidden` [t, A*H] (absent where no aux layer is
stored), `<id>/last_hidden` [t, H], `<id>/target_lse` [t], with t = tokens - 1 (nothing is predicted from the last
token), and `<id>/input_ids` [t + 1], by which states and documents are matched. `index.json` lists what is complete: a
shard that it does not name, or whose size differs, does not exist.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from spec_train.data.documents import Document
from spec_train.errors import UserError
from spec_train.manifest import atomic_write_json, file_sha256, json_sha256

FORMAT_VERSION = 1
INDEX = "index.json"


@dataclass(frozen=True)
class DocumentFeatures:
    """States of one document, t = tokens - 1 positions: aux_hidden [t, A*H], last_hidden [t, H], target_lse [t], the
    last from logits that `logits_dtype` was multiplied in (see `Batch`)."""

    aux_hidden: Tensor | None
    last_hidden: Tensor | None
    target_lse: Tensor | None
    logits_dtype: torch.dtype | None = None


@dataclass(frozen=True)
class StoreHeader:
    """What the states are: a store is used only where every field agrees with what the run needs."""

    target: str
    computed_in: str
    aux_layer_ids: tuple[int, ...]
    hidden_size: int
    dtype: str
    version: int = FORMAT_VERSION

    def bytes_per_token(self) -> int:
        """Disk space of one position."""
        return bytes_per_position(len(self.aux_layer_ids), self.hidden_size, self.dtype)


class FeatureStore:
    """A directory of shards, written by `add`, read by `read`. Opening checks the header and the files' sizes."""

    def __init__(self, directory: Path, header: StoreHeader) -> None:
        self.directory, self.header = directory, header
        self._shards: dict[str, dict[str, Any]] = {}
        self._place: dict[str, str] = {}
        self._open: dict[str, Any] = {}
        index = _read_index(directory)
        if index is None:
            return
        recorded = {**index["header"], "aux_layer_ids": tuple(index["header"]["aux_layer_ids"])}
        for name, value in asdict(header).items():
            if recorded.get(name) != value:
                raise UserError(
                    f"{directory}: holds features with {name} = {recorded.get(name)}, the run needs {value}; "
                    "--force features makes them anew"
                )
        for name, shard in index["shards"].items():
            path = directory / name
            if path.is_file() and path.stat().st_size == shard["bytes"]:
                self._shards[name] = shard
                self._place.update(dict.fromkeys(shard["documents"], name))

    def __contains__(self, document_id: str) -> bool:
        return document_id in self._place

    def __len__(self) -> int:
        return len(self._place)

    @property
    def size(self) -> int:
        """Bytes on disk."""
        return sum(int(shard["bytes"]) for shard in self._shards.values())

    def add(self, name: str, rows: Iterable[tuple[Document, DocumentFeatures]]) -> None:
        """Write the shard `name`.safetensors: temporary file, rename, then the index. Replaces one of that name."""
        tensors: dict[str, Tensor] = {}
        ids = []
        for document, states in rows:
            ids.append(document.id)
            tensors[f"{document.id}/input_ids"] = torch.tensor(document.input_ids, dtype=torch.int32)
            for field in ("aux_hidden", "last_hidden", "target_lse"):
                value = getattr(states, field)
                if field == "aux_hidden" and not self.header.aux_layer_ids:
                    continue
                if value is None or len(value) != len(document.input_ids) - 1:
                    raise ValueError(f"{field} of {document.id}: {value if value is None else len(value)} positions")
                tensors[f"{document.id}/{field}"] = value.contiguous()
        file = f"{name}.safetensors"
        path, temporary = self.directory / file, self.directory / f"{file}.tmp"
        self.directory.mkdir(parents=True, exist_ok=True)
        save_file(tensors, temporary)
        temporary.replace(path)
        self._open.pop(file, None)
        emptied = self._withdraw(file, ids)
        self._shards[file] = {"documents": ids, "bytes": path.stat().st_size, "sha256": file_sha256(path)}
        self._place.update(dict.fromkeys(ids, file))
        atomic_write_json(self.directory / INDEX, {"header": asdict(self.header), "shards": self._shards})
        for old in emptied:
            (self.directory / old).unlink(missing_ok=True)

    def _withdraw(self, file: str, ids: Sequence[str]) -> list[str]:
        """Take out of the index what the shard `file` is going to replace: all that it held, and `ids` in every other
        one. Returns the shards that hold nothing any more."""
        held = self._shards[file]["documents"] if file in self._shards else []
        for document_id in held:
            self._place.pop(document_id, None)
        replaced, emptied = set(ids), []
        for old in {self._place[document_id] for document_id in replaced if document_id in self._place}:
            kept = [document_id for document_id in self._shards[old]["documents"] if document_id not in replaced]
            self._shards[old]["documents"] = kept
            if not kept:
                del self._shards[old]
                self._open.pop(old, None)
                emptied.append(old)
        return emptied

    def read(self, document_id: str, input_ids: Sequence[int], aux_layer_ids: tuple[int, ...]) -> DocumentFeatures:
        """The states of a document, of the stored aux layers those that are asked for. Raises UserError where the
        document is not there, or what is stored under its id was computed for other tokens."""
        shard = self._shard(document_id)
        if not self._of_these_tokens(document_id, input_ids):
            raise UserError(
                f"{self.directory}: the features of document {document_id!r} are of other tokens; "
                "`spec-train run RECIPE --force features` makes them anew"
            )
        aux = shard.get_tensor(f"{document_id}/aux_hidden") if aux_layer_ids else None
        if aux is not None and aux_layer_ids != self.header.aux_layer_ids:
            parts = dict(zip(self.header.aux_layer_ids, aux.split(self.header.hidden_size, dim=-1), strict=True))
            aux = torch.cat([parts[layer] for layer in aux_layer_ids], dim=-1)
        last, lse = (shard.get_tensor(f"{document_id}/{field}") for field in ("last_hidden", "target_lse"))
        return DocumentFeatures(aux, last, lse, getattr(torch, self.header.computed_in))

    def holds(self, document: Document) -> bool:
        """Whether the states stored under this id are those of these very tokens."""
        return document.id in self._place and self._of_these_tokens(document.id, document.input_ids)

    def _of_these_tokens(self, document_id: str, input_ids: Sequence[int]) -> bool:
        try:
            stored: list[int] = self._shard(document_id).get_tensor(f"{document_id}/input_ids").tolist()
        except SafetensorError:  # a kill came between the shard and the index: other documents of the same size
            return False
        return stored == list(input_ids)

    def _shard(self, document_id: str) -> Any:
        file = self._place.get(document_id)
        if file is None:
            raise UserError(f"{self.directory}: no features of document {document_id!r}; run the features stage again")
        if file not in self._open:
            self._open[file] = safe_open(self.directory / file, framework="pt")
        return self._open[file]


class FeatureReader:
    """Several stores as one; the first that holds the states of these very tokens gives them. `aux_layer_ids`: what the
    reader needs of the layers that the stores hold."""

    def __init__(self, stores: Sequence[FeatureStore], aux_layer_ids: tuple[int, ...]) -> None:
        self.stores, self.aux_layer_ids = stores, aux_layer_ids

    def missing(self, documents: Sequence[Document]) -> list[Document]:
        """Documents whose own states no store holds: absent, or stored for other tokens."""
        return [document for document in documents if not any(store.holds(document) for store in self.stores)]

    def read(self, document_id: str, input_ids: Sequence[int]) -> DocumentFeatures:
        """See `FeatureStore.read`."""
        document = Document(document_id, list(input_ids), [])
        store = next((store for store in self.stores if store.holds(document)), self.stores[-1])
        return store.read(document_id, input_ids, self.aux_layer_ids)


def store_digest(directory: Path) -> str | None:
    """A digest of everything in a store: its header and the checksums of its shards; None where there is no store."""
    index = _read_index(directory)
    if index is None:
        return None
    return json_sha256([index["header"], {name: shard["sha256"] for name, shard in index["shards"].items()}])


def bytes_per_position(aux_layers: int, hidden_size: int, dtype: str) -> int:
    """The states of one position: the stored layers and the last one in `dtype`, and a float32 for the logsumexp."""
    size: int = getattr(torch, dtype).itemsize
    return (aux_layers + 1) * hidden_size * size + 4


def free_disk(directory: Path) -> int:
    """Bytes free where `directory` is or will be."""
    existing = next(parent for parent in [directory.absolute(), *directory.absolute().parents] if parent.exists())
    return shutil.disk_usage(existing).free


def check_disk(directory: Path, header: StoreHeader, tokens: int) -> int:
    """Estimated bytes for `tokens` positions. Raises UserError before the first byte where the disk is too small."""
    needed = tokens * header.bytes_per_token()
    free = free_disk(directory)
    if needed > free:
        raise UserError(
            f"{directory}: features of {tokens} tokens need {needed / 1e9:.1f} GB and {free / 1e9:.1f} GB are free; "
            "choose features.mode online, fewer rows, or another run.output_dir"
        )
    return needed


def _read_index(directory: Path) -> dict[str, Any] | None:
    path = directory / INDEX
    if not path.is_file():
        return None
    try:
        index: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        version = index["header"]["version"]
    except (ValueError, KeyError, TypeError):
        raise UserError(f"{path}: not a feature index; remove {directory} to make it anew") from None
    if version != FORMAT_VERSION:
        raise UserError(f"{path}: format version {version}, this program writes {FORMAT_VERSION}; --force features")
    return index
