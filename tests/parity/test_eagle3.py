"""EAGLE-3: the training pass, the decoder and the estimate must be one and the same thing."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from spec_train.batch import Batch
from spec_train.decoding.engine import plain_decode, speculative_decode
from spec_train.decoding.sampling import Sampling
from spec_train.speculators.base import Committed, Features
from spec_train.speculators.eagle3 import Eagle3, Eagle3Options, default_aux_layer_ids, eagle3_config
from spec_train.speculators.supervision import supervised_queries
from spec_train.target import TargetModel
from spec_train.training.acceptance import position_average, renewal_counts
from tests.tiny import tiny_model

GREEDY = Sampling()
PROMPTS = [[5, 6, 7, 8, 9, 10, 11], [20, 21, 22], list(range(30, 60)), [7, 7, 7, 7, 7]]


def options(**changes: Any) -> Eagle3Options:
    return Eagle3Options(type="eagle3", **{"aux_layer_ids": [1, 2, 4], **changes})


def head_for(target: TargetModel, draft_ids: Tensor | None = None, **changes: Any) -> Eagle3:
    ids = torch.arange(target.vocab_size) if draft_ids is None else draft_ids
    head = Eagle3.from_target(eagle3_config(options(**changes), target, len(ids)), target, ids, "target_layer", 0)
    torch.manual_seed(0)
    with torch.no_grad():  # all-ones norms would hide a missing or doubled norm
        for name, value in head.named_parameters():
            if "norm" in name:
                value.uniform_(0.5, 1.5)
    return head


def packed_batch(sequences: list[tuple[list[int], int]], per_row: int) -> Batch:
    """Rows of `per_row` documents each; a document is (ids, index of its first response token)."""
    rows = [sequences[i : i + per_row] for i in range(0, len(sequences), per_row)]
    width = max(sum(len(ids) for ids, _ in row) for row in rows)
    shape = (len(rows), width)
    ids, position = torch.zeros(shape, dtype=torch.long), torch.zeros(shape, dtype=torch.long)
    document, weight = torch.full(shape, -1), torch.zeros(shape)
    for r, row in enumerate(rows):
        at = 0
        for d, (tokens, start) in enumerate(row):
            end = at + len(tokens)
            ids[r, at:end], position[r, at:end] = torch.tensor(tokens), torch.arange(len(tokens))
            document[r, at:end] = d
            weight[r, at + start : end] = 1.0
            at = end
    names = tuple(tuple(f"{r}-{d}" for d in range(len(row))) for r, row in enumerate(rows))
    return Batch(ids, position, document, weight, row_ids=names)


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> TargetModel:
    return TargetModel.load(str(tiny_model("llama", tmp_path_factory.mktemp("llama"))))


FLAGS = [
    {},
    {"norm_before_fc": True, "norm_output": True},
    {"fc_norm": True, "norm_before_residual": True},
    {"num_layers": 2},
    {"qk_norm": True},
    {"aux_layer_ids": [0, 1, 2, 3, 4]},
]


@pytest.mark.parametrize("flags", FLAGS, ids=str)
def test_training_pass_equals_step_by_step_decode(target: TargetModel, flags: dict[str, Any]) -> None:
    """Depth k of the unrolled pass gives the logits of a k-step decode that is fed the same tokens (N07)."""
    torch.manual_seed(0)
    head = head_for(target, **flags)
    ids = torch.randint(3, 300, (14,)).tolist()
    batch = target.fill_features(packed_batch([(ids, 3)], 1), head.feature_spec, torch.float32)
    depths = 4
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

        def teacher(logits: Tensor, p: int = p, seen: list[Tensor] = seen) -> tuple[Tensor, None]:
            seen.append(logits[0])
            return torch.tensor([ids[p + 2 + len(seen) - 1]]), None  # feed the text's own token

        head.propose(state, depths, teacher)
        for k in range(depths):
            assert torch.allclose(trained[k][p], seen[k], atol=1e-4), (p, k)


@pytest.mark.parametrize("kind", ["llama", "qwen3", "mistral", "gemma3_text", "gemma3"])
def test_estimate_equals_decode_on_every_target(kind: str, tmp_path: Path) -> None:
    """Renewal estimate on the target's own greedy text = decoded counts, to the last token; text = plain greedy."""
    target = TargetModel.load(str(tiny_model(kind, tmp_path)))
    head = head_for(target)
    train_on_own_text(target, head, steps=25)
    plain = plain_decode(target, PROMPTS, sampling=GREEDY, max_new_tokens=40, batch_size=4)
    for k in (3, 5):
        trace = speculative_decode(
            target, head, PROMPTS, num_draft_tokens=k, sampling=GREEDY, max_new_tokens=40, batch_size=3
        )
        assert [r.output_ids for r in trace.requests] == [r.output_ids for r in plain.requests]
        cycles = [cycle for request in trace.requests for cycle in request.cycles]
        documents = [(r.prompt_ids + r.output_ids, len(r.prompt_ids)) for r in plain.requests]
        batch = target.fill_features(packed_batch(documents, 2), head.feature_spec, torch.float32)
        hits = head.draft_hits(batch, k)
        counts = renewal_counts(hits, k)
        assert counts.steps == len(cycles)
        assert counts.accepted == sum(cycle.kept for cycle in cycles) > 0
        assert counts.emitted == sum(cycle.emitted for cycle in cycles)
        assert list(counts.survived) == [sum(cycle.kept > i for cycle in cycles) for i in range(k)]
        assert position_average(hits, k) > 1.0


def train_on_own_text(target: TargetModel, head: Eagle3, steps: int, prompts: list[list[int]] = PROMPTS) -> float:
    """Plain Adam steps with linear decay on the target's greedy answers; returns the last loss."""
    plain = plain_decode(target, prompts, sampling=GREEDY, max_new_tokens=41, batch_size=4)
    documents = [(r.prompt_ids + r.output_ids, len(r.prompt_ids)) for r in plain.requests]
    batch = target.fill_features(packed_batch(documents, 2), head.feature_spec, torch.float32)
    optimizer = torch.optim.Adam(head.parameters(), lr=5e-3)
    normalizer = head.supervised_counts(batch)
    loss = torch.zeros(())
    for step in range(steps):
        for group in optimizer.param_groups:
            group["lr"] = 5e-3 * (1 - step / steps)
        optimizer.zero_grad()
        loss = head.loss(batch, normalizer).loss
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    return float(loss.detach())


def test_one_sample_overfit_and_corruption(target: TargetModel) -> None:
    """A head overfitted to one prompt is accepted almost whole; corrupted weights change speed, never text (E05)."""
    head, k, prompts = head_for(target), 4, PROMPTS[:1]
    train_on_own_text(target, head, steps=600, prompts=prompts)
    plain = plain_decode(target, prompts, sampling=GREEDY, max_new_tokens=41)

    def decode() -> tuple[list[int], float]:
        trace = speculative_decode(target, head, prompts, num_draft_tokens=k, sampling=GREEDY, max_new_tokens=41)
        cycles = trace.requests[0].cycles
        return trace.requests[0].output_ids, 1 + sum(c.accepted for c in cycles) / len(cycles)

    text, tau = decode()
    assert text == plain.requests[0].output_ids
    assert tau >= k + 0.9
    with torch.no_grad():
        head.fc.weight.mul_(-1)
    text, corrupted = decode()
    assert text == plain.requests[0].output_ids
    assert corrupted < tau - 1


def test_supervised_positions_are_the_answer_at_every_depth(target: TargetModel) -> None:
    """ids 0..9, answer 5..7: every depth predicts exactly 5, 6, 7 (M12)."""
    batch = packed_batch([(list(range(10)), 5)], 1)
    batch.loss_weight_BT[0, 8:] = 0
    queries = supervised_queries(batch, 4)
    for k in range(4):
        predicted = queries.predicted_BQK[..., k][queries.weight_BQK[..., k] > 0]
        assert sorted(predicted.tolist()) == [5, 6, 7]


def test_tokens_outside_the_draft_vocabulary_are_misses(target: TargetModel) -> None:
    """The estimate of a reduced vocabulary equals its decode, and alpha never exceeds the mass it covers."""
    ids = torch.arange(0, 320, 2)
    head = head_for(target, ids)
    train_on_own_text(target, head, steps=40)
    trace = speculative_decode(
        target, head, PROMPTS, num_draft_tokens=3, sampling=GREEDY, max_new_tokens=40, batch_size=4
    )
    documents = [(r.prompt_ids + r.output_ids, len(r.prompt_ids)) for r in trace.requests]
    batch = target.fill_features(packed_batch(documents, 2), head.feature_spec, torch.float32)
    counts = renewal_counts(head.draft_hits(batch, 3), 3)
    cycles = [c for r in trace.requests for c in r.cycles]
    assert (counts.steps, counts.accepted) == (len(cycles), sum(c.kept for c in cycles))
    drafted = {token for c in cycles for token in c.drafts}
    assert drafted <= set(ids.tolist())
    out = head.loss(batch, head.supervised_counts(batch))
    assert batch.last_hidden_BTH is not None and batch.target_lse_BT is not None
    mass = (target.logits(batch.last_hidden_BTH)[..., ids].float() - batch.target_lse_BT[..., None]).exp().sum(-1)
    assert float(out.sums["alpha"][0] / out.counts["alpha"][0]) <= float(mass[batch.target_lse_BT != 0].mean()) + 1e-6


def test_gradient_checkpointing_changes_nothing(target: TargetModel) -> None:
    grads = []
    for flag in (False, True):
        head = head_for(target, gradient_checkpointing=flag)
        batch = target.fill_features(
            packed_batch([(list(range(5, 25)), 6), (list(range(40, 52)), 4)], 2), head.feature_spec, torch.float32
        )
        head.loss(batch, head.supervised_counts(batch)).loss.backward()
        grads.append([p.grad.clone() for p in head.parameters() if p.grad is not None])
    for plain, checkpointed in zip(*grads, strict=True):
        assert torch.allclose(plain, checkpointed, atol=1e-6)


def test_packed_documents_do_not_see_each_other(target: TargetModel) -> None:
    """Packing A and B into a row gives the loss and gradient of A and B apart (D13)."""
    a, b = (list(range(5, 25)), 6), (list(range(40, 52)), 4)
    head = head_for(target)
    normalizer = head.supervised_counts(packed_batch([a, b], 1))
    results = []
    for per_row in (1, 2):
        head.zero_grad()
        batch = target.fill_features(packed_batch([a, b], per_row), head.feature_spec, torch.float32)
        loss = head.loss(batch, normalizer).loss
        loss.backward()
        results.append((loss.detach(), head.fc.weight.grad.clone()))  # type: ignore[union-attr]
    assert torch.allclose(results[0][0], results[1][0], atol=1e-5)
    assert torch.allclose(results[0][1], results[1][1], atol=1e-5)


def test_default_aux_layers_are_distinct_for_shallow_targets() -> None:
    assert default_aux_layer_ids(30) == (2, 15, 27)
    for layers in range(3, 12):
        ids = default_aux_layer_ids(layers)
        assert len(set(ids)) == len(ids) and ids[-1] <= layers
