"""What W&B and TensorBoard really write, read back from their files; nothing leaves the machine."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from spec_train.errors import UserError
from spec_train.manifest import read_manifest
from spec_train.pipeline import run_features, run_prompts, run_responses
from spec_train.recipe import load_recipe
from spec_train.training.trackers import Trackers, check_trackers
from tests.integration.test_run import write_recipe
from tests.wandb_file import read_offline_runs

ROOT = Path(__file__).parents[2]


def tensorboard_scalars(directory: Path) -> dict[str, list[tuple[int, float]]]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(directory / "tensorboard"))
    events.Reload()
    return {tag: [(e.step, e.value) for e in events.Scalars(tag)] for tag in events.Tags()["scalars"]}


def tensorboard_config(directory: Path) -> str:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(directory / "tensorboard"))
    events.Reload()
    text: bytes = events.Tensors("config/text_summary")[-1].tensor_proto.string_val[0]
    return text.decode()


@pytest.fixture
def wandb_server() -> Iterator[tuple[str, list[object]]]:
    """A listener in place of W&B's server, and the connections that were made to it."""
    seen: list[object] = []
    with socket.create_server(("127.0.0.1", 0)) as server:

        def accept() -> None:
            while True:
                try:
                    seen.append(server.accept())
                except OSError:  # closed
                    return

        threading.Thread(target=accept, daemon=True).start()
        yield f"http://127.0.0.1:{server.getsockname()[1]}", seen


def start(arguments: list[str], server: str, home: Path) -> subprocess.CompletedProcess[str]:
    """A process that knows of no key and no mode."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("WANDB_")}
    environment |= {"WANDB_BASE_URL": server, "NETRC": str(home / "netrc"), "HOME": str(home)}
    return subprocess.run(
        [sys.executable, "-m", *arguments], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=240,
        check=False,
    )  # fmt: skip


def test_a_killed_run_stays_one_run_with_every_step_once(
    tmp_path: Path, wandb_server: tuple[str, list[object]]
) -> None:
    """Killed before the first checkpoint (4), and between the first and the second."""
    identities = []
    for calls, code in ((2, -signal.SIGKILL), (7, -signal.SIGKILL), (99, 0)):
        worker = start(["tests.integration.tracked_worker", str(tmp_path), str(calls)], wandb_server[0], tmp_path)
        assert worker.returncode == code, worker.stderr
        identities.append((tmp_path / "run_id.txt").read_text().strip())
    (run,) = read_offline_runs(tmp_path)  # the last process repeats what the others sent, and theirs is gone
    assert {run.run_id} == set(identities)
    rows = run.history
    assert [row["_step"] for row in rows] == list(range(1, 11))
    assert [row["_step"] for row in rows if "eval/renewal@2" in row] == [4, 8, 10]
    scalars = tensorboard_scalars(tmp_path)
    assert [step for step, _ in scalars["train/loss"]] == list(range(1, 11))
    assert [step for step, _ in scalars["eval/renewal@2"]] == [4, 8, 10]
    shown = {"train/loss", "train/learning_rate", "train/tokens_per_second", "train/memory_gb", "train/grad_norm"}
    shown |= {"eval/renewal@2", "eval/position_average@2", "eval/conditional_acceptance_1"}
    assert shown <= scalars.keys()
    for name in ("train/loss", "eval/renewal@2"):
        assert [value for _, value in scalars[name]] == pytest.approx([row[name] for row in rows if name in row])
    (part,) = tmp_path.glob("wandb/offline-run-*")
    assert f"to send this run: wandb sync {part}\n" in worker.stderr
    assert worker.stderr.count("wandb:") == 1  # W&B itself says nothing
    assert wandb_server[1] == []


def test_the_recipe_and_the_manifests_are_the_configuration(
    tmp_path: Path, wandb_server: tuple[str, list[object]]
) -> None:
    recipe = write_recipe(
        tmp_path, target={"system_prompt": "Secret words of the user"}, train={"epochs": 1},
        responses={"temperature": 0.7}, eval={"temperature": [0.0, 0.7]},
    )  # fmt: skip
    for make in (run_prompts, run_responses, run_features):
        make(load_recipe(recipe))
    command = ["spec_train", "train", str(recipe), 'train.trackers=["wandb","tensorboard"]', "optim.lr=0.0031"]
    worker = start(command, wandb_server[0], tmp_path)
    assert worker.returncode == 0, worker.stderr
    directory = tmp_path / "run" / "train"
    (run,) = read_offline_runs(directory)
    assert (run.project, run.name) == ("spec-train", "tiny")
    config = run.config
    assert config["recipe"]["optim"]["lr"] == 0.0031
    for stage in ("prompts", "responses", "features", "train"):
        manifest = read_manifest(tmp_path / "run" / stage)
        for key in ("inputs_sha256", "versions", "git_revision"):
            assert config["manifests"][stage][key] == manifest[key]
    assert config["manifests"]["responses"]["counts"]["train"] == 19
    assert len(config["target"]["weights"]) == 64
    text = tensorboard_config(directory)
    assert "recipe.optim.lr: 0.0031" in text
    assert f"manifests.features.inputs_sha256: {config['manifests']['features']['inputs_sha256']}" in text
    # Neither the configuration nor the command line gives the user's words away.
    for file in [*directory.glob("wandb/**/*.wandb"), *directory.glob("tensorboard/*")]:
        for word in (b"Secret words", b"optim.lr="):
            assert word not in file.read_bytes(), (file, word)
    assert config["recipe"]["target"]["system_prompt"].startswith("sha256 ")
    last = run.history[-1]
    assert last["eval/decode@3"] == last["eval/decode_renewal@3"]
    assert last["eval/decode_T0.7@3"] == last["eval/decode_renewal_T0.7_greedy@3"]
    for name in ("decode@3", "decode_T0.7@3", "renewal_T0.7_greedy@3", "renewal_T0.7_probabilistic@3"):
        assert tensorboard_scalars(directory)[f"eval/{name}"][-1][1] == pytest.approx(last[f"eval/{name}"])
    assert wandb_server[1] == []


@pytest.mark.parametrize(
    ("variable", "value", "said"),
    [
        ("WANDB_API_KEY", "tooshort", "WANDB_API_KEY invalid"),
        ("WANDB_MODE", "nonsense", "mode Input should be 'online'"),
    ],
)
def test_what_w_and_b_cannot_start_with_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, variable: str, value: str, said: str
) -> None:
    monkeypatch.delenv("WANDB_MODE", raising=False)
    monkeypatch.setenv(variable, value)
    with pytest.raises(UserError, match=rf"W&B does not start \(.*{said}.*; set WANDB_MODE=offline") as caught:
        Trackers(["wandb"], tmp_path, "id", 0, {}, {})
    assert "tooshort" not in str(caught.value) and "\n" not in str(caught.value)


def test_a_missing_tracker_is_named() -> None:
    with pytest.raises(UserError, match="no_such_tracker, which is not installed"):
        check_trackers(["no_such_tracker"])
