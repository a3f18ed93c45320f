"""The report page: everything inside it, every figure from the files, pictures that show something."""

import json
import shutil
import subprocess
import zlib
from html.parser import HTMLParser
from pathlib import Path

import pytest

from spec_train.decoding.trace import Cycle, RequestTrace
from spec_train.errors import UserError
from spec_train.evaluation.metrics import position_intervals
from spec_train.evaluation.plots import Curve, training_curves
from spec_train.evaluation.report import result_name
from spec_train.evaluation.run_report import collect, write_report
from tests.results import result_of

CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")


def result(kind="eagle3", k=3, suite="chat"):
    rounds = [Cycle([1] * k, 2, 2, 3), Cycle([1] * k, 0, 0, 1)]
    requests = [
        RequestTrace(f"{category}{i}", [1], [0] * 5, rounds[: 1 + i], category=category)
        for category in ("math", "<b>code")
        for i in range(2)
    ]
    speed = {"tokens_per_second": 40.0, "baseline_tokens_per_second": 20.0, "speedup": 2.0, "batch_size": 1}
    return result_of(requests, kind, k, suite, target="a & b", speed=speed)


@pytest.fixture
def run(tmp_path):
    directory = tmp_path / "my-run"
    (directory / "eval").mkdir(parents=True)
    for kind, k in (("eagle3", 3), ("eagle3", 5), ("ngram", 3)):
        (directory / "eval" / result_name(result(kind, k))).write_text(json.dumps(result(kind, k)))
    (directory / "eval" / "manifest.json").write_text("{}")
    (directory / "train").mkdir()
    rows = [{"step": s, "loss": 4.0 / s} for s in (1, 2, 3)] + [{"step": 3, "renewal@3": 1.8, "decode@3": 1.7}]
    (directory / "train" / "log.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return directory


class References(HTMLParser):
    """Every address that a browser would fetch, and the text of the page."""

    def __init__(self):
        super().__init__()
        self.addresses, self.text, self.tags = [], [], []

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.addresses += [value for name, value in attrs if name in ("src", "href", "srcset", "data", "action")]

    def handle_data(self, data):
        self.text.append(data)


def grey_levels(png: bytes) -> set[int]:
    """Different bytes of a PNG's pixels: one for a blank picture."""
    data, place = b"", 8
    while place < len(png):
        length, name = int.from_bytes(png[place : place + 4], "big"), png[place + 4 : place + 8]
        data += png[place + 8 : place + 8 + length] if name == b"IDAT" else b""
        place += 12 + length
    return set(zlib.decompress(data))


def test_page_needs_nothing_from_outside_and_holds_every_figure(run, tmp_path):
    paths = write_report(collect([run]), tmp_path / "out", "A <report>")
    page = References()
    text = (tmp_path / "out" / "report.html").read_text(encoding="utf-8")
    page.feed(text)
    assert [address for address in page.addresses if not address.startswith("data:")] == []
    assert "script" not in page.tags
    assert "url(" not in text
    assert "b" not in page.tags  # names out of the data are text, not markup
    cells = " ".join(page.text)
    for figure in ("A <report>", "a & b", "tokens/pass", "eagle3", "ngram", "2.00x"):
        assert figure in cells
    pictures = [path for path in paths if path.suffix == ".png"]
    assert {path.stem for path in pictures} == {
        "acceptance_by_k",
        "acceptance_by_position",
        "acceptance_by_category",
        "speedup_by_concurrency",
        "training",
    }
    assert all(len(grey_levels(path.read_bytes())) > 20 for path in pictures)


def test_markdown_has_a_row_for_each_result(run, tmp_path):
    write_report(collect([run]), tmp_path, "Runs")
    text = (tmp_path / "report.md").read_text(encoding="utf-8").partition("| run |")[0]
    rows = [line for line in text.splitlines() if line.startswith("| ")]
    assert [row.split(" | ")[1:3] for row in rows[1:]] == [
        ["plain", "-"],
        ["eagle3", "3"],
        ["eagle3", "5"],
        ["ngram", "3"],
    ]


def test_collect_finds_runs_inside_a_folder_and_reads_nothing_twice(run):
    found = collect([run, run.parent, run / "eval"])
    assert len(found.results) == 3
    assert [curve.name for curve in found.curves] == ["my-run"]
    assert found.curves[0].series["decode@3"] == [(3, 1.7)]


def test_training_curves_show_estimate_decode_and_the_estimate_on_the_decoded_answers():
    series = {"loss": [(1, 4.0), (3, 2.0)], "renewal@3": [(3, 1.8)], "decode@3": [(3, 1.7)]}
    shown = [
        training_curves([Curve("run", {key: series[key] for key in keys})])
        for keys in (["loss"], ["loss", "renewal@3"], ["loss", "renewal@3", "decode@3"])
    ]
    shown.append(training_curves([Curve("run", {**series, "decode_renewal@3": [(3, 1.7)]})]))
    assert len(set(shown)) == 4
    at_temperature = {"decode_T0.7@3": [(3, 1.6)], "decode_renewal_T0.7_greedy@3": [(3, 1.6)]}
    at_temperature |= {"renewal_T0.7_greedy@3": [(3, 1.7)], "renewal_T0.7_probabilistic@3": [(3, 1.9)]}
    for key, points in at_temperature.items():  # the third is drawn in place of the second, with its label
        series[key] = points
        shown.append(training_curves([Curve("run", series)]))
    assert len(set(shown)) == 8


def test_the_last_evaluation_in_training_is_a_table(run, tmp_path):
    more = [
        {"step": 6, "loss": 1.0},
        {"step": 6, "renewal@3": 1.9, "decode@3": 1.8, "renewal_T0.7_probabilistic@3": 1.85},
    ]
    with (run / "train" / "log.jsonl").open("a") as file:
        file.writelines(json.dumps(row) + "\n" for row in more)
    write_report(collect([run]), tmp_path, "Runs")
    table = [
        "| run | step | renewal@3 | decode@3 | renewal_T0.7_probabilistic@3 |",
        "|---|---:|---:|---:|---:|",
        "| my-run | 6 | 1.900 | 1.800 | 1.850 |",
    ]
    assert "\n".join(table) in (tmp_path / "report.md").read_text(encoding="utf-8")
    assert "<td>1.850</td>" in (tmp_path / "report.html").read_text(encoding="utf-8")


def test_a_folder_without_results_or_a_wrong_file_is_refused(tmp_path):
    (tmp_path / "other.json").write_text('{"a": 1}')
    (tmp_path / "torn.json").write_text('{"a": ')
    for path, message in (
        (tmp_path / "absent", "no such file"),
        (tmp_path / "other.json", "no evaluation result"),
        (tmp_path / "torn.json", "not readable as JSON"),
    ):
        with pytest.raises(UserError, match=message):
            collect([path])
    (tmp_path / "torn.json").unlink()
    with pytest.raises(UserError, match="no evaluation result and no training log"):
        collect([tmp_path])


def test_position_intervals_hold_the_rate_and_close_where_prompts_agree():
    rounds = [Cycle([1, 1], 2, 2, 3), Cycle([1, 1], 1, 1, 2)]
    same = [RequestTrace(str(i), [1], [0], rounds) for i in range(5)]
    assert position_intervals(same, 2) == [[1.0, 1.0], [0.5, 0.5]]
    differing = [RequestTrace(str(i), [1], [0], [rounds[i % 2]]) for i in range(20)]
    (_, _), (low, high) = position_intervals(differing, 2)
    assert 0.2 < low < 0.5 < high < 0.8
    assert position_intervals([RequestTrace("a", [1])], 2) is None


@pytest.mark.skipif(CHROMIUM is None, reason="no browser is installed")
def test_a_browser_opens_it_without_a_complaint(run, tmp_path):
    write_report(collect([run]), tmp_path, "Runs")
    options = ["--headless", "--no-sandbox", "--disable-gpu", "--enable-logging=stderr", "--dump-dom"]
    shown = subprocess.run(
        [CHROMIUM, *options, f"--user-data-dir={tmp_path / 'profile'}", Path(tmp_path / "report.html").as_uri()],
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    assert "</table>" in shown.stdout
    assert [line for line in shown.stderr.splitlines() if "CONSOLE" in line or "Refused" in line] == []
