"""Decoding in the middle of training: it measures what the estimate says, and training does not notice it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from spec_train.batch import Batch
from spec_train.data.documents import Document
from spec_train.decoding.engine import plain_decode
from spec_train.decoding.sampling import Sampling
from spec_train.decoding.trace import RequestTrace
from spec_train.evaluation.estimate import estimator
from spec_train.evaluation.validation_decode import ValidationDecode
from spec_train.recipe import OptimSection, TrainSection
from spec_train.speculators import load_speculator, speculator_class
from spec_train.speculators.distillation import add_target_probs
from spec_train.speculators.draft_lm import DraftLM, DraftLMOptions
from spec_train.target import TargetModel
from spec_train.training.checkpoint import latest_checkpoint
from spec_train.training.figures import SampledAnswers
from spec_train.training.overfit import overfit
from spec_train.training.trainer import train
from tests.tiny import tiny_model

UNTIMED = ("tokens_per_second", "memory_gb")


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> TargetModel:
    return TargetModel.load(str(tiny_model("llama", tmp_path_factory.mktemp("target"))))


@pytest.fixture(scope="module")
def documents(target: TargetModel) -> list[Document]:
    """The target's own answers."""
    return answers(target, Sampling())


def answers(target: TargetModel, sampling: Sampling) -> list[Document]:
    prompts = [[5 + (7 * n + 3 * t) % 300 for t in range(4 + n)] for n in range(12)]
    requests = plain_decode(target, prompts, sampling=sampling, max_new_tokens=24, batch_size=12).requests
    return [
        Document(r.id, r.prompt_ids + r.output_ids, [(len(r.prompt_ids), len(r.prompt_ids) + len(r.output_ids))])
        for r in requests
    ]


def test_the_overfit_gate_counts_kept_drafts_alone(target: TargetModel) -> None:
    """Drafts beyond the end of the one answer are not in its τ, as they are in no other: a draft that is the target has
    the best one to the last token, whatever of its last round is cut off."""
    layers = target.model.config.num_hidden_layers
    draft = DraftLM.from_recipe(
        DraftLMOptions(type="draft_lm", start_layers=layers), target, torch.arange(target.vocab_size), seed=0
    )
    prompt = [5, 12, 40]
    (request,) = plain_decode(target, [prompt], sampling=Sampling(), max_new_tokens=23).requests
    document = Document("one", prompt + request.output_ids, [(3, 3 + len(request.output_ids))])
    result = overfit(target, document, draft, num_draft_tokens=3, steps=1)
    rest = len(request.output_ids) - 1  # 22 tokens: five rounds of 4, and 2 drafts of a last one
    assert (rest % 4, result.suspect) == (2, None)
    assert result.decoded == result.best == result.estimate == 1 + (3 * (rest // 4) + 2) / (rest // 4 + 1)


class Stop(Exception):
    pass


def trained(
    target: TargetModel, documents: list[Document], options: dict[str, Any], folder: Path, decoding: bool,
    stop_after: int = 999, sampled: SampledAnswers | None = None, samplings: Sequence[Sampling] = (),
) -> list[dict[str, float]]:  # fmt: skip
    """Train eight steps and return the log. `stop_after`: the provider raises Stop after that many calls."""
    cls = speculator_class(options["type"])
    speculator = cls.from_recipe(cls.options(**options), target, torch.arange(0, 320, 2), seed=0)
    calls = 0

    def online(batch: Batch) -> Batch:
        nonlocal calls
        calls += 1
        if calls > stop_after:
            raise Stop
        return target.fill_features(batch, speculator.feature_spec, torch.float32)

    settings = TrainSection(
        micro_batch_tokens=128, precision="fp32", save_every=3, eval_every=2, log_every=1, max_steps=8
    )
    train(
        speculator, documents[3:], documents[:3], online,
        optim=OptimSection(lr=3e-3), train=settings, seed=3, device="cpu", num_draft_tokens=(3, 1), output_dir=folder,
        speculator_config={"type": options["type"], "config": asdict(speculator.config)}, run_config={},
        decode=ValidationDecode(target, documents[:3], 2, 20, 3, samplings) if decoding else None, sampled=sampled,
    )  # fmt: skip
    lines = [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]
    return [{key: value for key, value in line.items() if key not in UNTIMED} for line in lines]


def assert_same_files(one: Path, two: Path) -> None:
    checkpoints = [latest_checkpoint(run / "checkpoints") for run in (one, two)]
    for name in ("model.safetensors", "optimizer.safetensors"):
        files = [load_file(checkpoint / name) for checkpoint in checkpoints if checkpoint is not None]
        assert len(files) == 2 and files[0].keys() == files[1].keys()
        assert all(torch.equal(value, files[1][key]) for key, value in files[0].items())


METHODS: dict[str, dict[str, Any]] = {
    "eagle3": {"type": "eagle3", "ttt_steps": 3, "aux_layer_ids": [1, 2, 4]},
    "low-rank draft": {"type": "draft_lm", "start_layers": 2, "lora": {"rank": 4, "alpha": 8.0}},
    "medusa": {"type": "medusa", "num_heads": 3},
}


@pytest.mark.parametrize("options", METHODS.values(), ids=METHODS)
def test_decoding_measures_the_estimate_and_leaves_training_alone(
    target: TargetModel, documents: list[Document], options: dict[str, Any], tmp_path: Path
) -> None:
    without = trained(target, documents, options, tmp_path / "without", decoding=False)
    log = trained(target, documents, options, tmp_path / "with", decoding=True)
    assert_same_files(tmp_path / "without", tmp_path / "with")
    assert [{k: v for k, v in line.items() if not k.startswith("decode")} for line in log] == without
    decodes = [line for line in log if "decode@3" in line]
    assert [line["step"] for line in decodes] == [2, 4, 6, 8]
    for line in decodes:
        assert line["decode@3"] == line["decode_renewal@3"]
        assert line["decode_text_equal"] == 1.0
    assert any(line["decode@3"] > 1.0 for line in decodes)
    assert not list((tmp_path / "with" / "checkpoints").glob("*.tmp"))


@pytest.mark.parametrize("options", METHODS.values(), ids=METHODS)
def test_at_a_temperature_both_ways_of_drafting_are_estimated(
    target: TargetModel, options: dict[str, Any], tmp_path: Path
) -> None:
    """On sampled held-out answers the log has what evaluation estimates on them with the last checkpoint; a decode with
    greedy drafts is its own estimate, one that draws drafts scatters around it, and training is left alone."""
    greedy = Sampling(0.4, top_k=12, seed=2)
    drawn = replace(greedy, temperature=0.3, draft_sample_method="probabilistic", rejection_sample_method="block")
    documents = answers(target, greedy)
    sampled = SampledAnswers(greedy, partial(add_target_probs, target=target, sampling=greedy))
    without = trained(target, documents, options, tmp_path / "without", decoding=False)
    log = trained(
        target, documents, options, tmp_path / "with", decoding=True, sampled=sampled, samplings=[greedy, drawn]
    )
    assert_same_files(tmp_path / "without", tmp_path / "with")
    evaluations = [line for line in log if "renewal@3" in line]
    assert [line["step"] for line in evaluations] == [2, 4, 6, 8]
    assert not any("_T" in key for line in without for key in line)
    for line in evaluations:
        assert line["decode_T0.4@3"] == line["decode_renewal_T0.4_greedy@3"]
        assert line["renewal_T0.4_greedy@3"] == line["renewal@3"]
        assert 1 <= line["decode_renewal_T0.4_probabilistic@3"] <= 4
        assert {"decode_T0.3@3", "decode_renewal_T0.3_greedy@3", "decode_renewal_T0.3_probabilistic@3"} <= line.keys()
    checkpoint = latest_checkpoint(tmp_path / "with" / "checkpoints")
    assert checkpoint is not None
    texts = [RequestTrace(d.id, d.input_ids[: d.spans[0][0]], d.input_ids[d.spans[0][0] :]) for d in documents[:3]]
    speculator = load_speculator(checkpoint, target)
    estimate = estimator(target, speculator, texts, sampling=greedy, max_draft_tokens=3, batch_size=3)
    for k in (1, 3):
        for method, figures in estimate(k)["by_draft_sample_method"].items():
            assert evaluations[-1][f"renewal_T0.4_{method}@{k}"] == pytest.approx(figures["renewal"], abs=1e-6)
    last = evaluations[-1]
    assert abs(last["renewal_T0.4_greedy@3"] - last["renewal_T0.4_probabilistic@3"]) > 1e-4


def test_a_run_stopped_between_decodes_resumes_to_the_bit(
    target: TargetModel, documents: list[Document], tmp_path: Path
) -> None:
    options = METHODS["eagle3"]
    whole = trained(target, documents, options, tmp_path / "whole", decoding=True)
    with pytest.raises(Stop):
        trained(target, documents, options, tmp_path / "parts", decoding=True, stop_after=9)
    assert trained(target, documents, options, tmp_path / "parts", decoding=True) == whole
    assert_same_files(tmp_path / "whole", tmp_path / "parts")


def test_only_prompts_that_leave_room_are_decoded(target: TargetModel) -> None:
    full = Document("full", [7] * (target.max_length + 1), [(target.max_length, target.max_length + 1)])
    unfit = [Document("text", [5, 6, 7], [(0, 3)]), Document("silent", [5, 6], []), full]
    fit = [Document(str(n), [5, 6, 7, 8], [(n, 4)]) for n in (1, 2, 3)]
    assert ValidationDecode(target, unfit, 4, 8, 3).prompts == []
    assert ValidationDecode(target, [*unfit, *fit], 2, 8, 3).prompts == [[5], [5, 6]]
