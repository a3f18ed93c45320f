"""What a push is going to publish: decided, checked and shown without a network."""

from __future__ import annotations

import io
import json
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import yaml

import spec_train
from spec_train.errors import UserError
from spec_train.recipe_file import refuse_secrets
from spec_train.serving.export import read_export
from spec_train.serving.facts import read_facts
from spec_train.serving.publication import CARD_FILE, files_of

Files = Mapping[str, Path | bytes]  # path in the repository -> local file, or content

_PATH = re.compile(r"(?<![\w./~-])/[\w.@+-]+/[\w.@+-]+|(?<![\w./-])~[\w.-]*/[\w.@+-]+")
# Of some machine, whether or not it is this one.
_FILE_URL = re.compile(r"\bfile:/{1,3}(?:localhost/)?[\w.@+~-]+(?:/[\w.@+-]+)?|\b[A-Za-z]:\\{1,2}Users\\{1,2}[\w.@+-]+")
_SYSTEM = ("bin", "dev", "etc", "lib", "proc", "sys", "usr")
_TEXT = (".json", ".yaml", ".md", ".txt", ".jinja")


@dataclass(frozen=True)
class PushPlan:
    """`unknown`: one line for each thing that the card does not know, and how to make it known."""

    repo_id: str
    private: bool
    message: str
    files: Files
    unknown: list[str]


def plan_push(export_dir: Path, repo_id: str | None, overrides: Sequence[str], results: Path | None) -> PushPlan:
    """What `spec-train push` publishes. `repo_id`: None for the recipe's hub.repo_id; `overrides`: `hub.key=value`;
    `results`: a folder of evaluation results in the place of the run's own. Raises UserError."""
    stored = read_export(export_dir)
    name = repo_id or stored["provenance"].get("recipe", {}).get("hub", {}).get("repo_id")
    if name is None:
        raise UserError("where to? give REPO_ID as owner/name, or set hub.repo_id in the recipe")
    check_name(name)
    facts = read_facts(export_dir, name, overrides, results)
    files = files_of(export_dir, facts)
    check_public(files)
    message = f"Publish the {stored['type']} speculator with spec-train {spec_train.__version__}"
    return PushPlan(name, facts.hub.private, message, files, facts.unknown)


def check_name(repo_id: str) -> None:
    """Raise UserError where `repo_id` is not owner/name as the Hub allows it."""
    from huggingface_hub.errors import HFValidationError
    from huggingface_hub.utils import validate_repo_id  # type: ignore[attr-defined]

    try:
        validate_repo_id(repo_id)
    except HFValidationError as error:
        raise UserError(f"{repo_id}: not the name of a repository: {error}") from None
    if repo_id.count("/") != 1:
        raise UserError(f"{repo_id}: not the name of a repository: give owner/name")


def check_public(files: Files, token: str = "") -> None:
    """Raise UserError where a file holds something like an access token, `token` itself, or a path of this machine."""
    for name, content in files.items():
        weights = name.endswith(".safetensors")
        data = _header(content) if weights else content_of(content)
        if token and token.encode() in data:
            raise UserError(f"{name} holds your access token; remove it before anything is published")
        if not weights and not name.endswith(_TEXT):
            continue
        text = data.decode(errors="replace")
        value: Any = {f"line {number}": line for number, line in enumerate(text.splitlines(), 1)}
        if weights or name.endswith(".json"):
            value = json.loads(text or "{}")
        elif name.endswith(".yaml"):
            value = yaml.safe_load(text)
        refuse_secrets(name, value)
        if name.startswith(("tokenizer", "vocab", "merges")):
            continue  # every word of a language is in there
        plain = unquote(text)
        found = [*_FILE_URL.findall(plain), *(path for path in _PATH.findall(plain) if _is_local(path))]
        if found:
            raise UserError(f"{name} names a path of this machine, {found[0]}/...: export again, or take it out")


def describe_plan(plan: PushPlan) -> str:
    """The card, then every file with its size, for the terminal."""
    sizes = {name: len(file) if isinstance(file, bytes) else file.stat().st_size for name, file in plan.files.items()}
    width = max(map(len, sizes))
    listing = [f"  {name:<{width}} {size_text(size):>10}" for name, size in sizes.items()]
    return "\n".join(
        [
            f"{CARD_FILE}:",
            content_of(plan.files[CARD_FILE]).decode(),
            f"push would send to {plan.repo_id} ({visibility(plan.private)}) what of these it does not hold yet:",
            *listing,
            f"  {len(sizes)} files, {size_text(sum(sizes.values()))}; nothing was sent (--dry-run)",
        ]
    )


def content_of(file: Path | bytes) -> bytes:
    """A file of the publication, whole."""
    return file if isinstance(file, bytes) else file.read_bytes()


def visibility(private: bool) -> str:
    """The Hub's word for it."""
    return "private" if private else "public"


def size_text(size: int) -> str:
    """Bytes for a reader: 812 B, 1.2 kB, 3.4 MB, 1.5 GB."""
    value, units = float(size), ["B", "kB", "MB", "GB", "TB"]
    while value >= 1000 and len(units) > 1:
        value, units = value / 1000, units[1:]
    return f"{value:.0f} B" if units[0] == "B" else f"{value:.1f} {units[0]}"


def _header(file: Path | bytes) -> bytes:
    """The JSON at the start of a safetensors file: 8 bytes of length, then names and metadata."""
    with io.BytesIO(file) if isinstance(file, bytes) else file.open("rb") as opened:
        return opened.read(int.from_bytes(opened.read(8), "little"))


def _is_local(path: str) -> bool:
    """Whether the first two parts of a path exist here. `/usr/bin` and its like say nothing."""
    place = Path(os.path.expanduser(path))
    return place.is_absolute() and place.parts[1] not in _SYSTEM and place.exists()
