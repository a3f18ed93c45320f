"""P-EAGLE: one parallel pass, alike in training, in the decoder and in the estimate."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from spec_train.batch import Batch
from spec_train.decoding.engine import plain_decode, speculative_decode
from spec_train.decoding.sampling import Sampling
from spec_train.errors import UserError
from spec_train.recipe import OptimSection, TrainSection
from spec_train.speculators.base import Committed, Features
from spec_train.speculators.peagle import PEagle, PEagleOptions, mask_token_id
from spec_train.speculators.supervision import supervised_queries
from spec_train.target import TargetModel
from spec_train.training.acceptance import renewal_counts
from spec_train.training.checkpoint import latest_checkpoint
from spec_train.training.trainer import train
from tests.parity.test_eagle3 import packed_batch
from tests.tiny import tiny_model
from tests.toy_speculator import toy_documents

GREEDY = Sampling()
PROMPTS = [[5, 6, 7, 8, 9, 10, 11], [20, 21, 22], list(range(30, 60)), [7, 7, 7, 7, 7]]
FLAGS: list[dict[str, Any]] = [
    {"num_layers": 1},
    {"num_layers": 2, "norm_before_fc": True},
    {"num_layers": 3, "fc_norm": True, "norm_before_residual": True},
]


def options(**changes: Any) -> PEagleOptions:
    settings: dict[str, Any] = {"aux_layer_ids": [1, 2, 4], "num_layers": 1, "num_depths": 4, "retention": 1.0}
    return PEagleOptions(type="peagle", **{**settings, **changes})


def head_for(target: TargetModel, draft_ids: Tensor | None = None, **changes: Any) -> PEagle:
    ids = torch.arange(target.vocab_size) if draft_ids is None else draft_ids
    head = PEagle.from_recipe(options(**changes), target, ids, 0)
    torch.manual_seed(0)
    with torch.no_grad():  # all-ones norms would hide a missing or doubled norm
        for name, value in head.named_parameters():
            if "norm" in name:
                value.uniform_(0.5, 1.5)
    return head


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> TargetModel:
    return TargetModel.load(str(tiny_model("llama", tmp_path_factory.mktemp("llama"))))


def answers(target: TargetModel, head: PEagle, prompts: list[list[int]] = PROMPTS, new_tokens: int = 40) -> Batch:
    """The target's own greedy answers, packed in twos."""
    plain = plain_decode(target, prompts, sampling=GREEDY, max_new_tokens=new_tokens, batch_size=4)
    documents = [(r.prompt_ids + r.output_ids, len(r.prompt_ids)) for r in plain.requests]
    return target.fill_features(packed_batch(documents, 2), head.feature_spec, torch.float32)


def fit(head: PEagle, batch: Batch, steps: int) -> None:
    optimizer = torch.optim.Adam(head.parameters(), lr=5e-3)
    normalizer = head.supervised_counts(batch)
    for step in range(steps):
        for group in optimizer.param_groups:
            group["lr"] = 5e-3 * (1 - step / steps)
        optimizer.zero_grad()
        head.loss(batch, normalizer).loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()


@pytest.mark.parametrize("flags", FLAGS, ids=str)
def test_training_pass_equals_the_parallel_draft(target: TargetModel, flags: dict[str, Any]) -> None:
    """Depth k of the training pass gives the logits of draft k, at and beyond the depths trained (N07)."""
    head, depths = head_for(target, **flags), 6
    ids = torch.randint(3, 300, (16,), generator=torch.Generator().manual_seed(0)).tolist()
    batch = target.fill_features(packed_batch([(ids, 3)], 1), head.feature_spec, torch.float32)
    queries = supervised_queries(batch, depths, everywhere=True)
    with torch.no_grad():
        trained = [head.lm_head(state)[0] for state in head.unroll(batch, queries, depths)]
    assert batch.aux_hidden_BTAH is not None
    for p in range(4, 9):
        state = head.begin([ids], 32)
        features = Features(batch.aux_hidden_BTAH[:, : p + 1], None)
        rows = Committed(torch.tensor([ids[1 : p + 2]]), torch.arange(p + 1)[None], torch.tensor([p + 1]), features)
        head.commit(state, rows)
        seen: list[Tensor] = []

        def record(logits: Tensor, seen: list[Tensor] = seen) -> tuple[Tensor, None]:
            seen.append(logits[0])
            return logits.argmax(-1), None

        head.propose(state, depths, record)
        for k in range(depths):
            assert torch.allclose(trained[k][p], seen[k], atol=1e-4), (p, k)


@pytest.mark.parametrize("kind", ["llama", "qwen3", "gemma3"])
def test_estimate_equals_decode(kind: str, tmp_path: Path) -> None:
    """Renewal estimate on the target's own greedy text = decoded counts, to the last token; text = plain greedy."""
    target = TargetModel.load(str(tiny_model(kind, tmp_path)))
    head = head_for(target, torch.arange(0, 320, 2) if kind == "qwen3" else None, num_layers=2, num_depths=3)
    batch = answers(target, head)
    fit(head, batch, 30)
    plain = plain_decode(target, PROMPTS, sampling=GREEDY, max_new_tokens=40, batch_size=4)
    for k in (3, 5):
        trace = speculative_decode(
            target, head, PROMPTS, num_draft_tokens=k, sampling=GREEDY, max_new_tokens=40, batch_size=3
        )
        assert [r.output_ids for r in trace.requests] == [r.output_ids for r in plain.requests]
        cycles = [cycle for request in trace.requests for cycle in request.cycles]
        counts = renewal_counts(head.draft_hits(batch, k), k)
        assert (counts.steps, counts.emitted) == (len(cycles), sum(cycle.emitted for cycle in cycles))
        assert counts.accepted == sum(cycle.kept for cycle in cycles) > 0
        assert list(counts.survived) == [sum(cycle.kept > i for cycle in cycles) for i in range(k)]


def test_one_sample_overfit_and_corruption(target: TargetModel) -> None:
    """A head overfitted to one prompt, with the drop, is accepted almost whole; without its mask state only the first
    draft is left, and the text never changes (E05)."""
    head, k, prompts = head_for(target, num_layers=2, retention=0.7), 4, PROMPTS[:1]
    fit(head, answers(target, head, prompts, 41), 250)
    plain = plain_decode(target, prompts, sampling=GREEDY, max_new_tokens=41)

    def decode() -> tuple[list[int], float]:
        trace = speculative_decode(target, head, prompts, num_draft_tokens=k, sampling=GREEDY, max_new_tokens=41)
        cycles = trace.requests[0].cycles
        return trace.requests[0].output_ids, 1 + sum(c.accepted for c in cycles) / len(cycles)

    text, tau = decode()
    assert text == plain.requests[0].output_ids
    assert tau >= k + 0.9
    with torch.no_grad():
        head.mask_hidden.mul_(-1)
        head.fc.weight.mul_(-1)
    text, corrupted = decode()
    assert text == plain.requests[0].output_ids
    assert corrupted < tau - 1


def test_dropped_rows_leave_the_expected_loss_and_gradient(target: TargetModel) -> None:
    """The mean over many drops is the loss without; one drop computes what it keeps exactly as the whole pass does."""
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
        assert torch.equal(out.counts["hit"][:1], whole.counts["hit"][:1])  # depth 0 is never dropped
        assert torch.allclose(out.sums["depth_loss"][0], whole.sums["depth_loss"][0], atol=1e-4)
    assert abs(float(torch.stack(losses).mean() / whole.loss.detach()) - 1) < 0.02
    assert float(torch.stack(losses).std()) > 0


def test_packed_documents_do_not_see_each_other(target: TargetModel) -> None:
    """Packing A and B into a row gives the loss and gradient of A and B apart (D13)."""
    documents, head = [(list(range(5, 25)), 6), (list(range(40, 52)), 4)], head_for(target, num_layers=2)
    normalizer = head.supervised_counts(packed_batch(documents, 1))
    results = []
    for per_row in (1, 2):
        head.zero_grad()
        batch = target.fill_features(packed_batch(documents, per_row), head.feature_spec, torch.float32)
        loss = head.loss(batch, normalizer).loss
        loss.backward()  # type: ignore[no-untyped-call]
        results.append([loss.detach(), *[p.grad.clone() for p in head.parameters() if p.grad is not None]])
    assert len(results[0]) == 1 + len(list(head.parameters()))
    for apart, together in zip(*results, strict=True):
        assert torch.allclose(apart, together, atol=1e-5)


def test_an_unsupervised_batch_gives_zero_for_every_parameter(target: TargetModel) -> None:
    head = head_for(target, num_layers=2, fc_norm=True, norm_before_fc=True)
    silent = target.fill_features(packed_batch([([5, 6, 7, 8], 4)], 1), head.feature_spec, torch.float32)
    assert float(head.supervised_counts(silent).sum()) == 0
    loss = head.loss(silent, torch.ones(4)).loss
    loss.backward()  # type: ignore[no-untyped-call]
    assert float(loss.detach()) == 0
    assert all(p.grad is not None and not p.grad.any() for p in head.parameters())


def test_half_precision_training(target: TargetModel) -> None:
    """Under bfloat16 autocast, with states as they are stored, the loss is that of float32 to a few per cent."""
    head = head_for(target, num_layers=2).eval()
    batch = answers(target, head, new_tokens=20)
    full = head.loss(batch, head.supervised_counts(batch)).loss.detach()
    plain = plain_decode(target, PROMPTS, sampling=GREEDY, max_new_tokens=20, batch_size=4)
    documents = [(r.prompt_ids + r.output_ids, len(r.prompt_ids)) for r in plain.requests]
    half = target.fill_features(packed_batch(documents, 2), head.feature_spec, torch.bfloat16)
    with torch.autocast("cpu", torch.bfloat16):
        out = head.loss(half, head.supervised_counts(half)).loss
    out.backward()  # type: ignore[no-untyped-call]
    assert abs(float(out.detach()) / float(full) - 1) < 0.05
    assert all(p.grad is not None and p.grad.dtype == torch.float32 for p in head.parameters())


def test_sampled_drafts_come_from_the_law_that_is_reported(target: TargetModel) -> None:
    head = head_for(target, torch.arange(0, 320, 2))
    sampling = Sampling(temperature=1.0, seed=1, draft_sample_method="probabilistic")
    laws: list[Tensor] = []
    propose = PEagle.propose

    class Watched(PEagle):
        def propose(self, *arguments: Any) -> Any:
            found = propose(self, *arguments)
            assert found.probs_BKV is not None
            laws.append(found.probs_BKV)
            assert (found.probs_BKV.gather(2, found.token_BK[..., None]) > 0).all()
            return found

    head.__class__ = Watched
    speculative_decode(target, head, PROMPTS, num_draft_tokens=3, sampling=sampling, max_new_tokens=8, batch_size=4)
    for law in laws:
        assert torch.allclose(law.sum(-1), torch.ones(law.shape[:2]), atol=1e-5)
        assert not law[..., 1::2].any()


@pytest.mark.parametrize("flags", FLAGS, ids=str)
def test_files_give_the_same_head(target: TargetModel, flags: dict[str, Any], tmp_path: Path) -> None:
    head = head_for(target, torch.arange(0, 320, 2), **flags).eval()
    batch = answers(target, head, new_tokens=12)
    hits = head.draft_hits(batch, 4)
    served = head.serving()
    assert served.speculative_config == {"parallel_drafting": True}
    assert served.speculators_config is not None and served.speculators_tensors is not None
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
            assert torch.equal(ours.hit_MK, theirs.hit_MK)
    with pytest.raises(UserError, match="missing tensors \\['mask_hidden'\\]"):
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
    """The drop follows from the step: 4 steps are 2 steps, a stop, and 2 more."""

    class Stop(Exception):
        pass

    def run(folder: Path, stop_after: int) -> dict[str, Tensor]:
        head, calls = head_for(target, num_layers=2, retention=0.7), 0

        def provide(batch: Batch) -> Batch:
            nonlocal calls
            calls += 1
            if calls > stop_after:
                raise Stop
            return target.fill_features(batch, head.feature_spec, torch.float32)

        settings = {"micro_batch_tokens": 128, "precision": "fp32", "save_every": 2, "log_every": 1, "max_steps": 4}
        train(
            head, toy_documents(12), [], provide, optim=OptimSection(lr=1e-3), train=TrainSection(**settings), seed=3,
            device="cpu", num_draft_tokens=(3,), output_dir=folder, speculator_config={}, run_config={},
        )  # fmt: skip
        assert latest_checkpoint(folder / "checkpoints") is not None
        return {name: value.detach().clone() for name, value in head.state_dict().items()}

    whole = run(tmp_path / "whole", 99)
    with pytest.raises(Stop):
        run(tmp_path / "parts", 2)
    parts = run(tmp_path / "parts", 99)
    assert all(torch.equal(value, parts[name]) for name, value in whole.items())
