"""Sources of a recipe -> conversations, with every row that cannot be used counted by its reason."""

from __future__ import annotations

import gzip
import json
import random
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, replace
from itertools import islice
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, Literal

from spec_train.assets import resolve_path
from spec_train.data.rows import Conversation, DropReason, conversation_from_row, usable_as_is, usable_for_answers
from spec_train.errors import UserError
from spec_train.manifest import atomic_write_json_lines
from spec_train.packages import package_file

if TYPE_CHECKING:
    from spec_train.recipe import Source

Split = Literal["train", "validation", "held_out"]
SPLITS: tuple[Split, ...] = ("train", "validation", "held_out")
MOST_VALIDATION = 500  # rows of a fraction: enough to tell checkpoints apart, and a pass over them stays cheap

__all__ = [
    "Conversation",
    "DropReason",
    "check_drops",
    "load_conversations",
    "read_conversations",
    "split_conversations",
    "with_unique_ids",
    "write_conversations",
]


def load_conversations(
    sources: Sequence[Source],
    *,
    mode: Literal["regenerate", "keep"] = "regenerate",
    max_drop_rate: float = 0.5,
    seed: int = 0,
    notes: Counter[str] | None = None,
) -> tuple[list[Conversation], Counter[str]]:
    """Read all sources in order. `mode` is `responses.mode`: what is cut off and what counts as usable follow from it.

    Returns the conversations (ids unique) and how many rows were dropped for which reason; a reason names the first
    place where it occurred. `notes` counts the commonest keys of messages that are not read, once a row. Raises
    UserError for a broken line, too many dropped rows, or nothing left.
    """
    usable = usable_for_answers if mode == "regenerate" else usable_as_is
    kept: list[Conversation] = []
    dropped: Counter[str] = Counter()
    ignored: Counter[str] = Counter()
    first_place: dict[str, str] = {}
    for index, source in enumerate(sources):
        label, rows = _open_source(source)
        found: list[Conversation] = []
        for number, row in islice(rows, source.limit):
            conversation = conversation_from_row(row, format=source.format, field=source.field, ignored=ignored)
            if isinstance(conversation, Conversation):
                conversation = usable(conversation)
            if isinstance(conversation, DropReason):
                dropped[conversation] += 1
                first_place.setdefault(conversation, f"{label}:{number}")
                continue
            name = conversation.id or f"{Path(label).name}-{number}"
            category = source.category or conversation.category
            found.append(replace(conversation, id=name, category=category, source=label))
        kept += _weighted(found, source.weight, random.Random(f"{seed}-{index}"))
    reasons = Counter({f"{reason} (first: {first_place[reason]})": count for reason, count in dropped.items()})
    check_drops(len(kept), reasons, max_drop_rate, "data.sources")
    if notes is not None:
        notes.update({f"rows whose messages have {key!r}, which is not read": n for key, n in ignored.most_common(10)})
    return with_unique_ids(kept), reasons


def check_drops(kept: int, dropped: Counter[str], max_drop_rate: float, where: str) -> None:
    """Raise UserError, listing the reasons, where nothing is left or more than `max_drop_rate` of the rows is lost."""
    lost = sum(dropped.values())
    reasons = "; ".join(f"{count} x {reason}" for reason, count in dropped.most_common(6))
    if kept == 0:
        raise UserError(f"{where}: no usable row is left ({reasons or 'the sources are empty'})")
    if lost > max_drop_rate * (kept + lost):
        raise UserError(
            f"{where}: {lost} of {kept + lost} rows cannot be used, more than data.max_drop_rate {max_drop_rate:g} "
            f"allows: {reasons}"
        )


def split_conversations(
    conversations: Sequence[Conversation], *, held_out: float | int, validation: float | int, seed: int
) -> dict[Split, list[Conversation]]:
    """The conversations of each split, disjoint, each in the order given.

    `held_out` and `validation`: a fraction below 1, or a count. Held-out rows are reported on and seen by nothing
    else; validation rows come out of the others and decide which checkpoint is best. A fraction for validation takes
    at most MOST_VALIDATION rows, and none where all the rest have one prompt. Rows whose first user turns are the same
    (blanks and case aside) stay in one split, since they begin with the same prompt and so with the same answer.

    Raises UserError where nothing would be left to train on, or the rows repeat too much to hold any out.
    """
    rest, reported = _split_off(conversations, held_out, "held_out", random.Random(f"held-out-{seed}"))
    if 0 < validation < 1:
        repeats = Counter(map(_prompt_key, rest))
        most = min(round(validation * len(rest)), MOST_VALIDATION)
        validation = max(most, min(repeats.values())) if len(repeats) > 1 else 0
    training, chosen_on = _split_off(rest, validation, "validation", random.Random(f"validation-{seed}"))
    return {"train": training, "validation": chosen_on, "held_out": reported}


def _split_off(
    conversations: Sequence[Conversation], part: float | int, name: str, generator: random.Random
) -> tuple[list[Conversation], list[Conversation]]:
    """(the rest, about `part` of them); rows with one prompt stay together. `name` is the option's, for errors."""
    total = len(conversations)
    wanted = max(1, round(part * total)) if 0 < part < 1 else int(part)
    if wanted == 0:
        return list(conversations), []
    if wanted >= total:
        raise UserError(f"data.{name} asks for {wanted} conversations and there are {total}; ask for fewer")
    groups: dict[str, list[int]] = {}
    for index, conversation in enumerate(conversations):
        groups.setdefault(_prompt_key(conversation), []).append(index)
    keys = list(groups)
    generator.shuffle(keys)
    chosen: set[int] = set()
    for key in keys:
        if len(chosen) + len(groups[key]) <= wanted:
            chosen.update(groups[key])
    if not chosen:
        raise UserError(f"data.{name}: every prompt occurs more than {wanted} times, so none can be held out whole")
    rest = [conversation for index, conversation in enumerate(conversations) if index not in chosen]
    return rest, [conversations[index] for index in sorted(chosen)]


def write_conversations(path: Path, conversations: Iterable[Conversation]) -> int:
    """Write one JSON object a line, atomically; returns how many."""
    return atomic_write_json_lines(path, (asdict(one) for one in conversations))


def read_conversations(path: Path) -> list[Conversation]:
    """Read what `write_conversations` wrote. Raises UserError naming a broken line."""
    conversations = []
    for number, row in _json_lines(path):
        try:
            conversations.append(Conversation(**row))
        except TypeError:
            raise UserError(f"{path}:{number}: not a conversation; run the prompts stage again") from None
    return conversations


def _prompt_key(conversation: Conversation) -> str:
    """What rows of one split share: plain text, or what the user says first. A longer conversation that begins with
    the prompt of a shorter one yields the same first document."""
    asked = (message["content"] for message in conversation.messages if message["role"] == "user")
    first = conversation.text if conversation.text is not None else next(asked, "")
    return " ".join(first.lower().split())


def _weighted(conversations: list[Conversation], weight: float, generator: random.Random) -> list[Conversation]:
    """`weight` copies of each on average: whole copies of all, and a random part for the fraction."""
    whole = int(weight)
    extra = set(generator.sample(range(len(conversations)), round((weight - whole) * len(conversations))))
    return [c for index, c in enumerate(conversations) for _ in range(whole + (index in extra))]


def with_unique_ids(conversations: list[Conversation]) -> list[Conversation]:
    """The same conversations; an id that occurred before gets `#2`, `#3` and so on."""
    seen: set[str] = set()
    unique = []
    for conversation in conversations:
        name, repeat = conversation.id, 2
        while name in seen:
            name, repeat = f"{conversation.id}#{repeat}", repeat + 1
        seen.add(name)
        unique.append(replace(conversation, id=name))
    return unique


# ------------------------------------------------------------------------------------------------ reading rows


def _open_source(source: Source) -> tuple[str, Iterator[tuple[int, Any]]]:
    """(label, rows numbered from 1) of a source."""
    if source.hub is not None:
        return source.hub, _hub_rows(source.hub, source.split)
    if source.path is not None:
        return source.path, _file_rows(resolve_path(source.path))
    if source.package is None or source.member is None:
        raise UserError("a source needs one of path, hub, or package with member")
    return f"{source.package}/{source.member}", _file_rows(package_file(source.package, source.member, source.sha256))


def _file_rows(path: Path) -> Iterator[tuple[int, Any]]:
    """Rows of a .jsonl, .json or .parquet file, the first two also gzipped. JSON never goes through Arrow, which wants
    one type a column and so fails on mixed tool arguments."""
    if not path.is_file():
        raise UserError(f"{path}: no such file; data.sources.path must name a .jsonl, .json or .parquet file")
    kind = path.name.removesuffix(".gz")
    if kind.endswith(".jsonl"):
        return _json_lines(path)
    if kind.endswith(".json"):
        return _json_array(path)
    if kind.endswith(".parquet") and kind == path.name:
        return _parquet_rows(path)
    raise UserError(f"{path}: unknown kind of file; give .jsonl, .json or .parquet (JSON may be gzipped)")


def _open_text(path: Path) -> IO[str]:
    return (
        gzip.open(path, "rt", encoding="utf-8-sig") if path.name.endswith(".gz") else open(path, encoding="utf-8-sig")
    )


def _json_lines(path: Path) -> Iterator[tuple[int, Any]]:
    number = 0
    try:
        with _open_text(path) as file:
            for number, line in enumerate(file, 1):
                if line.strip():
                    yield number, json.loads(line)
    except UnicodeDecodeError as error:
        raise UserError(f"{path}: not UTF-8 text after line {number} ({error.reason}); save it as UTF-8") from None
    except (ValueError, RecursionError, OSError, EOFError) as error:
        raise UserError(f"{path}:{number}: not a line of JSON ({error}); mend or remove it") from None


def _json_array(path: Path) -> Iterator[tuple[int, Any]]:
    """A JSON array of rows; a .json file that does not start with a bracket is read as JSON lines."""
    try:
        with _open_text(path) as file:
            first = " "
            while first and first.isspace():
                first = file.read(1)
            file.seek(0)
            rows = json.load(file) if first == "[" else None
    except (ValueError, RecursionError, OSError, EOFError) as error:
        raise UserError(f"{path}: not valid JSON ({error}); save it as UTF-8, one array of rows") from None
    yield from _json_lines(path) if rows is None else enumerate(rows, 1)


def _parquet_rows(path: Path) -> Iterator[tuple[int, Any]]:
    try:
        import pyarrow  # type: ignore[import-untyped]
        import pyarrow.parquet  # type: ignore[import-untyped]
    except ImportError:
        raise UserError(f"{path}: reading Parquet needs pyarrow: pip install pyarrow") from None
    try:
        table = pyarrow.parquet.ParquetFile(path)
        rows = (row for batch in table.iter_batches() for row in batch.to_pylist(maps_as_pydicts="lossy"))
        yield from enumerate(map(_without_nulls, rows), 1)
    except (pyarrow.ArrowException, OSError) as error:
        raise UserError(f"{path}: not a readable Parquet file ({str(error).splitlines()[0]})") from None


def hub_rows(name: str, split: str) -> int | None:
    """How many rows a split of a Hub data set has, without fetching them; None where it does not say. Raises
    UserError."""
    import datasets

    repository, _, config = name.partition(":")
    try:
        splits = datasets.load_dataset_builder(repository, config or None).info.splits or {}
    except (OSError, ValueError, datasets.exceptions.DatasetsError) as error:
        reason = str(error).strip().splitlines()[0]
        raise UserError(f"data.sources.hub {name}: cannot be reached ({reason})") from None
    if splits and split not in splits:
        raise UserError(f"data.sources.hub {name}: has no split {split}; it has {', '.join(splits)}")
    return splits[split].num_examples if splits else None


def _hub_rows(name: str, split: str) -> Iterator[tuple[int, Any]]:
    """Rows of a Hub data set, given as `owner/name` or `owner/name:config`."""
    try:
        import datasets
    except ImportError:
        raise UserError(f"data.sources.hub {name}: needs the datasets package: pip install datasets") from None
    repository, _, config = name.partition(":")
    try:
        rows = datasets.load_dataset(repository, config or None, split=split)
    except (OSError, ValueError, datasets.exceptions.DatasetsError) as error:
        reason = str(error).strip().splitlines()[0]
        raise UserError(f"data.sources.hub {name}, split {split}: cannot be loaded ({reason})") from None
    yield from enumerate(map(_without_nulls, rows), 1)


def _without_nulls(value: Any) -> Any:
    """A row as it was before Arrow, which gives every struct of a column the same keys and fills those that a row
    lacks with null: tools would show each other's parameters. A null that the data meant is lost with them."""
    if isinstance(value, dict):
        return {key: _without_nulls(item) for key, item in value.items() if item is not None}
    if isinstance(value, list):
        return [_without_nulls(item) for item in value]
    return value
