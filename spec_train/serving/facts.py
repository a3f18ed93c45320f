"""What an export may say of itself in public: read from the export and the run around it, without local paths.

An export knows its method, target, recipe, training and data (`export.json`). The run around it, where it still lies
in one (`<run>/export/<format>`), adds what was measured: `<run>/eval/*.json` and `<run>/verify/report.json`. Nothing
else is read, and nothing is computed anew. What stands in neither place is unknown, and the card says so.

A local path never leaves the machine: a file counts by its name, a local target by `hub.base_model`.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from spec_train.assets import ASSET_PREFIX
from spec_train.errors import UserError
from spec_train.manifest import MANIFEST, read_manifest
from spec_train.recipe import HubSection
from spec_train.recipe_file import apply_override
from spec_train.serving.contract import path_problem
from spec_train.serving.export import is_export, read_export
from spec_train.speculators.head_files import weights_sha256

SYSTEM_PROMPT = "target.system_prompt"
BASELINES = ("ngram", "suffix", "assisted", "plain")
# What is published of an evaluation result: figures, never what was said (the vLLM backend's results hold the outputs).
RESULT_KEYS = (
    *("target", "speculator", "type", "method", "suite", "backend", "device", "dtype", "num_draft_tokens"),
    *("temperature", "top_k", "top_p", "min_p", "draft_sample_method", "rejection_sample_method", "batch_size", "seed"),
    *("num_prompts", "num_conversations", "num_output_tokens", "num_spec_steps", "num_draft_tokens_total"),
    *("num_accepted_draft_tokens", "mean_acceptance_length", "mean_acceptance_length_ci95", "tokens_per_step"),
    *("tokens_per_drafted_round", "draft_acceptance_rate", "acceptance_rate_per_position"),
    *("acceptance_rate_per_position_ci95", "conditional_acceptance_rate_per_position"),
    *("vllm_counters", "lossless", "speed", "estimate", "by_category", "versions", "tree", "recall_top_k", "overlap"),
    *("costs", "weights_sha256"),
)


@dataclass(frozen=True)
class Facts:
    """One publication. `description`: export.json with `target_id` a Hub id; `recipe`: the resolved recipe, empty where
    the export does not hold one; `license`: the card's keys license, license_name and license_link; `results`:
    evaluation results of this speculator and of the baselines beside it; `verification`: the report of this format;
    `unknown`: one line for each thing that is not known, and how to make it known."""

    repo_id: str
    description: dict[str, Any]
    recipe: dict[str, Any]
    hub: HubSection
    base_model: str | None
    license: dict[str, str]
    results: list[dict[str, Any]]
    verification: dict[str, Any] | None
    notes: str
    unknown: list[str]

    @property
    def withheld(self) -> bool:
        """Whether there is a system prompt that is not published."""
        return SYSTEM_PROMPT in self.description["provenance"].get("withheld", [])

    @property
    def own_results(self) -> list[dict[str, Any]]:
        """The results of the speculator itself."""
        return [result for result in self.results if result["type"] == self.description["type"]]


def read_facts(export_dir: Path, repo_id: str, overrides: Sequence[str] = (), results: Path | None = None) -> Facts:
    """Read an export. `overrides`: `hub.key=value` laid over the recipe that it was made with; `results`: a folder of
    evaluation results in the place of the run's own `eval`. Raises UserError."""
    stored = read_export(export_dir)
    stored_recipe = stored["provenance"].get("recipe", {})
    hub = _hub_section(stored_recipe.get("hub", {}), overrides)
    if stored["plugin"] is None and (problem := path_problem(stored["method"], repo_id)):
        raise UserError(problem.replace("rename the folder", "choose another name for the repository"))
    local = Path(stored["target_id"]).is_absolute()
    base_model = hub.base_model or (None if local else stored["target_id"])
    if base_model is None and stored["format"] != "stitched":
        raise UserError(
            f"{export_dir}: the target is a local folder, {Path(stored['target_id']).name}, which nobody else has: "
            "set hub.base_model=owner/name, its id on the Hub"
        )
    served = base_model if local else stored["target_id"]
    description = public_description(stored, served or Path(stored["target_id"]).name)
    withheld = not hub.publish_system_prompt and withhold_system_prompt(description)
    found, unknown = _read_results(export_dir, results, stored)
    verification = _read_verification(export_dir, stored["format"])
    if withheld:
        unknown.append("the system prompt, which is kept back: hub.publish_system_prompt=true publishes it")
    if verification is None:
        unknown.append("whether vLLM serves it: no finished verify stage lies beside the export")
    license_ = _license(hub, stored["target_id"])
    if not license_:
        unknown.append("the licence: set hub.license=..., an identifier of the Hub such as apache-2.0")
    for source in stored_recipe.get("data", {}).get("sources", []):
        if not source.get("license"):
            name = source.get("hub") or source.get("member") or source["path"]
            unknown.append(f"the licence of the training data {file_name(name)}: data.sources[].license of the recipe")
    return Facts(
        repo_id=repo_id,
        description=description,
        recipe=description["provenance"].get("recipe", {}),
        hub=hub,
        base_model=base_model,
        license=license_,
        results=found,
        verification=verification,
        notes=card_notes(hub) or stored["provenance"].get("notes", ""),
        unknown=unknown,
    )


def public_recipe(recipe: dict[str, Any], target: str | None = None) -> dict[str, Any]:
    """A resolved recipe (as JSON) without places on this machine. Files count by their names, to be put beside the
    recipe; `target`: what stands in the place of target.model."""
    recipe = copy.deepcopy(recipe)
    recipe["run"].update(output_dir=f"runs/{recipe['run']['name']}", data_dir=None)
    section = recipe["target"]
    if target is not None and section["model"] is not None:
        section["model"] = target
    for key in ("model", "tokenizer"):
        if section.get(key) and _is_place(section[key]):
            section[key] = Path(section[key]).name
    if section.get("chat_template"):
        section["chat_template"] = file_name(section["chat_template"])
    for source in recipe["data"]["sources"]:
        if source.get("path"):
            source["path"] = file_name(source["path"])
    recipe["eval"]["suites"] = [file_name(suite) for suite in recipe["eval"]["suites"]]
    for key, value in recipe["speculator"].items():  # the checkpoint that it starts from, as a method calls it
        if isinstance(value, str) and "/" in value and _is_place(value):
            recipe["speculator"][key] = Path(value).name
    if "hub" in recipe:
        recipe["hub"]["card_notes"] = None  # the card has them
    return recipe


def public_description(description: dict[str, Any], target: str) -> dict[str, Any]:
    """export.json without places on this machine; `target`: the target's Hub id."""
    description = copy.deepcopy(description)
    local = Path(description["target_id"]).is_absolute()
    if local:
        description["target_id"] = target
    provenance = description["provenance"]
    if "recipe" in provenance:
        provenance["recipe"] = public_recipe(provenance["recipe"], target if local else None)
    if _is_place(provenance.get("target", {}).get("name", "")):
        provenance["target"]["name"] = Path(provenance["target"]["name"]).name
    return description


def withhold_system_prompt(description: dict[str, Any]) -> bool:
    """Take the system prompt out of an export.json, in place, and note that it is not there; False where there is
    none."""
    target = description["provenance"].get("recipe", {}).get("target", {})
    if not target.get("system_prompt"):
        return False
    del target["system_prompt"]
    description["provenance"]["withheld"] = [SYSTEM_PROMPT]
    return True


def public_result(result: dict[str, Any], target: str) -> dict[str, Any]:
    """An evaluation result without places on this machine, and without text or names of the user's own rows."""
    result = copy.deepcopy({key: result[key] for key in RESULT_KEYS if key in result})
    result["suite"] = Path(result["suite"]).stem
    result["speculator"] = file_name(result["speculator"])
    if _is_place(result["target"]):
        result["target"] = target
    if result.get("overlap"):
        del result["overlap"]["ids"]
    if (result.get("lossless") or {}).get("first_divergence"):
        del result["lossless"]["first_divergence"]["id"]
    return result


def file_name(path: str) -> str:
    """The last part of a path; bundled files (`asset:`) stay as they are."""
    return path if path.startswith(ASSET_PREFIX) else Path(path).name


def _is_place(name: str) -> bool:
    """Whether a model's name is a folder here and not an id on the Hub."""
    return bool(name) and (Path(name).is_absolute() or name.startswith((".", "~")) or Path(name).exists())


def _hub_section(stored: dict[str, Any], overrides: Sequence[str]) -> HubSection:
    fields = {"hub": copy.deepcopy(stored)}
    for override in overrides:
        if not override.startswith("hub."):
            raise UserError(f"override {override.partition('=')[0]}: only hub.* can still be set for an export")
        apply_override(fields, override)
    try:
        return HubSection.model_validate(fields["hub"])
    except ValidationError as error:
        first = error.errors()[0]
        raise UserError(f"hub.{'.'.join(map(str, first['loc']))}: {first['msg']}; see docs/recipe.md") from None


def _read_results(
    export_dir: Path, folder: Path | None, stored: dict[str, Any]
) -> tuple[list[dict[str, Any]], list[str]]:
    """(results of this speculator and its baselines, what is unknown)."""
    run = export_dir.absolute().parent.parent
    if folder is not None:
        files = [folder] if folder.is_file() else sorted(folder.glob("*.json"))
    elif not (run / "eval" / MANIFEST).is_file():
        return [], ["the acceptance: no finished evaluation lies beside the export (spec-train eval, or --results)"]
    else:
        files = [run / "eval" / name for name in read_manifest(run / "eval")["outputs"]["results"]]
    measured = [
        (file, result)
        for file in files
        for result in _rows(file)
        if isinstance(result, dict) and "mean_acceptance_length_ci95" in result and result["backend"] != "server"
        if _belongs(result["type"], stored["type"])
    ]
    own = [(file, result) for file, result in measured if result["type"] in (stored["type"], "assisted")]
    older = next((file for file, result in own if result.get("weights_sha256") is None), None)
    if older is not None and folder is None:
        return [], [
            f"the acceptance: {older} does not say of which weights it is (an older spec-train); evaluate again"
        ]
    _refuse_other_weights(own, export_dir, stored)
    target = Path(public_description(stored, stored["target_id"])["target_id"]).name
    found = [public_result(result, target) for _, result in measured]
    if not any(result["type"] == stored["type"] for result in found):
        return [], [f"the acceptance: {folder} holds no evaluation result of type {stored['type']}"]
    found.sort(
        key=lambda r: (r["suite"], r["temperature"], r["type"] != stored["type"], r["type"], r["num_draft_tokens"])
    )
    return found, []


def _refuse_other_weights(own: Sequence[tuple[Path, dict[str, Any]]], export_dir: Path, stored: dict[str, Any]) -> None:
    """Raise UserError where a result is not of the weights that the export holds: those of the checkpoint that it was
    written from, or its own files, or those of its other formats."""
    origin = stored["provenance"].get("weights_sha256")
    known = {origin} - {None}
    if any(result.get("weights_sha256") not in known for _, result in own):
        known.add(weights_sha256(export_dir))
        for other in export_dir.absolute().parent.iterdir() if origin is not None else ():
            if is_export(other) and read_export(other)["provenance"].get("weights_sha256") == origin:
                known.add(weights_sha256(other))
    trained = export_dir.absolute().parent.parent / "train"
    newest = read_manifest(trained)["outputs"].get("weights_sha256") if (trained / MANIFEST).is_file() else None
    for file, result in own:
        measured = result.get("weights_sha256")
        if measured not in known:
            stale = "export" if measured is not None and measured == newest else "eval"
            raise UserError(
                f"{file}: its figures are not of the weights in {export_dir}"
                f"{'' if measured is not None else ', or do not say of which'}; "
                f"`spec-train run RECIPE --force {stale}` makes both agree, or give results of this export (--results)"
            )


def _rows(file: Path) -> list[Any]:
    """The results in a file, one or a list, among whatever else may be in it."""
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UserError(f"{file}: not readable as an evaluation result ({error}); run spec-train eval") from None
    return content if isinstance(content, list) else [content]


def _belongs(kind: str, own: str) -> bool:
    """Whether a result is of the speculator, of what it started from, or of a baseline."""
    return kind in (own, f"{own} untrained", f"{own} start") or kind.split()[0] in BASELINES


def _read_verification(export_dir: Path, format: str) -> dict[str, Any] | None:
    """The report on this format, where the run's verify stage has one. Raises UserError where it is of another export
    than the one that lies there now."""
    run = export_dir.absolute().parent.parent
    stages = [run / name for name in ("export", "verify")]
    if not all((stage / MANIFEST).is_file() for stage in stages):
        return None
    exported, verified = (read_manifest(stage) for stage in stages)
    if "outputs_sha256" not in exported:
        return None  # made by an older spec-train: nobody knows whether it is what was proved
    if verified["inputs"].get("export") != exported["outputs_sha256"]:
        raise UserError(
            f"{run / 'verify'}: proved another export than {export_dir}; `spec-train run RECIPE --force verify` proves "
            "this one"
        )
    reports = json.loads((run / "verify" / "report.json").read_text(encoding="utf-8"))
    return next((report for report in reports if report["format"] == format), None)


def _license(hub: HubSection, target_id: str) -> dict[str, str]:
    """The licence keys of the card: the recipe's, else those that the target's own card states; empty if neither."""
    keys = ("license", "license_name", "license_link")
    if hub.license is not None:
        return {key: value for key in keys if (value := getattr(hub, key)) is not None}
    readme = Path(target_id) / "README.md"
    if not readme.is_file():
        return {}
    from huggingface_hub import metadata_load

    try:
        stated = metadata_load(readme) or {}
    except ValueError:
        return {}
    return {key: stated[key] for key in keys if isinstance(stated.get(key), str)} if "license" in stated else {}


def card_notes(hub: HubSection) -> str:
    """The words of one's own for the card, "" for none. Raises UserError."""
    if hub.card_notes is None:
        return ""
    try:
        return Path(hub.card_notes).expanduser().read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"hub.card_notes {hub.card_notes}: cannot be read ({error}); give a Markdown file") from None
