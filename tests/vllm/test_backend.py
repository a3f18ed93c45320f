"""`--backend vllm`: the figures of vLLM's offline engine are those of our own decoder, and sampling follows the law."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from spec_train.batch import FeatureSpec
from spec_train.data.chat import load_tokenizer
from spec_train.decoding.acceptance import vllm_counters
from spec_train.decoding.engine import speculative_decode
from spec_train.decoding.sampling import Sampling, target_probs
from spec_train.errors import UserError
from spec_train.evaluation.agreement import Journal, Plan, compare_sides, measure_here, measure_in_vllm
from spec_train.evaluation.evaluate import EvalSettings, Suite, decode_reference, render_suite
from spec_train.evaluation.load_report import load_table
from spec_train.evaluation.vllm_backend import check_sampling, check_subject, evaluate_prompts, run_engines
from spec_train.serving.contract import is_cpu_build
from spec_train.serving.export import export
from spec_train.speculators import load_speculator
from spec_train.target import TargetModel
from tests.parity.test_draft_lm import draft_for
from tests.tiny import tiny_model
from tests.vllm.test_eagle3 import NEW_TOKENS, PROMPTS, trained_head

pytestmark = pytest.mark.vllm
K = 3


class Case:
    """A tiny target, the export of a head trained on its answers, and what vLLM did with it at two loads."""

    def __init__(self, folder: Path) -> None:
        self.path = tiny_model("llama", folder)
        self.target = TargetModel.load(str(self.path))
        head = trained_head(self.target, torch.arange(320), steps=60).serving()
        settings: dict[str, Any] = {"target_id": str(self.path), "num_draft_tokens": K, "golden": None}
        self.export_dir = export(head, folder / "head", format="plain", provenance={}, **settings)
        self.suite = Suite("tiny", [f"p{i}" for i in range(4)], ["a", "a", "b", "b"], PROMPTS)

    def noisy_target(self) -> Path:
        """The export of a draft model that is the target with noise on its weights: alike, but not too much."""
        draft, noise = draft_for(self.target, start_layers=4), torch.Generator().manual_seed(0)
        with torch.no_grad():
            for parameter in draft.parameters():
                parameter.add_(0.02 * torch.randn(parameter.shape, generator=noise))
        settings: dict[str, Any] = {"target_id": str(self.path), "num_draft_tokens": K, "golden": None}
        return export(draft.serving(), self.path.parent / "draft", format="plain", provenance={}, **settings)

    def evaluate(self, sampling: Sampling, **settings: Any) -> list[dict[str, Any]]:
        common: dict[str, Any] = {"num_draft_tokens": [K], "max_new_tokens": NEW_TOKENS, "concurrency": [1, 4]}
        return evaluate_prompts(str(self.export_dir), self.path, self.suite, sampling, **{**common, **settings})


@pytest.fixture(scope="module")
def case(tmp_path_factory: pytest.TempPathFactory) -> Case:
    return Case(tmp_path_factory.mktemp("backend"))


def test_counters_are_ours(case: Case) -> None:
    results = case.evaluate(Sampling())
    speculator = load_speculator(case.export_dir, case.target)
    trace = speculative_decode(
        case.target, speculator, PROMPTS, num_draft_tokens=K, sampling=Sampling(), max_new_tokens=NEW_TOKENS
    )
    assert [result["speed"]["concurrency"] for result in results] == [1, 4]
    for result in results:
        assert result["backend"] == "vllm"
        assert result["vllm_counters"] == vllm_counters(trace)
        assert 0 < result["vllm_counters"]["num_accepted_tokens"] < result["vllm_counters"]["num_draft_tokens"]
        assert result["num_output_tokens"] == sum(len(request.output_ids) for request in trace.requests)
        kept = sum(cycle.kept for request in trace.requests for cycle in request.cycles)
        assert result["num_accepted_draft_tokens"] == kept
        assert result["lossless"] == {"checked": 4, "identical": 4, "first_divergence": None}
        assert list(result["by_category"]) == ["a", "b"]
        own = result["per_request"]
        assert sum(entry["num_spec_steps"] for entry in own) == result["vllm_counters"]["num_drafts"]
        assert (
            sum(entry["num_accepted_draft_tokens"] for entry in own) == result["vllm_counters"]["num_accepted_tokens"]
        )
        assert 0 < result["speed"]["tpot_ms"] <= result["speed"]["tpot_ms_p95"]
        assert 0 < result["speed"]["ttft_ms"] <= result["speed"]["ttft_ms_p95"]
        assert result["speed"]["draft_ms"] is None
    assert load_table(results, "tiny").row_count == 2


def test_later_turns_and_several_depths_of_prompt_lookup(case: Case, tmp_path: Path) -> None:
    """Second turns hold vLLM's own answers, one too long for the context is left out, and a second n-gram engine
    starts (numba keeps two of them from sharing a process)."""
    turns = [["one two three", "say that again"], ["two plus two?"], ["hello", "x" * 500]]
    file = tmp_path / "turns.jsonl"
    file.write_text("".join(json.dumps({"id": f"q{i}", "turns": texts}) + "\n" for i, texts in enumerate(turns)))
    tokenizer = load_tokenizer(str(case.path))
    suite = render_suite(str(file), tokenizer, {})
    common: dict[str, Any] = {"max_new_tokens": 8, "concurrency": [4]}
    results = evaluate_prompts("ngram", case.path, suite, Sampling(), num_draft_tokens=[2, 4], **common)
    ours = decode_reference(case.target, suite, EvalSettings(Sampling(), 8, 4))
    assert ours.suite.ids == ["q0/1", "q1", "q2/1", "q0/2"]
    assert [result["num_draft_tokens"] for result in results] == [2, 4]
    for result in results:
        assert result["num_prompts"] == 4
        assert result["outputs"] == [request.output_ids for request in ours.trace.requests]
        assert result["lossless"]["identical"] == 4


def test_sampling_that_vllm_refuses_or_ignores_is_refused_first() -> None:
    drawn = Sampling(1.0, top_k=5, top_p=0.9, draft_sample_method="probabilistic")
    for kind in ("eagle3", "draft_lm", "ngram"):
        check_sampling(drawn, kind)
    for kind in ("mlp", "medusa"):
        with pytest.raises(UserError, match=f"{kind} drafts greedily in our vLLM plugin"):
            check_sampling(drawn, kind)
    with pytest.raises(UserError, match="min_p"):
        check_sampling(Sampling(1.0, min_p=0.1), "eagle3")
    for kind in ("eagle3", "pard") if is_cpu_build() else ("pard", "peagle"):
        with pytest.raises(UserError, match="model runner V1"):
            check_sampling(Sampling(1.0, rejection_sample_method="block"), kind)


def test_what_cannot_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="is not an export"):
        check_subject(str(tmp_path))


def test_sampled_agreement(case: Case, tmp_path: Path) -> None:
    """Estimate, decode and vLLM, each on continuations of its own, give the same acceptance length; a journal that
    lacks some of vLLM's prompts starts an engine for those alone and comes to the same counts."""
    plan = Plan(samples=80, num_draft_tokens=K, temperature=0.2, max_new_tokens=NEW_TOKENS, batch_size=80)
    speculator = load_speculator(case.export_dir, case.target)
    journal = Journal(tmp_path / "counts.jsonl", {})
    for side in ("estimate", "decode"):
        measure_here(side, case.target, speculator, case.suite, plan, journal)
    measure_in_vllm(case.export_dir, case.path, case.suite, plan, journal, 3, "float32")
    result = compare_sides(journal, 4)
    assert len(result["pairs"]) == 3
    for pair in result["pairs"]:  # of three 95% intervals one may well be missed on another machine's arithmetic
        assert abs(pair["difference"]) < 0.75 * (pair["ci95"][1] - pair["ci95"][0]) < 0.04
    for side in result["sides"].values():
        assert side["continuations"] == 320 and side["tau"] > 1.1
    lines = (tmp_path / "counts.jsonl").read_text().splitlines(keepends=True)
    (tmp_path / "counts.jsonl").write_text("".join(lines[:-2]))
    again = Journal(tmp_path / "counts.jsonl", {})
    assert again.missing("vllm", 4) == [2, 3]
    measure_in_vllm(case.export_dir, case.path, case.suite, plan, again, 3, "float32")
    assert again.found["vllm", 3] == journal.found["vllm", 3]


def sampled_sides(
    target: TargetModel, target_dir: Path, export_dir: Path, suite: Suite, plan: Plan, journal: Journal
) -> dict[str, Any]:
    """The comparison of all three sides."""
    speculator = load_speculator(export_dir, target)
    for side in ("estimate", "decode"):
        measure_here(side, target, speculator, suite, plan, journal)
    measure_in_vllm(export_dir, target_dir, suite, plan, journal, len(suite.prompts), "float32")
    return compare_sides(journal, len(suite.prompts))


@pytest.mark.parametrize("kind", ["eagle3", "draft_lm"])
def test_drawn_drafts_agree(case: Case, kind: str, tmp_path: Path) -> None:
    """Drafts drawn from the draft's own law (draft_sample_method probabilistic): vLLM's counters are those of our
    decode and of the estimate, and not those of greedy drafts."""
    plan = Plan(
        samples=100, num_draft_tokens=K, temperature=0.7, max_new_tokens=NEW_TOKENS, batch_size=100,
        draft_sample_method="probabilistic",
    )  # fmt: skip
    export_dir = case.export_dir if kind == "eagle3" else case.noisy_target()
    drawn = sampled_sides(case.target, case.path, export_dir, case.suite, plan, Journal(tmp_path / "drawn.jsonl", {}))
    assert len(drawn["pairs"]) == 3
    for pair in drawn["pairs"]:  # see test_sampled_agreement
        assert abs(pair["difference"]) < 0.75 * (pair["ci95"][1] - pair["ci95"][0]) < 0.1
    greedy = Journal(tmp_path / "greedy.jsonl", {})
    plan = replace(plan, draft_sample_method="greedy")
    measure_here("decode", case.target, load_speculator(export_dir, case.target), case.suite, plan, greedy)
    low, high = compare_sides(greedy, 4)["sides"]["decode"]["ci95"]
    assert high < drawn["sides"]["vllm"]["ci95"][0] or drawn["sides"]["vllm"]["ci95"][1] < low


def test_sampled_prompts_of_more_tokens_than_a_step_holds(case: Case) -> None:
    """Twelve prompts of 300 tokens: without care vLLM prefills one in two steps, which fails with seeds on the CPU."""
    prompts = [(PROMPTS[i % 4] * 100)[:300] for i in range(12)]
    suite = Suite("long", [f"p{i}" for i in range(12)], [""] * 12, prompts)
    sampling = Sampling(temperature=0.7, seed=1)
    ((run,),) = run_engines(
        str(case.export_dir), case.path, suite, sampling, num_draft_tokens=[K], concurrency=[12], max_new_tokens=4
    )
    assert [len(ids) for ids in run.outputs] == [4] * 12


def test_sampled_text_follows_the_law(case: Case) -> None:
    """The second token of many samples of one prompt, which the acceptance rule decides, has the enumerated law."""
    samples, prompt = 1500, PROMPTS[0]
    sampling = Sampling(temperature=0.5, seed=3)
    suite = Suite("one", [f"s{i}" for i in range(samples)], [""] * samples, [prompt] * samples)
    case_settings: dict[str, Any] = {"num_draft_tokens": [2], "concurrency": [64], "max_new_tokens": 3}
    result = evaluate_prompts(str(case.export_dir), case.path, suite, sampling, **case_settings)[0]
    assert result["cpu_sampling_repaired"] is is_cpu_build()
    assert result["lossless"] is None
    found_V = torch.zeros(320).index_add_(
        0, torch.tensor([output[1] for output in result["outputs"]]), torch.full((samples,), 1 / samples)
    )
    law_V = second_token_law(case.target, prompt, sampling)
    distance = 0.5 * float((found_V - law_V).abs().sum())
    noise = 0.5 * float((2 * law_V * (1 - law_V) / (torch.pi * samples)).sqrt().sum())  # expected of a true sampler
    uniform_V = torch.full_like(law_V, 1 / 320)
    assert 0.5 * float((uniform_V - law_V).abs().sum()) > 4 * noise  # another law would be seen
    assert distance < 1.4 * noise


def second_token_law(target: TargetModel, prompt: list[int], sampling: Sampling) -> torch.Tensor:
    """[V]: the law of the second token after `prompt`, summed over every first token."""

    def law_of(prompts: list[list[int]]) -> torch.Tensor:
        state_BH, _ = target.prefill(prompts, target.new_cache(len(prompts[0])), FeatureSpec((), False))
        return target_probs(target.logits(state_BH), sampling)

    with torch.no_grad():
        return law_of([prompt])[0] @ law_of([[*prompt, token] for token in range(320)])
