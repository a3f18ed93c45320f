"""Assisted generation of `transformers` as a baseline: the same draft language model under another decoder.

Rounds are counted as vLLM and our own decoder count them. The first token of an answer comes from a prefill and belongs
to no round; from there on every round drafts exactly K tokens: the schedule is constant, there is no confidence
threshold, and generation ends by this module's own rule, since `transformers` would draft less before the limit and cut
an accepted block at an EOS before it is counted. A streamer sees the tokens of each round, one more than were accepted.
Which drafts were refused is not told: -1 stands in their place.

Timed is what a user would call: `generate` from the prompt, with its own limit and EOS (`speed.stock_generate`), in
turn with plain decoding and with our decoder.

Greedy only. Under sampling `transformers` draws the drafts too, which is another measurement.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.generation.stopping_criteria import StoppingCriteria, StoppingCriteriaList
from transformers.generation.streamers import BaseStreamer

from spec_train.decoding.engine import plain_decode, speculative_decode
from spec_train.decoding.sampling import Sampling
from spec_train.decoding.trace import Cycle, DecodeTrace, RequestTrace, Timings
from spec_train.evaluation.speed import draft_constantly, stock_generate
from spec_train.speculators.base import Proposer
from spec_train.speculators.draft_lm import DraftLM
from spec_train.target import TargetModel, clock

REFUSED = -1  # a draft that nobody saw
NO_EOS = -1  # no token has this id


def assistant_of(proposer: Proposer, target: TargetModel) -> tuple[PreTrainedModel | None, str]:
    """(the draft as a Transformers model, ""), or (None, why there is none)."""
    if not isinstance(proposer, DraftLM):
        name = getattr(proposer, "kind", "this method")
        return None, f"{name} is no language model of its own, so transformers cannot draft with it"
    if proposer.body.vocab_size != target.vocab_size:
        return None, f"the draft has {proposer.body.vocab_size} tokens and the target {target.vocab_size}"
    if target.linear_layers:
        return None, "transformers takes no draft for a target with linear attention"
    model: PreTrainedModel = proposer.body.model
    return model, ""


class _Rounds(BaseStreamer, StoppingCriteria):  # type: ignore[misc]
    """The tokens of each round of one request, which ends with an EOS or `limit` tokens after its first."""

    def __init__(self, limit: int, eos_token_ids: frozenset[int]) -> None:
        self.limit, self.eos_token_ids = limit, eos_token_ids
        self.rounds: list[list[int]] = []
        self.prompt_seen = self.ended = False

    def put(self, value: Tensor) -> None:
        """The prompt, then one round after the other."""
        if not self.prompt_seen:
            self.prompt_seen = True
            return
        self.rounds.append(value.flatten().tolist())
        stopped = not self.eos_token_ids.isdisjoint(self.rounds[-1])
        self.ended = stopped or sum(map(len, self.rounds)) >= self.limit

    def end(self) -> None:
        """Nothing is held back."""

    def __call__(self, input_ids: Tensor, scores: Tensor, **kwargs: Any) -> Tensor:
        """Whether to stop, after the round that `put` has seen."""
        return torch.full((input_ids.shape[0],), self.ended, device=input_ids.device)


@torch.no_grad()
def assisted_decode(
    target: TargetModel,
    assistant: PreTrainedModel,
    prompts: Sequence[Sequence[int]],
    *,
    num_draft_tokens: int,
    sampling: Sampling,
    max_new_tokens: int,
    batch_size: int = 1,
    ids: Sequence[str] | None = None,
    categories: Sequence[str] | None = None,
    indices: Sequence[int] | None = None,
    on_progress: Callable[[int], None] | None = None,
) -> DecodeTrace:
    """`speculative_decode` by `transformers`, one request at a time whatever `batch_size` (of the prefills) is."""
    if not sampling.greedy:
        raise ValueError("assisted generation is measured greedily")
    started = clock(target.device)
    begun = plain_decode(
        target, prompts, sampling=sampling, max_new_tokens=1, batch_size=batch_size, ids=ids, categories=categories
    )
    for request in begun.requests:
        if max_new_tokens > 1 and request.finish_reason != "stop":
            _complete(target, assistant, request, num_draft_tokens, max_new_tokens)
        if on_progress:
            on_progress(len(request.output_ids))
    return DecodeTrace(begun.requests, Timings(total=clock(target.device) - started), num_draft_tokens, 1)


def _complete(target: TargetModel, assistant: PreTrainedModel, request: RequestTrace, k: int, limit: int) -> None:
    """The rounds after the first token of one request."""
    start = [*request.prompt_ids, *request.output_ids]
    left = min(limit, target.max_length - len(request.prompt_ids)) - 1
    if left < 1:
        return
    seen = _Rounds(left, frozenset(target.eos_token_ids))
    tokens = torch.tensor([start], device=target.device)
    draft_constantly(assistant, k)
    generate: Any = target.model.generate
    generate(
        tokens,
        attention_mask=torch.ones_like(tokens),
        assistant_model=assistant,
        do_sample=False,
        max_new_tokens=left + k + 1,  # so that the last round has room for K drafts too
        eos_token_id=NO_EOS,
        pad_token_id=0,
        streamer=seen,
        stopping_criteria=StoppingCriteriaList([seen]),
    )
    for tokens_of_round in seen.rounds:
        accepted = len(tokens_of_round) - 1
        stop = next((i for i, token in enumerate(tokens_of_round) if token in target.eos_token_ids), accepted)
        emitted = min(stop + 1, left)
        drafts = tokens_of_round[:accepted] + [REFUSED] * (k - accepted)
        request.cycles.append(Cycle(drafts, accepted, min(accepted, emitted), emitted))
        request.output_ids += tokens_of_round[:emitted]
        left -= emitted
    request.finish_reason = "stop" if request.output_ids[-1] in target.eos_token_ids else "length"


def assisted_speed(
    target: TargetModel,
    proposer: Proposer,
    assistant: PreTrainedModel,
    prompts: Sequence[list[int]],
    *,
    num_draft_tokens: int,
    max_new_tokens: int,
    rounds: int,
    on_progress: Callable[[int], None],
) -> dict[str, Any]:
    """The "speed" block, greedy and one request at a time: plain decoding, our decoder with the same draft and assisted
    generation in turn; medians over rounds, quotients inside a round. own_*: our decoder; own_ratio: its rate over that
    of assisted generation. What a step consists of is None: `transformers` does not tell."""
    common: dict[str, Any] = {"sampling": Sampling(), "max_new_tokens": max_new_tokens}
    rates: dict[str, list[float]] = {"plain": [], "own": [], "assisted": []}
    for _ in range(rounds):
        for name, trace in (
            ("plain", plain_decode(target, prompts, **common)),
            ("own", speculative_decode(target, proposer, prompts, num_draft_tokens=num_draft_tokens, **common)),
        ):
            rates[name].append(sum(len(request.output_ids) for request in trace.requests) / trace.timings.total)
            on_progress(1)
        tokens, seconds = stock_generate(target, prompts, max_new_tokens, assistant, num_draft_tokens)
        rates["assisted"].append(tokens / seconds)
        on_progress(1)
    quotients = zip(rates["assisted"], rates["plain"], strict=True)
    own = zip(rates["own"], rates["assisted"], strict=True)
    return {
        "tokens_per_second": statistics.median(rates["assisted"]),
        "baseline_tokens_per_second": statistics.median(rates["plain"]),
        "speedup": statistics.median(a / b for a, b in quotients),
        "own_tokens_per_second": statistics.median(rates["own"]),
        "own_ratio": statistics.median(a / b for a, b in own),
        **dict.fromkeys(("ttft_ms", "baseline_ttft_ms", "tpot_ms", "baseline_tpot_ms")),
        **dict.fromkeys(("target_step_ms", "baseline_target_step_ms", "draft_ms", "verify_ms")),
        **dict.fromkeys(("overhead_ms", "overhead_share", "plain_steps_per_round")),
        "batch_size": 1,
        "rounds": rounds,
    }
