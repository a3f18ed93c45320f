"""How a tree of drafts is grown from any speculator that gives logits token by token.

Dynamic (Li et al. 2024, "EAGLE-2: Faster Inference of Language Models with Dynamic Draft Trees", arXiv 2406.16858). The
value of a node is the product of the draft's probabilities (its softmax, no filter) along its path.

    expand   at each depth the `top_k` nodes of highest value get their `top_k` likeliest children
    rerank   of all nodes the `num_tokens` of highest value stay; a parent is worth no less than its child and is taken
             first where they tie, so what stays is a tree

The paper's rule may leave out the end of the greedy chain, or its middle where `top_k` other nodes are worth more, and
then a tree can accept less than the chain of its depth. Here the chain's nodes are among the expanded and the kept ones
whatever they are worth, in the place of the least worthy others, so from one state a tree accepts no less than the
chain at temperature 0. Written r(t) for where a round that starts at t leads, r_tree(t) >= r_chain(t). Where a draft
depends on the text alone (a draft model), r_chain(t) is the place after the first wrong draft, at most t + depth + 1,
and never falls with t; by induction the tree's i-th round starts no earlier than the chain's and a request takes no
more rounds. A head also reads states that depend on where its round began; r_chain may then fall, and for a whole text
nothing follows.

Static (Cai et al. 2024, "Medusa", arXiv 2401.10774). The tree is given beforehand as paths of ranks: (0, 2) is the
third likeliest token after the likeliest one. `widths` (s_1, s_2, ...) means all their products. Heads that do not
read the tokens before them give every node of a depth the same children; others are asked node by node. Under sampling
with probabilistic drafts the children of a node are drawn one after another without replacement, in place of the ranks,
from the law that a chain's drafts have (`Sampling.drafts`: the temperature, no filter).

Shape legend: see `speculators/base.py`; further N nodes of a tree, root included, F nodes of one depth, R = B * F.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from spec_train.decoding.sampling import RequestGenerators, Sampling, draw_at, target_probs
from spec_train.errors import UserError
from spec_train.speculators.base import Speculator


@dataclass(frozen=True)
class TreeShape:
    """A dynamic tree (`depth`, `top_k`, `num_tokens`) or a static one (`paths` of ranks, parents before children).

    Make one with `dynamic_tree` or `static_tree`. `num_tokens` counts drafts: the root is not among them.
    """

    depth: int
    top_k: int
    num_tokens: int
    paths: tuple[tuple[int, ...], ...] = ()

    @property
    def dynamic(self) -> bool:
        """True where the tree follows the draft's probabilities."""
        return not self.paths

    @property
    def max_nodes(self) -> int:
        """The nodes of the largest tree, root not counted, and no fewer than the depth."""
        return max(self.num_tokens, self.depth)

    @property
    def name(self) -> str:
        """A short name, fit for a file: `tree-d4-k4-n16`, or `tree-s4-2-1` by the nodes of each depth."""
        if self.dynamic:
            return f"tree-d{self.depth}-k{self.top_k}-n{self.num_tokens}"
        sizes = [sum(len(path) == depth + 1 for path in self.paths) for depth in range(self.depth)]
        return "tree-s" + "-".join(map(str, sizes))


def dynamic_tree(depth: int, top_k: int, num_tokens: int) -> TreeShape:
    """An EAGLE-2 tree. Raises UserError for a value below 1, and for fewer tokens than its chain has or more than such
    a tree can have."""
    if min(depth, top_k, num_tokens) < 1:
        raise UserError(f"tree {depth},{top_k},{num_tokens}: depth, top_k and num_tokens must be at least 1")
    if num_tokens < depth:
        raise UserError(
            f"tree {depth},{top_k},{num_tokens}: it holds the chain of its depth; give num_tokens of {depth} or more"
        )
    possible = top_k + (depth - 1) * top_k * top_k
    if num_tokens > possible:
        raise UserError(
            f"tree {depth},{top_k},{num_tokens}: depth {depth} and top_k {top_k} give {possible} tokens at most; "
            f"lower num_tokens"
        )
    return TreeShape(depth, top_k, num_tokens)


def static_tree(widths: Sequence[int] = (), paths: Sequence[Sequence[int]] = ()) -> TreeShape:
    """A Medusa tree: all products of `widths`, or `paths` of ranks. Raises UserError for widths below 1, for both or
    neither, and for paths that leave out a parent or an earlier sibling."""
    if bool(widths) == bool(paths):
        raise UserError("a static tree takes either widths or paths")
    if widths:
        if min(widths) < 1:
            raise UserError(f"tree widths {list(widths)}: each must be at least 1")
        ranks = [range(width) for width in widths]
        listed = [path for depth in range(1, len(ranks) + 1) for path in itertools.product(*ranks[:depth])]
    else:
        listed = sorted({tuple(path) for path in paths}, key=lambda path: (len(path), path))
    known = {(), *listed}
    for path in listed:
        before = path[:-1] if not path or path[-1] == 0 else (*path[:-1], path[-1] - 1)
        if not path or min(path) < 0 or path[:-1] not in known or before not in known:
            raise UserError(f"tree path {list(path)}: its parent or the sibling before it is not among the paths")
    return TreeShape(len(listed[-1]), max(path[-1] for path in listed) + 1, len(listed), tuple(listed))


def parse_tree(text: str) -> TreeShape:
    """The tree of a command line: `4,4,16` (depth, top_k, num_tokens) or `4x2x1` (widths). Raises UserError."""
    parts = text.split("x" if "x" in text else ",")
    if not all(part.strip().isdecimal() for part in parts) or ("x" not in text and len(parts) != 3):
        raise UserError(f"tree {text}: give depth,top_k,num_tokens such as 4,4,16, or widths such as 4x2x1")
    numbers = [int(part) for part in parts]
    return static_tree(numbers) if "x" in text else dynamic_tree(*numbers)


@dataclass(frozen=True)
class TokenTree:
    """The tree of one request. Node 0 is the last committed token; parents stand before their children, and the
    children of a node in the order in which they are tried.

    tokens   target ids
    parents  index of each node's parent, -1 for the root
    laws_NV  the law that each node's children were drawn from, None where they were picked by rank
    """

    tokens: list[int]
    parents: list[int]
    laws_NV: Tensor | None = None

    def children(self, node: int) -> list[int]:
        """The children of a node, in the order in which they are tried."""
        return [child for child, parent in enumerate(self.parents) if parent == node]

    def keep(self, nodes: Sequence[int]) -> TokenTree:
        """The tree of some nodes (ascending, the root among them), without those whose ancestors are left out."""
        place = {-1: -1}
        for node in nodes:
            if self.parents[node] in place:
                place[node] = len(place) - 1
        kept = [node for node in nodes if node in place]
        laws_NV = None if self.laws_NV is None else self.laws_NV[kept]
        return TokenTree([self.tokens[n] for n in kept], [place[self.parents[n]] for n in kept], laws_NV)

    def up_to(self, depth: int) -> TokenTree:
        """The tree without what lies deeper than `depth` (the root has depth 0)."""
        depths = [0]
        for parent in self.parents[1:]:
            depths.append(depths[parent] + 1)
        return self if max(depths) <= depth else self.keep([n for n, own in enumerate(depths) if own <= depth])


@torch.no_grad()
def draft_trees(
    speculator: Speculator,
    state: Any,
    last_B: Tensor,
    shape: TreeShape,
    sampling: Sampling,
    draws: RequestGenerators | None,
) -> list[TokenTree]:
    """A tree for each row, rooted at `last_B`, the last committed tokens. `draws`: what sampled drafts are drawn with,
    None for drafts by rank. A dynamic tree takes drafts by rank only."""
    if shape.dynamic:
        assert draws is None
        return _dynamic(speculator, state, last_B.tolist(), shape)
    return _static(speculator, state, last_B.tolist(), shape, sampling, draws)


def _dynamic(speculator: Speculator, state: Any, roots: list[int], shape: TreeShape) -> list[TokenTree]:
    rows, kept = len(roots), shape.num_tokens
    draft, logits_RD = speculator.first_logits(state, shape.depth)
    value_BF = torch.zeros(rows, 1, device=logits_RD.device)
    node_BF = torch.zeros(rows, 1, dtype=torch.long, device=logits_RD.device)
    tokens: list[Tensor] = []
    parents: list[Tensor] = []
    ranks: list[Tensor] = []  # values, the chain's above all
    for depth in range(shape.depth):
        frontier, top_k = node_BF.shape[1], min(shape.top_k, logits_RD.shape[-1])
        index_RC = likeliest(logits_RD, top_k)
        step_RC = logits_RD.gather(1, index_RC).float() - logits_RD.float().logsumexp(-1, keepdim=True)
        token_BN = speculator.target_ids(index_RC).view(rows, frontier * top_k)
        value_BN = (value_BF[:, :, None] + step_RC.view(rows, frontier, top_k)).flatten(1)
        # The chain's node comes first at every depth: the likeliest child of the first node expanded.
        rank_BN = value_BN.clone()
        rank_BN[:, 0] = math.inf
        first = 1 + sum(part.shape[1] for part in tokens)  # the index of this depth's first node
        tokens.append(token_BN)
        ranks.append(rank_BN)
        parents.append(node_BF.repeat_interleave(top_k, dim=1))
        if depth + 1 == shape.depth:
            break
        chosen_BF = rank_BN.topk(min(shape.top_k, rank_BN.shape[1]), dim=1).indices
        value_BF, node_BF = value_BN.gather(1, chosen_BF), first + chosen_BF
        row_B1 = torch.arange(rows, device=chosen_BF.device)[:, None]
        draft = speculator.branch(draft, (row_B1 * frontier + chosen_BF // top_k).flatten())
        logits_RD = speculator.next_logits(draft, token_BN.gather(1, chosen_BF).flatten(), depth + 1)
    # Stable: nodes are listed by depth, so a parent comes before a child of the same value.
    order_BN = torch.cat(ranks, 1).sort(dim=1, descending=True, stable=True).indices[:, :kept]
    token_lists, parent_lists = torch.cat(tokens, 1).tolist(), torch.cat(parents, 1).tolist()
    return [
        TokenTree([root, *token], [-1, *parent]).keep([0, *sorted(1 + node for node in order)])
        for root, token, parent, order in zip(roots, token_lists, parent_lists, order_BN.tolist(), strict=True)
    ]


def likeliest(logits_RD: Tensor, count: int) -> Tensor:
    """int64 [R, count]: the indices of the largest logits in descending order, the argmax first as a chain picks it
    (`topk` leaves the order of equals open)."""
    best_R1 = logits_RD.argmax(-1, keepdim=True)
    return logits_RD.scatter(1, best_R1, math.inf).topk(count, dim=-1).indices


def _static(
    speculator: Speculator,
    state: Any,
    roots: list[int],
    shape: TreeShape,
    sampling: Sampling,
    draws: RequestGenerators | None,
) -> list[TokenTree]:
    rows = len(roots)
    place = {(): 0, **{path: 1 + i for i, path in enumerate(shape.paths)}}
    tokens = [[root, *[0] * len(shape.paths)] for root in roots]
    real = [[True] * len(place) for _ in roots]
    laws: dict[int, Tensor] = {}  # node -> [B, V]
    open_paths: list[tuple[int, ...]] = [()]
    draft, logits_RD = speculator.first_logits(state, shape.depth)
    for depth in range(shape.depth):
        here = [path for path in shape.paths if len(path) == depth + 1]
        width = max(path[-1] for path in here) + 1
        if draws is None:
            index_RC = likeliest(logits_RD, min(width, logits_RD.shape[-1]))
            there_RC = torch.ones_like(index_RC, dtype=torch.bool)
        else:
            law_RD = target_probs(logits_RD, sampling.drafts)
            index_RC, there_RC = _draw_children(law_RD, width, rows, draws)
            for f, path in enumerate(open_paths):
                laws[place[path]] = speculator.full_law(law_RD.view(rows, len(open_paths), -1)[:, f])
        child_BFC = speculator.target_ids(index_RC).view(rows, len(open_paths), -1).tolist()
        there_BFC = there_RC.view(rows, len(open_paths), -1).tolist()
        for path in here:
            f, rank, node = open_paths.index(path[:-1]), path[-1], place[path]
            for b in range(rows):
                real[b][node] = rank < len(child_BFC[b][f]) and there_BFC[b][f][rank]
                tokens[b][node] = child_BFC[b][f][rank] if real[b][node] else 0
        if depth + 1 == shape.depth:
            break
        grown = [path for path in here if (*path, 0) in place]
        chosen = [b * len(open_paths) + open_paths.index(path[:-1]) for b in range(rows) for path in grown]
        before = [tokens[b][place[path]] for b in range(rows) for path in grown]
        draft = speculator.branch(draft, torch.tensor(chosen, device=logits_RD.device))
        logits_RD = speculator.next_logits(draft, torch.tensor(before, device=logits_RD.device), depth + 1)
        open_paths = grown
    parents = [-1, *(place[path[:-1]] for path in shape.paths)]
    trees = []
    for b in range(rows):
        laws_NV = None
        if draws is not None:
            # Leaves have no children, so no law: the root's stands in and is never read.
            laws_NV = torch.stack([laws.get(node, laws[0])[b] for node in range(len(parents))])
        trees.append(TokenTree(tokens[b], parents, laws_NV).keep([n for n in range(len(parents)) if real[b][n]]))
    return trees


def _draw_children(law_RD: Tensor, width: int, rows: int, draws: RequestGenerators) -> tuple[Tensor, Tensor]:
    """(`width` draws without replacement from each law, int64 [R, width]; which of them are real). A law of fewer
    tokens runs dry. Each request's numbers come from its own generator."""
    count_B = torch.full((rows,), law_RD.shape[0] // rows * width, device=law_RD.device)
    uniform_RC = draws.uniform(count_B).view(law_RD.shape[0], width)
    left_RD = law_RD.clone()
    drawn, real = [], []
    for column in range(width):
        real.append(left_RD.sum(-1) > 0)
        index_R = draw_at(left_RD, uniform_RC[:, column]).clamp(max=law_RD.shape[1] - 1)
        drawn.append(index_R)
        left_RD = left_RD.scatter(1, index_R[:, None], 0.0)
    return torch.stack(drawn, 1), torch.stack(real, 1)
