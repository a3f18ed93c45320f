"""What a chain of K drafts would have given on recorded text: rounds and tokens at any depth, fixed or adaptive.

Two records tell how many leading drafts the target accepts:

- *flags*: the leading hits from every state of a response (teacher-forced drafts, ResponseHits). A round at state m
  that drafts k tokens emits min(hits_m, k) + 1 and the next one starts where it ended: every depth is walked exactly,
  the renewal effect included.
- *rounds*: the accepted drafts of every round of a decode at one depth. A shallower round k <= K emits
  min(accepted, k) + 1; over all rounds the mean is 1 + sum_{j<=k} prod_{i<=j} c_i, the product of the conditional
  acceptance rates c_i. Where rounds start is taken to be the same for every depth. That understates shallow depths:
  a deep decode needs few rounds for easy text, so more of its rounds start on hard text (2% at K = 1 out of K = 3 on
  the quickstart, up to 10% on synthetic text of changing difficulty). `advise.tokens_per_round` corrects for it.

Adaptive drafting is bounded by an oracle that knows each round's hits and drafts k = argmax value*(k+1) - ms(k), k up
to those hits, where value is the milliseconds an emitted token is worth (Dinkelbach's iteration for the largest
ratio of tokens to time). The causal policy knows a request's past only: it drafts the depth with the best expected
ratio under the acceptance of an exponentially weighted mean over the request's own rounds.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

ORACLE_ITERATIONS = 6
MEMORY = 0.8  # weight of the past in the causal policy's running means


@dataclass(frozen=True)
class Chain:
    """One request. `hits`: leading hits from every state (flags) or accepted drafts of every round (rounds);
    `drafted`: how many drafts stood there (prompt lookup offers fewer than K); `output_tokens` includes the prefill's
    own token; `conversation`: shared by its turns, "" for a request that stands alone."""

    id: str
    hits: tuple[int, ...]
    drafted: tuple[int, ...]
    depth: int
    flags: bool
    output_tokens: int
    conversation: str = ""


@dataclass(frozen=True)
class Walk:
    """Sums over the rounds of one request: rounds, tokens emitted, drafts proposed, milliseconds (0 without a cost)."""

    rounds: int
    tokens: int
    drafts: int
    ms: float = 0.0


Policy = Callable[[int], int]  # drafts of the next round from the leading hits of this state (an oracle looks at them)


def walk(chain: Chain, policy: Policy, ms: Callable[[int], float] | None = None) -> Walk:
    """Decode one request round by round; `ms` prices a round by the drafts it really had."""
    state = rounds = tokens = drafts = 0
    spent, left = 0.0, chain.output_tokens - 1
    while state < len(chain.hits) and left > 0:
        count = min(policy(chain.hits[state]), chain.drafted[state], chain.depth)
        emitted = min(chain.hits[state], count) + 1
        state += emitted if chain.flags else 1
        rounds, drafts, tokens = rounds + 1, drafts + count, tokens + min(emitted, left)
        # With rounds the text that a shallower draft leaves over is not walked: only the ratio is meant.
        left -= emitted
        spent += ms(count) if ms else 0.0
    return Walk(rounds, tokens, drafts, spent)


def fixed(chain: Chain, num_draft_tokens: int) -> Walk:
    """The walk with `num_draft_tokens` drafts a round (0: plain decoding)."""
    return walk(chain, lambda _: num_draft_tokens)


def oracle_ms_per_token(chains: Sequence[Chain], ms: Sequence[float]) -> float:
    """Milliseconds a token under the oracle; `ms[k]` prices a round of k drafts. The bound of every adaptive policy
    that drafts from these states."""
    value = ms[0]
    for _ in range(ORACLE_ITERATIONS):
        worth = [value * (k + 1) - ms[k] for k in range(len(ms))]
        best = [max(range(hits + 1), key=worth.__getitem__) for hits in range(len(ms))]
        walks = [walk(c, lambda hits, b=best: b[min(hits, len(b) - 1)], ms.__getitem__) for c in chains]  # type: ignore[misc]
        tokens = sum(w.tokens for w in walks)
        if not tokens:
            return value
        value = sum(w.ms for w in walks) / tokens
    return value


def causal_ms_per_token(chains: Sequence[Chain], ms: Sequence[float], prior: Sequence[float]) -> float:
    """Milliseconds a token of the causal policy. `prior[i]`: conditional acceptance of draft i+1 over all requests; a
    request's own mean acceptance scales it."""
    walks = []
    for chain in chains:
        policy = _RunningMean(ms, prior)
        walks.append(walk(chain, policy.next, ms.__getitem__))
    tokens = sum(w.tokens for w in walks)
    return sum(w.ms for w in walks) / tokens if tokens else ms[0]


class _RunningMean:
    """Means of accepted and of tested drafts, per request, on top of the prior's odds."""

    def __init__(self, ms: Sequence[float], prior: Sequence[float]) -> None:
        self.ms, self.prior = ms, prior
        self.accepted = self.expected = 1.0

    def next(self, hits: int) -> int:
        """The depth for this round; `hits` is looked at only after the choice."""
        scale = self.accepted / self.expected
        best, best_cost, alive, tokens = 0, self.ms[0], 1.0, 1.0
        for k, rate in enumerate(self.prior, start=1):
            alive *= min(1.0, rate * scale)
            tokens += alive
            if self.ms[k] / tokens < best_cost:
                best, best_cost = k, self.ms[k] / tokens
        best = max(best, 1)  # without a draft nothing would ever be learnt again
        tested = min(best, hits + 1)
        self.accepted = MEMORY * self.accepted + min(best, hits)
        self.expected = MEMORY * self.expected + sum(self.prior[:tested])
        return best


def conditional_rates(chains: Sequence[Chain], depth: int) -> list[float]:
    """c_1 .. c_depth over the rounds at this depth: accepted at i / tested at i; 0 where none was tested."""
    tested, passed = [0] * depth, [0] * depth
    for chain in chains:
        state = 0
        while state < len(chain.hits):
            count = min(depth, chain.drafted[state])
            accepted = min(chain.hits[state], count)
            for i in range(min(accepted + 1, count)):
                tested[i] += 1
                passed[i] += i < accepted
            state += accepted + 1 if chain.flags else 1
    return [p / t if t else 0.0 for p, t in zip(passed, tested, strict=True)]
