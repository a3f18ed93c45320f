"""Which tokens end an answer. One rule for data, training, measuring and verifying: the one that vLLM serves by.

vLLM ends an answer at every eos of the generation config and at the tokenizer's own. Where a checkpoint has no
generation_config.json, its config (the text part of a multimodal one included) stands in.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from transformers import AutoConfig, AutoTokenizer, GenerationConfig

from spec_train.errors import UserError

_TOKENIZER_FILES = ("tokenizer*", "vocab*", "*.tiktoken", "tekken.json", "spiece.model")


def stop_token_ids(target: str | Path, revision: str | None = None) -> list[int]:
    """The ids that end an answer of a checkpoint (folder or hub id), sorted; nothing of its weights is read.

    Raises UserError where it has neither a generation config nor a config.
    """
    return sorted({token for ids in stop_sources(target, revision).values() for token in ids})


def stop_sources(target: str | Path, revision: str | None = None) -> dict[str, list[int]]:
    """`stop_token_ids` by where they stand: "generation_config.json" or "config.json", and "tokenizer"."""
    name = str(target)
    try:
        found, source = GenerationConfig.from_pretrained(name, revision=revision), "generation_config.json"
    except OSError:
        found, source = GenerationConfig.from_model_config(_config(name, revision)), "config.json"
    return {source: _as_list(found.eos_token_id), "tokenizer": _tokenizer_eos(name, revision)}


def _config(name: str, revision: str | None) -> Any:
    from spec_train.target import know_mimo

    know_mimo()
    try:
        return AutoConfig.from_pretrained(name, revision=revision)
    except (OSError, ValueError) as error:
        file = Path(name) / "config.json"
        if file.is_file():
            return json.loads(file.read_text())  # of a family that transformers does not know
        reason = str(error).strip().splitlines()[0]
        raise UserError(
            f"target.model {name}: its config cannot be read ({reason}); give a local folder or a reachable hub id"
        ) from None


def has_tokenizer(folder: Path) -> bool:
    """Whether a checkpoint's folder holds a tokenizer; transformers makes one up where it does not."""
    return any(next(folder.glob(pattern), None) for pattern in _TOKENIZER_FILES)


def _tokenizer_eos(name: str, revision: str | None) -> list[int]:
    """The tokenizer's eos; none for a folder without a tokenizer."""
    if Path(name).is_dir() and not has_tokenizer(Path(name)):
        return []
    try:
        return _as_list(AutoTokenizer.from_pretrained(name, revision=revision).eos_token_id)
    except (OSError, ValueError):
        return []


def _as_list(eos: Any) -> list[int]:
    if eos is None:
        return []
    return sorted(map(int, eos)) if isinstance(eos, (list, tuple)) else [int(eos)]
