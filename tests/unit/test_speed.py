"""The paired benchmark on tiny models: stock generation gives the same text, and every figure is there."""

import torch
from transformers import LlamaForCausalLM

from spec_train.evaluation.metrics import tokens_per_step
from spec_train.evaluation.speed import PAIRS, bench_decoding, bench_linears, bench_table, linears_table
from spec_train.speculators.ngram import NgramProposer
from spec_train.target import TargetModel
from tests.tiny import tiny_model

PROMPTS = [[5, 6, 7, 5, 6, 7, 5], [20, 21, 22], [7, 7, 7, 7]]


def test_every_side_is_timed_in_every_round(tmp_path):
    folder = tiny_model("llama", tmp_path, num_hidden_layers=2)
    target = TargetModel.load(str(folder))
    assistant = LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32)
    result = bench_decoding(
        target, NgramProposer(1, 3), assistant, PROMPTS, num_draft_tokens=3, max_new_tokens=8, batch_size=3,
        single_prompts=2, rounds=3,
    )  # fmt: skip
    assert {len(rates) for rates in result["tokens_per_second"].values()} == {3}
    assert set(result["ratio"]) == {what for what, *_ in PAIRS}
    assert all(rate > 0 for rates in result["tokens_per_second"].values() for rate in rates)
    assert result["tokens_per_step"] >= tokens_per_step([]) and 0 <= result["overhead_share"] < 1
    assert result["same_text"] == {"plain": True, "speculative": True}
    assert bench_table(result).count("\n") == 2 + len(PAIRS)


def test_without_an_assistant_that_row_is_left_out(tmp_path):
    target = TargetModel.load(str(tiny_model("llama", tmp_path, num_hidden_layers=2)))
    result = bench_decoding(target, NgramProposer(1, 3), None, PROMPTS, num_draft_tokens=2, max_new_tokens=4, rounds=1)
    assert "assisted" not in result["tokens_per_second"] and "assisted" not in bench_table(result)


def test_linear_layers_are_timed_by_rows(tmp_path):
    target = TargetModel.load(str(tiny_model("llama", tmp_path, num_hidden_layers=2)))
    result = bench_linears(target, [1, 4], rounds=2)
    first, second = result["linears"]
    weights = sum(m.weight.numel() for m in target.model.modules() if isinstance(m, torch.nn.Linear))
    assert [first["rows"], second["rows"]] == [1, 4]
    assert second["gflops"] * second["ms"] * 1e6 == 2 * 4 * weights
    assert second["plain_ms"] > 0 and linears_table(result).count("\n") == 4
