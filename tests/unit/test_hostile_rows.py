"""Hostile rows and files: every row is kept or dropped for a reason, every broken file is refused in one line."""

from __future__ import annotations

import gzip
import json
import resource
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from spec_train.data.chat import render, render_prompt
from spec_train.data.prompts import load_conversations, read_conversations, write_conversations
from spec_train.data.rows import DropReason
from spec_train.errors import UserError
from spec_train.recipe import Source
from tests.hostile import hostile_row, write_json, write_parquet
from tests.tiny import tiny_tokenizer

ROOT = Path(__file__).resolve().parents[2]
GOOD = '{"messages": [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]}\n'
CALLING = '{"role": "assistant", "tool_calls": [{"name": "f", "arguments": %s}]}'
CALL = '{"messages": [{"role": "user", "content": "q"}, ' + CALLING + "]}\n"


def account(folder: Path, first: int, count: int) -> Counter[str]:
    """Put rows `first` to `first + count` and some Parquet rows through both modes; how many ended in which way."""
    json_files = write_json(folder, [hostile_row(seed) for seed in range(first, first + count)])
    parquet_files = write_parquet(folder, first, 20)
    total = count + 20 * len(parquet_files)
    sources = [Source(path=str(path)) for path in (*json_files, *parquet_files)]
    tokenizer = tiny_tokenizer()
    ends: Counter[str] = Counter(rows=total)
    for mode in ("keep", "regenerate"):
        kept, dropped = load_conversations(sources, mode=mode, max_drop_rate=1.0)[:2]
        assert len(kept) + sum(dropped.values()) == total
        assert all(str(reason).strip() and len(reason) < 500 for reason in dropped)
        stored = folder / "kept.jsonl"
        write_conversations(stored, kept)
        for conversation in read_conversations(stored):
            if mode == "keep":
                made = render(tokenizer, conversation, max_length=512)
                ok = isinstance(made, DropReason) or 0 < len(made.input_ids) <= 512
            else:
                made = render_prompt(tokenizer, conversation.messages, tools=conversation.tools)
                ok = isinstance(made, DropReason) or len(made) > 0
            assert ok
            ends[f"{mode}: {'refused by the template' if isinstance(made, DropReason) else 'rendered'}"] += 1
        ends[f"{mode}: dropped"] = sum(dropped.values())
        ends[f"{mode}: reasons"] = len({reason.partition(" (first")[0] for reason in dropped})
    return ends


def test_every_hostile_row_is_kept_or_dropped_for_a_reason(tmp_path: Path) -> None:
    ends = account(tmp_path, 0, 500)
    assert min(ends["keep: rendered"], ends["regenerate: rendered"]) > 50  # the rows are not all hopeless
    assert min(ends["keep: reasons"], ends["regenerate: reasons"]) > 15


@pytest.mark.slow
def test_ten_thousand_hostile_rows_in_bounded_memory(tmp_path: Path) -> None:
    """Ten times the rows need no more memory than what they hold: rows are read one by one, reasons are short."""
    peaks = {}
    for count in (1_000, 10_000):
        folder = tmp_path / str(count)
        folder.mkdir()
        command = [sys.executable, "-m", "tests.unit.test_hostile_rows", str(folder), str(count)]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr[-2000:]
        print(done.stdout)
        peaks[count] = json.loads(done.stdout.splitlines()[-1])
    grown = peaks[10_000]["peak_mb"] - peaks[1_000]["peak_mb"]
    assert grown < 4 * (peaks[10_000]["data_mb"] - peaks[1_000]["data_mb"]) + 100, peaks


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("deep.jsonl", GOOD + '{"prompt": "a", "x": ' + "[" * 5000 + "]" * 5000 + "}\n"),
        ("deep.json", "[" + GOOD + ', {"prompt": "a", "x": ' + "[" * 5000 + "]" * 5000 + "}]"),
        ("number.jsonl", GOOD + '{"prompt": "a", "id": ' + "9" * 5000 + "}\n"),
        ("number.json", "[" + '{"prompt": "a", "id": ' + "9" * 5000 + "}]"),
        ("bytes.jsonl", GOOD.encode() + b'{"prompt": "\xff"}\n'),
        ("bytes.json", b'[{"prompt": "\xff"}]'),
        ("utf16.jsonl", GOOD.encode("utf-16")),
        ("surrogate.jsonl", GOOD.encode() + '{"prompt": "\ud800"}\n'.encode("utf-8", "surrogatepass")),
        ("cut.jsonl", GOOD + '{"prompt": "a'),
        ("cut.jsonl.gz", gzip.compress(GOOD.encode() * 1000, mtime=0)[:-20]),
        ("cut.json.gz", gzip.compress(b"[" + GOOD.encode() + b"]", mtime=0)[:-20]),
        ("plain.jsonl.gz", GOOD),
        ("zeros.jsonl", GOOD + "\x00\x00\n"),
        ("not.parquet", b"PAR1" * 30),
    ],
    ids=lambda value: value if isinstance(value, str) and len(value) < 20 else "",
)
def test_a_file_that_cannot_be_read_is_refused_in_one_line(tmp_path: Path, name: str, content: str | bytes) -> None:
    path = tmp_path / name
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    with pytest.raises(UserError) as refused:
        load_conversations([Source(path=str(path))], mode="regenerate", max_drop_rate=1.0)
    assert str(path) in str(refused.value) and "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        (CALL % ("[" * 500 + "]" * 500), "nested more than 64 levels deep"),
        (CALL % json.dumps("[" * 500 + "]" * 500), "nested more than 64 levels deep"),
        ('{"prompt": "a", "tools": ' + json.dumps("[" * 100_000) + "}\n", "tools is not a list of objects"),
        ('{"prompt": "a", "id": "\\ud800"}\n', "text that is not valid Unicode"),
        ('{"messages": [{"role": "' + "x" * 1_000_000 + '", "content": "q"}]}\n', "unknown role 'xxx"),
        ('{"request": ' * 900 + '{"answer": "a"}' + "}" * 900 + "\n", "none of the fields"),
    ],
)
def test_a_row_that_recursion_ends_at_is_dropped_for_a_short_reason(tmp_path: Path, row: str, reason: str) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text(GOOD + row, encoding="utf-8")
    kept, dropped = load_conversations([Source(path=str(path))], mode="regenerate", max_drop_rate=1.0)[:2]
    assert len(kept) == 1 and list(dropped.values()) == [1]
    (said,) = dropped
    assert said.startswith(reason) and len(said) < 500


def test_an_array_may_stand_behind_any_number_of_blanks(tmp_path: Path) -> None:
    path = tmp_path / "rows.json"
    path.write_text("\n" * 1000 + "[" + GOOD + "]", encoding="utf-8")
    assert len(load_conversations([Source(path=str(path))], mode="keep")[0]) == 1


if __name__ == "__main__":
    where, how_many = Path(sys.argv[1]), int(sys.argv[2])
    print(json.dumps(account(where, 0, how_many)))
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024
    data = sum(path.stat().st_size for path in where.iterdir()) >> 20
    print(json.dumps({"peak_mb": peak, "data_mb": data}))
