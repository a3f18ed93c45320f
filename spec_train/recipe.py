"""The recipe: one YAML file that describes a whole run. This is the only place where a run is validated.

`load_recipe` reads the file, applies `section.key=value` overrides and checks everything that can be checked without
loading a model. Whatever is wrong ends in a UserError of one line: the file, the dotted key, what is wrong, and the
nearest known key where there is one.
"""

from __future__ import annotations

import datetime
import difflib
import hashlib
import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Generic, Literal, Self, cast

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator
from typing_extensions import TypeVar

from spec_train.errors import UserError
from spec_train.recipe_file import apply_override, dump_yaml, find_recipe, parse_yaml, refuse_secrets, resolve_paths

Dtype = Literal["float32", "bfloat16", "float16"]
PositiveInt = Annotated[int, Field(gt=0)]
Probability = Annotated[float, Field(gt=0, le=1)]
NonNegative = Annotated[float, Field(ge=0)]

BUNDLED_SUITES = (
    *("held_out", "gsm8k", "humaneval", "mt_bench", "vicuna", "ifbench", "json", "repetitive"),
    *("xsum", "translation", "rag", "qa", "spec_bench"),
)


class Section(BaseModel):
    """Base of all sections: unknown keys, loose types, NaN and later assignment are refused."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False, protected_namespaces=())


class RunSection(Section):
    """Name, place and seed of a run. Prompts, responses and features live in `data_dir` (null: `output_dir`); runs that
    name the same one share them."""

    name: str = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")
    output_dir: str = Field(default_factory=lambda fields: f"runs/{fields.get('name')}")
    data_dir: str | None = None
    seed: int = Field(default=0, ge=0, lt=2**32)
    device: Literal["auto", "cpu", "cuda"] = "auto"

    @model_validator(mode="before")
    @classmethod
    def _null_means_default(cls, fields: Any) -> Any:
        if isinstance(fields, dict) and fields.get("output_dir", "") is None:
            return {key: value for key, value in fields.items() if key != "output_dir"}
        return fields


class TargetSection(Section):
    """The frozen model that is accelerated, and how it is prompted."""

    model: str | None = None
    package: str | None = None
    member: str | None = None
    sha256: str | None = Field(default=None, pattern=r"^[0-9a-f]{64}$")
    revision: str | None = None
    dtype: Dtype = "float32"
    tokenizer: str | None = None
    chat_template: str | None = None
    chat_template_kwargs: dict[str, Any] = {}
    system_prompt: str | None = None
    date: str | None = None
    attn_implementation: str | None = None

    @field_validator("date")
    @classmethod
    def _is_a_day(cls, date: str | None) -> str | None:
        if date is not None and not re.fullmatch(r"\d{4}-\d{2}-\d{2}", date):
            raise ValueError(f"must be a day like 2026-01-31, got {date!r}")
        if date is not None:
            datetime.date.fromisoformat(date)
        return date

    @model_validator(mode="after")
    def _one_origin(self) -> Self:
        if (self.model is None) == (self.package is None):
            raise ValueError("needs exactly one of model (a folder or hub id) and package; set the other to null")
        _check_package(self.package, self.member, self.sha256)
        return self


class Source(Section):
    """One source of conversations or prompts: exactly one of path, hub, package."""

    path: str | None = None
    hub: str | None = None
    package: str | None = None
    member: str | None = None
    sha256: str | None = Field(default=None, pattern=r"^[0-9a-f]{64}$")
    split: str = "train"
    format: Literal["auto", "messages", "sharegpt", "prompt", "text"] = "auto"
    field: str | None = None
    limit: PositiveInt | None = None
    weight: float = Field(default=1.0, gt=0)
    category: str | None = None
    license: str | None = None

    @model_validator(mode="after")
    def _one_origin(self) -> Self:
        if sum(origin is not None for origin in (self.path, self.hub, self.package)) != 1:
            raise ValueError("needs exactly one of path, hub and package")
        _check_package(self.package, self.member, self.sha256)
        return self


class DataSection(Section):
    """Where prompts come from and how they are cut. `held_out` and `validation`: a fraction below 1, or a count of
    conversations. Results are reported on the first; the second, out of the others, decides which checkpoint is best.
    """

    sources: list[Source] = Field(min_length=1)
    max_length: int = Field(default=2048, ge=8)
    held_out: float | int = 0.05
    validation: float | int = 0.02
    last_turn_only: bool = False
    max_drop_rate: float = Field(default=0.5, ge=0, le=1)

    @field_validator("held_out", "validation")
    @classmethod
    def _fraction_or_count(cls, value: float) -> float:
        if value < 0 or (isinstance(value, float) and value >= 1):
            raise ValueError(f"must be a fraction from 0 to below 1 or a whole number of conversations, got {value}")
        return value


class ResponsesSection(Section):
    """How the target answers the prompts. `dtype` null means target.dtype."""

    mode: Literal["regenerate", "keep"] = "regenerate"
    backend: Literal["hf"] = "hf"
    max_new_tokens: PositiveInt = 256
    temperature: NonNegative = 0.0
    top_k: int = Field(default=0, ge=0)
    top_p: Probability = 1.0
    batch_size: PositiveInt = 32
    dtype: Dtype | None = None


class FeaturesSection(Section):
    """Where hidden states come from: the target in the training process, or a store on disk. `aux_layer_ids`: layers
    to store (null: those that the speculator reads); a wider choice serves several methods."""

    mode: Literal["online", "offline"] = "online"
    dtype: Dtype = "bfloat16"
    capture: bool = True
    aux_layer_ids: list[Annotated[int, Field(ge=0)]] | None = None


class SpeculatorOptions(Section):
    """Base of every method's options, which live beside the method in `speculators/<type>.py`."""

    type: str

    def vocab_limit(self) -> int | None:
        """How many target tokens the head, or its loss, is confined to; None for all."""
        return None

    def feature_options(self) -> dict[str, Any]:
        """The options that decide which hidden states are read."""
        return {}

    def start(self) -> str | None:
        """The trained head that training goes on from; None for a fresh one."""
        return None

    def start_is_baseline(self) -> bool:
        """Whether evaluation shows the start beside the result, because it is a draft in its own right."""
        return False

    def max_draft_tokens(self) -> int | None:
        """The deepest draft that the method can make; None where it drafts on and on."""
        return None


Options = TypeVar("Options", bound=SpeculatorOptions, default=SpeculatorOptions)


class OptimSection(Section):
    """AdamW and its schedule."""

    lr: float = Field(default=1e-3, gt=0)
    betas: list[Annotated[float, Field(ge=0, lt=1)]] = Field(default=[0.9, 0.95], min_length=2, max_length=2)
    eps: float = Field(default=1e-8, gt=0)
    weight_decay: NonNegative = 0.0
    warmup_ratio: float = Field(default=0.03, ge=0, lt=1)
    schedule: Literal["cosine", "linear", "constant"] = "cosine"
    min_lr_ratio: float = Field(default=0.0, ge=0, le=1)
    max_grad_norm: float = Field(default=1.0, gt=0)


class TrainSection(Section):
    """The training loop. `eval_every` null means save_every; `seed` null means run.seed, which also splits the data.
    At each evaluation the first `decode_prompts` validation prompts are decoded, `decode_new_tokens` each."""

    epochs: PositiveInt = 3
    max_steps: PositiveInt | None = None
    micro_batch_tokens: PositiveInt = 4096
    grad_accum_steps: PositiveInt = 1
    precision: Literal["bf16", "fp32"] = "bf16"
    save_every: PositiveInt = 200
    eval_every: PositiveInt | None = None
    decode_prompts: int = Field(default=4, ge=0)
    decode_new_tokens: PositiveInt = 32
    keep_checkpoints: PositiveInt = 2
    normalization: Literal["token", "sequence"] = "token"
    trackers: list[Literal["wandb", "tensorboard"]] = []
    log_every: PositiveInt = 10
    seed: int | None = Field(default=None, ge=0, lt=2**32)


class TreeSection(Section):
    """A tree of drafts: `depth`, `top_k` and `num_tokens` (EAGLE-2), or the `widths` of a static tree, or its `paths`
    of ranks."""

    depth: PositiveInt | None = None
    top_k: PositiveInt | None = None
    num_tokens: PositiveInt | None = None
    widths: list[PositiveInt] | None = Field(default=None, min_length=1)
    paths: list[list[int]] | None = Field(default=None, min_length=1)

    @model_validator(mode="after")
    def _one_form(self) -> Self:
        dynamic = [value is not None for value in (self.depth, self.top_k, self.num_tokens)]
        forms = [any(dynamic), self.widths is not None, self.paths is not None]
        if sum(forms) != 1 or (any(dynamic) and not all(dynamic)):
            raise ValueError("a tree takes depth, top_k and num_tokens together, or widths, or paths")
        if self.depth and self.top_k and self.num_tokens:
            most = self.top_k + (self.depth - 1) * self.top_k**2
            if not self.depth <= self.num_tokens <= most:
                raise ValueError(
                    f"num_tokens must be from depth, {self.depth}, to {most}, all that such a tree can have"
                )
        return self


class EvalSection(Section):
    """What is measured by decoding. A suite is a bundled name or a JSONL path; `max_new_tokens` null means
    responses.max_new_tokens. `speed_prompts` of a suite are timed one request at a time, `speed_new_tokens` each (null:
    all)."""

    suites: list[str] = Field(default=["held_out"], min_length=1)
    num_draft_tokens: list[PositiveInt] = Field(default=[3, 5], min_length=1)
    temperature: list[NonNegative] = Field(default=[0.0], min_length=1)
    top_k: int = Field(default=0, ge=0)
    top_p: Probability = 1.0
    min_p: float = Field(default=0.0, ge=0, le=1)
    draft_sample_method: Literal["greedy", "probabilistic"] = "greedy"
    rejection_sample_method: Literal["standard", "block"] = "standard"
    max_new_tokens: PositiveInt | None = None
    max_prompts: PositiveInt | None = None
    batch_size: PositiveInt = 16
    baselines: list[Literal["ngram", "suffix", "untrained", "assisted"]] = ["ngram"]
    ngram_min: PositiveInt = 2
    ngram_max: PositiveInt = 4
    ngram_windows: list[Annotated[list[PositiveInt], Field(min_length=2, max_length=2)]] | None = Field(
        default=None, min_length=1
    )
    ngram_num_draft_tokens: list[PositiveInt] | None = Field(default=None, min_length=1)
    suffix_decoding_max_tree_depth: PositiveInt = 24
    suffix_decoding_max_cached_requests: int = Field(default=10_000, ge=0)
    suffix_decoding_max_spec_factor: NonNegative = 1.0
    suffix_decoding_min_token_prob: float = Field(default=0.1, ge=0, le=1)
    trees: list[TreeSection] = []
    speed_prompts: int = Field(default=4, ge=0)
    speed_new_tokens: PositiveInt | None = None
    speed_rounds: PositiveInt = 3
    measure_costs: bool = True
    cuda_graphs: bool = False

    @field_validator("suites")
    @classmethod
    def _names_of_their_own(cls, suites: list[str]) -> list[str]:
        names = [Path(suite).stem for suite in suites]
        if twice := next((name for name in names if names.count(name) > 1), None):
            raise ValueError(f"two suites are called {twice!r} and would share their results; rename one of the files")
        return suites

    @model_validator(mode="after")
    def _judged_trees(self) -> Self:
        if self.trees and self.rejection_sample_method == "block":
            raise ValueError("trees are verified token by token; set rejection_sample_method=standard or trees=[]")
        if self.draft_sample_method == "probabilistic" and any(tree.depth is not None for tree in self.trees):
            raise ValueError("a tree of depth and top_k needs draft_sample_method=greedy; else give widths or paths")
        return self

    @model_validator(mode="after")
    def _ngram_range(self) -> Self:
        if self.ngram_min > self.ngram_max:
            raise ValueError(f"ngram_min ({self.ngram_min}) must not exceed ngram_max ({self.ngram_max})")
        for shortest, longest in self.ngram_windows or []:
            if shortest > longest:
                raise ValueError(f"ngram_windows [{shortest}, {longest}]: the shortest match comes first")
        return self


class ExportSection(Section):
    """What is written for serving, and how it is proved. `formats` null means all that the method has."""

    formats: list[Literal["speculators", "plain", "stitched"]] | None = Field(default=None, min_length=1)
    vllm: Literal["auto", "require", "off"] = "auto"
    verify_prompts: PositiveInt = 16
    verify_num_draft_tokens: PositiveInt = 3


class HubSection(Section):
    """Where the result is published, and what its card says that no measurement knows. `base_model`: the target's id on
    the Hub where the recipe names another place; `card_notes`: a Markdown file of one's own words;
    `publish_system_prompt`: whether target.system_prompt is published in clear, or kept back."""

    repo_id: str | None = None
    private: bool = True
    base_model: str | None = Field(default=None, pattern=r"^[\w.-]+/[\w.-]+$")
    license: str | None = Field(default=None, pattern=r"^[a-z0-9][a-z0-9.-]*$")
    license_name: str | None = None
    license_link: str | None = None
    language: list[str] = []
    tags: list[str] = []
    card_notes: str | None = None
    publish_system_prompt: bool = False

    @model_validator(mode="after")
    def _named_license(self) -> Self:
        if self.license == "other" and self.license_name is None:
            raise ValueError("license other needs license_name, and license_link where its text can be read")
        if self.license is None and (self.license_name or self.license_link):
            raise ValueError("license_name and license_link belong to license; set license: other")
        return self


class Recipe(Section, Generic[Options]):
    """A whole run. Frozen; made by `load_recipe`, which knows the options of the speculator's type."""

    run: RunSection
    target: TargetSection
    data: DataSection
    responses: ResponsesSection = ResponsesSection()
    features: FeaturesSection = FeaturesSection()
    speculator: Options
    optim: OptimSection = OptimSection()
    train: TrainSection = TrainSection()
    eval: EvalSection = EvalSection()
    export: ExportSection = ExportSection()
    hub: HubSection = HubSection()

    @model_validator(mode="after")
    def _held_out_exists(self) -> Self:
        if self.data.held_out == 0 and "held_out" in self.eval.suites:
            raise ValueError("asks for eval.suites held_out while data.held_out is 0; hold some out or name a suite")
        return self

    @model_validator(mode="after")
    def _drafts_within_reach(self) -> Self:
        deepest = self.speculator.max_draft_tokens()
        asked = {
            "eval.num_draft_tokens": max(self.eval.num_draft_tokens),
            "export.verify_num_draft_tokens": self.export.verify_num_draft_tokens,
        }
        for key, value in asked.items():
            if deepest is not None and value > deepest:
                raise ValueError(f"asks for {key} {value}, this {self.speculator.type} drafts at most {deepest}")
        return self


def _check_package(package: str | None, member: str | None, sha256: str | None) -> None:
    if package is None and (member is not None or sha256 is not None):
        raise ValueError("member and sha256 belong to package; set them to null without one")
    if package is not None and member is None:
        raise ValueError("package needs member, the path of the file inside the wheel")
    if package is not None and not re.fullmatch(r"[A-Za-z0-9._-]+==[A-Za-z0-9._+!-]+", package):
        raise ValueError(f"package must be pinned as name==version, got {package!r}")


def dump_recipe(recipe: Recipe) -> str:
    """The resolved recipe, every default spelled out, as YAML that `load_recipe` reads back to an equal Recipe."""
    return dump_yaml(recipe.model_dump(mode="json"))


def recipe_hash(*sections: BaseModel) -> str:
    """sha256 (hex) over the canonical JSON of the sections, in the order given; it does not depend on key order."""
    values = [section.model_dump(mode="json") for section in sections]
    return hashlib.sha256(json.dumps(values, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def load_recipe(path: Path, overrides: Sequence[str] = ()) -> Recipe:
    """Read, override and validate a recipe.

    `path` is a file or the name of a bundled recipe (`recipes/quickstart/eagle3.yaml`). Relative paths of sources,
    suites and the chat template are looked up in the current directory, then beside the recipe. Raises UserError.
    """
    file = find_recipe(path)
    fields = parse_yaml(file)
    try:
        options = _options_of(fields, overrides)
        for override in overrides:
            _refuse_unknown_override(override, options)
            apply_override(fields, override)
        refuse_secrets(str(path), fields)
        model = Recipe[options]  # type: ignore[valid-type]
        model.model_validate(fields)
        resolve_paths(fields, file.parent, BUNDLED_SUITES)
        return model.model_validate(fields)
    except (ValidationError, UserError) as error:
        problem = str(error) if isinstance(error, UserError) else _first_problem(error, options)
        raise UserError(f"{path}: {problem}") from None


def _options_of(fields: dict[str, Any], overrides: Sequence[str]) -> type[SpeculatorOptions]:
    """The options class of the recipe's speculator, which lives beside the method. Raises UserError."""
    from spec_train.speculators import METHODS, options_class

    section = fields.get("speculator")
    if not isinstance(section, dict):
        raise UserError("speculator is required" if section is None else "speculator must be a mapping of keys")
    given = [value for key, _, value in (override.partition("=") for override in overrides) if key == "speculator.type"]
    kind = given[-1] if given else section.get("type")
    if kind is None:
        raise UserError(f"speculator.type is required; one of {', '.join(METHODS)}")
    if kind not in METHODS:
        near = difflib.get_close_matches(str(kind), METHODS, 1)
        hint = f"; did you mean {near[0]}?" if near else ""
        raise UserError(f"speculator.type must be one of {', '.join(METHODS)}, got {kind!r}{hint}")
    return options_class(kind)


# --------------------------------------------------------------------------------------- what to say when it fails

# Names that other trainers use for our keys.
_FOREIGN = {
    "learning_rate": "optim.lr",
    "num_train_epochs": "train.epochs",
    "num_epochs": "train.epochs",
    "gradient_accumulation_steps": "train.grad_accum_steps",
    "per_device_train_batch_size": "train.micro_batch_tokens",
    "max_seq_length": "data.max_length",
    "max_seq_len": "data.max_length",
    "model_name_or_path": "target.model",
    "dataset": "data.sources",
    "ttt_length": "speculator.ttt_steps",
    "init_from": "speculator.start_from",
    "num_speculative_tokens": "eval.num_draft_tokens",
    "lr_scheduler_type": "optim.schedule",
    "report_to": "train.trackers",
    "max_tokens": "responses.max_new_tokens",
}


def known_keys(options: type[SpeculatorOptions]) -> list[str]:
    """Every dotted key of a recipe with this kind of speculator, sections first; items of data.sources appear as
    `data.sources.N.key`."""
    sections = Recipe[options].model_fields  # type: ignore[valid-type]
    keys = list(sections)
    for name, field in sections.items():
        keys += [f"{name}.{key}" for key in cast("type[Section]", field.annotation).model_fields]
    return keys + [f"data.sources.N.{key}" for key in Source.model_fields]


def _hint(key: str, options: type[SpeculatorOptions]) -> str:
    """The end of a message about an unknown dotted key: the nearest known one, else what its section has."""
    section, _, leaf = key.rpartition(".")
    keys = known_keys(options)
    by_leaf: dict[str, list[str]] = {}
    for known in keys:
        by_leaf.setdefault(known.rpartition(".")[2], []).append(known)
    if leaf in _FOREIGN:
        return f"; did you mean {_FOREIGN[leaf]}?"
    siblings = [name for name in keys if name.rpartition(".")[0] == section]
    near = difflib.get_close_matches(key, siblings, 1, 0.75) or by_leaf.get(leaf, [])[:1]
    if not near:
        near = [by_leaf[name][0] for name in difflib.get_close_matches(leaf, by_leaf, 1, 0.6)]
    if near and near[0] != key:
        return f"; did you mean {near[0]}?"
    return f"; {section} has {', '.join(name.rpartition('.')[2] for name in siblings)}" if section and siblings else ""


def _generic(parts: Sequence[str]) -> str:
    """A dotted key with list positions written as N, the form of `known_keys`."""
    return ".".join("N" if part.isdigit() else part for part in parts)


def _refuse_unknown_override(override: str, options: type[SpeculatorOptions]) -> None:
    """Overrides are checked by name first, so that the hint sees the whole dotted key."""
    key = override.partition("=")[0].strip()
    refuse_secrets("override", key)
    parts = key.split(".")
    generic, known = _generic(parts), known_keys(options)
    if "=" not in override or len(parts) < 2:
        raise UserError(f"override {key!r} is not of the form section.key=value{_hint(generic, options)}")
    free_form = parts[:2] == ["target", "chat_template_kwargs"] and len(parts) == 3
    list_item = len(parts) == 3 and parts[2].isdigit() and ".".join(parts[:2]) in known
    if not (generic in known or free_form or list_item):
        raise UserError(f"override {key} is not a known key{_hint(generic, options)}")


def _first_problem(error: ValidationError, options: type[SpeculatorOptions]) -> str:
    """One line for the first problem; an unknown key goes first, since a misspelt key also leaves one missing."""
    problems = sorted(error.errors(), key=lambda problem: problem["type"] != "extra_forbidden")
    problem, kind = problems[0], problems[0]["type"]
    # A union adds the branch it tried to the location.
    location = [str(part) for part in problem["loc"] if part not in ("float", "int")]
    key = ".".join(location) or "recipe"
    context, value = problem.get("ctx", {}), problem["input"]
    if kind == "extra_forbidden":
        return f"{key} is not a known key{_hint(_generic(location), options)}"
    if kind == "missing":
        return f"{key} is required"
    if kind == "value_error":
        return f"{key} {context['error']}"
    got = f", got {value!r:.80}" if value is not None else ", not null"
    if kind == "literal_error":
        choices = re.findall(r"'([^']*)'", str(context["expected"]))
        near = difflib.get_close_matches(str(value), choices, 1)
        return f"{key} must be one of {', '.join(choices)}{got}" + (f"; did you mean {near[0]}?" if near else "")
    if kind in ("int_type", "int_from_float"):
        return f"{key} must be a whole number{got}"
    if kind in ("model_type", "dict_type"):
        return f"{key} must be a mapping of keys{got}"
    if kind in ("too_short", "too_long"):
        bound = f"at least {context['min_length']}" if kind == "too_short" else f"at most {context['max_length']}"
        return f"{key} must have {bound} items{got}"
    return f"{key} {problem['msg'].removeprefix('Input ').removeprefix('String ').replace('should', 'must')}{got}"
