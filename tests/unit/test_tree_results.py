"""Trees in results, recipes and on the command line; top-k recall against a plain search."""

import json

import pytest
import torch
from pydantic import ValidationError

from spec_train.decoding.engine import plain_decode
from spec_train.decoding.sampling import Sampling
from spec_train.decoding.tree_draft import dynamic_tree, parse_tree, static_tree
from spec_train.errors import UserError
from spec_train.evaluation.evaluate import EvalSettings, Suite, evaluate_suite, speculator_contender, tree_contenders
from spec_train.evaluation.recall import top_k_recall
from spec_train.evaluation.report import result_markdown
from spec_train.recipe import EvalSection
from spec_train.speculators.draft_lm import DraftLM
from spec_train.speculators.draft_start import DraftLMOptions
from spec_train.speculators.medusa import Medusa, MedusaOptions
from spec_train.stages.evaluate import write_chain_costs
from spec_train.target import TargetModel
from tests.tiny import tiny_model

PROMPTS = [[5, 6, 7, 8, 9], [20, 21, 22]]


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    return TargetModel.load(str(tiny_model("llama", tmp_path_factory.mktemp("llama"))))


@pytest.fixture(scope="module")
def draft(target):
    options = DraftLMOptions(type="draft_lm", start_layers=3)
    return DraftLM.from_recipe(options, target, torch.arange(target.vocab_size), seed=0).eval().requires_grad_(False)


def test_recall_is_that_of_a_plain_search(target, draft):
    answers = plain_decode(target, PROMPTS, sampling=Sampling(), max_new_tokens=10).requests
    recall = top_k_recall(target, draft, answers, 2)
    hits, count = {k: [0, 0] for k in (1, 2, 4, 8)}, [0, 0]
    for answer in answers:
        text = answer.prompt_ids + answer.output_ids
        ids = torch.tensor([text])
        with torch.no_grad():
            logits = draft.draft_logits(draft.body.forward(ids, torch.arange(len(text))[None])[0])[0]
        for known in range(len(answer.prompt_ids) + 1, len(text)):
            for d in range(min(2, len(text) - known)):
                best = logits[known + d - 1].topk(8).indices.tolist()  # teacher-forced: the text itself is the prefix
                count[d] += 1
                for k in hits:
                    hits[k][d] += text[known + d] in best[:k]
    assert recall == {
        str(k): pytest.approx([h / c for h, c in zip(row, count, strict=True)]) for k, row in hits.items()
    }
    assert 0 < sum(recall["1"]) < sum(recall["8"])


def test_trees_are_reported_beside_the_chain(target, draft, tmp_path):
    suite = Suite("two", ["a", "b"], ["x", "x"], PROMPTS)
    settings = EvalSettings(Sampling(), 12, 2, speed_prompts=1, speed_new_tokens=4)
    trees = [dynamic_tree(3, 3, 9), static_tree([2, 2, 1])]
    contenders = [speculator_contender(draft, "draft", [3]), *tree_contenders(target, draft, "draft", trees)]
    results = evaluate_suite(target, contenders, suite, settings, target_name="tiny", directory=tmp_path)
    chain, dynamic, static = results
    assert chain.get("tree") is None and chain["estimate"]
    assert dynamic["tree"] == {"name": "tree-d3-k3-n9", "depth": 3, "num_tokens": 9, "mean_nodes": 9.0, "top_k": 3}
    assert static["tree"]["paths"] == [[0], [1], [0, 0], [0, 1], [1, 0], [1, 1], *([*p, 0] for p in static_pairs())]
    for result in (dynamic, static):
        assert result["type"] == "draft_lm" and result["num_draft_tokens"] == 3 and result["estimate"] is None
        assert result["lossless"]["identical"] == 2
        assert set(result["recall_top_k"]) == {"1", "2", "4", "8"} and len(result["recall_top_k"]["1"]) == 3
    assert static["mean_acceptance_length"] >= chain["mean_acceptance_length"]
    assert len(list(tmp_path.glob("*.json"))) == 3
    table = result_markdown(results)
    assert "| 3 tree-d3-k3-n9 |" in table and "| 3 tree-s2-4-4 |" in table
    again = evaluate_suite(target, contenders, suite, settings, target_name="tiny", directory=tmp_path)
    assert json.dumps(again) == json.dumps(results)


def test_costs_are_the_chain_s_whatever_trees_stand_beside_it(target, draft, tmp_path):
    contenders = [
        speculator_contender(draft, "draft", [4]),
        *tree_contenders(target, draft, "d", [static_tree([2, 1])]),
    ]
    write_chain_costs(target, contenders, tmp_path)
    (file,) = tmp_path.glob("costs-*.json")
    costs = json.loads(file.read_text())
    assert (costs["type"], max(point["num_draft_tokens"] for point in costs["draft"])) == ("draft_lm", 4)


def static_pairs():
    return [(0, 0), (0, 1), (1, 0), (1, 1)]


def test_trees_on_the_command_line():
    assert parse_tree("4,3,12") == dynamic_tree(4, 3, 12)
    assert parse_tree("4x2x1") == static_tree([4, 2, 1])
    for text in ("4,3", "a,b,c", "4x", ""):
        with pytest.raises(UserError, match="give depth,top_k,num_tokens"):
            parse_tree(text)


def test_trees_in_a_recipe():
    section = EvalSection(trees=[{"depth": 4, "top_k": 4, "num_tokens": 16}, {"widths": [2, 1]}, {"paths": [[0]]}])
    assert [tree.depth for tree in section.trees] == [4, None, None]
    for tree in ({"depth": 4}, {}, {"widths": [2], "paths": [[0]]}):
        with pytest.raises(ValidationError, match="depth, top_k and num_tokens together"):
            EvalSection(trees=[tree])
    for num_tokens in (3, 53):
        with pytest.raises(ValidationError, match="num_tokens must be from depth, 4, to 52"):
            EvalSection(trees=[{"depth": 4, "top_k": 4, "num_tokens": num_tokens}])
    dynamic = [{"depth": 2, "top_k": 2, "num_tokens": 4}]
    with pytest.raises(ValidationError, match="draft_sample_method=greedy"):
        EvalSection(trees=dynamic, draft_sample_method="probabilistic")
    with pytest.raises(ValidationError, match="token by token"):
        EvalSection(trees=dynamic, rejection_sample_method="block")


def test_a_tree_deeper_than_the_heads(target):
    head = Medusa.from_recipe(MedusaOptions(type="medusa", num_heads=2), target, torch.arange(320), seed=0)
    with pytest.raises(UserError, match="at most 2"):
        tree_contenders(target, head, "heads", [dynamic_tree(3, 2, 4)])
