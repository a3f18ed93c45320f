"""Losses of a draft distribution against the target's, fused with the output head.

Per position, with p the target's probabilities (over the whole vocabulary, restricted to the D draft tokens, so that
they sum to at most 1), q the draft's softmax over those D tokens, which is 0 elsewhere, and y the token that follows:

  ce   -log q_y; nothing where y is outside the draft vocabulary.
  kl   sum_v p log(p/q), forward KL. What p puts outside the draft vocabulary lowers the pull towards q, and is counted
       as a miss by every acceptance figure; renormalising p over D would overstate acceptance by exactly that mass.
  rkl  sum_v q log(q/p), reverse KL, exact over the whole vocabulary as q is 0 outside D. log p is floored at
       log(PROB_FLOOR): a p that underflows would make the loss infinite.
  jsd  beta KL(p || m) + (1 - beta) KL(q || m), m = beta p + (1 - beta) q (Agarwal et al., 2024, arXiv:2306.13649),
       over the whole vocabulary: outside D it is beta p log(1/beta), a constant that is counted in.
  tvd  1 - alpha, alpha = sum_v min(p, q) the chance that rejection sampling accepts a draft: half the L1 distance over
       the whole vocabulary.
  lk   lam * kl + (1 - lam) * (1 - alpha), lam = exp(-eta * alpha) with the gradient stopped: far from the target it is
       KL, near it the acceptance itself (LK-hybrid). lam is taken per position, so the loss does not depend on how a
       batch is cut up.

A `temperature` divides the draft's logits; whoever calls gives p at the same temperature.

`fused_head_loss` computes logits, loss and both gradients a chunk of rows at a time and never holds [N, D] logits
for a whole batch; `head_loss_reference` says the same plainly. A test compares them.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

LossKind = Literal["ce", "kl", "rkl", "jsd", "tvd", "lk"]
PROB_FLOOR = 1e-8  # of the target, in the logarithm of the reverse KL
TINY = 1e-30  # keeps the logarithm of a mixture of two underflowed probabilities finite
CHUNK = 256  # rows of logits held at once: small enough to stay in cache on a CPU, large enough for a GPU


@dataclass(frozen=True)
class HeadLoss:
    """`total`: differentiable scalar, sum of scale_N * loss_N. Detached, per position: `loss_N`, `alpha_N`
    (sum of min(p, q)) and `hit_N` (the draft's argmax is the token that follows)."""

    total: Tensor
    loss_N: Tensor
    alpha_N: Tensor
    hit_N: Tensor


def head_loss_reference(
    hidden_NH: Tensor,
    weight_DH: Tensor,
    target_probs_ND: Tensor,
    scale_N: Tensor,
    label_N: Tensor,
    kind: LossKind,
    eta: float = 3.0,
    beta: float = 0.5,
    temperature: float = 1.0,
) -> HeadLoss:
    """The obvious form of `fused_head_loss`, differentiated by autograd."""
    logits_ND = F.linear(hidden_NH, weight_DH).float()
    log_q = (logits_ND / temperature).log_softmax(-1)
    p, q = target_probs_ND.float(), log_q.exp()
    kl = (torch.special.xlogy(p, p) - p * log_q).sum(-1)
    alpha = torch.minimum(p, q).sum(-1)
    if kind == "ce":
        loss = -log_q.gather(1, label_N.clamp(min=0)[:, None])[:, 0] * (label_N >= 0)
    elif kind == "kl":
        loss = kl
    elif kind == "rkl":
        loss = (q * (log_q - p.clamp(min=PROB_FLOOR).log())).sum(-1)
    elif kind == "jsd":
        log_mixed = (beta * p + (1 - beta) * q).clamp(min=TINY).log()
        outside = beta * (1 - p.sum(-1)).clamp(min=0) * math.log(1 / beta)
        from_p = (torch.special.xlogy(p, p) - p * log_mixed).sum(-1)
        loss = beta * from_p + (1 - beta) * (q * (log_q - log_mixed)).sum(-1) + outside
    elif kind == "tvd":
        loss = 1 - alpha
    else:
        lam = torch.exp(-eta * alpha.detach())
        loss = lam * kl + (1 - lam) * (1 - alpha)
    hit = (logits_ND.argmax(-1) == label_N) & (label_N >= 0)
    return HeadLoss((scale_N * loss).sum(), loss.detach(), alpha.detach(), hit)


def _loss_alpha_gradient(
    log_q: Tensor, p: Tensor, plogp_N: Tensor, label_N: Tensor, kind: LossKind, eta: float, beta: float
) -> tuple[Tensor, Tensor, Tensor]:
    """(loss [N], alpha [N], d loss / d logits [N, D] at temperature 1). `log_q` is overwritten."""
    if kind == "ce":
        known = label_N >= 0
        index = label_N.clamp(min=0)[:, None]
        loss = -log_q.gather(1, index)[:, 0] * known
        q = log_q.exp_()
        alpha = torch.minimum(p, q).sum(-1)
        return loss, alpha, q.scatter_add_(1, index, torch.full_like(q[:, :1], -1.0)).mul_(known[:, None])
    if kind == "rkl":
        q = log_q.exp()
        gap = log_q.sub_(p.clamp(min=PROB_FLOOR).log_())
        loss = (q * gap).sum(-1)
        return loss, torch.minimum(p, q).sum(-1), q * (gap - loss[:, None])
    if kind == "jsd":
        q = log_q.exp()
        log_mixed = (beta * p + (1 - beta) * q).clamp_(min=TINY).log_()
        gap = log_q.sub_(log_mixed)
        from_p = plogp_N - (p * log_mixed).sum(-1)
        from_q = (q * gap).sum(-1)
        outside = beta * (1 - p.sum(-1)).clamp(min=0) * math.log(1 / beta)
        loss = beta * from_p + (1 - beta) * from_q + outside
        return loss, torch.minimum(p, q).sum(-1), (1 - beta) * q * (gap - from_q[:, None])
    kl = plogp_N - (p * log_q).sum(-1)
    q = log_q.exp_()
    alpha = torch.minimum(p, q).sum(-1)
    if kind == "kl":
        return kl, alpha, p.sum(-1, keepdim=True) * q - p
    below = (q < p).to(q.dtype)  # where raising q raises alpha
    miss = q * ((q * below).sum(-1, keepdim=True) - below)  # d (1 - alpha) / d logits
    if kind == "tvd":
        return 1 - alpha, alpha, miss
    lam = torch.exp(-eta * alpha)[:, None]
    grad = lam * (p.sum(-1, keepdim=True) * q - p) + (1 - lam) * miss
    return lam[:, 0] * kl + (1 - lam[:, 0]) * (1 - alpha), alpha, grad


class _FusedHeadLoss(torch.autograd.Function):
    """Gradients are computed in the forward pass, while the chunk's logits are still in cache."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden_NH: Tensor,
        weight_DH: Tensor,
        target_probs_ND: Tensor,
        plogp_N: Tensor,
        scale_N: Tensor,
        label_N: Tensor,
        kind: LossKind,
        eta: float,
        beta: float,
        temperature: float,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        wants_hidden, wants_weight = ctx.needs_input_grad[:2]
        weight = weight_DH.to(hidden_NH.dtype)
        grad_hidden = torch.empty_like(hidden_NH) if wants_hidden else None
        grad_weight = torch.zeros_like(weight_DH, dtype=torch.float32) if wants_weight else None
        losses, alphas, hits = [], [], []
        for start in range(0, hidden_NH.shape[0], CHUNK):
            rows = slice(start, start + CHUNK)
            hidden, p, label = hidden_NH[rows], target_probs_ND[rows].float(), label_N[rows]
            log_q = (hidden @ weight.T).float()
            peak = log_q.amax(-1)
            hits.append((log_q.gather(1, label.clamp(min=0)[:, None])[:, 0] >= peak) & (label >= 0))
            if temperature != 1:
                log_q /= temperature
            log_q -= torch.logsumexp(log_q, -1, keepdim=True)
            loss, alpha, grad = _loss_alpha_gradient(log_q, p, plogp_N[rows], label, kind, eta, beta)
            losses.append(loss)
            alphas.append(alpha)
            if wants_hidden or wants_weight:
                scaled = (grad * (scale_N[rows, None] / temperature)).to(hidden.dtype)
                if grad_hidden is not None:
                    grad_hidden[rows] = scaled @ weight
                if grad_weight is not None:
                    grad_weight += (scaled.T @ hidden).float()
        loss_N, alpha_N, hit_N = torch.cat(losses), torch.cat(alphas), torch.cat(hits)
        ctx.save_for_backward(grad_hidden, None if grad_weight is None else grad_weight.to(weight_DH.dtype))
        ctx.mark_non_differentiable(loss_N, alpha_N, hit_N)
        return (scale_N * loss_N).sum(), loss_N, alpha_N, hit_N

    @staticmethod
    def backward(ctx: Any, grad_total: Tensor, *_: Tensor) -> tuple[Tensor | None, ...]:
        grad_hidden, grad_weight = ctx.saved_tensors
        return (
            None if grad_hidden is None else grad_hidden * grad_total.to(grad_hidden.dtype),
            None if grad_weight is None else grad_weight * grad_total,
            *[None] * 8,
        )


_fused: Callable[..., tuple[Tensor, Tensor, Tensor, Tensor]] = _FusedHeadLoss.apply


def fused_head_loss(
    hidden_NH: Tensor,
    weight_DH: Tensor,
    target_probs_ND: Tensor,
    plogp_N: Tensor,
    scale_N: Tensor,
    label_N: Tensor,
    kind: LossKind = "kl",
    eta: float = 3.0,
    beta: float = 0.5,
    temperature: float = 1.0,
) -> HeadLoss:
    """Loss and metrics of `softmax(hidden_NH @ weight_DH.T / temperature)` against `target_probs_ND`.

    Args:
        hidden_NH: normed draft states, in the compute dtype.
        weight_DH: the draft's output head; a frozen one costs no gradient.
        target_probs_ND: the target's full-vocabulary probabilities at the D draft tokens; rows sum to at most 1.
        plogp_N: float32, sum of p log p of each row, see `sum_plogp`; depths share it.
        scale_N: float32 weight of each position in the total.
        label_N: draft-vocabulary index of the token that follows, -1 where it is outside.
        kind: see the module's head; `eta` belongs to lk, `beta` (between 0 and 1) to jsd.

    An empty N gives a total of 0 that is still connected to both inputs.
    """
    if hidden_NH.shape[0] == 0:
        empty = hidden_NH.new_zeros(0, dtype=torch.float32)
        return HeadLoss((hidden_NH.sum() + weight_DH.sum()) * 0.0, empty, empty, empty.bool())
    with torch.autocast(hidden_NH.device.type, enabled=False):
        return HeadLoss(
            *_fused(hidden_NH, weight_DH, target_probs_ND, plogp_N, scale_N, label_N, kind, eta, beta, temperature)
        )


def restricted_target_probs(logits_ND: Tensor, lse_N: Tensor, dtype: torch.dtype) -> Tensor:
    """Full-vocabulary probabilities at the draft tokens: exp(logits - logsumexp over the whole vocabulary)."""
    return (logits_ND.float() - lse_N[:, None]).exp_().to(dtype)


def sum_plogp(target_probs_ND: Tensor) -> Tensor:
    """float32 [N]: the negative entropy part of KL, sum of p log p, a chunk of rows at a time."""
    parts = [torch.special.xlogy(p.float(), p.float()).sum(-1) for p in torch.split(target_probs_ND, CHUNK)]
    return torch.cat(parts) if parts else target_probs_ND.new_zeros(0, dtype=torch.float32)
