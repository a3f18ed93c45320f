"""The building blocks of heads that draft with a decoder layer: norm, attention, the TTT mask, the layer itself.

Shape legend: see `base.py`; further Q query positions, S new positions, h heads, g key/value heads, d head_dim,
U width that the attention reads (2H in a first layer, H in further ones).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

from spec_train.errors import UserError
from spec_train.target import TargetModel

MLP_WIDTHS = ("intermediate_size", "ffn_dim", "n_inner")  # what families call it


class LayerShape(Protocol):
    """What a layer needs to know of its head's configuration."""

    @property
    def hidden_size(self) -> int: ...
    @property
    def intermediate_size(self) -> int: ...
    @property
    def num_attention_heads(self) -> int: ...
    @property
    def num_key_value_heads(self) -> int: ...
    @property
    def head_dim(self) -> int: ...
    @property
    def rms_norm_eps(self) -> float: ...
    @property
    def norm_before_residual(self) -> bool: ...
    @property
    def qk_norm(self) -> bool: ...


def layer_geometry(target: TargetModel) -> dict[str, Any]:
    """The sizes and rotary settings of a draft layer that goes beside `target`, as keyword arguments of a config.

    Raises UserError for rotary embeddings that a draft layer cannot copy.
    """
    text = target.config
    heads = int(text.num_attention_heads)
    return {
        "hidden_size": target.hidden_size,
        "intermediate_size": mlp_width(target),
        "num_attention_heads": heads,
        "num_key_value_heads": int(getattr(text, "num_key_value_heads", None) or heads),
        "head_dim": int(getattr(text, "head_dim", None) or target.hidden_size // heads),
        "vocab_size": target.vocab_size,
        "rms_norm_eps": float(getattr(text, "rms_norm_eps", getattr(text, "layer_norm_eps", 1e-6))),
        "rope_parameters": _rope_parameters(text),
        "max_position_embeddings": target.max_length,
    }


def mlp_width(target: TargetModel) -> int:
    """The width of the target's MLP; four times the hidden size where its family has no name for it."""
    for name in MLP_WIDTHS:
        if (size := getattr(target.config, name, None)) is not None:
            return int(size)
    return 4 * target.hidden_size


def _rope_parameters(text: Any) -> dict[str, Any]:
    """The target's rotary settings, whole; of a target with several kinds of layer, those of full attention. Where they
    depend on the length of a text (LongRoPE, dynamic NTK), or the target has none, plain ones of the same base."""
    rope = dict(getattr(text, "rope_parameters", None) or {})
    rope = dict(rope.get("full_attention", rope))
    rope.setdefault("rope_type", "default")
    if rope["rope_type"] in {"longrope", "dynamic"}:
        rope = {"rope_type": "default", **{key: rope[key] for key in ("rope_theta",) if key in rope}}
    if rope["rope_type"] not in {"default", "linear", "llama3", "yarn"}:
        raise UserError(
            f"target rope_type {rope['rope_type']!r} is not supported by the head; default, linear, llama3 and yarn are"
        )
    rope.setdefault("rope_theta", getattr(text, "rope_theta", None) or 10000.0)
    rope.pop("partial_rotary_factor", None)  # the head rotates its whole head_dim
    # Positions of text are the same in all parts of M-RoPE, and a head sees text alone.
    return {key: value for key, value in rope.items() if not key.startswith("mrope")}


class RMSNorm(nn.Module):
    """x / rms(x) * weight over the last dimension, computed in float32."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """[..., size] -> [..., size], in the dtype of `x`."""
        return F.rms_norm(x, (x.shape[-1],), self.weight.to(x.dtype), self.eps)


def _rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    rotated: Tensor = apply_rotary_pos_emb(x, x, cos.to(x.dtype), sin.to(x.dtype))[0]
    return rotated


class Attention(nn.Module):
    """Projections of one layer; `input_size` is 2H in the first layer and H in further ones."""

    def __init__(self, config: LayerShape, input_size: int) -> None:
        super().__init__()
        self.heads, self.kv_heads, self.dim = config.num_attention_heads, config.num_key_value_heads, config.head_dim
        self.q_proj = nn.Linear(input_size, self.heads * self.dim, bias=False)
        self.k_proj = nn.Linear(input_size, self.kv_heads * self.dim, bias=False)
        self.v_proj = nn.Linear(input_size, self.kv_heads * self.dim, bias=False)
        self.o_proj = nn.Linear(self.heads * self.dim, config.hidden_size, bias=False)
        # Qwen3's layers norm each head's queries and keys.
        self.q_norm = RMSNorm(self.dim, config.rms_norm_eps) if config.qk_norm else None
        self.k_norm = RMSNorm(self.dim, config.rms_norm_eps) if config.qk_norm else None

    def queries(self, x_BSU: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """[B, h, S, d], rotated."""
        q_BShd = self.q_proj(x_BSU).unflatten(-1, (self.heads, self.dim))
        if self.q_norm is not None:
            q_BShd = self.q_norm(q_BShd)
        return _rotated(q_BShd.transpose(1, 2), cos, sin)

    def keys_values(self, x_BSU: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        """[B, g, S, d] each, keys rotated."""
        k_BSgd = self.k_proj(x_BSU).unflatten(-1, (self.kv_heads, self.dim))
        if self.k_norm is not None:
            k_BSgd = self.k_norm(k_BSgd)
        v = self.v_proj(x_BSU).unflatten(-1, (self.kv_heads, self.dim)).transpose(1, 2)
        return _rotated(k_BSgd.transpose(1, 2), cos, sin), v


def ttt_attention(
    q_BhQd: Tensor, keys: Tensor, values: Tensor, mask_BQT: Tensor, own: Sequence[tuple[Tensor, Tensor]]
) -> Tensor:
    """Attention over the depth-0 entries [B, g, T, d] under `mask_BQT` and over each query's own deeper entries.

    `own` holds one ([B, g, Q, d], [B, g, Q, d]) pair per depth already drafted, diagonal by construction.
    Returns [B, Q, h*d].
    """
    batch, heads, length, dim = q_BhQd.shape
    kv_heads, total = keys.shape[1], keys.shape[2]
    groups = heads // kv_heads
    q = (q_BhQd * dim**-0.5).reshape(batch, kv_heads, groups * length, dim)
    scores = (q @ keys.transpose(-1, -2)).view(batch, kv_heads, groups, length, total)
    scores = scores.masked_fill(~mask_BQT[:, None, None], torch.finfo(scores.dtype).min)
    q = q.view(batch, kv_heads, groups, length, dim)
    if own:
        diagonal = torch.stack([(q * k[:, :, None]).sum(-1) for k, _ in own], dim=-1)
        scores = torch.cat([scores, diagonal.to(scores.dtype)], dim=-1)
    weights = scores.softmax(-1)
    context = weights[..., :total].reshape(batch, kv_heads, groups * length, total) @ values
    context = context.view(batch, kv_heads, groups, length, dim)
    for i, (_, v) in enumerate(own):
        context = context + weights[..., total + i, None] * v[:, :, None]
    out: Tensor = context.reshape(batch, heads, length, dim).transpose(1, 2).reshape(batch, length, heads * dim)
    return out


class MLP(nn.Module):
    """SwiGLU, named as in Llama."""

    def __init__(self, size: int, inner: int) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(size, inner, bias=False)
        self.up_proj = nn.Linear(size, inner, bias=False)
        self.down_proj = nn.Linear(inner, size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """[..., H] -> [..., H]."""
        out: Tensor = self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))
        return out


class DraftLayer(nn.Module):
    """A Llama layer; the first one reads [normed embedding; normed hidden] in its attention."""

    def __init__(self, config: LayerShape, first: bool) -> None:
        super().__init__()
        size, eps = config.hidden_size, config.rms_norm_eps
        self.first = first
        self.norm_before_residual = config.norm_before_residual
        self.input_layernorm = RMSNorm(size, eps)
        if first:
            self.hidden_norm = RMSNorm(size, eps)
        self.self_attn = Attention(config, 2 * size if first else size)
        self.post_attention_layernorm = RMSNorm(size, eps)
        self.mlp = MLP(size, config.intermediate_size)

    def attention_input(self, embedding: Tensor, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """(what the attention reads, the residual it is added to)."""
        if not self.first:
            return self.input_layernorm(hidden), hidden
        normed = self.hidden_norm(hidden)
        both = torch.cat([self.input_layernorm(embedding.to(normed.dtype)), normed], dim=-1)
        return both, normed if self.norm_before_residual else hidden

    def finish(self, residual: Tensor, context: Tensor) -> Tensor:
        """Output projection, residual, MLP."""
        x: Tensor = residual + self.self_attn.o_proj(context)
        out: Tensor = x + self.mlp(self.post_attention_layernorm(x))
        return out
