"""Acceptance rules: which drafts the target keeps, and the token it adds after them.

Shape legend: B requests, K draft tokens, Q = K + 1 target rows, V target vocabulary. Target row i is the target's law
at the place of draft i; row K stands after the last draft. `count_B` says how many of a row's K drafts are real.

Every round keeps the leading `accepted_B` drafts and adds one token: the *corrected* token after a rejection, the
*bonus* token when all drafts were accepted. Nothing after the first rejection counts, whatever it happens to match.

Greedy decoding (temperature 0). Draft x_i is accepted iff x_i = argmax target row i; the added token is the argmax of
the row after the last accepted draft. The output is the target's own greedy text.

Sampling (Leviathan et al. 2023, "Fast Inference from Transformers via Speculative Decoding", arXiv 2211.17192;
Chen et al. 2023, "Accelerating Large Language Model Decoding with Speculative Sampling", arXiv 2302.01318). With
x drawn from draft_probs:

    accept x with probability   min(1, target_probs[x] / draft_probs[x])
    on rejection draw from      (target_probs - draft_probs)+ / sum of the same

so that for every token v
    P(v) = min(draft_probs[v], target_probs[v]) + P(reject) * residual[v] = target_probs[v].

draft_probs must be the law that x was really drawn from, after every filter. A greedy draft is the special case of a
one-hot law: accept x with probability target_probs[x]; the residual is target_probs without x, renormalised. Scoring a
greedy draft with the draft's softmax instead would bias the output.

Block verification (Sun et al. 2024, "Block Verification Accelerates Speculative Decoding", arXiv 2403.10444,
algorithm 2) judges the drafts together and accepts at least as many on average. With weight_0 = 1, n drafts x_1 ... x_n
and the laws after i drafts written target_i, draft_i:

    weight_i = min(1, weight_{i-1} * target_{i-1}[x_i] / draft_{i-1}[x_i])
    test i passes with probability   h_i = S_i / (S_i + 1 - weight_i),  S_i = sum (weight_i * target_i - draft_i)+
                                     h_n = weight_n
    accepted = the last i that passes, 0 if none does; then a token of target_n, or on i < n of
    (weight_i * target_i - draft_i)+ / S_i

For greedy drafts S_i = weight_i * (1 - target_i[x_{i+1}]). With one draft both rules are the same.
"""

from __future__ import annotations

import torch
from torch import Tensor

from spec_train.decoding.sampling import RequestGenerators, draw_at


def accept_probability(target_prob: Tensor, draft_prob: Tensor) -> Tensor:
    """min(1, target/draft), elementwise; draft_prob > 0, as it is for every token that was drawn."""
    return (target_prob / draft_prob).clamp(max=1.0)


def residual_law(target_probs: Tensor, draft_probs: Tensor) -> Tensor:
    """(target - draft)+ normalised, [..., V]: the law of the corrected token.

    Where the two laws agree to the last digit nothing is left; a rejection is then a rounding accident of probability
    ~1e-7 and the target's own law is returned.
    """
    residual = (target_probs - draft_probs).clamp(min=0.0)
    total = residual.sum(dim=-1, keepdim=True)
    return torch.where(total > 0, residual / total.clamp(min=torch.finfo(total.dtype).tiny), target_probs)


def leading_accepts(accept_BK: Tensor, count_B: Tensor) -> Tensor:
    """int64 [B]: how many drafts stand before the first rejection, among the first count_B of each row."""
    real_BK = torch.arange(accept_BK.shape[1], device=accept_BK.device) < count_B[:, None]
    return (accept_BK & real_BK).long().cumprod(dim=1).sum(dim=1)


def verify_greedy(draft_BK: Tensor, count_B: Tensor, target_logits_BQV: Tensor) -> tuple[Tensor, Tensor]:
    """The greedy rule: (accepted_B, next_token_B), both int64. `next_token_B` follows the accepted drafts."""
    choice_BQ = target_logits_BQV.argmax(dim=-1)
    accepted_B = leading_accepts(draft_BK == choice_BQ[:, :-1], count_B)
    return accepted_B, choice_BQ.gather(1, accepted_B[:, None]).squeeze(1)


def token_tests(draft_BK: Tensor, target_probs_BQV: Tensor, draft_probs_BKV: Tensor | None) -> Tensor:
    """[B, K]: with what probability each draft passes the token-wise test."""
    return accept_probability(*_probs_of_drafts(draft_BK, target_probs_BQV, draft_probs_BKV))


def block_tests(
    draft_BK: Tensor, count_B: Tensor, target_probs_BQV: Tensor, draft_probs_BKV: Tensor | None
) -> tuple[Tensor, Tensor]:
    """(h_BK, weight_BQ) of block verification, float64: h_BK[:, i-1] is the probability that test i passes, weight_BQ
    starts with weight_0 = 1. Entries beyond count_B mean nothing."""
    target_prob_BK, draft_prob_BK = _probs_of_drafts(draft_BK, target_probs_BQV, draft_probs_BKV)
    ratio_BK = target_prob_BK.double() / draft_prob_BK
    weights = [torch.ones(len(draft_BK), dtype=torch.float64, device=draft_BK.device)]
    for place in range(draft_BK.shape[1]):
        weights.append((weights[-1] * ratio_BK[:, place]).clamp(max=1.0))
    weight_BQ = torch.stack(weights, dim=1)

    passes = []
    for i in range(1, draft_BK.shape[1]):
        weight_B = weight_BQ[:, i]
        if draft_probs_BKV is None:
            left_B = weight_B * (1 - target_prob_BK[:, i].double())
        else:
            left_B = (weight_B[:, None] * target_probs_BQV[:, i] - draft_probs_BKV[:, i]).clamp(min=0.0).sum(dim=-1)
        over_B = left_B + 1 - weight_B
        # Nothing left and weight 1: target and draft agree from here, and the next test passes for certain.
        h_B = torch.where(over_B > 0, left_B / over_B, 1.0)
        passes.append(torch.where(count_B == i, weight_B, h_B))
    passes.append(weight_BQ[:, -1])
    return torch.stack(passes, dim=1)[:, : draft_BK.shape[1]], weight_BQ


def last_accept(accept_BK: Tensor, count_B: Tensor) -> Tensor:
    """int64 [B]: the last test that passes, counted from 1, among the first count_B of each row; 0 if none does."""
    number_K = torch.arange(1, accept_BK.shape[1] + 1, device=accept_BK.device)
    passed_BK = torch.where(accept_BK & (number_K <= count_B[:, None]), number_K, 0)
    return torch.cat([passed_BK, torch.zeros_like(count_B)[:, None]], dim=1).amax(dim=1)


def added_law(
    draft_BK: Tensor,
    count_B: Tensor,
    accepted_B: Tensor,
    target_probs_BQV: Tensor,
    draft_probs_BKV: Tensor | None,
    weight_BQ: Tensor | None = None,
) -> Tensor:
    """[B, V], of any positive sum: the law of the token after `accepted_B` drafts. `weight_BQ` from `block_tests`."""
    rows_B = torch.arange(draft_BK.shape[0], device=draft_BK.device)
    law_BV = target_probs_BQV[rows_B, accepted_B].clone()
    rejected = torch.nonzero(accepted_B < count_B).squeeze(1)
    if len(rejected) == 0:
        return law_BV
    place = accepted_B[rejected]
    if draft_probs_BKV is None:
        refused = draft_BK[rejected, place]
        draft_law = torch.zeros_like(law_BV[rejected]).scatter_(-1, refused[:, None], 1.0)
    else:
        draft_law = draft_probs_BKV[rejected, place]
    target_law = law_BV[rejected]
    if weight_BQ is not None:  # float64, as in the tests: what a test let pass must not round to nothing here
        target_law = weight_BQ[rejected, place][:, None] * target_law
    law_BV[rejected] = residual_law(target_law, draft_law).to(law_BV.dtype)
    return law_BV


def verify_sampled(
    draft_BK: Tensor,
    count_B: Tensor,
    target_probs_BQV: Tensor,
    draft_probs_BKV: Tensor | None,
    generators: RequestGenerators,
) -> tuple[Tensor, Tensor]:
    """The sampling rule, token by token: (accepted_B, next_token_B), both int64.

    `target_probs_BQV` from `sampling.target_probs`; `draft_probs_BKV` the laws the drafts were drawn from, None for
    greedy drafts (one-hot). Row b uses count_B[b] + 1 random numbers of its own generator, whatever the batch.
    """
    uniform_BQ = generators.uniform(count_B + 1)
    draft_BK = draft_BK[:, : uniform_BQ.shape[1] - 1]  # drafts beyond the longest row are padding
    tests_BK = token_tests(draft_BK, target_probs_BQV, draft_probs_BKV)
    accepted_B = leading_accepts(uniform_BQ[:, :-1] < tests_BK, count_B)
    law_BV = added_law(draft_BK, count_B, accepted_B, target_probs_BQV, draft_probs_BKV)
    return accepted_B, draw_at(law_BV, uniform_BQ.gather(1, count_B[:, None])[:, 0])


def verify_block(
    draft_BK: Tensor,
    count_B: Tensor,
    target_probs_BQV: Tensor,
    draft_probs_BKV: Tensor | None,
    generators: RequestGenerators,
) -> tuple[Tensor, Tensor]:
    """Block verification; arguments, result and random numbers as in `verify_sampled`."""
    uniform_BQ = generators.uniform(count_B + 1)
    draft_BK = draft_BK[:, : uniform_BQ.shape[1] - 1]
    tests_BK, weight_BQ = block_tests(draft_BK, count_B, target_probs_BQV, draft_probs_BKV)
    accepted_B = last_accept(uniform_BQ[:, :-1] < tests_BK, count_B)
    law_BV = added_law(draft_BK, count_B, accepted_B, target_probs_BQV, draft_probs_BKV, weight_BQ)
    return accepted_B, draw_at(law_BV, uniform_BQ.gather(1, count_B[:, None])[:, 0])


def _probs_of_drafts(
    draft_BK: Tensor, target_probs_BQV: Tensor, draft_probs_BKV: Tensor | None
) -> tuple[Tensor, Tensor]:
    """[B, K] each: what target and draft say of the drafted tokens."""
    width, drafted_BK1 = draft_BK.shape[1], draft_BK.unsqueeze(-1)
    target_prob_BK = target_probs_BQV[:, :width].gather(-1, drafted_BK1).squeeze(-1)
    if draft_probs_BKV is None:
        return target_prob_BK, torch.ones_like(target_prob_BK)
    return target_prob_BK, draft_probs_BKV[:, :width].gather(-1, drafted_BK1).squeeze(-1)
