"""What the tests of several heads do alike: fit one to the target's answers, decode with it, count, stop and resume."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from spec_train.batch import Batch
from spec_train.decoding.engine import plain_decode, speculative_decode
from spec_train.decoding.sampling import Sampling
from spec_train.recipe import OptimSection, TrainSection
from spec_train.speculators.base import Chooser, Committed, Features, Proposal, Speculator
from spec_train.target import TargetModel
from spec_train.training.acceptance import renewal_counts
from spec_train.training.trainer import train
from tests.parity.test_eagle3 import packed_batch
from tests.toy_speculator import toy_documents

GREEDY = Sampling()
PROMPTS = [[5, 6, 7, 8, 9, 10, 11], [20, 21, 22], list(range(30, 60)), [7, 7, 7, 7, 7]]


def randomise_norms(head: torch.nn.Module) -> None:
    """All-ones norms would hide a missing or doubled norm."""
    torch.manual_seed(0)
    with torch.no_grad():
        for name, value in head.named_parameters():
            if "norm" in name:
                value.uniform_(0.5, 1.5)


def answers(
    target: TargetModel,
    head: Speculator,
    prompts: list[list[int]] = PROMPTS,
    new_tokens: int = 40,
    dtype: torch.dtype = torch.float32,
) -> Batch:
    """The target's own greedy answers, packed in twos."""
    plain = plain_decode(target, prompts, sampling=GREEDY, max_new_tokens=new_tokens, batch_size=4)
    documents = [(r.prompt_ids + r.output_ids, len(r.prompt_ids)) for r in plain.requests]
    return target.fill_features(packed_batch(documents, 2), head.feature_spec, dtype)


def fit(head: Speculator, batch: Batch, steps: int, rate: float = 5e-3) -> None:
    """Adam with linear decay on one batch."""
    optimizer = torch.optim.Adam(head.parameters(), lr=rate)
    normalizer = head.supervised_counts(batch)
    for step in range(steps):
        for group in optimizer.param_groups:
            group["lr"] = rate * (1 - step / steps)
        optimizer.zero_grad()
        head.loss(batch, normalizer).loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()


def drafted_logits(head: Speculator, batch: Batch, p: int, depths: int, feed_text: bool) -> list[Tensor]:
    """Logits of each draft after position `p` of the first row, by the decoder; `feed_text`: each next draft reads the
    text's own token, as in the training pass."""
    ids = batch.input_ids_BT[0].tolist()
    part = [None if x is None else x[:1, : p + 1] for x in (batch.aux_hidden_BTAH, batch.last_hidden_BTH)]
    state = head.begin([ids[: p + 1]], len(ids) + depths)
    committed = Committed(
        torch.tensor([ids[1 : p + 2]]), torch.arange(p + 1)[None], torch.tensor([p + 1]), Features(*part)
    )
    head.commit(state, committed)
    seen: list[Tensor] = []

    def choose(logits: Tensor) -> tuple[Tensor, None]:
        seen.append(logits[0])
        return torch.tensor([ids[p + 1 + len(seen)]]) if feed_text else logits.argmax(-1), None

    head.propose(state, depths, choose)
    return seen


def assert_estimate_equals_decode(target: TargetModel, head: Speculator, batch: Batch, k: int) -> None:
    """`batch`: see `answers`. Renewal estimate = decoded counts, to the last token; text = plain greedy."""
    plain = plain_decode(target, PROMPTS, sampling=GREEDY, max_new_tokens=40, batch_size=4)
    trace = speculative_decode(
        target, head, PROMPTS, num_draft_tokens=k, sampling=GREEDY, max_new_tokens=40, batch_size=3
    )
    assert [r.output_ids for r in trace.requests] == [r.output_ids for r in plain.requests]
    cycles = [cycle for request in trace.requests for cycle in request.cycles]
    counts = renewal_counts(head.draft_hits(batch, k), k)
    assert (counts.steps, counts.emitted) == (len(cycles), sum(cycle.emitted for cycle in cycles))
    assert counts.accepted == sum(cycle.kept for cycle in cycles) > 0
    assert list(counts.survived) == [sum(cycle.kept > i for cycle in cycles) for i in range(k)]


def decode_one(target: TargetModel, head: Speculator, k: int) -> tuple[bool, float]:
    """(the text is that of plain decoding, mean acceptance length) on the first prompt."""
    settings: dict[str, Any] = {"sampling": GREEDY, "max_new_tokens": 41}
    plain = plain_decode(target, PROMPTS[:1], **settings).requests[0]
    request = speculative_decode(target, head, PROMPTS[:1], num_draft_tokens=k, **settings).requests[0]
    accepted = sum(cycle.accepted for cycle in request.cycles)
    return request.output_ids == plain.output_ids, 1 + accepted / len(request.cycles)


def sampled_laws(target: TargetModel, head: Speculator) -> list[Tensor]:
    """Laws [B, K, V] that the drafts of a few rounds at temperature 1 were drawn from."""
    laws: list[Tensor] = []
    propose = head.propose

    def watched(state: Any, num_draft_tokens: int, choose: Chooser) -> Proposal:
        found = propose(state, num_draft_tokens, choose)
        assert found.probs_BKV is not None
        assert (found.probs_BKV.gather(2, found.token_BK[..., None]) > 0).all()
        laws.append(found.probs_BKV)
        return found

    sampling = Sampling(temperature=1.0, seed=1, draft_sample_method="probabilistic")
    head.propose = watched  # type: ignore[method-assign]
    speculative_decode(target, head, PROMPTS, num_draft_tokens=3, sampling=sampling, max_new_tokens=8, batch_size=4)
    return laws


def assert_resumes(fresh: Callable[[], Speculator], target: TargetModel, folder: Path) -> None:
    """4 steps give the weights of 2 steps, a stop, and 2 more."""

    class Stop(Exception):
        pass

    def run(name: str, stop_after: int) -> dict[str, Tensor]:
        head, calls = fresh(), 0

        def provide(batch: Batch) -> Batch:
            nonlocal calls
            calls += 1
            if calls > stop_after:
                raise Stop
            return target.fill_features(batch, head.feature_spec, torch.float32)

        settings = TrainSection(micro_batch_tokens=128, precision="fp32", save_every=2, log_every=1, max_steps=4)
        train(
            head, toy_documents(12), [], provide, optim=OptimSection(lr=1e-3), train=settings, seed=3, device="cpu",
            num_draft_tokens=(3,), output_dir=folder / name, speculator_config={}, run_config={},
        )  # fmt: skip
        return {name: value.detach().clone() for name, value in head.state_dict().items()}

    whole = run("whole", 99)
    with pytest.raises(Stop):
        run("parts", 2)
    parts = run("parts", 99)
    assert all(torch.equal(value, parts[name]) for name, value in whole.items())


def assert_packing_changes_nothing(target: TargetModel, head: Speculator) -> None:
    """Packing A and B into a row gives the loss and gradient of A and B apart (D13)."""
    documents = [(list(range(5, 25)), 6), (list(range(40, 52)), 4)]
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


def assert_silence_gives_zero(target: TargetModel, head: Speculator) -> None:
    """An unsupervised batch gives a loss of 0 and a zero gradient for every parameter (N01)."""
    silent = target.fill_features(packed_batch([([5, 6, 7, 8], 4)], 1), head.feature_spec, torch.float32)
    assert float(head.supervised_counts(silent).sum()) == 0
    loss = head.loss(silent, torch.ones(head.num_depths)).loss
    loss.backward()  # type: ignore[no-untyped-call]
    assert float(loss.detach()) == 0
    assert all(p.grad is not None and not p.grad.any() for p in head.parameters())
