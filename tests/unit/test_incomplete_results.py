"""Results that lack what others have (a server tells neither intervals nor its device): shown with what is there."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from spec_train.decoding.sampling import Sampling
from spec_train.decoding.trace import Cycle, RequestTrace
from spec_train.evaluation.advice_input import read_methods
from spec_train.evaluation.advice_report import advice_table, vllm_config
from spec_train.evaluation.advise import advise
from spec_train.evaluation.load_report import load_row
from spec_train.evaluation.plots import draw_all
from spec_train.evaluation.report import result_markdown
from spec_train.evaluation.run_report import collect, write_report
from spec_train.evaluation.server import Answer, ServedLoad, served_result
from spec_train.evaluation.turns import Suite
from tests.results import result_of
from tests.unit.test_advise import costs_json

OPTIONAL = (
    *(
        "backend",
        "device",
        "dtype",
        "top_k",
        "top_p",
        "min_p",
        "draft_sample_method",
        "rejection_sample_method",
        "seed",
    ),
    *(
        "mean_acceptance_length_ci95",
        "acceptance_rate_per_position_ci95",
        "tokens_per_step",
        "tokens_per_drafted_round",
    ),
    *("draft_acceptance_rate", "num_conversations", "vllm_counters", "lossless", "speed", "estimate", "by_category"),
    "versions",
)


def served(concurrency: int, seconds: float, baseline: bool, kind: str = "ngram") -> dict[str, Any]:
    """What `eval --server` writes: 30 answers of 11 tokens, 200 rounds of three drafts of which 100 stayed."""
    answers = [Answer(list(range(11)), 11, 0.1, 1.0, None) for _ in range(30)]
    per_position = [50, 30, 20]
    counters = {"num_drafts": 200, "num_draft_tokens": 600, "num_accepted_tokens": 100}
    loads = [ServedLoad(answers, {**counters, "num_accepted_tokens_per_pos": per_position}, 330, seconds)]
    loads += [ServedLoad(answers, {}, 330, 20.0)] if baseline else []
    suite = Suite("chat", [str(i) for i in range(30)], [""] * 30, [[1]] * 30)
    server: Any = SimpleNamespace(target="some/model", model="some/model")
    return {**served_result(server, "ngram", suite, Sampling(), concurrency, loads), "type": kind}


def own(**changes: Any) -> dict[str, Any]:
    rounds = [Cycle([1] * 3, 2, 2, 3), Cycle([1] * 3, 0, 0, 1)]
    requests = [RequestTrace(str(i), [1], [0] * 5, rounds[: 1 + i % 2], category="ab"[i % 2]) for i in range(4)]
    speed = {"tokens_per_second": 40.0, "baseline_tokens_per_second": 20.0, "speedup": 2.0, "batch_size": 1}
    found = result_of(requests, "eagle3", 3, target="some/model", speed=speed)
    return {**found, "costs": costs_json(), **changes}


def rows(markdown: str) -> list[list[str]]:
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in markdown.splitlines()[2:]]


def advised(folder: Path, *results: dict[str, Any], loads: list[int] | None = None) -> dict[str, Any]:
    (folder / "served.json").write_text(json.dumps(results))
    methods, notes = read_methods([folder / "served.json"])
    advice = advise(methods, loads, notes)
    advice["vllm"] = vllm_config(next(m for m in methods if m.name == advice["method"]), advice)
    assert advice_table(advice).row_count == len(advice["loads"])
    assert json.loads(json.dumps(advice, allow_nan=False)) == advice
    return advice


def test_a_server_without_a_baseline_is_shown(tmp_path: Path) -> None:
    results = [served(1, 10.0, baseline=False), served(8, 5.0, baseline=False)]
    (tmp_path / "served.json").write_text(json.dumps(results))
    found = collect([tmp_path / "served.json"])
    assert len(found.results) == 2
    names = [path.name for path in write_report(found, tmp_path / "out", "Served")]
    assert names == ["acceptance_by_position.png", "report.html", "report.md"]
    text = (tmp_path / "out" / "report.md").read_text()
    assert "Target some/model; server; 30 prompts." in text
    assert [row[1:7] + row[-2:] for row in rows(result_markdown(results))] == [
        ["ngram (server, 1 at a time)", "3", "0", "-", "1.50 (-)", "0.25 0.15 0.10", "33.0", "-"],
        ["ngram (server, 8 at a time)", "3", "0", "-", "1.50 (-)", "0.25 0.15 0.10", "66.0", "-"],
    ]
    assert load_row(results[0])[3:8] == ("1.50", "0.25 0.15 0.10", "33.0", "-", "-")


def test_a_server_with_a_baseline_gains_and_has_a_curve(tmp_path: Path) -> None:
    results = [served(1, 10.0, baseline=True), served(8, 5.0, baseline=True)]
    assert set(draw_all(results, [])) == {"acceptance_by_position", "speedup_by_concurrency"}
    assert [(row[1], row[-2], row[-1]) for row in rows(result_markdown(results))] == [
        ("plain (server, 1 at a time)", "16.5", "1.00x"),
        ("ngram (server, 1 at a time)", "33.0", "2.00x"),
        ("plain (server, 8 at a time)", "16.5", "1.00x"),
        ("ngram (server, 8 at a time)", "66.0", "4.00x"),
    ]
    advice = advised(tmp_path, *results)
    assert [(load["speedup"], load["speedup_ci95"]) for load in advice["loads"]] == [(2.0, None), (4.0, None)]
    assert any("no interval" in warning for warning in advice["warnings"])


def test_advice_on_servers_without_a_baseline_ranks_them_and_claims_no_gain(tmp_path: Path) -> None:
    advice = advised(tmp_path, served(8, 10.0, baseline=False), served(8, 5.0, baseline=False, kind="suffix"))
    (load,) = advice["loads"]
    assert (load["type"], load["speculate"], load["speedup"], load["num_draft_tokens"]) == ("suffix", None, None, 3)
    assert load["tokens_per_second"] == 66.0
    assert load["tokens_per_round"] == pytest.approx(300 / 200)  # 300 tokens after the prefill in 200 passes
    assert any("--baseline-server" in warning for warning in advice["warnings"])
    assert "draft_sample_method" not in advice["vllm"]["speculative_config"]  # the server's own, which is not known


def test_a_gain_is_believed_before_a_server_without_one(tmp_path: Path) -> None:
    """At a load where no baseline was measured, the model of the method's own costs stands in."""
    alone, compared = served(8, 5.0, baseline=False, kind="eagle3"), served(1, 10.0, baseline=True, kind="eagle3")
    advice = advised(tmp_path, own(), alone, compared)
    by_load = {load["concurrency"]: load for load in advice["loads"]}
    assert (by_load[1]["source"], by_load[1]["speedup"]) == ("server", 2.0)
    assert by_load[8]["source"] == "model" and by_load[8]["speedup"] is not None
    mixed = advised(tmp_path, own(), served(8, 5.0, baseline=False), loads=[8])
    assert mixed["loads"][0]["type"] == "eagle3"
    assert any("ngram left out" in warning for warning in mixed["warnings"])


@pytest.mark.parametrize("missing", [*OPTIONAL, OPTIONAL], ids=str)
def test_a_missing_section_costs_nothing_but_itself(missing: str | tuple[str, ...], tmp_path: Path) -> None:
    keys = (missing,) if isinstance(missing, str) else missing
    for entry in (own(), served(8, 5.0, baseline=True)):
        for bare in ({k: v for k, v in entry.items() if k not in keys}, {**entry, **dict.fromkeys(keys)}):
            assert [row[0] for row in rows(result_markdown([bare]))][-1] == "chat"
            if "speed" not in keys or bare.get("costs"):
                assert advised(tmp_path, bare, loads=[8])["loads"][0]["num_draft_tokens"] >= 0
            if keys == OPTIONAL:
                (tmp_path / "bare.json").write_text(json.dumps(bare))
                assert write_report(collect([tmp_path / "bare.json"]), tmp_path / "out", "Bare")
