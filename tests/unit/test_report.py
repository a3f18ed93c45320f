"""Tables and result files."""

import io
import json

import pytest
from rich.console import Console

from spec_train.decoding.sampling import Sampling
from spec_train.decoding.trace import Cycle, DecodeTrace, RequestTrace, Timings
from spec_train.evaluation.metrics import summarise
from spec_train.evaluation.report import markdown_row, result_markdown, result_name, result_table, write_results


def result(method="eagle3", k=3, temperature=0.0, suite="gsm8k", speedup=2.0, drafts="greedy", rule="standard"):
    rounds = [Cycle([1] * k, 2, 2, 3), Cycle([1] * k, 0, 0, 1)]
    sampling = Sampling(temperature=temperature, draft_sample_method=drafts, rejection_sample_method=rule)
    return summarise(
        DecodeTrace([RequestTrace("a", [1], [0] * 5, rounds)], Timings(), k, 1),
        target="t",
        speculator="s",
        kind=method,
        method=method,
        suite=suite,
        device="cpu",
        dtype="float32",
        sampling=sampling,
        lossless={"checked": 7, "identical": 6, "first_divergence": None} if sampling.greedy else None,
        speed={"tokens_per_second": 40.0, "baseline_tokens_per_second": 20.0, "speedup": speedup} if speedup else None,
        estimate={"renewal": 2.125, "position_average": 2.5} if method == "eagle3" else None,
    )


def cells(markdown):
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in markdown.splitlines()]


def test_markdown_holds_every_figure_under_its_heading():
    header, rule, plain, ngram, eagle = cells(result_markdown([result("ngram", speedup=None), result()]))
    assert len(header) == len(rule) == len(plain) == len(ngram) == len(eagle)
    figures = dict(zip(header, eagle, strict=True))
    assert figures == {
        "suite": "gsm8k",
        "speculator": "eagle3",
        "K": "3",
        "T": "0",
        "tokens/pass": "2.00",
        "τ of drafted rounds (95%)": "2.00 (-)",
        "accepted by position": "0.50 0.50 0.00",
        "estimate": "2.12",
        "lossless": "6/7",
        "tokens/s": "40.0",
        "speed-up": "2.00x",
    }
    assert plain == ["gsm8k", "plain", "-", "0", "1.00", "-", "-", "-", "-", "20.0", "1.00x"]
    assert dict(zip(header, ngram, strict=True))["speed-up"] == "-"


def test_what_a_user_named_stays_in_its_cell():
    """Line breaks of every kind, pipes and tags in the names of suites, categories and runs."""
    assert markdown_row(["a|b\nc", "d\r\n\r\ne", "<b>f</b>", " g\u2028h\x0b "]) == (
        "| a\\|b c | d e | &lt;b>f&lt;/b> | g h |"
    )
    lines = result_markdown([result(suite="my\nown|suite<br>")]).strip().split("\n")
    assert len(lines) == 4
    assert {line.replace("\\|", "").count("|") for line in lines} == {lines[0].count("|")}
    assert "my own\\|suite&lt;br>" in lines[-1]


def test_a_sampled_result_claims_no_equality():
    assert cells(result_markdown([result(temperature=0.7)]))[-1][8] == "-"


def test_results_are_grouped_by_suite_and_temperature():
    rows = cells(result_markdown([result(), result(suite="chat"), result(k=5), result("ngram", suite="chat")]))[2:]
    assert [(row[0], row[1], row[2]) for row in rows] == [
        ("gsm8k", "plain", "-"),
        ("gsm8k", "eagle3", "3"),
        ("gsm8k", "eagle3", "5"),
        ("chat", "plain", "-"),
        ("chat", "eagle3", "3"),
        ("chat", "ngram", "3"),
    ]


def test_a_measured_plain_result_is_not_repeated():
    rows = cells(result_markdown([result(), result("plain", k=0, speedup=1.0)]))[2:]
    assert [row[1] for row in rows] == ["plain", "eagle3"]


def test_terminal_table_renders():
    console = Console(width=160, record=True, file=io.StringIO())
    console.print(result_table([result()], title="held out"))
    text = console.export_text()
    for part in ("held out", "2.00x", "6/7"):
        assert part in text


def test_one_json_file_per_result_and_no_leftovers(tmp_path):
    results = [result(), result(k=5), result(temperature=0.7), result(temperature=0.7, drafts="probabilistic")]
    results.append(result(temperature=0.7, drafts="probabilistic", rule="block"))
    paths = write_results(tmp_path / "eval", results)
    assert [path.name for path in paths] == [
        "gsm8k-eagle3-k3-t0.json",
        "gsm8k-eagle3-k5-t0.json",
        "gsm8k-eagle3-k3-t0.7.json",
        "gsm8k-eagle3-k3-t0.7-probabilistic.json",
        "gsm8k-eagle3-k3-t0.7-probabilistic-block.json",
    ]
    assert [json.loads(path.read_text()) for path in paths] == results
    assert sorted(path.name for path in (tmp_path / "eval").iterdir()) == sorted(path.name for path in paths)
    assert result_name(result(suite="prompts/my suite.jsonl")) == "my suite-eagle3-k3-t0.json"


def test_a_figure_that_is_no_number_is_not_written(tmp_path):
    broken = {**result(), "mean_acceptance_length": float("nan")}
    with pytest.raises(ValueError, match="JSON"):
        write_results(tmp_path, [broken])
    assert not list(tmp_path.glob("*.json"))
