"""The model card: what the Hub indexes, and what a reader must know to serve an export and to trust it.

Every figure stands in the export or in an evaluation result (`facts.py`); what was not measured is not mentioned, or
named as unknown. The last line is a comment with the hash of the rest, by which `edited_by_hand` knows a card that
somebody has changed since.
"""

from __future__ import annotations

import hashlib
import re
from typing import Any

import spec_train
from spec_train.serving.card_body import body, draft_name, setting_name
from spec_train.serving.facts import Facts

_MARKER = re.compile(r"<!-- card by spec-train \S+, sha256 ([0-9a-f]{64}) -->\n?\Z")


def write_card(facts: Facts) -> str:
    """The card: YAML metadata, Markdown, and the marker."""
    text = f"---\n{metadata(facts).to_yaml()}\n---\n\n{body(facts)}\n"
    digest = hashlib.sha256(text.encode()).hexdigest()
    return f"{text}<!-- card by spec-train {spec_train.__version__}, sha256 {digest} -->\n"


def edited_by_hand(card: str) -> bool:
    """Whether a card differs from what spec-train wrote, or was never written by it."""
    found = _MARKER.search(card)
    return found is None or hashlib.sha256(card[: found.start()].encode()).hexdigest() != found[1]


def metadata(facts: Facts) -> Any:
    """The card's metadata as huggingface_hub's ModelCardData.

    The Hub knows four relations to a base model: finetune, adapter, merge and quantized. A whole model that starts from
    another is a finetune. A head is none of the four, and gives no relation, as published heads do. `library_name` is
    what loads the files: without one the Hub would offer code for transformers, which cannot load a head.
    """
    from huggingface_hub import ModelCardData

    base_model, relation = _base_model(facts)
    sources = facts.recipe.get("data", {}).get("sources", [])
    datasets = [source["hub"].partition(":")[0] for source in sources if source.get("hub")]
    return ModelCardData(
        license=facts.license.get("license"),
        license_name=facts.license.get("license_name"),
        license_link=facts.license.get("license_link"),
        language=facts.hub.language or None,
        library_name=_library(facts),
        pipeline_tag="text-generation",
        tags=_tags(facts),
        base_model=base_model,
        base_model_relation=relation,
        datasets=list(dict.fromkeys(datasets)) or None,
        model_name=facts.repo_id.partition("/")[2],
        eval_results=_eval_results(facts) or None,
    )


def _base_model(facts: Facts) -> tuple[str | None, str | None]:
    """(base model, relation). A draft model that starts from another checkpoint descends from that one."""
    options = facts.recipe.get("speculator", {})
    start = options.get("start_model")
    if start is not None and "/" in start:
        return start, "finetune"
    whole = facts.description["format"] == "stitched" or options.get("start_layers") is not None
    return facts.base_model, "finetune" if whole and facts.base_model else None


def _library(facts: Facts) -> str:
    about = facts.description
    if about["plugin"]:
        return "spec-train"
    if about["format"] == "speculators":
        return "speculators"
    return "transformers" if about["format"] == "stitched" or about["method"] == "draft_model" else "vllm"


def _tags(facts: Facts) -> list[str]:
    about = facts.description
    tags = ["speculative-decoding", about["type"].replace("_", "-"), "vllm", "spec-train"]
    return [*tags, *(["speculators"] if about["format"] == "speculators" else []), *facts.hub.tags]


def _eval_results(facts: Facts) -> list[Any]:
    """What the Hub shows beside the card, for every suite, K and temperature."""
    from huggingface_hub import EvalResult

    found = []
    for result in facts.own_results:
        k, temperature = result["num_draft_tokens"], result["temperature"]
        setting = f"{draft_name(result)}, temperature {setting_name(result)}"
        metrics = {
            "mean_acceptance_length": ("mean acceptance length", result["mean_acceptance_length"]),
            "tokens_per_step": ("tokens per target pass", result["tokens_per_step"]),
        }
        if result["speed"]:
            metrics["speedup"] = (f"speed-up on {result['device']}", result["speed"]["speedup"])
        for kind, (name, value) in metrics.items():
            arguments: dict[str, Any] = {"num_draft_tokens": k, "temperature": temperature}
            if kind == "mean_acceptance_length" and result["mean_acceptance_length_ci95"] is not None:
                arguments["ci95"] = result["mean_acceptance_length_ci95"]
            found.append(
                EvalResult(
                    task_type="text-generation",
                    dataset_type=result["suite"],
                    dataset_name=result["suite"],
                    metric_type=kind,
                    metric_name=f"{name} ({setting})",
                    metric_value=value,
                    metric_args=arguments,
                    source_name="spec-train",
                    source_url=f"https://huggingface.co/{facts.repo_id}/tree/main/eval",
                )
            )
    return found
