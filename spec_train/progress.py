"""One progress bar, shown by the main process only, on standard error so that results stay pipeable."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager


@contextmanager
def progress(description: str, total: int, unit: str = "tok") -> Iterator[Callable[[int], None]]:
    """A bar over `total` units; yields `advance(n)`. Without a terminal, a line every half minute instead."""
    if os.environ.get("RANK", "0") != "0":
        yield lambda _n: None
        return
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeElapsedColumn,
        TimeRemainingColumn,
    )

    console = Console(stderr=True)
    if not console.is_terminal:
        yield _plain_lines(console, description, total, unit)
        return
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[rate]}"),
        TimeElapsedColumn(),
        TextColumn("left"),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console) as bar:
        task = bar.add_task(description, total=total, rate="")
        started, done = time.monotonic(), 0

        def advance(n: int) -> None:
            nonlocal done
            done += n
            rate = done / max(1e-6, time.monotonic() - started)
            bar.update(task, advance=n, rate=f"{rate:,.0f} {unit}/s")

        yield advance


def _plain_lines(console: object, description: str, total: int, unit: str) -> Callable[[int], None]:
    started = shown = time.monotonic()
    done = 0

    def advance(n: int) -> None:
        nonlocal done, shown
        done += n
        now = time.monotonic()
        if now - shown >= 30:
            shown = now
            rate = done / (now - started)
            left = max(0, total - done) / max(rate, 1e-6)
            line = f"{description}: {done:,} of {total:,} {unit}, {rate:,.0f} {unit}/s, about {left:.0f} s left"
            console.print(line)  # type: ignore[attr-defined]

    return advance
