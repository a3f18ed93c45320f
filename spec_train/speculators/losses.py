"""Losses of a draft distribution against the target's, fused with the output head.

Per position, with p the target's probabilities (over the whole vocabulary, restricted to the D draft tokens, so that
they sum to at most 1) and q the draft's softmax over those D tokens:

  kl   sum_v p log(p/q). What p puts outside the draft vocabulary lowers the pull towards q, and is counted as a miss
       by every acceptance figure; renormalising p over D would overstate acceptance by exactly that mass.
  lk   lam * kl + (1 - lam) * (1 - alpha), alpha = sum_v min(p, q) the chance that rejection sampling accepts a draft,
       lam = exp(-eta * alpha) with the gradient stopped: far from the target it is KL, near it the acceptance itself
       (LK-hybrid). lam is taken per position, so the loss does not depend on how a batch is cut up.

`fused_head_loss` computes logits, loss and both gradients a chunk of rows at a time and never holds [N, D] logits
for a whole batch; `head_loss_reference` says the same in five plain lines. A test compares them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

LossKind = Literal["kl", "lk"]
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
    eta: float,
) -> HeadLoss:
    """The obvious form of `fused_head_loss`, differentiated by autograd."""
    logits_ND = F.linear(hidden_NH, weight_DH).float()
    log_q = logits_ND.log_softmax(-1)
    p = target_probs_ND.float()
    kl = (torch.special.xlogy(p, p) - p * log_q).sum(-1)
    alpha = torch.minimum(p, log_q.exp()).sum(-1)
    loss = kl
    if kind == "lk":
        lam = torch.exp(-eta * alpha.detach())
        loss = lam * kl + (1 - lam) * (1 - alpha)
    hit = (logits_ND.argmax(-1) == label_N) & (label_N >= 0)
    return HeadLoss((scale_N * loss).sum(), loss.detach(), alpha.detach(), hit)


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
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        needs_grad = any(ctx.needs_input_grad[:2])
        weight = weight_DH.to(hidden_NH.dtype)
        grad_hidden = torch.empty_like(hidden_NH) if needs_grad else None
        grad_weight = torch.zeros_like(weight_DH, dtype=torch.float32) if needs_grad else None
        losses, alphas, hits = [], [], []
        for start in range(0, hidden_NH.shape[0], CHUNK):
            rows = slice(start, start + CHUNK)
            hidden, p, label = hidden_NH[rows], target_probs_ND[rows].float(), label_N[rows]
            log_q = (hidden @ weight.T).float()
            peak = log_q.amax(-1)
            hits.append((log_q.gather(1, label.clamp(min=0)[:, None])[:, 0] >= peak) & (label >= 0))
            log_q -= torch.logsumexp(log_q, -1, keepdim=True)
            kl = plogp_N[rows] - (p * log_q).sum(-1)
            q = log_q.exp_()
            alpha = torch.minimum(p, q).sum(-1)
            grad = p.sum(-1, keepdim=True) * q - p  # d kl / d logits
            loss = kl
            if kind == "lk":
                lam = torch.exp(-eta * alpha)[:, None]
                below = (q < p).to(q.dtype)  # where raising q raises alpha
                grad_miss = q * ((q * below).sum(-1, keepdim=True) - below)  # d (1 - alpha) / d logits
                grad = lam * grad + (1 - lam) * grad_miss
                loss = lam[:, 0] * kl + (1 - lam[:, 0]) * (1 - alpha)
            losses.append(loss)
            alphas.append(alpha)
            if grad_hidden is not None and grad_weight is not None:
                scaled = (grad * scale_N[rows, None]).to(hidden.dtype)
                grad_hidden[rows] = scaled @ weight
                grad_weight += (scaled.T @ hidden).float()
        loss_N, alpha_N, hit_N = torch.cat(losses), torch.cat(alphas), torch.cat(hits)
        if grad_hidden is not None and grad_weight is not None:
            ctx.save_for_backward(grad_hidden, grad_weight.to(weight_DH.dtype))
        ctx.mark_non_differentiable(loss_N, alpha_N, hit_N)
        return (scale_N * loss_N).sum(), loss_N, alpha_N, hit_N

    @staticmethod
    def backward(ctx: Any, grad_total: Tensor, *_: Tensor) -> tuple[Tensor | None, ...]:
        grad_hidden, grad_weight = ctx.saved_tensors
        return (grad_hidden * grad_total.to(grad_hidden.dtype), grad_weight * grad_total, *[None] * 6)


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
) -> HeadLoss:
    """Loss and metrics of `softmax(hidden_NH @ weight_DH.T)` against `target_probs_ND`.

    Args:
        hidden_NH: normed draft states, in the compute dtype.
        weight_DH: the draft's output head.
        target_probs_ND: the target's full-vocabulary probabilities at the D draft tokens; rows sum to at most 1.
        plogp_N: float32, sum of p log p of each row, see `sum_plogp`; depths share it.
        scale_N: float32 weight of each position in the total.
        label_N: draft-vocabulary index of the token that follows, -1 where it is outside.

    An empty N gives a total of 0 that is still connected to both inputs.
    """
    if hidden_NH.shape[0] == 0:
        empty = hidden_NH.new_zeros(0, dtype=torch.float32)
        return HeadLoss((hidden_NH.sum() + weight_DH.sum()) * 0.0, empty, empty, empty.bool())
    with torch.autocast(hidden_NH.device.type, enabled=False):
        return HeadLoss(*_fused(hidden_NH, weight_DH, target_probs_ND, plogp_N, scale_N, label_N, kind, eta))


def restricted_target_probs(logits_ND: Tensor, lse_N: Tensor, dtype: torch.dtype) -> Tensor:
    """Full-vocabulary probabilities at the draft tokens: exp(logits - logsumexp over the whole vocabulary)."""
    return (logits_ND.float() - lse_N[:, None]).exp_().to(dtype)


def sum_plogp(target_probs_ND: Tensor) -> Tensor:
    """float32 [N]: the negative entropy part of KL, sum of p log p, a chunk of rows at a time."""
    parts = [torch.special.xlogy(p.float(), p.float()).sum(-1) for p in torch.split(target_probs_ND, CHUNK)]
    return torch.cat(parts) if parts else target_probs_ND.new_zeros(0, dtype=torch.float32)
