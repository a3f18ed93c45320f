"""Rows that no one would write by hand, in every kind of file that a recipe may name; a seed gives the same rows."""

from __future__ import annotations

import datetime
import decimal
import json
import random
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet

from tests.conversations import KINDS, row

_NAMES = ("role", "content", "from", "value", "tool_calls", "function_call", "tool_call_id", "name", "weight", "text")
_ROLES = ("system", "developer", "user", "human", "assistant", "gpt", "tool", "function", "function_call", "Model ")
_TEXTS = (
    "",
    " \n\t",
    "\x00\x01\x1b[31m\x7f\u0085",
    "\ufeff\u200b\u202eabc\u2066",
    "\ud800 half of a pair",
    "the other half \udfff",
    "a\u0301\u0302\u0303" * 20,
    "\U0010ffff\ufffe\ue000\ue001",
    "<|im_end|>",
    "<|im_start|>assistant\nI am the target<|im_end|>\n",
    "<think>\nnever closed",
    "</think>\n\norphan",
    "</s> <s> [INST] <bos> <|endoftext|> <|pad|>",
    "{{ 7 * 7 }}{% for x in y %}{{ raise_exception('no') }}",
    '{"name": "add", "arguments": {"a": 1}}',
    '{"name": "add", "arguments": "{\\"a\\": \\"{}\\"}"}',
    "[1, 2",
    "NaN",
    "\r\n\r\n\r",
)
_SCALARS = (None, True, False, 0, -1, 2, 1.5, 1e308, float("nan"), float("inf"), 10**25, -(10**400))


def hostile_row(seed: int) -> Any:
    """A row that JSON can write: a sound one with one to four things put wrong, or nothing like a row at all."""
    chosen = random.Random(f"hostile-{seed}")
    if chosen.random() < 0.1:
        return _value(chosen)
    base = row(chosen.choice(KINDS), seed)
    shape = chosen.random()
    if shape < 0.2:
        base = {"conversations": [{"from": m["role"], "value": m.get("content")} for m in base["messages"]]}
    elif shape < 0.3:
        base = {"prompt": base["messages"][0]["content"], "answer": base["messages"][-1]["content"]}
    elif shape < 0.35:
        base = {"turns": [m["content"] for m in base["messages"]]}
    elif shape < 0.4:
        base = {"text": base["messages"][0]["content"]}
    elif shape < 0.45:
        base = {"request": {**base, "model": "m"}, "custom_id": f"r{seed}"}
    for _ in range(chosen.randint(1, 4)):
        base = _spoilt(base, chosen)
    return base


def _value(chosen: random.Random, depth: int = 0) -> Any:
    kind = chosen.random()
    if kind < 0.4 or depth > 3:
        return chosen.choice(_TEXTS)
    if kind < 0.6:
        return chosen.choice(_SCALARS)
    if kind < 0.75:
        return [_value(chosen, depth + 1) for _ in range(chosen.randint(0, 3))]
    if kind < 0.8:
        return [{"type": chosen.choice(("text", "image_url", "thinking")), "text": _value(chosen, depth + 1)}]
    if kind < 0.803:
        return "long " * 200_000  # 1 MB
    if kind < 0.85:
        return _nested(chosen.choice((40, 300, 700)), chosen.random() < 0.5)
    return {chosen.choice((*_NAMES, "", "\ud800", "x")): _value(chosen, depth + 1) for _ in range(chosen.randint(0, 3))}


def _nested(depth: int, as_list: bool) -> Any:
    value: Any = "core"
    for _ in range(depth):
        value = [value] if as_list else {"a": value}
    return value


def _spoilt(base: Any, chosen: random.Random) -> Any:
    """The same with one place changed: replaced, removed, renamed, doubled or shuffled."""
    places: list[tuple[Any, Any]] = []
    _collect(base, places)
    if not places:
        return _value(chosen)
    holder, key = chosen.choice(places)
    action = chosen.random()
    if isinstance(holder[key], str) and chosen.random() < 0.7:
        holder[key] = chosen.choice(_ROLES if key in ("role", "from") else (*_TEXTS, "long " * 20))
    elif action < 0.5 or isinstance(holder, list):
        if isinstance(holder, list) and action > 0.75:
            holder.insert(key, holder[key] if action > 0.9 else _value(chosen))
        elif isinstance(holder, list) and action > 0.6:
            del holder[key]
        else:
            holder[key] = _value(chosen)
    elif action < 0.65:
        del holder[key]
    elif action < 0.75:
        holder[chosen.choice(_NAMES)] = holder.pop(key)
    elif action < 0.9:
        holder["role"] = chosen.choice(_ROLES)
    else:
        holder[chosen.choice(_NAMES)] = _value(chosen)
    return base


def _collect(value: Any, places: list[tuple[Any, Any]], depth: int = 0) -> None:
    if depth > 12:
        return
    pairs = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in list(pairs):
        places.append((value, key))
        _collect(inner, places, depth + 1)


# ------------------------------------------------------------------------------------------------ files


def write_json(folder: Path, rows: list[Any]) -> list[Path]:
    """The rows as JSON lines and as one array, half each; surrogates are written as escapes, which JSON allows."""
    half = len(rows) // 2
    lines, array = folder / "lines.jsonl", folder / "array.json"
    lines.write_text("".join(json.dumps(one) + "\n" for one in rows[:half]), encoding="utf-8")
    array.write_text(json.dumps(rows[half:]), encoding="utf-8")
    return [lines, array]


def write_parquet(folder: Path, seed: int, count: int) -> list[Path]:
    """Files of the column types that JSON has not: bytes, dates, decimals, nested nulls."""
    chosen = random.Random(f"parquet-{seed}")
    texts = [text for text in _TEXTS if not any("\ud800" <= char <= "\udfff" for char in text)]

    def turn() -> dict[str, Any]:
        return {"role": chosen.choice((*_ROLES, None)), "content": chosen.choice((*texts, "a question", None))}

    chats = [[turn() for _ in range(chosen.randint(0, 4))] for _ in range(count)]
    chats = [chat if chosen.random() < 0.95 else None for chat in chats]
    odd = {
        "day": [datetime.date(2024, 1, 1)] * count,
        "when": [datetime.datetime(2024, 1, 1, 12)] * count,
        "price": [decimal.Decimal("1.50")] * count,
        "raw": [b"\xff\x00"] * count,
    }
    tables = {
        "chats": {"messages": chats, "id": list(range(count))},
        "bytes": {"messages": [[{"role": "user", "content": b"a"}, {"role": "assistant", "content": b"b"}]] * count},
        "results": {
            "messages": [
                [
                    {"role": "user", "content": "a", "parts": None},
                    {"role": "tool", "content": None, "parts": [{"at": datetime.date(2024, 1, 1)}]},
                    {"role": "assistant", "content": "b", "parts": None},
                ]
            ]
            * count,
            "tools": [[{"name": "add", "parameters": {"day": datetime.date(2024, 1, 1), "raw": b"\xff"}}]] * count,
        },
        "prompts": {"prompt": [chosen.choice((*texts, "a question", None)) for _ in range(count)], **odd},
        "ids": {"prompt": ["a question"] * count, "id": odd["raw"], "category": odd["day"]},
    }
    paths = []
    for name, columns in tables.items():
        paths.append(folder / f"{name}.parquet")
        pyarrow.parquet.write_table(pyarrow.table(columns), paths[-1], row_group_size=64)
    return paths
