"""MTP: the training pass, the decoder and the estimate must be one and the same thing, beside every kind of target."""

from __future__ import annotations

import shutil
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from spec_train.data.documents import Document
from spec_train.decoding.engine import plain_decode, speculative_decode
from spec_train.decoding.sampling import Sampling
from spec_train.errors import UserError
from spec_train.recipe import OptimSection, TrainSection
from spec_train.speculators import load_speculator
from spec_train.speculators.base import Committed, Features
from spec_train.speculators.losses import head_loss_reference
from spec_train.speculators.mtp import Mtp, MtpOptions
from spec_train.speculators.supervision import supervised_queries
from spec_train.target import TargetModel
from spec_train.training.acceptance import renewal_counts
from spec_train.training.checkpoint import latest_checkpoint
from spec_train.training.trainer import train
from tests.parity.test_eagle3 import PROMPTS, packed_batch
from tests.tiny import tiny_model

GREEDY = Sampling()


def head_for(target: TargetModel, loss_ids: Tensor | None = None, **changes: Any) -> Mtp:
    ids = torch.arange(target.vocab_size) if loss_ids is None else loss_ids
    head = Mtp.from_recipe(MtpOptions(type="mtp", **changes), target, ids, seed=0)
    torch.manual_seed(0)
    with torch.no_grad():  # all-ones norms and absent biases would hide one that is missing or applied twice
        for name, value in head.named_parameters():
            if "norm" in name:
                value.mul_(torch.empty_like(value).uniform_(0.5, 1.5))
            if name.endswith("bias"):
                value.normal_(std=0.1)
    return head


def fit(target: TargetModel, head: Mtp, steps: int, prompts: list[list[int]] = PROMPTS) -> None:
    """Plain Adam steps with linear decay on the target's greedy answers."""
    plain = plain_decode(target, prompts, sampling=GREEDY, max_new_tokens=41, batch_size=4)
    documents = [(r.prompt_ids + r.output_ids, len(r.prompt_ids)) for r in plain.requests]
    batch = target.fill_features(packed_batch(documents, 2), head.feature_spec, torch.float32)
    optimizer = torch.optim.Adam(head.parameters(), lr=5e-3)
    normalizer = head.supervised_counts(batch)
    for step in range(steps):
        for group in optimizer.param_groups:
            group["lr"] = 5e-3 * (1 - step / steps)
        optimizer.zero_grad()
        head.loss(batch, normalizer).loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> TargetModel:
    return TargetModel.load(str(tiny_model("llama", tmp_path_factory.mktemp("llama"))))


def assert_training_pass_equals_decode(target: TargetModel, head: Mtp) -> None:
    """Depth k of the unrolled pass gives the logits of a k-step decode that is fed the same tokens."""
    torch.manual_seed(0)
    ids, depths = torch.randint(3, 300, (14,)).tolist(), 4
    batch = target.fill_features(packed_batch([(ids, 3)], 1), head.feature_spec, torch.float32)
    queries = supervised_queries(batch, depths, everywhere=True)
    with torch.no_grad():
        trained = [head.logits(state)[0] for state in head.unroll(batch, queries, depths)]
    assert batch.last_hidden_BTH is not None
    for p in (0, 1, 4, 8):
        state = head.begin([ids], 32)
        aux = None if batch.aux_hidden_BTAH is None else batch.aux_hidden_BTAH[:, : p + 1]
        features = Features(aux, batch.last_hidden_BTH[:, : p + 1])
        rows = Committed(torch.tensor([ids[1 : p + 2]]), torch.arange(p + 1)[None], torch.tensor([p + 1]), features)
        head.commit(state, rows)
        seen: list[Tensor] = []

        def teacher(logits: Tensor, p: int = p, seen: list[Tensor] = seen) -> tuple[Tensor, None]:
            seen.append(logits[0])
            return torch.tensor([ids[p + 2 + len(seen) - 1]]), None  # feed the text's own token

        head.propose(state, depths, teacher)
        for k in range(depths):
            torch.testing.assert_close(trained[k][p], seen[k], atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("init", ["target_layer", "random"])
def test_training_pass_equals_step_by_step_decode(target: TargetModel, init: str) -> None:
    assert_training_pass_equals_decode(target, head_for(target, init=init))


def assert_estimate_equals_decode(target: TargetModel, head: Mtp) -> None:
    """Renewal estimate on the target's own greedy text = decoded counts, to the last token; text = plain greedy."""
    plain = plain_decode(target, PROMPTS, sampling=GREEDY, max_new_tokens=40, batch_size=4)
    documents = [(r.prompt_ids + r.output_ids, len(r.prompt_ids)) for r in plain.requests]
    batch = target.fill_features(packed_batch(documents, 2), head.feature_spec, torch.float32)
    for k in (3, 5):
        trace = speculative_decode(
            target, head, PROMPTS, num_draft_tokens=k, sampling=GREEDY, max_new_tokens=40, batch_size=3
        )
        assert [r.output_ids for r in trace.requests] == [r.output_ids for r in plain.requests]
        cycles = [cycle for request in trace.requests for cycle in request.cycles]
        counts = renewal_counts(head.draft_hits(batch, k), k)
        assert counts.steps == len(cycles)
        assert counts.accepted == sum(cycle.kept for cycle in cycles) > 0
        assert counts.emitted == sum(cycle.emitted for cycle in cycles)
        assert list(counts.survived) == [sum(cycle.kept > i for cycle in cycles) for i in range(k)]


@pytest.mark.parametrize("kind", ["llama", "qwen3"])
def test_estimate_equals_decode(kind: str, tmp_path: Path) -> None:
    target = TargetModel.load(str(tiny_model(kind, tmp_path)))
    head = head_for(target, torch.arange(0, 320, 2))  # drafts come from the whole vocabulary all the same
    fit(target, head, steps=25)
    assert_estimate_equals_decode(target, head)
    batch = target.fill_features(packed_batch([(list(range(5, 60)), 6)], 1), head.feature_spec, torch.float32)
    drafted = torch.cat([head.logits(s).argmax(-1) for s in head.unroll(batch, supervised_queries(batch, 3), 3)])
    assert (drafted % 2 == 1).any()


def test_one_sample_overfit_and_corruption(target: TargetModel) -> None:
    """A head overfitted to one prompt is accepted almost whole; corrupted weights change speed, never text (E05)."""
    head, k, prompts = head_for(target), 4, PROMPTS[:1]
    fit(target, head, steps=400, prompts=prompts)
    plain = plain_decode(target, prompts, sampling=GREEDY, max_new_tokens=41)

    def decode() -> float:
        trace = speculative_decode(target, head, prompts, num_draft_tokens=k, sampling=GREEDY, max_new_tokens=41)
        assert trace.requests[0].output_ids == plain.requests[0].output_ids
        cycles = trace.requests[0].cycles
        return 1 + sum(c.accepted for c in cycles) / len(cycles)

    tau = decode()
    assert tau >= k + 0.9
    with torch.no_grad():
        head.block.input_proj.weight.mul_(-1)
    assert decode() < tau - 1


def test_sampled_drafts_come_with_the_law_they_were_drawn_from(target: TargetModel) -> None:
    head = head_for(target)
    head.begin([[5, 6]], 16)
    features = Features(None, torch.randn(2, 3, 64))
    committed = Committed(torch.tensor([[7, 8, 9]] * 2), torch.arange(3).expand(2, -1), torch.tensor([3, 2]), features)
    for greedy in (True, False):
        state = head.begin([[5, 6]] * 2, 16)
        head.commit(state, committed)

        def choose(logits: Tensor, greedy: bool = greedy) -> tuple[Tensor, Tensor | None]:
            return logits.argmax(-1), None if greedy else logits.float().softmax(-1)

        proposal = head.propose(state, 3, choose)
        assert (proposal.probs_BKV is None) == greedy
        if proposal.probs_BKV is not None:
            assert proposal.probs_BKV.shape == (2, 3, target.vocab_size)
            assert torch.equal(proposal.probs_BKV.argmax(-1), proposal.token_BK)


@pytest.mark.parametrize("weights", ["decay", "fastmtp"])
@pytest.mark.parametrize("kind", ["kl", "lk"])
def test_loss_equals_the_obvious_one(target: TargetModel, weights: str, kind: Any) -> None:
    """Value and gradient of the whole loss against one position at a time, depth by depth."""
    ids = torch.arange(0, 320, 3)
    head = head_for(target, ids, step_weights=weights, step_decay=0.7, loss=kind)
    batch = target.fill_features(packed_batch([(list(range(5, 25)), 6)], 1), head.feature_spec, torch.float32)
    normalizer = head.supervised_counts(batch)
    out = head.loss(batch, normalizer)
    out.loss.backward()  # type: ignore[no-untyped-call]
    gradients = {name: value.grad.clone() for name, value in head.named_parameters() if value.grad is not None}
    head.zero_grad()
    share = [0.7**k for k in range(3)] if weights == "decay" else [0.6**k / (1 + 0.6 + 0.36) for k in range(3)]
    queries = supervised_queries(batch, 3, everywhere=True)
    assert batch.last_hidden_BTH is not None
    probs_TV = target.logits(batch.last_hidden_BTH[0]).float().softmax(-1)
    total = torch.zeros(())
    for k, state in enumerate(head.unroll(batch, queries, 3)):
        for p in range(20 - 2 - k):
            label = int(batch.input_ids_BT[0, p + 2 + k])
            if p + 2 + k < 6:
                continue
            index = torch.tensor([label // 3 if label % 3 == 0 else -1])
            law, scale = probs_TV[p + 1 + k, ids][None], torch.tensor([share[k] / float(normalizer[k])])
            head_DH = target.lm_head.weight[ids]
            total = total + head_loss_reference(state[0, p][None], head_DH, law, scale, index, kind, 3.0).total
    total.backward()  # type: ignore[no-untyped-call]
    torch.testing.assert_close(out.loss.detach(), total.detach(), rtol=1e-4, atol=1e-5)
    assert len(gradients) == len(list(head.parameters()))
    for name, value in head.named_parameters():
        torch.testing.assert_close(gradients[name], value.grad, rtol=1e-3, atol=1e-5)


def test_gradient_checkpointing_changes_nothing_and_packing_neither(target: TargetModel) -> None:
    documents = [(list(range(5, 25)), 6), (list(range(40, 52)), 4)]
    results = []
    for per_row, checkpointing in ((1, False), (2, False), (2, True)):
        head = head_for(target, gradient_checkpointing=checkpointing)
        batch = target.fill_features(packed_batch(documents, per_row), head.feature_spec, torch.float32)
        head.loss(batch, head.supervised_counts(batch)).loss.backward()  # type: ignore[no-untyped-call]
        results.append([p.grad.clone() for p in head.parameters() if p.grad is not None])
    for other in results[1:]:
        for one, two in zip(results[0], other, strict=True):
            torch.testing.assert_close(one, two, atol=1e-5, rtol=1e-4)


def test_an_unsupervised_batch_gives_zero_to_every_parameter(target: TargetModel) -> None:
    head = head_for(target)
    batch = target.fill_features(packed_batch([(list(range(5, 25)), 20)], 1), head.feature_spec, torch.float32)
    out = head.loss(batch, head.supervised_counts(batch))
    assert float(out.loss.detach()) == 0.0
    out.loss.backward()  # type: ignore[no-untyped-call]
    for name, value in head.named_parameters():
        assert value.grad is not None, name
        assert not value.grad.any(), name


def test_the_embedding_at_position_zero_is_not_read(target: TargetModel) -> None:
    """As vLLM does it for MiMo and DeepSeek: zeroed before the norm, at RoPE position 0 only."""
    head = head_for(target)
    state, tokens = torch.randn(1, 2, 64), torch.tensor([[7, 7]])
    one = head.mix(state, tokens, torch.arange(2)[None])
    other = head.mix(state, tokens + 1, torch.arange(2)[None])
    assert torch.equal(one[:, 0], other[:, 0])
    assert not torch.allclose(one[:, 1], other[:, 1])


def documents(target: TargetModel) -> list[Document]:
    plain = plain_decode(target, PROMPTS, sampling=GREEDY, max_new_tokens=24, batch_size=4)
    return [
        Document(r.id, r.prompt_ids + r.output_ids, [(len(r.prompt_ids), len(r.prompt_ids + r.output_ids))])
        for r in plain.requests
    ]


def run_training(target: TargetModel, out: Path, **options: Any) -> Mtp:
    """Four steps of the real trainer, resumed where `out` already has a checkpoint."""
    head = Mtp.from_recipe(MtpOptions(type="mtp", **options), target, torch.arange(4, 200), seed=1)
    answers = documents(target)
    train(
        head,
        answers,
        answers[:2],
        lambda batch: target.fill_features(batch, head.feature_spec, torch.float32),
        optim=OptimSection(lr=2e-3, schedule="constant"),
        train=TrainSection(epochs=8, max_steps=4, micro_batch_tokens=64, precision="fp32", save_every=2, log_every=1),
        seed=3,
        device="cpu",
        num_draft_tokens=(2,),
        output_dir=out,
        speculator_config={"type": "mtp", "config": asdict(head.config)},
        run_config={"name": "mtp"},
    )
    return head


def test_a_resumed_run_ends_like_a_whole_one_and_its_checkpoint_loads(target: TargetModel, tmp_path: Path) -> None:
    whole = run_training(target, tmp_path / "whole")
    half = Path("checkpoints") / "step-000002"
    shutil.copytree(tmp_path / "whole" / half, tmp_path / "parts" / half)  # as a run leaves it that was killed
    run_training(target, tmp_path / "parts")
    latest = [latest_checkpoint(tmp_path / name / "checkpoints") for name in ("whole", "parts")]
    assert latest[0] is not None
    assert latest[1] is not None
    one, two = (load_file(path / "model.safetensors") for path in latest if path is not None)
    assert one.keys() == two.keys() == {f"block.{name}" for name in whole.block.state_dict()}
    assert all(torch.equal(one[name], two[name]) for name in one)
    again = load_speculator(latest[0], target)
    assert isinstance(again, Mtp)
    assert again.config == whole.config
    assert_same_head(whole, again, target)


def assert_same_head(one: Mtp, two: Mtp, target: TargetModel) -> None:
    assert one.block.state_dict().keys() == two.block.state_dict().keys()
    for name, value in one.block.state_dict().items():
        assert torch.equal(value, two.block.state_dict()[name]), name
    batch = target.fill_features(packed_batch([(list(range(5, 60)), 6)], 1), one.feature_spec, torch.float32)
    for hits, others in zip(one.draft_hits(batch, 3), two.draft_hits(batch, 3), strict=True):
        assert torch.equal(hits.survival_MK, others.survival_MK)


@pytest.mark.parametrize("kind", ["llama", "qwen3"])
def test_served_and_read_again(kind: str, tmp_path: Path) -> None:
    target = TargetModel.load(str(tiny_model(kind, tmp_path)))
    head = head_for(target)
    served = head.serving()
    assert (served.kind, served.method, served.stitched) == ("mtp", "mtp", False)
    assert served.hf_overrides == {"num_nextn_predict_layers": 1}
    assert served.config["architectures"] == ["MiMoForCausalLM"]
    assert served.config["num_hidden_layers"] == target.num_layers
    assert served.config["max_position_embeddings"] == target.max_length
    assert served.config["rope_parameters"]["rope_theta"] == target.config.rope_parameters["rope_theta"]
    assert sorted(served.tensors) == sorted(f"model.mtp_layers.0.{name}" for name in head.block.state_dict())
    assert "model.mtp_layers.0.self_attn.q_proj.bias" in served.tensors
    again = Mtp.from_serving(served.config, served.tensors, target)
    assert_same_head(head, again, target)
    with pytest.raises(UserError, match=r"missing tensors \['final_layernorm.weight'\]"):
        Mtp.from_serving(served.config, {k: v for k, v in served.tensors.items() if "final_layernorm" not in k}, target)


@pytest.mark.parametrize("kind", ["mistral", "gemma3_text", "gpt_neox"])
def test_a_target_that_cannot_serve_a_fresh_head_is_refused(kind: str, tmp_path: Path) -> None:
    target = TargetModel.load(str(tiny_model(kind, tmp_path)))
    with pytest.raises(UserError, match="eagle3 instead"):
        head_for(target)


@pytest.mark.parametrize("kind", ["llama", "qwen3"])
def test_the_start_is_near_the_targets_own_prediction(kind: str, tmp_path: Path) -> None:
    """Initialised from the target's last layer, the head's first state points where the target's own one does."""
    target = TargetModel.load(str(tiny_model(kind, tmp_path, num_attention_heads=2, num_key_value_heads=1)))
    near = Mtp.from_recipe(MtpOptions(type="mtp"), target, torch.arange(320), seed=0)
    far = Mtp.from_recipe(MtpOptions(type="mtp", init="random"), target, torch.arange(320), seed=0)
    again = Mtp.from_recipe(MtpOptions(type="mtp"), target, torch.arange(320), seed=0)
    for one, two in zip(near.parameters(), again.parameters(), strict=True):
        assert torch.equal(one, two)
    batch = target.fill_features(packed_batch([(list(range(5, 60)), 6)], 1), near.feature_spec, torch.float32)
    queries = supervised_queries(batch, 1, everywhere=True)
    assert batch.last_hidden_BTH is not None

    def likeness(head: Mtp) -> float:
        state = next(iter(head.unroll(batch, queries, 1)))
        assert batch.last_hidden_BTH is not None
        return float(torch.cosine_similarity(state.detach(), batch.last_hidden_BTH, dim=-1).mean())

    assert likeness(near) > 0.7
    assert abs(likeness(far)) < 0.2
