"""Stage directories: current, refused, resumed, interrupted; atomic files; the lock."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from spec_train.errors import UserError
from spec_train.manifest import (
    Stage,
    atomic_write_json,
    atomic_write_text,
    file_sha256,
    first_difference,
    read_manifest,
    run_lock,
)

INPUTS = {"speculator": {"ttt_steps": 4, "aux_layer_ids": (1, 2)}, "sources": ["a", "b"], "lr": 1e-3}


def made(directory: Path, inputs: dict[str, object] = INPUTS) -> Stage:
    stage = Stage(directory, "train", inputs)
    stage.begin()
    return stage


def test_a_finished_stage_is_current_for_equal_inputs_only(tmp_path: Path) -> None:
    stage = made(tmp_path / "run" / "train")
    assert not stage.is_current()
    stage.finish({"steps": 7}, {"kept": 3, "dropped": {"too_long": 1}}, {"weights": "abc"})
    assert stage.is_current()
    stage.refuse_mismatch()
    assert Stage(stage.directory, "train", json.loads(json.dumps(INPUTS))).is_current()
    assert not Stage(stage.directory, "train", {**INPUTS, "lr": 2e-3}).is_current()


def test_the_manifest_records_what_made_it(tmp_path: Path) -> None:
    stage = made(tmp_path / "train")
    stage.finish({"steps": 7}, {"kept": 3, "dropped": {"too_long": 1}}, {"weights": "abc"})
    manifest = read_manifest(stage.directory)
    assert manifest["stage"] == "train"
    assert manifest["inputs"]["speculator"]["aux_layer_ids"] == [1, 2]
    assert manifest["outputs"] == {"steps": 7}
    assert manifest["counts"] == {"kept": 3, "dropped": {"too_long": 1}}
    assert {"python", "spec-train", "torch", "transformers"} <= set(manifest["versions"])
    assert len(manifest["inputs_sha256"]) == 64
    assert "finished_at" in manifest
    assert "git_revision" in manifest


@pytest.mark.parametrize(
    ("change", "field", "before", "now"),
    [
        ({"lr": 2e-3}, "lr", "0.001", "0.002"),
        ({"speculator": {"ttt_steps": 7, "aux_layer_ids": [1, 2]}}, "speculator.ttt_steps", "4", "7"),
        ({"sources": ["a", "c"]}, "sources.1", '"b"', '"c"'),
        ({"sources": ["a"]}, "sources", '["a", "b"]', '["a"]'),
        ({"seed": 1}, "seed", '"(absent)"', "1"),
        ({"lr": True}, "lr", "0.001", "true"),
    ],
)
@pytest.mark.parametrize("finished", [True, False])
def test_other_inputs_are_refused_by_name(
    tmp_path: Path, change: dict[str, object], field: str, before: str, now: str, finished: bool
) -> None:
    stage = made(tmp_path / "train")
    if finished:
        stage.finish({}, {}, {})
    with pytest.raises(UserError) as caught:
        Stage(stage.directory, "train", {**INPUTS, **change}).begin()
    message = str(caught.value)
    assert "\n" not in message
    for part in ("stage train", f"{field} = {before}", f"now it is {now}", "--force", "run.output_dir"):
        assert part in message
    assert ("interrupted" in message) is not finished
    assert stage.is_current() is finished, "a refusal leaves the stage as it was"


def test_an_interrupted_stage_resumes_with_its_files(tmp_path: Path) -> None:
    stage = made(tmp_path / "train")
    (stage.directory / "shard-0").write_text("done")
    again = made(tmp_path / "train")
    assert not again.is_current()
    assert (stage.directory / "shard-0").read_text() == "done"
    with pytest.raises(UserError, match="no finished stage"):
        read_manifest(stage.directory)


def test_beginning_a_finished_stage_again_withdraws_its_manifest(tmp_path: Path) -> None:
    stage = made(tmp_path / "train")
    stage.finish({}, {}, {})
    stage.begin()
    assert not stage.is_current()


def test_a_kill_at_any_point_leaves_a_stage_that_begins_again(tmp_path: Path) -> None:
    """A process that begins and finishes a stage over and over is killed at random; the next one must go on."""
    program = (
        "import sys; from pathlib import Path; from spec_train.manifest import Stage\n"
        "stage = Stage(Path(sys.argv[1]), 'train', {'x': 1})\n"
        "print('up', flush=True)\n"
        "while True:\n"
        "    stage.begin(); (stage.directory / 'data').write_text('d'); stage.finish({}, {}, {}); stage.discard()\n"
    )
    directory = tmp_path / "train"
    for attempt in range(6):
        process = subprocess.Popen([sys.executable, "-c", program, str(directory)], stdout=subprocess.PIPE)
        assert process.stdout is not None
        assert process.stdout.readline() == b"up\n"
        time.sleep(0.005 + 0.007 * attempt)
        process.send_signal(signal.SIGKILL)
        process.wait()
        process.stdout.close()
        stage = Stage(directory, "train", {"x": 1})
        if stage.is_current():
            read_manifest(directory)
        stage.begin()
        assert sorted(file.name for file in directory.iterdir()) in (["inputs.json"], ["data", "inputs.json"])


def test_foreign_files_are_not_overwritten(tmp_path: Path) -> None:
    directory = tmp_path / "train"
    directory.mkdir()
    (directory / "thesis.txt").write_text("mine")
    with pytest.raises(UserError, match="holds files that the train stage did not write"):
        made(directory)
    assert [file.name for file in directory.iterdir()] == ["thesis.txt"]


def test_discard_removes_everything(tmp_path: Path) -> None:
    stage = made(tmp_path / "train")
    stage.finish({}, {}, {})
    stage.discard()
    assert list(tmp_path.iterdir()) == []
    Stage(stage.directory, "train", {"other": 1}).begin()


@pytest.mark.parametrize("broken", ["{", "[]", ""])
def test_a_damaged_manifest_is_named(tmp_path: Path, broken: str) -> None:
    stage = made(tmp_path / "train")
    (stage.directory / "manifest.json").write_text(broken)
    with pytest.raises(UserError, match=r"manifest\.json"):
        stage.is_current()


def test_an_unwritable_place_is_one_clear_line(tmp_path: Path) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("")
    with pytest.raises(UserError, match=r"cannot be written .*run\.output_dir"):
        made(blocked / "run" / "train")
    with pytest.raises(UserError, match="cannot be written"), run_lock(blocked / "run"):
        pass
    with pytest.raises(UserError, match="cannot be written"):
        made(Path("/proc/spec-train/train"))  # refused even to root


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_read_only_directory_is_refused(tmp_path: Path) -> None:
    directory = tmp_path / "train"
    directory.mkdir(mode=0o555)
    with pytest.raises(UserError, match="cannot be written"):
        made(directory)


def test_two_processes_cannot_write_one_run(tmp_path: Path) -> None:
    program = (
        "import sys; from pathlib import Path; from spec_train.manifest import run_lock\n"
        "with run_lock(Path(sys.argv[1])):\n"
        "    print('held', flush=True); sys.stdin.read()\n"
    )
    command = [sys.executable, "-c", program, str(tmp_path / "run")]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "held\n"
    with pytest.raises(UserError, match=f"process {process.pid} "), run_lock(tmp_path / "run"):
        pass
    process.kill()  # the kernel releases the lock of a killed process
    process.communicate()
    with run_lock(tmp_path / "run"):
        pass


def test_an_atomic_write_replaces_all_or_nothing(tmp_path: Path) -> None:
    file = tmp_path / "value.json"
    atomic_write_json(file, {"a": 1})
    with pytest.raises(ValueError, match="Out of range float"):
        atomic_write_json(file, {"a": float("nan")})
    with pytest.raises(UnicodeEncodeError):
        atomic_write_text(file, "\ud800")
    assert json.loads(file.read_text()) == {"a": 1}
    assert [entry.name for entry in tmp_path.iterdir()] == ["value.json"]
    plain = tmp_path / "plain"
    plain.write_text("")
    assert file.stat().st_mode == plain.stat().st_mode


def test_file_sha256_is_the_digest_of_the_bytes(tmp_path: Path) -> None:
    (tmp_path / "f").write_bytes(b"abc")
    assert file_sha256(tmp_path / "f") == "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"


def test_first_difference_sees_removed_keys_and_types() -> None:
    assert first_difference({"a": 1, "b": 2}, {"a": 1}) == ("b", 2, "(absent)")
    assert first_difference({"a": [1]}, {"a": [1.0]}) == ("a.0", 1, 1.0)
    assert first_difference({"a": {"b": [1, 2]}}, {"a": {"b": [1, 2]}}) is None
