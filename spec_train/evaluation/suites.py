"""Evaluation suites: named sets of prompts. A suite file (`eval/suites/*.yaml`) lists sources as a recipe does."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from pydantic import Field, ValidationError

from spec_train.assets import asset_path
from spec_train.data.prompts import load_conversations
from spec_train.data.rows import Conversation, Message
from spec_train.errors import UserError
from spec_train.recipe import Section, Source
from spec_train.recipe_file import parse_yaml


class Suite(Section):
    """A suite file."""

    description: str
    license: str
    sources: list[Source] = Field(min_length=1)


def bundled_suites() -> list[str]:
    """Names of the suites that ship with the library."""
    return sorted(path.stem for path in asset_path("eval/suites").glob("*.yaml"))


def load_suite(name_or_path: str) -> list[Conversation]:
    """The prompts of a bundled suite, of a suite file (.yaml), or of a JSONL file, each ending where the target speaks.

    Trailing answers are cut off. Where a later turn follows an answer that only the target can give (MT-Bench), the
    prompt is the first turn. `held_out` belongs to a run and is not found here. Raises UserError.
    """
    path = Path(name_or_path).expanduser()
    if name_or_path in bundled_suites():
        path = asset_path(f"eval/suites/{name_or_path}.yaml")
    elif not path.is_file():
        raise UserError(
            f"suite {name_or_path}: neither a file nor one of {', '.join(bundled_suites())} (held_out needs a recipe)"
        )
    sources = _suite(path).sources if path.suffix in (".yaml", ".yml") else [Source(path=str(path))]
    conversations, _ = load_conversations(sources, mode="regenerate")
    return [replace(c, messages=_up_to_first_gap(c.messages)) for c in conversations]


def _up_to_first_gap(messages: list[Message]) -> list[Message]:
    """The turns before an empty answer, the place where the target's own belongs."""
    for index, message in enumerate(messages):
        if message["role"] == "assistant" and not message["content"] and not message.get("tool_calls"):
            return messages[:index]
    return messages


def _suite(path: Path) -> Suite:
    try:
        return Suite.model_validate(parse_yaml(path))
    except ValidationError as error:
        problem = error.errors()[0]
        key = ".".join(str(part) for part in problem["loc"])
        raise UserError(f"{path}: {key}: {problem['msg']}") from None
