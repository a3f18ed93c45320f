"""The target's answers as token ids, or the data's own answers with their mask."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from spec_train.data.documents import Document, write_documents
from spec_train.data.prompts import SPLITS, Conversation, check_drops, read_conversations
from spec_train.errors import UserError
from spec_train.manifest import Stage, atomic_write_text, file_digests
from spec_train.run import DATE_FILE, Run
from spec_train.stages.common import make_stage
from spec_train.stages.features import store_header, stored_spec
from spec_train.stages.inputs import responses_inputs


def responses(run: Run, force: bool) -> None:
    """Make the stage where needed. Later stages depend on its documents and on the states captured with them."""
    recipe = run.recipe

    def work(stage: Stage) -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]]:
        from spec_train.data.features import store_digest

        make = _generate if recipe.responses.mode == "regenerate" else render_kept
        if run.date is not None:
            atomic_write_text(stage.directory / DATE_FILE, f"{run.date}\n")  # a run that goes on tomorrow keeps it
        counts: dict[str, Any] = {}
        dropped, notes = Counter[str](), Counter[str]()
        for split in SPLITS:
            conversations = read_conversations(run.stage_directory("prompts") / f"{split}.jsonl")
            documents, lost = make(run, conversations, stage.directory / f"parts-{split}", notes)
            write_documents(stage.directory / f"{split}.jsonl", documents)
            dropped += lost
            counts[split] = len(documents)
            counts[f"{split}_response_tokens"] = sum(document.num_response_tokens for document in documents)
            if split == "train" and documents and not any(document.can_be_drafted for document in documents):
                raise UserError(
                    "responses: no answer is longer than one token, and drafts begin at an answer's second: nothing to "
                    "train on; look at responses.max_new_tokens, data.max_length and the data"
                )
        check_drops(counts["train"], dropped, recipe.data.max_drop_rate, "responses")
        if counts["train_response_tokens"] == 0:
            raise UserError(
                "responses: no supervised token is left to train on; look at data.max_length and the template"
            )
        captured = {path.name: store_digest(path) for path in sorted(stage.directory.glob("captured-*"))}
        made = {**file_digests(stage.directory.glob("*.jsonl")), **captured}
        outputs = {} if run.date is None else {"date": run.date}
        return outputs, {**counts, "dropped": dict(dropped), "notes": dict(notes)}, made

    make_stage(run, "responses", responses_inputs, force, work)


def _generate(
    run: Run, conversations: list[Conversation], parts: Path, notes: Counter[str]
) -> tuple[list[Document], Counter[str]]:
    from spec_train.data.features import FeatureStore, check_disk
    from spec_train.data.responses import AnswerSettings, Capture, generate_responses
    from spec_train.decoding.sampling import Sampling
    from spec_train.progress import progress

    recipe = run.recipe
    section = recipe.responses
    target = run.target(section.dtype)
    capture = None
    if recipe.features.mode == "offline" and recipe.features.capture:
        header = store_header(run, target, section.dtype or recipe.target.dtype)
        directory = parts.with_name(parts.name.replace("parts", "captured"))
        check_disk(directory, header, len(conversations) * recipe.data.max_length)
        capture = Capture(FeatureStore(directory, header), stored_spec(run, target), run.torch_dtype)
    sampling = Sampling(section.temperature, section.top_k, section.top_p, seed=recipe.run.seed)
    settings = AnswerSettings(
        sampling, section.max_new_tokens, recipe.data.max_length, section.batch_size, run.prompt_kwargs
    )
    with progress(
        f"answers ({parts.name.removeprefix('parts-')})", len(conversations) * section.max_new_tokens
    ) as advance:
        return generate_responses(
            target,
            run.tokenizer,
            conversations,
            settings,
            parts,
            capture=capture,
            on_progress=lambda _answers, tokens: advance(tokens),
            notes=notes,
        )


def render_kept(
    run: Run, conversations: Iterable[Conversation], _parts: Path | None = None, notes: Counter[str] | None = None
) -> tuple[list[Document], Counter[str]]:
    """The data's own answers: one render each, cut at data.max_length or at the
    target's own limit. `notes` counts rows that are cut and what templates leave out on purpose."""
    from spec_train.data.chat import CUT_ROWS, render

    recipe = run.recipe
    limit = min(recipe.data.max_length, run.target_max_length)
    documents, dropped = [], Counter[str]()
    notes = Counter() if notes is None else notes
    for conversation in conversations:
        row = render(
            run.tokenizer,
            conversation,
            max_length=limit,
            last_turn_only=recipe.data.last_turn_only,
            stop_ids=run.stop_ids,
            notes=notes,
            **run.prompt_kwargs,
        )
        if isinstance(row, Document):
            documents.append(row)
        else:
            dropped[str(row)] += 1
    if cut := notes.pop(CUT_ROWS, 0):
        whose = "data.max_length" if limit == recipe.data.max_length else "the target's own limit"
        notes[f"rows cut at {limit} tokens, {whose}"] += cut
    return documents, dropped


def render_prompts(
    run: Run, conversations: Iterable[Conversation], notes: Counter[str] | None = None
) -> tuple[list[Document], Counter[str]]:
    """Prompts as the target gets them; nothing is supervised yet. `notes`: as in `render_kept`."""
    from spec_train.data.chat import render_prompt

    documents, dropped = [], Counter[str]()
    for c in conversations:
        ids = render_prompt(run.tokenizer, c.messages, tools=c.tools, notes=notes, **run.prompt_kwargs)
        if isinstance(ids, list):
            documents.append(Document(c.id, ids, [], c.category, c.source))
        else:
            dropped[str(ids)] += 1
    return documents, dropped
