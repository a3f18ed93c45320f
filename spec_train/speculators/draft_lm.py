"""A draft language model (Leviathan et al., 2023, arXiv:2211.17192), distilled from the target (DistillSpec: Zhou et
al., 2024, arXiv:2310.08461).

A causal language model of its own, with the target's tokenizer; it reads tokens alone and drafts one after another:

    q_t = softmax(W_head Draft(x_0 ... x_{t-1}))        drafts token t, held against the target's law p_t

The first draft of a round reads the token just sampled, and so on; teacher-forced, draft k from any state is therefore
the argmax at one position, and one pass over a text tells every hit. The loss may be confined to the D likeliest
tokens (`loss_vocab_size`); drafts are always picked from the whole vocabulary.

Shape legend: see `base.py`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar, Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from spec_train.batch import Batch, FeatureSpec
from spec_train.decoding.sampling import Sampling
from spec_train.errors import UserError
from spec_train.kv_cache import SlotCache
from spec_train.packed import PackedWeight
from spec_train.recipe import SpeculatorOptions
from spec_train.speculators.base import (
    GREEDY,
    Committed,
    LossOutput,
    ResponseHits,
    ServingCheckpoint,
    Speculator,
)
from spec_train.speculators.distillation import compute_dtype, draft_ratios
from spec_train.speculators.draft_start import (
    DraftLMConfig,
    DraftLMOptions,
    build_model,
    draft_config,
    lend,
    start,
    start_outline,
    with_rows,
)
from spec_train.speculators.head_files import checkpoint_tensors
from spec_train.speculators.heads import load_strictly
from spec_train.speculators.lora import inject_lora, merged
from spec_train.speculators.losses import fused_head_loss, restricted_target_probs, sum_plogp
from spec_train.speculators.on_policy import with_own_answers
from spec_train.speculators.supervision import response_hits
from spec_train.target import TargetModel

REAL_VOCAB_SIZE = "spec_train_real_vocab_size"  # key of an export's config.json; engines pass over it
NO_STATES = FeatureSpec(aux_layer_ids=(), last_hidden=False)


@dataclass
class DraftState:
    """Drafting state: the draft's own keys and values, and its output at the last committed token.

    `first_B1` is the first token of each prompt until the first commit, which brings the others.
    """

    cache: SlotCache
    hidden_BH: Tensor
    position_B: Tensor
    first_B1: Tensor | None


class DraftLM(Speculator):
    """The draft: `decoder`, the stack of a Transformers model with its embedding, and `lm_head` unless that is tied."""

    kind = "draft_lm"
    method = "draft_model"
    options: ClassVar[type[SpeculatorOptions]] = DraftLMOptions
    config_class: ClassVar[type[DraftLMConfig]] = DraftLMConfig
    num_depths = 1
    decoder: Any  # a module of Transformers, which is untyped
    lm_head: nn.Linear | None
    _prefix: str  # what precedes the names of the decoder's tensors in a checkpoint, and those of the head's
    _head_name: str

    def __init__(self, config: DraftLMConfig, model: Any, loss_ids_D: Tensor) -> None:
        """`model`: a causal language model as `build_model` makes it, float32. `loss_ids_D`: ascending ids that the
        loss is confined to."""
        super().__init__()
        self.config = config
        self._packed_head = PackedWeight()
        # A TargetModel knows every family's masks, cached steps and logit scales. In a tuple: its modules are ours.
        self._body = (TargetModel(model, "of the draft", torch.device("cpu")),)
        body = self.body
        check_body(body)
        self.decoder = body.decoder
        self.lm_head = None if config.model["tie_word_embeddings"] else body.lm_head
        names = {id(module): name for name, module in model.named_modules()}
        self._prefix, self._head_name = names[id(body.decoder)], names[id(body.lm_head)]
        self.requires_grad_(config.lora is None)
        if config.borrows:
            empty = torch.empty(0)
            lend(body.embedding, empty)
            lend(body.lm_head, empty)
            # What is borrowed keeps the target's dtype; the layers in training have their own.
            body.embedding.register_forward_hook(lambda _module, _ids, out: out.to(self._layer_dtype))
        for module in (body.embedding, body.lm_head):
            module.requires_grad_(config.train_embeddings)
        if config.lora is not None:
            inject_lora(self.decoder, config.lora)
        if config.gradient_checkpointing:
            model.gradient_checkpointing_enable({"use_reentrant": False})
        self.loss_ids_D: Tensor
        self.loss_index_V: Tensor
        self.target_head_DH: Tensor
        self.register_buffer("loss_ids_D", loss_ids_D, persistent=False)
        index = torch.full((body.vocab_size,), -1, dtype=torch.long)
        index[loss_ids_D] = torch.arange(len(loss_ids_D))
        self.register_buffer("loss_index_V", index, persistent=False)
        self.register_buffer("target_head_DH", torch.empty(0), persistent=False)

    @property
    def _layer_dtype(self) -> torch.dtype:
        return next(self.body.layers[0].parameters()).dtype

    @property
    def body(self) -> TargetModel:
        """The draft's modules, with what every family needs to run them."""
        return self._body[0]

    @property
    def target(self) -> TargetModel:
        """The target this draft was built for."""
        return self._target[0]

    @property
    def head_VH(self) -> Tensor:
        """The output head. Read anew each time: engines put gathered weights in its place."""
        weight: Tensor = self.body.embedding.weight if self.lm_head is None else self.lm_head.weight
        return weight

    def _apply(self, fn: Any, recurse: bool = True) -> DraftLM:
        """Casting leaves the rotary frequencies in float32, as engines have them."""
        kept = [
            (module, name, buffer)
            for module in self.modules()
            for name, buffer in module._buffers.items()
            if "inv_freq" in name and buffer is not None
        ]
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        for module, name, buffer in kept:
            module._buffers[name] = buffer.to(module._buffers[name].device)  # type: ignore[union-attr]
        return self

    # ------------------------------------------------------------------ construction
    @classmethod
    def check_target(cls, options: Any, target: TargetModel) -> None:
        """See `Speculator.check_target`. A `start_model` is looked at when it is loaded."""
        super().check_target(options, target)
        if (body := start_outline(options, target)) is not None:
            check_body(body)

    @classmethod
    def required_features(cls, options: Any, target: TargetModel) -> FeatureSpec:
        """The target's last state, which gives its laws; drafting reads none."""
        return FeatureSpec(aux_layer_ids=(), last_hidden=True)

    @classmethod
    def from_recipe(cls, options: Any, target: TargetModel, draft_ids_D: Tensor, seed: int) -> DraftLM:
        """See `Speculator.from_recipe`. `draft_ids_D`: the tokens that the loss is confined to."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            model = start(options, target)
            draft = cls(draft_config(options, model, target), model, draft_ids_D)
        draft.borrow(target)
        return draft

    @classmethod
    def from_checkpoint(cls, checkpoint: Path, saved: dict[str, Any], target: TargetModel) -> Self:
        """See `Speculator.from_checkpoint`."""
        config = cls.config_class(**saved)
        model = build_model(config.model)
        if config.model["vocab_size"] != target.vocab_size or (
            config.borrows and int(model.config.hidden_size) != target.hidden_size
        ):
            raise UserError(
                f"{checkpoint}: trained for a target of vocabulary {config.model['vocab_size']}; {target.name} has "
                f"{target.vocab_size} and width {target.hidden_size}"
            )
        check_real_vocab_size(config.real_vocab_size, target, str(checkpoint))
        tensors = checkpoint_tensors(checkpoint)
        if config.lora is not None:
            tensors = merged(tensors, config.lora, str(checkpoint))
        draft = cls(replace(config, lora=None), model, torch.arange(target.vocab_size))
        load_strictly(draft, tensors, str(checkpoint))
        draft.to(target.device, target.dtype).borrow(target)
        return draft.eval().requires_grad_(False)

    def borrow(self, target: TargetModel) -> None:
        """Take what is the target's: its head for the loss, and embedding and head where the draft shares them."""
        self._target = (target,)  # in a tuple: the target must not become a submodule
        device = self.loss_ids_D.device
        whole = target.lm_head.weight.detach().to(device)
        self.target_head_DH = whole if len(self.loss_ids_D) == len(whole) else whole[self.loss_ids_D]
        if self.config.borrows:
            lend(self.body.embedding, target.embedding.weight.detach().to(device))
            lend(self.body.lm_head, whole)

    # ------------------------------------------------------------------ forward pieces
    def hidden_states(self, input_ids_BT: Tensor, position_BT: Tensor, visible_BTT: Tensor) -> Tensor:
        """States after the final norm [B, T, H], differentiable. `visible_BTT[b, i, j]`: query i may see key j."""
        return self.body.forward(input_ids_BT, position_BT, visible_BST=visible_BTT)[0]

    def packed_states(self, batch: Batch) -> Tensor:
        """States [B, T, H] of packed rows whose documents do not see each other."""
        index = torch.arange(batch.input_ids_BT.shape[1], device=batch.input_ids_BT.device)
        same = batch.document_BT[:, None, :] == batch.document_BT[:, :, None]
        return self.hidden_states(batch.input_ids_BT, batch.position_BT, same & (index[None, :] <= index[:, None]))

    def draft_logits(self, hidden: Tensor) -> Tensor:
        """Logits [..., real V] of the ids that may be drafted."""
        return self.body.scale_logits(
            self._packed_head.linear(hidden, self.head_VH.to(hidden.dtype))[..., : self.config.real_vocab_size]
        )

    def cached_states(self, token_BS: Tensor, position_BS: Tensor, cache: SlotCache) -> Tensor:
        """States [B, S, H] of tokens on top of `cache`, which takes them in."""
        return self.body.step(token_BS, position_BS, cache, NO_STATES)[0]

    # ------------------------------------------------------------------ training
    def supervised_counts(self, batch: Batch) -> Tensor:
        """See `Speculator.supervised_counts`. Nothing predicts the first token of a document."""
        return next_token_weights(batch).double().sum()[None]

    def loss(self, batch: Batch, normalizer: Tensor) -> LossOutput:
        """Weighted mean of the head loss. Metrics: depth_loss, alpha, hit (among the tokens of the loss)."""
        if self.config.on_policy_fraction > 0:
            batch = with_own_answers(self, batch, self.config.on_policy_fraction)
        weight_BT = next_token_weights(batch)
        chosen = weight_BT > 0
        hidden_NH = self.packed_states(batch)[chosen].to(compute_dtype(weight_BT.device))
        probs_ND = self.target_probs(batch, chosen, hidden_NH.dtype)
        weight_N = weight_BT[chosen]
        out = fused_head_loss(
            hidden_NH,
            self.loss_head(),
            probs_ND,
            sum_plogp(probs_ND),
            weight_N / normalizer[0].float().clamp(min=1e-9),
            self.loss_index_V[F.pad(batch.input_ids_BT[:, 1:], (0, 1))[chosen]],
            self.config.loss,
            self.config.lk_eta,
            self.config.jsd_beta,
            self.config.temperature / self.logit_scale,
        )
        values = {"depth_loss": out.loss_N, "alpha": out.alpha_N, "hit": out.hit_N}
        sums = {name: (value_N.double() * weight_N).sum()[None] for name, value_N in values.items()}
        return LossOutput(out.total, sums, dict.fromkeys(sums, weight_N.double().sum()[None]))

    def loss_head(self) -> Tensor:
        """Rows of the draft's head that the loss is confined to [D, H]."""
        whole = self.head_VH
        return whole if len(self.loss_ids_D) == len(whole) else whole[self.loss_ids_D]

    @property
    def logit_scale(self) -> float:
        """What the draft's family multiplies its logits by."""
        return float(self.body.scale_logits(torch.ones(())))

    @torch.no_grad()
    def target_probs(self, batch: Batch, chosen_BT: Tensor, dtype: torch.dtype) -> Tensor:
        """The target's laws from the chosen positions over the tokens of the loss [N, D], softened by `temperature`."""
        assert batch.last_hidden_BTH is not None and batch.target_lse_BT is not None
        hidden_NH, temperature = batch.last_hidden_BTH[chosen_BT], self.config.temperature
        logits_dtype = batch.logits_dtype or dtype
        with torch.autocast(hidden_NH.device.type, enabled=False):
            logits = self.target.head_logits(hidden_NH, self.target_head_DH.to(logits_dtype)).float()
            if temperature == 1:
                lse_N = batch.target_lse_BT[chosen_BT]
            else:  # the stored logsumexp is that of temperature 1
                lse_N = self.target.logsumexp(hidden_NH, logits_dtype, temperature)
            return restricted_target_probs(logits / temperature, lse_N, dtype)

    @torch.no_grad()
    def draft_hits(self, batch: Batch, num_draft_tokens: int, sampling: Sampling = GREEDY) -> list[ResponseHits]:
        """See `Speculator.draft_hits`: draft k from state p has the law at p+1+k, whatever p."""
        chosen = next_token_weights(batch) > 0
        row_N, position_N = chosen.nonzero(as_tuple=True)
        ratio_BT = torch.zeros_like(batch.loss_weight_BT)
        ratio_BT[chosen] = draft_ratios(
            batch, (row_N, position_N + 1), self.packed_states(batch)[chosen], self.draft_logits, sampling
        )
        later = [F.pad(ratio_BT[:, 1 + k :], (0, min(1 + k, ratio_BT.shape[1]))) for k in range(num_draft_tokens)]
        return response_hits(batch, torch.stack(later, -1).cpu(), sampling)

    # ------------------------------------------------------------------ decoding
    @torch.no_grad()
    def begin(self, prompts: list[list[int]], max_length: int) -> DraftState:
        """See `Proposer.begin`."""
        device = self.loss_ids_D.device
        first_B1 = torch.tensor([[prompt[0]] for prompt in prompts], device=device)
        nothing = torch.full((len(prompts),), -1, device=device)
        hidden = torch.zeros(len(prompts), self.body.hidden_size, device=device, dtype=self.head_VH.dtype)
        self.body.graphs = self.target.graphs
        return DraftState(self.body.new_cache(max_length), hidden, nothing, first_B1)

    @torch.no_grad()
    def commit(self, state: DraftState, committed: Committed) -> None:
        """See `Proposer.commit`. The token beside the features of position p stands at p+1."""
        token_BS, position_BS, last_B = committed.token_BS, committed.position_BS + 1, committed.count_B - 1
        if state.first_B1 is not None:
            token_BS = torch.cat([state.first_B1, token_BS], dim=1)
            position_BS = F.pad(position_BS, (1, 0))
            last_B, state.first_B1 = last_B + 1, None
        hidden_BSH = self.cached_states(token_BS, position_BS, state.cache)
        rows = torch.arange(len(last_B), device=last_B.device)
        state.hidden_BH, state.position_B = hidden_BSH[rows, last_B], position_BS[rows, last_B]

    @torch.no_grad()
    def first_logits(self, state: Any, num_draft_tokens: int) -> tuple[Any, Tensor]:
        """See `Speculator.first_logits`."""
        return replace(state), self.draft_logits(state.hidden_BH)

    @torch.no_grad()
    def next_logits(self, draft: Any, token_B: Tensor, depth: int) -> Tensor:
        """See `Speculator.next_logits`."""
        position_B1 = (draft.position_B + depth)[:, None]
        draft.hidden_BH = self.cached_states(token_B[:, None], position_B1, draft.cache)[:, 0]
        return self.draft_logits(draft.hidden_BH)

    def branch(self, draft: Any, rows: Tensor) -> Any:
        """See `Speculator.branch`."""
        return DraftState(draft.cache.branch(rows), draft.hidden_BH[rows], draft.position_B[rows], None)

    def full_law(self, probs_BD: Tensor) -> Tensor:
        """See `Speculator.full_law`: ids that only pad the head have probability 0."""
        return F.pad(probs_BD, (0, self.body.vocab_size - probs_BD.shape[-1]))

    def select(self, state: DraftState, rows: Tensor) -> DraftState:
        """See `Proposer.select`."""
        state.cache.select(rows)
        first_B1 = None if state.first_B1 is None else state.first_B1[rows]
        return DraftState(state.cache, state.hidden_BH[rows], state.position_B[rows], first_B1)

    # ------------------------------------------------------------------ serving
    def serving(self) -> ServingCheckpoint:
        """A plain Hugging Face checkpoint, with embedding and head whosever they are."""
        own: dict[str, Tensor] = self.decoder.state_dict()
        if self.config.lora is not None:
            own = merged(own, self.config.lora, "the draft")
        tensors = {f"{self._prefix}.{name}": value for name, value in own.items()}
        embedding = next(name for name, module in self.decoder.named_modules() if module is self.body.embedding)
        config, real = self.config.model, self.config.real_vocab_size
        head = with_rows(self.head_VH.detach(), config["vocab_size"], real)
        tied = self.lm_head is None
        tensors[f"{self._prefix}.{embedding}.weight"] = head if tied else self.body.embedding.weight.detach()
        if not tied:
            tensors[f"{self._head_name}.weight"] = head
        served = {**config, "architectures": [type(self.body.model).__name__], REAL_VOCAB_SIZE: real}
        return ServingCheckpoint(self.kind, self.method, served, tensors)

    @classmethod
    def from_serving(cls, config: dict[str, Any], tensors: dict[str, Tensor], target: TargetModel) -> DraftLM:
        """Rebuild a draft from a Hugging Face checkpoint. Raises UserError for a missing or unknown tensor, or another
        number of rows than the target has."""
        if config.get("vocab_size") != target.vocab_size:
            raise UserError(
                f"draft model: {config.get('vocab_size')} rows, the target has {target.vocab_size}; a draft needs as "
                "many (training from speculator.start_model pads them)"
            )
        plain = {**config, "tie_word_embeddings": bool(config.get("tie_word_embeddings", False))}
        real = plain.pop(REAL_VOCAB_SIZE, target.vocab_size)
        check_real_vocab_size(real, target, "draft model")
        rebuilt = DraftLMConfig(plain, real, borrows=False, train_embeddings=True)
        draft = cls(rebuilt, build_model(plain), torch.arange(target.vocab_size))
        names = {name: f"{draft._prefix}.{name.removeprefix('decoder.')}" for name in draft.state_dict()}
        names.update({name: f"{draft._head_name}.weight" for name in names if name == "lm_head.weight"})
        missing, unknown = sorted(set(names.values()) - set(tensors)), sorted(set(tensors) - set(names.values()))
        if missing or unknown:
            raise UserError(f"exported draft model: missing tensors {missing}, unknown tensors {unknown}")
        load_strictly(draft, {name: tensors[exported] for name, exported in names.items()}, "exported draft model")
        draft.borrow(target)
        return draft.eval().requires_grad_(False)


def check_real_vocab_size(real: Any, target: TargetModel, where: str) -> None:
    """Raises UserError, begun with `where`, unless a draft's ids below `real` are ids of the target."""
    if not isinstance(real, int) or not 0 < real <= target.vocab_size:
        raise UserError(
            f"{where}: drafts ids below {real!r}, the target has {target.vocab_size}; export or train again"
        )


def next_token_weights(batch: Batch) -> Tensor:
    """float32 [B, T]: the loss weight of the token that follows each position; 0 where a document ends."""
    weight_BT = batch.loss_weight_BT * (batch.position_BT > 0)
    return F.pad(weight_BT[:, 1:], (0, 1))


def check_body(body: TargetModel) -> None:
    """Raise UserError for a model that cannot be trained as a draft."""
    if body.lm_head.bias is not None or getattr(body.config, "final_logit_softcapping", None) is not None:
        raise UserError(f"a draft of model_type {body.config.model_type} (biased or capped logits) is not supported")
    if body.linear_layers:
        raise UserError(
            "a draft with linear attention layers is not supported; name full attention layers in "
            "speculator.start_layers, or a speculator.start_model that has no others"
        )
