"""Token trees: their shape, the rules by which one is accepted, and the loop that decodes with them.

A tree's node 0 is the last committed token; every other node drafts the token after its parent. One target pass over
all nodes, each seeing the committed text and its ancestors, gives the target's law after every node.

Greedy decoding (Miao et al. 2023, "SpecInfer", arXiv 2305.09781; Cai et al. 2024, "Medusa", arXiv 2401.10774): from the
root follow the child that is the target's argmax; where there is none, that argmax is the added token.

Sampling: recursive rejection (SpecInfer's multi-step rule; Li et al. 2024, "EAGLE", arXiv 2401.15077). At a node with
target law p and children x_1, x_2, ... tried in turn:

    accept x_j with probability  min(1, p[x_j] / q_j[x_j])
    on refusal                   p <- (p - q_j)+ / sum of the same,  q_{j+1} <- q_j without x_j, renormalised
    all refused                  draw the added token from the p that is left

q_j is the law that x_j was drawn from given the children before it. Children drawn one after another without
replacement have the draft's law with the earlier ones taken out. Children picked by rank (EAGLE-2, Medusa) are fixed
once the text is: q_j is one-hot, so x_j is accepted with probability p[x_j], and p loses x_j when it is refused.
Whatever q_1 is, one step maps p to p exactly (see `verify.py`), so by induction over the children the token that
follows a node has the target's law.

Shape legend: see `speculators/base.py`; further N nodes of a tree, root included.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from spec_train.batch import Features
from spec_train.decoding.engine import Progress, _requests, _Round, decode_batches
from spec_train.decoding.sampling import Sampling, draw_at, target_probs
from spec_train.decoding.trace import Cycle, DecodeTrace, RequestTrace, Timings
from spec_train.decoding.tree_draft import TokenTree, TreeShape, draft_trees
from spec_train.decoding.verify import accept_probability, residual_law
from spec_train.errors import UserError
from spec_train.speculators.base import Committed, Speculator
from spec_train.target import TargetModel, clock


# ------------------------------------------------------------------------------------------------ acceptance rules
def follow_greedy(tree: TokenTree, choice_N: Sequence[int]) -> tuple[list[int], int]:
    """(the accepted nodes from the root's child down, the added token); `choice_N`: the target's argmax after every
    node."""
    path: list[int] = []
    node = 0
    while True:
        matching = [child for child in tree.children(node) if tree.tokens[child] == choice_N[node]]
        if not matching:
            return path, choice_N[node]
        node = matching[0]
        path.append(node)


def follow_sampled(tree: TokenTree, probs_NV: Tensor, uniform_N: Tensor) -> tuple[list[int], int]:
    """(the accepted nodes from the root's child down, the added token) by recursive rejection.

    `probs_NV`: the target's law after every node, from `sampling.target_probs`. `uniform_N` in [0, 1): entry i > 0
    tests node i, entry 0 draws the added token.
    """
    path, law_V = sampled_path(tree, probs_NV, uniform_N)
    return path, int(draw_at(law_V, uniform_N[0]))


def sampled_path(tree: TokenTree, probs_NV: Tensor, uniform_N: Tensor) -> tuple[list[int], Tensor]:
    """(the accepted nodes, the law of the added token); arguments as in `follow_sampled`."""
    path: list[int] = []
    node = 0
    while True:
        accepted, law_V = try_children(tree, node, probs_NV[node], uniform_N)
        if accepted is None:
            return path, law_V
        node = accepted
        path.append(node)


def try_children(tree: TokenTree, node: int, law_V: Tensor, uniform_N: Tensor) -> tuple[int | None, Tensor]:
    """(the child of `node` that is accepted, or None; the law that is left after those refused)."""
    draft_V = None if tree.laws_NV is None else tree.laws_NV[node]
    for child in tree.children(node):
        token = tree.tokens[child]
        drawn_V = one_hot(law_V, token) if draft_V is None else draft_V
        if uniform_N[child] < accept_probability(law_V[token], drawn_V[token]):
            return child, law_V
        law_V = residual_law(law_V, drawn_V)
        if draft_V is not None:
            draft_V = without(draft_V, token)
    return None, law_V


def one_hot(like_V: Tensor, token: int) -> Tensor:
    """The law of a draft that could be no other."""
    law_V = torch.zeros_like(like_V)
    law_V[token] = 1.0
    return law_V


def without(law_V: Tensor, token: int) -> Tensor:
    """The law of the next draw without replacement; all zero where `token` was the last one left."""
    left_V = law_V.clone()
    left_V[token] = 0.0
    return left_V / left_V.sum().clamp(min=torch.finfo(left_V.dtype).tiny)


# ------------------------------------------------------------------------------------------------ decoding
@torch.inference_mode()
def tree_decode(
    target: TargetModel,
    speculator: Speculator,
    prompts: Sequence[Sequence[int]],
    *,
    shape: TreeShape,
    sampling: Sampling,
    max_new_tokens: int,
    batch_size: int = 1,
    ids: Sequence[str] | None = None,
    categories: Sequence[str] | None = None,
    indices: Sequence[int] | None = None,
    on_progress: Progress | None = None,
) -> DecodeTrace:
    """`speculative_decode` with a tree of drafts a round; the trace's `num_draft_tokens` is the tree's depth.

    A cycle records every node but the root as a draft, in the order of the pass, and its parent (see `Cycle`);
    `accepted` counts the nodes of the accepted path.

    Raises UserError as `speculative_decode` does, for a tree deeper than the speculator drafts, for block verification,
    and where a dynamic tree is to hold sampled drafts (choosing among draws by their probability would bias the text).
    """
    target.check_trees()
    if not sampling.greedy and sampling.rejection_sample_method == "block":
        raise UserError("a tree is verified token by token; give rejection_sample_method standard")
    if speculator.max_draft_tokens is not None and shape.depth > speculator.max_draft_tokens:
        raise UserError(f"tree of depth {shape.depth}: this speculator drafts at most {speculator.max_draft_tokens}")
    if shape.dynamic and not sampling.greedy and sampling.draft_sample_method == "probabilistic":
        raise UserError(
            "a dynamic tree takes draft_sample_method greedy: choosing among sampled drafts by their probability would "
            "bias the text; give greedy, or a static tree (widths or paths)"
        )

    def start(members: list[RequestTrace], places: Sequence[int], timings: Timings) -> _TreeRound:
        # `max_nodes` in place of K: the cache has room for every node.
        batch = _TreeRound(target, speculator, members, places, shape.max_nodes, sampling, max_new_tokens, timings)
        batch.speculator, batch.shape = speculator, shape
        return batch

    requests = _requests(prompts, ids, categories)
    timings = decode_batches(requests, start, target, batch_size, indices, on_progress)
    return DecodeTrace(requests, timings, num_draft_tokens=shape.depth, batch_size=batch_size)


class _TreeRound(_Round):
    """A batch of requests in flight, each with a tree of its own a round."""

    speculator: Speculator
    shape: TreeShape

    def advance(self) -> int:
        """Draft, verify, accept, commit once; returns the number of tokens emitted."""
        begun = clock(self.device)
        self.proposer.commit(self.state, self.committed)
        draws = None
        if not self.sampling.greedy and self.sampling.draft_sample_method == "probabilistic":
            draws = self.draft_draws
        trees = draft_trees(self.speculator, self.state, self.last_B, self.shape, self.sampling, draws)
        # No draft may stand beyond the target's context.
        trees = [t.up_to(self.target.max_length - row.known) for t, row in zip(trees, self.rows, strict=True)]
        drafted = clock(self.device)
        token_BN, depth_BN, sees_BNN = (part.to(self.device) for part in stack_trees(trees))
        start_B = torch.tensor([row.known - 1 for row in self.rows], device=self.device)
        hidden_BNH, features = self.target.step_tree(
            token_BN, depth_BN, sees_BNN, start_B, self.cache, self.proposer.feature_spec
        )
        logits_BNV = self.target.logits(hidden_BNH)
        passed = clock(self.device)
        followed = self._follow(trees, logits_BNV)
        emitted = self._record_trees(trees, followed)
        # The accepted path moves to where a chain would have stood, in the cache and in what is committed.
        width = 1 + max(len(path) for path, _token in followed)
        path_BS = torch.arange(width).repeat(len(trees), 1)
        token_BS = torch.zeros(len(trees), width, dtype=torch.long)
        for row, (tree, (path, token)) in enumerate(zip(trees, followed, strict=True)):
            path_BS[row, 1 : 1 + len(path)] = torch.tensor(path, dtype=torch.long)
            token_BS[row, : 1 + len(path)] = torch.tensor([*(tree.tokens[node] for node in path), token])
        path_BS = path_BS.to(self.device)
        position_BS = start_B[:, None] + torch.arange(width, device=self.device)
        self.cache.move(start_B[:, None] + path_BS, position_BS)
        rows_B1 = torch.arange(len(trees), device=self.device)[:, None]
        count_B = torch.tensor([1 + len(path) for path, _token in followed], device=self.device)
        on_path = Features(
            *(None if part is None else part[rows_B1, path_BS] for part in (features.aux_hidden, features.last_hidden))
        )
        self.committed = Committed(token_BS.to(self.device), position_BS, count_B, on_path)
        self.last_B = torch.tensor([token for _path, token in followed], device=self.device)
        done = clock(self.device)
        self.timings.draft += drafted - begun
        self.timings.target += passed - drafted
        self.timings.verify += done - passed
        self.timings.target_steps += 1
        self.timings.draft_steps += 1
        self._drop_finished()
        return emitted

    def _follow(self, trees: list[TokenTree], logits_BNV: Tensor) -> list[tuple[list[int], int]]:
        """Apply the rule to each row. Under sampling a row takes a number for each node of its own tree."""
        if self.sampling.greedy:
            choices = logits_BNV.argmax(-1).tolist()
            return [follow_greedy(tree, choice_N) for tree, choice_N in zip(trees, choices, strict=True)]
        probs_BNV = target_probs(logits_BNV, self.sampling)
        nodes_B = torch.tensor([len(tree.tokens) for tree in trees], device=self.device)
        uniform_BN = self.draws.uniform(nodes_B)
        return [follow_sampled(tree, probs_BNV[b], uniform_BN[b]) for b, tree in enumerate(trees)]

    def _record_trees(self, trees: list[TokenTree], followed: list[tuple[list[int], int]]) -> int:
        """Write the round into each live request's trace; returns the tokens emitted."""
        emitted = 0
        for row, tree, (path, token) in zip(self.rows, trees, followed, strict=True):
            if row.done:
                continue
            new = self._emit(row, [*(tree.tokens[node] for node in path), token])
            parents = [parent - 1 for parent in tree.parents[1:]]
            row.request.cycles.append(Cycle(tree.tokens[1:], len(path), min(len(path), new), new, parents))
            emitted += new
        return emitted


def stack_trees(trees: Sequence[TokenTree]) -> tuple[Tensor, Tensor, Tensor]:
    """(tokens [B, N], depths [B, N], `sees` [B, N, N]: a node's ancestors and itself) of trees padded to one size.

    Padding stands where the root does and sees itself and the root; no real node sees it.
    """
    width = max(len(tree.tokens) for tree in trees)
    token_BN = torch.zeros(len(trees), width, dtype=torch.long)
    depth_BN = torch.zeros(len(trees), width, dtype=torch.long)
    sees_BNN = torch.eye(width, dtype=torch.bool).repeat(len(trees), 1, 1)
    sees_BNN[:, :, 0] = True
    for row, tree in enumerate(trees):
        size = len(tree.tokens)
        token_BN[row, :size] = torch.tensor(tree.tokens)
        for node in range(1, size):
            parent = tree.parents[node]
            depth_BN[row, node] = depth_BN[row, parent] + 1
            sees_BNN[row, node] |= sees_BNN[row, parent]
    return token_BN, depth_BN, sees_BNN
