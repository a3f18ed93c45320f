"""PARD: one parallel pass of a draft language model, alike in training, in the decoder and in the estimate."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch
from pydantic import ValidationError
from safetensors.torch import save_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from spec_train.batch import Batch
from spec_train.decoding.engine import plain_decode, speculative_decode
from spec_train.decoding.sampling import Sampling
from spec_train.errors import UserError
from spec_train.serving.export import export
from spec_train.speculators import load_speculator
from spec_train.speculators.base import Committed, Features, Proposal
from spec_train.speculators.draft_lm import DraftLM
from spec_train.speculators.draft_start import DraftLMOptions
from spec_train.speculators.losses import head_loss_reference
from spec_train.speculators.pard import Pard, PardOptions
from spec_train.speculators.pard_rows import by_document, row_places, visible_rows
from spec_train.speculators.supervision import supervised_queries
from spec_train.target import TargetModel
from tests.chain_heads import (
    PROMPTS,
    answers,
    assert_estimate_equals_decode,
    assert_resumes,
    decode_one,
    drafted_logits,
    fit,
    randomise_norms,
)
from tests.parity.test_eagle3 import packed_batch
from tests.tiny import tiny_model

LORA = {"rank": 4, "alpha": 8.0}


def draft_for(target: TargetModel, ids: Tensor | None = None, **changes: Any) -> Pard:
    settings = {"type": "pard", "start_layers": 2, "num_depths": 4, "retention": 1.0, "step_decay": 1.0}
    options = PardOptions(**{**settings, **changes})
    draft = Pard.from_recipe(options, target, torch.arange(target.vocab_size) if ids is None else ids, seed=0)
    if options.lora is None:
        randomise_norms(draft)
    return draft


def write(draft: DraftLM, folder: Path, target: TargetModel) -> Path:
    settings: dict[str, Any] = {"target_id": target.name, "num_draft_tokens": 4, "golden": None, "provenance": {}}
    return export(draft.serving(), folder, format="plain", **settings)


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> TargetModel:
    return TargetModel.load(str(tiny_model("llama", tmp_path_factory.mktemp("llama"))))


@pytest.fixture(scope="module")
def tied(tmp_path_factory: pytest.TempPathFactory) -> TargetModel:
    return TargetModel.load(str(tiny_model("llama", tmp_path_factory.mktemp("tied"), tie_word_embeddings=True)))


@pytest.mark.parametrize("kind", ["llama", "qwen3", "mistral", "gemma3_text"])
def test_training_pass_equals_the_parallel_draft(kind: str, tmp_path: Path) -> None:
    """Depth k of the training pass gives the logits of draft k, at and beyond the depths trained, behind another
    document and through sliding windows (N07)."""
    target = TargetModel.load(str(tiny_model(kind, tmp_path)))
    draft, depths = draft_for(target), 6
    ids = torch.randint(3, 300, (30,), generator=torch.Generator().manual_seed(0)).tolist()
    ids[4] = draft.config.mask_token_id  # a prompt may hold it
    batch = by_document(packed_batch([([9] * 5, 2), (ids, 3)], 2))
    queries = supervised_queries(batch, depths, everywhere=True)
    with torch.no_grad():
        trained = [draft.draft_logits(state)[1] for state in draft.depth_states(batch, queries, depths)]
    row = queries.index_BQ[1].tolist()
    alone = packed_batch([(ids, 3)], 1)
    for p in (4, 11, 22):
        for k, logits in enumerate(drafted_logits(draft, alone, p, depths, feed_text=False)):
            assert torch.allclose(trained[k][row.index(p)], logits, atol=1e-4), (p, k)


@pytest.mark.parametrize("kind", ["llama", "mistral", "gemma3"])
def test_estimate_equals_decode(kind: str, tmp_path: Path) -> None:
    target = TargetModel.load(str(tiny_model(kind, tmp_path)))
    draft = draft_for(target, torch.arange(0, 320, 2) if kind == "mistral" else None, num_depths=3)
    batch = answers(target, draft)
    fit(draft, batch, 20)
    for k in (3, 5):
        assert_estimate_equals_decode(target, draft, batch, k)


def test_hits_do_not_depend_on_the_parts_they_are_counted_in(target: TargetModel, monkeypatch: Any) -> None:
    draft = draft_for(target).eval()
    batch = answers(target, draft)
    whole = draft.draft_hits(batch, 4)
    monkeypatch.setattr("spec_train.speculators.pard.HIT_ROWS", 28)
    for one, other in zip(whole, draft.draft_hits(batch, 4), strict=True):
        assert one.document_id == other.document_id
        assert torch.equal(one.survival_MK, other.survival_MK)


def test_one_sample_overfit_and_corruption(target: TargetModel) -> None:
    """A draft overfitted to one prompt, with the drop, is accepted almost whole; corrupted, it changes speed, never
    text (E05)."""
    draft, k = draft_for(target, retention=0.7), 4
    fit(draft, answers(target, draft, PROMPTS[:1], 41), 200)
    same, tau = decode_one(target, draft, k)
    assert same
    assert tau >= k + 0.9
    with torch.no_grad():
        draft.mask_embedding.mul_(-1)
    same, without_mask = decode_one(target, draft, k)
    assert same
    assert 1.9 < without_mask < tau - 0.5  # the first draft reads no mask
    with torch.no_grad():
        draft.decoder.norm.weight.mul_(-1)
    same, corrupted = decode_one(target, draft, k)
    assert same
    assert corrupted < tau - 2


@pytest.mark.parametrize(
    ("kind", "temperature", "changes"),
    [("kl", 1.0, {}), ("ce", 1.0, {"train_embeddings": True}), ("lk", 2.0, {"step_decay": 0.5})],
)
def test_loss_equals_the_plain_one(target: TargetModel, kind: Any, temperature: float, changes: dict[str, Any]) -> None:
    """One pass over all rows = for every position a plain causal pass over [text up to it, masks], value and
    gradient."""
    ids = torch.arange(0, 320, 2)
    draft = draft_for(target, ids, num_depths=3, loss=kind, temperature=temperature, **changes)
    documents = [(list(range(5, 17)), 6), (list(range(40, 49)), 4), ([3, 99, 250, 7, 11, 100], 2)]
    batch = target.fill_features(packed_batch(documents, 2), draft.feature_spec, torch.float32)
    counts = draft.supervised_counts(batch)
    out = draft.loss(batch, counts)
    out.loss.backward()  # type: ignore[no-untyped-call]
    gradients = {name: p.grad.clone() for name, p in draft.named_parameters() if p.grad is not None}
    assert gradients.keys() == {name for name, p in draft.named_parameters() if p.requires_grad}
    draft.zero_grad()
    total, hits = torch.zeros(()), torch.zeros(3).double()
    for tokens, start in documents:
        with torch.no_grad():
            laws = (target.model(torch.tensor([tokens])).logits[0] / temperature).softmax(-1)
        for anchor in range(len(tokens)):
            row = torch.tensor([tokens[: anchor + 1] + [draft.config.mask_token_id] * 2])
            hidden = draft.body.model(row, output_hidden_states=True).hidden_states[-1][0, anchor:]
            for k in range(3):
                t = anchor + 1 + k
                if not max(start, 2) <= t < len(tokens) or anchor == 0:
                    continue
                label = torch.tensor([tokens[t] // 2 if tokens[t] % 2 == 0 else -1])
                scale = (draft.config.step_decay**k / counts[k].float())[None]
                one = head_loss_reference(
                    hidden[k : k + 1], draft.head_VH[ids], laws[t - 1 : t, ids], scale, label, kind, 3.0, 0.5,
                    temperature,
                )  # fmt: skip
                total, hits[k] = total + one.total, hits[k] + one.hit_N.sum()
    total.backward()  # type: ignore[no-untyped-call]
    assert torch.allclose(out.loss, total, atol=1e-5, rtol=1e-5)
    assert torch.equal(out.sums["hit"], hits)
    assert torch.equal(out.counts["hit"], counts)
    for name, p in draft.named_parameters():
        if p.requires_grad:
            assert p.grad is not None
            assert float((p.grad - gradients[name]).abs().max()) <= 1e-4 * float(p.grad.abs().max()), name


def test_rows_see_the_text_up_to_their_anchor_and_their_own_chain() -> None:
    queries = supervised_queries(packed_batch([([4, 5, 6, 7, 8], 2)], 1), 3)
    assert queries.index_BQ.tolist() == [[0, 1, 2]]
    anchor_BR, depth_R = row_places(queries, 5, [3, 2])
    assert anchor_BR.tolist() == [[0, 1, 2, 3, 4, 1, 2, 3, 1, 2]]
    assert depth_R.tolist() == [0, 0, 0, 0, 0, 1, 1, 1, 2, 2]
    seen = visible_rows(anchor_BR, depth_R, 5)[0]
    assert seen[3].nonzero()[:, 0].tolist() == [0, 1, 2, 3]
    assert seen[6].nonzero()[:, 0].tolist() == [0, 1, 2, 6]
    assert seen[9].nonzero()[:, 0].tolist() == [0, 1, 2, 6, 9]


def test_packed_documents_become_rows() -> None:
    documents = [([4, 5, 6], 1), ([7, 8], 1), ([9, 10, 11, 12], 2)]
    batch = by_document(packed_batch(documents, 2))
    assert batch.input_ids_BT.tolist() == [[4, 5, 6, 0], [7, 8, 0, 0], [9, 10, 11, 12]]
    assert batch.document_BT.tolist() == [[0, 0, 0, -1], [0, 0, -1, -1], [0, 0, 0, 0]]
    assert batch.loss_weight_BT.tolist() == [[0, 1, 1, 0], [0, 1, 0, 0], [0, 0, 1, 1]]
    assert batch.row_ids == (("0-0",), ("0-1",), ("1-0",))
    nothing = torch.zeros(1, 3, dtype=torch.long)
    empty = by_document(Batch(nothing, nothing, nothing - 1, nothing.float()))
    assert empty.document_BT.tolist() == [[-1]]


def test_dropped_rows_leave_the_expected_loss(target: TargetModel) -> None:
    """The mean over many drops is the loss without; depth 0 is never dropped."""
    draft = draft_for(target, retention=0.6, retention_min=0.3)
    batch = answers(target, draft, new_tokens=20)
    normalizer = draft.supervised_counts(batch)
    draft.eval()
    whole = draft.loss(batch, normalizer)
    draft.train()
    torch.manual_seed(0)
    losses = []
    for _ in range(40):
        out = draft.loss(batch, normalizer)
        losses.append(out.loss.detach())
        assert torch.equal(out.counts["hit"][:1], whole.counts["hit"][:1])
        assert torch.allclose(out.sums["depth_loss"][0], whole.sums["depth_loss"][0], atol=1e-3)
    assert abs(float(torch.stack(losses).mean() / whole.loss.detach()) - 1) < 0.02
    assert float(torch.stack(losses).std()) > 0


@pytest.mark.parametrize("changes", [{}, {"lora": LORA}, {"train_embeddings": True}], ids=str)
def test_an_unsupervised_batch_gives_zero_for_every_parameter(target: TargetModel, changes: dict[str, Any]) -> None:
    draft = draft_for(target, **changes)
    silent = target.fill_features(packed_batch([([5, 6, 7, 8], 4)], 1), draft.feature_spec, torch.float32)
    assert float(draft.supervised_counts(silent).sum()) == 0
    loss = draft.loss(silent, torch.ones(4).double()).loss
    loss.backward()  # type: ignore[no-untyped-call]
    assert float(loss.detach()) == 0
    for name, p in draft.named_parameters():
        assert (p.grad is not None and not p.grad.any()) or not p.requires_grad, name


def test_half_precision_training(target: TargetModel) -> None:
    """Under bfloat16 autocast, with states as they are stored, the loss is that of float32 to a few per cent."""
    draft = draft_for(target).eval()
    full, half = (answers(target, draft, new_tokens=20, dtype=dtype) for dtype in (torch.float32, torch.bfloat16))
    wanted = draft.loss(full, draft.supervised_counts(full)).loss.detach()
    with torch.autocast("cpu", torch.bfloat16):
        out = draft.loss(half, draft.supervised_counts(half)).loss
    out.backward()  # type: ignore[no-untyped-call]
    assert abs(float(out.detach()) / float(wanted) - 1) < 0.05
    assert all(p.grad is not None and p.grad.dtype == torch.float32 for p in draft.parameters() if p.requires_grad)


def test_sampled_drafts_come_from_the_law_that_is_reported(target: TargetModel) -> None:
    laws: list[Tensor] = []

    class Watched(Pard):
        def propose(self, *arguments: Any) -> Proposal:
            found = super().propose(*arguments)
            assert found.probs_BKV is not None
            laws.append(found.probs_BKV)
            assert (found.probs_BKV.gather(2, found.token_BK[..., None]) > 0).all()
            return found

    draft = draft_for(target)
    draft.__class__ = Watched
    sampling = Sampling(temperature=1.0, seed=1, draft_sample_method="probabilistic")
    speculative_decode(target, draft, PROMPTS, num_draft_tokens=3, sampling=sampling, max_new_tokens=8, batch_size=4)
    for law in laws:
        assert torch.allclose(law.sum(-1), torch.ones(law.shape[:2]), atol=1e-5)
        assert not torch.allclose(law[:, 0], law[:, 1])


def test_commits_without_a_draft_between_them(target: TargetModel) -> None:
    """Tokens that no draft has read yet are not lost."""
    draft, ids = draft_for(target), list(range(30, 42))

    def drafts(cuts: list[int]) -> Tensor:
        state, first = draft.begin([ids[:1]], 32), 0
        for cut in cuts:
            position = torch.arange(first, cut)
            nothing = Features(None, None)
            draft.commit(
                state,
                Committed(torch.tensor([ids])[:, position + 1], position[None], torch.tensor([cut - first]), nothing),
            )
            first = cut
        return draft.propose(state, 4, lambda logits: (logits.argmax(-1), None)).token_BK

    assert torch.equal(drafts([11]), drafts([3, 7, 11]))


@pytest.mark.parametrize("which", ["target", "tied"])
@pytest.mark.parametrize("changes", [{}, {"lora": LORA}, {"train_embeddings": True}], ids=str)
def test_files_give_the_same_draft(
    which: str, changes: dict[str, Any], request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    """A training checkpoint, an export, and the export as Transformers reads it, draft alike; the head is as it was."""
    target = request.getfixturevalue(which)
    draft = draft_for(target, **changes)
    batch = answers(target, draft, new_tokens=12)
    fit(draft, batch, 12)
    draft.eval()
    head_VH, hits = draft.head_VH.detach().clone(), draft.draft_hits(batch, 4)
    served = draft.serving()
    assert served.speculative_config == {"parallel_drafting": True}
    assert served.config["tie_word_embeddings"] is False
    assert torch.equal(served.tensors["lm_head.weight"], head_VH)
    assert torch.equal(served.tensors["model.embed_tokens.weight"][draft.config.mask_token_id], draft.mask_embedding)
    save_file(dict(draft.state_dict()), tmp_path / "model.safetensors")
    where = write(draft, tmp_path / "out", target)
    for again in (load_speculator(where, target), Pard.from_checkpoint(tmp_path, asdict(draft.config), target)):
        assert isinstance(again, Pard)
        assert again.config.mask_token_id == draft.config.mask_token_id
        assert torch.equal(again.mask_embedding, draft.mask_embedding)
        assert torch.equal(again.head_VH, head_VH)
        for ours, theirs in zip(hits, again.draft_hits(batch, 4), strict=True):
            assert torch.equal(ours.survival_MK, theirs.survival_MK)
    model = AutoModelForCausalLM.from_pretrained(where)
    text = batch.input_ids_BT[0, :9].tolist()
    row = torch.tensor([text + [draft.config.mask_token_id] * 3])
    with torch.no_grad():
        wanted = model(row).logits[0, 8:]
    for k, logits in enumerate(drafted_logits(draft, batch, 7, 4, feed_text=False)):
        assert torch.allclose(wanted[k], logits, atol=1e-4)
    again_served = Pard.from_serving(served.config, served.tensors, target).serving()
    assert all(torch.equal(value, again_served.tensors[name]) for name, value in served.tensors.items())
    with pytest.raises(UserError, match="names no pard_token"):
        Pard.from_serving({k: v for k, v in served.config.items() if k != "pard_token"}, served.tensors, target)
    with pytest.raises(UserError, match=r"missing tensors \['model.norm.weight'\]"):
        Pard.from_serving(served.config, {k: v for k, v in served.tensors.items() if k != "model.norm.weight"}, target)


@pytest.mark.parametrize("changes", [{}, {"lora": LORA}, {"train_embeddings": True}], ids=str)
def test_start_from_a_trained_draft_model(target: TargetModel, tmp_path: Path, changes: dict[str, Any]) -> None:
    """Before any training, the first draft of every pass is that of the draft model it started from."""
    source = DraftLM.from_recipe(
        DraftLMOptions(type="draft_lm", start_layers=2, **changes), target, torch.arange(320), seed=1
    )
    batch = answers(target, source, new_tokens=12)
    fit(source, batch, 12)
    save_file(dict(source.state_dict()), tmp_path / "model.safetensors")
    (tmp_path / "speculator.json").write_text(json.dumps({"type": "draft_lm", "config": asdict(source.config)}))
    for where in (write(source, tmp_path / "draft", target), tmp_path):
        options = PardOptions(type="pard", start_model=str(where), num_depths=3)
        draft = Pard.from_recipe(options, target, torch.arange(4, 320), seed=0)
        assert draft.config.borrows is not bool(changes.get("train_embeddings"))
        assert torch.equal(source.draft_hits(batch, 1)[0].survival_MK, draft.draft_hits(batch, 1)[0].survival_MK)
    pard = write(draft, tmp_path / "pard", target)
    with pytest.raises(UserError, match="holds a pard"):
        Pard.from_recipe(PardOptions(type="pard", start_model=str(pard)), target, torch.arange(4, 320), seed=0)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "exactly one"),
        ({"start_layers": 2, "on_policy_fraction": 0.5}, "less than or equal to 0"),
    ],
)
def test_options_that_do_not_go_together(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        PardOptions(type="pard", **options)


def test_the_mask_token_is_no_token_of_the_loss(target: TargetModel) -> None:
    assert draft_for(target, torch.arange(300)).config.mask_token_id == 319
    with pytest.raises(UserError, match="mask_token_id 12"):
        draft_for(target, torch.arange(10, 320), mask_token_id=12)


@pytest.mark.parametrize("changes", [{}, {"lora": LORA}], ids=str)
def test_a_resumed_run_has_the_same_weights(target: TargetModel, tmp_path: Path, changes: dict[str, Any]) -> None:
    """The drop follows from the step."""
    assert_resumes(lambda: draft_for(target, retention=0.7, **changes), target, tmp_path)


def test_text_is_never_changed_by_a_draft(target: TargetModel) -> None:
    """Rows of unequal progress in one batch, drafts of many lengths."""
    draft = draft_for(target)
    plain = plain_decode(target, PROMPTS, sampling=Sampling(), max_new_tokens=24, batch_size=4)
    for k in (1, 2, 9):
        trace = speculative_decode(
            target, draft, PROMPTS, num_draft_tokens=k, sampling=Sampling(), max_new_tokens=24, batch_size=4
        )
        assert [r.output_ids for r in trace.requests] == [r.output_ids for r in plain.requests]
