"""What a decoding run leaves behind; every metric is computed from it and from nothing else."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass
class Cycle:
    """One draft-verify round of one request.

    drafts     the tokens proposed (target ids)
    accepted   leading drafts that the target accepted, as vLLM counts them: tokens that EOS or the length limit cuts
               off afterwards are included
    kept       of those, the ones the user received
    emitted    tokens the user received from this round (kept drafts, plus the bonus or corrected token unless cut off)
    parents    for a tree of drafts: the index in `drafts` of each draft's parent, -1 after the last committed token;
               `drafts` are then all its nodes in the order of the pass, `accepted` the length of the accepted path.
               None for a chain
    """

    drafts: list[int]
    accepted: int
    kept: int
    emitted: int
    parents: list[int] | None = None


@dataclass
class RequestTrace:
    """One request: prompt and output token ids (EOS included when it was produced), and its rounds. The first output
    token comes from the prefill and belongs to no round. `finish_reason` is "stop" or "length". `conversation`: its
    name, shared by the turns of one, "" for a request that stands alone; intervals draw conversations."""

    id: str
    prompt_ids: list[int]
    output_ids: list[int] = field(default_factory=list)
    cycles: list[Cycle] = field(default_factory=list)
    finish_reason: str = "length"
    category: str = ""
    conversation: str = ""


@dataclass
class Timings:
    """Seconds, summed over a run, and how often each part ran."""

    total: float = 0.0
    prefill: float = 0.0
    target: float = 0.0
    draft: float = 0.0
    verify: float = 0.0
    target_steps: int = 0
    draft_steps: int = 0


@dataclass
class DecodeTrace:
    """All requests of one run in the order they were given, with the settings that produced them."""

    requests: list[RequestTrace]
    timings: Timings
    num_draft_tokens: int
    batch_size: int
