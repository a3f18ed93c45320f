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
from spec_train.evaluation.report import CAPTION, result_markdown
from spec_train.serving.contract import serve_command
from spec_train.serving.facts import Facts

_MARKER = re.compile(r"<!-- card by spec-train \S+, sha256 ([0-9a-f]{64}) -->\n?\Z")
WHOLE_MODELS = ("draft_model",)  # vLLM's names of methods whose export is a language model by itself


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
    """The card's metadata as huggingface_hub's ModelCardData."""
    from huggingface_hub import ModelCardData

    about = facts.description
    whole = about["format"] == "stitched" or about["method"] in WHOLE_MODELS
    library = "transformers" if whole else "speculators" if about["format"] == "speculators" else "vllm"
    sources = facts.recipe.get("data", {}).get("sources", [])
    datasets = [source["hub"].partition(":")[0] for source in sources if source.get("hub")]
    return ModelCardData(
        license=facts.license.get("license"),
        license_name=facts.license.get("license_name"),
        license_link=facts.license.get("license_link"),
        language=facts.hub.language or None,
        library_name=library,
        pipeline_tag="text-generation",
        tags=["speculative-decoding", about["type"], "vllm", "spec-train", *facts.hub.tags],
        base_model=facts.base_model,
        base_model_relation="finetune" if whole and facts.base_model else None,
        datasets=list(dict.fromkeys(datasets)) or None,
        model_name=facts.repo_id.partition("/")[2],
        eval_results=_eval_results(facts) or None,
    )


def _eval_results(facts: Facts) -> list[Any]:
    """What the Hub shows beside the card: the acceptance length of every suite, K and temperature."""
    from huggingface_hub import EvalResult

    results = []
    for result in facts.own_results:
        k, temperature = result["num_draft_tokens"], result["temperature"]
        results.append(
            EvalResult(
                task_type="text-generation",
                dataset_type=result["suite"],
                dataset_name=result["suite"],
                metric_type="mean_acceptance_length",
                metric_name=f"mean acceptance length (K={k}, temperature {temperature:g})",
                metric_value=result["mean_acceptance_length"],
                metric_args={"num_draft_tokens": k, "temperature": temperature},
            )
        )
    return results


def body(facts: Facts) -> str:
    """The Markdown below the metadata."""
    about = facts.description
    command = serve_command(facts.repo_id, about["target_id"], about, about["num_draft_tokens"])
    parts = [f"# {facts.repo_id.partition('/')[2]}", f"A speculator ({about['type']}) for `{about['target_id']}`."]
    if facts.notes:
        parts.append(facts.notes)
    parts += ["## Serve", f"```bash\n{command}\n```"]
    parts.append("## Acceptance")
    parts += [result_markdown(facts.results).strip(), CAPTION] if facts.results else ["Not measured."]
    return "\n\n".join(parts) + "\n"
