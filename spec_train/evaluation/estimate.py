"""Acceptance of a suite estimated from its plain text, without decoding: what stands beside every measured row.

A speculator is run over the whole text at once (`training/acceptance.py` has the law). A proposer without a model
(prompt lookup, suffix decoding) is replayed instead: it is asked for drafts where each round starts, and the text says
which of them the target keeps. Its drafts have a one-hot law, so nothing else is needed at any temperature.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch

from spec_train.batch import Features
from spec_train.data.batches import build_batch
from spec_train.data.documents import Document
from spec_train.decoding.acceptance import acceptance_length, drafted_rounds, survivors
from spec_train.decoding.engine import batches_of
from spec_train.decoding.sampling import Sampling
from spec_train.decoding.trace import Cycle, RequestTrace
from spec_train.evaluation.metrics import acceptance_interval
from spec_train.speculators.base import Committed, Proposer, ResponseHits, Speculator
from spec_train.speculators.distillation import add_target_probs
from spec_train.target import TargetModel
from spec_train.training.acceptance import (
    Interval,
    independent_length,
    position_average,
    renewal_counts,
    renewal_interval,
)

ESTIMATE_TOKENS = 4096  # positions in one teacher-forced pass

Estimate = Callable[[int], dict[str, Any]]
"""The "estimate" block of a result with K drafts a round."""


def estimator(
    target: TargetModel,
    proposer: Proposer,
    texts: Sequence[RequestTrace],
    *,
    sampling: Sampling,
    max_draft_tokens: int,
    batch_size: int,
) -> Estimate:
    """Estimates for any K up to `max_draft_tokens` on `texts`, which `target` wrote under `sampling`.

    At temperature 0 they equal what decoding measures, to the last counted token; on sampled text they have the
    expectation of what decoding measures, with an interval over conversations. `batch_size`: that of the decode, see
    `replay`.
    """
    if isinstance(proposer, Speculator):
        return _speculator_estimator(target, proposer, texts, sampling, max_draft_tokens)

    def replayed(num_draft_tokens: int) -> dict[str, Any]:
        requests = replay(proposer, texts, num_draft_tokens, batch_size=batch_size, max_length=target.max_length)
        rounds = drafted_rounds(requests)
        survived = survivors((cycle.kept for cycle in rounds), num_draft_tokens)
        figures = _figures(len(rounds), survived, acceptance_interval(requests))
        return {
            **figures,
            "renewal_by_depth": None,
            "position_average": None,
            "independent": None,
            "by_draft_sample_method": None,
        }

    return replayed


def _speculator_estimator(
    target: TargetModel,
    speculator: Speculator,
    texts: Sequence[RequestTrace],
    sampling: Sampling,
    max_draft_tokens: int,
) -> Estimate:
    """At a temperature with either way of picking drafts."""
    greedy = replace(sampling, draft_sample_method="greedy")
    rules = [greedy] if sampling.greedy else [greedy, replace(sampling, draft_sample_method="probabilistic")]
    found = text_hits(target, speculator, texts, max_draft_tokens, rules)
    hits: dict[str, list[ResponseHits]] = {
        rule.draft_sample_method: responses for rule, responses in zip(rules, found, strict=True)
    }

    def estimate(num_draft_tokens: int) -> dict[str, Any]:
        renewal = {name: _renewal(found, num_draft_tokens) for name, found in hits.items()}
        own = "greedy" if sampling.greedy_drafts else "probabilistic"
        return {
            **renewal[own],
            "renewal_by_depth": [
                renewal_counts(hits[own], k).mean_acceptance_length for k in range(1, num_draft_tokens + 1)
            ],
            "position_average": position_average(hits[own], num_draft_tokens),
            "independent": independent_length(hits[own], num_draft_tokens),
            "by_draft_sample_method": None if sampling.greedy else renewal,
        }

    return estimate


def text_hits(
    target: TargetModel,
    speculator: Speculator,
    texts: Sequence[RequestTrace],
    num_draft_tokens: int,
    rules: Sequence[Sampling],
) -> list[list[ResponseHits]]:
    """Teacher-forced drafts along the answers of `texts`, in the order of their length; one list for each of `rules`,
    settings that differ in nothing but how drafts are picked and judged. Turns of one
    conversation share a `document_id`."""
    documents = [
        Document(
            r.conversation or r.id,
            r.prompt_ids + r.output_ids,
            [(len(r.prompt_ids), len(r.prompt_ids) + len(r.output_ids))],
        )
        for r in texts
    ]
    hits: list[list[ResponseHits]] = [[] for _ in rules]
    for rows in _rows_of(documents):
        batch = build_batch(documents, rows).to(target.device)
        filled = target.fill_features(batch, speculator.feature_spec, target.dtype)
        if not all(rule.greedy_drafts for rule in rules):
            filled = add_target_probs(filled, target, rules[0])
        for rule, responses in zip(rules, hits, strict=True):
            responses += speculator.draft_hits(filled, num_draft_tokens, rule)
    return hits


def _renewal(hits: Sequence[ResponseHits], num_draft_tokens: int) -> dict[str, Any]:
    counts = renewal_counts(hits, num_draft_tokens)
    return _figures(counts.steps, counts.survived, renewal_interval(hits, num_draft_tokens))


def _figures(steps: float, survived: Sequence[float], interval: Interval | None) -> dict[str, Any]:
    """`survived[i]`: rounds that kept at least i+1 drafts, of `steps`."""
    accepted = sum(survived)
    before = [steps, *survived]
    return {
        "renewal": acceptance_length(accepted, steps),
        "renewal_steps": steps,
        "renewal_accepted": accepted,
        "renewal_ci95": interval,
        "acceptance_rate_per_position": [count / steps if steps else 0.0 for count in survived],
        "conditional_acceptance_rate_per_position": [
            count / earlier if earlier else 0.0 for earlier, count in zip(before, survived, strict=False)
        ],
    }


def replay(
    proposer: Proposer, texts: Sequence[RequestTrace], num_draft_tokens: int, *, batch_size: int, max_length: int
) -> list[RequestTrace]:
    """The rounds that `proposer` would have had on `texts`, in a trace of each. `max_length`: the target's context.

    Only for a proposer that reads nothing but tokens. Batches are those of `speculative_decode`, because a proposer
    that remembers learns from the requests beside it. It does not hear of tokens beyond the end of a text, which a
    decode may accept in a last round and throw away.
    """
    proposer.reset()
    walked = [replace(text, cycles=[]) for text in texts]
    for chunk in batches_of([text.prompt_ids for text in texts], batch_size):
        _replay_batch(proposer, [walked[i] for i in chunk], num_draft_tokens, max_length)
    return walked


def _replay_batch(proposer: Proposer, requests: list[RequestTrace], num_draft_tokens: int, max_length: int) -> None:
    tokens = [[*request.prompt_ids, *request.output_ids] for request in requests]
    # The tokens that the proposer hears of next: from, to. A request that is over rides along, as in decoding.
    spans = [(1, len(request.prompt_ids) + 1) for request in requests]
    rows = list(range(len(requests)))
    room = max(len(text) for text in tokens) + num_draft_tokens + 1
    state = proposer.begin([request.prompt_ids for request in requests], room)
    while rows:
        live = [row for row in rows if spans[row][1] < len(tokens[row])]
        if len(live) <= 0.8 * len(rows):
            over = [place for place, row in enumerate(rows) if row not in live]
            proposer.finish(state, over, _committed(tokens, spans, rows))
            state = proposer.select(state, torch.tensor([rows.index(row) for row in live], dtype=torch.int64))
            rows = live
            continue
        proposer.commit(state, _committed(tokens, spans, rows))
        proposal = proposer.propose(state, num_draft_tokens, lambda logits_BD: (logits_BD.argmax(-1), None))
        for row, offered, count in zip(rows, proposal.token_BK.tolist(), proposal.count_B.tolist(), strict=True):
            known, text = spans[row][1], tokens[row]
            if row not in live:
                continue
            drafts = offered[: min(count, max_length - known)]
            kept = 0
            while kept < min(len(drafts), len(text) - known) and drafts[kept] == text[known + kept]:
                kept += 1
            emitted = min(kept + 1, len(text) - known)
            requests[row].cycles.append(Cycle(drafts, kept, kept, emitted))
            spans[row] = (known, known + emitted)


def _committed(tokens: list[list[int]], spans: list[tuple[int, int]], rows: list[int]) -> Committed:
    """The tokens of each row's span; the token beside position p stands at p + 1."""
    width = max(spans[row][1] - spans[row][0] for row in rows)
    token_BS = torch.zeros(len(rows), width, dtype=torch.int64)
    for place, row in enumerate(rows):
        new = tokens[row][slice(*spans[row])]
        token_BS[place, : len(new)] = torch.tensor(new)
    first_B = torch.tensor([spans[row][0] - 1 for row in rows])
    count_B = torch.tensor([spans[row][1] - spans[row][0] for row in rows])
    return Committed(token_BS, first_B[:, None] + torch.arange(width), count_B, Features(None, None))


def _rows_of(documents: Sequence[Document]) -> list[list[list[int]]]:
    """Micro-batches of documents of similar length, one a row."""
    order = sorted(range(len(documents)), key=lambda i: len(documents[i].input_ids))
    batches: list[list[list[int]]] = []
    rows: list[list[int]] = []
    for index in order:
        if rows and (len(rows) + 1) * len(documents[index].input_ids) > ESTIMATE_TOKENS:
            batches.append(rows)
            rows = []
        rows.append([index])
    return [*batches, rows] if rows else batches
