"""Prompts of a suite that training has seen, word for word or nearly.

A prompt is the user's last message, lower case, its words without punctuation. It is "exact" where a training prompt
has the same words in the same order, and "near" where one training prompt holds at least half of its distinct runs of
8 words (its shingles): containment |S ∩ T| / |S|, which a long training prompt around a short question does not hide.
Prompts of fewer than 8 words have no shingle and can only be exact. A paraphrase is not found.

Only the suite's shingles are kept; the training prompts stream past once, so that 500,000 of them take a minute or so.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from spec_train.data.prompts import read_conversations
from spec_train.evaluation.turns import Suite, last_user_message
from spec_train.manifest import made_otherwise

SHINGLE_WORDS = 8
NEAR = 0.5  # of a prompt's shingles in one training prompt
_WORD = re.compile(r"\w+")

Shingle = tuple[str, ...]


def overlap(ids: Sequence[str], prompts: Sequence[str], training: Iterable[str]) -> dict[str, Any]:
    """{"checked": prompts looked at, "exact", "near": how many of them, "ids": which, in the suite's order}.

    `ids` and `prompts` belong to the suite, `training` are the texts of the training prompts.
    """
    words = [_words(prompt) for prompt in prompts]
    same: dict[Shingle, list[int]] = {}
    holders: dict[Shingle, list[int]] = {}
    sizes = []
    for index, one in enumerate(words):
        same.setdefault(one, []).append(index)
        shingles = _shingles(one)
        sizes.append(len(shingles))
        for shingle in shingles:
            holders.setdefault(shingle, []).append(index)
    exact: set[int] = set()
    near: set[int] = set()
    for text in training:
        seen = _words(text)
        exact.update(same.get(seen, ()))
        shared = Counter(index for shingle in _shingles(seen) & holders.keys() for index in holders[shingle])
        near.update(index for index, count in shared.items() if count >= NEAR * sizes[index])
    near -= exact
    found = [name for index, name in enumerate(ids) if index in exact or index in near]
    return {"checked": len(prompts), "exact": len(exact), "near": len(near), "ids": found}


def overlap_with_run(suite: Suite, prompts_stage: Path) -> dict[str, Any] | None:
    """`overlap` of a suite with every user turn that a run trains on or chooses its checkpoint on; None where its
    prompts stage is not there. `held_out` is checked as the stage wrote it, later turns of a suite with the turns
    before the answers."""
    if not (prompts_stage / "manifest.json").is_file():
        return None
    if suite.name == "held_out":
        held_out = read_conversations(prompts_stage / "held_out.jsonl")
        ids, asked = [c.id for c in held_out], [c.text or last_user_message(c.messages) for c in held_out]
    else:
        ids = suite.ids + [f"{turn.conversation.id}/{turn.number}" for turn in suite.follow_ups]
        asked = suite.asked + [last_user_message(turn.conversation.messages) for turn in suite.follow_ups]
    training = (
        text
        for split in ("train", "validation")  # the second chose the checkpoint
        for conversation in read_conversations(prompts_stage / f"{split}.jsonl")
        for text in [conversation.text or "", *(m["content"] for m in conversation.messages if m["role"] == "user")]
        if text
    )
    return overlap(ids, asked, training)


def prompts_stage_of(checkpoint: Path) -> Path:
    """The prompts stage of the run that a checkpoint or export lies in; a folder that does not exist where there is
    none (its prompts were shared by run.data_dir, or it was moved), or was made anew since."""
    runs = [folder for folder in checkpoint.resolve().parents if (folder / "recipe.yaml").is_file()]
    found = [run for run in runs if (run / "prompts" / "manifest.json").is_file()]
    if not found:
        return checkpoint / "prompts"
    changed = made_otherwise(found[0], "train", "responses") or made_otherwise(found[0], "responses", "prompts")
    return checkpoint / "prompts" if changed else found[0] / "prompts"


def overlap_warning(suite: str, found: dict[str, Any] | None) -> str | None:
    """One line for the user where training has seen prompts of the suite, else None."""
    if found is None or not found["ids"]:
        return None
    return (
        f"{suite}: {len(found['ids'])} of {found['checked']} prompts are in the training data ({found['exact']} exact, "
        f"{found['near']} near, first {found['ids'][0]}); its figures flatter what was trained"
    )


def _words(text: str) -> Shingle:
    return tuple(_WORD.findall(text.lower()))


def _shingles(words: Shingle) -> set[Shingle]:
    return {words[start : start + SHINGLE_WORDS] for start in range(len(words) - SHINGLE_WORDS + 1)}
