"""Overlap of a suite with the training prompts: planted copies are found, paraphrases and short texts are not."""

from __future__ import annotations

import random
from pathlib import Path

from spec_train.data.prompts import Conversation, write_conversations
from spec_train.evaluation.overlap import overlap, overlap_warning, overlap_with_run, prompts_stage_of
from spec_train.evaluation.turns import Suite

APPLES = "Anna has twelve apples and gives a third of them to her brother. How many apples does she keep?"
TRAIN = "A train leaves the station at nine and travels at eighty kilometres an hour. When does it arrive in Graz?"
SHORT = "What is two plus two?"


def test_planted_copies_are_found() -> None:
    training = [
        "  anna HAS twelve apples, and gives a third of them to her brother; how many apples does she keep",
        "Answer step by step and check the result. " + TRAIN.replace("Graz", "Linz") + " Think before you answer.",
        "what is two plus two",
        "Something else altogether that shares no run of words with the others",
    ]
    found = overlap(["apples", "train", "short", "free"], [APPLES, TRAIN, SHORT, "Where is it?"], training)
    assert found == {"checked": 4, "exact": 2, "near": 1, "ids": ["apples", "train", "short"]}
    assert overlap_warning("gsm8k", found) == (
        "gsm8k: 3 of 4 prompts are in the training data (2 exact, 1 near, first apples); its figures flatter what was "
        "trained"
    )


def test_paraphrase_short_neighbour_and_scattered_pieces_are_not() -> None:
    halves = TRAIN.split(". ")
    training = [
        "Of her dozen apples Anna hands one third to a brother. What number is left for her?",
        "What is two plus three?",
        # Pieces of one prompt in several training prompts do not add up.
        " ".join(halves[0].split()[:10]),
        " ".join(halves[0].split()[4:14]),
    ]
    found = overlap(["apples", "train", "short"], [APPLES, TRAIN, SHORT], training)
    assert found == {"checked": 3, "exact": 0, "near": 0, "ids": []}
    assert overlap_warning("gsm8k", found) is None and overlap_warning("gsm8k", None) is None


def test_repeated_suite_prompts_are_all_named() -> None:
    assert overlap(["a", "b"], [APPLES, APPLES], [APPLES])["ids"] == ["a", "b"]


def test_agrees_with_pairwise_comparison() -> None:
    """Slow obvious reference: every suite prompt against every training prompt."""
    generator = random.Random(0)
    texts = [" ".join(generator.choice("abc") for _ in range(generator.randint(3, 24))) for _ in range(60)]
    suite, training = texts[:20], [*texts[20:], texts[0], texts[1] + " b a c", "c " + texts[2]]

    def runs(text: str) -> set[str]:
        words = text.split()
        return {" ".join(words[i : i + 8]) for i in range(len(words) - 7)}

    exact = {s for s in suite if s in training}
    near = {s for s in suite if runs(s) and any(2 * len(runs(s) & runs(t)) >= len(runs(s)) for t in training)} - exact
    found = overlap([str(i) for i in range(20)], suite, training)
    assert (found["exact"], found["near"]) == (len(exact), len(near)) and exact and near
    assert found["ids"] == [str(i) for i, s in enumerate(suite) if s in exact | near]


def test_suite_and_held_out_against_a_run(tmp_path: Path) -> None:
    def asked(name: str, *turns: str) -> Conversation:
        return Conversation(name, [{"role": "user", "content": turn} for turn in turns])

    suite = Suite("own", ["a", "b"], ["", ""], [[1], [2]], [APPLES, "Where is it?"])
    assert overlap_with_run(suite, tmp_path) is None
    write_conversations(tmp_path / "train.jsonl", [asked("t", "hello there", APPLES), asked("u", SHORT)])
    write_conversations(tmp_path / "validation.jsonl", [])
    write_conversations(tmp_path / "held_out.jsonl", [asked("h", TRAIN), asked("i", SHORT)])
    (tmp_path / "manifest.json").write_text("{}")
    assert overlap_with_run(suite, tmp_path) == {"checked": 2, "exact": 1, "near": 0, "ids": ["a"]}
    held_out = Suite("held_out", [], [], [])
    assert overlap_with_run(held_out, tmp_path) == {"checked": 2, "exact": 1, "near": 0, "ids": ["i"]}


def test_checkpoint_finds_the_prompts_of_its_run(tmp_path: Path) -> None:
    checkpoint = tmp_path / "run" / "train" / "step-3"
    checkpoint.mkdir(parents=True)
    assert not prompts_stage_of(checkpoint).exists()
    (tmp_path / "run" / "recipe.yaml").write_text("")
    (tmp_path / "run" / "prompts").mkdir()
    (tmp_path / "run" / "prompts" / "manifest.json").write_text("{}")
    assert prompts_stage_of(checkpoint) == tmp_path / "run" / "prompts"
