"""The script that remakes the tables of the pages: every figure stands in a file of the documented command."""

from __future__ import annotations

import importlib.util
import io
import json
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

import pytest

from spec_train.decoding.trace import Cycle, RequestTrace
from spec_train.errors import UserError
from spec_train.evaluation.report import result_name
from tests.results import result_of

ROOT = Path(__file__).parents[2]
_spec = importlib.util.spec_from_file_location("make_tables", ROOT / "eval/make_tables.py")
assert _spec is not None and _spec.loader is not None
make_tables: Any = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(make_tables)


def result(kind: str, k: int, suite: str = "held_out", kept: int = 2, **more: Any) -> dict[str, Any]:
    """Two conversations of two rounds each that keep `kept` drafts and none."""
    rounds = [Cycle([1] * k, kept, kept, kept + 1), Cycle([1] * k, 0, 0, 1)]
    requests = [RequestTrace(str(i), [1], [0] * (kept + 3), rounds) for i in range(2)]
    speed = {"tokens_per_second": 40.0, "baseline_tokens_per_second": 20.0, "speedup": 1.88}
    checked = {"checked": 2, "identical": 2, "first_divergence": None}
    found = result_of(requests, kind, k, suite, speed=speed, lossless=checked, estimate={"renewal": 1 + kept / 2})
    return {**found, **more}


def finished(run: Path, stage: str, outputs: dict[str, Any]) -> None:
    (run / stage).mkdir(parents=True, exist_ok=True)
    (run / stage / "manifest.json").write_text(json.dumps({"stage": stage, "inputs": {}, "outputs": outputs}))


def evaluated(run: Path, *results: dict[str, Any]) -> Path:
    finished(run, "eval", {"results": [result_name(r) for r in results]})
    for entry in results:
        (run / "eval" / result_name(entry)).write_text(json.dumps(entry))
    return run


def make(*arguments: str | Path) -> str:
    printed = io.StringIO()
    with redirect_stdout(printed):
        assert make_tables.main([str(argument) for argument in arguments]) == 0
    return printed.getvalue()


def test_the_quickstart_s_table_goes_into_its_page(tmp_path: Path) -> None:
    run = evaluated(tmp_path / "quickstart", result("ngram", 3, kept=1), result("eagle3", 3))
    finished(run, "train", {"seconds": 301.4})
    steps = [{"batch_size": b, "rows": n, "ms": 50.0 + n + 100 * (b > 1)} for b in (1, 4) for n in (1, 4)]
    (run / "eval" / "costs-eagle3.json").write_text(json.dumps({"type": "eagle3", "target_step": steps}))
    (run / "verify").mkdir()
    seen = {
        "version": "0.32.0",
        "outputs_equal_baseline": 8,
        "requests": 8,
        "cycles_equal": 461,
        "cycles_compared": 462,
    }
    (run / "verify" / "report.json").write_text(json.dumps([{"format": "plain", "vllm": seen}, {"format": "x"}]))
    table = [
        "| speculator | K | tokens/pass | τ of drafted rounds (95%) | accepted by position | estimate | lossless "
        "| speed-up |",
        "|---|---:|---:|---:|---:|---:|---:|---:|",
        "| plain | - | 1.00 | - | - | - | - | 1.00x |",
        "| ngram | 3 | 1.50 | 1.50 (1.50-1.50) | 0.50 0.00 0.00 | 1.50 | 2/2 | 1.88x |",
        "| eagle3 | 3 | 2.00 | 2.00 (2.00-2.00) | 0.50 0.50 0.00 | 2.00 | 2/2 | 1.88x |",
    ]
    page = tmp_path / "README.md"
    page.write_text("before\n\n" + "\n".join([*table[:2], "| eagle3 | an | older | table |"]) + "\n\nafter\n")
    printed = make("quickstart", run, "--into", page)
    assert page.read_text() == "before\n\n" + "\n".join(table) + "\n\nafter\n"
    for told in (
        "train took 301 s",
        "costs-eagle3.json: a pass of the target takes 1 rows 51 ms, 4 rows 54 ms",
        "quickstart (plain) in vLLM 0.32.0: text as without speculation in 8 of 8, 461 of 462 rounds drafted alike",
    ):
        assert told in printed
    page.write_text("nothing\n")
    with pytest.raises(UserError, match="no table with the heading"):
        make("quickstart", run, "--into", page)
    with pytest.raises(UserError, match="run the command that the page prints first"):
        make("methods", tmp_path / "absent")


def test_the_objectives_are_put_side_by_side(tmp_path: Path) -> None:
    rows = [
        {"name": f"{loss} {seed}", "estimates": {"3": 1.4 + seed / 100}} for loss in ("kl", "ce") for seed in (0, 2)
    ]
    (tmp_path / "comparison.json").write_text(json.dumps({"rows": [*rows, {"name": "draft_lm untrained"}]}))
    assert make("objectives", tmp_path).splitlines()[:4] == [
        "| `speculator.loss` | seed 0 | seed 2 | mean |",
        "|---|---:|---:|---:|",
        "| `kl` | 1.400 | 1.420 | 1.410 |",
        "| `ce` | 1.400 | 1.420 | 1.410 |",
    ]


def test_an_adapted_head_stands_beside_its_start(tmp_path: Path) -> None:
    run = evaluated(
        tmp_path,
        *(
            result(kind, 3, suite, kept)
            for suite in ("held_out", "maths")
            for kind, kept in (("ngram", 1), ("eagle3", 2))
        ),
        *(result("eagle3 start", 3, suite, 1) for suite in ("held_out", "maths")),
    )
    lines = make("adapted", run).splitlines()
    assert lines[2:4] == [
        "| held_out, 2 prompts, estimated | 1.50 | 2.00 |",
        "| held_out, 2 prompts, decoded | 1.50 (1.50-1.50) | 2.00 (2.00-2.00) |",
    ]
    assert "maths: text equal 2/2 and 2/2" in lines


def test_trees_stand_below_the_chain(tmp_path: Path) -> None:
    files = []
    for suite, kept in (("gsm8k", 1), ("json", 2)):
        tree = result("eagle3", 4, suite, kept + 1, tree={"name": "tree-d4-k4-n16"})
        files.append(tmp_path / f"trees-{suite}.json")
        files[-1].write_text(json.dumps([result("eagle3", 4, suite, kept), tree]))
    assert make("trees", *files).splitlines()[:4] == [
        "|  | gsm8k | json |",
        "|---|---:|---:|",
        "| chain | 1.50 | 2.00 |",
        "| tree | 2.00 | 2.50 |",
    ]


@pytest.mark.parametrize("page", ["README.md", "docs/import.md", "docs/evaluation.md"])
def test_the_pages_have_the_tables_that_the_script_makes(page: str, tmp_path: Path) -> None:
    """Headings only: what stands below them is measured. A table that the script no longer finds would be left as it
    is."""
    text = (ROOT / page).read_text()
    headings = {
        "README.md": [
            "| speculator | K | tokens/pass | τ of drafted rounds (95%) | accepted by position | estimate | lossless "
            "| speed-up |",
            "| `speculator.loss` | seed 0 | seed 1 | seed 2 | mean |",
        ],
        "docs/import.md": ["| τ (95%) | the head as it was | adapted |"],
        "docs/evaluation.md": ["| comparison | tokens/s | against | tokens/s | ratio |"],
    }[page]
    for heading in headings:
        assert f"\n{heading}\n" in text
