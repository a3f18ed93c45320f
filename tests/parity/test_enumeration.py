"""The joint law of the first three tokens under speculative decoding equals plain sampling from the target.

A target and a draft over five tokens are given as explicit tables, one row of logits per prefix. For each rule (greedy
draft, probabilistic draft) and each filter:

- exactly: walk every draft and every accept event with the rule's own acceptance probability and residual;
- by simulation: run the batched rule on 40,000 rows and test the observed triples with a chi-square.

Both checks are then turned on variants with a deliberate fault; a check that lets one pass is no check. Last, the real
decoder with a real (tiny) target is held against exact enumeration with the model itself.
"""

import itertools

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from spec_train.decoding.engine import plain_decode, speculative_decode
from spec_train.decoding.sampling import RequestGenerators, Sampling, draw_at, target_probs
from spec_train.decoding.verify import accept_probability, leading_accepts, residual_law, verify_sampled
from spec_train.speculators.base import Proposal, Proposer
from spec_train.speculators.eagle3 import Eagle3, Eagle3Options
from spec_train.speculators.ngram import NgramProposer
from spec_train.target import TargetModel

V, K, LENGTH, RUNS = 5, 2, 3, 40_000
FILTERS = {
    "none": Sampling(temperature=1.0),
    "temperature": Sampling(temperature=0.7),
    "top_k": Sampling(temperature=1.0, top_k=3),
    "top_p": Sampling(temperature=0.9, top_p=0.8),
}


def tables(seed, scale):
    """Logits [V**n, V] for every prefix length n that decoding can reach; row = the prefix read in base V."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(V**n, V, generator=generator) * scale for n in range(LENGTH + K)]


TARGET = tables(1, 1.5)
DRAFT = [rows * 0.6 + torch.randn(rows.shape, generator=torch.Generator().manual_seed(2)) for rows in TARGET]


def laws(table, sampling):
    return [target_probs(rows, sampling) for rows in table]


def index(prefix):
    number = 0
    for token in prefix:
        number = number * V + token
    return number


def plain_joint(target):
    """Exact law of the first LENGTH tokens of plain sampling, float64 [V**LENGTH]."""
    joint = torch.zeros(V**LENGTH, dtype=torch.float64)
    for tokens in itertools.product(range(V), repeat=LENGTH):
        probability = 1.0
        for n in range(LENGTH):
            probability *= float(target[n][index(tokens[:n]), tokens[n]])
        joint[index(tokens)] = probability
    return joint


# ------------------------------------------------------------------------------------------------ exact enumeration


def one_hot(law):
    return torch.zeros_like(law).scatter_(-1, law.argmax(-1, keepdim=True), 1.0)


class Rule:
    """What a round does at one position, in the terms of the papers; a faulty variant overrides one of them."""

    def __init__(self, target, draft, greedy_draft):
        self.target = target
        self.drawn = [one_hot(law) for law in draft] if greedy_draft else draft  # the law drafts come from
        self.scored = self.drawn  # the law they are judged by

    def accept(self, target_law, draft_law, token):
        return float(accept_probability(target_law[token], draft_law[token]))

    def residual(self, target_law, draft_law):
        return residual_law(target_law, draft_law)

    def bonus(self, n, prefix):
        return self.target[n][index(prefix)]

    def one_round(self, prefix):
        """All continuations of `prefix` by one round, with their probabilities: (tokens, probability)."""
        return self._from_draft(tuple(prefix), (), 1.0)

    def _from_draft(self, prefix, drafts, weight):
        here = prefix + drafts
        n = len(here)
        if len(drafts) == K:
            return [((*drafts, v), weight * float(p)) for v, p in enumerate(self.bonus(n, here)) if p > 0]
        target_law, drawn, scored = (table[n][index(here)] for table in (self.target, self.drawn, self.scored))
        outcomes = []
        for token in range(V):
            if drawn[token] == 0:
                continue
            chosen = weight * float(drawn[token])
            accept = self.accept(target_law, scored, token)
            if accept < 1:
                corrected = self.residual(target_law, scored)
                outcomes += [((*drafts, v), chosen * (1 - accept) * float(p)) for v, p in enumerate(corrected) if p > 0]
            if accept > 0:
                outcomes += self._from_draft(prefix, (*drafts, token), chosen * accept)
        return outcomes


def speculative_joint(rule):
    """Exact law of the first LENGTH tokens when rounds of `rule` follow each other."""
    joint = torch.zeros(V**LENGTH, dtype=torch.float64)
    open_prefixes = {(): 1.0}
    while open_prefixes:
        following = {}
        for prefix, weight in open_prefixes.items():
            for tokens, probability in rule.one_round(prefix):
                longer = prefix + tokens
                if len(longer) >= LENGTH:
                    joint[index(longer[:LENGTH])] += weight * probability
                else:
                    following[longer] = following.get(longer, 0.0) + weight * probability
        open_prefixes = following
    return joint


def exact_error(rule):
    """Largest deviation of any triple's probability from plain sampling."""
    return float((speculative_joint(rule) - plain_joint(rule.target)).abs().max())


@pytest.mark.parametrize("greedy_draft", [True, False], ids=["greedy_draft", "probabilistic"])
@pytest.mark.parametrize("name", FILTERS)
def test_enumerated_joint_law_is_the_targets(name, greedy_draft):
    sampling = FILTERS[name]
    rule = Rule(laws(TARGET, sampling), laws(DRAFT, sampling), greedy_draft)
    assert exact_error(rule) < 1e-6
    assert float(speculative_joint(rule).sum()) == pytest.approx(1.0, abs=1e-5)


class UnclippedResidual(Rule):
    def residual(self, target_law, draft_law):
        difference = (target_law - draft_law).abs()
        return difference / difference.sum()


class BonusFromTheRowBefore(Rule):
    def bonus(self, n, prefix):
        return self.target[n - 1][index(prefix[:-1])]


def test_enumeration_detects_each_fault():
    plain, cut = FILTERS["none"], FILTERS["top_k"]
    target, draft = laws(TARGET, plain), laws(DRAFT, plain)
    assert exact_error(UnclippedResidual(target, draft, False)) > 0.01
    assert exact_error(BonusFromTheRowBefore(target, draft, False)) > 0.01

    soft_scores = Rule(target, draft, greedy_draft=True)
    soft_scores.scored = draft  # argmax drafts judged by the softmax
    assert exact_error(soft_scores) > 0.01

    before_top_k = Rule(laws(TARGET, cut), laws(DRAFT, cut), greedy_draft=False)
    before_top_k.scored = draft  # drawn after top-k, judged by the law before it
    assert exact_error(before_top_k) > 0.01


def test_soft_scores_on_greedy_drafts_give_the_known_biased_law():
    target, draft = torch.tensor([0.5, 0.3, 0.2]), torch.tensor([0.1, 0.2, 0.7])
    token = int(draft.argmax())

    def first_token(scored):
        accept = accept_probability(target[token], scored[token])
        law = (1 - accept) * residual_law(target, scored)
        law[token] += accept
        return law

    assert torch.allclose(first_token(one_hot(draft)), target)
    assert torch.allclose(first_token(draft), torch.tensor([0.571, 0.143, 0.286]), atol=1e-3)


# ---------------------------------------------------------------------------------------------------- by simulation


class OneStream(RequestGenerators):
    """The same numbers interface from a single generator: forty thousand generators would only cost time."""

    def __init__(self, seed):
        super().__init__(Sampling(), ())
        self.stream = torch.Generator().manual_seed(seed)

    def uniform(self, count_B):
        return torch.rand(len(count_B), int(count_B.max()), generator=self.stream, dtype=torch.float64)


def chi_square_p(counts, law):
    """p-value of observed counts; impossible cells must be empty, cells expected below 5 times are pooled."""
    if counts[law == 0].any():
        return 0.0
    expected = law * counts.sum()
    small = expected < 5
    observed = torch.cat([counts[~small], counts[small].sum()[None]])
    expected = torch.cat([expected[~small], expected[small].sum()[None]])
    keep = expected > 0
    statistic = ((observed - expected) ** 2 / expected.clamp(min=1e-12))[keep].sum()
    freedom = torch.tensor((int(keep.sum()) - 1) / 2, dtype=torch.float64)
    return float(torch.special.gammaincc(freedom, statistic / 2))


def rows_of(table, length_B, prefix_B):
    """table[length][prefix] for every row."""
    result = torch.empty(len(length_B), V)
    for n in length_B.unique().tolist():
        mine = length_B == n
        result[mine] = table[n][prefix_B[mine]]
    return result


def simulate(rule_fn, target, drawn, scored, seed=0):
    """Counts of the first LENGTH tokens over RUNS rows; `scored` None means greedy drafts (argmax of `drawn`)."""
    stream = torch.Generator().manual_seed(seed)
    generators = OneStream(seed + 1)
    tokens = torch.zeros(RUNS, LENGTH + K, dtype=torch.int64)
    length = torch.zeros(RUNS, dtype=torch.int64)
    prefix = torch.zeros(RUNS, dtype=torch.int64)
    while (length < LENGTH).any():
        active = (length < LENGTH).nonzero()[:, 0]
        n, here = length[active], prefix[active]
        count = torch.randint(1, K + 1, (len(active),), generator=stream)  # some rounds draft less
        drafts, draft_laws, target_laws = [], [], [rows_of(target, n, here)]
        for k in range(K):
            law = rows_of(drawn, n + k, here)
            uniform = torch.rand(len(active), generator=stream, dtype=torch.float64)
            drafts.append(law.argmax(-1) if scored is None else draw_at(law, uniform))
            draft_laws.append(law if scored is None else rows_of(scored, n + k, here))
            here = here * V + drafts[-1]
            target_laws.append(rows_of(target, n + k + 1, here))
        draft_BK = torch.stack(drafts, 1)
        probs = None if scored is None else torch.stack(draft_laws, 1)
        accepted, following = rule_fn(draft_BK, count, torch.stack(target_laws, 1), probs, generators)
        for place in range(K + 1):
            token = torch.where(place < accepted, draft_BK[:, min(place, K - 1)], following)
            mine = active[place <= accepted]
            tokens[mine, length[mine]] = token[place <= accepted]
            prefix[mine] = prefix[mine] * V + token[place <= accepted]
            length[mine] += 1
    triples = (tokens[:, :LENGTH] * torch.tensor([V ** (LENGTH - 1 - i) for i in range(LENGTH)])).sum(1)
    return triples.bincount(minlength=V**LENGTH).double()


@pytest.mark.parametrize("greedy_draft", [True, False], ids=["greedy_draft", "probabilistic"])
@pytest.mark.parametrize("name", FILTERS)
def test_simulated_joint_law_is_the_targets(name, greedy_draft):
    sampling = FILTERS[name]
    target, draft = laws(TARGET, sampling), laws(DRAFT, sampling)
    counts = simulate(verify_sampled, target, draft, None if greedy_draft else draft)
    assert chi_square_p(counts, plain_joint(target)) > 1e-3


def unclipped_residual(draft_BK, count_B, target_probs_BQV, draft_probs_BKV, generators):
    uniform = generators.uniform(torch.full_like(count_B, K + 1))
    gathered = [p.gather(-1, draft_BK[..., None])[..., 0] for p in (target_probs_BQV[:, :K], draft_probs_BKV)]
    accepted = leading_accepts(uniform[:, :K] < accept_probability(*gathered), count_B)
    rows = torch.arange(len(count_B))
    law = target_probs_BQV[rows, accepted]
    bad = (law - draft_probs_BKV[rows, accepted.clamp(max=K - 1)]).abs()
    return accepted, draw_at(torch.where((accepted < count_B)[:, None], bad, law), uniform[:, K])


def bonus_from_the_row_before(draft_BK, count_B, target_probs_BQV, draft_probs_BKV, generators):
    wrong = target_probs_BQV.clone()
    rows = torch.arange(len(count_B))
    wrong[rows, count_B] = target_probs_BQV[rows, count_B - 1]
    return verify_sampled(draft_BK, count_B, wrong, draft_probs_BKV, generators)


def shared_random_numbers(draft_BK, count_B, target_probs_BQV, draft_probs_BKV, generators):
    """The residual drawn with the number that refused the draft."""
    uniform = generators.uniform(torch.full_like(count_B, K + 1))
    rows = torch.arange(len(count_B))
    gathered = [p.gather(-1, draft_BK[..., None])[..., 0] for p in (target_probs_BQV[:, :K], draft_probs_BKV)]
    accepted = leading_accepts(uniform[:, :K] < accept_probability(*gathered), count_B)
    law = target_probs_BQV[rows, accepted].clone()
    refused = accepted < count_B
    law[refused] = residual_law(law[refused], draft_probs_BKV[rows, accepted.clamp(max=K - 1)][refused])
    return accepted, draw_at(law, uniform[rows, accepted])


def test_simulation_detects_each_fault():
    plain, cut = FILTERS["none"], FILTERS["top_k"]
    target, draft = laws(TARGET, plain), laws(DRAFT, plain)
    joint = plain_joint(target)
    for faulty in (unclipped_residual, bonus_from_the_row_before, shared_random_numbers):
        assert chi_square_p(simulate(faulty, target, draft, draft), joint) < 1e-9, faulty.__name__

    greedy = [one_hot(law) for law in draft]
    assert chi_square_p(simulate(verify_sampled, target, greedy, draft), joint) < 1e-9  # soft scores, greedy drafts

    target, drawn = laws(TARGET, cut), laws(DRAFT, cut)
    before_top_k = simulate(verify_sampled, target, drawn, draft)
    assert chi_square_p(before_top_k, plain_joint(target)) < 1e-9


# ------------------------------------------------------------------------------------- the real decoder, a real target

WORDS, PROMPT = 12, [3, 1, 4, 3, 1]


@pytest.fixture(scope="module")
def tiny_target(tmp_path_factory):
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=WORDS,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=64,
        bos_token_id=None,
        eos_token_id=None,
        initializer_range=0.4,  # laws that are far from uniform and depend on the prefix
    )
    path = tmp_path_factory.mktemp("target")
    LlamaForCausalLM(config).save_pretrained(path)
    return TargetModel.load(str(path))


class TableDraft(Proposer):
    """Drafts from a fixed law of its own that looks at the last token only: near the target's, never equal to it."""

    def __init__(self, target):
        contexts = torch.tensor([[*PROMPT, token] for token in range(WORDS)])
        with torch.no_grad():
            logits = target.model(contexts).logits[:, -1]
        self.logits = logits + torch.randn(WORDS, WORDS, generator=torch.Generator().manual_seed(5))

    def begin(self, prompts, max_length):
        return {"last": torch.tensor([prompt[-1] for prompt in prompts])}

    def commit(self, state, committed):
        state["last"] = committed.token_BS.gather(1, committed.count_B[:, None] - 1)[:, 0]

    def propose(self, state, num_draft_tokens, choose):
        token, tokens, laws = state["last"], [], []
        for _ in range(num_draft_tokens):
            token, law = choose(self.logits[token])
            tokens.append(token)
            laws.append(law)
        count = torch.full((len(token),), num_draft_tokens)
        return Proposal(torch.stack(tokens, 1), count, None if laws[0] is None else torch.stack(laws, 1))

    def select(self, state, rows):
        return {"last": state["last"][rows]}


def reduced_head(target):
    """An EAGLE-3 head that can propose 8 of the 12 tokens only; its law over the others is 0."""
    options = Eagle3Options(type="eagle3", aux_layer_ids=[0, 1, 2], ttt_steps=2, step_decay=1.0)
    return Eagle3.from_recipe(options, target, torch.tensor([0, 1, 3, 4, 6, 7, 9, 11]), seed=0)


def model_joint(target, sampling):
    """Exact law of the three tokens after PROMPT, from full passes of the Transformers model."""
    joint = torch.ones(1, dtype=torch.float64)
    for n in range(LENGTH):
        prefixes = [[*PROMPT, *tail] for tail in itertools.product(range(WORDS), repeat=n)]
        with torch.no_grad():
            logits = target.model(torch.tensor(prefixes)).logits[:, -1]
        joint = (joint[:, None] * target_probs(logits, sampling).double()).flatten()
    return joint


def count_triples(trace):
    numbers = [(a * WORDS + b) * WORDS + c for a, b, c, *_ in (request.output_ids for request in trace.requests)]
    return torch.tensor(numbers).bincount(minlength=WORDS**LENGTH).double()


def decode(target, proposer, sampling, num_requests):
    return speculative_decode(
        target,
        proposer,
        [PROMPT] * num_requests,
        num_draft_tokens=K,
        sampling=sampling,
        max_new_tokens=LENGTH + 1,
        batch_size=4000,
    )


@pytest.mark.parametrize(
    ("kind", "sampling", "num_requests"),
    [
        ("table", Sampling(temperature=1.0, seed=1), 20_000),
        ("table", Sampling(0.8, top_k=8, top_p=0.95, draft_sample_method="probabilistic", seed=3), 20_000),
        ("ngram", Sampling(temperature=0.9, top_k=5, seed=4), 8_000),  # short drafts and none at all
        ("eagle3", Sampling(temperature=1.0, seed=9), 12_000),
        ("eagle3", Sampling(0.9, top_k=10, draft_sample_method="probabilistic", seed=10), 12_000),
    ],
    ids=["greedy_draft", "probabilistic", "ngram", "eagle3_greedy_draft", "eagle3_probabilistic"],
)
def test_decoder_keeps_the_models_joint_law(tiny_target, kind, sampling, num_requests):
    proposers = {
        "ngram": lambda: NgramProposer(1, 2),
        "table": lambda: TableDraft(tiny_target),
        "eagle3": lambda: reduced_head(tiny_target),
    }
    proposer = proposers[kind]()
    trace = decode(tiny_target, proposer, sampling, num_requests)
    joint = model_joint(tiny_target, sampling)
    assert chi_square_p(count_triples(trace), joint) > 1e-3
    accepted = [cycle.accepted for request in trace.requests for cycle in request.cycles]
    assert {0, 1, 2} == set(accepted)
    assert 0.05 < sum(accepted) / len(accepted) < 1.9  # drafts were accepted and refused


def test_plain_decoding_has_the_same_law_and_another_temperature_has_not(tiny_target):
    sampling = Sampling(temperature=1.0, seed=6)
    trace = plain_decode(tiny_target, [PROMPT] * 8_000, sampling=sampling, max_new_tokens=LENGTH, batch_size=4000)
    assert chi_square_p(count_triples(trace), model_joint(tiny_target, sampling)) > 1e-3
    assert chi_square_p(count_triples(trace), model_joint(tiny_target, Sampling(temperature=1.1))) < 1e-9


def test_a_proposer_that_misstates_its_law_is_detected_in_the_decoder(tiny_target):
    class Misstated(TableDraft):
        def propose(self, state, num_draft_tokens, choose):
            proposal = super().propose(state, num_draft_tokens, choose)
            return Proposal(proposal.token_BK, proposal.count_B, proposal.probs_BKV.roll(1, dims=-1).add(0.01))

    sampling = Sampling(temperature=1.0, draft_sample_method="probabilistic", seed=7)
    assert (
        chi_square_p(
            count_triples(decode(tiny_target, Misstated(tiny_target), sampling, 8_000)),
            model_joint(tiny_target, sampling),
        )
        < 1e-9
    )


def test_a_requests_tokens_do_not_depend_on_its_batch(tiny_target):
    sampling = Sampling(temperature=1.0, draft_sample_method="probabilistic", seed=8)
    outputs = []
    for batch_size in (1, 7, 40):
        trace = speculative_decode(
            tiny_target,
            TableDraft(tiny_target),
            [PROMPT[: 1 + i % 5] for i in range(40)],
            num_draft_tokens=3,
            sampling=sampling,
            max_new_tokens=9,
            batch_size=batch_size,
        )
        outputs.append([request.output_ids for request in trace.requests])
    assert outputs[0] == outputs[1] == outputs[2]
    assert len({tuple(output) for output in outputs[0]}) > 20
