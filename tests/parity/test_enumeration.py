"""The joint law of the first three tokens under speculative decoding equals plain sampling from the target.

A target and a draft over five tokens are given as explicit tables, one row of logits per prefix. For each rule (token
by token, block verification; greedy, probabilistic drafts), each filter and one to three drafts a round:

- exactly: walk every draft, every outcome of the tests and every added token with the probabilities that the decoder's
  own functions give;
- by simulation: run the batched rule on 40,000 rows and test the observed triples with a chi-square.

Both checks are then turned on variants with a deliberate fault; a check that lets one pass is no check. Last, the real
decoder with a real (tiny) target is held against exact enumeration with the model itself.
"""

import itertools

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from spec_train.decoding import verify
from spec_train.decoding.engine import plain_decode, speculative_decode
from spec_train.decoding.sampling import RequestGenerators, Sampling, draw_at, target_probs
from spec_train.decoding.verify import accept_probability, leading_accepts, residual_law, verify_block, verify_sampled
from spec_train.speculators.base import Proposal, Proposer
from spec_train.speculators.eagle3 import Eagle3, Eagle3Options
from spec_train.speculators.ngram import NgramProposer
from spec_train.target import TargetModel

V, K, DEEPEST, LENGTH, RUNS = 5, 2, 3, 3, 40_000
FILTERS = {
    "none": Sampling(temperature=1.0),
    "temperature": Sampling(temperature=0.7),
    "top_k": Sampling(temperature=1.0, top_k=3),
    "top_p": Sampling(temperature=0.9, top_p=0.8),
    "min_p": Sampling(temperature=1.0, min_p=0.2),
    "all": Sampling(temperature=1.2, top_k=4, top_p=0.9, min_p=0.1),
}


def tables(seed, scale):
    """Logits [V**n, V] for every prefix length n that decoding can reach; row = the prefix read in base V."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(V**n, V, generator=generator) * scale for n in range(LENGTH + DEEPEST)]


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


def judge_standard(drafts, count, target, scored):
    """(probability of each test, accepted drafts by the tests passed, law of the added token): the decoder's parts."""
    tests = verify.token_tests(drafts, target, scored)
    return tests, verify.leading_accepts, lambda accepted: verify.added_law(drafts, count, accepted, target, scored)


def judge_block(drafts, count, target, scored):
    tests, weight = verify.block_tests(drafts, count, target, scored)
    return (
        tests,
        verify.last_accept,
        lambda accepted: verify.added_law(drafts, count, accepted, target, scored, weight),
    )


JUDGES = {"standard": judge_standard, "block": judge_block}


def count_of(n, prefix_B, k, ragged):
    """How many drafts a round offers: all, or a number that only the prefix decides (0 included)."""
    return (prefix_B * 3 + n + 1) % (k + 1) if ragged else torch.full_like(prefix_B, k)


def one_round(judge, n, mass, target, drawn, scored, k, ragged=False):
    """Every way in which a round may go on from the prefixes of length n, which have probabilities `mass` [V**n].

    Yields (tokens emitted, index of the longer prefix, its probability). Drafts, the outcomes of all tests and the
    added token are enumerated; nothing is drawn. `scored` None: greedy drafts, judged as such.
    """
    digits = torch.tensor(list(itertools.product(range(V), repeat=k))).repeat(V**n, 1)
    prefix = torch.arange(V**n).repeat_interleave(V**k)
    here = [prefix]
    for place in range(k):
        here.append(here[-1] * V + digits[:, place])
    count = count_of(n, prefix, k, ragged)
    weight = mass[prefix].clone()
    for place in range(k):
        chosen = drawn[n + place][here[place], digits[:, place]].double()
        weight *= torch.where(
            place < count, chosen, (digits[:, place] == 0).double()
        )  # token 0 where nothing is drafted
    real = weight > 0
    digits, count, weight, here = digits[real], count[real], weight[real], torch.stack(here, 1)[real]
    target_BQV = torch.stack([target[n + place][here[:, place]] for place in range(k + 1)], 1)
    scored_BKV = None if scored is None else torch.stack([scored[n + p][here[:, p]] for p in range(k)], 1)
    tests, combine, added = judge(digits, count, target_BQV, scored_BKV)
    for pattern in itertools.product((False, True), repeat=k):
        passed = torch.tensor(pattern).expand(len(digits), k)
        outcome = torch.where(passed, tests.double(), 1 - tests.double())
        outcome = torch.where(torch.arange(k) < count[:, None], outcome, (~passed).double())  # no test, one outcome
        branch = weight * outcome.prod(1)
        accepted = combine(passed, count)
        law = added(accepted).double()
        law = law / law.sum(-1, keepdim=True)
        longer = here.gather(1, accepted[:, None]) * V + torch.arange(V)
        for length in accepted.unique().tolist():
            mine = (accepted == length) & (branch > 0)
            yield length + 1, longer[mine], branch[mine, None] * law[mine]


def speculative_joint(judge, target, drawn, scored, k, ragged=False):
    """Exact law of the first LENGTH tokens when rounds follow each other, float64 [V**LENGTH]."""
    mass = [torch.zeros(V**n, dtype=torch.float64) for n in range(LENGTH + 1)]
    mass[0] += 1
    for n in range(LENGTH):
        for emitted, longer, probability in one_round(judge, n, mass[n], target, drawn, scored, k, ragged):
            reached = min(n + emitted, LENGTH)
            mass[reached].index_add_(0, longer.flatten() // V ** (n + emitted - reached), probability.flatten())
    return mass[LENGTH]


def exact_error(judge, target, drawn, scored, k=K, ragged=False):
    """Largest deviation of any triple's probability from plain sampling."""
    return float((speculative_joint(judge, target, drawn, scored, k, ragged) - plain_joint(target)).abs().max())


@pytest.mark.parametrize("drafts", ["greedy", "probabilistic", "probabilistic and filtered"])
@pytest.mark.parametrize("rule", JUDGES)
@pytest.mark.parametrize("name", FILTERS)
def test_enumerated_joint_law_is_the_targets(name, rule, drafts):
    sampling = FILTERS[name]
    target = laws(TARGET, sampling)
    draft = laws(DRAFT, sampling if drafts == "probabilistic and filtered" else sampling.drafts)
    drawn, scored = ([one_hot(law) for law in draft], None) if drafts == "greedy" else (draft, draft)
    for k in (1, 2, 3):
        for ragged in (False, True):
            assert exact_error(JUDGES[rule], target, drawn, scored, k, ragged) < 1e-6
    assert float(speculative_joint(JUDGES[rule], target, drawn, scored, K).sum()) == pytest.approx(1.0, abs=1e-6)


def unclipped(target_law, draft_law):
    difference = (target_law - draft_law).abs()
    return difference / difference.sum(-1, keepdim=True)


@pytest.mark.parametrize("rule", JUDGES)
def test_enumeration_detects_an_unclipped_residual(rule, monkeypatch):
    target, draft = laws(TARGET, FILTERS["none"]), laws(DRAFT, FILTERS["none"])
    assert exact_error(JUDGES[rule], target, draft, draft) < 1e-6
    monkeypatch.setattr(verify, "residual_law", unclipped)
    assert exact_error(JUDGES[rule], target, draft, draft) > 0.01


@pytest.mark.parametrize("rule", JUDGES)
def test_enumeration_detects_the_draft_law_before_top_k(rule):
    target, drawn = laws(TARGET, FILTERS["top_k"]), laws(DRAFT, FILTERS["top_k"])
    before = laws(DRAFT, FILTERS["none"])
    assert exact_error(JUDGES[rule], target, drawn, before) > 0.01
    assert exact_error(JUDGES[rule], target, before, drawn) > 0.005  # the other way round


@pytest.mark.parametrize("rule", JUDGES)
def test_enumeration_detects_soft_scores_on_greedy_drafts(rule):
    target, draft = laws(TARGET, FILTERS["none"]), laws(DRAFT, FILTERS["none"])
    assert exact_error(JUDGES[rule], target, [one_hot(law) for law in draft], draft) > 0.01


@pytest.mark.parametrize("greedy_draft", [True, False], ids=["greedy_draft", "probabilistic"])
@pytest.mark.parametrize("rule", JUDGES)
def test_enumeration_detects_a_bonus_from_the_wrong_row(rule, greedy_draft):
    def judge(drafts, count, target, scored):
        tests, combine, _ = JUDGES[rule](drafts, count, target, scored)
        wrong, rows = target.clone(), torch.arange(len(count))
        wrong[rows, count] = target[rows, (count - 1).clamp(min=0)]
        return tests, combine, JUDGES[rule](drafts, count, wrong, scored)[2]

    target, draft = laws(TARGET, FILTERS["none"]), laws(DRAFT, FILTERS["none"])
    drawn, scored = ([one_hot(law) for law in draft], None) if greedy_draft else (draft, draft)
    assert exact_error(judge, target, drawn, scored) > 0.01


def weights_as_tests(drafts, count, target, scored):
    """h_i without the look ahead at what is left."""
    _, combine, added = judge_block(drafts, count, target, scored)
    return verify.block_tests(drafts, count, target, scored)[1][:, 1:], combine, added


def look_ahead_without_weight(drafts, count, target, scored):
    """S_i from target_i - draft_i instead of weight_i * target_i - draft_i."""
    _, combine, added = judge_block(drafts, count, target, scored)
    weight = verify.block_tests(drafts, count, target, scored)[1]
    tests = weight[:, 1:].clone()
    for i in range(1, drafts.shape[1]):
        left = (target[:, i] - scored[:, i]).clamp(min=0).sum(-1).double()
        tests[:, i - 1] = torch.where(count == i, weight[:, i], left / (left + 1 - weight[:, i]))
    return tests, combine, added


def residual_without_weight(drafts, count, target, scored):
    tests, combine, _ = judge_block(drafts, count, target, scored)
    return tests, combine, judge_standard(drafts, count, target, scored)[2]


def stop_at_the_first_failed_test(drafts, count, target, scored):
    tests, _, added = judge_block(drafts, count, target, scored)
    return tests, verify.leading_accepts, added


@pytest.mark.parametrize(
    "faulty",
    [weights_as_tests, look_ahead_without_weight, residual_without_weight, stop_at_the_first_failed_test],
)
def test_enumeration_detects_each_fault_of_block_verification(faulty):
    target, draft = laws(TARGET, FILTERS["none"]), laws(DRAFT, FILTERS["none"])
    assert exact_error(faulty, target, draft, draft) > 1e-4  # a hundred times what the rule is allowed


def expected_length(judge, target, drawn, scored, k):
    """Expected accepted drafts of the first round."""
    start = torch.ones(1, dtype=torch.float64)
    branches = one_round(judge, 0, start, target, drawn, scored, k)
    return sum((emitted - 1) * float(probability.sum()) for emitted, _, probability in branches)


@pytest.mark.parametrize("greedy_draft", [True, False], ids=["greedy_draft", "probabilistic"])
def test_block_verification_accepts_at_least_as_many(greedy_draft):
    gains = []
    for seed in range(12):
        target = laws(tables(100 + seed, 1.5), FILTERS["none"])
        draft = laws([rows * 0.7 for rows in tables(200 + seed, 1.0)], FILTERS["none"])
        drawn, scored = ([one_hot(law) for law in draft], None) if greedy_draft else (draft, draft)
        for k in (1, 2, 3):
            token_wise = expected_length(judge_standard, target, drawn, scored, k)
            gains.append(expected_length(judge_block, target, drawn, scored, k) - token_wise)
            assert gains[-1] > -1e-6
            if k == 1 or greedy_draft:  # with one draft the rules are the same; so they are on one-hot drafts
                assert gains[-1] == pytest.approx(0, abs=1e-6)
    assert greedy_draft or max(gains) > 0.03


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
@pytest.mark.parametrize("rule", [verify_sampled, verify_block])
@pytest.mark.parametrize("name", ["none", "top_p", "all"])
def test_simulated_joint_law_is_the_targets(name, rule, greedy_draft):
    sampling = FILTERS[name]
    target, draft = laws(TARGET, sampling), laws(DRAFT, sampling)
    counts = simulate(rule, target, draft, None if greedy_draft else draft)
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
        ("table", Sampling(1.0, draft_sample_method="probabilistic", seed=11, rejection_sample_method="block"), 20_000),
        ("ngram", Sampling(0.9, min_p=0.05, seed=12, rejection_sample_method="block"), 8_000),
        ("eagle3", Sampling(0.9, 10, 0.95, "probabilistic", 13, 0.02, rejection_sample_method="block"), 12_000),
    ],
    ids=[
        "greedy_draft",
        "probabilistic",
        "ngram",
        "eagle3_greedy_draft",
        "eagle3_probabilistic",
        "block",
        "block_ngram_min_p",
        "block_eagle3_all_filters",
    ],
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


def test_block_verification_accepts_more_in_the_decoder(tiny_target):
    accepted = {}
    for rule in ("standard", "block"):
        sampling = Sampling(1.0, draft_sample_method="probabilistic", seed=14, rejection_sample_method=rule)
        trace = speculative_decode(
            tiny_target,
            TableDraft(tiny_target),
            [PROMPT] * 1500,
            num_draft_tokens=4,
            sampling=sampling,
            max_new_tokens=16,
            batch_size=1500,
        )
        cycles = [cycle.accepted for request in trace.requests for cycle in request.cycles]
        accepted[rule] = sum(cycles) / len(cycles)
    assert accepted["block"] > 1.02 * accepted["standard"]


def test_plain_decoding_has_the_same_law_and_another_temperature_has_not(tiny_target):
    sampling = Sampling(temperature=1.0, seed=6)
    trace = plain_decode(tiny_target, [PROMPT] * 8_000, sampling=sampling, max_new_tokens=LENGTH, batch_size=4000)
    assert chi_square_p(count_triples(trace), model_joint(tiny_target, sampling)) > 1e-3
    assert chi_square_p(count_triples(trace), model_joint(tiny_target, Sampling(temperature=1.1))) < 1e-9


def test_the_decoder_filters_the_target_and_not_the_drafts(tiny_target):
    laws_seen = []

    class Watched(TableDraft):
        def propose(self, state, num_draft_tokens, choose):
            proposal = super().propose(state, num_draft_tokens, choose)
            laws_seen.append((state["last"], proposal.probs_BKV[:, 0]))
            return proposal

    proposer = Watched(tiny_target)
    decode(tiny_target, proposer, Sampling(0.8, 3, 0.7, "probabilistic", min_p=0.1), 5)
    assert laws_seen
    for last, law in laws_seen:
        assert torch.equal(law, (proposer.logits[last] / 0.8).softmax(-1))


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


@pytest.mark.parametrize("drafts", ["greedy", "probabilistic"])
@pytest.mark.parametrize("rule", ["standard", "block"])
def test_a_requests_tokens_do_not_depend_on_its_batch(tiny_target, rule, drafts):
    sampling = Sampling(1.0, 10, 0.97, drafts, seed=8, min_p=0.01, rejection_sample_method=rule)
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
