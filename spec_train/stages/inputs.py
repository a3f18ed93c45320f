"""What each stage depends on: the parts of the recipe that it reads, files, and what the stages before it made.

    prompts -> responses -> features -> train -> eval
                                          |----> export -> verify

A stage names every stage whose files it reads. Whoever asks what an earlier stage made has it checked against the
recipe on the way, and that one the stages before it: nothing is ever built on what the recipe no longer says.
"""

from __future__ import annotations

from typing import Any, Literal

from spec_train.errors import UserError
from spec_train.evaluation.suites import suite_files
from spec_train.manifest import INPUTS as INPUTS_FILE
from spec_train.manifest import file_sha256, read_manifest
from spec_train.run import Run
from spec_train.serving.contract import installed_vllm
from spec_train.stages.common import Inputs, is_finished

# What of the train section leaves the result as it is; the seed stands among the inputs by itself.
UNINVOLVED = {"trackers", "log_every", "keep_checkpoints", "seed", "decode_prompts", "decode_new_tokens"}

State = Literal["to do", "begun", "done", "stale"]


def prompts_inputs(run: Run) -> dict[str, Any]:
    """Sources and how they are split."""
    recipe = run.recipe
    return {
        "data": recipe.data.model_dump(mode="json", exclude={"max_length", "last_turn_only"}),
        "source_files": run.source_fingerprints,
        "mode": recipe.responses.mode,
        "seed": recipe.run.seed,
    }


def responses_inputs(run: Run) -> dict[str, Any]:
    """Prompts, target, and how it answers."""
    recipe = run.recipe
    return {
        "prompts": run.made_from("prompts", prompts_inputs(run)),
        "target": run.target_identity,
        "responses": recipe.responses.model_dump(mode="json", exclude={"batch_size"}),
        "target_dtype": recipe.responses.dtype or recipe.target.dtype,
        "max_length": recipe.data.max_length,
        "last_turn_only": recipe.data.last_turn_only,
        "seed": recipe.run.seed,
        # A day that was not asked for is that of the first run, whatever today is.
        **({"date": recipe.target.date} if recipe.target.date is not None and run.date is not None else {}),
    }


def features_inputs(run: Run) -> dict[str, Any]:
    """Answers, and which states of theirs are stored how."""
    recipe = run.recipe
    inputs = {
        "responses": run.made_from("responses", responses_inputs(run)),
        "mode": recipe.features.mode,
        "dtype": recipe.features.dtype,
        "aux_layer_ids": recipe.features.aux_layer_ids or recipe.speculator.feature_options().get("aux_layer_ids", []),
    }
    if recipe.features.mode == "offline":
        inputs["target_dtype"] = recipe.target.dtype
    if recipe.features.aux_layer_ids is None and recipe.speculator.feature_options():
        inputs |= run.start_identity  # it decides the layers
    return inputs


def train_inputs(run: Run) -> dict[str, Any]:
    """Answers with their states, speculator and optimisation."""
    recipe = run.recipe
    return {
        "responses": run.made_from("responses", responses_inputs(run)),
        "features": run.made_from("features", features_inputs(run)),
        "target": run.target_identity,
        "target_dtype": recipe.target.dtype,
        "speculator": recipe.speculator.model_dump(mode="json", exclude={"gradient_checkpointing"}),
        "optim": recipe.optim.model_dump(mode="json"),
        "train": recipe.train.model_dump(mode="json", exclude=UNINVOLVED),
        "num_draft_tokens": recipe.eval.num_draft_tokens,
        "seed": run.training_seed,
        **run.start_identity,
    }


def eval_inputs(run: Run) -> dict[str, Any]:
    """The checkpoint, the prompts of every suite, and how they are decoded. Prompts and answers of the run are its
    held-out suite, and what the suites' prompts are compared with."""
    recipe = run.recipe
    return {
        "prompts": run.made_from("prompts", prompts_inputs(run)),
        "responses": run.made_from("responses", responses_inputs(run)),
        "train": run.made_from("train", train_inputs(run)),
        "target": run.target_identity,
        "eval": recipe.eval.model_dump(mode="json"),
        "max_new_tokens": recipe.eval.max_new_tokens or recipe.responses.max_new_tokens,
        "seed": recipe.run.seed,
        "suite_files": _suite_fingerprints(run),
        "dtype": recipe.target.dtype,
    }


def export_inputs(run: Run) -> dict[str, Any]:
    """The checkpoint, the formats, and what the export says of its data."""
    recipe = run.recipe
    return {
        "train": run.made_from("train", train_inputs(run)),
        "formats": recipe.export.formats,
        "num_draft_tokens": recipe.export.verify_num_draft_tokens,
        "target": run.target_path,
        "target_identity": run.target_identity,
        "data": data_provenance(run),
    }


def verify_inputs(run: Run) -> dict[str, Any]:
    """The export, the checkpoint that it is compared with, the prompts, and the vLLM that is here."""
    recipe = run.recipe
    return {
        "responses": run.made_from("responses", responses_inputs(run)),
        "train": run.made_from("train", train_inputs(run)),
        "export": run.made_from("export", export_inputs(run)),
        "settings": recipe.export.model_dump(mode="json"),
        "max_new_tokens": recipe.responses.max_new_tokens,
        "vllm_version": installed_vllm() if recipe.export.vllm != "off" else None,
    }


INPUTS: dict[str, Inputs] = {
    "prompts": prompts_inputs,
    "responses": responses_inputs,
    "features": features_inputs,
    "train": train_inputs,
    "eval": eval_inputs,
    "export": export_inputs,
    "verify": verify_inputs,
}


def stage_state(run: Run, name: str) -> tuple[State, str]:
    """Where a stage stands against the recipe, and why where that is "stale": it, or a stage that it was made from, is
    not what the recipe asks for."""
    directory = run.stage_directory(name)
    if not is_finished(directory) and not (directory / INPUTS_FILE).is_file():
        return "to do", ""
    try:
        stage = run.stage(name, INPUTS[name](run))
        stage.refuse_mismatch()
    except UserError as error:
        return "stale", str(error)
    return ("done" if stage.is_current() else "begun"), ""


def data_provenance(run: Run) -> dict[str, Any]:
    """What the speculator was trained on: counts with drop reasons, and the sources' hashes in the recipe's order."""
    prompts, responses = (read_manifest(run.stage_directory(name)) for name in ("prompts", "responses"))
    dropped = {reason.split(" (first: ")[0]: n for reason, n in prompts["counts"]["dropped"].items()}  # names no file
    return {
        "prompts": {**prompts["counts"], "dropped": dropped},
        "responses": responses["counts"],
        "source_files": prompts["inputs"]["source_files"],
    }


def _suite_fingerprints(run: Run) -> dict[str, list[str]]:
    """sha256 of every local file that a suite is read from, by the suite's name."""
    names = [name for name in run.recipe.eval.suites if name != "held_out"]
    return {name: [file_sha256(file) for file in suite_files(name)] for name in names}
