"""The GPU script takes the same path on the CPU in seconds, without the packages that a GPU machine may lack."""

import json
import os
import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).with_name("run_gpu.py")
ABSENT = ("datasets", "deepspeed", "peft", "tensorboard", "vllm", "wandb")
WITHOUT = f"""
import runpy, sys
for name in {ABSENT}:
    sys.modules[name] = None  # importing it fails, and looking for it finds nothing
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


def test_tiny_run_on_the_cpu_trains_decodes_and_reports(tmp_path):
    arguments = ["--tiny", "--device", "cpu", "--out", str(tmp_path), "--num-draft-tokens", "3", "--cuda-graphs"]
    run = subprocess.run(
        [sys.executable, "-c", WITHOUT, str(SCRIPT), *arguments],
        cwd=tmp_path,
        env={**os.environ, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert run.returncode == 0, run.stderr[-2000:]
    report = json.loads((tmp_path / "gpu.json").read_text())
    training, results = report["training"], report["decoding"]
    assert training["steps"] == 30
    assert training["hit_last"] > training["hit_first"] + 0.1
    assert 0 < training["share_of_matmul_rate"] < 1
    assert [(row["batch_size"], row["num_draft_tokens"]) for row in results] == [(1, 3), (3, 3)]
    for row in results:
        assert row["lossless"]["identical"] == row["lossless"]["checked"] == 3
        assert row["mean_acceptance_length"] > 1.1
        assert row["speed"]["speedup"] > 0
    others = {row["type"]: row for row in report["other_methods"]}
    assert list(others) == ["mtp", "draft_lm", "mlp", "medusa", "eagle1", "peagle", "pard"]
    for row in others.values():
        assert row["steps"] == 5
        assert row["lossless"]["identical"] == row["lossless"]["checked"] == 3
        assert row["tokens_per_pass"] >= 1
    # batching changes no greedy text, so it changes no count either
    assert results[0]["vllm_counters"] == results[1]["vllm_counters"]
    graphs = report["cuda_graphs"]
    assert [(row["batch_size"], row["num_draft_tokens"]) for row in graphs] == [(1, 0), (1, 3), (3, 0), (3, 3)]
    for row in graphs:
        assert row["same_text"] == row["texts"] == (2 if row["batch_size"] == 1 else 3)
        assert row["passes"] > 0 and not row["captured"]  # static passes, computed: a CPU captures nothing
        assert row["ratio"] > 0 and {len(rates) for rates in row["tokens_per_second"].values()} == {3}
    assert len(list((tmp_path / "eval").glob("*.json"))) == 2
