"""Train the speculator. Also runs under `accelerate launch`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from spec_train.data.documents import Document
from spec_train.errors import UserError
from spec_train.manifest import (
    Stage,
    canonical,
    file_sha256,
    git_revision,
    json_sha256,
    package_versions,
    read_manifest,
)
from spec_train.run import DATA_STAGES, Run
from spec_train.speculators import speculator_class
from spec_train.speculators.head_files import weights_sha256
from spec_train.stages.common import documents_of, eval_sampling, is_finished, make_stage
from spec_train.stages.features import feature_reader, feature_spec
from spec_train.stages.inputs import train_inputs

if TYPE_CHECKING:
    from spec_train.batch import Batch
    from spec_train.data.features import DocumentFeatures
    from spec_train.decoding.sampling import Sampling
    from spec_train.speculators.base import Speculator
    from spec_train.training.figures import SampledAnswers


def train(run: Run, force: bool) -> None:
    """Make the stage where needed; a training run that was interrupted resumes. Later stages depend on the best
    checkpoint's weights and configuration, and on the figures that are no times."""
    recipe = run.recipe

    def work(stage: Stage) -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]]:
        from spec_train.evaluation.validation_decode import ValidationDecode
        from spec_train.training.checkpoint import SPECULATOR_FILE
        from spec_train.training.trainer import train as train_speculator

        documents, validation = documents_of(run, "train"), documents_of(run, "validation")
        provider = feature_provider(run)
        speculator, coverage = new_speculator(run, documents, documents_of(run, "held_out"))
        section, depth = recipe.train, recipe.eval.num_draft_tokens[0]
        samplings = [eval_sampling(recipe, temperature) for temperature in recipe.eval.temperature]
        samplings = [sampling for sampling in samplings if not sampling.greedy]
        decode = ValidationDecode(
            run.target(), validation, section.decode_prompts, section.decode_new_tokens, depth, samplings
        )
        result = train_speculator(
            speculator,
            documents,
            validation,
            provider,
            optim=recipe.optim,
            train=section,
            seed=run.training_seed,
            device=recipe.run.device,
            num_draft_tokens=recipe.eval.num_draft_tokens,
            output_dir=stage.directory,
            speculator_config={
                "type": recipe.speculator.type,
                "config": asdict(speculator.config),
                "prompt": run.prompt_kwargs,
            },
            run_config=tracked_config(run, stage),
            evaluate_start=recipe.speculator.start() is not None,
            decode=decode if decode.prompts else None,
            sampled=sampled_answers(run, samplings),
        )
        best = Path(result.best_checkpoint)
        outputs = {**asdict(result), "held_out_coverage": coverage, "weights_sha256": weights_sha256(best)}
        places_and_times = ("best_checkpoint", "last_checkpoint", "seconds", "peak_memory")
        made = {
            **{key: value for key, value in outputs.items() if key not in places_and_times},
            "checkpoint": best.name,
            "speculator": file_sha256(best / SPECULATOR_FILE),
        }
        return outputs, {"documents": len(documents), "validation": len(validation)}, made

    make_stage(run, "train", train_inputs, force, work)


def tracked_config(run: Run, stage: Stage) -> dict[str, Any]:
    """What trackers show of a run: the resolved recipe, the target's identity, the manifests of the stages that made
    the data, and what this stage is made from. A user's own words (system prompt, template arguments) appear as hashes.
    """
    recipe = run.recipe.model_dump(mode="json")
    for key in ("system_prompt", "chat_template_kwargs"):
        if recipe["target"][key]:
            recipe["target"][key] = f"sha256 {json_sha256(recipe['target'][key])}"
    manifests = {
        "train": {
            "inputs_sha256": json_sha256(canonical(stage.inputs)),
            "versions": package_versions(),
            "git_revision": git_revision(),
        }
    }
    for name in DATA_STAGES:
        if is_finished(run.stage_directory(name)):  # online features leave none
            manifest = read_manifest(run.stage_directory(name))
            shown = ("inputs_sha256", "outputs_sha256", "counts", "versions", "git_revision", "finished_at")
            manifests[name] = {key: manifest[key] for key in shown}
    return {"name": run.recipe.run.name, "recipe": recipe, "target": run.target_identity, "manifests": manifests}


def feature_provider(run: Run) -> Callable[[Batch], Batch]:
    """Hidden states for a batch: from disk, or from the target in this process."""
    import torch

    from spec_train.data.batches import add_features

    recipe = run.recipe
    target = run.target()
    if recipe.features.mode == "online":
        spec, dtype = feature_spec(run, target), run.torch_dtype
        return lambda batch: target.fill_features(batch, spec, dtype)
    captured_in = recipe.responses.dtype or recipe.target.dtype
    reader, logits_dtype = feature_reader(run, captured_in), getattr(torch, captured_in)

    def read(document_id: str, input_ids: Sequence[int]) -> DocumentFeatures:
        """Stored states; computed in another precision than the captured ones, with a logsumexp of that of those."""
        stored = reader.read(document_id, input_ids)
        if stored.logits_dtype == logits_dtype:
            return stored
        assert stored.last_hidden is not None and stored.target_lse is not None
        predicts, lse = stored.target_lse != 0, torch.zeros_like(stored.target_lse)
        states = stored.last_hidden[predicts].to(target.device)
        lse[predicts] = target.logsumexp(states, logits_dtype).cpu()
        return replace(stored, target_lse=lse, logits_dtype=logits_dtype)

    return lambda batch: add_features(batch, read).to(batch.input_ids_BT.device)


def sampled_answers(run: Run, samplings: Sequence[Sampling]) -> SampledAnswers | None:
    """The one of `samplings` under which the target wrote the validation answers, with what it takes to estimate on
    them; None where they are greedy or not its own, or where evaluation samples in another way."""
    from spec_train.speculators.distillation import add_target_probs
    from spec_train.training.figures import SampledAnswers

    wrote = run.recipe.responses
    for sampling in samplings if wrote.mode == "regenerate" else ():
        filters = (sampling.temperature, sampling.top_k, sampling.top_p, sampling.min_p)
        if filters == (wrote.temperature, wrote.top_k, wrote.top_p, 0.0):
            return SampledAnswers(sampling, partial(add_target_probs, target=run.target(), sampling=sampling))
    return None


def new_speculator(run: Run, documents: list[Document], held_out: list[Document]) -> tuple[Speculator, float]:
    """The speculator as training finds it, fresh or the recipe's `start_from`, and the share of held-out response
    tokens in the vocabulary that it is confined to. Raises UserError where the start is not what the recipe asks."""
    import torch

    from spec_train.data.draft_vocab import choose_draft_vocab, coverage

    target, section = run.target(), run.recipe.speculator
    limit = section.vocab_limit()
    if limit is None:
        ids = torch.arange(target.vocab_size)
    else:
        ids = choose_draft_vocab(
            documents,
            target.vocab_size,
            limit,
            special_ids=target.eos_token_ids,
            tokenizer_len=len(run.tokenizer),
        )
    if section.start() is None:
        fresh = speculator_class(section.type).from_recipe(section, target, ids, run.training_seed)
        return fresh, coverage(held_out or documents, ids)
    from spec_train.speculators.start import start_head

    head = start_head(section, target, ids)
    drafted, deepest = head.drafted_ids(), head.max_draft_tokens
    asked = max(*run.recipe.eval.num_draft_tokens, run.recipe.export.verify_num_draft_tokens)
    if deepest is not None and asked > deepest:
        raise UserError(
            f"eval.num_draft_tokens and export.verify_num_draft_tokens ask for {asked} drafts, "
            f"speculator.start_from {section.start()} makes at most {deepest}; lower them"
        )
    return head, coverage(held_out or documents, ids if drafted is None else drafted)
