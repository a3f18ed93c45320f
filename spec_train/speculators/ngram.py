"""Prompt lookup: draft what followed the same n-gram the last time. No model, no training.

Source: Saxena 2023, "Prompt Lookup Decoding"; the rule is that of vLLM's n-gram proposer (`prompt_lookup_min`,
`prompt_lookup_max`), so that a comparison here holds there:

    the longest n in [min_n, max_n] for which the last n tokens occur earlier in prompt + output;
    of several occurrences of that n the earliest; draft up to K tokens that follow it.

The earlier occurrence may overlap the last n tokens. Fewer than K tokens, or none, may follow.

Shape legend: B requests, K draft tokens, S newly committed tokens, L room for a request's tokens.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from spec_train.errors import UserError
from spec_train.speculators.base import Chooser, Committed, Proposal, Proposer

TokenIds = npt.NDArray[np.int64]


def lookup(tokens: TokenIds, min_n: int, max_n: int, num_draft_tokens: int) -> TokenIds:
    """The draft after `tokens` [T]: between 0 and `num_draft_tokens` ids."""
    ends = np.flatnonzero(tokens[:-1] == tokens[-1])  # where an earlier occurrence of the last n tokens ends, n = 1
    if ends.size == 0:
        return tokens[:0]
    n = 1
    while n < max_n:
        longer = ends[ends >= n]
        longer = longer[tokens[longer - n] == tokens[-1 - n]]
        if longer.size == 0:
            break
        ends, n = longer, n + 1
    start = int(ends[0]) + 1
    return tokens[start : start + num_draft_tokens] if n >= min_n else tokens[:0]


@dataclass
class NgramState:
    """`token_BL` the tokens of each request, `length_B` how many of them are known, `device` where drafts go."""

    token_BL: TokenIds
    length_B: TokenIds
    device: torch.device


class NgramProposer(Proposer):
    """Drafts by prompt lookup with n-grams of `min_n` to `max_n` tokens. Needs no features of the target."""

    def __init__(self, min_n: int = 2, max_n: int = 4) -> None:
        if not 1 <= min_n <= max_n:
            raise UserError(f"ngram_min {min_n}, ngram_max {max_n}: need 1 <= ngram_min <= ngram_max")
        self.min_n = min_n
        self.max_n = max_n

    def begin(self, prompts: list[list[int]], max_length: int) -> NgramState:
        """A fresh state that holds the prompts."""
        room = max([max_length, *(len(prompt) for prompt in prompts)])
        token_BL = np.zeros((len(prompts), room), dtype=np.int64)
        for row, prompt in enumerate(prompts):
            token_BL[row, : len(prompt)] = prompt
        length_B = np.array([len(prompt) for prompt in prompts], dtype=np.int64)
        return NgramState(token_BL, length_B, torch.device("cpu"))

    def commit(self, state: NgramState, committed: Committed) -> None:
        """Write verified tokens where they stand: the token beside position p is at p + 1."""
        token_BS, position_BS = committed.token_BS.cpu().numpy(), committed.position_BS.cpu().numpy()
        for row, count in enumerate(committed.count_B.tolist()):
            places = position_BS[row, :count] + 1
            state.token_BL[row, places] = token_BS[row, :count]
            state.length_B[row] = places[-1] + 1
        state.device = committed.token_BS.device

    def propose(self, state: NgramState, num_draft_tokens: int, choose: Chooser) -> Proposal:
        """Up to `num_draft_tokens` looked-up tokens a row; nothing is left to `choose`, their law is one-hot."""
        token_BK = torch.zeros(len(state.length_B), num_draft_tokens, dtype=torch.int64)
        count_B = torch.zeros(len(state.length_B), dtype=torch.int64)
        for row, length in enumerate(state.length_B.tolist()):
            draft = lookup(state.token_BL[row, :length], self.min_n, self.max_n, num_draft_tokens)
            token_BK[row, : len(draft)] = torch.from_numpy(draft)
            count_B[row] = len(draft)
        return Proposal(token_BK.to(state.device), count_B.to(state.device))

    def select(self, state: NgramState, rows: Tensor) -> NgramState:
        """The state of the chosen rows."""
        chosen = rows.cpu().numpy()
        return NgramState(state.token_BL[chosen], state.length_B[chosen], state.device)
