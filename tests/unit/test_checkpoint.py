"""Checkpoints: complete or absent, nothing empty, the right one found again."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from spec_train.errors import UserError
from spec_train.training import checkpoint as ckpt


def write(root: Path, step: int, tensors: dict[str, Tensor] | None = None, **changes: object) -> Path:
    tensors = tensors if tensors is not None else {"w": torch.arange(6.0).view(2, 3)}
    shapes = changes.pop("shapes", {name: tensor.shape for name, tensor in tensors.items()})
    state = ckpt.TrainState(plan={"seed": 0}, run_id="r", step=step, **changes)  # type: ignore[arg-type]
    temporary = ckpt.temporary_path(root, step)
    ckpt.begin_checkpoint(temporary)
    return ckpt.finish_checkpoint(temporary, state, tensors, shapes, {"w/exp_avg": torch.ones(2)}, {"type": "toy"})  # type: ignore[arg-type]


def test_what_is_saved_is_what_is_loaded(tmp_path: Path) -> None:
    torch.manual_seed(0)
    module, other = nn.Linear(3, 4), nn.Linear(3, 4)
    path = write(tmp_path, 7, dict(module.state_dict()), best_step=3, best_value=1.25)
    ckpt.load_weights(other, path)
    assert all(torch.equal(a, b) for a, b in zip(module.parameters(), other.parameters(), strict=True))
    assert ckpt.load_state(path) == ckpt.TrainState({"seed": 0}, "r", step=7, best_step=3, best_value=1.25)
    assert json.loads((path / "speculator.json").read_text()) == {"type": "toy"}
    assert not list(tmp_path.glob("*.tmp"))


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        ({"w": torch.empty(0)}, r"w has shape \(0,\)"),
        ({"w": torch.zeros(3, 2)}, r"w has shape \(3, 2\), not \(2, 3\)"),
        ({}, r"missing \['w'\]"),
        ({"w": torch.zeros(2, 3), "extra": torch.zeros(1)}, r"unexpected \['extra'\]"),
        ({"w": torch.full((2, 3), float("nan"))}, "w is not finite"),
    ],
)
def test_empty_missing_or_broken_tensors_leave_nothing_behind(
    tmp_path: Path, tensors: dict[str, Tensor], message: str
) -> None:
    good = write(tmp_path, 1)
    with pytest.raises(ValueError, match=message):
        write(tmp_path, 2, tensors, shapes={"w": torch.Size([2, 3])})
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-000001"]
    assert ckpt.latest_checkpoint(tmp_path) == good


def test_views_and_shared_storage_are_saved_on_their_own(tmp_path: Path) -> None:
    table = torch.randn(320, 32)
    rows = table[10:20]
    path = write(tmp_path, 1, {"head": rows, "tied": rows, "column": table.T[:4]})
    stored = (path / ckpt.MODEL_FILE).stat().st_size
    needed = 4 * (rows.numel() * 2 + 4 * 320)
    assert needed <= stored <= needed * 1.05 + 512
    module = nn.Module()
    for name in ("head", "tied"):
        module.register_buffer(name, torch.zeros(10, 32))
    module.register_buffer("column", torch.zeros(4, 320))
    ckpt.load_weights(module, path)
    assert torch.equal(module.get_buffer("tied"), rows)
    assert torch.equal(module.get_buffer("column"), table.T[:4])


def test_latest_ignores_other_names_links_and_unfinished_directories(tmp_path: Path) -> None:
    assert ckpt.latest_checkpoint(tmp_path / "absent") is None
    assert ckpt.latest_checkpoint(tmp_path) is None
    write(tmp_path, 0)
    one = write(tmp_path, 1)
    (tmp_path / "checkpoint_best").symlink_to(one)
    (tmp_path / "step-000009").symlink_to(one)
    (tmp_path / "step-best").mkdir()
    write(tmp_path, 2).rename(tmp_path / "step-000002.tmp")
    (write(tmp_path, 3) / ckpt.COMPLETE_FILE).unlink()
    (write(tmp_path, 4) / ckpt.OPTIMIZER_FILE).unlink()
    with (write(tmp_path, 5) / ckpt.MODEL_FILE).open("r+b") as file:
        file.truncate(10)
    assert ckpt.latest_checkpoint(tmp_path) == one


def test_latest_goes_by_number(tmp_path: Path) -> None:
    write(tmp_path, 999_999)
    newest = write(tmp_path, 1_000_000)
    assert ckpt.latest_checkpoint(tmp_path) == newest


def test_best_is_what_the_state_says(tmp_path: Path) -> None:
    assert ckpt.best_checkpoint(tmp_path) is None
    first, second = write(tmp_path, 1), write(tmp_path, 2)
    assert ckpt.best_checkpoint(tmp_path) == second  # never evaluated: the last one
    ckpt.mark_best(tmp_path, ckpt.TrainState({}, "r", step=2, best_step=1, best_value=1.5), "renewal@3")
    assert ckpt.best_checkpoint(tmp_path) == first
    assert json.loads((tmp_path / "best.json").read_text()) == {"step": 1, "metric": "renewal@3", "value": 1.5}
    (first / ckpt.COMPLETE_FILE).unlink()
    with pytest.raises(UserError, match="step-000001, which is missing or incomplete"):
        ckpt.best_checkpoint(tmp_path)


def test_pruning_keeps_the_newest_and_the_best(tmp_path: Path) -> None:
    for step in (1, 2, 3, 999_999, 1_000_000):
        write(tmp_path, step)
    ckpt.prune_checkpoints(tmp_path, keep=2, best_step=2)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-000002", "step-1000000", "step-999999"]


def test_weights_of_another_speculator_are_refused(tmp_path: Path) -> None:
    path = write(tmp_path, 1, dict(nn.Linear(3, 4).state_dict()))
    with pytest.raises(UserError, match=r"bias has shape \(4,\), the speculator needs \(5,\)"):
        ckpt.load_weights(nn.Linear(3, 5), path)
    with pytest.raises(UserError, match=r"unexpected \['bias'\]"):
        ckpt.load_weights(nn.Linear(3, 4, bias=False), path)
    (path / ckpt.MODEL_FILE).write_bytes(b"garbage")
    with pytest.raises(UserError, match="cannot be read"):
        ckpt.load_weights(nn.Linear(3, 4), path)
