"""The one layer of an MTP head: two norms and a projection in, a decoder layer, a norm out.

Module names are MiMo's. Shape legend: see `base.py`; further S positions, h heads, g key/value heads, d head_dim.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb

from spec_train.speculators.layers import MLP, RMSNorm
from spec_train.speculators.losses import LossKind
from spec_train.speculators.mtp_layouts import LayoutName
from spec_train.target import TargetModel


@dataclass(frozen=True)
class MtpConfig:
    """Geometry and layout (from the target) and options (from the recipe) of a head; saved beside every checkpoint.

    target_layers         the target's number of layers
    layout                the family, see mtp_layouts.py
    reads_pre_norm        the first step reads the target's state before its final norm
    stitched              the head replaces the one that the target ships
    qkv_bias, qk_norm, gated   the attention's form: biases, normed queries and keys, gated output
    """

    hidden_size: int
    intermediate_size: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    rotary_dim: int
    vocab_size: int
    rms_norm_eps: float
    rope_parameters: dict[str, Any]
    max_position_embeddings: int
    target_layers: int
    layout: LayoutName
    reads_pre_norm: bool
    stitched: bool
    qkv_bias: bool = True
    qk_norm: bool = False
    gated: bool = False
    ttt_steps: int = 3
    step_weights: Literal["decay", "fastmtp"] = "decay"
    step_decay: float = 0.8
    loss: LossKind = "kl"
    lk_eta: float = 3.0
    gradient_checkpointing: bool = False

    def mimo(self) -> dict[str, Any]:
        """The config.json of a folder that holds a MiMo layer and nothing else."""
        return {
            "architectures": ["MiMoForCausalLM"],
            "model_type": "qwen2",
            "num_nextn_predict_layers": 1,
            "num_hidden_layers": self.target_layers,  # vLLM numbers the MTP layer after the target's
            "hidden_size": self.hidden_size,
            "intermediate_size": self.intermediate_size,
            "num_attention_heads": self.num_attention_heads,
            "num_key_value_heads": self.num_key_value_heads,
            "head_dim": self.head_dim,
            "vocab_size": self.vocab_size,
            "rms_norm_eps": self.rms_norm_eps,
            "hidden_act": "silu",
            "max_position_embeddings": self.max_position_embeddings,
            "rope_parameters": self.rope_parameters,
            "rope_theta": self.rope_parameters.get("rope_theta"),  # older readers look here
            "tie_word_embeddings": False,
        }

    def rotary(self) -> LlamaRotaryEmbedding:
        """The rotary embedding of the layer's first `rotary_dim` channels."""
        shape = {"hidden_size": self.hidden_size, "num_attention_heads": self.num_attention_heads}
        rope = {key: value for key, value in self.rope_parameters.items() if not key.startswith("mrope")}
        limit = self.max_position_embeddings
        return LlamaRotaryEmbedding(
            LlamaConfig(**shape, head_dim=self.rotary_dim, rope_parameters=rope, max_position_embeddings=limit)
        )


class CentredRMSNorm(RMSNorm):
    """x / rms(x) * (1 + weight): the weight is stored as its distance from 1 (Qwen3.5)."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__(size, eps)
        nn.init.zeros_(self.weight)

    def forward(self, x: Tensor) -> Tensor:
        """[..., size] -> [..., size], in the dtype of `x`."""
        return F.rms_norm(x.float(), (x.shape[-1],), 1.0 + self.weight.float(), self.eps).to(x.dtype)


class MtpAttention(nn.Module):
    """Projections with the variations that families have: biases, normed queries and keys, a gated output."""

    def __init__(self, config: MtpConfig, norm: type[RMSNorm]) -> None:
        super().__init__()
        self.heads, self.kv_heads, self.dim = config.num_attention_heads, config.num_key_value_heads, config.head_dim
        self.gated, self.qk_norm = config.gated, config.qk_norm
        size, width = config.hidden_size, self.heads * self.dim
        self.q_proj = nn.Linear(size, 2 * width if self.gated else width, bias=config.qkv_bias)
        self.k_proj = nn.Linear(size, self.kv_heads * self.dim, bias=config.qkv_bias)
        self.v_proj = nn.Linear(size, self.kv_heads * self.dim, bias=config.qkv_bias)
        self.o_proj = nn.Linear(width, size, bias=False)
        if self.qk_norm:
            self.q_norm = norm(self.dim, config.rms_norm_eps)
            self.k_norm = norm(self.dim, config.rms_norm_eps)


def _rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate the first channels of [B, h, S, d], as many as `cos` is wide."""
    rotary = cos.shape[-1]
    turned: Tensor = apply_rotary_pos_emb(x[..., :rotary], x[..., :rotary], cos.to(x.dtype), sin.to(x.dtype))[0]
    return turned if rotary == x.shape[-1] else torch.cat([turned, x[..., rotary:]], dim=-1)


class MtpBlock(nn.Module):
    """All that is trained. `centred`: norms are stored as in Qwen3.5."""

    def __init__(self, config: MtpConfig, centred: bool) -> None:
        super().__init__()
        norm: type[RMSNorm] = CentredRMSNorm if centred else RMSNorm
        size, eps = config.hidden_size, config.rms_norm_eps
        self.token_layernorm = norm(size, eps)
        self.hidden_layernorm = norm(size, eps)
        self.input_proj = nn.Linear(2 * size, size, bias=False)
        self.input_layernorm = norm(size, eps)
        self.self_attn = MtpAttention(config, norm)
        self.post_attention_layernorm = norm(size, eps)
        self.mlp = MLP(size, config.intermediate_size)
        self.final_layernorm = norm(size, eps)

    def mix(self, state: Tensor, embedding: Tensor, embedding_first: bool) -> Tensor:
        """What the decoder layer reads, [..., H], from a state and an embedding of that shape."""
        if not torch.is_autocast_enabled(state.device.type):
            state = state.to(self.input_proj.weight.dtype)
        hidden, token = self.hidden_layernorm(state), self.token_layernorm(embedding.to(state.dtype))
        out: Tensor = self.input_proj(torch.cat([token, hidden] if embedding_first else [hidden, token], dim=-1))
        return out

    def queries(self, y_BSH: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor | None]:
        """(queries [B, h, S, d], rotated; what gates the output [B, S, h*d], None where nothing does)."""
        attention = self.self_attn
        q = attention.q_proj(self.input_layernorm(y_BSH)).unflatten(-1, (attention.heads, -1))
        gate = None
        if attention.gated:
            q, gate_BShd = q.chunk(2, dim=-1)
            gate = gate_BShd.flatten(2)
        if attention.qk_norm:
            q = attention.q_norm(q)
        return _rotated(q.transpose(1, 2), cos, sin), gate

    def keys_values(self, y_BSH: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        """[B, g, S, d] each, keys rotated."""
        attention, read_BSH = self.self_attn, self.input_layernorm(y_BSH)
        k = attention.k_proj(read_BSH).unflatten(-1, (attention.kv_heads, attention.dim))
        v = attention.v_proj(read_BSH).unflatten(-1, (attention.kv_heads, attention.dim))
        if attention.qk_norm:
            k = attention.k_norm(k)
        return _rotated(k.transpose(1, 2), cos, sin), v.transpose(1, 2)

    def finish(self, y_BSH: Tensor, context_BSU: Tensor, gate_BSU: Tensor | None) -> Tensor:
        """The rest of the layer and the final norm: the state [B, S, H] for the output head and the next depth."""
        if gate_BSU is not None:
            context_BSU = context_BSU * gate_BSU.sigmoid()
        x: Tensor = y_BSH + self.self_attn.o_proj(context_BSU)
        x = x + self.mlp(self.post_attention_layernorm(x))
        out: Tensor = self.final_layernorm(x)
        return out


@torch.no_grad()
def start_from_last_layer(block: MtpBlock, target: TargetModel, *, reads_pre_norm: bool) -> None:
    """Start as the target's last layer and final norm, on a residual stream like the one that this layer knows.

    The projection starts near the state. The state comes behind the target's final norm, so the norm before the
    projection undoes its weight; both norms bring their half to the size of the target's residual stream, without
    which the layer's additions would drown or be drowned.
    """
    source = {name: value.float() for name, value in target.layers[-1].named_parameters()}
    layer = dict(block.named_parameters())
    final = target.decoder.norm.weight.float()
    size = target.hidden_size
    block.input_proj.weight[:, :size] *= 0.25
    block.input_proj.weight[:, :size] += torch.eye(size)
    block.final_layernorm.weight.copy_(final)
    for name, value in source.items():
        if name in layer and layer[name].shape == value.shape:
            layer[name].copy_(value)
    for which in ("q", "k"):
        if (norm := source.get(f"self_attn.{which}_norm.weight")) is not None:
            _fold_norm(block, which, norm.to(block.input_proj.weight.device))
    index = torch.arange(64, device=target.device)[None]
    stream = target.forward(index % target.vocab_size, index, aux_layer_ids=(target.num_layers - 1,))[1]
    assert stream is not None
    scale = stream.float().square().mean(-1).sqrt().median()
    block.token_layernorm.weight.fill_(float(scale))
    if reads_pre_norm:
        block.hidden_layernorm.weight.fill_(float(scale))
    else:
        mean = final.square().mean().sqrt()
        block.hidden_layernorm.weight.copy_(scale * final.sign() * mean / final.abs().clamp(min=0.1 * mean))


def _fold_norm(block: MtpBlock, which: str, norm_d: Tensor) -> None:
    """Stand in for a norm of queries or keys, which this layer lacks: rows divided by the size that their head has on
    an isotropic input, times the norm's weight."""
    projection = block.self_attn.q_proj if which == "q" else block.self_attn.k_proj
    rows = projection.weight.view(-1, block.self_attn.dim, projection.in_features)
    if len(norm_d) != block.self_attn.dim:
        return  # heads of another width: the projection was not copied either
    size = (rows * block.input_layernorm.weight).square().sum(-1).mean(-1)[:, None, None].sqrt()
    projection.weight.copy_((rows / size * norm_d[:, None]).flatten(0, 1))
