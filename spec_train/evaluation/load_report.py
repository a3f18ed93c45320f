"""Results of vLLM, offline or served, as a table: one row per temperature, K and load."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from spec_train.evaluation.report import number

if TYPE_CHECKING:
    from rich.table import Table

CAPTION = (
    "τ: 1 + accepted drafts / rounds that drafted something. accepted by position: share of those rounds that kept at "
    "least so many drafts. TTFT, TPOT: median and 95th percentile over requests, in ms. off: without speculation."
)
HEADER = (
    *("T", "K", "concurrency", "τ", "accepted by position", "tokens/s", "off", "speed-up"),
    *("TTFT p50/p95", "off", "TPOT p50/p95", "off"),
)


def load_table(results: Sequence[dict[str, Any]], title: str) -> Table:
    """A rich table of results with a "speed" block by concurrency (`vllm_backend`, `server`)."""
    from rich.table import Table

    table = Table(title=title, caption=CAPTION)
    for column in HEADER:
        table.add_column(column, justify="right")
    for result in results:
        table.add_row(*load_row(result))
    return table


def load_row(result: dict[str, Any]) -> tuple[str, ...]:
    """The cells of one result; "-" for what is not known."""
    speed, k, length = result["speed"], result["num_draft_tokens"], result["mean_acceptance_length"]
    return (
        f"{result['temperature']:g}",
        str(k) if k else "-",
        str(speed["concurrency"]),
        number(length),
        " ".join(f"{rate:.2f}" for rate in result["acceptance_rate_per_position"] or []) or "-",
        number(speed["tokens_per_second"], "{:.1f}"),
        number(speed["baseline_tokens_per_second"], "{:.1f}"),
        number(speed["speedup"], "{:.2f}x"),
        _pair(speed, "ttft"),
        _pair(speed, "baseline_ttft"),
        _pair(speed, "tpot"),
        _pair(speed, "baseline_tpot"),
    )


def _pair(speed: dict[str, Any], name: str) -> str:
    median, high = speed.get(f"{name}_ms"), speed.get(f"{name}_ms_p95")
    return "-" if median is None or high is None else f"{median:.1f}/{high:.1f}"
