"""Verification finds faults: a reload that drafts otherwise, and runs of vLLM that do not match our trace."""

from __future__ import annotations

import copy
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from spec_train.decoding.acceptance import vllm_counters
from spec_train.decoding.trace import Cycle, DecodeTrace, RequestTrace, Timings
from spec_train.errors import UserError
from spec_train.serving import eagle3_contract
from spec_train.serving.compare import VllmReport, compare, first_difference, stop_problems
from spec_train.serving.contract import engine_problem, installed_vllm, is_cpu_build
from spec_train.serving.eagle3_contract import EAGLE3_FLAGS
from spec_train.serving.export import export, read_export
from spec_train.serving.golden import make_golden
from spec_train.serving.processes import RELOAD_WORKER, VllmRun, needed_positions, run_worker
from spec_train.serving.reload_worker import reload
from spec_train.serving.verify import (
    check_files,
    check_input,
    check_reload,
    comparison_dtype,
    draft_config,
    judge_reload,
    render_report,
    served_folder,
    verify_export,
)
from spec_train.speculators.eagle3 import Eagle3, Eagle3Options, eagle3_config
from spec_train.target import TargetModel
from tests.heads import random_eagle3
from tests.tiny import tiny_model

PROMPT = [5, 77, 140, 9, 300, 12]


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> TargetModel:
    return TargetModel.load(str(tiny_model("llama", tmp_path_factory.mktemp("llama"))))


@pytest.fixture
def exported(target: TargetModel, tmp_path: Path) -> Path:
    head = random_eagle3()
    golden = make_golden(Eagle3.from_serving(head.config, head.tensors, target), target, PROMPT)
    settings: dict[str, Any] = {"format": "plain", "target_id": target.name, "num_draft_tokens": 3}
    return export(head, tmp_path / "head", golden=golden, provenance={}, **settings)


def edit_config(folder: Path, **changes: Any) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, **changes}))


def edit_tensor(folder: Path, name: str, change: Any) -> None:
    weights = load_file(folder / "model.safetensors")
    change(weights, name)
    save_file(weights, folder / "model.safetensors")


def test_reload_gives_the_golden_drafts(target: TargetModel, exported: Path) -> None:
    golden = load_file(exported / "golden" / "golden.safetensors")
    assert golden["aux_hidden"].shape == (len(PROMPT) - 1, 3 * 64)
    assert golden["draft_logits"].shape == (4, 96)
    report = check_reload(exported, Path(target.name), "float32", "cpu")  # in a fresh process
    assert (report.problems, report.drafts_equal, report.tensors) == ([], True, 15)
    assert report.max_difference is not None
    assert report.max_difference <= 1e-5


@pytest.mark.parametrize("flag", ["norm_output", "norm_before_residual"])
def test_a_turned_flag_changes_the_logits(target: TargetModel, exported: Path, flag: str) -> None:
    edit_config(exported, **{flag: True})
    assert reload(exported, target)["max_difference"] > 1e-2


def test_other_faults_of_the_files(target: TargetModel, exported: Path) -> None:
    edit_config(exported, rope_parameters={"rope_type": "default", "rope_theta": 5e5}, rope_theta=5e5)
    assert reload(exported, target)["max_difference"] > 1e-3
    edit_config(exported, rope_parameters={"rope_type": "default", "rope_theta": 1e4}, norm_before_fc=True)
    with pytest.raises(UserError, match=r"input_norm\.weight"):
        reload(exported, target)
    edit_config(exported, norm_before_fc=False)
    edit_tensor(exported, "extra.weight", lambda weights, name: weights.update({name: torch.ones(1)}))
    with pytest.raises(UserError, match=r"extra\.weight"):
        reload(exported, target)


def test_shipped_embedding_must_be_the_targets(target: TargetModel, exported: Path) -> None:
    table = target.embedding.get_parameter("weight").detach()
    edit_tensor(exported, "embed_tokens.weight", lambda weights, name: weights.update({name: table.clone()}))
    assert reload(exported, target)["tensors"] > 0
    edit_tensor(exported, "embed_tokens.weight", lambda weights, name: weights[name][7].add_(1.0))
    with pytest.raises(UserError, match="not the embedding"):
        reload(exported, target)


def test_verification_without_vllm_says_so(target: TargetModel, exported: Path) -> None:
    arguments: dict[str, Any] = {
        "prompts": [PROMPT],
        "max_new_tokens": 4,
        "num_draft_tokens": 3,
        "expected_trace": None,
    }
    report = verify_export(exported, Path(target.name), vllm="off", **arguments)
    assert report.ok
    assert report.vllm_status == "not checked: switched off"
    assert json.loads(json.dumps(report.to_json()))["vllm"] is None
    assert render_report(report).row_count == 3
    edit_tensor(exported, "fc.weight", lambda weights, name: weights[name].mul_(1.5))
    assert (
        "draft logits of the reloaded head differ"
        in verify_export(exported, Path(target.name), vllm="off", **arguments).problems[0]
    )


def test_a_slight_slip_of_a_weight_fails_the_reload(target: TargetModel, exported: Path) -> None:
    """A head that drafts the same tokens from logits that are 1 in 1,000 off is not the head that was exported."""
    assert judge_reload(reload(exported, target)).problems == []
    edit_tensor(exported, "fc.weight", lambda weights, name: weights[name].mul_(1.001))
    found = reload(exported, target)
    assert found["drafts_equal"] is True
    assert 1e-4 < found["max_difference"] / max(1.0, found["largest"]) < 1e-2
    assert "draft logits of the reloaded head differ" in "".join(judge_reload(found).problems)


def test_a_golden_sample_that_is_not_whole_is_refused(target: TargetModel, exported: Path) -> None:
    file = exported / "golden" / "golden.safetensors"
    golden = load_file(file)
    for name in golden:
        save_file({key: value for key, value in golden.items() if key != name}, file)
        with pytest.raises(UserError, match=f"golden.safetensors: lacks {name}"):
            reload(exported, target)
    save_file({**golden, "draft_logits": golden["draft_logits"][:1].clone()}, file)
    with pytest.raises(UserError, match=r"holds draft logits of shape \[1, 96\], the head gives \[4, 96\]"):
        reload(exported, target)
    file.write_bytes(file.read_bytes()[:-10])
    with pytest.raises(UserError, match=r"golden\.safetensors: cannot be read"):
        reload(exported, target)


def test_input_is_checked_before_anything_starts(target: TargetModel, exported: Path, tmp_path: Path) -> None:
    path = Path(target.name)
    with pytest.raises(UserError, match="at least 2 tokens"):
        check_input(path, [PROMPT, [5]], 8, 3)
    with pytest.raises(UserError, match="need 530 positions in vLLM, the target has 512"):
        check_input(path, [PROMPT], 512, 3)
    with pytest.raises(UserError, match=r"holds no config\.json"):
        check_input(tmp_path, [PROMPT], 8, 3)
    if is_cpu_build():
        narrow = {**json.loads((path / "config.json").read_text()), "head_dim": 16}
        (tmp_path / "config.json").write_text(json.dumps(narrow))
        with pytest.raises(UserError, match="head_dim 16 is not supported"):
            check_input(tmp_path, [PROMPT], 8, 3)
    with pytest.raises(UserError, match="not an export"):
        verify_export(
            path, path, prompts=[PROMPT], max_new_tokens=4, num_draft_tokens=3, expected_trace=None, vllm="off"
        )
    assert needed_positions([PROMPT], 8, 3) == 6 + 8 + 12


def test_failing_process_is_reported_with_its_last_words(tmp_path: Path) -> None:
    job = {"export_dir": str(tmp_path), "target_dir": str(tmp_path), "dtype": "float128", "device": "cpu"}
    with pytest.raises(RuntimeError, match=r"failed with status 1(.|\n)*float128"):
        run_worker(RELOAD_WORKER, job, {}, 120)
    with pytest.raises(RuntimeError, match="did not finish in 0 s"):
        run_worker(RELOAD_WORKER, job, {}, 0.05)


@pytest.mark.parametrize("options", [{}, dict.fromkeys(EAGLE3_FLAGS, True), {"num_layers": 2, "draft_vocab_size": 96}])
def test_heads_of_ours_keep_the_contract(target: TargetModel, tmp_path: Path, options: dict[str, Any]) -> None:
    section = Eagle3Options(type="eagle3", **options)
    size = section.draft_vocab_size or target.vocab_size
    config = eagle3_config(section, target, size)
    head = Eagle3.from_target(config, target, torch.arange(size) * target.vocab_size // size, section.init, seed=0)
    settings: dict[str, Any] = {"target_id": target.name, "num_draft_tokens": 3, "golden": None, "provenance": {}}
    for form in ("plain", "speculators"):
        where = export(head.serving(), tmp_path / form, format=form, **settings)  # type: ignore[arg-type]
        assert check_files(where, Path(target.name), read_export(where), None) == []
        assert reload(where, target)["tensors"] == len(head.serving().tensors)


@pytest.mark.parametrize("kind", ["llama", "qwen3"])
def test_official_names_go_in_and_out_unchanged(target: TargetModel, kind: str) -> None:
    """EAGLE's own files: `midlayer.`, both maps, no layer ids (vLLM's default by depth), the old rotary key."""
    official = random_eagle3(kind=kind, aux_ids=(1, 2, 4))
    old = {key: official.config[key] for key in official.config if "aux" not in key and key != "eagle_config"}
    old["rope_theta"] = old.pop("rope_parameters")["rope_theta"]
    again = Eagle3.from_serving(old, official.tensors, target).serving()
    assert list(again.config["eagle_aux_hidden_state_layer_ids"]) == [1, 2, 4]
    assert (again.config["model_type"], again.config["architectures"]) == (kind, official.config["architectures"])
    assert again.tensors.keys() == official.tensors.keys()
    for name, tensor in official.tensors.items():
        assert torch.equal(again.tensors[name], tensor), name
    assert eagle3_contract.check_eagle3(again.config, again.tensors) == []


def test_speculators_export_of_a_hub_target_is_served_from_a_folder(target: TargetModel, tmp_path: Path) -> None:
    head = random_eagle3()
    settings: dict[str, Any] = {"format": "speculators", "num_draft_tokens": 3, "golden": None, "provenance": {}}
    hub = export(head, tmp_path / "hub", target_id="someone/model", **settings)
    local = export(head, tmp_path / "local", target_id=target.name, **settings)
    assert draft_config(hub, read_export(hub))["eagle_aux_hidden_state_layer_ids"] == [1, 2, 4]
    assert check_files(hub, Path(target.name), read_export(hub), None) == []
    edit_config(local, eagle_aux_hidden_state_layer_ids=[1, 2, 3, 4])
    assert (
        "num_aux_hidden_states is 3, the ids are 4"
        in check_files(local, Path(target.name), read_export(local), None)[0]
    )
    edit_config(local, eagle_aux_hidden_state_layer_ids=[1, 2, 5])
    assert "exceed the target's 4 layers" in check_files(local, Path(target.name), read_export(local), None)[0]
    with served_folder(local, Path(target.name)) as folder:
        assert folder == local
    with served_folder(hub, Path(target.name)) as folder:
        config = json.loads((folder / "config.json").read_text())
        assert config["speculators_config"]["verifier"]["name_or_path"] == target.name
        assert set(load_file(folder / "model.safetensors")) == set(load_file(hub / "model.safetensors"))
    assert not folder.exists()


# ---------------------------------------------------------------------- comparison
def trace() -> DecodeTrace:
    """Two requests, K = 2: outputs 10..15 in cycles of 2, 1 and (cut off) 2 tokens, and 20..22 in two rejections."""
    first = RequestTrace("0", [1, 2], list(range(10, 16)))
    first.cycles = [Cycle([11, 99], 1, 1, 2), Cycle([98, 97], 0, 0, 1), Cycle([14, 15], 2, 2, 2)]
    second = RequestTrace("1", [3, 4], [20, 21, 22])
    second.cycles = [Cycle([5, 6], 0, 0, 1), Cycle([7, 8], 0, 0, 1)]
    return DecodeTrace([first, second], Timings(), num_draft_tokens=2, batch_size=2)


def runs(ours: DecodeTrace) -> tuple[VllmRun, VllmRun]:
    """(without, with) speculation, exactly as our trace has it."""
    outputs = [list(request.output_ids) for request in ours.requests]
    steps = [[{"drafts": c.drafts, "accepted": c.accepted} for c in request.cycles] for request in ours.requests]
    seconds = {"load": 1.0, "generate": 1.0}
    base = VllmRun(outputs, [[1.0] * len(o) for o in outputs], [[], []], {}, seconds)
    return base, VllmRun(copy.deepcopy(outputs), [[], []], copy.deepcopy(steps), vllm_counters(ours), seconds)


def judged(base: VllmRun, spec: VllmRun) -> VllmReport:
    return compare(base, spec, trace(), "0.0")


def test_equal_runs_are_equal() -> None:
    report = judged(*runs(trace()))
    assert report.problems == []
    assert (report.outputs_equal_baseline, report.outputs_equal_ours) == (2, 2)
    assert (report.cycles, report.cycles_compared, report.cycles_equal) == (5, 5, 5)
    assert report.counters == {
        "num_drafts": 5,
        "num_draft_tokens": 10,
        "num_accepted_tokens": 3,
        "num_accepted_tokens_per_pos": [2, 1],
    }
    assert report.mean_acceptance_length == 1 + 3 / 5


def test_one_wrong_draft_is_found() -> None:
    base, spec = runs(trace())
    spec.steps[1][1]["drafts"] = [7, 9]
    report = judged(base, spec)
    assert report.first_divergence["drafts"] == {"request": 1, "cycle": 1, "position": 1}
    assert "1 of 5 cycles, first in request 1, cycle 1, draft 1" in report.problems[0]


def test_counters_must_be_sums_of_our_cycles() -> None:
    base, spec = runs(trace())
    spec.counters["num_accepted_tokens"] += 1
    assert judged(base, spec).problems[0].startswith("vLLM's counters")


def test_changed_text_is_found_and_its_later_cycles_left_out() -> None:
    base, spec = runs(trace())
    spec.outputs[0][3] = 50
    report = judged(base, spec)
    assert report.first_divergence["outputs_baseline"] == {"request": 0, "position": 3}
    assert (report.outputs_equal_baseline, report.outputs_equal_ours) == (1, 1)
    assert report.cycles_compared == 4  # cycle 2 of request 0 starts behind the difference
    assert [problem[:18] for problem in report.problems] == ["vLLM's text differ"] * 2


def test_text_that_parts_at_a_tie_counts_as_equal() -> None:
    base, spec = runs(trace())
    spec.outputs[0][3] = 50
    base.margins[0][3] = 1e-5
    report = judged(base, spec)
    assert report.problems == []
    assert report.near_ties == 2  # against vLLM's own text, and against ours


def test_bfloat16_has_wider_ties() -> None:
    """Text may part where the best two are within its rounding, and a draft in ten may fall on a tie of its own."""
    base, spec = runs(trace())
    spec.outputs[0][3], base.margins[0][3] = 50, 0.2
    assert len(judged(base, spec).problems) == 2
    assert compare(base, spec, trace(), "0.0", "bfloat16").problems == []
    base, spec = runs(trace())
    spec.steps[1][1]["drafts"] = [7, 9]
    assert "1 of 5 cycles" in compare(base, spec, trace(), "0.0", "bfloat16").problems[0]


def test_linear_attention_is_compared_in_bfloat16_and_only_where_vllm_loads_it(
    target: TargetModel, exported: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert comparison_dtype(target.name) == "float32"
    kinds = ["linear_attention", "full_attention"]
    hybrid = {"model_type": "qwen3_5", "text_config": {"layer_types": kinds}}
    (tmp_path / "config.json").write_text(json.dumps(hybrid))
    assert comparison_dtype(tmp_path) == "bfloat16"
    multimodal = {"model_type": "other", "rope_parameters": {"mrope_section": [11, 11, 10]}}
    assert ("crashes when it drafts beside M-RoPE" in (engine_problem(multimodal) or "")) == is_cpu_build()
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert "imports torchvision, which is not installed" in (engine_problem(hybrid) or "")
    assert engine_problem({"model_type": "llama"}) is None
    if installed_vllm():
        with pytest.raises(UserError, match=r"vllm=require, but vLLM's Qwen3\.5 imports torchvision"):
            verify_export(
                exported, tmp_path, prompts=[PROMPT], max_new_tokens=4, num_draft_tokens=3, expected_trace=None,
                vllm="require",
            )  # fmt: skip


def test_silent_speculator_is_a_problem() -> None:
    base, spec = runs(trace())
    idle = VllmRun(spec.outputs, [], [[], []], {}, spec.seconds)
    assert "drafted nothing" in judged(base, idle).problems[0]


def test_answers_that_vllm_ends_elsewhere_are_a_problem() -> None:
    base, _ = runs(trace())
    assert stop_problems(base, [2]) == []  # a target without a tokenizer: vLLM runs on our ids alone
    own = {"ids": [2, 5], "requests": [1, 0], "outputs": [base.outputs[1], base.outputs[0]]}
    assert stop_problems(replace(base, own_stops=own), [5, 2]) == []
    (problem,) = stop_problems(replace(base, own_stops=own), [2])
    assert problem == "vLLM ends answers at the ids [2, 5], we at [2]"
    cut = {**own, "outputs": [base.outputs[1], base.outputs[0][:3]]}
    (problem,) = stop_problems(replace(base, own_stops=cut), [2, 5])
    assert "answer 0 ends or reads otherwise where vLLM stops by itself, from token 3 on" in problem


def test_missing_and_extra_tokens_are_differences() -> None:
    assert first_difference([1, 2], [1, 2]) is None
    assert first_difference([1, 2], [1, 3]) == 1
    assert first_difference([1, 2], [1]) == 1
