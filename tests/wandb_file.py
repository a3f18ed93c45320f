"""Read what W&B wrote offline: records of its own protocol in a `.wandb` file, which is framed as a LevelDB log."""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

BLOCK, HEADER, FIRST, LAST = 32768, 7, 2, 4  # fragment kinds: 1 whole, 2 first, 3 middle, 4 last


@dataclass
class OfflineRun:
    """One process's part of a run: `history` rows hold "_step"; `config` as it stood in the end."""

    run_id: str = ""
    project: str = ""
    name: str = ""
    config: dict[str, Any] = field(default_factory=dict)
    history: list[dict[str, float]] = field(default_factory=list)


def read_offline_runs(directory: Path) -> list[OfflineRun]:
    """The runs of `directory`/wandb in the order they were started."""
    return [_read(path) for path in sorted((directory / "wandb").glob("offline-run-*/*.wandb"))]


def _read(path: Path) -> OfflineRun:
    from wandb.proto.wandb_internal_pb2 import Record

    run = OfflineRun()
    for data in _records(path.read_bytes()):
        record = Record()
        record.ParseFromString(data)
        kind = record.WhichOneof("record_type")
        if kind == "run":
            run.run_id, run.project, run.name = record.run.run_id, record.run.project, record.run.display_name
            updates = record.run.config.update
        elif kind == "config":
            updates = record.config.update
        else:
            updates = []
        run.config |= {item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in updates}
        if kind == "history":
            row = {"/".join(i.nested_key) or i.key: json.loads(i.value_json) for i in record.history.item}
            run.history.append({**row, "_step": record.history.step.num})
    return run


def _records(data: bytes) -> Iterator[bytes]:
    parts: list[bytes] = []
    place = HEADER  # the file starts with W&B's own header, as long as one of a fragment
    while place + HEADER <= len(data):
        if BLOCK - place % BLOCK < HEADER:  # what is left of a block is padding
            place += BLOCK - place % BLOCK
            continue
        length, kind = struct.unpack_from("<HB", data, place + 4)
        if kind == 0 or place + HEADER + length > len(data):
            return
        parts.append(data[place + HEADER : place + HEADER + length])
        place += HEADER + length
        if kind not in (FIRST, 3):
            yield b"".join(parts)
            parts = []
