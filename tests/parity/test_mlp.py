"""MLP speculators: training pass, decoder, estimate and published files are one and the same thing."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor

from spec_train.errors import UserError
from spec_train.speculators import load_speculator
from spec_train.speculators.mlp import Mlp, MlpOptions, heads_from_serving
from spec_train.target import TargetModel
from tests import multi_head as shared
from tests.tiny import tiny_model

SOME_IDS = torch.arange(0, 320, 2)
KINDS: list[dict[str, Any]] = [
    {},
    {"tie_weights": False, "scale_input": True, "inner_dim": 48, "num_heads": 2},
    {"cell": "sum_lstm", "scale_input": True},
    {"cell": "sum_lstm", "tie_lstm_embs": False, "inner_dim": 48, "num_heads": 4},
]


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> TargetModel:
    return TargetModel.load(str(tiny_model("llama", tmp_path_factory.mktemp("llama"))))


# ------------------------------------------------------------------ published checkpoints, written by hand
def rms(x: Tensor, tensors: dict[str, Tensor], name: str) -> Tensor:
    x = x / (x.pow(2).mean(-1, keepdim=True) + 1e-6).sqrt()
    return tensors[f"{name}.weight"] * x + tensors[f"{name}.bias"] if name else x


def ibm_draft(config: dict[str, Any], tensors: dict[str, Tensor], hidden: Tensor, token: Tensor) -> list[Tensor]:
    """IBM's and Arctic's forward from their own code, with a file of all names: the logits of each head, greedy."""
    n = config["n_predict"]
    inner = int(config["inner_dim"])
    state_weight = 0.5 ** (0.5 / n)
    ratio = math.sqrt((1 - state_weight**2) * (inner / 2)) / state_weight
    state = rms(hidden, tensors, "") / math.sqrt(2) if config["scale_input"] else hidden
    cell, out = torch.zeros(len(hidden), inner), []
    for i in range(n):
        if config.get("method") == "sum_lstm":
            gates = {}
            for gate in ("forget", "input", "cell", "output"):
                z = tensors[f"{gate}_emb.0.weight"][token]
                gates[gate] = state @ tensors[f"{gate}_proj.{min(i, 1)}.weight"].T + ratio * z
            candidate = F.gelu(rms(gates["cell"], tensors, "cell_ln.0")) * gates["input"].sigmoid()
            cell = cell * gates["forget"].sigmoid() + candidate
            state = F.gelu(rms(cell, tensors, "state_ln.0")) * gates["output"].sigmoid()
        else:
            state = state @ tensors[f"proj.{i}.weight"].T + ratio * tensors[f"emb.{i}.weight"][token]
            state = F.gelu(rms(state, tensors, f"ln.{i}"))
        logits = state @ tensors[f"head.{i}.weight"].T
        token = logits.argmax(-1)
        out.append(logits)
    return out


def published(
    *, tied: bool, scaled: bool, lstm: bool = False, tied_embs: bool = True
) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """A random checkpoint under every published name; tied tensors stand under each of theirs."""
    n, vocab, width, inner = 3, 320, 64, 48
    generator = torch.Generator().manual_seed(0)
    made: dict[str, Tensor] = {}

    def tensor(held: str, *shape: int) -> Tensor:
        if held not in made:
            made[held] = torch.randn(*shape, generator=generator) * shape[-1] ** -0.5
        return made[held]

    tensors = {}
    for i in range(n):
        tensors[f"head.{i}.weight"] = tensor(f"head{0 if tied else i}", vocab, inner)
        if not lstm:
            own = 0 if tied else i
            tensors[f"emb.{i}.weight"] = tensor(f"emb{own}", vocab, inner)
            tensors[f"proj.{i}.weight"] = tensor(f"proj{min(i, 1) if tied else i}", inner, inner if i else width)
            tensors[f"ln.{i}.weight"] = tensor(f"weight{own}", inner)
            tensors[f"ln.{i}.bias"] = tensor(f"bias{own}", inner)
    for gate in ("forget", "input", "cell", "output") if lstm else ():
        tensors[f"{gate}_emb.0.weight"] = tensor("emb" if tied_embs else gate, vocab, inner)
        for i in (0, 1):
            tensors[f"{gate}_proj.{i}.weight"] = tensor(f"{gate}{i}", inner, inner if i else width)
    for name in ("cell_ln.0", "state_ln.0") if lstm else ():
        tensors |= {f"{name}.weight": tensor(f"{name}w", inner), f"{name}.bias": tensor(f"{name}b", inner)}
    config: dict[str, Any] = {
        "architectures": ["MLPSpeculatorPreTrainedModel"],
        "model_type": "mlp_speculator",
        "vocab_size": vocab,
        "emb_dim": width,
        "inner_dim": inner,
        "n_predict": n,
        "tie_weights": tied,
        "scale_input": scaled,
        "top_k_tokens_per_head": [1] * n,
        "n_candidates": 1,
    }
    if lstm:
        widths = dict.fromkeys(("inner_dim", "emb_dim", "proj_dim"), str(inner))
        config |= {"architectures": ["ArcticLSTMSpeculatorPreTrainedModel"], "method": "sum_lstm", **widths}
        config |= {"input_hidden_dim": width, "tie_lstm_embs": tied_embs}
    return config, tensors


LAYOUTS: list[dict[str, Any]] = [
    {"tied": tied, "scaled": scaled} for tied in (True, False) for scaled in (True, False)
] + [{"tied": True, "scaled": scaled, "lstm": True, "tied_embs": scaled} for scaled in (True, False)]


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_published_checkpoints_round_trip(target: TargetModel, layout: dict[str, Any]) -> None:
    """Same names, tensors and config out as in, with or without the prefix; drafts as in the authors' code (X07)."""
    config, tensors = published(**layout)
    prefixed = {f"speculator.{name}": value for name, value in tensors.items()}
    for given in (tensors, prefixed):
        served = Mlp.from_serving(config, given, target).serving()
        assert served.config == config
        assert served.tensors.keys() == tensors.keys()
        assert all(torch.equal(served.tensors[name], value) for name, value in tensors.items())
    hidden, token = torch.randn(5, 64), torch.randint(0, 320, (5,))
    expected = ibm_draft(config, tensors, hidden, token)
    heads = heads_from_serving(config, prefixed)
    assert torch.equal(heads.draft(hidden, token, 3), torch.stack([logits.argmax(-1) for logits in expected], 1))
    state, fed = heads.start(hidden), token
    for k, logits in enumerate(expected):
        state = heads.step(state, fed, k)
        assert torch.allclose(state[0] @ heads.output_head(k).T, logits, atol=1e-5)
        fed = logits.argmax(-1)


def test_files_that_hold_a_tied_tensor_once(target: TargetModel) -> None:
    """Hugging Face drops further names of a shared tensor; Arctic's sum_rnn puts each part into a list."""
    config, tensors = published(tied=True, scaled=True)
    once = {name: value for name, value in tensors.items() if ".0." in name or name == "proj.1.weight"}
    listed = {name if "head" in name else name.replace(".weight", ".0.weight"): t for name, t in once.items()}
    listed = {name.replace(".bias", ".0.bias"): value for name, value in listed.items()}
    for given in (once, listed):
        served = Mlp.from_serving(config, given, target).serving()
        assert all(torch.equal(served.tensors[name], value) for name, value in tensors.items())


def test_files_that_do_not_fit_are_refused(target: TargetModel) -> None:
    config, tensors = published(tied=True, scaled=False)
    cases: list[tuple[dict[str, Any], dict[str, Tensor], str]] = [
        ({}, {"fc.weight": torch.ones(2)}, "unknown tensors"),
        ({}, {"emb.1.weight": torch.ones(320, 48)}, "emb.1.weight differs from another copy"),
        ({"inner_dim": 40}, {}, "has shape"),
        ({"vocab_size": 300}, {}, "has shape"),
        ({"tie_weights": False, "n_predict": 4}, {}, "missing tensors"),
        ({"method": "sum_gru"}, {}, "sum_gru"),
        ({"inner_dim": "48.48"}, {}, "stack of layers"),
    ]
    for changes, extra, message in cases:
        with pytest.raises(UserError, match=message) as error:
            Mlp.from_serving({**config, **changes}, {**tensors, **extra}, target)
        assert "\n" not in str(error.value)
    del config["n_predict"]
    with pytest.raises(UserError, match="no n_predict"):
        Mlp.from_serving(config, tensors, target)


# ------------------------------------------------------------------ training, decoding
@pytest.mark.parametrize("options", KINDS, ids=str)
def test_training_pass_equals_step_by_step_decode(target: TargetModel, options: dict[str, Any]) -> None:
    shared.assert_pass_equals_steps(target, shared.fresh(Mlp, target, **options))


@pytest.mark.parametrize("options", KINDS, ids=str)
def test_every_weight_learns(target: TargetModel, options: dict[str, Any]) -> None:
    shared.assert_supervision(shared.fresh(Mlp, target, **options), target)


@pytest.mark.parametrize("options", KINDS, ids=str)
def test_loss_equals_a_plain_loop(target: TargetModel, options: dict[str, Any]) -> None:
    shared.assert_loss_equals_plain_loss(shared.fresh(Mlp, target, SOME_IDS, **options), target)


@pytest.mark.parametrize("loss", ["kl", "ce", "lk"])
def test_estimate_equals_decode(target: TargetModel, loss: str) -> None:
    speculator = shared.fresh(Mlp, target, loss=loss)
    shared.fit(speculator, shared.answers(target), steps=40)
    shared.assert_estimate_equals_decode(target, speculator)


def test_a_reduced_vocabulary(target: TargetModel) -> None:
    """The estimate still equals the decode; the files carry offsets; drawn drafts come with their law (V02)."""
    speculator = shared.fresh(Mlp, target, SOME_IDS)
    shared.fit(speculator, shared.answers(target), steps=40)
    shared.assert_estimate_equals_decode(target, speculator)
    served = speculator.serving()
    assert torch.equal(served.tensors["d2t"], SOME_IDS - torch.arange(160))
    again = Mlp.from_serving(served.config, served.tensors, target)
    text, cycles = shared.decode(target, again, 3)
    assert (text, cycles) == shared.decode(target, speculator, 3)
    assert {token for cycle in cycles for token in cycle.drafts} <= set(SOME_IDS.tolist())

    state = again.begin([[5]], 8)
    state.hidden_BH = torch.randn(1, 64)
    laws = again.propose(state, 3, lambda logits: (torch.zeros(1, dtype=torch.long), logits.softmax(-1))).probs_BKV
    assert laws is not None and torch.allclose(laws.sum(-1), torch.ones(1, 3))
    assert float(laws[..., 1::2].abs().max()) == 0


def test_one_sample_overfit_and_corruption(target: TargetModel) -> None:
    """Heads overfitted to one prompt are accepted almost whole; corrupted weights change speed, never text (E05)."""
    prompts = shared.PROMPTS[:1]
    speculator = shared.fresh(Mlp, target, step_decay=1.0, loss="ce")
    batch = shared.answers(target, prompts)
    shared.fit(speculator, batch, steps=200)
    text, cycles = shared.decode(target, speculator, 3, prompts)
    assert shared.acceptance_length(cycles) >= 3.9
    hits = torch.cat([response.survival_MK for response in speculator.draft_hits(batch, 1)])
    assert float(hits.float().mean()) >= 0.98
    with torch.no_grad():
        speculator.heads.proj[0].weight.mul_(-1)
    corrupted, cycles = shared.decode(target, speculator, 3, prompts)
    assert corrupted == text
    assert shared.acceptance_length(cycles) < 2.9


# ------------------------------------------------------------------ checkpoints
def test_resumed_training_is_the_same(target: TargetModel, tmp_path: Path) -> None:
    options: dict[str, Any] = {"cell": "sum_lstm"}
    whole = shared.train_checkpoint(shared.fresh(Mlp, target, **options), target, tmp_path / "whole", 4)
    shared.train_checkpoint(shared.fresh(Mlp, target, **options), target, tmp_path / "resumed", 2)
    resumed = shared.train_checkpoint(shared.fresh(Mlp, target, **options), target, tmp_path / "resumed", 4)
    one, two = load_file(whole / "model.safetensors"), load_file(resumed / "model.safetensors")
    assert one.keys() == two.keys()
    assert all(torch.equal(value, two[name]) for name, value in one.items())
    loaded = load_speculator(whole, target)
    assert all(torch.equal(value, one[name]) for name, value in loaded.state_dict().items())


def test_options_that_make_no_heads_are_refused() -> None:
    with pytest.raises(ValueError, match="tie_weights with a single head"):
        MlpOptions(type="mlp", num_heads=1)
    with pytest.raises(ValueError, match="always tied"):
        MlpOptions(type="mlp", cell="sum_lstm", tie_weights=False)
    assert MlpOptions(type="mlp", num_heads=4, draft_vocab_size=99).max_draft_tokens() == 4


def test_more_drafts_than_heads_are_refused(target: TargetModel) -> None:
    speculator = shared.fresh(Mlp, target)
    with pytest.raises(UserError, match="has 3 heads"):
        speculator.draft_hits(shared.answers(target), 4)
    with pytest.raises(UserError, match="has 3 heads"):
        shared.decode(target, speculator, 4)
