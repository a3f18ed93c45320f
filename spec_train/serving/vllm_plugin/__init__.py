"""MLP speculators and Medusa heads in vLLM, which itself no longer serves either.

vLLM loads the class named below through its documented `custom_class` method, and the export's folder reaches it
through vLLM's documented `additional_config`:

  vllm serve TARGET \\
    --speculative-config '{"method": "custom_class", "model": "spec_train.serving.vllm_plugin.SpecTrainProposer",
                           "num_speculative_tokens": 3}' \\
    --additional-config '{"spec_train_speculator": "/path/to/export"}'

spec-train must be installed in vLLM's environment; nothing of it runs in a vLLM that does not name the class.
"""

from spec_train.serving.vllm_plugin.proposer import SpecTrainProposer

__all__ = ["SpecTrainProposer"]
