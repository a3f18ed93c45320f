"""Recipe files as text: finding and parsing them, overrides, secrets and relative paths.

Knows YAML and files, not the schema; `recipe.py` holds that.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

from spec_train.assets import ASSET_PREFIX, asset_path, resolve_path
from spec_train.errors import UserError


class _Loader(yaml.SafeLoader):
    """SafeLoader with YAML 1.2 scalars (`off` is a string, `1e-3` is a number) and without duplicate keys."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: set[str] = set()
        for key, _ in node.value:
            if not isinstance(key, yaml.ScalarNode) or key.tag != "tag:yaml.org,2002:str":
                raise yaml.MarkedYAMLError(problem="a key must be plain text", problem_mark=key.start_mark)
            if key.value in seen:
                raise yaml.MarkedYAMLError(problem=f"{key.value} is given twice", problem_mark=key.start_mark)
            seen.add(key.value)
        return super().construct_mapping(node, deep)


class _Dumper(yaml.SafeDumper):
    """SafeDumper that quotes whatever YAML 1.1 or 1.2 would not read back as text."""


# The resolvers of PyYAML are YAML 1.1's. These replace them for the loader, and are added to the dumper's.
_Loader.yaml_implicit_resolvers = {}
for _tag, _pattern, _first in (
    ("null", r"^(?:~|null|Null|NULL|)$", ["~", "n", "N", ""]),
    ("bool", r"^(?:true|True|TRUE|false|False|FALSE)$", list("tTfF")),
    ("int", r"^[-+]?(?:0|[1-9][0-9]*)$", list("-+0123456789")),
    ("float", r"^[-+]?(?:\.[0-9]+|[0-9]+(?:\.[0-9]*)?)(?:[eE][-+]?[0-9]+)?$", list("-+.0123456789")),
    ("float", r"^[-+]?\.(?:inf|Inf|INF)$|^\.(?:nan|NaN|NAN)$", list("-+.")),
):
    for _reader_or_writer in (_Loader, _Dumper):
        _reader_or_writer.add_implicit_resolver(f"tag:yaml.org,2002:{_tag}", re.compile(_pattern), _first)

# Credentials never belong in a file that is saved beside every artefact. They are named in messages, never echoed.
# What providers say their keys begin with; of keys that have no prefix (W&B's older ones, AWS's secret half), the name
# that they are set by.
_SECRETS = (
    r"\bhf_[A-Za-z0-9]{16,}",  # Hugging Face
    r"\bgh[opsru]_[A-Za-z0-9]{16,}|\bgithub_pat_\w{16,}",  # GitHub
    r"\bgl(pat|dt|rt|ptt|cbt|soat|ft|imt|agent)-[\w-]{20,}",  # GitLab
    r"\bsk-[\w-]{16,}|\b[sr]k_(live|test)_\w{16,}",  # OpenAI, Anthropic, OpenRouter; Stripe
    r"\b(gsk_|xai-|pplx-|nvapi-|r8_|tvly-|npm_)[\w-]{20,}|\bpypi-AgEI[\w-]{20,}",  # Groq, xAI, NVIDIA and others
    r"\b(AKIA|ASIA|ABIA|ACCA)[A-Z0-9]{16}\b|(?i:aws_secret_access_key)\W{1,4}[A-Za-z0-9/+=]{40}",  # AWS
    r"\bAIza[\w-]{35}|\bya29\.[\w-]{20,}|\bGOCSPX-[\w-]{20,}",  # Google
    r"(AccountKey|SharedAccessKey)=[A-Za-z0-9+/]{40,}|[?&]sig=[\w%+/-]{40,}",  # Azure storage and service bus
    r"\b[\w~.-]{3}\dQ~[\w~.-]{31,}|\b[A-Za-z0-9]{52}JQQJ99[A-Za-z0-9]{26}",  # Azure client secrets, AI services
    r"\bxox[abeoprs]-[\w-]{10,}|\bxapp-\d-[\w-]{10,}|hooks\.slack\.com/services/T\w+/B\w+/\w+",  # Slack
    r"\bwandb_v\d+_[\w-]{16,}|(?i:wandb_api_key)\W{1,4}[0-9a-f]{40}",  # Weights & Biases
    r"\beyJ[\w-]{10,}\.eyJ[\w-]{10,}\.[\w-]{10,}",  # JSON web tokens
    r"-----BEGIN [A-Z ]*PRIVATE KEY",
    r"://[^/\s:@]+:[^/\s@]+@",  # a password in a URL
)
_SECRET = re.compile("|".join(_SECRETS))


def find_recipe(path: Path) -> Path:
    """`path` itself where it is a file, else the bundled recipe of that name. Raises UserError."""
    if path.is_file():
        return path
    if path.is_dir():
        raise UserError(f"{path}: is a directory; name a recipe file such as recipes/quickstart/eagle3.yaml")
    bundle = asset_path("recipes")
    bundled = {f"recipes/{file.relative_to(bundle).as_posix()}": file for file in sorted(bundle.rglob("*.yaml"))}
    if path.as_posix() in bundled:
        return bundled[path.as_posix()]
    near = difflib.get_close_matches(path.as_posix(), bundled, 1)
    raise UserError(f"{path}: no such recipe file" + (f"; did you mean {near[0]}?" if near else ""))


def parse_yaml(file: Path) -> dict[str, Any]:
    """The mapping in a YAML file. Raises UserError with the line where the syntax breaks."""
    try:
        fields = yaml.load(file.read_text(encoding="utf-8"), _Loader)  # _Loader is a SafeLoader
    except yaml.MarkedYAMLError as error:
        line = f" line {error.problem_mark.line + 1}:" if error.problem_mark else ""
        raise UserError(f"{file}:{line} not valid YAML: {error.problem}") from None
    except (yaml.YAMLError, UnicodeDecodeError, OSError) as error:
        raise UserError(f"{file}: cannot be read: {' '.join(str(error).split())}") from None
    if not isinstance(fields, dict):
        raise UserError(f"{file}: a recipe is a mapping of sections (run, target, data, ...)")
    return fields


def dump_yaml(fields: dict[str, Any]) -> str:
    """YAML that `parse_yaml` reads back to equal values."""
    return yaml.dump(fields, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=110)


def apply_override(fields: dict[str, Any], override: str) -> None:
    """Set one `section.key=value` in `fields`, value parsed as YAML; a number in the key indexes a list."""
    key, _, text = override.partition("=")
    refuse_secrets(f"override {key}", text)
    try:
        value = yaml.load(text, _Loader)  # _Loader is a SafeLoader
    except yaml.YAMLError:
        raise UserError(
            f"override {key}: the value is not valid YAML; quote it for the shell, or check brackets"
        ) from None
    *parents, leaf = key.strip().split(".")
    node: Any = fields
    for part in parents:
        node = _child(node, part, key)
    if isinstance(node, list):
        _child(node, leaf, key)  # refuses an index that does not exist
        node[int(leaf)] = value
    elif isinstance(node, dict):
        node[leaf] = value
    else:
        raise UserError(f"override {key}: {parents[-1]} holds a plain value, it has no {leaf}")


def _child(node: Any, part: str, key: str) -> Any:
    """The value under `part`; a section that the file leaves out starts empty."""
    if isinstance(node, list):
        if not part.isdigit() or int(part) >= len(node):
            raise UserError(f"override {key}: the list has {len(node)} items, {part} is none of 0 to {len(node) - 1}")
        return node[int(part)]
    if not isinstance(node, dict):
        raise UserError(f"override {key}: there is nothing to set at {part}")
    if node.get(part) is None:
        node[part] = {}
    return node[part]


def refuse_secrets(where: str, value: Any, key: str = "") -> None:
    """Raise UserError where a string inside `value` looks like an access token or key, or holds a password in a URL."""
    if isinstance(value, dict):
        for name, item in value.items():
            refuse_secrets(where, name, key)
            refuse_secrets(where, item, f"{key}.{name}" if key else str(name))
    elif isinstance(value, list):
        for index, item in enumerate(value):
            refuse_secrets(where, item, f"{key}.{index}")
    elif isinstance(value, str) and _SECRET.search(value):
        place = f"{where}: {key}" if key else where
        raise UserError(
            f"{place} looks like an access token or key; remove it: keys belong into the environment (HF_TOKEN)"
        )


def resolve_paths(fields: dict[str, Any], folder: Path, suites: Sequence[str]) -> None:
    """Turn the relative paths of validated `fields` into existing ones, in place: as given where that exists, else
    beside the recipe (`folder`). `asset:` paths and the names in `suites` stay. Raises UserError for a missing file."""
    for index, source in enumerate(fields["data"]["sources"]):
        if source.get("path") is not None:
            source["path"] = _existing(f"data.sources.{index}.path", source["path"], folder)
    if fields["target"].get("chat_template") is not None:
        fields["target"]["chat_template"] = _existing("target.chat_template", fields["target"]["chat_template"], folder)
    hub = fields.get("hub") or {}
    if hub.get("card_notes") is not None:
        hub["card_notes"] = _existing("hub.card_notes", hub["card_notes"], folder)
    chosen = (fields.get("eval") or {}).get("suites", [])
    for index, suite in enumerate(chosen):
        if suite not in suites:
            known = f" or one of {', '.join(suites)}"
            chosen[index] = _existing(f"eval.suites.{index}", suite, folder, known)


def _existing(key: str, path: str, folder: Path, alternative: str = "") -> str:
    if path.startswith(ASSET_PREFIX):
        resolve_path(path)  # raises where nothing of that name is bundled
        return path
    for candidate in (Path(path).expanduser(), folder / path):
        if candidate.exists():
            return str(candidate)
    beside = f", neither here nor in {folder}" if not Path(path).is_absolute() else ""
    raise UserError(f"{key}: {path} does not exist{beside}; give a file{alternative}")
