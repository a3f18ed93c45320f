"""Lossless speculative decoding: draft, verify, commit, again. The reference that every metric comes from.

One round of one request, with n tokens known (prompt included) and the last of them not yet in the target's cache:

    draft    the proposer offers x_n ... x_{n+K-1}
    verify   one target pass over [x_{n-1}, drafts] at positions n-1 ... n-1+K; row i is the target's law for x_{n+i}
    accept   the leading drafts that the rule keeps, then the corrected or bonus token
    commit   the verified tokens and the target's states go to the proposer; rejected entries of the cache lie beyond
             every later query until real tokens overwrite them, so nothing is rolled back

A batch holds requests at different positions; rows that finish ride along until dropping them pays.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from spec_train.decoding.sampling import RequestGenerators, Sampling, target_probs
from spec_train.decoding.trace import Cycle, DecodeTrace, RequestTrace, Timings
from spec_train.decoding.verify import verify_block, verify_greedy, verify_sampled
from spec_train.errors import UserError
from spec_train.kv_cache import SlotCache
from spec_train.speculators.base import Chooser, Committed, Proposal, Proposer
from spec_train.target import GenerationTimings, TargetModel, clock

Progress = Callable[[int], None]  # called with the tokens emitted since the last call


@torch.inference_mode()
def plain_decode(
    target: TargetModel,
    prompts: Sequence[Sequence[int]],
    *,
    sampling: Sampling,
    max_new_tokens: int,
    batch_size: int = 1,
    ids: Sequence[str] | None = None,
    categories: Sequence[str] | None = None,
    indices: Sequence[int] | None = None,
    on_progress: Progress | None = None,
) -> DecodeTrace:
    """Decode without speculation: the baseline in speed and the reference in text. `indices`: places of these requests
    in the whole run, which seed them (default: their order)."""
    requests = _requests(prompts, ids, categories)
    timings = Timings()
    started = clock(target.device)
    for chunk in batches_of(prompts, batch_size):
        spent, seen = GenerationTimings(), [0]

        def report(total: int, seen: list[int] = seen) -> None:
            if on_progress:
                on_progress(total - seen[0])
            seen[0] = total

        places = [indices[i] for i in chunk] if indices else chunk
        answers = target.generate(
            [prompts[i] for i in chunk],
            sampling,
            max_new_tokens,
            request_indices=places,
            on_token=report,
            timings=spent,
        )
        for i, answer in zip(chunk, answers, strict=True):
            requests[i].output_ids, requests[i].finish_reason = answer.output_ids, answer.finish_reason
        timings.prefill += spent.prefill
        timings.target += spent.decode
        timings.target_steps += spent.steps
    timings.total = clock(target.device) - started
    return DecodeTrace(requests, timings, num_draft_tokens=0, batch_size=batch_size)


@torch.inference_mode()
def speculative_decode(
    target: TargetModel,
    proposer: Proposer,
    prompts: Sequence[Sequence[int]],
    *,
    num_draft_tokens: int,
    sampling: Sampling,
    max_new_tokens: int,
    batch_size: int = 1,
    ids: Sequence[str] | None = None,
    categories: Sequence[str] | None = None,
    indices: Sequence[int] | None = None,
    on_progress: Progress | None = None,
) -> DecodeTrace:
    """Decode `prompts` (token ids) with K = `num_draft_tokens` drafts a round.

    Requests keep their order in the trace; batches are formed by prompt length. Under sampling each request draws
    from its own generator, so its tokens do not depend on the batch; `indices` (default: their order) are the places
    in the whole run that seed them.

    Raises UserError for an empty prompt, one that fills the target's context, or K < 1.
    """
    if num_draft_tokens < 1:
        raise UserError(f"num_draft_tokens is {num_draft_tokens}: give at least 1")

    def start(members: list[RequestTrace], places: Sequence[int], timings: Timings) -> _Round:
        return _Round(target, proposer, members, places, num_draft_tokens, sampling, max_new_tokens, timings)

    requests = _requests(prompts, ids, categories)
    timings = decode_batches(requests, start, target, batch_size, indices, on_progress)
    return DecodeTrace(requests, timings, num_draft_tokens=num_draft_tokens, batch_size=batch_size)


def decode_batches(
    requests: list[RequestTrace],
    start: Callable[[list[RequestTrace], Sequence[int], Timings], _Round],
    target: TargetModel,
    batch_size: int,
    indices: Sequence[int] | None,
    on_progress: Progress | None,
) -> Timings:
    """Decode `requests` in place, batch by batch, each from `start(members, their places in the run, timings)`."""
    timings = Timings()
    started = clock(target.device)
    for chunk in batches_of([request.prompt_ids for request in requests], batch_size):
        places = [indices[i] for i in chunk] if indices else chunk
        batch = start([requests[i] for i in chunk], places, timings)
        while batch.rows:
            emitted = batch.advance()
            if on_progress:
                on_progress(emitted)
        del batch  # the next one may take over its caches' buffers, see graphs.py
    timings.total = clock(target.device) - started
    return timings


@dataclass
class _Row:
    """A request in a batch: its trace, tokens it may still emit in all, tokens known so far, whether it is done."""

    request: RequestTrace
    room: int
    known: int
    done: bool = False


class _Round:
    """A batch of requests in flight. `advance` runs one draft-verify round for all of them."""

    def __init__(
        self,
        target: TargetModel,
        proposer: Proposer,
        requests: list[RequestTrace],
        indices: Sequence[int],
        num_draft_tokens: int,
        sampling: Sampling,
        max_new_tokens: int,
        timings: Timings,
    ) -> None:
        self.target, self.proposer, self.sampling = target, proposer, sampling
        self.num_draft_tokens, self.timings = num_draft_tokens, timings
        self.device = target.device
        prompts = [request.prompt_ids for request in requests]
        rooms = [min(max_new_tokens, target.max_length - len(prompt)) for prompt in prompts]
        for prompt, room in zip(prompts, rooms, strict=True):
            if not prompt or room < 1:
                raise UserError(
                    f"a prompt of {len(prompt)} tokens cannot be decoded: give 1 to {target.max_length - 1} tokens"
                )
        self.rows = [
            _Row(request, room, len(prompt)) for request, room, prompt in zip(requests, rooms, prompts, strict=True)
        ]
        self.draws = RequestGenerators(sampling, indices)
        self.draft_draws = RequestGenerators(sampling, indices, stream="draft")
        capacity = max(row.known + row.room for row in self.rows) + num_draft_tokens + 1
        self.cache: SlotCache = target.new_cache(capacity)
        begun = clock(target.device)
        hidden_BH, features = target.prefill(prompts, self.cache, proposer.feature_spec)
        logits = target.logits(hidden_BH)
        first_B = logits.argmax(-1) if sampling.greedy else self.draws.draw_rows(target_probs(logits, sampling))
        timings.prefill += clock(target.device) - begun
        width = max(map(len, prompts))
        token_BS = torch.zeros(len(prompts), width, dtype=torch.long)
        for b, (row, token) in enumerate(zip(self.rows, first_B.tolist(), strict=True)):
            sequence = [*row.request.prompt_ids[1:], token]
            token_BS[b, : len(sequence)] = torch.tensor(sequence)
            self._emit(row, [token])
            row.known = len(sequence) + 1  # of a finished row too, which must not ride along from within its prompt
        position_BS = torch.arange(width, device=self.device).expand(len(prompts), -1)
        count_B = torch.tensor([len(prompt) for prompt in prompts], device=self.device)
        self.committed = Committed(token_BS.to(self.device), position_BS, count_B, features)
        # A finished row that rides along may have had all its drafts accepted beyond its end, and drafts on from there.
        self.state: Any = proposer.begin(prompts, capacity + num_draft_tokens)
        self.last_B = first_B
        self._drop_finished()

    def advance(self) -> int:
        """Draft, verify, accept, commit once; returns the number of tokens emitted."""
        begun = clock(self.device)
        self.proposer.commit(self.state, self.committed)
        proposal = self._within_context(self.proposer.propose(self.state, self.num_draft_tokens, self._choose))
        drafted = clock(self.device)
        width = int(proposal.count_B.max())
        draft_BK = proposal.token_BK[:, :width]
        start_B = torch.tensor([row.known - 1 for row in self.rows], device=self.device)
        position_BQ = start_B[:, None] + torch.arange(width + 1, device=self.device)
        tokens_BQ = torch.cat([self.last_B[:, None], draft_BK], dim=1)
        hidden_BQH, features = self.target.step(tokens_BQ, position_BQ, self.cache, self.proposer.feature_spec)
        logits_BQV = self.target.logits(hidden_BQH)
        passed = clock(self.device)
        if self.sampling.greedy:
            accepted_B, next_B = verify_greedy(draft_BK, proposal.count_B, logits_BQV)
        else:
            laws = None if proposal.probs_BKV is None else proposal.probs_BKV[:, :width]
            probs_BQV = target_probs(logits_BQV, self.sampling)
            verify = verify_block if self.sampling.rejection_sample_method == "block" else verify_sampled
            accepted_B, next_B = verify(draft_BK, proposal.count_B, probs_BQV, laws, self.draws)
        emitted = self._record(draft_BK, proposal.count_B, accepted_B, next_B)
        # Beside position n-1+i stands token x_{n+i}: the accepted drafts, then the corrected or bonus token.
        token_BQ = torch.cat([draft_BK, torch.zeros_like(next_B)[:, None]], dim=1).scatter(
            1, accepted_B[:, None], next_B[:, None]
        )
        self.committed = Committed(token_BQ, position_BQ, accepted_B + 1, features)
        self.last_B = next_B
        done = clock(self.device)
        self.timings.draft += drafted - begun
        self.timings.target += passed - drafted
        self.timings.verify += done - passed
        self.timings.target_steps += 1
        self.timings.draft_steps += 1
        self._drop_finished()
        return emitted

    @property
    def _choose(self) -> Chooser:
        """How drafts are picked: the argmax, or a draw from the draft's own law."""
        if self.sampling.greedy_drafts:
            return lambda logits_BD: (logits_BD.argmax(-1), None)

        def draw(logits_BD: Tensor) -> tuple[Tensor, Tensor | None]:
            probs_BD = target_probs(logits_BD, self.sampling.drafts)
            return self.draft_draws.draw_rows(probs_BD), probs_BD

        return draw

    def _within_context(self, proposal: Proposal) -> Proposal:
        """No draft may stand beyond the target's context."""
        room_B = torch.tensor([self.target.max_length - row.known for row in self.rows], device=self.device)
        return replace(proposal, count_B=torch.minimum(proposal.count_B, room_B.clamp(min=0)))

    def _record(self, draft_BK: Tensor, count_B: Tensor, accepted_B: Tensor, next_B: Tensor) -> int:
        """Write the round into each live request's trace; returns the tokens emitted."""
        emitted = 0
        columns = zip(self.rows, draft_BK.tolist(), count_B.tolist(), accepted_B.tolist(), next_B.tolist(), strict=True)
        for row, drafts, count, accepted, token in columns:
            if row.done:
                continue
            new = self._emit(row, [*drafts[:accepted], token])
            row.request.cycles.append(Cycle(drafts[:count], accepted, min(accepted, new), new))
            emitted += new
        # A finished row rides along where it stands: its next round rewrites the same slots.
        return emitted

    def _emit(self, row: _Row, tokens: list[int]) -> int:
        """Give the user `tokens` up to the first EOS and the length limit; returns how many that were."""
        output, before = row.request.output_ids, len(row.request.output_ids)
        for token in tokens:
            output.append(token)
            if token in self.target.eos_token_ids:
                row.request.finish_reason = "stop"
                row.done = True
                break
            if len(output) == row.room:
                row.done = True
                break
        if not row.done:
            row.known += len(tokens)
        return len(output) - before

    def _drop_finished(self) -> None:
        """Forget finished rows once they are a fifth of the batch, or all of it."""
        live = [i for i, row in enumerate(self.rows) if not row.done]
        if len(live) > 0.8 * len(self.rows):
            return
        self.proposer.finish(self.state, [i for i, row in enumerate(self.rows) if row.done], self.committed)
        if not live:
            self.rows = []
            return
        chosen = torch.tensor(live, device=self.device)
        self.rows = [self.rows[i] for i in live]
        self.cache.select(chosen)
        self.state = self.proposer.select(self.state, chosen)
        self.draws, self.draft_draws = self.draws.select(live), self.draft_draws.select(live)
        self.last_B = self.last_B[chosen]
        c = self.committed
        self.committed = Committed(
            c.token_BS[chosen], c.position_BS[chosen], c.count_B[chosen], c.features.select(chosen)
        )


def _requests(
    prompts: Sequence[Sequence[int]], ids: Sequence[str] | None, categories: Sequence[str] | None
) -> list[RequestTrace]:
    return [
        RequestTrace(ids[i] if ids else str(i), list(prompt), category=categories[i] if categories else "")
        for i, prompt in enumerate(prompts)
    ]


def batches_of(prompts: Sequence[Sequence[int]], batch_size: int) -> list[list[int]]:
    """Indices of the prompts in batches of similar length; in the given order for batch size 1."""
    if batch_size < 1:
        raise UserError(f"batch_size is {batch_size}: give at least 1")
    order = list(range(len(prompts)))
    if batch_size > 1:
        order.sort(key=lambda i: (len(prompts[i]), i))
    return [order[i : i + batch_size] for i in range(0, len(order), batch_size)]
