"""Train the speculator. Also runs under `accelerate launch`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from spec_train.data.documents import Document
from spec_train.manifest import Stage
from spec_train.run import Run
from spec_train.speculators import speculator_class
from spec_train.stages.common import documents_of, make_stage
from spec_train.stages.features import feature_reader, feature_spec

if TYPE_CHECKING:
    from spec_train.batch import Batch
    from spec_train.speculators.base import Speculator


# What of the train section leaves the result as it is; the seed stands among the inputs by itself.
UNINVOLVED = {"trackers", "log_every", "keep_checkpoints", "seed", "decode_prompts", "decode_new_tokens"}


def train(run: Run, force: bool) -> None:
    """Make the stage where needed; a training run that was interrupted resumes."""
    recipe = run.recipe
    inputs = {
        "features": run.made_from("features"),
        "target": run.target_identity,
        "target_dtype": recipe.target.dtype,
        "speculator": recipe.speculator.model_dump(mode="json", exclude={"gradient_checkpointing"}),
        "optim": recipe.optim.model_dump(mode="json"),
        "train": recipe.train.model_dump(mode="json", exclude=UNINVOLVED),
        "num_draft_tokens": recipe.eval.num_draft_tokens,
        "seed": run.training_seed,
    }

    def work(stage: Stage) -> tuple[dict[str, Any], dict[str, Any]]:
        from spec_train.evaluation.held_out_decode import HeldOutDecode
        from spec_train.training.trainer import train as train_speculator

        documents, held_out = documents_of(run, "train"), documents_of(run, "held_out")
        provider = feature_provider(run)
        speculator, coverage = new_speculator(run, documents, held_out)
        section, depth = recipe.train, recipe.eval.num_draft_tokens[0]
        decode = HeldOutDecode(run.target(), held_out, section.decode_prompts, section.decode_new_tokens, depth)
        result = train_speculator(
            speculator,
            documents,
            held_out,
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
            run_config=recipe.model_dump(mode="json"),
            decode=decode if decode.prompts else None,
        )
        return {**asdict(result), "held_out_coverage": coverage}, {
            "documents": len(documents),
            "held_out": len(held_out),
        }

    make_stage(run, "train", inputs, force, work)


def feature_provider(run: Run) -> Callable[[Batch], Batch]:
    """Hidden states for a batch: from disk, or from the target in this process."""
    from spec_train.data.batches import add_features

    recipe = run.recipe
    target = run.target()
    if recipe.features.mode == "online":
        spec, dtype = feature_spec(run, target), run.torch_dtype
        return lambda batch: target.fill_features(batch, spec, dtype)
    reader = feature_reader(run, recipe.responses.dtype or recipe.target.dtype)
    return lambda batch: add_features(batch, reader.read).to(batch.input_ids_BT.device)


def new_speculator(run: Run, documents: list[Document], held_out: list[Document]) -> tuple[Speculator, float]:
    """A fresh speculator, and the share of held-out response tokens in the vocabulary that it is confined to."""
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
    fresh = speculator_class(section.type).from_recipe(section, target, ids, run.training_seed)
    return fresh, coverage(held_out or documents, ids)
