"""Trees of drafts: one pass equals separate chains, the text stays the target's, the law stays the target's."""

import itertools

import pytest
import torch

import spec_train.decoding.tree as tree_module
from spec_train.batch import FeatureSpec
from spec_train.decoding.engine import plain_decode, speculative_decode
from spec_train.decoding.sampling import RequestGenerators, Sampling, target_probs
from spec_train.decoding.tree import follow_greedy, follow_sampled, sampled_path, stack_trees, tree_decode
from spec_train.decoding.tree_draft import TokenTree, draft_trees, dynamic_tree, likeliest, static_tree
from spec_train.errors import UserError
from spec_train.evaluation.metrics import compare_lossless
from spec_train.speculators.draft_lm import DraftLM
from spec_train.speculators.draft_start import DraftLMOptions
from spec_train.speculators.eagle3 import Eagle3, Eagle3Options, eagle3_config
from spec_train.speculators.medusa import Medusa, MedusaOptions
from spec_train.target import TargetModel
from tests.tiny import tiny_model

PROMPTS = [[5, 6, 7, 8, 9, 10, 11], [20, 21, 22], list(range(30, 60)), [7]]
GREEDY = Sampling()


@pytest.fixture(scope="module")
def targets(tmp_path_factory):
    folder = tmp_path_factory.mktemp("targets")
    return {kind: TargetModel.load(str(tiny_model(kind, folder))) for kind in ("llama", "gemma3_text", "gpt_neox")}


def noisy_draft(target, noise=0.1):
    """A draft model near the target: its own weights with noise, so that it is right often and wrong often."""
    options = DraftLMOptions(type="draft_lm", start_layers=target.num_layers)
    draft = DraftLM.from_recipe(options, target, torch.arange(target.vocab_size), seed=0).eval().requires_grad_(False)
    generator = torch.Generator().manual_seed(1)
    for parameter in draft.body.layers.parameters():
        parameter += noise * parameter.std() * torch.randn(parameter.shape, generator=generator)
    return draft


def fresh_head(target, kind):
    """An untrained head that may propose every second token."""
    ids = torch.arange(0, 320, 2)
    if kind == "eagle3":
        options = Eagle3Options(type="eagle3", aux_layer_ids=[1, 2, 4])
        head = Eagle3.from_target(eagle3_config(options, target, len(ids)), target, ids, options.init, seed=0)
    else:
        head = Medusa.from_recipe(MedusaOptions(type="medusa"), target, ids, seed=0)
    return head.eval().requires_grad_(False)


# ------------------------------------------------------------------ one pass over a tree
@pytest.mark.parametrize("kind", ["llama", "gemma3_text", "gpt_neox"])
def test_the_pass_over_a_tree_equals_a_pass_over_each_path(targets, kind):
    """Gemma's windows of 16 tokens end inside the prompt; the rows stand at different positions."""
    target, spec = targets[kind], FeatureSpec((1, 3))
    trees = [
        TokenTree([50, 51, 52, 53, 54, 55], [-1, 0, 0, 1, 1, 4]),
        TokenTree([60, 61, 62, 63], [-1, 0, 1, 1]),
    ]
    prompts = [list(range(10, 34)), [3, 1, 4]]
    start = torch.tensor([len(prompt) for prompt in prompts])
    cache = target.new_cache(40)
    with torch.no_grad():
        target.prefill(prompts, cache, spec)
        hidden, features = target.step_tree(*stack_trees(trees), start, cache, spec)
    for b, tree in enumerate(trees):
        for node in range(len(tree.tokens)):
            path = [node]
            while path[0] > 0:
                path.insert(0, tree.parents[path[0]])
            ids = torch.tensor([[*prompts[b], *(tree.tokens[i] for i in path)]])
            with torch.no_grad():
                alone, aux = target.forward(ids, torch.arange(ids.shape[1])[None], aux_layer_ids=spec.aux_layer_ids)
            torch.testing.assert_close(hidden[b, node], alone[0, -1], atol=2e-4, rtol=1e-4)
            torch.testing.assert_close(features.aux_hidden[b, node], aux[0, -1], atol=2e-4, rtol=1e-4)
    # The path 0, 1, 4, 5 takes its canonical slots; the next token then sees what it would after a chain.
    source, place = torch.tensor([[0, 1, 4, 5], [0, 1, 3, 3]]), torch.arange(4).expand(2, -1)
    cache.move(start[:, None] + source, start[:, None] + place)
    with torch.no_grad():
        after, _ = target.step(torch.tensor([[70], [71]]), start[:, None] + torch.tensor([[4], [3]]), cache, spec)
    for b, text in enumerate([[*prompts[0], 50, 51, 54, 55, 70], [*prompts[1], 60, 61, 63, 71]]):
        with torch.no_grad():
            alone, _ = target.forward(torch.tensor([text]), torch.arange(len(text))[None])
        torch.testing.assert_close(after[b, 0], alone[0, -1], atol=2e-4, rtol=1e-4)


# ------------------------------------------------------------------ greedy decoding
def check_cycles(trace):
    for request in trace.requests:
        assert 1 + sum(cycle.emitted for cycle in request.cycles) == len(request.output_ids)
        at = 1
        for cycle in request.cycles:
            assert len(cycle.parents) == len(cycle.drafts)
            children = {-1: {}}
            for node, (token, parent) in enumerate(zip(cycle.drafts, cycle.parents, strict=True)):
                assert token not in children[parent]  # siblings differ
                children[parent][token] = node
                children[node] = {}
            node = -1
            for token in request.output_ids[at : at + cycle.kept]:  # what was kept is a path of the tree
                node = children[node][token]
            at += cycle.emitted


SHAPES = [dynamic_tree(4, 3, 12), dynamic_tree(3, 4, 36), static_tree([3, 2, 1]), static_tree(paths=[[0], [1], [1, 0]])]


@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: shape.name)
@pytest.mark.parametrize("kind", ["llama", "gemma3_text", "gpt_neox"])
def test_greedy_text_is_the_targets_own(targets, kind, shape):
    target = targets[kind]
    plain = plain_decode(target, PROMPTS, sampling=GREEDY, max_new_tokens=16, batch_size=4)
    for batch_size in (1, 3):
        trace = tree_decode(
            target, noisy_draft(target), PROMPTS, shape=shape, sampling=GREEDY, max_new_tokens=16, batch_size=batch_size
        )
        assert compare_lossless(plain.requests, trace.requests)["identical"] == len(PROMPTS)
        check_cycles(trace)
        cycles = [cycle for request in trace.requests for cycle in request.cycles]
        assert max(cycle.accepted for cycle in cycles) > 1
        assert {len(cycle.drafts) for cycle in cycles} == {shape.num_tokens}


@pytest.mark.parametrize("kind", ["eagle3", "medusa"])
def test_heads_decode_the_targets_text(targets, kind):
    target = targets["llama"]
    head = fresh_head(target, kind)
    plain = plain_decode(target, PROMPTS, sampling=GREEDY, max_new_tokens=16, batch_size=4)
    for shape in (dynamic_tree(3, 4, 10), static_tree([3, 2, 2])):
        trace = tree_decode(target, head, PROMPTS, shape=shape, sampling=GREEDY, max_new_tokens=16, batch_size=2)
        assert compare_lossless(plain.requests, trace.requests)["identical"] == len(PROMPTS)
        check_cycles(trace)
        drafts = {token for request in trace.requests for cycle in request.cycles for token in cycle.drafts}
        assert all(token % 2 == 0 for token in drafts)


def acceptance(trace):
    cycles = [cycle for request in trace.requests for cycle in request.cycles]
    return 1 + sum(cycle.kept for cycle in cycles) / len(cycles)


def test_a_tree_accepts_more_than_the_chain(targets):
    target = targets["llama"]
    draft, common = noisy_draft(target, 0.2), {"sampling": GREEDY, "max_new_tokens": 32, "batch_size": 4}
    chain = speculative_decode(target, draft, PROMPTS, num_draft_tokens=4, **common)
    assert acceptance(chain) > 1.1
    for shape in (dynamic_tree(4, 4, 24), static_tree([4, 2, 1, 1])):
        assert acceptance(tree_decode(target, draft, PROMPTS, shape=shape, **common)) > acceptance(chain)


@pytest.mark.parametrize("kind", ["draft_lm", "eagle3", "medusa"])
def test_every_dynamic_tree_holds_the_chain(targets, kind):
    """From the state of each round of a chain: the chain's drafts are a path of the tree, so it accepts no less. The
    smallest trees have no room for anything else."""
    target, depth = targets["llama"], 3
    draft = noisy_draft(target, 0.2) if kind == "draft_lm" else fresh_head(target, kind)
    trace = speculative_decode(target, draft, PROMPTS, num_draft_tokens=depth, sampling=GREEDY, max_new_tokens=14)
    states, rounds = [], []
    for request in trace.requests:
        known = [*request.prompt_ids, request.output_ids[0]]
        for cycle in request.cycles[:-1]:  # the limit on the length may cut the last
            states.append(known)
            rounds.append(cycle)
            known = [*known, *request.output_ids[len(known) - len(request.prompt_ids) :][: cycle.emitted]]
    # A head reads the target's states of the prompt, and those of a later round are the same: the text is committed.
    for shape in (dynamic_tree(depth, 2, depth), dynamic_tree(depth, 3, 5), dynamic_tree(depth, 4, 16)):
        trees = tree_decode(
            target,
            draft,
            [known[:-1] for known in states],
            shape=shape,
            sampling=GREEDY,
            max_new_tokens=depth + 3,
            batch_size=16,
        )
        for cycle, known, request in zip(rounds, states, trees.requests, strict=True):
            assert request.output_ids[0] == known[-1]
            first, node = request.cycles[0], -1
            for token in cycle.drafts:
                children = [n for n, parent in enumerate(first.parents) if parent == node]
                node = next(n for n in children if first.drafts[n] == token)
            assert first.accepted >= cycle.accepted


def test_with_a_draft_model_a_tree_takes_no_more_rounds_than_the_chain(targets):
    """A draft model's rounds from any two places agree on what it drafts right, so from the first round on the tree is
    never behind (see `tree_draft`), whatever its size."""
    target = targets["llama"]
    draft, common = noisy_draft(target, 0.2), {"sampling": GREEDY, "max_new_tokens": 40, "batch_size": 4}
    chain = speculative_decode(target, draft, PROMPTS, num_draft_tokens=4, **common)
    for shape in (dynamic_tree(4, 4, 4), dynamic_tree(4, 4, 6), dynamic_tree(4, 3, 12)):
        trees = tree_decode(target, draft, PROMPTS, shape=shape, **common)
        for one, other in zip(chain.requests, trees.requests, strict=True):
            assert len(other.cycles) <= len(one.cycles)


def test_equal_logits_leave_the_argmax_first():
    logits = torch.zeros(3, 400)
    logits[1, 7] = logits[1, 300] = 1.0
    assert likeliest(logits, 3)[:, 0].tolist() == logits.argmax(-1).tolist()
    assert set(likeliest(logits, 2)[1].tolist()) == {7, 300}


def test_a_chain_is_a_tree_of_one_branch(targets):
    """The same rounds and, from the same seed, the same drafts law by law: greedy counters are equal cycle by cycle."""
    target = targets["gemma3_text"]
    draft = noisy_draft(target)
    chain = speculative_decode(target, draft, PROMPTS, num_draft_tokens=3, sampling=GREEDY, max_new_tokens=20)
    tree = tree_decode(target, draft, PROMPTS, shape=dynamic_tree(3, 1, 3), sampling=GREEDY, max_new_tokens=20)
    for one, other in zip(chain.requests, tree.requests, strict=True):
        assert [(c.drafts, c.accepted) for c in one.cycles] == [(c.drafts, c.accepted) for c in other.cycles]


def test_a_tree_stops_at_the_targets_context(tmp_path):
    target = TargetModel.load(str(tiny_model("llama", tmp_path, max_position_embeddings=36)))
    plain = plain_decode(target, PROMPTS[2:3], sampling=GREEDY, max_new_tokens=20)
    trace = tree_decode(
        target, noisy_draft(target, 0.0), PROMPTS[2:3], shape=dynamic_tree(4, 2, 8), sampling=GREEDY, max_new_tokens=20
    )
    assert compare_lossless(plain.requests, trace.requests)["identical"] == 1
    assert len(trace.requests[0].output_ids) == 6


# ------------------------------------------------------------------ growing a tree
def test_a_dynamic_tree_holds_the_chain_and_the_likeliest_nodes(targets):
    """Held against a search over all paths, one draft at a time."""
    target = targets["llama"]
    draft = noisy_draft(target)
    prompt, depth, top_k, kept = [5, 6, 7], 3, 3, 9
    trace = tree_decode(
        target, draft, [prompt], shape=dynamic_tree(depth, top_k, kept), sampling=GREEDY, max_new_tokens=2
    )
    known = [*prompt, trace.requests[0].output_ids[0]]
    nodes, frontier, chain = {}, {(): 0.0}, ()
    for _ in range(depth):
        grown = {}
        for path, value in frontier.items():
            ids = torch.tensor([[*known, *path]])
            states = draft.body.forward(ids, torch.arange(ids.shape[1])[None])[0]
            best = draft.draft_logits(states[0, -1]).log_softmax(-1).topk(top_k)
            for step, token in zip(best.values.tolist(), best.indices.tolist(), strict=True):
                grown[(*path, token)] = value + step
            if path == chain:
                longer = (*chain, int(best.indices[0]))
        nodes |= grown
        chain = longer
        frontier = dict(sorted(grown.items(), key=lambda item: (item[0] != chain, -item[1]))[:top_k])
    assert chain not in sorted(nodes, key=lambda path: -nodes[path])[:kept]  # its worth alone would not keep it
    expected = set(sorted(nodes, key=lambda path: (path != chain[: len(path)], -nodes[path]))[:kept])
    cycle = trace.requests[0].cycles[0]
    paths = {-1: ()}
    for node, (token, parent) in enumerate(zip(cycle.drafts, cycle.parents, strict=True)):
        paths[node] = (*paths[parent], token)
    assert set(paths.values()) - {()} == expected


def test_pruning_keeps_a_tree():
    tree = TokenTree([9, 1, 2, 3, 4], [-1, 0, 0, 1, 3])
    assert tree.keep([0, 2, 3, 4]) == TokenTree([9, 2], [-1, 0])
    assert tree.up_to(2) == TokenTree([9, 1, 2, 3], [-1, 0, 0, 1])
    assert tree.up_to(0) == TokenTree([9], [-1])
    assert follow_greedy(tree, [1, 3, 0, 5, 6]) == ([1, 3], 5)


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: dynamic_tree(2, 2, 7), "6 tokens at most"),
        (lambda: dynamic_tree(0, 2, 2), "at least 1"),
        (lambda: dynamic_tree(4, 2, 3), "the chain of its depth"),
        (lambda: static_tree([2, 0]), "at least 1"),
        (lambda: static_tree(), "either widths or paths"),
        (lambda: static_tree(paths=[[0], [2]]), "sibling before it"),
        (lambda: static_tree(paths=[[0], [1, 0]]), "parent"),
    ],
)
def test_shapes_that_are_no_tree(make, says):
    with pytest.raises(UserError, match=says):
        make()


def test_sampled_drafts_ask_for_a_static_tree(targets):
    target, sampling = targets["llama"], Sampling(temperature=1.0, draft_sample_method="probabilistic")
    draft = noisy_draft(target)
    with pytest.raises(UserError, match="static tree"):
        tree_decode(target, draft, [[1]], shape=SHAPES[0], sampling=sampling, max_new_tokens=2)


# ------------------------------------------------------------------ the law of sampled trees
V, LENGTH = 4, 3
FILTERS = {
    "none": Sampling(temperature=1.0),
    "temperature": Sampling(temperature=0.7),
    "top_k": Sampling(temperature=1.0, top_k=3),
    "top_p": Sampling(temperature=0.9, top_p=0.8),
    "min_p": Sampling(temperature=1.0, min_p=0.2),
    "all": Sampling(temperature=1.2, top_k=3, top_p=0.9, min_p=0.1),
}
PREFIXES = [prefix for n in range(LENGTH + 3) for prefix in itertools.product(range(V), repeat=n)]
_noise = torch.Generator().manual_seed(3)
TARGET = {prefix: 1.5 * torch.randn(V, generator=_noise) for prefix in PREFIXES}
DRAFT = {prefix: 0.6 * TARGET[prefix] + torch.randn(V, generator=_noise) for prefix in PREFIXES}
SHAPE = static_tree(paths=[[0], [1], [0, 0]])


def laws(table, sampling):
    return {prefix: target_probs(logits, sampling) for prefix, logits in table.items()}


class Coin:
    """Stands where a uniform number is compared with a probability: takes the scripted side and keeps account."""

    def __init__(self, script, seen):
        self.script, self.seen = script, seen

    def __lt__(self, probability):
        side = self.script[len(self.seen)] if len(self.seen) < len(self.script) else True
        self.seen.append((side, float(probability)))
        return side


def outcomes(tree, probs_NV):
    """Every (path, law of the added token, probability) of the rule itself, by playing both sides of every test."""
    scripts, found = [()], []
    while scripts:
        script = scripts.pop()
        seen = []
        path, law = sampled_path(tree, probs_NV, [Coin(script, seen)] * len(tree.tokens))
        weight = 1.0
        for side, probability in seen:
            weight *= probability if side else 1 - probability
        scripts += [(*(side for side, _p in seen[:i]), False) for i in range(len(script), len(seen)) if seen[i][1] < 1]
        if weight > 0:
            found.append((path, law, weight))
    return found


def rank_trees(prefix, draft):
    """The one tree of ranks: 0, 1 and 0-0."""
    first, second = draft[prefix].topk(2).indices.tolist()
    deep = int(draft[(*prefix, first)].argmax())
    return [(TokenTree([0, first, second, deep], [-1, 0, 0, 1]), 1.0)]


def sampled_trees(prefix, drawn, scored):
    """Every tree that drawing without replacement can give, with its probability; `scored`: the laws it carries."""
    for first, second, deep in itertools.product(range(V), repeat=3):
        law = drawn[prefix]
        if first == second or law[first] == 0 or drawn[(*prefix, first)][deep] == 0:
            continue
        left = float(1 - law[first])
        weight = float(law[first]) * float(drawn[(*prefix, first)][deep])
        alone = float(law[first]) > 1 - 1e-6  # nothing is left to draw a second child from
        if alone and second != (first + 1) % V:
            continue
        if not alone:
            weight *= float(law[second]) / left
        if weight > 0:
            carried = torch.stack([scored[prefix], scored[(*prefix, first)], scored[prefix], scored[prefix]])
            tree = TokenTree([0, first, second, deep], [-1, 0, 0, 1], carried)
            yield (tree.keep([0, 1, 3]) if alone else tree), weight


def joint_error(target, trees_of, wrong_node=False):
    """Largest deviation of the law of the first three tokens from plain sampling."""
    joint, plain = torch.zeros(2, V, V, V, dtype=torch.float64)
    opened = {(): 1.0}
    for prefix in (p for p in PREFIXES if len(p) < LENGTH):
        reached = opened.get(prefix, 0.0)
        if reached == 0:
            continue
        for tree, weight in trees_of(prefix):
            texts = [prefix]
            for node in range(1, len(tree.tokens)):
                texts.append((*texts[tree.parents[node]], tree.tokens[node]))
            shifted = [max(tree.parents[n], 0) for n in range(len(texts))] if wrong_node else range(len(texts))
            probs_NV = torch.stack([target[texts[node]] for node in shifted])
            for path, law, chance in outcomes(tree, probs_NV):
                for token, probability in enumerate(law.tolist()):
                    text = (*prefix, *(tree.tokens[node] for node in path), token)
                    mass = reached * weight * chance * probability
                    if len(text) >= LENGTH:
                        joint[text[:LENGTH]] += mass
                    else:
                        opened[text] = opened.get(text, 0.0) + mass
    for a, b, c in itertools.product(range(V), repeat=3):
        plain[a, b, c] = float(target[()][a]) * float(target[(a,)][b]) * float(target[(a, b)][c])
    return float((joint - plain).abs().max())


@pytest.mark.parametrize("name", FILTERS)
def test_enumerated_joint_law_is_the_targets(name):
    """Drafts come from the law at the temperature alone; the filtered one, which may run dry, would do as well."""
    target = laws(TARGET, FILTERS[name])
    assert any((law == 0).any() for law in target.values()) == (name not in ("none", "temperature"))
    assert joint_error(target, lambda prefix: rank_trees(prefix, DRAFT)) < 1e-6
    for draft in (laws(DRAFT, FILTERS[name].drafts), laws(DRAFT, FILTERS[name])):
        assert joint_error(target, lambda prefix, draft=draft: sampled_trees(prefix, draft, draft)) < 1e-5


def test_enumeration_detects_each_fault(monkeypatch):
    plain, cut = FILTERS["none"], FILTERS["top_k"]
    target, draft = laws(TARGET, plain), laws(DRAFT, plain)

    def sampled(prefix):
        return sampled_trees(prefix, draft, draft)

    assert joint_error(target, sampled, wrong_node=True) > 0.003  # laws from the node before
    assert joint_error(target, lambda prefix: rank_trees(prefix, DRAFT), wrong_node=True) > 0.003
    cut_target, cut_draft = laws(TARGET, cut), laws(DRAFT, cut)
    assert joint_error(cut_target, lambda prefix: sampled_trees(prefix, cut_draft, draft)) > 0.003  # before top-k

    def unclipped(target_law, draft_law):
        difference = (target_law - draft_law).abs()
        return difference / difference.sum()

    with monkeypatch.context() as patch:
        patch.setattr(tree_module, "residual_law", unclipped)
        assert joint_error(target, sampled) > 0.003
    with monkeypatch.context() as patch:
        patch.setattr(tree_module, "without", lambda law, token: law)  # the second child judged as if put back
        assert joint_error(target, sampled) > 0.003
    with monkeypatch.context() as patch:
        patch.setattr(tree_module, "one_hot", lambda law, token: torch.full_like(law, 1 / V))
        assert joint_error(target, lambda prefix: rank_trees(prefix, DRAFT)) > 0.003


class TableDraft:
    """A speculator of one table over V tokens, for the growing of trees alone."""

    def __init__(self, logits):
        self.logits = logits

    def first_logits(self, state, num_draft_tokens):
        return None, self.logits[state]

    def next_logits(self, draft, token_B, depth):
        return self.logits[token_B]

    def branch(self, draft, rows):
        return None

    def target_ids(self, index):
        return index

    def full_law(self, probs):
        return probs


@pytest.mark.parametrize("name", FILTERS)
def test_sampled_trees_and_the_rule_together_keep_the_law(name):
    """Trees grown by the drafting code itself, judged by the rule itself: the first token over 4,000 requests."""
    runs, sampling = 4000, FILTERS[name]
    table, target = torch.stack([DRAFT[(v,)] for v in range(V)]), laws(TARGET, sampling)
    draws, tests = RequestGenerators(sampling, range(runs), stream="draft"), RequestGenerators(sampling, range(runs))
    roots = torch.zeros(runs, dtype=torch.long)
    trees = draft_trees(TableDraft(table), roots, roots, SHAPE, sampling, draws)
    assert torch.equal(trees[0].laws_NV[0], (table[0] / sampling.temperature).softmax(-1))  # no filter
    uniform = tests.uniform(torch.tensor([len(tree.tokens) for tree in trees]))
    counts = torch.zeros(V, dtype=torch.float64)
    for tree, uniform_N in zip(trees, uniform, strict=True):
        path, token = follow_sampled(tree, target[()].expand(len(tree.tokens), -1), uniform_N)
        counts[tree.tokens[path[0]] if path else token] += 1
    law = target[()].double()
    assert counts[law == 0].sum() == 0
    # Four standard deviations of a count.
    assert ((counts / runs - law).abs() <= 4 * (law * (1 - law) / runs).sqrt() + 1e-9).all()


def test_sampled_decoding_does_not_depend_on_the_batch(targets):
    target = targets["llama"]
    draft = noisy_draft(target, 0.05)
    for method in ("greedy", "probabilistic"):
        sampling = Sampling(temperature=0.8, top_k=20, draft_sample_method=method, seed=3)
        one, three = (
            tree_decode(target, draft, PROMPTS, shape=static_tree([2, 2]), sampling=sampling, max_new_tokens=12,
                        batch_size=size)
            for size in (1, 3)
        )  # fmt: skip
        assert [r.output_ids for r in one.requests] == [r.output_ids for r in three.requests]
        assert max(cycle.accepted for request in one.requests for cycle in request.cycles) > 0
