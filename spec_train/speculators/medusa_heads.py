"""The modules of a Medusa speculator, under vLLM's tensor names. Needs no target; see `medusa.py` for the maths.

Shape legend: see `base.py`; further n heads, L residual layers of a head.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from spec_train.data.draft_vocab import drafted_ids, offsets
from spec_train.errors import UserError
from spec_train.speculators.heads import DraftHeads, State, config_value, load_strictly

HEAD = re.compile(r"(?:blocks|lm_heads)\.\d+\.")


@dataclass(frozen=True)
class MedusaShape:
    """Geometry of the heads. `shared_head`: one output head for all of them."""

    hidden_size: int
    vocab_size: int
    num_heads: int
    num_layers: int = 1
    bias: bool = True
    shared_head: bool = False


class ResidualBlock(nn.Module):
    """x <- x + SiLU(W x + b), a layer at a time."""

    def __init__(self, shape: MedusaShape) -> None:
        super().__init__()
        size = shape.hidden_size
        self.layers = nn.ModuleList([nn.Linear(size, size, bias=shape.bias) for _ in range(shape.num_layers)])

    def forward(self, x: Tensor) -> Tensor:
        """[..., H] -> [..., H]."""
        for layer in self.layers:
            update = F.silu(layer(x))
            x = x.to(update.dtype) + update
        return x


class MedusaHeads(DraftHeads):
    """logits_i = W_i block_i(h): every head reads the same state, and no token."""

    output_heads = "lm_heads"

    def __init__(self, shape: MedusaShape, d2t_D: Tensor) -> None:
        super().__init__(shape.num_heads, d2t_D)
        self.shape = shape
        own = 1 if shape.shared_head else shape.num_heads
        self.blocks = nn.ModuleList([ResidualBlock(shape) for _ in range(shape.num_heads)])
        self.lm_heads = nn.ModuleList([nn.Linear(shape.hidden_size, len(d2t_D), bias=False) for _ in range(own)])

    def start(self, hidden: Tensor) -> State:
        """See `DraftHeads.start`."""
        return hidden, hidden

    def step(self, state: State, token: Tensor, k: int) -> State:
        """See `DraftHeads.step`; the token is not read."""
        return self.blocks[k](state[1]), state[1]

    def output_head(self, k: int) -> Tensor:
        """See `DraftHeads.output_head`."""
        return cast(nn.Linear, self.lm_heads[min(k, len(self.lm_heads) - 1)]).weight


# ------------------------------------------------------------------ served form
def served_tensors(heads: MedusaHeads) -> dict[str, Tensor]:
    """Every tensor under vLLM's name. `token_map` int64 [D]: target ids, only there with a reduced vocabulary."""
    tensors = dict(heads.state_dict())
    del tensors["d2t"]
    if len(heads.d2t) != heads.shape.vocab_size:
        tensors["token_map"] = heads.draft_ids_D
    return tensors


def heads_from_serving(config: dict[str, Any], tensors: dict[str, Tensor]) -> MedusaHeads:
    """The heads of an exported or published checkpoint, frozen.

    Takes vLLM's names and FasterDecoding's ({head}.{layer}.linear.weight, {head}.{L}.weight), either with the prefix
    `medusa_heads.` or `medusa_head.`. FasterDecoding's config may count fewer heads than the file holds (their
    published ones say 2 of 5): the file is right. Raises UserError for missing, unknown or misshapen tensors.
    """
    num_layers = int(config.get("num_hidden_layers", config.get("medusa_num_layers", 1)))
    renamed = {_vllm_name(name, num_layers): value for name, value in tensors.items()}
    num_heads = config.get("num_heads", config.get("medusa_num_heads"))
    first = renamed.get("lm_heads.0.weight")
    if first is None or num_heads is None:
        raise UserError("Medusa checkpoint: needs a tensor lm_heads.0.weight and num_heads in config.json")
    if "medusa_num_heads" in config:
        num_heads = max(int(num_heads), 1 + max(int(name.split(".")[1]) for name in renamed if HEAD.match(name)))
    rows = config.get("vocab_size") or first.shape[0]
    shape = MedusaShape(
        # FasterDecoding's config names neither width nor vocabulary: the tensors do.
        hidden_size=int(config.get("hidden_size", first.shape[1])),
        vocab_size=int(config_value(config, "vocab_size", "Medusa") if "token_map" in renamed else rows),
        num_heads=int(num_heads),
        num_layers=num_layers,
        bias=any(name.startswith("blocks.") and name.endswith(".bias") for name in renamed),
        shared_head=bool(config.get("original_lm_head", False)),
    )
    ids = renamed.pop("token_map", torch.arange(shape.vocab_size))
    renamed["d2t"] = offsets(ids)
    drafted_ids(renamed["d2t"], None, shape.vocab_size, "Medusa checkpoint: token_map as offsets")
    heads = MedusaHeads(shape, renamed["d2t"])
    load_strictly(heads, renamed, "Medusa")
    return heads.eval().requires_grad_(False)


def _vllm_name(name: str, num_layers: int) -> str:
    """vLLM's name of a tensor in either spelling; unknown names stay as they are."""
    plain = re.sub("^medusa_heads?[.]", "", name)
    if found := re.fullmatch(r"(\d+)\.(\d+)\.linear\.(weight|bias)", plain):
        return f"blocks.{found[1]}.layers.{found[2]}.{found[3]}"
    if found := re.fullmatch(rf"(\d+)\.{num_layers}\.weight", plain):
        return f"lm_heads.{found[1]}.weight"
    return plain
