"""Where a draft language model starts: layers of the target, a model with the same tokenizer, or a fresh small shape.

A draft always has as many embedding rows as the target has: vLLM loads no other. Rows beyond the tokenizer are padding.
A padded row of the output head is the mean of the real rows, so its logit is the mean of theirs and never the largest:
neither we nor an engine that knows nothing of padding can draft such an id greedily.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from pydantic import Field, model_validator
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from spec_train.data.chat import check_same_tokenizer, check_tokenizer_fits
from spec_train.errors import UserError
from spec_train.recipe import PositiveInt, Section, SpeculatorOptions
from spec_train.speculators.layers import MLP_WIDTHS, mlp_width
from spec_train.speculators.losses import LossKind
from spec_train.target import TargetModel, attention_of
from spec_train.weights import load_whole


class DraftShape(Section):
    """A fresh model of the target's family. Null takes the target's size, or what follows from `hidden_size`."""

    num_layers: PositiveInt
    hidden_size: PositiveInt | None = None
    intermediate_size: PositiveInt | None = None
    num_attention_heads: PositiveInt | None = None
    num_key_value_heads: PositiveInt | None = None
    head_dim: PositiveInt | None = None


class LoraSection(Section):
    """Low-rank adapters on frozen weights, merged at export. `target_modules`: names that peft understands."""

    rank: PositiveInt = 16
    alpha: float = Field(default=32.0, gt=0)
    target_modules: list[str] | Literal["all-linear"] = "all-linear"


class DraftLMOptions(SpeculatorOptions):
    """A draft language model. It starts from exactly one of `start_model` (a checkpoint with the target's tokenizer),
    `start_layers` (that many layers of the target, or their ids) and `shape` (a fresh model).

    `train_embeddings` null trains embedding and head unless they are the target's own, which layers of the target and
    a fresh model of the target's width share. `on_policy_fraction`: share of documents whose answer the draft writes
    itself in every step, held against the target's laws there.
    """

    type: Literal["draft_lm"]
    start_model: str | None = None
    start_layers: PositiveInt | list[int] | None = None
    layer_choice: Literal["evenly", "first_last"] = "evenly"
    shape: DraftShape | None = None
    train_embeddings: bool | None = None
    lora: LoraSection | None = None
    loss: LossKind = "kl"
    jsd_beta: float = Field(default=0.5, gt=0, lt=1)
    lk_eta: float = Field(default=3.0, gt=0)
    temperature: float = Field(default=1.0, gt=0)
    loss_vocab_size: PositiveInt | None = None
    on_policy_fraction: float = Field(default=0.0, ge=0, lt=1)
    gradient_checkpointing: bool = False

    @model_validator(mode="after")
    def _one_start(self) -> DraftLMOptions:
        given = [name for name in ("start_model", "start_layers", "shape") if getattr(self, name) is not None]
        if len(given) != 1:
            raise ValueError(f"give exactly one of start_model, start_layers and shape, got {given or 'none'}")
        if self.start_layers == []:
            raise ValueError("start_layers must name at least one layer")
        if self.lora is not None and self.train_embeddings:
            raise ValueError("lora leaves the embedding frozen: remove train_embeddings, or lora")
        if self.lora is not None and self.shape is not None:
            raise ValueError("lora adapts trained weights and a fresh shape has none: remove lora")
        return self

    def vocab_limit(self) -> int | None:
        """See `SpeculatorOptions.vocab_limit`."""
        return self.loss_vocab_size

    def start_is_baseline(self) -> bool:
        """See `SpeculatorOptions.start_is_baseline`: distillation does not always help."""
        return True


@dataclass(frozen=True)
class DraftLMConfig:
    """What rebuilds a draft; saved beside every checkpoint.

    model              config.json of the bare model, with the target's number of rows
    real_vocab_size    ids below this one are drafted, those above are padding
    borrows            embedding and head are the target's own and not saved
    train_embeddings   they are trained
    lora               rank, alpha and target modules, None where all weights are trained
    """

    model: dict[str, Any]
    real_vocab_size: int
    borrows: bool
    train_embeddings: bool
    lora: dict[str, Any] | None = None
    loss: LossKind = "kl"
    jsd_beta: float = 0.5
    lk_eta: float = 3.0
    temperature: float = 1.0
    on_policy_fraction: float = 0.0
    gradient_checkpointing: bool = False


def draft_config(options: Any, model: Any, target: TargetModel) -> DraftLMConfig:
    """Geometry from the model, the rest from the recipe. Raises UserError where fresh embeddings would stay random."""
    own_width = int(model.config.hidden_size) != target.hidden_size
    borrows = options.start_model is None and not own_width and not options.train_embeddings
    if options.shape is not None and own_width and options.train_embeddings is False:
        raise UserError(
            "speculator.train_embeddings is false but speculator.shape has another width than the target, whose "
            "embedding does not fit: remove one of the two"
        )
    return DraftLMConfig(
        model=model_config(model.config),
        real_vocab_size=real_vocab_size(target),
        borrows=borrows,
        train_embeddings=not borrows and options.train_embeddings is not False and options.lora is None,
        lora=None if options.lora is None else options.lora.model_dump(),
        loss=options.loss,
        jsd_beta=options.jsd_beta,
        lk_eta=options.lk_eta,
        temperature=options.temperature,
        on_policy_fraction=options.on_policy_fraction,
        gradient_checkpointing=options.gradient_checkpointing,
    )


def start(options: Any, target: TargetModel) -> Any:
    """The model that the recipe starts from, see `DraftLMOptions`: float32, on the CPU, with the target's rows.

    A model of the target's width begins with the target's embedding and head.
    """
    if options.start_model is not None:
        return start_from_model(options.start_model, target)
    if options.shape is not None:
        model = build_model(shaped(target, options.shape))
    else:
        model = start_from_layers(target, chosen_layers(options, target))
    if int(model.config.hidden_size) == target.hidden_size:
        with torch.no_grad():
            model.get_input_embeddings().weight.copy_(target.embedding.weight.float())
            model.get_output_embeddings().weight.copy_(target.lm_head.weight.float())
    return model


def start_outline(options: Any, target: TargetModel) -> TargetModel | None:
    """The draft that `start` would build, without weights; None for a `start_model`, which is not read here. Raises
    UserError where it could not be built."""
    if options.start_model is not None:
        return None
    ids = None if options.shape is not None else chosen_layers(options, target)
    with torch.device("meta"):
        model = build_model(shaped(target, options.shape) if ids is None else cut_layers(target, ids))
    body = TargetModel(model, "of the draft", torch.device("meta"))
    if ids is not None:
        layer_sources(target, body, ids)
    return body


def build_model(config: dict[str, Any]) -> Any:
    """A causal language model of a config.json, float32, on the CPU, freshly initialised from torch's generator."""
    settings = {key: value for key, value in config.items() if key not in {"model_type", "quantization_config"}}
    try:
        parsed: Any = AutoConfig.for_model(config["model_type"], **settings)
    except (KeyError, ValueError):
        raise UserError(
            f"a draft of model_type {config.get('model_type')!r} is not known to the installed transformers; "
            "give a causal language model that it supports"
        ) from None
    return AutoModelForCausalLM.from_config(parsed, dtype=torch.float32, attn_implementation=attention_of(parsed))


def model_config(config: Any) -> dict[str, Any]:
    """A Transformers config as plain JSON, without what belongs to one process or one file."""
    out: dict[str, Any] = config.to_dict()
    for name in ("_name_or_path", "transformers_version", "dtype", "torch_dtype", "quantization_config"):
        out.pop(name, None)
    return out


# ------------------------------------------------------------------------------------------ layers of the target
def chosen_layers(options: Any, target: TargetModel) -> list[int]:
    """The ids that `speculator.start_layers` stands for. Raises UserError where the target does not have them."""
    ids: int | list[int] = options.start_layers
    if isinstance(ids, int):
        return choose_layers(ids, options.layer_choice, target.num_layers)
    if len(set(ids)) != len(ids) or min(ids) < 0 or max(ids) >= target.num_layers:
        raise UserError(
            f"speculator.start_layers {ids}: ids must be distinct and lie in 0..{target.num_layers - 1}, the layers of "
            "the target"
        )
    return ids


def choose_layers(count: int, choice: Literal["evenly", "first_last"], available: int) -> list[int]:
    """Ids of `count` layers out of `available`: evenly spaced from the first to the last, or from both ends.

    Raises UserError where there are not so many.
    """
    if not 1 <= count <= available:
        raise UserError(f"speculator.start_layers {count}: the target has {available} layers; give 1 to {available}")
    if choice == "first_last":
        first = (count + 1) // 2
        return [*range(first), *range(available - (count - first), available)]
    return [round(i * (available - 1) / max(1, count - 1)) for i in range(count)]


def start_from_layers(target: TargetModel, ids: list[int]) -> Any:
    """A model of the chosen layers of `target`, in the given order, with its final norm; embedding and head are random.
    Raises UserError for weights that cannot be copied."""
    model = build_model(cut_layers(target, ids))
    body = TargetModel(model, "draft", torch.device("cpu"))
    with torch.no_grad():
        for parameter, source in layer_sources(target, body, ids):
            parameter.copy_(source.float())
    return model


def layer_sources(target: TargetModel, body: TargetModel, ids: list[int]) -> list[tuple[Tensor, Tensor]]:
    """(parameter of `body`, a model of the layers `ids`; the parameter of `target` that it starts as), but for the
    embedding. Raises UserError where the target has none of that shape."""
    sources = dict(target.decoder.named_parameters())
    stack = next(name for name, module in target.decoder.named_modules() if module is target.layers)
    pairs = []
    for name, parameter in body.decoder.named_parameters():
        if parameter is body.embedding.weight:
            continue
        source = name
        if name.startswith(f"{stack}."):
            number, rest = name.removeprefix(f"{stack}.").split(".", 1)
            source = f"{stack}.{ids[int(number)]}.{rest}"
        found = sources.get(source)
        if found is None or found.shape != parameter.shape:
            raise UserError(
                f"speculator.start_layers: {source} of the target cannot be copied (quantised weights cannot, nor "
                f"layers that {target.config.model_type} would build in another form at their new place); start from "
                "speculator.start_model or speculator.shape"
            )
        pairs.append((parameter, found))
    return pairs


def cut_layers(target: TargetModel, ids: list[int]) -> dict[str, Any]:
    """The target's (text) config with the layers `ids` alone: everything that is listed by layer is cut to them."""
    config = copy.deepcopy(model_config(target.config))
    for name, value in config.items():
        if isinstance(value, list) and len(value) == target.num_layers:
            config[name] = [value[i] for i in ids]
    # Mixtures of experts name or count the layers that are dense.
    if config.get("mlp_only_layers"):
        config["mlp_only_layers"] = [new for new, old in enumerate(ids) if old in config["mlp_only_layers"]]
    if config.get("first_k_dense_replace"):
        config["first_k_dense_replace"] = sum(i < config["first_k_dense_replace"] for i in ids)
    head, embedding = target.lm_head.weight, target.embedding.weight
    tied = head is embedding or (head.data_ptr() == embedding.data_ptr() != 0)  # 0: an outline
    config[named(target, "num_hidden_layers")] = len(ids)
    config.update(vocab_size=target.vocab_size, tie_word_embeddings=tied)
    return config


def named(target: TargetModel, name: str) -> str:
    """What the target's family calls an entry of its config."""
    return str(target.config.attribute_map.get(name, name))


def shaped(target: TargetModel, shape: DraftShape) -> dict[str, Any]:
    """The config of a fresh model of the target's family and vocabulary. Raises UserError where heads do not divide."""
    kept = choose_layers(min(shape.num_layers, target.num_layers), "evenly", target.num_layers)
    config = cut_layers(target, [kept[min(i, len(kept) - 1)] for i in range(shape.num_layers)])
    heads, width = int(target.config.num_attention_heads), target.hidden_size
    dim = shape.head_dim or int(config.get("head_dim") or width // heads)
    mlp = next((name for name in MLP_WIDTHS if name in config), MLP_WIDTHS[0])
    inner = mlp_width(target)
    if shape.hidden_size is not None and shape.hidden_size != width:
        heads = max(1, shape.hidden_size // dim)
        config[named(target, "hidden_size")] = shape.hidden_size
        if "word_embed_proj_dim" in config:
            config["word_embed_proj_dim"] = shape.hidden_size
        inner = max(1, round(inner * shape.hidden_size / width))
    heads = shape.num_attention_heads or heads
    groups = shape.num_key_value_heads or min(int(config.get("num_key_value_heads") or heads), heads)
    if shape.num_key_value_heads is None and heads % groups:
        groups = heads
    if heads % groups:
        raise UserError(f"speculator.shape: {heads} attention heads are not a multiple of {groups} key/value heads")
    config[named(target, "num_attention_heads")] = heads
    config.update({"num_key_value_heads": groups, "head_dim": dim, mlp: shape.intermediate_size or inner})
    return config


# ------------------------------------------------------------------------------------------ another model
def start_from_model(name: str, target: TargetModel) -> Any:
    """A pretrained model, its embedding cut or padded to the target's rows. Raises UserError where it cannot be loaded
    whole or speaks another vocabulary."""
    try:
        config = model_config(AutoConfig.from_pretrained(name).get_text_config())
        model: Any = load_whole(AutoModelForCausalLM, name, f"speculator.start_model {name}", dtype=torch.float32)
    except (OSError, ValueError) as error:
        first = str(error).strip().splitlines()[0]
        raise UserError(
            f"speculator.start_model {name}: cannot be loaded ({first}); give a local folder or a reachable hub id"
        ) from error
    own, theirs = tokenizer_of(name), tokenizer_of(target.name)
    if own is not None and theirs is not None:
        check_same_tokenizer(own, theirs, (f"speculator.start_model {name}", f"target {target.name}"))
    source: Any = model.get_output_embeddings()
    rows = int(source.weight.shape[0])
    real = rows if own is None else max(own.get_vocab().values()) + 1
    if real > target.vocab_size or (own is None and rows != target.vocab_size):
        raise UserError(
            f"speculator.start_model {name}: {rows} embedding rows and the target has {target.vocab_size}; they may "
            "differ by padding only, and the folder must hold the tokenizer to tell padding by"
        )
    config["vocab_size"] = target.vocab_size
    tied = source.weight.data_ptr() == model.get_input_embeddings().weight.data_ptr()
    config["tie_word_embeddings"] = tied
    fresh = build_model(config)
    tensors, wanted = dict(model.state_dict()), fresh.state_dict()
    if lost := sorted(wanted.keys() - tensors.keys()):
        raise UserError(
            f"speculator.start_model {name}: has no {lost[0]} (and {len(lost) - 1} more of its language model's "
            "tensors); give a checkpoint of the language model alone"
        )
    for tensor_name, value in wanted.items():
        loaded = tensors[tensor_name]
        if loaded.shape != value.shape:  # embedding and head, by nothing but rows
            loaded = with_rows(loaded, value.shape[0], min(real, rows))
        with torch.no_grad():
            value.copy_(loaded)
    return fresh


def tokenizer_of(name: str) -> Any | None:
    """The tokenizer beside a model, None where there is none to be had."""
    if Path(name).is_dir() and not (Path(name) / "tokenizer_config.json").is_file():
        return None
    try:
        return AutoTokenizer.from_pretrained(name)
    except (OSError, ValueError):
        return None


def real_vocab_size(target: TargetModel) -> int:
    """Ids below this one may be drafted; those above it are padding. All of them where the tokenizer is unknown."""
    tokenizer = tokenizer_of(target.name)
    if tokenizer is None:
        return target.vocab_size
    check_tokenizer_fits(tokenizer, target.vocab_size)
    return int(max(tokenizer.get_vocab().values())) + 1


def with_rows(weight: Tensor, rows: int, real: int) -> Tensor:
    """`weight` [any, H] as [rows, H]: its first `real` rows, then their mean."""
    mean = weight[:real].float().mean(0, keepdim=True).to(weight.dtype)
    return torch.cat([weight[:real], mean.expand(rows - real, -1)])


def lend(module: nn.Module, weight: Tensor) -> None:
    """Make `weight` the weight of an embedding or a linear layer, as a buffer that is neither trained nor saved."""
    if "weight" in module._parameters:
        del module._parameters["weight"]
        module.register_buffer("weight", weight, persistent=False)
    else:
        module.weight = weight
