"""What each request of a run received, on disk: beside every result, and batch by batch while a run is under way.

`traces/<result>.jsonl`, one line a request:

    {"id", "conversation", "category", "prompt_tokens", "output_ids", "finish_reason",
     "cycles": [[num_drafted, accepted, kept, emitted], ...]}       # see `decoding.trace.Cycle`

While a run is under way its finished batches stand in `traces/.<result>.partial`: first the settings, then a line a
batch with whole requests and the seconds spent on them. A batch is a line, so one torn by a kill is simply done again.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from spec_train.decoding.engine import batches_of
from spec_train.decoding.trace import Cycle, DecodeTrace, RequestTrace, Timings
from spec_train.errors import UserError


@dataclass(frozen=True)
class TracedRequest:
    """A request as its trace tells it. `cycles`: (num_drafted, accepted, kept, emitted) of each round; `conversation`:
    see RequestTrace, "" in traces that were written before it was kept."""

    id: str
    category: str
    prompt_tokens: int
    output_ids: list[int]
    finish_reason: str
    cycles: list[tuple[int, int, int, int]]
    conversation: str = ""


def trace_path(result: Path) -> Path:
    """Where the trace of the result JSON `result` stands."""
    return result.parent / "traces" / f"{result.stem}.jsonl"


def write_trace(path: Path, requests: Iterable[RequestTrace]) -> None:
    """Write `requests` to `path`, whole or not at all."""
    lines = []
    for request in requests:
        cycles = [[len(c.drafts), c.accepted, c.kept, c.emitted] for c in request.cycles]
        lines.append(
            json.dumps(
                {
                    "id": request.id,
                    "conversation": request.conversation,
                    "category": request.category,
                    "prompt_tokens": len(request.prompt_ids),
                    "output_ids": request.output_ids,
                    "finish_reason": request.finish_reason,
                    "cycles": cycles,
                },
                ensure_ascii=False,
            )
        )
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    temporary.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    os.replace(temporary, path)


def read_trace(path: Path) -> list[TracedRequest]:
    """The requests of a trace. Raises UserError where the file is missing or a line is not one of a trace."""
    if not path.is_file():
        raise UserError(f"{path}: no trace; evaluate again to write one")
    requests = []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
        try:
            entry = json.loads(line)
            entry["cycles"] = [(int(a), int(b), int(c), int(d)) for a, b, c, d in entry["cycles"]]
            requests.append(TracedRequest(**entry))
        except (ValueError, TypeError, KeyError):
            raise UserError(f"{path}: line {number} is not a request of a trace; evaluate again") from None
    return requests


def partial_path(trace: Path) -> Path:
    """Where the finished batches of an unfinished `trace` stand."""
    return trace.with_name(f".{trace.stem}.partial")


def resumable_decode(
    decode: Callable[[list[int]], DecodeTrace],
    prompts: Sequence[Sequence[int]],
    batch_size: int,
    num_draft_tokens: int,
    *,
    partial: Path | None = None,
    settings: dict[str, Any] | None = None,
    on_progress: Callable[[int], None] | None = None,
) -> DecodeTrace:
    """Decode `prompts` a batch at a time with `decode(indices)`, which must seed by these indices.

    With `partial`, each finished batch is appended to that file; batches found there under the same `settings` are
    taken as they are, with the seconds they took. `on_progress` hears of their tokens only: `decode` reports its own.
    """
    found = _read_partial(partial, settings or {}) if partial else {}
    if partial and not found:
        partial.parent.mkdir(parents=True, exist_ok=True)
        partial.write_text(json.dumps({"settings": settings or {}}) + "\n", encoding="utf-8")
    requests: dict[int, RequestTrace] = {}
    timings = Timings()
    for chunk in batches_of(prompts, batch_size):
        batch = found.get(tuple(chunk))
        if batch is None:
            batch = decode(chunk)
            if partial:
                _append(partial, chunk, batch)
        elif on_progress:
            on_progress(sum(len(request.output_ids) for request in batch.requests))
        requests.update(zip(chunk, batch.requests, strict=True))
        for part in fields(Timings):
            setattr(timings, part.name, getattr(timings, part.name) + getattr(batch.timings, part.name))
    return DecodeTrace([requests[i] for i in range(len(prompts))], timings, num_draft_tokens, batch_size)


def _append(partial: Path, chunk: list[int], batch: DecodeTrace) -> None:
    entry = {"indices": chunk, "requests": [asdict(r) for r in batch.requests], "timings": asdict(batch.timings)}
    with partial.open("a", encoding="utf-8") as file:
        file.write(json.dumps(entry) + "\n")


def _read_partial(partial: Path, settings: dict[str, Any]) -> dict[tuple[int, ...], DecodeTrace]:
    """The whole batches of `partial`, if it was made under `settings`; a torn last line is cut off the file."""
    if not partial.is_file():
        return {}
    whole = partial.read_bytes()
    whole = whole[: whole.rfind(b"\n") + 1]
    lines = whole.decode("utf-8").splitlines()
    if not lines or json.loads(lines[0]).get("settings") != json.loads(json.dumps(settings)):
        return {}
    os.truncate(partial, len(whole))
    batches = {}
    for line in lines[1:]:
        entry = json.loads(line)
        requests = [
            RequestTrace(**{**request, "cycles": [Cycle(**cycle) for cycle in request["cycles"]]})
            for request in entry["requests"]
        ]
        batches[tuple(entry["indices"])] = DecodeTrace(requests, Timings(**entry["timings"]), 0, len(requests))
    return batches
