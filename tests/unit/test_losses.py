"""The fused losses: value and gradient as autograd has them, exact over the whole vocabulary, one-hot targets."""

from __future__ import annotations

import functools
import math
from typing import Any, get_args

import pytest
import torch
from torch import Tensor

from spec_train.speculators.losses import (
    PROB_FLOOR,
    HeadLoss,
    LossKind,
    fused_head_loss,
    head_loss_reference,
    sum_plogp,
)

KINDS: tuple[Any, ...] = get_args(LossKind)


def inputs(rows: int, draft: int = 24, vocab: int = 40) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """States, head, target probabilities (vocab - draft tokens are outside), scale, labels (some outside)."""
    torch.manual_seed(1)
    probs = (3 * torch.randn(rows, vocab)).softmax(-1)[:, :draft]
    return (
        torch.randn(rows, 16).requires_grad_(),
        torch.randn(draft, 16).requires_grad_(),
        probs,
        torch.rand(rows),
        torch.randint(-1, draft, (rows,)),
    )


def one(kind: Any, logits: Tensor, probs: Tensor, label: int, **options: float) -> tuple[Tensor, Tensor]:
    """(loss, d loss / d logits) of one position, the logits given directly."""
    hidden = logits[None].clone().requires_grad_()
    label_N = torch.tensor([label])
    out = fused_head_loss(
        hidden, torch.eye(len(logits)), probs[None], sum_plogp(probs[None]), torch.ones(1), label_N, kind, **options
    )
    out.total.backward()  # type: ignore[no-untyped-call]
    assert hidden.grad is not None
    return out.loss_N[0], hidden.grad[0]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("rows", [1, 300])
@pytest.mark.parametrize("temperature", [1.0, 1.7])
def test_fused_loss_equals_reference(kind: Any, rows: int, temperature: float) -> None:
    hidden, weight, probs, scale, label = inputs(rows)
    outs: list[tuple[HeadLoss, Tensor, Tensor]] = []
    for function in (
        functools.partial(fused_head_loss, hidden, weight, probs, sum_plogp(probs)),
        functools.partial(head_loss_reference, hidden, weight, probs),
    ):
        hidden.grad = weight.grad = None
        out = function(scale, label, kind, eta=2.0, beta=0.3, temperature=temperature)
        (2 * out.total).backward()  # type: ignore[no-untyped-call]
        assert hidden.grad is not None and weight.grad is not None
        outs.append((out, hidden.grad.clone(), weight.grad.clone()))
    (fused, *grads), (plain, *plain_grads) = outs
    assert torch.equal(fused.hit_N, plain.hit_N) and not fused.hit_N[label < 0].any()
    for ours, theirs in [*zip(grads, plain_grads, strict=True), (fused.loss_N, plain.loss_N)]:
        assert float((ours - theirs).abs().max()) <= 1e-5 * float(theirs.abs().max())
    assert torch.allclose(fused.total, plain.total, rtol=1e-5)
    assert torch.allclose(fused.alpha_N, plain.alpha_N, atol=1e-6)


@pytest.mark.parametrize("kind", KINDS)
def test_a_frozen_head_gets_no_gradient_and_changes_none(kind: Any) -> None:
    hidden, weight, probs, scale, label = inputs(40)
    grads: list[Tensor] = []
    for head in (weight, weight.detach()):
        hidden.grad = None
        fused_head_loss(hidden, head, probs, sum_plogp(probs), scale, label, kind).total.backward()  # type: ignore[no-untyped-call]
        assert hidden.grad is not None
        grads.append(hidden.grad.clone())
    assert torch.equal(*grads)


@pytest.mark.parametrize("kind", ["rkl", "jsd", "tvd"])
def test_mass_outside_is_counted_as_over_the_whole_vocabulary(kind: Any) -> None:
    """With q = 0 outside D the divergence over all V is well defined, and that is what is computed."""
    torch.manual_seed(2)
    p, draft, beta = (3 * torch.randn(40).double()).softmax(-1), 24, 0.3
    logits = torch.randn(draft).double()
    q = torch.cat([logits.softmax(-1), torch.zeros(16).double()])
    mixed = beta * p + (1 - beta) * q
    kl_pm, kl_qm = (p * (p / mixed).log()).sum(), torch.special.xlogy(q, q / mixed).sum()
    whole = {
        "rkl": torch.special.xlogy(q, q / p).sum(),
        "jsd": beta * kl_pm + (1 - beta) * kl_qm,
        "tvd": 0.5 * (p - q).abs().sum(),
    }
    loss, _ = one(kind, logits.float(), p[:draft].float(), 0, beta=beta)
    assert abs(float(loss) - float(whole[kind])) < 1e-5


def test_jsd_tends_to_forward_and_reverse_kl() -> None:
    torch.manual_seed(3)
    p, logits = torch.randn(12).softmax(-1), torch.randn(12)
    small = 1e-3
    assert abs(float(one("jsd", logits, p, 0, beta=small)[0] / small / one("kl", logits, p, 0)[0]) - 1) < 0.02
    assert abs(float(one("jsd", logits, p, 0, beta=1 - small)[0] / small / one("rkl", logits, p, 0)[0]) - 1) < 0.02


def test_one_hot_targets() -> None:
    """KL becomes cross entropy, TVD the draft's miss; LK pulls like cross entropy, by lam + (1 - lam) q_y."""
    torch.manual_seed(4)
    logits, y, eta = torch.randn(10), 3, 3.0
    p = torch.zeros(10)
    p[y] = 1.0
    q_y = float(logits.softmax(-1)[y])
    ce, pull = one("ce", logits, p, y)
    assert abs(float(ce) + math.log(q_y)) < 1e-6
    kl, kl_pull = one("kl", logits, p, y)
    assert torch.allclose(kl, ce) and torch.allclose(kl_pull, pull, atol=1e-6)
    tvd, tvd_pull = one("tvd", logits, p, y)
    assert abs(float(tvd) - (1 - q_y)) < 1e-6 and torch.allclose(tvd_pull, q_y * pull, atol=1e-6)
    lk, lk_pull = one("lk", logits, p, y, eta=eta)
    lam = math.exp(-eta * q_y)
    assert abs(float(lk) - (lam * float(ce) + (1 - lam) * (1 - q_y))) < 1e-6
    assert torch.allclose(lk_pull, (lam + (1 - lam) * q_y) * pull, atol=1e-6)
    rkl, _ = one("rkl", logits, p, y)  # finite: log 0 is floored
    rest = logits.softmax(-1)
    entropy = float((rest * rest.log()).sum())
    assert abs(float(rkl) - (entropy - (1 - q_y) * math.log(PROB_FLOOR))) < 1e-4
    for kind in KINDS:
        assert all(bool(torch.isfinite(value).all()) for value in one(kind, 200 * logits, p, y))


def test_cross_entropy_ignores_labels_outside() -> None:
    torch.manual_seed(5)
    loss, pull = one("ce", torch.randn(10), torch.randn(10).softmax(-1), -1)
    assert float(loss) == 0.0 and not pull.any()


@pytest.mark.parametrize("kind", KINDS)
def test_no_rows_give_zero_connected_to_both_inputs(kind: Any) -> None:
    hidden, weight = torch.zeros(0, 4, requires_grad=True), torch.randn(6, 4, requires_grad=True)
    empty = torch.zeros(0)
    out = fused_head_loss(hidden, weight, torch.zeros(0, 6), empty, empty, torch.zeros(0, dtype=torch.long), kind)
    out.total.backward()  # type: ignore[no-untyped-call]
    assert float(out.total.detach()) == 0.0 and weight.grad is not None and not weight.grad.any()
