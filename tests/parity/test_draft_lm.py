"""Draft language models: training pass, decoder, estimate and Transformers' own decoder are one and the same thing."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, get_args

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import AutoModelForCausalLM, GraniteConfig, GraniteForCausalLM
from transformers.generation.candidate_generator import AssistedCandidateGenerator

from spec_train.batch import Batch, Features
from spec_train.data.documents import Document
from spec_train.decoding.engine import plain_decode, speculative_decode
from spec_train.decoding.sampling import Sampling
from spec_train.serving.export import export
from spec_train.speculators.base import Committed
from spec_train.speculators.draft_lm import DraftLM, next_token_weights
from spec_train.speculators.draft_start import DraftLMOptions
from spec_train.speculators.losses import LossKind, head_loss_reference
from spec_train.speculators.on_policy import with_own_answers
from spec_train.target import TargetModel
from spec_train.training.acceptance import renewal_counts
from spec_train.training.checkpoint import latest_checkpoint
from tests.parity.test_eagle3 import packed_batch
from tests.tiny import tiny_model
from tests.toy_speculator import toy_train

GREEDY = Sampling()
PROMPTS = [[5, 6, 7, 8, 9, 10, 11], [20, 21, 22], list(range(30, 60)), [7]]
LORA = {"rank": 4, "alpha": 8.0}
SIZES = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "eos_token_id")


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> TargetModel:
    return TargetModel.load(str(tiny_model("llama", tmp_path_factory.mktemp("llama"))))


def draft_for(target: TargetModel, ids: Tensor | None = None, **changes: Any) -> DraftLM:
    options = DraftLMOptions(**{"type": "draft_lm", "start_layers": 2, **changes})
    return DraftLM.from_recipe(options, target, torch.arange(target.vocab_size) if ids is None else ids, seed=0)


def answers(target: TargetModel, prompts: list[list[int]], tokens: int = 40) -> Batch:
    """The target's greedy answers, two documents in a row, with its states."""
    plain = plain_decode(target, prompts, sampling=GREEDY, max_new_tokens=tokens, batch_size=4)
    documents = [(r.prompt_ids + r.output_ids, len(r.prompt_ids)) for r in plain.requests]
    return target.fill_features(packed_batch(documents, 2), DraftLM.required_features(None, target), torch.float32)


def fit(draft: DraftLM, batch: Batch, steps: int) -> None:
    parameters = [parameter for parameter in draft.parameters() if parameter.requires_grad]
    optimizer = torch.optim.Adam(parameters, lr=5e-3)
    for step in range(steps):
        optimizer.param_groups[0]["lr"] = 5e-3 * (1 - step / steps)
        optimizer.zero_grad()
        draft.loss(batch, draft.supervised_counts(batch)).loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()


@pytest.mark.parametrize("kind", ["llama", "mistral", "gemma3_text"])
def test_training_pass_equals_step_by_step_decode(kind: str, tmp_path: Path) -> None:
    """Every position of the packed pass gives the logits of cached decoding on the same tokens (N07)."""
    target = TargetModel.load(str(tiny_model(kind, tmp_path)))
    draft, ids = draft_for(target), torch.randint(3, 300, (40,), generator=torch.Generator().manual_seed(0)).tolist()
    batch = packed_batch([([9] * 5, 2), (ids, 3)], 2)
    with torch.no_grad():
        trained = draft.draft_logits(draft.packed_states(batch))[0, 5:]
    for p in (2, 17, 30):
        state = draft.begin([ids], 48)
        nothing = Features(None, None)
        draft.commit(
            state, Committed(torch.tensor([ids[1 : p + 2]]), torch.arange(p + 1)[None], torch.tensor([p + 1]), nothing)
        )
        seen: list[Tensor] = []

        def teacher(logits: Tensor, p: int = p, seen: list[Tensor] = seen) -> tuple[Tensor, None]:
            seen.append(logits[0])
            return torch.tensor([ids[p + 1 + len(seen)]]), None  # feed the text's own token

        draft.propose(state, 4, teacher)
        for k in range(4):
            assert torch.allclose(trained[p + 1 + k], seen[k], atol=1e-4), (p, k)


@pytest.mark.parametrize("kind", ["llama", "qwen3", "mistral", "gemma3_text", "gemma3", "gpt_neox"])
def test_estimate_equals_decode_on_every_target(kind: str, tmp_path: Path) -> None:
    """Renewal estimate on the target's own greedy text = decoded counts, to the last token; text = plain greedy."""
    target = TargetModel.load(str(tiny_model(kind, tmp_path)))
    draft, batch = draft_for(target), answers(target, PROMPTS)
    fit(draft, batch, 25)
    plain = plain_decode(target, PROMPTS, sampling=GREEDY, max_new_tokens=40, batch_size=4)
    for k in (3, 5):
        trace = speculative_decode(
            target, draft, PROMPTS, num_draft_tokens=k, sampling=GREEDY, max_new_tokens=40, batch_size=3
        )
        assert [r.output_ids for r in trace.requests] == [r.output_ids for r in plain.requests]
        cycles = [cycle for request in trace.requests for cycle in request.cycles]
        counts = renewal_counts(draft.draft_hits(batch, k), k)
        assert counts.steps == len(cycles)
        assert counts.accepted == sum(cycle.kept for cycle in cycles) > 0
        assert counts.emitted == sum(cycle.emitted for cycle in cycles)
        assert list(counts.survived) == [sum(cycle.kept > i for cycle in cycles) for i in range(k)]


def test_transformers_accepts_as_many(target: TargetModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The referee: assisted generation with the exported draft accepts the same number of tokens in every round."""
    draft, k = draft_for(target, lora=LORA), 4
    fit(draft, answers(target, PROMPTS), 60)
    export(
        draft.serving(), tmp_path / "d", format="plain", target_id=target.name, num_draft_tokens=k, golden=None,
        provenance={},
    )  # fmt: skip
    model = AutoModelForCausalLM.from_pretrained(target.name)
    assistant = AutoModelForCausalLM.from_pretrained(tmp_path / "d")
    settings = assistant.generation_config
    settings.num_assistant_tokens, settings.num_assistant_tokens_schedule = k, "constant"
    settings.assistant_confidence_threshold = 0.0
    rounds: list[int] = []

    def count(self: Any, input_ids: Tensor, scores: Tensor, num_matches: int) -> None:
        rounds.append(int(num_matches))

    monkeypatch.setattr(AssistedCandidateGenerator, "update_candidate_strategy", count)
    trace = speculative_decode(target, draft, PROMPTS, num_draft_tokens=k, sampling=GREEDY, max_new_tokens=40)
    accepted = 0
    for request in trace.requests:
        rounds.clear()
        start = [*request.prompt_ids, request.output_ids[0]]  # our rounds begin after the first token of the answer
        room = len(request.output_ids) + k  # in its last round Transformers drafts one token less than fits
        out = model.generate(torch.tensor([start]), assistant_model=assistant, do_sample=False, max_new_tokens=room)
        text = out[0, len(request.prompt_ids) :].tolist()
        assert text[: len(request.output_ids)] == request.output_ids
        assert rounds[: len(request.cycles)] == [cycle.accepted for cycle in request.cycles]
        accepted += sum(rounds[: len(request.cycles)])
    assert accepted > 20


def test_one_sample_overfit_and_corruption(target: TargetModel) -> None:
    """A draft overfitted to one prompt is accepted whole; corrupted weights change speed, never text (E05)."""
    draft, k, prompts = draft_for(target), 4, PROMPTS[:1]
    fit(draft, answers(target, prompts, 41), 150)
    plain = plain_decode(target, prompts, sampling=GREEDY, max_new_tokens=41)

    def decode() -> float:
        trace = speculative_decode(target, draft, prompts, num_draft_tokens=k, sampling=GREEDY, max_new_tokens=41)
        assert trace.requests[0].output_ids == plain.requests[0].output_ids
        return 1 + sum(c.accepted for c in trace.requests[0].cycles) / len(trace.requests[0].cycles)

    tau = decode()
    assert tau >= k + 0.9
    with torch.no_grad():
        draft.decoder.norm.weight.mul_(-1)
    assert decode() < tau - 1


@pytest.mark.parametrize("kind", get_args(LossKind))
@pytest.mark.parametrize("temperature", [1.0, 2.0])
def test_loss_equals_the_plain_one(target: TargetModel, kind: Any, temperature: float) -> None:
    """Packed, gathered, fused and restricted = one document at a time, all logits, autograd (D13, M12)."""
    ids = torch.arange(0, 320, 2)
    draft = draft_for(target, ids, loss=kind, jsd_beta=0.3, temperature=temperature, train_embeddings=True)
    batch, normalizer = answers(target, PROMPTS, 12), torch.tensor([37.0]).double()
    draft.loss(batch, normalizer).loss.backward()  # type: ignore[no-untyped-call]
    gradients = {name: p.grad.clone() for name, p in draft.named_parameters() if p.grad is not None}
    assert gradients.keys() == {name for name, _ in draft.named_parameters()}
    draft.zero_grad()
    total = torch.zeros(())
    plain = plain_decode(target, PROMPTS, sampling=GREEDY, max_new_tokens=12, batch_size=4)
    for request in plain.requests:
        tokens = torch.tensor([request.prompt_ids + request.output_ids])
        hidden = draft.body.model(tokens, output_hidden_states=True).hidden_states[-1][
            0, len(request.prompt_ids) - 1 : -1
        ]
        with torch.no_grad():
            logits = target.model(tokens).logits[0, len(request.prompt_ids) - 1 : -1]
        label = tokens[0, len(request.prompt_ids) :]
        total = (
            total
            + head_loss_reference(
                hidden,
                draft.head_VH[ids],
                (logits / temperature).softmax(-1)[:, ids],
                torch.full((len(label),), 1 / 37),
                torch.where(label % 2 == 0, label // 2, -1),
                kind,
                3.0,
                0.3,
                temperature,
            ).total
        )
    total.backward()  # type: ignore[no-untyped-call]
    assert torch.allclose(draft.loss(batch, normalizer).loss, total, atol=1e-5, rtol=1e-5)
    for name, p in draft.named_parameters():
        assert p.grad is not None
        assert float((p.grad - gradients[name]).abs().max()) <= 1e-4 * float(p.grad.abs().max()), name


def test_logits_that_a_family_scales(tmp_path: Path) -> None:
    """Granite divides its logits: loss, drafts and the target's laws all follow."""
    folder = tiny_model("llama", tmp_path)
    sizes = {key: json.loads((folder / "config.json").read_text())[key] for key in SIZES}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        GraniteForCausalLM(GraniteConfig(**sizes, logits_scaling=4.0, embedding_multiplier=2.0)).save_pretrained(folder)
    target = TargetModel.load(str(folder))
    draft, batch = draft_for(target, start_layers=4), answers(target, PROMPTS, 8)
    assert draft.logit_scale == 0.25
    out = draft.loss(batch, draft.supervised_counts(batch))
    assert float(out.sums["alpha"][0] / out.counts["alpha"][0]) > 0.9999  # all layers: the very same laws
    assert abs(float(out.loss.detach())) < 1e-4


def test_gradient_checkpointing_changes_nothing(target: TargetModel) -> None:
    """On answers of its own too: those are drafted with a cache, which recomputation does without."""
    batch, grads = answers(target, PROMPTS, 8), []
    for flag in (False, True):
        draft = draft_for(target, gradient_checkpointing=flag, on_policy_fraction=0.5).train()
        torch.manual_seed(0)
        draft.loss(batch, draft.supervised_counts(batch)).loss.backward()  # type: ignore[no-untyped-call]
        grads.append([p.grad.clone() for p in draft.parameters() if p.grad is not None])
    for plain, checkpointed in zip(*grads, strict=True):
        assert torch.allclose(plain, checkpointed, atol=1e-6)


def test_supervised_tokens_are_those_of_the_answer(target: TargetModel) -> None:
    """Each answer token counts once, the first one too; the first token of a document never does (M12)."""
    batch = packed_batch([(list(range(4, 14)), 5), (list(range(4, 10)), 0)], 2)
    assert draft_for(target).supervised_counts(batch).tolist() == [10.0]
    assert next_token_weights(batch)[0].nonzero()[:, 0].tolist() == [4, 5, 6, 7, 8, 10, 11, 12, 13, 14]


@pytest.mark.parametrize("changes", [{}, {"lora": LORA}, {"train_embeddings": True}, {"on_policy_fraction": 0.5}])
def test_nothing_supervised_gives_zero_connected_to_everything(target: TargetModel, changes: dict[str, Any]) -> None:
    draft, batch = draft_for(target, **changes), answers(target, PROMPTS[:2], 8)
    batch = replace(batch, loss_weight_BT=torch.zeros_like(batch.loss_weight_BT))
    loss = draft.loss(batch, torch.ones(1).double()).loss
    loss.backward()  # type: ignore[no-untyped-call]
    assert float(loss.detach()) == 0.0
    for name, parameter in draft.named_parameters():
        assert (parameter.grad is not None and not parameter.grad.any()) or not parameter.requires_grad, name


def test_own_answers(target: TargetModel) -> None:
    """Chosen documents keep prompt and length; what is supervised is the draft's own; the laws are the target's."""
    batch, draft = answers(target, PROMPTS, 20), draft_for(target)
    torch.manual_seed(1)
    own = with_own_answers(draft, batch, 0.5)
    torch.manual_seed(1)
    again = with_own_answers(draft, batch, 0.5)
    assert torch.equal(own.input_ids_BT, again.input_ids_BT)
    changed_BT = own.input_ids_BT != batch.input_ids_BT
    assert not changed_BT[(batch.loss_weight_BT == 0) | (batch.document_BT < 0)].any()
    documents = {(int(r), int(batch.document_BT[r, t])) for r, t in changed_BT.nonzero()}
    assert 0 < len(documents) < len(PROMPTS)
    full = target.fill_features(own, DraftLM.required_features(None, target), torch.float32)
    assert full.last_hidden_BTH is not None and own.last_hidden_BTH is not None
    real = own.document_BT >= 0
    assert torch.allclose(full.last_hidden_BTH[real], own.last_hidden_BTH[real], atol=1e-4)
    predicts = next_token_weights(own) > 0
    assert torch.allclose(full.target_lse_BT[predicts], own.target_lse_BT[predicts], atol=1e-4)  # type: ignore[index]
    # Drawn from the draft's own law: along many draws its tokens are as likely as its entropy says.
    torch.manual_seed(2)
    own = with_own_answers(draft, batch, 1 - 1e-9)
    with torch.no_grad():
        log_q = draft.draft_logits(draft.packed_states(own)).log_softmax(-1)
    chosen = next_token_weights(own) > 0
    drawn = log_q[chosen].gather(1, F.pad(own.input_ids_BT[:, 1:], (0, 1))[chosen][:, None])[:, 0]
    expected = (log_q[chosen].exp() * log_q[chosen]).sum(-1)
    spread = float((drawn - expected).std()) / len(drawn) ** 0.5
    assert abs(float((drawn - expected).mean())) < 4 * spread
    greedy = log_q[chosen].amax(-1)
    assert float((greedy - drawn).mean()) > 8 * spread


def test_own_answers_leave_the_gradients_alone_in_mixed_precision(target: TargetModel) -> None:
    """Weights that sampling casts must not be used again where a gradient is wanted."""
    draft, batch = draft_for(target, on_policy_fraction=0.5), answers(target, PROMPTS, 8)
    with torch.autocast("cpu", torch.bfloat16):
        torch.manual_seed(0)
        loss = draft.loss(batch, draft.supervised_counts(batch)).loss
    loss.backward()  # type: ignore[no-untyped-call]
    assert all(p.grad is not None and bool(p.grad.any()) for p in draft.parameters() if p.requires_grad)


def test_sampled_drafts_come_from_the_law_they_name(target: TargetModel) -> None:
    draft = draft_for(target)
    state = draft.begin([[5, 6, 7]] * 2, 16)
    committed = Committed(
        torch.tensor([[6, 7, 8]] * 2), torch.arange(3).expand(2, -1), torch.tensor([3, 3]), Features(None, None)
    )
    draft.commit(state, committed)
    seen: list[Tensor] = []

    def choose(logits: Tensor) -> tuple[Tensor, Tensor]:
        seen.append(logits.softmax(-1))
        return torch.tensor([11, 12]), seen[-1]

    proposal = draft.propose(state, 3, choose)
    assert proposal.probs_BKV is not None and torch.equal(proposal.probs_BKV, torch.stack(seen, 1))
    assert not torch.allclose(seen[0], seen[1]) and not torch.allclose(seen[1][0], seen[1][1])
    sampled = Sampling(temperature=1.0, seed=3)
    trace = speculative_decode(target, draft, PROMPTS, num_draft_tokens=3, sampling=sampled, max_new_tokens=12)
    assert all(request.cycles for request in trace.requests)


@pytest.mark.parametrize("changes", [{}, {"lora": LORA, "on_policy_fraction": 0.5}, {"train_embeddings": True}])
def test_resume_gives_the_same_weights_and_the_checkpoint_the_same_drafts(
    target: TargetModel, tmp_path: Path, changes: dict[str, Any]
) -> None:
    prompts = [[seed + 5, seed + 6, seed + 7] for seed in range(8)]
    plain = plain_decode(target, prompts, sampling=GREEDY, max_new_tokens=12, batch_size=4)
    documents = [
        Document(str(i), r.prompt_ids + r.output_ids, [(3, 3 + len(r.output_ids))])
        for i, r in enumerate(plain.requests)
    ]

    class Stop(Exception):
        pass

    def run(name: str, stop_after: int | None = None) -> DraftLM:
        calls = 0

        def provide(batch: Batch) -> Batch:
            nonlocal calls
            calls += 1
            if stop_after is not None and calls > stop_after:
                raise Stop
            return target.fill_features(batch, DraftLM.required_features(None, target), torch.float32)

        draft = draft_for(target, **changes)
        toy_train(
            tmp_path / name,
            documents=documents,
            held_out=0,
            speculator=draft,
            provider=provide,
            save_every=2,
            max_steps=4,
        )
        return draft

    whole = run("whole")
    with pytest.raises(Stop):
        run("parts", stop_after=2)
    parts = run("parts")
    for name, tensor in whole.state_dict().items():
        assert torch.equal(tensor, parts.state_dict()[name]), name
    checkpoint = latest_checkpoint(tmp_path / "parts" / "checkpoints")
    assert checkpoint is not None
    loaded = DraftLM.from_checkpoint(checkpoint, asdict(parts.config), target)
    batch = answers(target, prompts, 12)
    with torch.no_grad():
        difference = loaded.packed_states(batch) - parts.eval().packed_states(batch)
    assert float(difference.abs().max()) < 1e-4
    assert all("lora" not in name for name in loaded.state_dict())
