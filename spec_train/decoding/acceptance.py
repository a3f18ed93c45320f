"""The acceptance length, for every part of the program that states one, and vLLM's counters beside it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from spec_train.decoding.trace import Cycle, DecodeTrace, RequestTrace


def acceptance_length(accepted: float, rounds: float) -> float:
    """1 + accepted drafts / rounds that drafted something, sums over sums, as vLLM defines it; 1.0 without a round.

    The 1 stands for the target's own token. A round that an EOS among its drafts or the length limit ends does not give
    it, so on short answers this is more than the tokens that rounds really brought (`metrics.tokens_per_step`).
    `accepted` may be *kept* drafts (our figures) or *uncut* ones (a server's counters), see `Cycle`; an estimate's are
    expectations.
    """
    return 1.0 + accepted / rounds if rounds else 1.0


def drafted_rounds(requests: Iterable[RequestTrace]) -> list[Cycle]:
    """The rounds that vLLM counts: those with at least one drafted token."""
    return [cycle for request in requests for cycle in request.cycles if cycle.drafts]


def decoded_length(requests: Iterable[RequestTrace]) -> float:
    """The acceptance length of a decode: kept drafts over the rounds that drafted something."""
    rounds = drafted_rounds(requests)
    return acceptance_length(sum(cycle.kept for cycle in rounds), len(rounds))


def survivors(accepted: Iterable[int], positions: int) -> list[int]:
    """How many rounds accepted at least 1, 2, ... `positions` drafts."""
    lengths = list(accepted)
    return [sum(length > position for length in lengths) for position in range(positions)]


def vllm_counters(trace: DecodeTrace) -> dict[str, Any]:
    """What vLLM's `vllm:spec_decode_*` counters read after the same run (drafts cut off at the end included)."""
    rounds = drafted_rounds(trace.requests)
    accepted = [cycle.accepted for cycle in rounds]
    return {
        "num_drafts": len(rounds),
        "num_draft_tokens": sum(len(cycle.drafts) for cycle in rounds),
        "num_accepted_tokens": sum(accepted),
        "num_accepted_tokens_per_pos": survivors(accepted, trace.num_draft_tokens),
    }
