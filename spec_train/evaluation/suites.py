"""Evaluation suites: named sets of prompts. A suite file (`eval/suites/*.yaml`) lists sources as a recipe does, with a
template where the rows hold the parts of a prompt, and may take other suites in. docs/evaluation.md describes it.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Self

from pydantic import PositiveInt, ValidationError, model_validator

from spec_train.assets import asset_path, resolve_path
from spec_train.data.prompts import check_drops, load_conversations, with_unique_ids
from spec_train.data.rows import Conversation, conversation_from_row
from spec_train.errors import UserError
from spec_train.packages import package_file
from spec_train.recipe import Section, Source
from spec_train.recipe_file import parse_yaml


class SuiteSource(Source):
    """A recipe's source, and what only suites need.

    `sample`: that many prompts, evenly spaced over the source. `template`: the prompt's wording with {fields} of a
    record, and `records`: the lists that lead to the records of a JSON document, outermost first
    (`data.paragraphs.qas`); a record sees the fields of the objects around it.
    """

    sample: PositiveInt | None = None
    template: str | None = None
    records: str | None = None

    @model_validator(mode="after")
    def _template_reads_a_document(self) -> Self:
        if (self.template is None) != (self.records is None):
            raise ValueError("template and records belong together")
        if self.template is not None and self.hub is not None:
            raise ValueError("a template needs a JSON document: give path or package, not hub")
        return self


class Included(Section):
    """Prompts of another bundled suite: `sample` of them, evenly spaced, under one category name."""

    suite: str
    sample: PositiveInt | None = None
    category: str | None = None


class Suite(Section):
    """A suite file. `prompts`: how many it holds, for the list of suites."""

    description: str
    license: str
    prompts: PositiveInt | None = None
    sources: list[SuiteSource] = []
    include: list[Included] = []

    @model_validator(mode="after")
    def _has_prompts(self) -> Self:
        if not self.sources and not self.include:
            raise ValueError("needs sources or include")
        return self


@dataclass(frozen=True)
class SuiteFacts:
    """What `spec-train suites` shows."""

    name: str
    prompts: int | None
    license: str
    origin: str
    description: str


def bundled_suites() -> list[str]:
    """Names of the suites that ship with the library."""
    return sorted(path.stem for path in asset_path("eval/suites").glob("*.yaml"))


def suite_facts(name: str) -> SuiteFacts:
    """What a bundled suite is, without fetching anything. Raises UserError."""
    suite = read_suite(asset_path(f"eval/suites/{name}.yaml"))
    if suite.include:
        origin = "suites " + ", ".join(part.suite for part in suite.include)
    else:
        origin = ", ".join(dict.fromkeys(source.package or source.hub or "bundled" for source in suite.sources))
    return SuiteFacts(name, suite.prompts, suite.license, origin, suite.description)


def load_suite(name_or_path: str) -> list[Conversation]:
    """The prompts of a bundled suite, of a suite file (.yaml), or of a JSONL file, each ending where the target speaks.

    Trailing answers are cut off. An empty assistant turn is a place where the target's own answer belongs (MT-Bench has
    one between its two questions). `held_out` belongs to a run and is not found here. Raises UserError.
    """
    path = Path(name_or_path).expanduser()
    if name_or_path in bundled_suites():
        path = asset_path(f"eval/suites/{name_or_path}.yaml")
    elif not path.is_file():
        raise UserError(
            f"suite {name_or_path}: neither a file nor one of {', '.join(bundled_suites())} (held_out needs a recipe)"
        )
    if path.suffix not in (".yaml", ".yml"):
        return load_conversations([Source(path=str(path))], mode="regenerate")[0]
    suite = read_suite(path)
    conversations: list[Conversation] = []
    for part in suite.include:
        if part.suite not in bundled_suites() or part.suite == path.stem:
            raise UserError(f"{path}: include names {part.suite}; bundled suites are {', '.join(bundled_suites())}")
        found = _evenly(load_suite(part.suite), part.sample)
        conversations += [
            replace(c, id=f"{part.suite}-{c.id}", category=part.category or c.category) for c in found
        ]  # fmt: skip
    for source in suite.sources:
        conversations += _evenly(_source_prompts(source, path), source.sample)
    return with_unique_ids(conversations)


def suite_files(name_or_path: str) -> list[Path]:
    """The local files that `load_suite` reads its prompts from: the suite's own, its sources, those of suites in it.
    Files of packages are left out, the suite pins them. Raises UserError."""
    bundled = name_or_path in bundled_suites()
    path = asset_path(f"eval/suites/{name_or_path}.yaml") if bundled else Path(name_or_path).expanduser()
    if path.suffix not in (".yaml", ".yml"):
        return [path]
    suite = read_suite(path)
    sources = [resolve_path(source.path) for source in suite.sources if source.path is not None]
    included = [file for part in suite.include for file in suite_files(part.suite)]
    return [path, *(file for file in sources if file.is_file()), *included]


def read_suite(path: Path) -> Suite:
    """The suite file itself. Raises UserError naming the key that is wrong."""
    try:
        return Suite.model_validate(parse_yaml(path))
    except ValidationError as error:
        problem = error.errors()[0]
        key = ".".join(str(part) for part in problem["loc"]) or "suite"
        raise UserError(f"{path}: {key}: {problem['msg']}") from None


def _evenly(conversations: list[Conversation], count: int | None) -> list[Conversation]:
    """`count` of the conversations at equal distances, all where there are fewer."""
    total = len(conversations)
    if count is None or count >= total:
        return conversations
    return [conversations[i * total // count] for i in range(count)]


def _source_prompts(source: SuiteSource, suite_path: Path) -> list[Conversation]:
    """The prompts of one source: rows of any known shape, or a document's records put into the template."""
    if source.template is None or source.records is None:
        return load_conversations([source], mode="regenerate")[0]
    file = (
        resolve_path(source.path)
        if source.path is not None
        else package_file(source.package or "", source.member or "", source.sha256)
    )
    try:
        document = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UserError(f"{file}: not a JSON document that can be read ({error})") from None
    prompts: list[Conversation] = []
    for number, record in enumerate(_records(document, source.records.split(".")), 1):
        if source.limit is not None and number > source.limit:
            break
        try:
            row = {"prompt": source.template.format_map(record)}
        except KeyError as error:
            raise UserError(f"{suite_path}: template names {error}, a field that the records do not have") from None
        conversation = conversation_from_row(row)
        if isinstance(conversation, Conversation):
            # Not every document numbers its records, and some number them twice.
            name, label = f"{suite_path.stem}-{number}", source.package or str(source.path)
            prompts.append(replace(conversation, id=name, category=source.category or "", source=label))
    check_drops(len(prompts), Counter(), 1.0, f"{suite_path}: records {source.records}")
    return prompts


def _records(value: Any, path: list[str], around: dict[str, Any] | None = None) -> Iterator[dict[str, Any]]:
    """Every object at the end of `path`, with the fields of the objects around it."""
    fields = {**(around or {}), **value} if isinstance(value, dict) else dict(around or {})
    if not path:
        yield fields
        return
    children = value.get(path[0]) if isinstance(value, dict) else None
    for child in children if isinstance(children, list) else []:
        yield from _records(child, path[1:], fields)
