"""EAGLE-1: the training pass, the decoder and the estimate must be one and the same thing."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import Tensor

from spec_train.errors import UserError
from spec_train.speculators.eagle import Eagle1, Eagle1Options
from spec_train.speculators.losses import head_loss_reference
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


def head_for(target: TargetModel, loss_ids: Tensor | None = None, **changes: Any) -> Eagle1:
    ids = torch.arange(target.vocab_size) if loss_ids is None else loss_ids
    head = Eagle1.from_recipe(Eagle1Options(type="eagle1", **changes), target, ids, 0)
    randomise_norms(head)
    return head


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> TargetModel:
    return TargetModel.load(str(tiny_model("llama", tmp_path_factory.mktemp("llama"))))


@pytest.mark.parametrize("flags", [{}, {"num_layers": 3, "gradient_checkpointing": True}], ids=str)
def test_training_pass_equals_step_by_step_decode(target: TargetModel, flags: dict[str, Any]) -> None:
    """Depth k of the unrolled pass gives the logits of a k-step decode that is fed the same tokens (N07)."""
    head, depths = head_for(target, **flags), 4
    ids = torch.randint(3, 300, (14,), generator=torch.Generator().manual_seed(0)).tolist()
    batch = target.fill_features(packed_batch([(ids, 3)], 1), head.feature_spec, torch.float32)
    queries = supervised_queries(batch, depths, everywhere=True)
    with torch.no_grad():
        trained = [head.draft_logits(state)[0] for state in head.unroll(batch, queries, depths)]
    for p in range(4, 9):
        for k, logits in enumerate(drafted_logits(head, batch, p, depths, feed_text=True)):
            assert torch.allclose(trained[k][p], logits, atol=1e-4), (p, k)


@pytest.mark.parametrize("kind", ["llama", "qwen3", "gemma3", "gpt_neox"])
def test_estimate_equals_decode(kind: str, tmp_path: Path) -> None:
    target = TargetModel.load(str(tiny_model(kind, tmp_path)))
    # With a loss over part of the vocabulary, drafts still come from all of it.
    head = head_for(target, torch.arange(0, 320, 2) if kind == "qwen3" else None)
    batch = answers(target, head)
    fit(head, batch, 40)
    for k in (3, 5):
        assert_estimate_equals_decode(target, head, batch, k)


def test_one_sample_overfit_and_corruption(target: TargetModel) -> None:
    """A head overfitted to one prompt is accepted almost whole; corrupted weights change speed, never text (E05)."""
    head, k = head_for(target, ttt_steps=4), 4
    fit(head, answers(target, head, PROMPTS[:1], 41), 300)
    same, tau = decode_one(target, head, k)
    assert same
    assert tau >= k + 0.9
    with torch.no_grad():
        head.fc.weight.mul_(-1)
    same, corrupted = decode_one(target, head, k)
    assert same
    assert corrupted < tau - 1


def test_a_fresh_head_starts_near_the_target(target: TargetModel) -> None:
    """Before any training its first draft is nearly the token that the target's own state gives, one too early."""
    head = Eagle1.from_recipe(Eagle1Options(type="eagle1"), target, torch.arange(320), 0)
    batch = answers(target, head)
    assert batch.last_hidden_BTH is not None
    with torch.no_grad():
        queries = supervised_queries(batch, 1)
        state = next(head.unroll(batch, queries, 1))[queries.valid_BQ]
        rows = torch.arange(2)[:, None]
        own = batch.last_hidden_BTH[rows, queries.index_BQ][queries.valid_BQ]
    assert float(F.cosine_similarity(state, own).mean()) > 0.7


@pytest.mark.parametrize("loss", ["kl", "lk"])
def test_loss_equals_the_obvious_one(target: TargetModel, loss: Any) -> None:
    """Value and gradient of head loss and regression, written out position by position."""
    ids = torch.arange(0, 320, 2)
    head = head_for(target, ids, ttt_steps=2, loss=loss, feature_loss_weight=0.7, step_decay=0.5)
    batch = answers(target, head, PROMPTS[:2], 12)
    normalizer = head.supervised_counts(batch)
    ours = head.loss(batch, normalizer)
    ours.loss.backward()  # type: ignore[no-untyped-call]
    gradient = head.fc.weight.grad
    assert gradient is not None
    assert batch.last_hidden_BTH is not None
    head.fc.weight.grad = None
    queries = supervised_queries(batch, 2)
    total = torch.zeros(())
    for k, state_BQH in enumerate(head.unroll(batch, queries, 2)):
        for b in range(state_BQH.shape[0]):
            for q in range(state_BQH.shape[1]):
                if queries.weight_BQK[b, q, k] == 0:
                    continue
                at = int(queries.predicted_BQK[b, q, k])
                wanted, state = batch.last_hidden_BTH[b, at - 1], state_BQH[b, q]
                probs = target.logits(wanted).softmax(-1)[ids]
                label = torch.tensor([-1])
                scale = torch.ones(1)
                head_loss = head_loss_reference(
                    state[None], target.lm_head.weight[ids], probs[None], scale, label, loss
                )
                regression = F.smooth_l1_loss(state, wanted)
                total = total + 0.5**k / normalizer[k].float() * (head_loss.total + 0.7 * regression)
    total.backward()  # type: ignore[no-untyped-call]
    assert head.fc.weight.grad is not None
    assert torch.allclose(ours.loss, total, atol=1e-5)
    assert torch.allclose(gradient, head.fc.weight.grad, atol=1e-5)
    assert set(ours.sums) == {"depth_loss", "alpha", "hit", "feature_loss"}


def test_packed_documents_do_not_see_each_other(target: TargetModel) -> None:
    assert_packing_changes_nothing(target, head_for(target, num_layers=2))


def test_an_unsupervised_batch_gives_zero_for_every_parameter(target: TargetModel) -> None:
    assert_silence_gives_zero(target, head_for(target, num_layers=2))


def test_half_precision_training(target: TargetModel) -> None:
    """Under bfloat16 autocast, with states as they are stored, the loss is that of float32 to a few per cent."""
    head = head_for(target)
    full, half = (answers(target, head, new_tokens=20, dtype=dtype) for dtype in (torch.float32, torch.bfloat16))
    wanted = head.loss(full, head.supervised_counts(full)).loss.detach()
    with torch.autocast("cpu", torch.bfloat16):
        out = head.loss(half, head.supervised_counts(half)).loss
    out.backward()  # type: ignore[no-untyped-call]
    assert abs(float(out.detach()) / float(wanted) - 1) < 0.05
    assert all(p.grad is not None and p.grad.dtype == torch.float32 for p in head.parameters())
    assert head.draft_hits(half, 2)  # the trainer evaluates without autocast


def test_sampled_drafts_come_from_the_law_that_is_reported(target: TargetModel) -> None:
    for law in sampled_laws(target, head_for(target)):
        assert torch.allclose(law.sum(-1), torch.ones(law.shape[:2]), atol=1e-5)


@pytest.mark.parametrize("layers", [1, 2])
def test_files_give_the_same_head(target: TargetModel, layers: int, tmp_path: Path) -> None:
    head = head_for(target, torch.arange(0, 320, 2), num_layers=layers).eval()
    batch = answers(target, head, new_tokens=12)
    hits = head.draft_hits(batch, 4)
    served = head.serving()
    assert served.speculators_config is None
    assert not {"lm_head.weight", "norm.weight", "layers.0.input_layernorm.weight"} & set(served.tensors)
    assert ("layers.1.input_layernorm.weight" in served.tensors) == (layers == 2)
    save_file(dict(head.state_dict()), tmp_path / "model.safetensors")
    for again in (
        Eagle1.from_serving(served.config, served.tensors, target),
        Eagle1.from_checkpoint(tmp_path, asdict(head.config), target),
    ):
        for name, value in head.state_dict().items():
            assert torch.equal(value, again.state_dict()[name])
        for ours, theirs in zip(hits, again.draft_hits(batch, 4), strict=True):
            assert torch.equal(ours.survival_MK, theirs.survival_MK)
    tensors = {name.replace("fc.", "fd."): value for name, value in served.tensors.items()}
    with pytest.raises(UserError, match=r"missing tensors \['fc.weight'\], unknown tensors \['fd.weight'\]"):
        Eagle1.from_serving(served.config, tensors, target)
    with pytest.raises(UserError, match="trained for a target of vocabulary 384 and width 64"):
        Eagle1.from_serving({**served.config, "vocab_size": 384}, served.tensors, target)


def test_a_resumed_run_has_the_same_weights(target: TargetModel, tmp_path: Path) -> None:
    assert_resumes(lambda: head_for(target), target, tmp_path)
