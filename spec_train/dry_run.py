"""`spec-train run RECIPE --dry-run`: what every stage would do, checked and estimated; nothing is written."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from spec_train.data.features import free_disk
from spec_train.data.prompts import MOST_VALIDATION, SPLITS, hub_rows, load_conversations, split_conversations
from spec_train.estimate import TargetFacts, answer_tokens, size, state_bytes, target_facts
from spec_train.manifest import STAGES
from spec_train.recipe import Recipe
from spec_train.run import Run
from spec_train.serving.contract import CAPABILITIES, installed_vllm, version_problem
from spec_train.stages.inputs import stage_state
from spec_train.stages.responses import render_prompts


@dataclass(frozen=True)
class Plan:
    """`lines`: (stage, done / begun / to do / stale, what it does, or why it is refused as it lies there).
    `store_bytes`: of hidden states, at most; 0 online."""

    lines: list[tuple[str, str, str]]
    facts: TargetFacts
    store_bytes: int


def plan(recipe: Recipe, force: Collection[str] = ()) -> Plan:
    """Reads the target's config and tokenizer and the local sources, asks the Hub for the rows of the others. `force`:
    stages that are to be made anew. Raises UserError for whatever would stop the run before it starts."""
    run = Run(recipe)
    facts = target_facts(run)
    training, apart, source_text = _rows(run)
    lines = {
        "prompts": source_text,
        "responses": _responses(run, training + apart),
        "features": _features(run, facts, training + apart),
        "train": _train(run, facts, training),
        "eval": _eval(recipe),
        "export": f"formats {', '.join(recipe.export.formats or ['all that the method has'])}",
        "verify": _verify(recipe),
    }
    quantised = ", stored quantised" if facts.quantised else ""
    target = (
        f"{run.target_name}: {facts.family}, {facts.parameters / 1e9:.2f}B parameters, {size(facts.weight_bytes)} in "
        f"{recipe.target.dtype}{quantised}, {facts.layers} layers of {facts.hidden_size}, {facts.vocab_size} ids, "
        f"context {facts.max_length}"
    )
    stored = 0
    if recipe.features.mode == "offline":
        stored = (training + apart) * recipe.data.max_length * state_bytes(run, facts.hidden_size)
    stages: list[tuple[str, str, str]] = [("target", "found", target)]
    anew = False
    for stage in STAGES:
        anew = anew or stage in force
        state, why = ("to do", "") if anew else stage_state(run, stage)
        stages.append((stage, state, why or lines[stage]))
    return Plan(stages, facts, stored)


def _rows(run: Run) -> tuple[int, int, str]:
    """(conversations to train on, apart from these, in words); at most, where rows are not known before they are
    fetched."""
    data, mode = run.recipe.data, run.recipe.responses.mode
    local = [source for source in data.sources if source.hub is None]
    known, dropped = 0, 0
    if local:
        conversations, reasons = load_conversations(
            local, mode=mode, max_drop_rate=data.max_drop_rate, seed=run.recipe.run.seed
        )
        known, dropped = len(conversations), sum(reasons.values())
        render_prompts(run, conversations[:1])  # refuses chats where the tokenizer has no template
        if len(local) == len(data.sources):
            splits = split_conversations(
                conversations, held_out=data.held_out, validation=data.validation, seed=run.recipe.run.seed
            )
            training, validation, held_out = (len(splits[name]) for name in SPLITS)
            lost = f", {dropped} rows dropped" if dropped else ""
            words = f"{training} conversations, {validation} for validation, {held_out} held out{lost}"
            return training, validation + held_out, words
    for source in data.sources:
        if source.hub is not None:
            rows = hub_rows(source.hub, source.split)
            counts = [count for count in (rows, source.limit) if count is not None]
            known += round(min(counts, default=0) * source.weight)
    held = round(data.held_out * known) if data.held_out < 1 else int(data.held_out)
    rest = known - held
    validation = min(round(data.validation * rest), MOST_VALIDATION) if data.validation < 1 else int(data.validation)
    training = rest - validation
    words = f"at most {training} conversations, {validation} for validation, {held} held out"
    return training, validation + held, words


def _responses(run: Run, conversations: int) -> str:
    section = run.recipe.responses
    if section.mode == "keep":
        return "the data's own answers, rendered"
    return (
        f"the target answers in batches of {section.batch_size} at temperature {section.temperature:g}: at most "
        f"{answer_tokens(run, conversations):,} tokens for one turn each"
    )


def _features(run: Run, facts: TargetFacts, conversations: int) -> str:
    each = state_bytes(run, facts.hidden_size)
    if run.recipe.features.mode == "online":
        return f"none stored: the target runs while training (offline: {size(each)} a token)"
    most = conversations * run.recipe.data.max_length * each
    directory = run.stage_directory("features")
    return f"{size(each)} a token, at most {size(most)}; {size(free_disk(directory))} free in {directory.parent}"


def _train(run: Run, facts: TargetFacts, conversations: int) -> str:
    section, data = run.recipe.train, run.recipe.data
    a_step = section.micro_batch_tokens * section.grad_accum_steps
    steps = -(-conversations * data.max_length // a_step) * section.epochs
    if section.max_steps is not None:
        steps = min(steps, section.max_steps)
    return (
        f"{run.recipe.speculator.type}, {section.epochs} epochs, at most {steps:,} steps of {a_step:,} tokens on one "
        f"process, which holds the target's {size(facts.weight_bytes)} beside the head, its optimiser and a "
        "micro-batch (spec-train doctor RECIPE estimates them)"
    )


def _eval(recipe: Recipe) -> str:
    section = recipe.eval
    drafts = ", ".join(map(str, section.num_draft_tokens))
    temperatures = ", ".join(f"{t:g}" for t in section.temperature)
    prompts = f", {section.max_prompts} prompts each" if section.max_prompts else ""
    return f"{', '.join(section.suites)}{prompts}; K {drafts}; temperature {temperatures}"


def _verify(recipe: Recipe) -> str:
    version = installed_vllm()
    if recipe.export.vllm == "off" or version is None:
        why = "export.vllm is off" if recipe.export.vllm == "off" else "vLLM is not installed"
        return f"reload only: {why}"
    needs = CAPABILITIES[recipe.speculator.type].needs
    problem = version_problem(recipe.speculator.type, version)
    return f"reload, then {problem or f'vLLM {version}'}" + (f" (needs {needs})" if needs and not problem else "")
