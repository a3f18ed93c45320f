"""The modules of an MLP speculator, under IBM's and Arctic's tensor names. Needs no target; see `mlp.py` for the maths.

Shape legend: see `base.py`; further r inner width, n heads.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from typing import Any, Literal, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from spec_train.data.draft_vocab import drafted_ids
from spec_train.errors import UserError
from spec_train.speculators.heads import DraftHeads, State, config_value, load_strictly

Cell = Literal["mlp", "sum_lstm"]
GATES = ("forget", "input", "cell", "output")
EPS = 1e-6


@dataclass(frozen=True)
class MlpShape:
    """Geometry of the heads. Tied heads share embedding, norm, output head and all projections but the first."""

    hidden_size: int
    inner_dim: int
    vocab_size: int
    num_heads: int
    tie_weights: bool = True
    scale_input: bool = False
    cell: Cell = "mlp"
    tie_lstm_embs: bool = False

    @property
    def emb_over_state(self) -> float:
        """emb_weight / state_weight: the state keeps half of its magnitude up to the last head, in expectation."""
        state_weight: float = 0.5 ** (0.5 / self.num_heads)
        return math.sqrt((1 - state_weight**2) * self.inner_dim / 2) / state_weight


class ScaleShiftNorm(nn.Module):
    """x / rms(x) * weight + bias over the last dimension: no mean is taken off. IBM's LayerNormParameterized."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.bias = nn.Parameter(torch.zeros(size))

    def forward(self, x: Tensor) -> Tensor:
        """[..., size] -> [..., size], in the dtype of `x`."""
        return F.rms_norm(x, (x.shape[-1],), self.weight.to(x.dtype), EPS) + self.bias.to(x.dtype)


class MlpHeads(DraftHeads):
    """s_{i+1} = act(norm_i(W_i s_i + a E_i[token])), logits_i = H_i s_{i+1}. Tied modules are held once."""

    output_heads = "head"

    def __init__(self, shape: MlpShape, d2t_D: Tensor) -> None:
        super().__init__(shape.num_heads, d2t_D)
        self.shape = shape
        n, inner = shape.num_heads, shape.inner_dim
        own = 1 if shape.tie_weights else n
        self.emb = nn.ModuleList([nn.Embedding(shape.vocab_size, inner) for _ in range(own)])
        self.proj = _projections(shape, min(2, n) if shape.tie_weights else n)
        self.ln = nn.ModuleList([ScaleShiftNorm(inner) for _ in range(own)])
        self.head = nn.ModuleList([nn.Linear(inner, len(d2t_D), bias=False) for _ in range(own)])

    def start(self, hidden: Tensor) -> State:
        """See `DraftHeads.start`."""
        scaled = _scale(hidden) if self.shape.scale_input else hidden
        return scaled, scaled

    def step(self, state: State, token: Tensor, k: int) -> State:
        """See `DraftHeads.step`."""
        x = self.proj[min(k, len(self.proj) - 1)](state[0])
        embedding = self.emb[min(k, len(self.emb) - 1)](token).to(x.dtype)
        x = torch.add(x, embedding, alpha=self.shape.emb_over_state)
        x = F.gelu(self.ln[min(k, len(self.ln) - 1)](x))
        return x, x

    def output_head(self, k: int) -> Tensor:
        """See `DraftHeads.output_head`."""
        return cast(nn.Linear, self.head[min(k, len(self.head) - 1)]).weight


class LstmHeads(DraftHeads):
    """Arctic's sum_lstm cell: four gates in place of one projection, a cell state beside the state; always tied."""

    output_heads = "head"

    def __init__(self, shape: MlpShape, d2t_D: Tensor) -> None:
        super().__init__(shape.num_heads, d2t_D)
        self.shape = shape
        inner = shape.inner_dim
        for gate in GATES:
            if gate == "forget" or not shape.tie_lstm_embs:
                self.add_module(f"{gate}_emb", nn.ModuleList([nn.Embedding(shape.vocab_size, inner)]))
            self.add_module(f"{gate}_proj", _projections(shape, 2))
        self.cell_ln = nn.ModuleList([ScaleShiftNorm(inner)])
        self.state_ln = nn.ModuleList([ScaleShiftNorm(inner)])
        self.head = nn.ModuleList([nn.Linear(inner, len(d2t_D), bias=False)])

    def start(self, hidden: Tensor) -> State:
        """See `DraftHeads.start`."""
        scaled = _scale(hidden) if self.shape.scale_input else hidden
        return scaled, hidden.new_zeros(*hidden.shape[:-1], self.shape.inner_dim)

    def step(self, state: State, token: Tensor, k: int) -> State:
        """See `DraftHeads.step`."""
        hidden, cell = state
        forget = torch.sigmoid(self._gate("forget", hidden, token, k))
        kept = torch.sigmoid(self._gate("input", hidden, token, k))
        out = torch.sigmoid(self._gate("output", hidden, token, k))
        new = F.gelu(self.cell_ln[0](self._gate("cell", hidden, token, k)))
        cell = cell.to(new.dtype) * forget + new * kept
        return F.gelu(self.state_ln[0](cell)) * out, cell

    def _gate(self, gate: str, hidden: Tensor, token: Tensor, k: int) -> Tensor:
        projection = self.get_submodule(f"{gate}_proj.{min(k, 1)}")
        embedding = self.get_submodule("forget_emb.0" if self.shape.tie_lstm_embs else f"{gate}_emb.0")
        x: Tensor = projection(hidden)
        return torch.add(x, embedding(token).to(x.dtype), alpha=self.shape.emb_over_state)

    def output_head(self, k: int) -> Tensor:
        """See `DraftHeads.output_head`."""
        return cast(nn.Linear, self.head[0]).weight


def make_heads(shape: MlpShape, d2t_D: Tensor) -> MlpHeads | LstmHeads:
    """Uninitialised heads of a shape."""
    return LstmHeads(shape, d2t_D) if shape.cell == "sum_lstm" else MlpHeads(shape, d2t_D)


def _projections(shape: MlpShape, count: int) -> nn.ModuleList:
    widths = [shape.hidden_size] + [shape.inner_dim] * (count - 1)
    return nn.ModuleList([nn.Linear(width, shape.inner_dim, bias=False) for width in widths])


def _scale(hidden: Tensor) -> Tensor:
    return F.rms_norm(hidden, (hidden.shape[-1],), None, EPS) / math.sqrt(2)


# ------------------------------------------------------------------ served form
def served_tensors(heads: MlpHeads | LstmHeads) -> dict[str, Tensor]:
    """Every tensor under its published name; a tied one stands under the name of each head, as readers expect it.

    `d2t` is only there with a reduced vocabulary, which is our own addition.
    """
    own = dict(heads.state_dict())
    d2t = own.pop("d2t")
    tensors = {}
    for name in served_names(heads.shape):
        tensors[name] = own[_held_name(heads.shape, name)]
    if len(d2t) != heads.shape.vocab_size:
        tensors["d2t"] = d2t
    return tensors


def served_names(shape: MlpShape) -> list[str]:
    """The published tensor names of a shape, without the prefix `speculator.` of Hugging Face checkpoints."""
    heads = range(shape.num_heads)
    if shape.cell == "mlp":
        names = [f"{part}.{i}.weight" for part in ("emb", "proj", "head") for i in heads]
        return names + [f"ln.{i}.{part}" for i in heads for part in ("weight", "bias")]
    names = [f"{gate}_emb.0.weight" for gate in GATES]
    names += [f"{gate}_proj.{i}.weight" for gate in GATES for i in (0, 1)]
    names += [f"{norm}.0.{part}" for norm in ("cell_ln", "state_ln") for part in ("weight", "bias")]
    return names + [f"head.{i}.weight" for i in heads]


def _held_name(shape: MlpShape, name: str) -> str:
    """The module's own name of a published tensor: that of the one copy of a tied tensor."""
    part, index, leaf = name.split(".")
    if shape.cell == "sum_lstm":
        if part.endswith("_emb") and shape.tie_lstm_embs:
            part = "forget_emb"
        return f"{part}.{0 if part == 'head' else index}.{leaf}"
    last = (1 if part == "proj" else 0) if shape.tie_weights else shape.num_heads
    return f"{part}.{min(int(index), last)}.{leaf}"


def served_shape(config: dict[str, Any]) -> MlpShape:
    """The geometry that a config.json of IBM's (integers) or Arctic's (strings) describes. Raises UserError."""
    method = config.get("method", "mlp")
    if method not in ("mlp", "sum_rnn", "sum_lstm"):
        raise UserError(f"MLP speculator: method {method!r} is not known; sum_rnn and sum_lstm are")
    widths: dict[str, Any] = {
        key: _width(config[key], key) for key in ("inner_dim", "emb_dim", "proj_dim") if key in config
    }
    hidden = int(config.get("input_hidden_dim") or config_value(widths, "emb_dim", "MLP speculator"))
    inner = widths.get("inner_dim") or hidden
    arctic = "input_hidden_dim" in config
    if arctic and {inner, widths.get("emb_dim", inner), widths.get("proj_dim", inner)} != {inner}:
        raise UserError(f"MLP speculator: inner_dim, emb_dim and proj_dim must be one width, they are {widths}")
    return MlpShape(
        hidden_size=hidden,
        inner_dim=inner,
        vocab_size=int(config_value(config, "vocab_size", "MLP speculator")),
        num_heads=int(config_value(config, "n_predict", "MLP speculator")),
        tie_weights=bool(config.get("tie_weights", False)),
        scale_input=bool(config.get("scale_input", False)),
        cell="sum_lstm" if method == "sum_lstm" else "mlp",
        tie_lstm_embs=bool(config.get("tie_lstm_embs", False)),
    )


def _width(value: Any, key: str) -> int:
    """A width as IBM (4096) or Arctic ("4096") writes it; stacks ("4096.4096") have further layers that we lack."""
    text = str(value)
    if not text.isdigit():
        raise UserError(f"MLP speculator: {key} is {value!r}, a stack of layers; only a single width is supported")
    return int(text)


def _ibm_name(name: str) -> str:
    """IBM's name of a tensor; Arctic's sum_rnn wraps every part in a list of one layer. Unknown names stay."""
    plain = name.removeprefix("speculator.")
    return re.sub(r"^(emb|proj|ln)\.(\d+)\.0\.", r"\1.\2.", plain)


def heads_from_serving(config: dict[str, Any], tensors: dict[str, Tensor]) -> MlpHeads | LstmHeads:
    """The heads of an exported or published checkpoint, frozen, in float32.

    Names may carry the prefix `speculator.`; of a tied tensor one copy suffices, further ones must be equal.
    Raises UserError for missing, unknown, misshapen or contradictory tensors.
    """
    shape = served_shape(config)
    plain = {_ibm_name(name): value for name, value in tensors.items()}
    known = {**{name: _held_name(shape, name) for name in served_names(shape)}, "d2t": "d2t"}
    unknown = sorted(plain.keys() - known.keys())
    if unknown:
        raise UserError(f"MLP speculator checkpoint: unknown tensors {unknown}")
    held: dict[str, Tensor] = {}
    for name, value in plain.items():
        first = held.setdefault(known[name], value)
        if first is not value and not torch.equal(first, value):
            raise UserError(f"MLP speculator checkpoint: {name} differs from another copy of the same tied tensor")
    held.setdefault("d2t", torch.zeros(shape.vocab_size, dtype=torch.int64))
    drafted_ids(held["d2t"], None, shape.vocab_size, "MLP speculator checkpoint")
    heads = make_heads(shape, held["d2t"])
    load_strictly(heads, held, "MLP speculator")
    return heads.eval().requires_grad_(False)
