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


def verify_sampled(
    draft_BK: Tensor,
    count_B: Tensor,
    target_probs_BQV: Tensor,
    draft_probs_BKV: Tensor | None,
    generators: RequestGenerators,
) -> tuple[Tensor, Tensor]:
    """The sampling rule: (accepted_B, next_token_B), both int64.

    `target_probs_BQV` from `sampling.target_probs`; `draft_probs_BKV` the laws the drafts were drawn from, None for
    greedy drafts (one-hot). Row b uses count_B[b] + 1 random numbers of its own generator, whatever the batch.
    """
    rows_B = torch.arange(draft_BK.shape[0], device=draft_BK.device)
    uniform_BQ = generators.uniform(count_B + 1)
    width = uniform_BQ.shape[1] - 1  # drafts beyond the longest row are padding
    draft_BK = draft_BK[:, :width]

    drafted_BK1 = draft_BK.unsqueeze(-1)
    target_prob_BK = target_probs_BQV[:, :width].gather(-1, drafted_BK1).squeeze(-1)
    if draft_probs_BKV is None:
        draft_prob_BK = torch.ones_like(target_prob_BK)
    else:
        draft_prob_BK = draft_probs_BKV[:, :width].gather(-1, drafted_BK1).squeeze(-1)
    accept_BK = uniform_BQ[:, :width] < accept_probability(target_prob_BK, draft_prob_BK)
    accepted_B = leading_accepts(accept_BK, count_B)

    law_BV = target_probs_BQV[rows_B, accepted_B].clone()
    rejected = torch.nonzero(accepted_B < count_B).squeeze(1)
    if len(rejected) > 0:
        place = accepted_B[rejected]
        if draft_probs_BKV is None:
            refused = draft_BK[rejected, place]
            draft_law = torch.zeros_like(law_BV[rejected]).scatter_(-1, refused[:, None], 1.0)
        else:
            draft_law = draft_probs_BKV[rejected, place]
        law_BV[rejected] = residual_law(law_BV[rejected], draft_law)
    return accepted_B, draw_at(law_BV, uniform_BQ[rows_B, count_B])
