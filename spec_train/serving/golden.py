"""A golden sample: what a speculator drafts from known states, saved beside its export.

A reload from files alone must give the same numbers. Layout slips (a swapped projection, a dropped norm, an id shifted
by one) load without an error and would otherwise show as nothing but a low acceptance.
"""

from __future__ import annotations

import torch
from torch import Tensor

from spec_train.batch import Features
from spec_train.speculators.base import Committed, Speculator
from spec_train.target import TargetModel

NUM_DRAFT_TOKENS = 4  # fewer where the speculator has fewer heads


def make_golden(speculator: Speculator, target: TargetModel, token_ids: list[int]) -> dict[str, Tensor]:
    """Run `target` over `token_ids` (at least 2) and draft after them.

    token_ids int64 [T]; aux_hidden [T-1, A*H] and last_hidden [T-1, H], where the method needs them; draft_ids int64
    [K] (target ids) and draft_logits float32 [K, D]: the greedy drafts and the logits they were picked from.
    """
    ids = torch.tensor([token_ids], device=target.device)
    position = torch.arange(ids.shape[1], device=target.device)[None]
    with torch.no_grad():
        features = target.features(ids, position, torch.zeros_like(ids), speculator.feature_spec)
    tensors = {"token_ids": ids[0].cpu()}
    if features.aux_hidden is not None:
        tensors["aux_hidden"] = features.aux_hidden[0, :-1].cpu()
    if features.last_hidden is not None:
        tensors["last_hidden"] = features.last_hidden[0, :-1].cpu()
    return {**tensors, **draft(speculator, tensors, target.device)}


def draft(speculator: Speculator, golden: dict[str, Tensor], device: torch.device) -> dict[str, Tensor]:
    """draft_ids and draft_logits of `speculator` on the states of a golden sample."""
    ids = golden["token_ids"].to(device)
    aux, last = golden.get("aux_hidden"), golden.get("last_hidden")
    features = Features(None if aux is None else aux[None].to(device), None if last is None else last[None].to(device))
    count = len(ids) - 1
    committed = Committed(
        token_BS=ids[None, 1:],
        position_BS=torch.arange(count, device=device)[None],
        count_B=torch.tensor([count], device=device),
        features=features,
    )
    seen: list[Tensor] = []

    def greedy(logits_BD: Tensor) -> tuple[Tensor, None]:
        seen.append(logits_BD[0].float().cpu())
        return logits_BD.argmax(dim=-1), None

    depth = min(NUM_DRAFT_TOKENS, speculator.max_draft_tokens or NUM_DRAFT_TOKENS)
    with torch.no_grad():
        state = speculator.begin([ids[:-1].tolist()], len(ids) + depth)
        speculator.commit(state, committed)
        proposal = speculator.propose(state, depth, greedy)
    return {"draft_ids": proposal.token_BK[0].cpu(), "draft_logits": torch.stack(seen)}
