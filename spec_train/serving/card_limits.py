"""What a card must say against its own model: what was not tried, and where it was tried and did not help."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from spec_train.serving.facts import Facts


def limits(facts: Facts) -> list[str]:
    """One list of what is on record; empty where nothing is."""
    found = [*_training_limits(facts), *_measured_limits(facts)]
    return ["\n".join(f"- {line}" for line in found)] if found else []


def _training_limits(facts: Facts) -> list[str]:
    """What the recipe confines the speculator to."""
    if not facts.recipe:
        return ["How it was trained is not on record."]
    target, data, answers = (facts.recipe[name] for name in ("target", "data", "responses"))
    name = facts.description["provenance"].get("target", {}).get("name", "")
    lines = []
    if facts.base_model and name != facts.base_model:
        lines.append(f"Trained and measured on {name}; acceptance with other weights was not measured.")
    prompt = "a system prompt that is not published" if facts.withheld else _system_prompt(target["system_prompt"])
    template = f"the template {Path(target['chat_template']).name}" if target["chat_template"] else "its chat template"
    kwargs = "".join(f", {key}={value!r}" for key, value in target["chat_template_kwargs"].items())
    lines.append(f"Trained with {template}{kwargs} and {prompt}; acceptance under others was not measured.")
    length = f"Trained on at most {data['max_length']:,} tokens of context"
    if answers["mode"] == "regenerate":
        length += f" and answers of at most {answers['max_new_tokens']:,} tokens"
    lines.append(f"{length}; longer ones were not measured.")
    vocabulary = facts.recipe["speculator"].get("draft_vocab_size")
    coverage = facts.description["provenance"].get("training", {}).get("held_out_coverage")
    if vocabulary and coverage is not None:
        lines.append(
            f"It drafts {vocabulary:,} of the model's tokens, which were {coverage:.1%} of the held-out answers; the "
            "others it never drafts."
        )
    return lines


def _system_prompt(text: str | None) -> str:
    if not text:
        return "no system prompt"
    short = len(text) <= 120 and "\n" not in text and "`" not in text
    return f"the system prompt `{text}`" if short else "the system prompt in recipe.yaml"


def _measured_limits(facts: Facts) -> list[str]:
    """Where a measurement says something against it, or does not reach."""
    results = facts.own_results
    if not results:
        return []
    lines = []
    temperatures = sorted({result["temperature"] for result in results})
    lines.append(f"Measured at temperature {', '.join(f'{t:g}' for t in temperatures)} only.")
    for suite, seen in {r["suite"]: r["overlap"] for r in results if r.get("overlap")}.items():
        hits = seen["exact"] + seen["near"]
        if hits:
            lines.append(
                f"{hits} of the {seen['checked']} prompts of {suite} are in the training data ({seen['exact']} exact, "
                f"{seen['near']} near): its figures flatter what was trained."
            )
        else:
            lines.append(f"None of the {seen['checked']} prompts of {suite} is in the training data.")
    if not any(r["suite"] != "held_out" for r in results):
        lines.append("Measured on held-out prompts of the training data's own kind; other kinds were not measured.")
    slower = [_where(r) for r in results if 0 < _speedup(r) < 1]
    if slower:
        lines.append(f"Slower than plain decoding on the machine above: {', '.join(slower)}.")
    lines += _baselines_ahead(facts)
    if all(r["device"].startswith("cpu") for r in results if r["speed"]):
        lines.append("Speed was timed on a CPU; a GPU has other costs, and its gain was not measured.")
    elif not any(r["speed"] for r in results):
        lines.append("Speed was not measured.")
    return lines


def _baselines_ahead(facts: Facts) -> list[str]:
    """Baselines that did at least as well on the same prompts as the speculator at its best: tokens a pass, or time."""
    lines = []
    for key in dict.fromkeys((r["suite"], r["temperature"], r["backend"]) for r in facts.own_results):
        same = [r for r in facts.results if (r["suite"], r["temperature"], r["backend"]) == key]
        own = [r for r in same if r in facts.own_results]
        others = [r for r in same if r not in own]
        passes, speed = max(r["tokens_per_step"] for r in own), max(map(_speedup, own))
        place = f"on {key[0]} at temperature {key[1]:g}"
        lines += [
            f"{_name(r)} gave {r['tokens_per_step']:.2f} tokens a pass {place}, this speculator {passes:.2f} at best."
            for r in others
            if r["tokens_per_step"] >= passes
        ]
        lines += [
            f"{_name(r)} ran at {_speedup(r):.2f}x the speed of plain decoding {place}, this speculator at "
            f"{speed:.2f}x at best."
            for r in others
            if speed and _speedup(r) >= speed
        ]
    return lines


def _speedup(result: dict[str, Any]) -> float:
    """0 where it was not timed."""
    return float((result["speed"] or {}).get("speedup") or 0)


def _name(result: dict[str, Any]) -> str:
    return f"{result['type']} with K={result['num_draft_tokens']}"


def _where(result: dict[str, Any]) -> str:
    place = f"{result['suite']} K={result['num_draft_tokens']} temperature {result['temperature']:g}"
    return f"{place} ({_speedup(result):.2f}x)"
