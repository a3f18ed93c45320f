"""Hidden states on disk, where the recipe asks for them: captured while answering, the rest computed here."""

from __future__ import annotations

import hashlib
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from spec_train.data.documents import Document
from spec_train.data.prompts import SPLITS
from spec_train.errors import UserError
from spec_train.manifest import Stage
from spec_train.run import Run
from spec_train.speculators import speculator_class
from spec_train.stages.common import documents_of, make_stage
from spec_train.stages.inputs import features_inputs

if TYPE_CHECKING:
    from spec_train.batch import FeatureSpec
    from spec_train.data.features import FeatureReader, StoreHeader
    from spec_train.target import TargetModel


def feature_spec(run: Run, target: TargetModel) -> FeatureSpec:
    """The hidden states that the recipe's speculator reads."""
    section = run.recipe.speculator
    return speculator_class(section.type).required_features(section, target)


def stored_spec(run: Run, target: TargetModel) -> FeatureSpec:
    """The hidden states that are stored, which may be more than this speculator reads. Raises UserError if fewer."""
    needed, chosen = feature_spec(run, target), run.recipe.features.aux_layer_ids
    if chosen is None:
        return needed
    missing = sorted(set(needed.aux_layer_ids) - set(chosen))
    if missing:
        raise UserError(f"features.aux_layer_ids {chosen} lacks layers {missing} that the speculator reads; add them")
    return replace(needed, aux_layer_ids=tuple(sorted(set(chosen))))


def store_header(run: Run, target: TargetModel, computed_in: str) -> StoreHeader:
    """What a store of this run must say of itself; `computed_in` is the dtype that the target ran in."""
    from spec_train.data.features import StoreHeader

    return StoreHeader(
        target=f"{run.target_identity['name']} {run.target_identity['weights']}",
        computed_in=computed_in,
        aux_layer_ids=stored_spec(run, target).aux_layer_ids,
        hidden_size=target.hidden_size,
        dtype=run.recipe.features.dtype,
    )


def features(run: Run, force: bool) -> None:
    """Make the stage where needed. Later stages depend on the shards of every store that is read, by the checksums of
    their indices."""
    recipe = run.recipe

    def work(stage: Stage) -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]]:
        if recipe.features.mode == "online":
            return {"mode": "online: computed while training"}, {}, {"mode": "online"}
        from spec_train.data.features import check_disk, store_digest

        documents = [document for split in SPLITS for document in documents_of(run, split)]
        reader = feature_reader(run, recipe.responses.dtype or recipe.target.dtype)
        missing = reader.missing(documents)
        if missing:
            own = reader.stores[-1]
            target = run.target()
            check_disk(own.directory, own.header, sum(len(document.input_ids) for document in missing))
            _compute_features(run, target, missing, own)
        return (
            {"stores": [str(store.directory) for store in reader.stores], "bytes": sum(s.size for s in reader.stores)},
            {"captured": len(documents) - len(missing), "computed": len(missing)},
            {store.directory.name: store_digest(store.directory) for store in reader.stores},
        )

    make_stage(run, "features", features_inputs, force, work)


def feature_reader(run: Run, captured_in: str) -> FeatureReader:
    """What was captured while answering (where it fits what the run needs), then what this stage computed."""
    from spec_train.data.features import FeatureReader, FeatureStore

    target = run.target(captured_in) if run._target is None else run._target[1]
    stores = []
    wanted = feature_spec(run, target).aux_layer_ids
    for split in SPLITS:
        directory = run.stage_directory("responses") / f"captured-{split}"
        if (directory / "index.json").is_file():
            try:
                stores.append(FeatureStore(directory, store_header(run, target, captured_in)))
            except UserError:
                continue  # captured for other layers or in another dtype: computed anew below
    own = store_header(run, target, run.recipe.target.dtype)
    return FeatureReader([*stores, FeatureStore(run.stage_directory("features"), own)], wanted)


def _compute_features(run: Run, target: TargetModel, documents: list[Document], store: Any) -> None:
    """One pass of the target over the text, a shard per few micro-batches."""
    from spec_train.data.batches import build_batch
    from spec_train.data.features import DocumentFeatures
    from spec_train.progress import progress

    ordered = sorted(documents, key=lambda document: (len(document.input_ids), document.id))
    limit = run.recipe.train.micro_batch_tokens
    spec = stored_spec(run, target)
    with progress("hidden states", sum(len(document.input_ids) for document in ordered)) as advance:
        start = 0
        while start < len(ordered):
            end = start + 1
            while end < len(ordered) and (end + 1 - start) * len(ordered[end].input_ids) <= limit:
                end += 1
            chunk = ordered[start:end]
            batch = build_batch(chunk, [[i] for i in range(len(chunk))]).to(target.device)
            filled = target.fill_features(batch, spec, run.torch_dtype)
            assert filled.last_hidden_BTH is not None and filled.target_lse_BT is not None
            rows = []
            for i, document in enumerate(chunk):
                n = len(document.input_ids) - 1
                parts = (filled.aux_hidden_BTAH, filled.last_hidden_BTH, filled.target_lse_BT)
                states = [None if part is None else part[i, :n].cpu() for part in parts]
                rows.append((document, DocumentFeatures(states[0], states[1], states[2])))
            store.add(f"computed-{hashlib.sha256(chunk[0].id.encode()).hexdigest()[:16]}", rows)
            advance(sum(len(document.input_ids) for document in chunk))
            start = end
