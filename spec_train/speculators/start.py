"""Training that goes on from a trained head: a checkpoint or export of ours, or one that another tool published.

What the head is (its layers, what it reads of the target, its draft vocabulary) is read from the head and from nowhere
else; the recipe says how it is trained on. A recipe that says something else of the head is refused.
"""

from __future__ import annotations

from abc import abstractmethod
from pathlib import Path
from typing import Any, ClassVar, Self

from pydantic import SerializerFunctionWrapHandler, model_serializer, model_validator
from torch import Tensor

from spec_train.errors import UserError
from spec_train.recipe import SpeculatorOptions
from spec_train.speculators import read_speculator
from spec_train.speculators.base import Speculator
from spec_train.speculators.head_files import checkpoint_tensors, find_head
from spec_train.speculators.heads import load_strictly
from spec_train.target import TargetModel

KEY = "speculator.start_from"


class StartOptions(SpeculatorOptions):
    """`start_from`: a checkpoint, an export or a published head (folder or hub id) that training goes on from; null
    trains a fresh head."""

    start_from: str | None = None

    of_the_head: ClassVar[tuple[str, ...]] = ()  # options that say what a head is, not how it is trained

    @model_validator(mode="after")
    def _no_fresh_head(self) -> Self:
        init = type(self).model_fields.get("init")
        if self.start_from is not None and init is not None and getattr(self, "init") != init.default:  # noqa: B009
            raise ValueError("start_from goes on from a trained head and init says how a fresh one begins: remove one")
        return self

    @model_serializer(mode="wrap")
    def _what_counts(self, handler: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """Options that the head itself decides stand in a resolved recipe only where the recipe gave them."""
        fields: dict[str, Any] = handler(self)
        left_out = set(self.of_the_head) - self.model_fields_set if self.start_from is not None else set()
        return {name: value for name, value in fields.items() if name not in left_out}

    def start(self) -> str | None:
        """See `SpeculatorOptions.start`."""
        return self.start_from

    def start_is_baseline(self) -> bool:
        """See `SpeculatorOptions.start_is_baseline`: what training added is the question."""
        return self.start_from is not None


class StartableSpeculator(Speculator):
    """A speculator whose training can go on from a trained one."""

    @abstractmethod
    def borrow(self, target: TargetModel) -> None:
        """Take the target's frozen tensors, where dtype and device agree without a copy."""

    @abstractmethod
    def head_options(self) -> dict[str, Any]:
        """What this head is, in the words of `StartOptions.of_the_head`."""

    @abstractmethod
    def continued(self, options: Any, loss_ids_D: Tensor) -> Self:
        """This head on the CPU, trainable, in float32, to be trained as `options` say. `loss_ids_D`: ascending target
        ids that the loss looks at, for heads that draft from the whole vocabulary."""

    def drafted_ids(self) -> Tensor | None:
        """Ascending target ids that the head can propose; None for all."""
        return None


def start_head(options: Any, target: TargetModel, loss_ids_D: Tensor) -> StartableSpeculator:
    """The head that `options.start_from` names, ready to be trained on.

    Raises UserError where it cannot be had or read, is of another type or for another target, or where the recipe
    contradicts it.
    """
    folder = find_head(options.start_from, f"{KEY} ")
    head = read_speculator(folder, target)
    if head.kind != options.type or not isinstance(head, StartableSpeculator):
        raise UserError(
            f"{KEY} {options.start_from}: holds a {head.kind}, speculator.type is {options.type}; set it to {head.kind}"
        )
    own = head.head_options()
    for name in sorted(own.keys() & options.model_fields_set):
        given = getattr(options, name)
        if given is not None and (sorted(given) if isinstance(given, list) else given) != own[name]:
            raise UserError(
                f"speculator.{name} is {given}, but {options.start_from} has {own[name]}, and what a head is cannot be "
                "changed: remove it from the recipe (or set it to the head's)"
            )
    continued = head.continued(options, loss_ids_D)
    if is_checkpoint(folder):  # it was read in the target's dtype, and is kept in float32
        load_strictly(continued, checkpoint_tensors(folder), str(folder))
    return continued


def is_checkpoint(folder: Path) -> bool:
    """Whether a folder is a training checkpoint, rather than an export."""
    return (folder / "speculator.json").is_file()
