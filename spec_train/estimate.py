"""What a run will need, before anything is loaded: the target's size out of its config, rows and tokens out of the
recipe, bytes of hidden states. Upper bounds where the answers do not exist yet.
"""

from __future__ import annotations

from dataclasses import dataclass

from spec_train.data.chat import check_tokenizer_fits
from spec_train.data.features import bytes_per_position
from spec_train.errors import UserError
from spec_train.run import Run

DEFAULT_AUX_LAYERS = 3  # what EAGLE-3 reads where the recipe names no layers


@dataclass(frozen=True)
class TargetFacts:
    """A target as its config describes it. `weight_bytes`: of all its weights in target.dtype; a checkpoint that is
    quantised may take less. `switch`: where LongRoPE changes its factors, see long_rope.py."""

    family: str
    parameters: int
    weight_bytes: int
    hidden_size: int
    layers: int
    vocab_size: int
    max_length: int
    quantised: bool
    switch: int | None = None


def target_facts(run: Run) -> TargetFacts:
    """Reads config.json and builds the model without memory for its weights. Raises UserError where the target is not
    reachable, is no language model that we can run, is none that the recipe's speculator can be trained beside, or has
    another tokenizer than the recipe's."""
    import torch
    from transformers import AutoConfig

    from spec_train.speculators import speculator_class
    from spec_train.target import know_mimo, outline

    section, name = run.recipe.target, run.target_path
    know_mimo()
    try:
        config = AutoConfig.from_pretrained(name, revision=section.revision if section.model else None)
    except (OSError, ValueError) as error:
        raise UserError(
            f"target {name}: its config cannot be read ({str(error).splitlines()[0]}); "
            "give a local folder or a reachable hub id"
        ) from None
    dtype = getattr(torch, section.dtype)
    quantised = getattr(config, "quantization_config", None) is not None
    target = outline(config, name)
    speculator_class(run.recipe.speculator.type).check_target(run.recipe.speculator, target)
    parameters = sum(parameter.numel() for parameter in target.model.parameters())
    check_tokenizer_fits(run.tokenizer, target.vocab_size)
    return TargetFacts(
        family=str(config.model_type),
        parameters=parameters,
        weight_bytes=parameters * int(dtype.itemsize),
        hidden_size=target.hidden_size,
        layers=target.num_layers,
        vocab_size=target.vocab_size,
        max_length=target.max_length,
        quantised=quantised,
        switch=target.switch,
    )


def state_bytes(run: Run, hidden_size: int) -> int:
    """Bytes of hidden states for one position of this run, in features.dtype."""
    recipe = run.recipe
    options = recipe.speculator.feature_options()
    layers = recipe.features.aux_layer_ids or options.get("aux_layer_ids") or []
    count = len(layers) or (DEFAULT_AUX_LAYERS if "aux_layer_ids" in options else 0)
    return bytes_per_position(count, hidden_size, recipe.features.dtype)


def answer_tokens(run: Run, conversations: int) -> int:
    """At most so many tokens the target will write, one turn a conversation."""
    section = run.recipe.responses
    return conversations * min(section.max_new_tokens, run.recipe.data.max_length)


def size(count: float) -> str:
    """Bytes for people."""
    for unit in ("B", "KB", "MB", "GB"):
        if count < 1000:
            return f"{count:.0f} {unit}" if unit in ("B", "KB") else f"{count:.1f} {unit}"
        count /= 1000
    return f"{count:.1f} TB"
