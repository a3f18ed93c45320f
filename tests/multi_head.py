"""What the tests of MLP speculators and Medusa share: batches of the target's own answers, training, decoding."""

from __future__ import annotations

import contextlib
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from spec_train.batch import Batch
from spec_train.data.documents import Document
from spec_train.decoding.engine import plain_decode, speculative_decode
from spec_train.decoding.sampling import Sampling
from spec_train.decoding.trace import Cycle
from spec_train.recipe import OptimSection, TrainSection
from spec_train.speculators.base import Committed, Features
from spec_train.speculators.multi_head import MultiHead
from spec_train.speculators.supervision import supervised_queries
from spec_train.target import TargetModel
from spec_train.training.acceptance import renewal_counts
from spec_train.training.checkpoint import checkpoint_path
from spec_train.training.trainer import train
from tests.parity.test_eagle3 import packed_batch

GREEDY = Sampling()
PROMPTS = [[5, 6, 7, 8, 9, 10, 11], [20, 21, 22], list(range(30, 60)), [7, 7, 7, 7, 7]]


def fresh(cls: type[MultiHead], target: TargetModel, draft_ids: torch.Tensor | None = None, **options: Any) -> Any:
    """A speculator as a recipe makes it; norms, which start at one and zero, are randomised."""
    ids = torch.arange(target.vocab_size) if draft_ids is None else draft_ids
    speculator = cls.from_recipe(cls.options(type=cls.kind, **options), target, ids, 0)
    torch.manual_seed(0)
    with torch.no_grad():
        for name, value in speculator.named_parameters():
            if value.ndim == 1:
                value.uniform_(0.5, 1.5) if name.endswith("weight") else value.normal_(std=0.1)
    return speculator


def answers(target: TargetModel, prompts: list[list[int]] = PROMPTS) -> Batch:
    """The target's greedy answers with their hidden states, two documents in a row."""
    plain = plain_decode(target, prompts, sampling=GREEDY, max_new_tokens=40, batch_size=4).requests
    batch = packed_batch([(r.prompt_ids + r.output_ids, len(r.prompt_ids)) for r in plain], 2)
    return target.fill_features(batch, MultiHead.required_features(None, target), torch.float32)


def fit(speculator: MultiHead, batch: Batch, steps: int, lr: float = 5e-3) -> float:
    """Plain Adam with linear decay; returns the last loss."""
    optimizer = torch.optim.Adam(speculator.parameters(), lr=lr)
    normalizer = speculator.supervised_counts(batch)
    loss = torch.zeros(())
    for step in range(steps):
        optimizer.param_groups[0]["lr"] = lr * (1 - step / steps)
        optimizer.zero_grad()
        loss = speculator.loss(batch, normalizer).loss
        loss.backward()
        optimizer.step()
    return float(loss.detach())


def decode(
    target: TargetModel, speculator: MultiHead, k: int, prompts: list[list[int]] = PROMPTS, **sampling: Any
) -> tuple[list[list[int]], list[Cycle]]:
    """(answers, cycles of all requests), three requests at a time."""
    trace = speculative_decode(
        target,
        speculator,
        prompts,
        num_draft_tokens=k,
        sampling=Sampling(**sampling),
        max_new_tokens=40,
        batch_size=3,
    )
    return [r.output_ids for r in trace.requests], [cycle for r in trace.requests for cycle in r.cycles]


def acceptance_length(cycles: list[Cycle]) -> float:
    return 1 + sum(cycle.accepted for cycle in cycles) / len(cycles)


def assert_pass_equals_steps(target: TargetModel, speculator: MultiHead) -> None:
    """Head k of the teacher-forced pass gives the logits of step-by-step drafting that is fed the same tokens (N07),
    and the module that an engine runs drafts what the decoder drafts."""
    torch.manual_seed(1)
    ids = torch.randint(3, 300, (14,)).tolist()
    batch = target.fill_features(packed_batch([(ids, 3)], 1), speculator.feature_spec, torch.float32)
    depths = speculator.num_depths
    queries = supervised_queries(batch, depths, everywhere=True)
    heads = speculator.heads
    with torch.no_grad():
        trained = [
            state[0] @ heads.output_head(k).T for k, state in enumerate(speculator.unroll(batch, queries, depths))
        ]
    assert batch.last_hidden_BTH is not None
    for p in range(4, 9):
        features = Features(None, batch.last_hidden_BTH[:, : p + 1])
        rows = Committed(torch.tensor([ids[1 : p + 2]]), torch.arange(p + 1)[None], torch.tensor([p + 1]), features)
        state = speculator.begin([ids], 32)
        speculator.commit(state, rows)
        seen: list[torch.Tensor] = []

        def teacher(logits: torch.Tensor, p: int = p, seen: list[torch.Tensor] = seen) -> tuple[torch.Tensor, None]:
            seen.append(logits[0])
            index = speculator.draft_index_V[ids[p + 2 + len(seen) - 1]]
            return index[None], None  # feed the text's own token

        speculator.propose(state, depths, teacher)
        for k in range(depths):
            assert torch.allclose(trained[k][p], seen[k], atol=1e-4), (p, k)
        greedy = speculator.propose(state, depths, lambda logits: (logits.argmax(-1), None))
        assert greedy.probs_BKV is None
        own = heads.draft(batch.last_hidden_BTH[:, p], torch.tensor([ids[p + 1]]), depths)
        assert torch.equal(greedy.token_BK, own)


def assert_estimate_equals_decode(target: TargetModel, speculator: MultiHead) -> None:
    """The renewal estimate on the target's own answers is what decoding does, to the last token; the text stays."""
    plain = plain_decode(target, PROMPTS, sampling=GREEDY, max_new_tokens=40, batch_size=4).requests
    batch = answers(target)
    for k in range(1, speculator.num_depths + 1):
        text, cycles = decode(target, speculator, k)
        assert text == [request.output_ids for request in plain]
        counts = renewal_counts(speculator.draft_hits(batch, k), k)
        assert counts.steps == len(cycles)
        assert counts.accepted == sum(cycle.kept for cycle in cycles) > 0
        assert counts.emitted == sum(cycle.emitted for cycle in cycles)
        assert list(counts.survived) == [sum(cycle.kept > i for cycle in cycles) for i in range(k)]


def plain_loss(speculator: MultiHead, target: TargetModel, batch: Batch, normalizer: torch.Tensor) -> torch.Tensor:
    """The KL loss position by position: heads fed one state and one token at a time, full softmaxes, no chunks."""
    heads, ids = speculator.heads, speculator.heads.draft_ids_D
    assert batch.last_hidden_BTH is not None
    total = torch.zeros(())
    for b, p in torch.cartesian_prod(*map(torch.arange, batch.input_ids_BT.shape)).tolist():
        state = heads.start(batch.last_hidden_BTH[b, p])
        for k in range(heads.num_heads):
            if p + 2 + k >= batch.input_ids_BT.shape[1] or batch.document_BT[b, p] != batch.document_BT[b, p + 2 + k]:
                break
            state = heads.step(state, batch.input_ids_BT[b, p + 1 + k], k)
            target_probs = target.logits(batch.last_hidden_BTH[b, p + 1 + k]).softmax(-1)[ids]
            log_draft = (heads.output_head(k) @ state[0]).log_softmax(-1)
            kl = (target_probs * (target_probs.log() - log_draft)).sum()
            weight = batch.loss_weight_BT[b, p + 2 + k] * (batch.document_BT[b, p] >= 0)
            total = total + speculator.config.step_decay**k * weight * kl / normalizer[k]
    return total.float()


def assert_loss_equals_plain_loss(speculator: MultiHead, target: TargetModel) -> None:
    """Gathered, packed and fused, the loss and its gradient are those of the plain loop; nearly so in bfloat16."""
    torch.manual_seed(1)
    documents = [(torch.randint(3, 300, (length,)).tolist(), start) for length, start in ((12, 4), (9, 6), (10, 1))]
    batch = target.fill_features(packed_batch(documents, 2), speculator.feature_spec, torch.float32)
    normalizer = speculator.supervised_counts(batch)
    gradients, losses = [], []
    for loss in (speculator.loss(batch, normalizer).loss, plain_loss(speculator, target, batch, normalizer)):
        speculator.zero_grad()
        loss.backward()
        losses.append(float(loss.detach()))
        gradients.append({name: p.grad.clone() for name, p in speculator.named_parameters() if p.grad is not None})
    assert abs(losses[0] - losses[1]) < 1e-5 * losses[1]
    for name, gradient in gradients[1].items():
        assert torch.allclose(gradients[0][name], gradient, atol=1e-5), name
    with torch.autocast("cpu", torch.bfloat16):
        states = list(speculator.unroll(batch, supervised_queries(batch, 1), 1))
        half = speculator.loss(batch, normalizer).loss
    assert states[0].dtype == torch.bfloat16  # the loss is computed in the dtype of the states
    assert abs(float(half.detach()) - losses[1]) < 0.03 * losses[1]


def assert_supervision(speculator: MultiHead, target: TargetModel) -> None:
    """Every weight of every head learns (N05); a batch that supervises nothing gives a 0 that reaches all weights."""
    batch = answers(target)
    speculator.loss(batch, speculator.supervised_counts(batch)).loss.backward()
    for name, parameter in speculator.named_parameters():
        assert parameter.grad is not None
        # The first cell state is 0, so what it is multiplied with has no effect.
        assert (float(parameter.grad.norm()) > 0) != name.endswith("forget_proj.0.weight"), name
    speculator.zero_grad()
    nothing = packed_batch([(list(range(5, 20)), 15)], 1)
    batch = target.fill_features(nothing, speculator.feature_spec, torch.float32)
    out = speculator.loss(batch, torch.ones(speculator.num_depths, dtype=torch.float64))
    out.loss.backward()
    assert float(out.loss.detach()) == 0
    assert all(p.grad is not None and float(p.grad.abs().sum()) == 0 for p in speculator.parameters())


def train_checkpoint(speculator: MultiHead, target: TargetModel, output_dir: Path, steps: int, **changes: Any) -> Path:
    """Run the trainer on the target's answers for `steps` of 4 steps; the checkpoint of the last one."""
    plain = plain_decode(target, PROMPTS, sampling=GREEDY, max_new_tokens=20, batch_size=4).requests
    documents = [
        Document(r.id, r.prompt_ids + r.output_ids, [(len(r.prompt_ids), len(r.prompt_ids) + len(r.output_ids))])
        for r in plain
    ]
    seen = 0

    def provider(batch: Batch) -> Batch:
        nonlocal seen
        seen += 1
        if seen > steps:
            raise KeyboardInterrupt
        return target.fill_features(batch, speculator.feature_spec, torch.float32)

    settings: dict[str, Any] = {"max_steps": 4, "micro_batch_tokens": 64, "save_every": 1, "precision": "fp32"}
    with contextlib.suppress(KeyboardInterrupt):
        train(
            speculator,
            documents,
            [],
            provider,
            optim=OptimSection(lr=1e-2),
            train=TrainSection(**{**settings, **changes}),
            seed=0,
            device="cpu",
            num_draft_tokens=(2,),
            output_dir=output_dir,
            speculator_config={"type": speculator.kind, "config": asdict(speculator.config)},
            run_config={"name": "test"},
        )
    return checkpoint_path(output_dir / "checkpoints", steps)
