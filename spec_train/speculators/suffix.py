"""Suffix decoding: draft the commonest continuation of the longest useful match. No model, no training.

Source: Oliaro et al. 2024, "SuffixDecoding" (arXiv 2411.04975); parameters and tie-breaking are those of the program
that vLLM calls (`method=suffix`, arctic-inference), so that a comparison here holds there.

Two suffix trees: a local one over the request's prompt and output, and a global one over the outputs of all requests of
the run, the live ones included. With c(w) the number of times that w occurs in a tree, and s the last m tokens:

    path      x_1 x_2 ...: x_j is the commonest token after s x_1 ... x_{j-1}
    D(x_j)    = prod_{i<=j} c(s x_1 ... x_i) / c(s x_1 ... x_{i-1}); the path ends before D falls under min_token_prob
    length    at most min(K, max_spec_factor * m)
    score     sum_j D(x_j): the drafts that the tree expects to be accepted

The best score over m = 1, 2, ... < max_tree_depth wins, the longer match where two are equal; then the local tree where
it scores no less than the global one. The occurrence of s at the very end counts too, so D stays honest about matches
seen once. Sums are float32, as there, because equal scores decide.

Shape legend: B requests, K draft tokens, V target vocabulary, S newly committed tokens.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from spec_train.errors import UserError
from spec_train.speculators.base import Chooser, Committed, Proposal, Proposer


@dataclass(slots=True)
class Node:
    """A string of tokens. `count` how often it occurs. `order` the tokens that follow, the commonest first; among
    equals the order is the one in which counts grew (`SuffixTree._raise`).

    What follows a string seen once is not stored: it is `owner[at:]`, the tokens of the sequence it was seen in. Such a
    node gets children when the string is seen again. That keeps a tree at a few nodes a token.
    """

    count: int = 0
    children: dict[int, Node] = field(default_factory=dict)
    order: list[int] = field(default_factory=list)
    owner: list[int] | None = None
    at: int = 0


@dataclass(slots=True)
class Suffix:
    """A suffix that still grows: its start, and the node that stands for its first `depth` tokens."""

    start: int
    depth: int
    node: Node


@dataclass(slots=True)
class Sequence:
    """The tokens of one sequence in a tree, and its suffixes shorter than the tree is deep, the longest first."""

    tokens: list[int] = field(default_factory=list)
    growing: list[Suffix] = field(default_factory=list)


@dataclass(frozen=True)
class Draft:
    """`score`: the sum of the probabilities of `tokens` (float32)."""

    tokens: list[int]
    score: np.float32


class SuffixTree:
    """Counts of all strings of up to `max_depth` tokens in some sequences."""

    def __init__(self, max_depth: int) -> None:
        self.max_depth = max_depth
        self.root = Node()

    def append(self, sequence: Sequence, token: int) -> None:
        """Add `token` to the end of `sequence`, and so to each of its growing suffixes."""
        end = len(sequence.tokens)
        sequence.tokens.append(token)
        sequence.growing.append(Suffix(end, 0, self.root))
        if len(sequence.growing) > self.max_depth:
            sequence.growing.pop(0)
        self.root.count += 1
        for suffix in sequence.growing:
            node = suffix.node
            # A node that was shared since then holds this suffix further down.
            while node.owner is None and suffix.depth < end - suffix.start:
                node = node.children[sequence.tokens[suffix.start + suffix.depth]]
                suffix.depth += 1
            if node.owner is None:
                node = self._enter(node, token, sequence, suffix.depth + 1)
                suffix.depth += 1
            suffix.node = node

    def _enter(self, node: Node, token: int, sequence: Sequence, depth: int) -> Node:
        """Count `token`, the last of `sequence`, after `node`; returns its node, `depth` tokens from the root."""
        child = node.children.get(token)
        if child is None:
            child = Node(1, owner=sequence.tokens, at=len(sequence.tokens))
            node.children[token] = child
            if node is not self.root:
                node.order.append(token)
            return child
        if child.owner is not None:  # seen a second time: what followed the first time becomes a child
            if child.at < len(child.owner) and depth < self.max_depth:
                follower = child.owner[child.at]
                child.children[follower] = Node(1, owner=child.owner, at=child.at + 1)
                child.order.append(follower)
            child.owner = None
        if node is self.root:  # nothing is drafted from the empty string
            child.count += 1
        else:
            self._raise(node, token)
        return child

    @staticmethod
    def _raise(node: Node, token: int) -> None:
        """Count `token` once more. It passes those that it had equalled, and those that it now equals only where it
        led its equals: arctic-inference's order, on which ties depend."""
        order, children = node.order, node.children
        place, count = order.index(token), children[token].count
        before = children[order[place - 1]].count if place else None
        if before is not None and before <= count + 1:
            head = place - 1
            while head and children[order[head - 1]].count == before:
                head -= 1
            order.insert(head, order.pop(place))
        children[token].count += 1

    def remove(self, sequence: Sequence) -> None:
        """Forget a sequence."""
        for start in range(len(sequence.tokens)):
            node = self.root
            node.count -= 1
            for token in sequence.tokens[start : start + self.max_depth]:
                child = node.children.get(token)
                if child is None:
                    break
                if child.count == 1:
                    del node.children[token]
                    if node is not self.root:
                        node.order.remove(token)
                    break
                self._lower(node, token)
                node = child

    def _lower(self, node: Node, token: int) -> None:
        """Count `token` once less; it falls behind those that it had equalled."""
        child = node.children[token]
        if node is not self.root:
            order, place = node.order, node.order.index(token)
            behind = place + 1
            while behind < len(order) and node.children[order[behind]].count == child.count:
                behind += 1
            order.insert(behind - 1, order.pop(place))
        child.count -= 1

    def speculate(
        self, context: list[int], num_draft_tokens: int, max_spec_factor: float, min_token_prob: np.float32
    ) -> Draft:
        """The best draft after the last tokens of `context`, of which at most len(context) - 1 are matched."""
        best = Draft([], np.float32(0))
        for length in range(1, len(context)):
            suffix = context[-length:]
            node, depth = self.root, 0
            while depth < length and node.owner is None:
                child = node.children.get(suffix[depth])
                if child is None:
                    return best
                node, depth = child, depth + 1
            rest = suffix[depth:]
            if node.owner is not None and node.owner[node.at : node.at + len(rest)] != rest:
                return best
            limit = min(num_draft_tokens, int(length * max_spec_factor + 1e-6))
            draft = self._path(node, depth, len(rest), limit, min_token_prob)
            if draft.score >= best.score:
                best = draft
        return best

    def _path(self, node: Node, depth: int, ahead: int, limit: int, min_token_prob: np.float32) -> Draft:
        """The commonest continuation of the string `ahead` tokens beyond `node`, itself `depth` tokens long."""
        tokens: list[int] = []
        score, prob = np.float32(0), np.float32(1)
        while len(tokens) < limit:
            if node.owner is not None:  # one way on
                start = node.at + ahead
                follow = node.owner[start : min(start + limit - len(tokens), node.at + self.max_depth - depth)]
                tokens += follow
                for _ in follow:
                    score += prob
                break
            if not node.order:
                break
            child = node.children[node.order[0]]
            prob = prob * (np.float32(child.count) / np.float32(node.count))
            if prob < min_token_prob:
                break
            tokens.append(node.order[0])
            score += prob
            node, depth = child, depth + 1
        return Draft(tokens, score)


@dataclass
class Request:
    """A request's own tree, its prompt and output in it, its output in the global tree (None: no place there), and
    verified tokens that are in neither yet."""

    tree: SuffixTree
    local: Sequence
    shared: Sequence | None
    prompt_length: int
    pending: list[int] = field(default_factory=list)


@dataclass
class SuffixState:
    """One entry a request, and the device where drafts go."""

    requests: list[Request]
    device: torch.device


class SuffixProposer(Proposer):
    """Drafts by suffix decoding. Needs no features of the target.

    The parameters are vLLM's, without its prefix `suffix_decoding_`: `max_tree_depth` tokens are looked at,
    `max_cached_requests` outputs are in the global tree, the oldest leave first (0: no global tree). What is drafted
    depends on the requests decoded before, in their order; `reset`, at the start of each measurement (a suite at one K,
    a timed round), forgets them.

    Raises UserError for a parameter out of range.
    """

    remembers: ClassVar[bool] = True

    def __init__(
        self,
        max_tree_depth: int = 24,
        max_cached_requests: int = 10_000,
        max_spec_factor: float = 1.0,
        min_token_prob: float = 0.1,
    ) -> None:
        if max_tree_depth < 1 or max_cached_requests < 0 or max_spec_factor < 0 or not 0 <= min_token_prob <= 1:
            raise UserError(
                f"suffix decoding: max_tree_depth {max_tree_depth} must be at least 1, max_cached_requests "
                f"{max_cached_requests} and max_spec_factor {max_spec_factor} at least 0, min_token_prob "
                f"{min_token_prob} between 0 and 1"
            )
        self.max_tree_depth = max_tree_depth
        self.max_cached_requests = max_cached_requests
        self.max_spec_factor = max_spec_factor
        self.min_token_prob = np.float32(min_token_prob)
        self.reset()

    def reset(self) -> None:
        """Empty the global tree."""
        self.shared_tree = SuffixTree(self.max_tree_depth)
        self.cached: list[Request] = []

    def begin(self, prompts: list[list[int]], max_length: int) -> SuffixState:
        """A fresh state that holds the prompts; each request takes its place in the global tree."""
        return SuffixState([self._start(prompt) for prompt in prompts], torch.device("cpu"))

    def _start(self, prompt: list[int]) -> Request:
        tree, local = SuffixTree(self.max_tree_depth), Sequence()
        for token in prompt:
            tree.append(local, token)
        if not self.max_cached_requests:
            return Request(tree, local, None, len(prompt))
        request = Request(tree, local, Sequence(), len(prompt))
        self.cached.append(request)
        if len(self.cached) > self.max_cached_requests:
            oldest = self.cached.pop(0)
            if oldest.shared is not None:
                self.shared_tree.remove(oldest.shared)
                oldest.shared = None
        return request

    def commit(self, state: SuffixState, committed: Committed) -> None:
        """Take verified tokens. They enter the trees in `propose`, row after row as vLLM does."""
        token_BS, position_BS = committed.token_BS.tolist(), committed.position_BS.tolist()
        for request, tokens, positions, count in zip(
            state.requests, token_BS, position_BS, committed.count_B.tolist(), strict=True
        ):
            known = len(request.local.tokens) + len(request.pending)
            # The first commit repeats the prompt; each later one goes on where the last one ended. A finished row that
            # rides along writes again where it wrote before, and what it writes is nobody's text.
            first = positions[0] == 0 and known == request.prompt_length
            if first or positions[0] + 1 == known:
                request.pending += tokens[known - positions[0] - 1 : count]
        state.device = committed.token_BS.device

    def finish(self, state: SuffixState, rows: list[int], committed: Committed) -> None:
        """The last tokens of finished requests: others may draft from them."""
        self.commit(state, committed)
        for row in rows:
            self._absorb(state.requests[row])

    def _absorb(self, request: Request) -> None:
        for token in request.pending:
            request.tree.append(request.local, token)
            if request.shared is not None:
                self.shared_tree.append(request.shared, token)
        request.pending = []

    def propose(self, state: SuffixState, num_draft_tokens: int, choose: Chooser) -> Proposal:
        """Up to `num_draft_tokens` tokens a row; nothing is left to `choose`, their law is one-hot."""
        token_BK = torch.zeros(len(state.requests), num_draft_tokens, dtype=torch.int64)
        count_B = torch.zeros(len(state.requests), dtype=torch.int64)
        for row, request in enumerate(state.requests):
            self._absorb(request)
            draft = self.draft(request, num_draft_tokens)
            token_BK[row, : len(draft)] = torch.tensor(draft, dtype=torch.int64)
            count_B[row] = len(draft)
        return Proposal(token_BK.to(state.device), count_B.to(state.device))

    def draft(self, request: Request, num_draft_tokens: int) -> list[int]:
        """The draft after a request's last token."""
        context = request.local.tokens[-self.max_tree_depth :]
        rule: Any = (num_draft_tokens, self.max_spec_factor, self.min_token_prob)
        local = request.tree.speculate(context, *rule)
        shared = self.shared_tree.speculate(context, *rule)
        return local.tokens if local.score >= shared.score else shared.tokens

    def select(self, state: SuffixState, rows: Tensor) -> SuffixState:
        """The state of the chosen rows."""
        return SuffixState([state.requests[row] for row in rows.tolist()], state.device)
