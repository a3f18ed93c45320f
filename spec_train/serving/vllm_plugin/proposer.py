"""The drafter that vLLM's model runner V1 calls once per step, for heads that read one target state.

Both kinds of heads draft from the target's state (after its final norm) of the row that gave the request's newest
token, and from that token. vLLM hands a custom drafter the new tokens but no states. The runner has them, in sampling
order, at the call one level above `propose`: request i holds rows first_i .. first_i + d_i, d_i being the drafts that
were scheduled for it in this step (0 for a prompt, whole or in part), and of those rows the first n_i gave its n_i new
tokens. So `watch_runner` notes that call's arguments, and `propose` reads row first_i + n_i - 1:

  request      scheduled              rows   new tokens                row read
  decoding     1 token + 3 drafts     4      n = 1 + accepted drafts   first + n - 1
  decoding     1 token, no drafts     1      1                         first
  whole prompt rest of the prompt     1      1                         first
  part of one  some of the prompt     1      none: vLLM discards it    none, nothing is drafted

The runner prepares these rows outside its CUDA graphs, and every rank of a tensor-parallel group holds them whole; the
heads are replicated on each rank. Facts: vLLM 0.32.0 (run) and 0.33.0 (read), `v1/worker/gpu_model_runner.py`.

Shapes: R requests, N sampled rows, B requests to draft for, H the target's hidden size, K drafts.
"""

from __future__ import annotations

import functools
import inspect
import itertools
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from spec_train.errors import UserError
from spec_train.serving.contract import PLUGIN_KEY
from spec_train.speculators import medusa_heads, mlp_heads
from spec_train.speculators.head_files import export_tensors, find_head, head_type, read_json, weight_files
from spec_train.speculators.heads import DraftHeads

if TYPE_CHECKING:
    from vllm.config import VllmConfig

BUILDERS = {"mlp": mlp_heads.heads_from_serving, "medusa": medusa_heads.heads_from_serving}
# These apply their final norm where they compute logits, so what the runner holds are states before it.
UNNORMED_TARGETS = ("KimiLinearForCausalLM", "MiMoForCausalLM", "Step3p5ForCausalLM", "Step5ForCausalLM")
# What `watch_runner` reads of the call that it watches.
WATCHED = ("scheduler_output", "sample_hidden_states", "spec_decode_metadata")


@dataclass(frozen=True)
class Step:
    """What the runner knows when it asks for drafts. `num_drafts`: d_i of every request, in the runner's order."""

    states_NH: Tensor
    num_drafts: list[int]
    num_draft_tokens: int


class SpecTrainProposer:
    """Drafts with the heads of an export; the class that `speculative_config.model` names. See the package."""

    def __init__(self, vllm_config: VllmConfig) -> None:
        """Read the export and build its heads. Raises UserError if it cannot be served with this configuration."""
        if vllm_config.parallel_config.pipeline_parallel_size > 1:
            raise UserError("vLLM's model runner V1 has no drafter with pipeline parallelism: use tensor parallelism")
        directory = export_directory(vllm_config.speculative_config.model, vllm_config.additional_config)
        self.heads = load_heads(directory)
        check_heads(self.heads, directory, vllm_config)
        self.device = torch.device(vllm_config.device_config.device_type)
        self.dtype: torch.dtype = vllm_config.model_config.dtype
        self.step: Step | None = None
        watch_runner()

    def load_model(self, target: nn.Module) -> None:
        """Put the heads beside the target, in its dtype, as vLLM does with drafts of its own."""
        unnormed = {type(module).__name__ for module in target.modules()}.intersection(UNNORMED_TARGETS)
        if unnormed:
            raise UserError(
                f"SpecTrainProposer cannot serve {unnormed.pop()}: vLLM gives its states before the final norm, "
                "and the heads were trained on those after it"
            )
        self.heads.to(self.device, self.dtype).eval().requires_grad_(False)

    def propose(
        self, sampled_token_ids: list[list[int]], num_tokens_no_spec: Any, token_ids_cpu: Any, slot_mappings: Any = None
    ) -> list[list[int]]:
        """The drafts of every request, none for one whose prompt is not read to its end.

        `sampled_token_ids`: the R requests' new tokens of this step. The other arguments are vLLM's and not needed.
        """
        step, self.step = self.step, None
        if step is None:
            raise RuntimeError("vLLM asked for drafts by a way that spec-train does not know: use vLLM 0.32 or 0.33")
        rows = rows_to_read(step.num_drafts, [len(tokens) for tokens in sampled_token_ids])
        if sum(step.num_drafts) + len(step.num_drafts) != len(step.states_NH):
            raise RuntimeError(f"{len(step.states_NH)} rows do not fit {step.num_drafts} drafts and a token each")
        drafts: list[list[int]] = [[] for _ in sampled_token_ids]
        requests = [request for request, row in enumerate(rows) if row is not None]
        if not requests or step.num_draft_tokens == 0:
            return drafts
        row_B = torch.tensor([row for row in rows if row is not None], device=self.device)
        token_B = torch.tensor([sampled_token_ids[request][-1] for request in requests], device=self.device)
        draft_BK = self.heads.draft(step.states_NH[row_B], token_B, step.num_draft_tokens)
        for request, tokens in zip(requests, draft_BK.tolist(), strict=True):
            drafts[request] = tokens
        return drafts


def rows_to_read(num_drafts: list[int], num_new: list[int]) -> list[int | None]:
    """Each request's row that gave its newest token; None where the step gave none. See the module."""
    ends = itertools.accumulate(drafts + 1 for drafts in num_drafts)
    counts = zip(ends, num_drafts, num_new, strict=True)
    return [end - drafts - 1 + new - 1 if new else None for end, drafts, new in counts]


def export_directory(model: str, additional_config: Any) -> Path:
    """The folder named as vLLM's speculative `model` or in `additional_config`, where a Hub id will do: it is fetched
    as vLLM fetches models. Raises UserError if nothing is named, or it is not an export."""
    path = additional_config.get(PLUGIN_KEY) if isinstance(additional_config, dict) else None
    if Path(model).is_dir():  # see register.py
        path = model
    if not isinstance(path, str) or not path:
        raise UserError(f'SpecTrainProposer needs --additional-config \'{{"{PLUGIN_KEY}": "/path/to/export"}}\'')
    folder = find_head(path)
    if not (folder / "config.json").is_file() or not weight_files(folder):
        raise UserError(f"{PLUGIN_KEY} is {path}, which has no config.json and weights: name the folder of an export")
    return folder


def load_heads(directory: Path) -> DraftHeads:
    """The heads of an export, or of a checkpoint published in the same form. Raises UserError for any other file."""
    config, tensors = read_json(directory / "config.json"), export_tensors(directory)
    kind = head_type(directory, config, tensors)
    if kind not in BUILDERS:
        raise UserError(
            f"{directory} holds a speculator of type {kind}, and SpecTrainProposer serves {' and '.join(BUILDERS)} "
            "alone: vLLM loads the others itself, as the export's README.md says"
        )
    return BUILDERS[kind](config, tensors)


def check_heads(heads: DraftHeads, directory: Path, vllm_config: VllmConfig) -> None:
    """Raises UserError if vLLM's target or its number of drafts does not suit the heads."""
    model, shape = vllm_config.model_config, heads.shape
    trained = (shape.hidden_size, shape.vocab_size)
    served = (model.get_hidden_size(), model.get_vocab_size())
    if trained != served:
        raise UserError(
            f"{directory}: heads for a hidden size and vocabulary of {trained} cannot draft for {model.model}, which "
            f"has {served}: serve the target they were trained for"
        )
    asked = vllm_config.speculative_config.num_speculative_tokens
    if asked > heads.num_heads:
        raise UserError(
            f"{directory}: {heads.num_heads} heads cannot draft {asked} tokens: "
            f"lower num_speculative_tokens to {heads.num_heads}"
        )


def watch_runner() -> None:
    """From now on, every runner of this process notes its steps for a SpecTrainProposer before it asks for drafts.

    A drafter is given no reference to its runner, so the method is wrapped on the class, once. Other drafters are not
    touched. Raises UserError if vLLM's method is not the one we know.
    """
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

    original = GPUModelRunner.propose_draft_token_ids
    if hasattr(original, "watched_by_spec_train"):
        return
    signature = inspect.signature(original)
    missing = [name for name in WATCHED if name not in signature.parameters]
    if missing:
        raise UserError(f"this vLLM's model runner has no {', '.join(missing)} to draft from: use vLLM 0.32 or 0.33")

    @functools.wraps(original)
    def watched(runner: Any, *args: Any, **kwargs: Any) -> Any:
        if isinstance(runner.drafter, SpecTrainProposer):
            scheduled, states_NH, sampling = (
                signature.bind(runner, *args, **kwargs).arguments[name] for name in WATCHED
            )
            runner.drafter.step = Step(
                states_NH, list(sampling.num_draft_tokens), scheduled.num_spec_tokens_to_schedule
            )
        return original(runner, *args, **kwargs)

    watched.watched_by_spec_train = True  # type: ignore[attr-defined]
    GPUModelRunner.propose_draft_token_ids = watched
