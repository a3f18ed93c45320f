"""The training loop: the loss is one mean over the whole step, bad numbers stop it, runs resume, the best one wins."""

from __future__ import annotations

import json
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from spec_train.batch import Batch
from spec_train.data.batches import build_batch
from spec_train.data.documents import Document
from spec_train.errors import UserError
from spec_train.training.checkpoint import best_checkpoint, latest_checkpoint, load_state, load_weights
from spec_train.training.schedule import learning_rate_scale
from spec_train.training.trainer import NonFiniteError
from tests.toy_speculator import ToySpeculator, toy_documents, toy_states, toy_train


def log_lines(output_dir: Path) -> list[dict[str, float]]:
    return [json.loads(line) for line in (output_dir / "log.jsonl").read_text().splitlines()]


def weights(output_dir: Path) -> dict[str, torch.Tensor]:
    latest = latest_checkpoint(output_dir / "checkpoints")
    assert latest is not None
    return load_file(latest / "model.safetensors")


def assert_close(one: dict[str, torch.Tensor], two: dict[str, torch.Tensor], tolerance: float) -> None:
    assert one.keys() == two.keys()
    for name, value in one.items():
        torch.testing.assert_close(value, two[name], rtol=0, atol=tolerance)


def answers(*lengths: int) -> list[Document]:
    """Documents of 16 tokens whose last `n` are the answer."""
    tokens = [[(7 * d + 3 * t) % 23 for t in range(16)] for d in range(len(lengths))]
    return [Document(f"doc-{d}", tokens[d], [(16 - answer, 16)] if answer else []) for d, answer in enumerate(lengths)]


@pytest.mark.parametrize("lengths", [(3, 9, 1, 5), (3, 9, 0, 5)], ids=["unequal", "one without supervision"])
def test_four_micro_batches_equal_one_large_batch(tmp_path: Path, lengths: tuple[int, ...]) -> None:
    common: dict[str, Any] = {"documents": answers(*lengths), "epochs": 5, "held_out": 0}
    one = toy_train(tmp_path / "one", speculator=ToySpeculator(dropout=0), micro_batch_tokens=64, **common)
    four = toy_train(
        tmp_path / "four", speculator=ToySpeculator(dropout=0), micro_batch_tokens=16, grad_accum_steps=4, **common
    )
    assert one.steps == four.steps == 5
    assert one.trained_tokens == four.trained_tokens == 5 * sum(lengths)
    assert_close(weights(tmp_path / "one"), weights(tmp_path / "four"), 1e-6)
    for a, b in zip(log_lines(tmp_path / "one"), log_lines(tmp_path / "four"), strict=True):
        assert a["loss"] == pytest.approx(b["loss"], abs=1e-6)
        assert a["grad_norm"] == pytest.approx(b["grad_norm"], abs=1e-6)


def test_loss_is_the_mean_over_supervised_tokens_of_each_depth(tmp_path: Path) -> None:
    documents = answers(3, 9, 1, 5)
    for normalization in ("token", "sequence"):
        out = tmp_path / normalization
        toy_train(
            out,
            documents=documents,
            speculator=ToySpeculator(dropout=0),
            micro_batch_tokens=32,
            grad_accum_steps=2,
            max_steps=1,
            held_out=0,
            normalization=normalization,
        )
        model, expected = ToySpeculator(dropout=0), 0.0
        for depth in range(2):
            total = weight_sum = 0.0
            for document in documents:
                ids = torch.tensor([document.input_ids])
                batch = toy_states(Batch(ids, ids, ids, ids.float()))
                log_probs = model._logits(batch, depth)[0].detach().log_softmax(-1)
                weight = 1.0 if normalization == "token" else 1.0 / document.num_response_tokens
                for t in range(16):
                    if document.loss_mask[t] and t >= depth + 2:
                        total -= weight * float(log_probs[t - depth - 2, document.input_ids[t]])
                        weight_sum += weight
            expected += total / weight_sum
        assert log_lines(out)[0]["loss"] == pytest.approx(expected, abs=1e-5)


def test_nothing_supervised_changes_nothing(tmp_path: Path) -> None:
    fresh = {name: value.clone() for name, value in ToySpeculator().state_dict().items()}
    result = toy_train(tmp_path, documents=answers(0, 0), held_out=0, optim={"weight_decay": 0.0})
    assert result.trained_tokens == 0
    assert_close(weights(tmp_path), fresh, 0.0)
    assert all(line["loss"] == 0 and line["grad_norm"] == 0 for line in log_lines(tmp_path))


def test_non_finite_states_stop_the_run_and_name_the_row(tmp_path: Path) -> None:
    steps = 0

    def poison(batch: Batch) -> Batch:
        nonlocal steps
        steps += 1
        batch = toy_states(batch)
        rows = [row for row, ids in enumerate(batch.row_ids) if "doc-7" in ids]
        if steps > 6 and rows:
            assert batch.last_hidden_BTH is not None
            batch.last_hidden_BTH[rows] = float("nan")
        return replace(batch)

    with pytest.raises(NonFiniteError, match=r"step \d+: .*doc-7") as error:
        toy_train(tmp_path, provider=poison, held_out=0, micro_batch_tokens=128, save_every=1, epochs=9)
    row = [name for name in str(error.value).replace(",", " ").replace(";", " ").split() if name.startswith("doc-")]
    assert len(row) < 10  # the row, not the whole micro-batch
    latest = latest_checkpoint(tmp_path / "checkpoints")
    assert latest is not None
    assert f"step {load_state(latest).step + 1}:" in str(error.value)
    load_weights(ToySpeculator(), latest)
    assert all(torch.isfinite(value).all() for value in weights(tmp_path).values())


def test_exploding_loss_stops_too(tmp_path: Path) -> None:
    def huge(batch: Batch) -> Batch:
        batch = toy_states(batch)
        assert batch.last_hidden_BTH is not None
        return replace(batch, last_hidden_BTH=batch.last_hidden_BTH * torch.inf)

    with pytest.raises(NonFiniteError, match=r"step 1: .* documents doc-"):
        toy_train(tmp_path, provider=huge, held_out=0)
    assert latest_checkpoint(tmp_path / "checkpoints") is None


def test_one_step_run_reloads_bit_by_bit(tmp_path: Path) -> None:
    trained = ToySpeculator()
    result = toy_train(tmp_path, speculator=trained, max_steps=1, held_out=0)
    other = ToySpeculator(seed=9)
    load_weights(other, Path(result.last_checkpoint))
    for name, value in trained.state_dict().items():
        assert torch.equal(value, other.state_dict()[name])
    assert json.loads((tmp_path / "result.json").read_text())["steps"] == 1
    assert json.loads((Path(result.last_checkpoint) / "speculator.json").read_text()) == {"type": "toy"}


def test_resume_in_the_middle_gives_the_same_bits(tmp_path: Path) -> None:
    class Stop(Exception):
        pass

    def stopping_after(calls: int) -> Any:
        def provide(batch: Batch) -> Batch:
            nonlocal calls
            calls -= 1
            if calls < 0:
                raise Stop
            return toy_states(batch)

        return provide

    whole = toy_train(tmp_path / "whole", save_every=3)
    for calls in (5, 9, 17):
        with pytest.raises(Stop):
            toy_train(tmp_path / "parts", save_every=3, provider=stopping_after(calls))
    parts = toy_train(tmp_path / "parts", save_every=3)
    assert_close(weights(tmp_path / "whole"), weights(tmp_path / "parts"), 0.0)
    assert (parts.best_value, parts.trained_tokens, parts.steps) == (
        whole.best_value,
        whole.trained_tokens,
        whole.steps,
    )
    untimed = [
        [
            {k: v for k, v in line.items() if k not in ("tokens_per_second", "memory_gb")}
            for line in log_lines(tmp_path / run)
        ]
        for run in ("whole", "parts")
    ]
    assert untimed[0] == untimed[1]
    again = toy_train(tmp_path / "parts", save_every=3)  # a finished run is not trained further
    assert again.steps == whole.steps
    assert_close(weights(tmp_path / "whole"), weights(tmp_path / "parts"), 0.0)


def test_best_is_the_highest_estimate_and_survives_a_resume(tmp_path: Path) -> None:
    result = toy_train(tmp_path, save_every=5, eval_every=2, keep_checkpoints=1)
    scores = {int(line["step"]): line["renewal@2"] for line in log_lines(tmp_path) if "renewal@2" in line}
    best = max(scores.values())
    first_best = min(step for step, value in scores.items() if value == best)
    assert result.best_value == best
    assert Path(result.best_checkpoint).name == f"step-{first_best:06d}"
    root = tmp_path / "checkpoints"
    assert best_checkpoint(root) == Path(result.best_checkpoint)
    names = {path.name for path in root.iterdir()}
    assert names == {"best.json", f"step-{first_best:06d}", f"step-{result.steps:06d}"}
    # Lost or overtaken between checkpoint and best.json: the state of the latest checkpoint restores it.
    (root / "best.json").write_text('{"step": 1, "metric": "renewal@2", "value": 0.0}')
    assert toy_train(tmp_path, save_every=5, eval_every=2, keep_checkpoints=1).best_value == best
    assert best_checkpoint(root) == root / f"step-{first_best:06d}"


def test_max_steps_goes_on_over_several_passes(tmp_path: Path) -> None:
    result = toy_train(tmp_path, documents=toy_documents(3), max_steps=8, epochs=1, held_out=0)
    assert result.steps == 8
    lines = log_lines(tmp_path)
    assert [line["step"] for line in lines] == list(range(1, 9))
    assert lines[-1]["epoch"] > 1


def test_steps_are_of_like_size_and_the_run_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Prompts of 6 to 20 tokens, answers of 2 to 12, in micro-batches of 200."""
    draw = random.Random(0)
    documents = []
    for place in range(300):
        prompt, answer = draw.randint(6, 20), draw.randint(2, 12)
        ids = [draw.randrange(23) for _ in range(prompt + answer)]
        documents.append(Document(f"doc-{place}", ids, [(prompt, prompt + answer)]))
    result = toy_train(tmp_path, documents=documents, micro_batch_tokens=200, epochs=1, held_out=0)
    tokens = [int(line["tokens"]) for line in log_lines(tmp_path)]
    assert max(tokens) <= 1.3 * min(tokens)
    assert (result.smallest_step_tokens, result.largest_step_tokens) == (min(tokens), max(tokens))
    assert f"train: {len(tokens)} steps an epoch, of {min(tokens)} to {max(tokens)} supervised tokens" in " ".join(
        capsys.readouterr().err.split()
    )
    toy_train(tmp_path / "long", documents=answers(16, 2), micro_batch_tokens=16, epochs=1, held_out=0)
    assert "of 2 to 16 supervised tokens; larger train.micro_batch_tokens" in capsys.readouterr().err


@pytest.mark.parametrize("optim", [{}, {"max_grad_norm": 1000.0}], ids=["clipped", "not clipped"])
def test_steps_are_those_of_a_hand_built_optimiser(tmp_path: Path, optim: dict[str, float]) -> None:
    """Schedule, clipping, betas, epsilon and weight decay (of matrices alone) as the recipe has them."""
    settings: dict[str, Any] = {"lr": 0.02, "betas": [0.6, 0.9], "eps": 1e-3, "weight_decay": 0.5, "max_grad_norm": 0.1}
    settings |= {"schedule": "cosine", "warmup_ratio": 0.4, "min_lr_ratio": 0.1, **optim}
    documents, model = answers(3, 9, 1, 5), ToySpeculator(dropout=0)
    trained = ToySpeculator(dropout=0)
    common: dict[str, Any] = {"documents": documents, "held_out": 0, "optim": settings, "micro_batch_tokens": 64}
    toy_train(tmp_path, speculator=trained, max_steps=6, **common)
    groups = [
        {"params": [p for p in model.parameters() if p.ndim >= 2], "weight_decay": 0.5},
        {"params": [p for p in model.parameters() if p.ndim < 2], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=0.0, betas=(0.6, 0.9), eps=1e-3)
    for step, line in enumerate(log_lines(tmp_path)):
        scale = learning_rate_scale(step, 6, warmup_ratio=0.4, schedule="cosine", min_lr_ratio=0.1)
        batch = toy_states(build_batch(documents, [[index] for index in range(4)]))
        loss = model(batch, model.supervised_counts(batch))[0]
        optimizer.zero_grad()
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), settings["max_grad_norm"])
        assert norm > 0.1
        assert line["grad_norm"] == pytest.approx(float(norm), rel=1e-4)
        for group in optimizer.param_groups:
            group["lr"] = 0.02 * scale
        optimizer.step()
    for name, value in model.state_dict().items():
        torch.testing.assert_close(trained.state_dict()[name], value, rtol=0, atol=1e-6)


def test_another_run_is_not_resumed(tmp_path: Path) -> None:
    toy_train(tmp_path, max_steps=4)
    with pytest.raises(UserError, match="trained with micro_batch_tokens = 64, this run has 32"):
        toy_train(tmp_path, max_steps=4, micro_batch_tokens=32)
    with pytest.raises(UserError, match="trained with documents = "):
        toy_train(tmp_path, max_steps=4, documents=toy_documents(5))
    with pytest.raises(UserError, match="total_steps = 4, this run has 5"):
        toy_train(tmp_path, max_steps=5)
    with pytest.raises(UserError, match="no documents to train on"):
        toy_train(tmp_path / "empty", documents=[])


def test_a_decode_that_needs_too_much_memory_does_not_stop_training(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def too_much(checkpoint: Path) -> dict[str, float]:
        raise torch.OutOfMemoryError

    result = toy_train(tmp_path, max_steps=4, eval_every=2, decode=too_much)
    assert result.steps == 4
    assert capsys.readouterr().err.count("set train.decode_prompts=0 or lower it") == 2
    assert [path.name for path in (tmp_path / "checkpoints").glob("*.tmp")] == []


@pytest.mark.parametrize("precision", ["bf16", "fp32"])
def test_half_precision_states_train_and_evaluate(tmp_path: Path, precision: str) -> None:
    def half(batch: Batch) -> Batch:
        batch = toy_states(batch)
        assert batch.last_hidden_BTH is not None
        return replace(batch, last_hidden_BTH=batch.last_hidden_BTH.bfloat16())

    result = toy_train(tmp_path, provider=half, precision=precision, epochs=4)
    lines = [line for line in log_lines(tmp_path) if "loss" in line]
    assert lines[-1]["loss"] < lines[0]["loss"]
    assert result.best_value is not None
    assert all(value.dtype == torch.float32 for value in weights(tmp_path).values())


@pytest.mark.parametrize("schedule", ["cosine", "linear", "constant"])
def test_schedule(schedule: Any) -> None:
    scales = [
        learning_rate_scale(step, 100, warmup_ratio=0.1, schedule=schedule, min_lr_ratio=0.2) for step in range(101)
    ]
    assert scales[:10] == pytest.approx([(step + 1) / 11 for step in range(10)])
    assert scales[10] == 1.0
    assert scales[100] == pytest.approx(1.0 if schedule == "constant" else 0.2)
    if schedule != "constant":
        assert scales[55] == pytest.approx(0.6)
        assert scales[10:] == sorted(scales[10:], reverse=True)


def test_schedule_without_warmup_or_floor_starts_high() -> None:
    assert learning_rate_scale(0, 1, warmup_ratio=0.0, schedule="cosine", min_lr_ratio=0.0) == 1.0
    assert learning_rate_scale(0, 1, warmup_ratio=0.5, schedule="cosine", min_lr_ratio=0.0) > 0.0
