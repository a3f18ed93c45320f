"""The stages of a run, one function each: prompts, responses, features, train, eval, export, verify.

Every stage reads the recipe and the manifests before it, and writes `<output_dir>/<stage>/`. A stage that is current
is skipped; one whose inputs disagree with what is on disk is refused; an interrupted one is continued.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import asdict
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console

from spec_train.data.documents import Document, read_documents, write_documents
from spec_train.data.prompts import (
    Conversation,
    check_drops,
    load_conversations,
    read_conversations,
    split_held_out,
    write_conversations,
)
from spec_train.errors import UserError
from spec_train.manifest import Stage, atomic_write_json, read_manifest, run_lock
from spec_train.recipe import Recipe
from spec_train.run import Run, source_fingerprints

if TYPE_CHECKING:
    from spec_train.data.features import FeatureReader, StoreHeader
    from spec_train.evaluation.evaluate import EvalSettings, Suite
    from spec_train.speculators.eagle3 import Eagle3
    from spec_train.target import TargetModel

STAGES = ("prompts", "responses", "features", "train", "eval", "export", "verify")
GOLDEN_TEXT = "The quick brown fox jumps over the lazy dog, and the dog does not mind."


def run_all(recipe: Recipe, force: set[str]) -> None:
    """Every stage in order. `force`: stages to make anew, and with them all that follow."""
    run = Run(recipe)
    anew = False
    for name in STAGES:
        anew = anew or name in force
        _FUNCTIONS[name](run, anew)
    show_results(run)


def run_prompts(recipe: Recipe, force: bool = False) -> None:
    """Read the sources; split off the held-out conversations."""
    _prompts(Run(recipe), force)


def run_responses(recipe: Recipe, force: bool = False) -> None:
    """The target's answers as token ids, or the data's own answers with their mask."""
    _responses(Run(recipe), force)


def run_features(recipe: Recipe, force: bool = False) -> None:
    """Hidden states on disk, where the recipe asks for them."""
    _features(Run(recipe), force)


def run_train(recipe: Recipe, force: bool = False) -> None:
    """Train the speculator."""
    _train(Run(recipe), force)


def run_eval(recipe: Recipe, force: bool = False) -> None:
    """Decode the suites with the speculator and with the baselines."""
    run = Run(recipe)
    _eval(run, force)
    show_results(run)


def run_export(recipe: Recipe, force: bool = False) -> None:
    """Write what vLLM loads."""
    _export(Run(recipe), force)


def run_verify(recipe: Recipe, force: bool = False) -> None:
    """Reload the export in a fresh process, then run it in real vLLM."""
    _verify(Run(recipe), force)


# ------------------------------------------------------------------------------------------------ prompts


def _prompts(run: Run, force: bool) -> None:
    recipe = run.recipe
    data = recipe.data.model_dump(mode="json", exclude={"max_length", "last_turn_only"})
    inputs = {
        "data": data,
        "source_files": source_fingerprints(recipe),
        "mode": recipe.responses.mode,
        "seed": recipe.run.seed,
    }

    def work(stage: Stage) -> tuple[dict[str, Any], dict[str, Any]]:
        conversations, dropped = load_conversations(
            recipe.data.sources,
            mode=recipe.responses.mode,
            max_drop_rate=recipe.data.max_drop_rate,
            seed=recipe.run.seed,
        )
        training, held_out = split_held_out(conversations, recipe.data.held_out, recipe.run.seed)
        write_conversations(stage.directory / "train.jsonl", training)
        write_conversations(stage.directory / "held_out.jsonl", held_out)
        counts = {"train": len(training), "held_out": len(held_out), "dropped": dict(dropped)}
        return {}, counts

    _make(run, "prompts", inputs, force, work)


# ------------------------------------------------------------------------------------------------ responses


def _responses(run: Run, force: bool) -> None:
    recipe = run.recipe
    inputs = {
        "prompts": run.made_from("prompts"),
        "target": run.target_identity,
        "responses": recipe.responses.model_dump(mode="json", exclude={"batch_size"}),
        "target_dtype": recipe.responses.dtype or recipe.target.dtype,
        "max_length": recipe.data.max_length,
        "last_turn_only": recipe.data.last_turn_only,
        "seed": recipe.run.seed,
    }

    def work(stage: Stage) -> tuple[dict[str, Any], dict[str, Any]]:
        make = _generate if recipe.responses.mode == "regenerate" else _render_kept
        counts: dict[str, Any] = {}
        dropped: Counter[str] = Counter()
        for split in ("train", "held_out"):
            conversations = read_conversations(run.directory / "prompts" / f"{split}.jsonl")
            documents, lost = make(run, conversations, stage.directory / f"parts-{split}")
            write_documents(stage.directory / f"{split}.jsonl", documents)
            dropped += lost
            counts[split] = len(documents)
            counts[f"{split}_response_tokens"] = sum(document.num_response_tokens for document in documents)
        check_drops(counts["train"], dropped, recipe.data.max_drop_rate, "responses")
        if counts["train_response_tokens"] == 0:
            raise UserError(
                "responses: no supervised token is left to train on; look at data.max_length and the template"
            )
        return {}, {**counts, "dropped": dict(dropped)}

    _make(run, "responses", inputs, force, work)


def _generate(run: Run, conversations: list[Conversation], parts: Path) -> tuple[list[Document], Counter[str]]:
    from spec_train.data.features import FeatureStore, check_disk
    from spec_train.data.responses import AnswerSettings, Capture, generate_responses
    from spec_train.decoding.sampling import Sampling
    from spec_train.progress import progress

    recipe = run.recipe
    section = recipe.responses
    target = run.target(section.dtype)
    capture = None
    if recipe.features.mode == "offline" and recipe.features.capture:
        header = _header(run, target, section.dtype or recipe.target.dtype)
        directory = parts.with_name(parts.name.replace("parts", "captured"))
        check_disk(directory, header, len(conversations) * recipe.data.max_length)
        capture = Capture(FeatureStore(directory, header), _feature_spec(run, target), run.torch_dtype)
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
        )


def _render_kept(run: Run, conversations: Iterable[Conversation], _parts: Path) -> tuple[list[Document], Counter[str]]:
    """The data's own answers: one render each, supervised by character offsets."""
    from spec_train.data.chat import render

    recipe = run.recipe
    documents, dropped = [], Counter[str]()
    for conversation in conversations:
        row = render(
            run.tokenizer,
            conversation,
            max_length=recipe.data.max_length,
            last_turn_only=recipe.data.last_turn_only,
            **run.prompt_kwargs,
        )
        if isinstance(row, Document):
            documents.append(row)
        else:
            dropped[str(row)] += 1
    return documents, dropped


def inspect_rows(recipe: Recipe, n: int) -> tuple[list[dict[str, Any]], int, dict[str, int]]:
    """The first `n` training rows as they would be supervised, how many are kept, and what is dropped and why.

    Rows come from the responses stage where it has run. Before that the data's own answers are rendered, so that a
    template or a mask can be judged before any work is done.
    """
    from spec_train.data.chat import inspect_rows as rows_of

    run = Run(recipe)
    finished = run.directory / "responses" / "train.jsonl"
    if finished.is_file():
        documents = read_documents(finished)
        dropped = dict(read_manifest(finished.parent)["counts"]["dropped"]) if _is_finished(finished.parent) else {}
        return list(rows_of(run.tokenizer, documents[:n])), len(documents), dropped
    conversations, lost = load_conversations(recipe.data.sources, mode="keep", max_drop_rate=1.0, seed=recipe.run.seed)
    documents, more = _render_kept(run, conversations, Path())
    return list(rows_of(run.tokenizer, islice(documents, n))), len(documents), dict(lost + more)


# ------------------------------------------------------------------------------------------------ features


def _feature_spec(run: Run, target: TargetModel) -> Any:
    from spec_train.batch import FeatureSpec
    from spec_train.speculators.eagle3 import aux_layer_ids

    return FeatureSpec(aux_layer_ids(run.recipe.speculator.aux_layer_ids, target.num_layers), last_hidden=True)


def _header(run: Run, target: TargetModel, computed_in: str) -> StoreHeader:
    from spec_train.data.features import StoreHeader

    return StoreHeader(
        target=f"{run.target_identity['name']} {run.target_identity['weights']}",
        computed_in=computed_in,
        aux_layer_ids=_feature_spec(run, target).aux_layer_ids,
        hidden_size=target.hidden_size,
        dtype=run.recipe.features.dtype,
    )


def _features(run: Run, force: bool) -> None:
    recipe = run.recipe
    inputs = {
        "responses": run.made_from("responses"),
        "mode": recipe.features.mode,
        "dtype": recipe.features.dtype,
        "aux_layer_ids": recipe.speculator.aux_layer_ids,
    }

    def work(stage: Stage) -> tuple[dict[str, Any], dict[str, Any]]:
        if recipe.features.mode == "online":
            return {"mode": "online: computed while training"}, {}
        from spec_train.data.features import check_disk

        documents = [*_documents(run, "train"), *_documents(run, "held_out")]
        reader = _reader(run, recipe.responses.dtype or recipe.target.dtype)
        missing = reader.missing(documents)
        if missing:
            own = reader.stores[-1]
            target = run.target()
            check_disk(own.directory, own.header, sum(len(document.input_ids) for document in missing))
            _compute_features(run, target, missing, own)
        return (
            {"stores": [str(store.directory) for store in reader.stores], "bytes": sum(s.size for s in reader.stores)},
            {"captured": len(documents) - len(missing), "computed": len(missing)},
        )

    _make(run, "features", inputs, force, work)


def _reader(run: Run, captured_in: str) -> FeatureReader:
    """What was captured while answering (where it fits what the run needs), then what this stage computed."""
    from spec_train.data.features import FeatureReader, FeatureStore

    target = run.target(captured_in) if run._target is None else run._target[1]
    stores = []
    for split in ("train", "held_out"):
        directory = run.directory / "responses" / f"captured-{split}"
        if (directory / "index.json").is_file():
            try:
                stores.append(FeatureStore(directory, _header(run, target, captured_in)))
            except UserError:
                continue  # captured for other layers or in another dtype: computed anew below
    stores.append(FeatureStore(run.directory / "features", _header(run, target, run.recipe.target.dtype)))
    return FeatureReader(stores)


def _compute_features(run: Run, target: TargetModel, documents: list[Document], store: Any) -> None:
    """One pass of the target over the text, a shard per few micro-batches."""
    from spec_train.data.batches import build_batch
    from spec_train.data.features import DocumentFeatures
    from spec_train.progress import progress

    ordered = sorted(documents, key=lambda document: (len(document.input_ids), document.id))
    limit = run.recipe.train.micro_batch_tokens
    spec = _feature_spec(run, target)
    with progress("hidden states", sum(len(document.input_ids) for document in ordered)) as advance:
        start = 0
        while start < len(ordered):
            end = start + 1
            while end < len(ordered) and (end + 1 - start) * len(ordered[end].input_ids) <= limit:
                end += 1
            chunk = ordered[start:end]
            batch = build_batch(chunk, [[i] for i in range(len(chunk))]).to(target.device)
            filled = target.fill_features(batch, spec, run.torch_dtype)
            assert filled.aux_hidden_BTAH is not None
            assert filled.last_hidden_BTH is not None and filled.target_lse_BT is not None
            rows = []
            for i, document in enumerate(chunk):
                n = len(document.input_ids) - 1
                parts = (filled.aux_hidden_BTAH, filled.last_hidden_BTH, filled.target_lse_BT)
                rows.append((document, DocumentFeatures(*(part[i, :n].cpu() for part in parts))))
            store.add(f"computed-{document_key(chunk[0])}", rows)
            advance(sum(len(document.input_ids) for document in chunk))
            start = end


def document_key(document: Document) -> str:
    """A file name for the shard that begins with this document."""
    import hashlib

    return hashlib.sha256(document.id.encode()).hexdigest()[:16]


def _documents(run: Run, split: str) -> list[Document]:
    return read_documents(run.directory / "responses" / f"{split}.jsonl")


# ------------------------------------------------------------------------------------------------ train


def _train(run: Run, force: bool) -> None:
    recipe = run.recipe
    inputs = {
        "features": run.made_from("features"),
        "target": run.target_identity,
        "target_dtype": recipe.target.dtype,
        "speculator": recipe.speculator.model_dump(mode="json", exclude={"gradient_checkpointing"}),
        "optim": recipe.optim.model_dump(mode="json"),
        "train": recipe.train.model_dump(mode="json", exclude={"trackers", "log_every", "keep_checkpoints"}),
        "num_draft_tokens": recipe.eval.num_draft_tokens,
        "seed": recipe.run.seed,
    }

    def work(stage: Stage) -> tuple[dict[str, Any], dict[str, Any]]:
        from spec_train.training.trainer import train

        documents, held_out = _documents(run, "train"), _documents(run, "held_out")
        provider = _provider(run)
        speculator, coverage = _new_speculator(run, documents, held_out)
        result = train(
            speculator,
            documents,
            held_out,
            provider,
            optim=recipe.optim,
            train=recipe.train,
            seed=recipe.run.seed,
            device=recipe.run.device,
            num_draft_tokens=recipe.eval.num_draft_tokens,
            output_dir=stage.directory,
            speculator_config={"type": "eagle3", **asdict(speculator.config)},
            run_config=recipe.model_dump(mode="json"),
        )
        return {**asdict(result), "held_out_coverage": coverage}, {
            "documents": len(documents),
            "held_out": len(held_out),
        }

    _make(run, "train", inputs, force, work)


def _provider(run: Run) -> Callable[[Any], Any]:
    """Hidden states for a batch: from disk, or from the target in this process."""
    from spec_train.data.batches import add_features

    recipe = run.recipe
    target = run.target()
    if recipe.features.mode == "online":
        spec, dtype = _feature_spec(run, target), run.torch_dtype
        return lambda batch: target.fill_features(batch, spec, dtype)
    reader = _reader(run, recipe.responses.dtype or recipe.target.dtype)
    return lambda batch: add_features(batch, reader.read).to(batch.input_ids_BT.device)


def _new_speculator(run: Run, documents: list[Document], held_out: list[Document]) -> tuple[Eagle3, float]:
    """A fresh head, and the share of held-out response tokens that its vocabulary can express."""
    import torch

    from spec_train.data.draft_vocab import choose_draft_vocab, coverage
    from spec_train.speculators.eagle3 import Eagle3, eagle3_config

    target, section = run.target(), run.recipe.speculator
    if section.draft_vocab_size is None:
        ids = torch.arange(target.vocab_size)
    else:
        ids = choose_draft_vocab(
            documents,
            target.vocab_size,
            section.draft_vocab_size,
            special_ids=target.eos_token_ids,
            tokenizer_len=len(run.tokenizer),
        )
    config = eagle3_config(section, target, len(ids))
    head = Eagle3.from_target(config, target, ids, section.init, run.recipe.run.seed)
    return head, coverage(held_out or documents, ids)


# ------------------------------------------------------------------------------------------------ eval


def load_trained(checkpoint: Path, target: TargetModel) -> Eagle3:
    """The head of a training checkpoint, in the target's dtype and on its device."""
    from spec_train.speculators.eagle3 import Eagle3

    config_file = checkpoint / "speculator.json"
    if not config_file.is_file():
        raise UserError(
            f"{checkpoint}: no speculator.json here; give a checkpoint (.../train/checkpoints/step-...) or an export"
        )
    return Eagle3.from_checkpoint(checkpoint, json.loads(config_file.read_text(encoding="utf-8")), target)


def _best_checkpoint(run: Run) -> Path:
    return Path(read_manifest(run.directory / "train")["outputs"]["best_checkpoint"])


def _suite(run: Run, name: str) -> Suite:
    """A suite's prompts, rendered as the run renders its own."""
    from spec_train.evaluation.evaluate import Suite

    if name == "held_out":
        documents = [document for document in _documents(run, "held_out") if document.spans[0][0] > 0]
        prompts = [document.input_ids[: document.spans[0][0]] for document in documents]
        suite = Suite(name, [d.id for d in documents], [d.category for d in documents], prompts)
    else:
        suite = render_suite(name, run.tokenizer, run.prompt_kwargs)
    if not suite.prompts:
        raise UserError(f"eval.suites {name}: no prompt can be rendered")
    return suite.first(run.recipe.eval.max_prompts)


def render_suite(name: str, tokenizer: Any, prompt_kwargs: dict[str, Any]) -> Suite:
    """A bundled suite or a user's file, rendered with the tokenizer's template."""
    from spec_train.data.chat import render_prompt
    from spec_train.evaluation.evaluate import Suite
    from spec_train.evaluation.suites import load_suite

    ids, categories, prompts = [], [], []
    for conversation in load_suite(name):
        asked = list(conversation.messages)
        while asked and asked[-1]["role"] == "assistant":
            asked.pop()
        rendered = render_prompt(tokenizer, asked, tools=conversation.tools, **prompt_kwargs)
        if isinstance(rendered, list):
            ids.append(conversation.id)
            categories.append(conversation.category)
            prompts.append(rendered)
    return Suite(Path(name).stem, ids, categories, prompts)


def _settings(run: Run, temperature: float) -> EvalSettings:
    from spec_train.decoding.sampling import Sampling
    from spec_train.evaluation.evaluate import EvalSettings

    section = run.recipe.eval
    sampling = Sampling(temperature, section.top_k, section.top_p, section.draft_sample_method, run.recipe.run.seed)
    max_new_tokens = section.max_new_tokens or run.recipe.responses.max_new_tokens
    return EvalSettings(sampling, max_new_tokens, section.batch_size, section.speed_prompts, section.speed_rounds)


def _eval(run: Run, force: bool) -> None:
    recipe = run.recipe
    inputs = {
        "train": run.made_from("train"),
        "eval": recipe.eval.model_dump(mode="json"),
        "dtype": recipe.target.dtype,
    }

    def work(stage: Stage) -> tuple[dict[str, Any], dict[str, Any]]:
        checkpoint = _best_checkpoint(run)
        target = run.target()
        head = load_trained(checkpoint, target)
        results: list[dict[str, Any]] = []
        for name in recipe.eval.suites:
            suite = _suite(run, name)
            for temperature in recipe.eval.temperature:
                results += evaluate_suite(
                    target,
                    head,
                    suite,
                    _settings(run, temperature),
                    list(recipe.eval.num_draft_tokens),
                    baselines=list(recipe.eval.baselines),
                    ngram=(recipe.eval.ngram_min, recipe.eval.ngram_max),
                    speculator_name=str(checkpoint),
                    target_name=run.target_name,
                    directory=stage.directory,
                )
        return {"results": [str(p.name) for p in sorted(stage.directory.glob("*-k*.json"))]}, {"results": len(results)}

    _make(run, "eval", inputs, force, work)


def evaluate_suite(
    target: TargetModel,
    head: Any,
    suite: Suite,
    settings: EvalSettings,
    num_draft_tokens: list[int],
    *,
    baselines: list[str],
    ngram: tuple[int, int],
    speculator_name: str,
    target_name: str,
    directory: Path | None = None,
) -> list[dict[str, Any]]:
    """Every method at every K on one suite. Results are written as they come, and read back after an interruption."""
    from spec_train.evaluation.evaluate import decode_reference, estimator, evaluate
    from spec_train.evaluation.report import result_name, write_results
    from spec_train.speculators.base import Speculator
    from spec_train.speculators.ngram import NgramProposer

    proposers: list[tuple[str, str, Any]] = []
    if "ngram" in baselines:
        proposers.append(("ngram", f"prompt lookup n={ngram[0]}..{ngram[1]}", NgramProposer(*ngram)))
    if head is not None:
        proposers.append(("eagle3", speculator_name, head))
    results, reference, estimate = [], None, None
    for method, name, proposer in proposers:
        for k in num_draft_tokens:
            key = {
                "suite": suite.name,
                "method": method,
                "num_draft_tokens": k,
                "temperature": settings.sampling.temperature,
                "draft_sample_method": settings.sampling.draft_sample_method,
            }
            done = directory / result_name(key) if directory else None
            if done is not None and done.is_file():
                results.append(json.loads(done.read_text(encoding="utf-8")))
                continue
            if reference is None:
                reference = decode_reference(target, suite, settings)
            if isinstance(proposer, Speculator) and settings.sampling.greedy and estimate is None:
                estimate = estimator(target, proposer, reference.trace, max(num_draft_tokens))
            result, _ = evaluate(
                target,
                proposer,
                suite,
                reference,
                settings,
                k,
                method=method,
                speculator_name=name,
                target_name=target_name,
                estimate=estimate if isinstance(proposer, Speculator) else None,
            )
            results.append(result)
            if directory is not None:
                write_results(directory, [result])
    return results


def evaluate_checkpoint(
    checkpoint: str,
    target: str,
    suite: str,
    num_draft_tokens: list[int],
    temperature: list[float],
    *,
    max_prompts: int | None = None,
    max_new_tokens: int = 256,
    batch_size: int = 8,
    dtype: str = "float32",
    device: str = "auto",
    top_k: int = 0,
    top_p: float = 1.0,
    draft_sample_method: Any = "greedy",
    speed_prompts: int = 4,
    speed_rounds: int = 3,
    seed: int = 0,
) -> list[dict[str, Any]]:
    """Evaluate a training checkpoint, an export, or "ngram" on a suite, without a recipe."""
    import torch

    from spec_train.data.chat import load_tokenizer
    from spec_train.decoding.sampling import Sampling
    from spec_train.evaluation.evaluate import EvalSettings
    from spec_train.target import TargetModel

    path = Path(checkpoint)
    if checkpoint != "ngram" and not path.is_dir():
        raise UserError(f"{checkpoint}: no such checkpoint or export; give a folder, or ngram")
    where = ("cuda" if torch.cuda.is_available() else "cpu") if device == "auto" else device
    prompts = render_suite(suite, load_tokenizer(target), {}).first(max_prompts)
    model = TargetModel.load(target, dtype=getattr(torch, dtype), device=where)
    head = None if checkpoint == "ngram" else load_any(path, model)
    results = []
    for value in temperature:
        sampling = Sampling(value, top_k, top_p, draft_sample_method, seed)
        settings = EvalSettings(sampling, max_new_tokens, batch_size, speed_prompts, speed_rounds)
        results += evaluate_suite(
            model,
            head,
            prompts,
            settings,
            num_draft_tokens,
            baselines=["ngram"] if head is None else [],
            ngram=(2, 4),
            speculator_name=checkpoint,
            target_name=target,
        )
    return results


def load_any(path: Path, target: TargetModel) -> Eagle3:
    """The head of a training checkpoint or of an export (either format)."""
    if (path / "speculator.json").is_file():
        return load_trained(path, target)
    from safetensors.torch import load_file

    from spec_train.speculators.eagle3 import Eagle3

    if not (path / "config.json").is_file() or not (path / "model.safetensors").is_file():
        raise UserError(
            f"{path}: neither a training checkpoint (speculator.json) nor an export (config.json, model.safetensors)"
        )
    config = json.loads((path / "config.json").read_text(encoding="utf-8"))
    head = Eagle3.from_serving(config, load_file(path / "model.safetensors"), target)
    return head.to(target.device, target.dtype)


# ------------------------------------------------------------------------------------------------ export and verify


def _export(run: Run, force: bool) -> None:
    recipe = run.recipe
    inputs = {
        "train": run.made_from("train"),
        "formats": recipe.export.formats,
        "num_draft_tokens": recipe.export.verify_num_draft_tokens,
        "target": run.target_path,
    }

    def work(stage: Stage) -> tuple[dict[str, Any], dict[str, Any]]:
        import torch

        from spec_train.serving.export import export, read_export
        from spec_train.serving.golden import make_golden

        checkpoint = _best_checkpoint(run)
        target = run.target("float32")
        head = load_trained(checkpoint, target).float()
        ids = run.tokenizer(GOLDEN_TEXT, add_special_tokens=False)["input_ids"]
        golden = make_golden(head, target, ids)
        train = read_manifest(run.directory / "train")
        provenance = {
            "recipe": recipe.model_dump(mode="json"),
            "checkpoint": checkpoint.name,
            "training": train["outputs"],
            "versions": train["versions"],
            "git_revision": train["git_revision"],
            "target": run.target_identity,
            "torch": torch.__version__,
        }
        commands = {}
        for form in recipe.export.formats:
            folder = export(
                head.serving(),
                stage.directory / form,
                format=form,
                target_id=run.target_path,
                num_draft_tokens=recipe.export.verify_num_draft_tokens,
                golden=golden,
                provenance=provenance,
            )
            commands[form] = read_export(folder)["serve"]
        return {"serve": commands}, {}

    _make(run, "export", inputs, force, work)


def _verify(run: Run, force: bool) -> None:
    from spec_train.serving.contract import installed_vllm

    recipe = run.recipe
    inputs = {
        "export": run.made_from("export"),
        "responses": run.made_from("responses"),
        "settings": recipe.export.model_dump(mode="json"),
        "max_new_tokens": recipe.responses.max_new_tokens,
        "vllm_version": installed_vllm() if recipe.export.vllm != "off" else None,
    }

    def work(stage: Stage) -> tuple[dict[str, Any], dict[str, Any]]:
        from spec_train.decoding.engine import speculative_decode
        from spec_train.decoding.sampling import Sampling
        from spec_train.serving.verify import baseline_run, render_report, verify_export

        section = recipe.export
        prompts = [d.input_ids[: d.spans[0][0]] for d in (_documents(run, "held_out") or _documents(run, "train"))]
        prompts = prompts[: section.verify_prompts]
        target = run.target("float32")
        head = load_trained(_best_checkpoint(run), target).float()
        k, limit = section.verify_num_draft_tokens, recipe.responses.max_new_tokens
        trace = speculative_decode(
            target, head, prompts, num_draft_tokens=k, sampling=Sampling(), max_new_tokens=limit, batch_size=16
        )
        folder = _local_folder(run.target_path)
        use_vllm = section.vllm != "off" and installed_vllm() is not None
        baseline = baseline_run(folder, prompts, max_new_tokens=limit, max_draft_tokens=k) if use_vllm else None
        reports = []
        for form in section.formats:
            report = verify_export(
                run.directory / "export" / form,
                folder,
                prompts=prompts,
                max_new_tokens=limit,
                num_draft_tokens=k,
                expected_trace=trace,
                vllm=section.vllm,
                baseline=baseline,
            )
            reports.append(report)
            if run.is_main:
                Console().print(render_report(report))
        atomic_write_json(stage.directory / "report.json", [asdict(report) for report in reports])
        problems = [problem for report in reports for problem in report.problems]
        if problems:
            raise RuntimeError(
                f"verify: {problems[0]} ({len(problems)} problems, see {stage.directory / 'report.json'})"
            )
        return {"reports": [report.vllm_status for report in reports]}, {"prompts": len(prompts)}

    _make(run, "verify", inputs, force, work)


def verify_export_dir(
    export_dir: Path, target: str | None, *, num_draft_tokens: int, max_new_tokens: int, prompts: int
) -> Any:
    """Verify an export on a few bundled prompts, without a recipe."""
    import torch

    from spec_train.data.chat import load_tokenizer
    from spec_train.decoding.engine import speculative_decode
    from spec_train.decoding.sampling import Sampling
    from spec_train.serving.export import read_export
    from spec_train.serving.verify import verify_export
    from spec_train.target import TargetModel

    name = target or str(read_export(export_dir)["target_id"])
    suite = render_suite("gsm8k", load_tokenizer(name), {}).first(prompts)
    model = TargetModel.load(name, dtype=torch.float32)
    trace = speculative_decode(
        model,
        load_any(export_dir, model),
        suite.prompts,
        num_draft_tokens=num_draft_tokens,
        sampling=Sampling(),
        max_new_tokens=max_new_tokens,
        batch_size=8,
    )
    return verify_export(
        export_dir,
        _local_folder(name),
        prompts=suite.prompts,
        max_new_tokens=max_new_tokens,
        num_draft_tokens=num_draft_tokens,
        expected_trace=trace,
        vllm="auto",
    )


def _local_folder(name: str) -> Path:
    """The folder of a target; a hub id is resolved in the local cache."""
    if Path(name).is_dir():
        return Path(name)
    from huggingface_hub import snapshot_download

    return Path(snapshot_download(name, local_files_only=True))


# ------------------------------------------------------------------------------------------------ the walk


def show_results(run: Run) -> None:
    """The table of the eval stage, what the machine gains and why, and how to serve the result."""
    from spec_train.evaluation.metrics import explain_speed
    from spec_train.evaluation.report import result_table

    if not run.is_main or not _is_finished(run.directory / "eval"):
        return
    console = Console(width=140, soft_wrap=False)
    files = [run.directory / "eval" / name for name in read_manifest(run.directory / "eval")["outputs"]["results"]]
    results = [json.loads(path.read_text(encoding="utf-8")) for path in files]
    order = {"ngram": 0}
    results.sort(key=lambda r: (r["suite"], r["temperature"], order.get(r["method"], 1), r["num_draft_tokens"]))
    console.print(result_table(results, title=f"{run.target_name} on {results[0]['device']}, {results[0]['dtype']}"))
    for result in results:
        if result["speed"] and result["method"] != "ngram":
            text = explain_speed(result["speed"], result["speed"]["tokens_per_step"], result["num_draft_tokens"])
            console.print(f"{result['method']} K={result['num_draft_tokens']}: {text}", markup=False)
    if _is_finished(run.directory / "verify"):
        for status in read_manifest(run.directory / "verify")["outputs"]["reports"]:
            console.print(f"vLLM: {status}", markup=False)
    if _is_finished(run.directory / "export"):
        for form, command in read_manifest(run.directory / "export")["outputs"]["serve"].items():
            console.print(f"serve ({form}): {command}", markup=False, soft_wrap=True)


Work = Callable[[Stage], tuple[dict[str, Any], dict[str, Any]]]


def _make(run: Run, name: str, inputs: dict[str, Any], force: bool, work: Work) -> None:
    """Skip, refuse, continue or make one stage. Only the main process of a launch writes its bookkeeping."""
    stage = run.stage(name, inputs)
    if not run.is_main:
        if not stage.is_current():
            work(stage)
        return
    console = Console(stderr=True)
    run.save_recipe()
    with run_lock(run.directory):
        if force:
            stage.discard()
        if stage.is_current():
            console.print(f"{name}: current", style="dim", markup=False)
            return
        stage.begin()
        console.print(f"{name}: working in {stage.directory}", style="bold", markup=False)
        outputs, counts = work(stage)
        stage.finish(outputs, counts)
        said = ", ".join(f"{key} {value:,}" for key, value in counts.items() if isinstance(value, int))
        console.print(f"{name}: done{f' ({said})' if said else ''}", markup=False)
        for reason, count in counts.get("dropped", {}).items():
            console.print(f"  dropped {count}: {reason}", markup=False)


def _is_finished(directory: Path) -> bool:
    return (directory / "manifest.json").is_file()


_FUNCTIONS: dict[str, Callable[[Run, bool], None]] = {
    "prompts": _prompts,
    "responses": _responses,
    "features": _features,
    "train": _train,
    "eval": _eval,
    "export": _export,
    "verify": _verify,
}
