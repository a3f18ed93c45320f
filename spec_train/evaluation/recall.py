"""Top-k recall of a speculator: how often the target's next token is among the k likeliest drafts.

From every state of a text that the target wrote, the speculator drafts `depth` tokens, each time fed the target's own
token in place of its draft: recall at depth d is conditional on everything before d having been accepted. Recall at
k = 1 is a chain's conditional acceptance, averaged over states; larger k tell what a tree could add.

Shape legend: see `speculators/base.py`; further T tokens of a text, k candidates.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from spec_train.decoding.trace import RequestTrace
from spec_train.speculators.base import Committed, Speculator
from spec_train.target import TargetModel

CANDIDATES = (1, 2, 4, 8)
MAX_REQUESTS = 16  # a draft step for every token and depth: a sample tells enough
MAX_TOKENS = 64  # of each answer


@torch.no_grad()
def top_k_recall(
    target: TargetModel,
    speculator: Speculator,
    requests: Sequence[RequestTrace],
    depth: int,
    *,
    max_requests: int = MAX_REQUESTS,
    max_tokens: int = MAX_TOKENS,
) -> dict[str, list[float]]:
    """{"1": [recall at depth 1, 2, ...], "2": ..., "4": ..., "8": ...} over the first `max_tokens` tokens of the first
    `max_requests` answers of two tokens or more; 0.0 at a depth that no answer reaches."""
    chosen = [request for request in requests if len(request.output_ids) > 1][:max_requests]
    hits, counts = torch.zeros(depth, len(CANDIDATES)), torch.zeros(depth)
    for request in chosen:
        prompt_length = len(request.prompt_ids)
        text_1T = torch.tensor([request.prompt_ids + request.output_ids[:max_tokens]], device=target.device)
        length = text_1T.shape[1]
        position_1T = torch.arange(length, device=target.device)[None]
        features = target.features(text_1T, position_1T, torch.zeros_like(text_1T), speculator.feature_spec)
        state = speculator.begin([request.prompt_ids], length + depth + 1)
        first = 0
        for known in range(prompt_length + 1, length):
            # Beside the features of position p goes the token at p+1.
            part = slice(first, known - 1)
            here = features.select((slice(None), part))  # type: ignore[arg-type]  # positions, of the only row
            count_B = torch.tensor([known - 1 - first], device=target.device)
            committed = Committed(text_1T[:, first + 1 : known], position_1T[:, part], count_B, here)
            speculator.commit(state, committed)
            first = known - 1
            draft, logits_BD = speculator.first_logits(state, depth)
            for d in range(min(depth, length - known)):
                token_B = text_1T[:, known + d]
                if d > 0:
                    logits_BD = speculator.next_logits(draft, text_1T[:, known + d - 1], d)
                best_k = logits_BD[0].topk(min(CANDIDATES[-1], logits_BD.shape[-1])).indices
                right_k = (speculator.target_ids(best_k) == token_B).cpu()
                hits[d] += torch.tensor([float(right_k[:k].any()) for k in CANDIDATES])
                counts[d] += 1
    recall = (hits / counts.clamp(min=1)[:, None]).T.tolist()
    return {str(k): values for k, values in zip(CANDIDATES, recall, strict=True)}
