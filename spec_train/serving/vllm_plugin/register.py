"""The wheel's entry point in `vllm.general_plugins`: an export's folder can be named where vLLM expects a class.

With spec-train installed, `{"method": "custom_class", "model": "/path/to/export", "num_speculative_tokens": 3}` is all
that it takes; a model that is no folder is left to vLLM. Nothing heavy is imported: vLLM calls this in every process.
"""

from __future__ import annotations

import functools
import sys
from pathlib import Path
from typing import Any


def register() -> None:
    """Let vLLM's maker of custom drafters take a folder. Called once or more in each process of vLLM."""
    from vllm.v1.spec_decode import custom_class_proposer

    original = custom_class_proposer.create_custom_proposer
    if hasattr(original, "takes_folders"):
        return

    @functools.wraps(original)
    def create(vllm_config: Any) -> Any:
        if not Path(vllm_config.speculative_config.model).is_dir():
            return original(vllm_config)
        from spec_train.serving.vllm_plugin import SpecTrainProposer

        return SpecTrainProposer(vllm_config)

    create.takes_folders = True  # type: ignore[attr-defined]
    custom_class_proposer.create_custom_proposer = create
    runner = sys.modules.get("vllm.v1.worker.gpu_model_runner")
    if runner is not None:  # it holds the function under its own name
        runner.create_custom_proposer = create  # type: ignore[attr-defined]
