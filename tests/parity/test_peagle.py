"""P-EAGLE: one parallel pass, alike in training, in the decoder and in the estimate."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from spec_train.errors import UserError
from spec_train.speculators.peagle import PEagle, PEagleOptions, mask_token_id
from spec_train.speculators.supervision import supervised_queries
from spec_train.target import TargetModel
from tests.chain_heads import (
    PROMPTS,
    answers,
    assert_estimate_equals_decode,
    assert_packing_changes_nothing,
    assert_resumes,
    assert_silence_gives_zero,
    decode_one,
    drafted_logits,
    fit,
    randomise_norms,
    sampled_laws,
)
from tests.parity.test_eagle3 import packed_batch
from tests.tiny import tiny_model

FLAGS: list[dict[str, Any]] = [
    {"num_layers": 1},
    {"num_layers": 2, "norm_before_fc": True},
    {"num_layers": 3, "fc_norm": True, "norm_before_residual": True},
]


def head_for(target: TargetModel, draft_ids: Tensor | None = None, **changes: Any) -> PEagle:
    settings: dict[str, Any] = {"aux_layer_ids": [1, 2, 4], "num_layers": 1, "num_depths": 4, "retention": 1.0}
    ids = torch.arange(target.vocab_size) if draft_ids is None else draft_ids
    head = PEagle.from_recipe(PEagleOptions(type="peagle", **{**settings, **changes}), target, ids, 0)
    randomise_norms(head)
    return head


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> TargetModel:
    return TargetModel.load(str(tiny_model("llama", tmp_path_factory.mktemp("llama"))))


@pytest.mark.parametrize("flags", FLAGS, ids=str)
def test_training_pass_equals_the_parallel_draft(target: TargetModel, flags: dict[str, Any]) -> None:
    """Depth k of the training pass gives the logits of draft k, at and beyond the depths trained (N07)."""
    head, depths = head_for(target, **flags), 6
    ids = torch.randint(3, 300, (16,), generator=torch.Generator().manual_seed(0)).tolist()
    batch = target.fill_features(packed_batch([(ids, 3)], 1), head.feature_spec, torch.float32)
    queries = supervised_queries(batch, depths, everywhere=True)
    with torch.no_grad():
        trained = [head.lm_head(state)[0] for state in head.unroll(batch, queries, depths)]
    for p in range(4, 9):
        for k, logits in enumerate(drafted_logits(head, batch, p, depths, feed_text=False)):
            assert torch.allclose(trained[k][p], logits, atol=1e-4), (p, k)


@pytest.mark.parametrize("kind", ["llama", "qwen3", "gemma3"])
def test_estimate_equals_decode(kind: str, tmp_path: Path) -> None:
    target = TargetModel.load(str(tiny_model(kind, tmp_path)))
    head = head_for(target, torch.arange(0, 320, 2) if kind == "qwen3" else None, num_layers=2, num_depths=3)
    batch = answers(target, head)
    fit(head, batch, 30)
    for k in (3, 5):
        assert_estimate_equals_decode(target, head, batch, k)


def test_one_sample_overfit_and_corruption(target: TargetModel) -> None:
    """A head overfitted to one prompt, with the drop, is accepted almost whole; corrupted, it changes speed, never
    text (E05)."""
    head, k = head_for(target, num_layers=2, retention=0.7), 4
    fit(head, answers(target, head, PROMPTS[:1], 41), 250)
    same, tau = decode_one(target, head, k)
    assert same
    assert tau >= k + 0.9
    with torch.no_grad():
        head.mask_hidden.mul_(-1)
    same, without_mask = decode_one(target, head, k)
    assert same
    assert 1.9 < without_mask < tau - 0.5  # the first draft reads no mask
    with torch.no_grad():
        head.fc.weight.mul_(-1)
    same, corrupted = decode_one(target, head, k)
    assert same
    assert corrupted < tau - 2


def test_dropped_rows_leave_the_expected_loss(target: TargetModel) -> None:
    """The mean over many drops is the loss without; depth 0 is never dropped."""
    head = head_for(target, num_layers=2, retention=0.6, retention_min=0.3)
    batch = answers(target, head, new_tokens=20)
    normalizer = head.supervised_counts(batch)
    head.eval()
    whole = head.loss(batch, normalizer)
    head.train()
    torch.manual_seed(0)
    losses = []
    for _ in range(40):
        out = head.loss(batch, normalizer)
        losses.append(out.loss.detach())
        assert torch.equal(out.counts["hit"][:1], whole.counts["hit"][:1])
        assert torch.allclose(out.sums["depth_loss"][0], whole.sums["depth_loss"][0], atol=1e-4)
    assert abs(float(torch.stack(losses).mean() / whole.loss.detach()) - 1) < 0.02
    assert float(torch.stack(losses).std()) > 0


def test_what_is_kept_is_computed_as_in_the_whole_pass(target: TargetModel) -> None:
    """Leaving rows out changes no other row, whatever the order of the queries."""
    head = head_for(target, num_layers=2)
    batch = answers(target, head, new_tokens=20)
    queries = supervised_queries(batch, 4)
    order = torch.randperm(queries.index_BQ.shape[1], generator=torch.Generator().manual_seed(0))
    weight = queries.weight_BQK[:, order].clone()
    weight[:, 9:, 1:], weight[:, 5:, 2:] = 0, 0  # chains end early
    shuffled = type(queries)(
        queries.index_BQ[:, order], queries.valid_BQ[:, order], queries.predicted_BQK[:, order], weight
    )
    with torch.no_grad():
        pairs = zip(head.unroll(batch, queries, 4), head.unroll(batch, shuffled, 4), strict=True)
        for k, (all_rows, kept_rows) in enumerate(pairs):
            kept = weight[..., k] > 0
            assert torch.allclose(all_rows[:, order][kept], kept_rows[kept], atol=1e-5)


def test_packed_documents_do_not_see_each_other(target: TargetModel) -> None:
    assert_packing_changes_nothing(target, head_for(target, num_layers=2))


def test_an_unsupervised_batch_gives_zero_for_every_parameter(target: TargetModel) -> None:
    assert_silence_gives_zero(target, head_for(target, num_layers=2, fc_norm=True, norm_before_fc=True))


def test_half_precision_training(target: TargetModel) -> None:
    """Under bfloat16 autocast, with states as they are stored, the loss is that of float32 to a few per cent."""
    head = head_for(target, num_layers=2).eval()
    full, half = (answers(target, head, new_tokens=20, dtype=dtype) for dtype in (torch.float32, torch.bfloat16))
    wanted = head.loss(full, head.supervised_counts(full)).loss.detach()
    with torch.autocast("cpu", torch.bfloat16):
        out = head.loss(half, head.supervised_counts(half)).loss
    out.backward()  # type: ignore[no-untyped-call]
    assert abs(float(out.detach()) / float(wanted) - 1) < 0.05
    assert all(p.grad is not None and p.grad.dtype == torch.float32 for p in head.parameters())


def test_sampled_drafts_come_from_the_law_that_is_reported(target: TargetModel) -> None:
    for law in sampled_laws(target, head_for(target, torch.arange(0, 320, 2))):
        assert torch.allclose(law.sum(-1), torch.ones(law.shape[:2]), atol=1e-5)
        assert not law[..., 1::2].any()


@pytest.mark.parametrize("flags", FLAGS, ids=str)
def test_files_give_the_same_head(target: TargetModel, flags: dict[str, Any], tmp_path: Path) -> None:
    head = head_for(target, torch.arange(0, 320, 2), **flags).eval()
    batch = answers(target, head, new_tokens=12)
    hits = head.draft_hits(batch, 4)
    served = head.serving()
    assert served.speculative_config == {"parallel_drafting": True}
    assert served.speculators_config is not None
    assert served.speculators_tensors is not None
    save_file(dict(head.state_dict()), tmp_path / "model.safetensors")
    for again in (
        PEagle.from_serving(served.config, served.tensors, target),
        PEagle.from_serving(served.speculators_config, served.speculators_tensors, target),
        PEagle.from_checkpoint(tmp_path, asdict(head.config), target),
    ):
        assert again.config.mask_token_id == head.config.mask_token_id
        for name, value in head.state_dict().items():
            assert torch.equal(value, again.state_dict()[name])
        for ours, theirs in zip(hits, again.draft_hits(batch, 4), strict=True):
            assert torch.equal(ours.survival_MK, theirs.survival_MK)
    with pytest.raises(UserError, match=r"missing tensors \['mask_hidden'\]"):
        PEagle.from_serving(served.config, {k: v for k, v in served.tensors.items() if k != "mask_hidden"}, target)
    with pytest.raises(UserError, match="names no mask_token_id"):
        PEagle.from_serving({k: v for k, v in served.config.items() if k != "pard_token"}, served.tensors, target)


def test_the_mask_token_is_never_drafted(target: TargetModel) -> None:
    assert mask_token_id(None, target, torch.arange(300)) == 319
    assert mask_token_id(None, target, torch.arange(10, 320)) == 9
    assert mask_token_id(None, target, torch.arange(320)) == 0  # the pad token
    assert mask_token_id(7, target, torch.arange(10, 320)) == 7
    for wrong in (12, 320):
        with pytest.raises(UserError, match=f"mask_token_id {wrong}"):
            mask_token_id(wrong, target, torch.arange(10, 320))


def test_a_resumed_run_has_the_same_weights(target: TargetModel, tmp_path: Path) -> None:
    """The drop follows from the step."""
    assert_resumes(lambda: head_for(target, num_layers=2, retention=0.7), target, tmp_path)
