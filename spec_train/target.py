"""The frozen target: loading, hidden states, cached forward passes, generation.

Every quirk of an architecture (nested text configs, sliding windows, scaled or soft-capped logits, grouped heads)
is handled here and nowhere else. Shape legend: see `speculators/base.py`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    Qwen2Config,
    Qwen2ForCausalLM,
)
from transformers.models.bloom.modeling_bloom import build_alibi_tensor

from spec_train.batch import Batch, Features, FeatureSpec
from spec_train.decoding.sampling import RequestGenerators, Sampling, target_probs
from spec_train.errors import UserError
from spec_train.graphs import GraphCache, Graphs
from spec_train.kv_cache import GROUPED_ATTENTION, SlotCache
from spec_train.long_rope import SwitchCache, switch_of
from spec_train.packed import pack_linears
from spec_train.stop_ids import stop_token_ids
from spec_train.weights import load_whole

LSE_CHUNK = 512  # rows of full-vocabulary logits held at once
_OWN_ATTENTION = ("gpt_oss", "bloom", "falcon")  # know no attention but those of Transformers, or need the scores
LINEAR = "linear_attention"  # what Transformers calls such layers


def clock(device: torch.device) -> float:
    """Seconds on a monotonic clock, once all work queued on the device is done."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


@dataclass(frozen=True)
class Generation:
    """One answer of the target. `features` and `target_lse` (where captured) cover positions 0 .. len-2 of
    prompt + output: [T, A*H] / [T, H] and [T]; `target_lse` is 0 at prompt positions that predict prompt tokens."""

    output_ids: list[int]
    finish_reason: str
    features: Features | None = None
    target_lse: Tensor | None = None


@dataclass
class GenerationTimings:
    """Seconds and step counts of one `generate` call."""

    prefill: float = 0.0
    decode: float = 0.0
    steps: int = 0


class TargetModel:
    """A frozen causal language model of Transformers. Use `load`. `eos_token_ids`: every id that ends an answer."""

    def __init__(self, model: nn.Module, name: str, device: torch.device, eos_token_ids: Collection[int] = ()) -> None:
        self.model = model.eval().requires_grad_(False)
        self.name = name
        self.device = device
        self.eos_token_ids = frozenset(eos_token_ids)
        config: Any = model.config
        self.full_config = config
        self.config: Any = config.get_text_config()
        with understood(name, str(config.model_type)):
            self._find_parts()
            if device.type != "meta":  # an outline
                pack_linears(model)
                self._check_head()
                self._check_steps()

    def _find_parts(self) -> None:
        """Where this family keeps what we need of it. Raises UserError for what we could not run."""
        model: Any = self.model
        self.decoder: Any = model.get_decoder()
        inner = getattr(self.decoder, "language_model", None)
        if isinstance(inner, nn.Module):  # a wrapper that also holds a vision tower
            self.decoder = inner
        self.lm_head: nn.Linear = model.get_output_embeddings()
        self.embedding: nn.Embedding = model.get_input_embeddings()
        self.num_layers = int(self.config.num_hidden_layers)
        self.hidden_size = int(self.config.hidden_size)
        self.vocab_size = int(self.lm_head.weight.shape[0])
        self.dtype = self.lm_head.weight.dtype
        self.max_length = length_limit(self.config)
        widths = {int(part.weight.shape[1]) for part in (self.lm_head, self.embedding)}
        if widths != {self.hidden_size}:
            raise UserError(
                f"target {self.name}: embedding or output head of width {min(widths)} beside layers of width "
                f"{self.hidden_size} is not supported"
            )
        self.layers = _decoder_layers(self.decoder, self.num_layers, self.name)
        self.windows = _attention_windows(self.config, self.num_layers, self.name)
        self.switch = switch_of(self.config, self.name)  # where LongRoPE changes its factors
        kinds = getattr(self.config, "layer_types", None) or []
        # Layers with a running state in place of keys and values, see linear_cache.py.
        self.linear_layers = [i for i, kind in enumerate(kinds) if kind == LINEAR]
        if self.linear_layers:
            from spec_train.linear_cache import roll_back

            roll_back((self.layers[i] for i in self.linear_layers), self.name)
        self.graphs: Graphs | None = None  # set by `replaying`
        self._additive_mask = model.config._attn_implementation == "eager"
        self._alibi = self.config.model_type == "bloom"

    @classmethod
    def load(
        cls,
        name: str,
        *,
        revision: str | None = None,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
        attn_implementation: str | None = None,
    ) -> TargetModel:
        """Load a checkpoint by folder or hub id. Raises UserError where it is not found, not whole (see `weights.py`)
        or of an unsupported kind."""
        path = Path(name)
        if (name.startswith((".", "/", "~")) or path.exists()) and not (path.expanduser() / "config.json").is_file():
            raise UserError(
                f"target.model {name}: the folder holds no config.json; give a Hugging Face checkpoint or hub id"
            )
        know_mimo()
        try:
            config = AutoConfig.from_pretrained(name, revision=revision)
            attention = attn_implementation or attention_of(config)
            with understood(name, str(config.model_type), (OSError, ImportError)):
                model = load_whole(
                    auto_class(config, name),
                    name,
                    f"target.model {name}",
                    revision=revision,
                    dtype=dtype,
                    attn_implementation=attention,
                )
        except OSError as error:
            first = str(error).strip().splitlines()[0]
            raise UserError(
                f"target.model {name}: cannot be loaded ({first}); give a local folder or a reachable hub id"
            ) from error
        except ImportError as error:  # a quantised checkpoint whose library is missing
            raise UserError(f"target.model {name}: cannot be loaded: {' '.join(str(error).split())}") from error
        return cls(model.to(device), name, torch.device(device), stop_token_ids(name, revision))

    # ------------------------------------------------------------------ output head
    def logits(self, hidden: Tensor) -> Tensor:
        """Target logits [..., V] from states after the final norm [..., H], in the model's dtype."""
        out: Tensor = self.lm_head(hidden.to(self.dtype))
        return self.scale_logits(out)

    def scale_logits(self, raw: Tensor) -> Tensor:
        """What some families do after the matrix product: divide, multiply or soft-cap."""
        divisor = getattr(self.config, "logits_scaling", None)
        factor = getattr(self.config, "logit_scale", None)
        cap = getattr(self.config, "final_logit_softcapping", None)
        if divisor is not None:
            raw = raw / divisor
        if factor is not None:
            raw = raw * factor
        if cap is not None:
            raw = torch.tanh(raw / cap) * cap
        return raw

    def logsumexp(self, hidden_NH: Tensor, dtype: torch.dtype | None = None, temperature: float = 1.0) -> Tensor:
        """float32 [N]: logsumexp over the whole vocabulary of logits / temperature, a chunk of rows at a time. States
        and head are multiplied in `dtype`, the target's own where it is None."""
        chunks = []
        with torch.autocast(self.device.type, enabled=False):
            cast = None if dtype in (None, self.dtype) else self.lm_head.weight.to(dtype)
            for part in torch.split(hidden_NH, LSE_CHUNK):
                logits = self.logits(part) if cast is None else self.head_logits(part, cast)
                chunks.append(torch.logsumexp(logits.float() / temperature, dim=-1))
        return torch.cat(chunks) if chunks else hidden_NH.new_zeros(0, dtype=torch.float32)

    def head_logits(self, hidden_NH: Tensor, head_DH: Tensor) -> Tensor:
        """Logits [N, D] of the tokens whose rows of the output head are given, multiplied in that head's dtype."""
        return self.scale_logits(hidden_NH.to(head_DH.dtype) @ head_DH.T)

    def _check_head(self) -> None:
        """Compare our output head with the model's own on four tokens: a silent scale would spoil every loss."""
        ids = torch.arange(4, device=self.device)[None] % self.vocab_size
        with torch.no_grad():
            own = self.model(input_ids=ids, use_cache=False).logits[0, -1].float()
            ours = self.logits(self.forward(ids, torch.arange(4, device=self.device)[None])[0])[0, -1].float()
        if (own - ours).abs().max() > 2e-2 * max(1.0, float(own.abs().max())):
            raise UserError(
                f"target {self.name}: its output head ({self.config.model_type}) is not understood; logits disagree"
            )

    @torch.no_grad()
    def _check_steps(self) -> None:
        """A padded prompt beside a longer one, then two tokens each on top of the cache: a family whose masks,
        positions or cache are not those that we know ends here, and not in the midst of a run. Logits are compared with
        the model's own in float32 alone, where they agree up to rounding whatever the experts are."""
        texts, kept = [list(range(2, 10)), list(range(3, 7))], [6, 2]
        texts = [[token % self.vocab_size for token in text] for text in texts]
        if self.max_length < 9:
            return
        spec, cache = FeatureSpec((), last_hidden=False), self.new_cache(9)
        self.prefill([text[:n] for text, n in zip(texts, kept, strict=True)], cache, spec)
        ids = torch.tensor([text[n:] for text, n in zip(texts, kept, strict=True)], device=self.device)
        position = torch.tensor(kept, device=self.device)[:, None] + torch.arange(2, device=self.device)
        ours = self.logits(self.step(ids, position, cache, spec)[0])[:, -1].float()
        if self.dtype != torch.float32:
            return
        for text, row in zip(texts, ours, strict=True):
            own = self.model(input_ids=torch.tensor([text], device=self.device), use_cache=False).logits[0, -1].float()
            if (own - row).abs().max() > 2e-2 * max(1.0, float(own.abs().max())):
                raise UserError(
                    f"target {self.name}: {self.config.model_type} is not understood; its steps on a cache disagree "
                    "with its own pass over the whole text"
                )

    # ------------------------------------------------------------------ forward passes
    @contextmanager
    def _capture(self, layer_ids: Sequence[int]) -> Iterator[dict[int, Tensor]]:
        """Collect the residual stream after k layers (0 = embeddings) for each k in `layer_ids`."""
        states: dict[int, Tensor] = {}
        handles = []
        for k in layer_ids:
            if k == 0:
                handles.append(self.layers[0].register_forward_pre_hook(_keep_input(states), with_kwargs=True))
            else:
                handles.append(self.layers[k - 1].register_forward_hook(_keep_output(states, k)))
        try:
            yield states
        finally:
            for handle in handles:
                handle.remove()

    def forward(
        self,
        input_ids_BS: Tensor,
        position_BS: Tensor,
        *,
        visible_BST: Tensor | None = None,
        key_position_BT: Tensor | None = None,
        cache: SlotCache | None = None,
        aux_layer_ids: Sequence[int] = (),
    ) -> tuple[Tensor, Tensor | None]:
        """One pass of the decoder stack: (state after the final norm [B, S, H], aux states [B, S, A*H] or None).

        `visible_BST`: which keys each query may see before sliding windows are applied (default: causal in a row);
        `key_position_BT`: positions of the keys (default: those of the queries), which sliding windows need. Linear
        layers know no mask: they read whatever precedes a token in its row.
        """
        keys = position_BS if key_position_BT is None else key_position_BT
        if visible_BST is None:
            index = torch.arange(position_BS.shape[1], device=position_BS.device)
            visible_BST = (index[None, :] <= index[:, None]).expand(position_BS.shape[0], -1, -1)
        mask = self._mask(visible_BST, position_BS, keys)
        if self._alibi:
            self.decoder.build_alibi_tensor = partial(_alibi, keys)
            try:
                return self._stack(input_ids_BS, position_BS, mask, cache, aux_layer_ids)
            finally:
                del self.decoder.build_alibi_tensor  # the model's own again
        if self.switch is None:
            return self._stack(input_ids_BS, position_BS, mask, cache, aux_layer_ids)
        return self._switched(input_ids_BS, position_BS, mask, cache, aux_layer_ids)

    def _stack(
        self,
        input_ids_BS: Tensor,
        position_BS: Tensor,
        mask: Tensor | dict[str, Any],
        cache: SlotCache | None,
        aux_layer_ids: Sequence[int],
    ) -> tuple[Tensor, Tensor | None]:
        """The decoder stack, once. Tokens beyond the context (padding, drafts that are cut, finished rows that ride
        along) take the last position: a table of positions ends there, and no answer depends on them."""
        with self._capture(aux_layer_ids) as states:
            out = self.decoder(
                input_ids=input_ids_BS,
                attention_mask=mask,
                position_ids=position_BS.clamp(max=self.max_length - 1),
                past_key_values=cache,
                use_cache=cache is not None,
            )
        aux = torch.cat([states[k] for k in aux_layer_ids], dim=-1) if aux_layer_ids else None
        return out.last_hidden_state, aux

    def _switched(
        self,
        input_ids_BS: Tensor,
        position_BS: Tensor,
        mask: Tensor | dict[str, Any],
        cache: SlotCache | None,
        aux_layer_ids: Sequence[int],
    ) -> tuple[Tensor, Tensor | None]:
        """`_stack` under the short factors for positions below `switch`, under the long ones from there on, see
        long_rope.py. Transformers picks by the largest position of a pass."""
        assert self.switch is not None
        long_BS, last = position_BS >= self.switch, self.switch - 1
        long_cache = None
        if isinstance(cache, SwitchCache):
            cache.remember(input_ids_BS)
            long_cache = cache.long
        if not bool(long_BS.any()):
            return self._stack(input_ids_BS, position_BS, mask, cache, aux_layer_ids)
        if isinstance(cache, SwitchCache):
            with cache.catching_up(long_BS.any(1)) as lacking:
                if lacking is not None:
                    slot_BW = lacking[1]
                    slot_BT = torch.arange(cache.max_length, device=slot_BW.device)[None].expand(len(slot_BW), -1)
                    seen_BWT = slot_BT[:, None] <= slot_BW[:, :, None]
                    self._stack(lacking[0], slot_BW, self._mask(seen_BWT, slot_BW, slot_BT), long_cache, ())
        long, long_aux = self._stack(input_ids_BS, position_BS, mask, long_cache, aux_layer_ids)
        if bool(long_BS.all()):
            return long, long_aux
        short, short_aux = self._stack(input_ids_BS, position_BS.clamp(max=last), mask, cache, aux_layer_ids)
        takes_long = long_BS[..., None]
        aux = None if short_aux is None or long_aux is None else torch.where(takes_long, long_aux, short_aux)
        return torch.where(takes_long, long, short), aux

    def _mask(self, visible_BST: Tensor, query_BS: Tensor, key_BT: Tensor) -> Tensor | dict[str, Any]:
        """The attention mask in the form the model takes: one tensor, or one for each kind of layer."""

        def form(window: int | None) -> Tensor:
            seen = visible_BST
            if window is not None:
                seen = seen & (query_BS[:, :, None] - key_BT[:, None, :] < window)
            mask = seen[:, None]
            if not self._additive_mask:
                return mask
            return torch.zeros_like(mask, dtype=self.dtype).masked_fill_(~mask, torch.finfo(self.dtype).min)

        if len(self.windows) == 1 and not self.linear_layers:
            return form(next(iter(self.windows.values())))
        masks: dict[str, Any] = {kind: form(window) for kind, window in self.windows.items()}
        return {**masks, LINEAR: None} if self.linear_layers else masks

    def features(self, input_ids_BT: Tensor, position_BT: Tensor, document_BT: Tensor, spec: FeatureSpec) -> Features:
        """States of packed rows; documents do not see each other (document -1 is padding). Shapes [B, T, ...]."""
        if self.linear_layers:
            from spec_train.linear_cache import by_document

            def states(ids: Tensor, position: Tensor) -> tuple[Tensor, Tensor | None]:
                return self.forward(ids, position, aux_layer_ids=spec.aux_layer_ids)

            last_hidden, aux_hidden = by_document(states, input_ids_BT, position_BT, document_BT)
            return Features(aux_hidden, last_hidden if spec.last_hidden else None)
        index = torch.arange(position_BT.shape[1], device=position_BT.device)
        visible = (document_BT[:, None, :] == document_BT[:, :, None]) & (index[None, :] <= index[:, None])
        last, aux = self.forward(input_ids_BT, position_BT, visible_BST=visible, aux_layer_ids=spec.aux_layer_ids)
        return Features(aux, last if spec.last_hidden else None)

    @torch.no_grad()
    def fill_features(
        self, batch: Batch, spec: FeatureSpec, dtype: torch.dtype, logits_dtype: torch.dtype | None = None
    ) -> Batch:
        """`batch` with hidden states in `dtype`, and the logsumexp of every position that predicts a supervised token,
        multiplied in `logits_dtype` (the target's own where it is None)."""
        full = FeatureSpec(spec.aux_layer_ids, last_hidden=True)
        states = self.features(batch.input_ids_BT, batch.position_BT, batch.document_BT, full)
        assert states.last_hidden is not None
        lse = torch.zeros_like(batch.loss_weight_BT)
        predicts = F.pad(batch.loss_weight_BT[:, 1:] > 0, (0, 1))
        last = states.last_hidden.to(dtype)
        logits_dtype = logits_dtype or self.dtype
        lse[predicts] = self.logsumexp(last[predicts], logits_dtype)  # of the states as they are handed on
        aux = None if states.aux_hidden is None else states.aux_hidden.to(dtype)
        filled = replace(batch, aux_hidden_BTAH=aux, last_hidden_BTH=last, target_lse_BT=lse)
        return replace(filled, logits_dtype=logits_dtype)

    def new_cache(self, max_length: int) -> SlotCache:
        """An empty cache for requests of at most `max_length` tokens."""
        if self.linear_layers:
            from spec_train.linear_cache import LinearCache

            return LinearCache(self.num_layers, max_length)
        if self.switch is not None:
            return SwitchCache(self.num_layers, max_length)
        if self.graphs is not None:
            return self.graphs.new_cache(self.model, self.num_layers, max_length)
        return SlotCache(self.num_layers, max_length)

    @contextmanager
    def replaying(self, graphs: Graphs | None) -> Iterator[None]:
        """Inside, steps of a few tokens are replayed from `graphs`, the target's and those of drafts beside it."""
        before, self.graphs = self.graphs, graphs
        try:
            yield
        finally:
            self.graphs = before

    def step(
        self,
        input_ids_BS: Tensor,
        position_BS: Tensor,
        cache: SlotCache,
        spec: FeatureSpec,
        start: int | None = None,
        count_B: Tensor | None = None,
    ) -> tuple[Tensor, Features]:
        """Run tokens at their positions on top of `cache`: (state after the final norm [B, S, H], features).

        Positions of a row are consecutive; `start` is the first one if all rows share it (a faster write). `count_B`:
        how many tokens of each row are real, with padding behind them, where the cache is not to go back among them.
        """
        limit = int(position_BS.max()) + 1
        compute = partial(self._on_cache, cache, spec.aux_layer_ids)
        if start is None and isinstance(cache, GraphCache):
            last, aux = cache.run(compute, (input_ids_BS, position_BS), limit, spec.aux_layer_ids)
            assert last is not None
        else:
            cache.place(position_BS, start, limit, count_B)
            last, aux = compute(input_ids_BS, position_BS, limit)
        return last, Features(aux, last if spec.last_hidden else None)

    def _on_cache(
        self,
        cache: SlotCache,
        aux_layer_ids: Sequence[int],
        input_ids_BS: Tensor,
        position_BS: Tensor,
        slots: int,
    ) -> tuple[Tensor, Tensor | None]:
        """`forward` over a cache that knows where to write; a query sees those of the first `slots` up to its own."""
        key_position = torch.arange(slots, device=position_BS.device)[None].expand(position_BS.shape[0], -1)
        return self.forward(
            input_ids_BS,
            position_BS,
            visible_BST=key_position[:, None, :] <= position_BS[:, :, None],
            key_position_BT=key_position,
            cache=cache,
            aux_layer_ids=aux_layer_ids,
        )

    def step_tree(
        self,
        input_ids_BN: Tensor,
        depth_BN: Tensor,
        sees_BNN: Tensor,
        start_B: Tensor,
        cache: SlotCache,
        spec: FeatureSpec,
    ) -> tuple[Tensor, Features]:
        """Run the N nodes of a token tree in one pass: (state after the final norm [B, N, H], features).

        Node i is written into slot start + i and stands at position start + depth; it sees every slot before `start`
        and the nodes of `sees_BNN[b, i]` (its ancestors and itself). Node 0 is the root, the last committed token.
        Raises UserError for a target with linear layers.
        """
        self.check_trees()
        slot_BN = start_B[:, None] + torch.arange(input_ids_BN.shape[1], device=start_B.device)
        limit = int(slot_BN.max()) + 1
        cache.place(slot_BN, None, limit)
        node_BT = torch.arange(limit, device=start_B.device) - start_B[:, None]
        in_tree_BT = (node_BT >= 0) & (node_BT < input_ids_BN.shape[1])
        index_BT = node_BT.where(in_tree_BT, 0)
        rows = torch.arange(len(start_B), device=start_B.device)[:, None]
        seen_BNT = sees_BNN[rows, :, index_BT].transpose(1, 2)
        last, aux = self.forward(
            input_ids_BN,
            start_B[:, None] + depth_BN,
            visible_BST=torch.where(in_tree_BT[:, None], seen_BNT, (node_BT < 0)[:, None]),
            key_position_BT=start_B[:, None] + torch.where(in_tree_BT, depth_BN[rows, index_BT], node_BT),
            cache=cache,
            aux_layer_ids=spec.aux_layer_ids,
        )
        return last, Features(aux, last if spec.last_hidden else None)

    def check_trees(self) -> None:
        """Raise UserError where this target cannot check a tree of drafts in one pass."""
        if self.linear_layers:
            raise UserError(
                f"target {self.name}: trees of drafts need a state for every branch, which linear attention layers do "
                "not have here; decode chains (no eval.trees, no --tree)"
            )

    def prefill(self, prompts: Sequence[Sequence[int]], cache: SlotCache, spec: FeatureSpec) -> tuple[Tensor, Features]:
        """Run right-padded prompts: (state at each prompt's last token [B, H], features [B, P, ...]).

        Padding needs no mask: its slots lie beyond every real query until real tokens overwrite them. Nothing goes
        back into a prompt later.
        """
        width = max(len(prompt) for prompt in prompts)
        ids = torch.zeros(len(prompts), width, dtype=torch.long)
        for row, prompt in enumerate(prompts):
            ids[row, : len(prompt)] = torch.tensor(prompt)
        position = torch.arange(width, device=self.device)[None].expand(len(prompts), -1)
        count = torch.tensor([len(prompt) for prompt in prompts], device=self.device)
        last, features = self.step(ids.to(self.device), position, cache, spec, start=0, count_B=count)
        return last[torch.arange(len(prompts), device=self.device), count - 1], features

    # ------------------------------------------------------------------ generation
    @torch.no_grad()
    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        sampling: Sampling,
        max_new_tokens: int | Sequence[int],
        *,
        request_indices: Sequence[int] | None = None,
        capture: FeatureSpec | None = None,
        capture_dtype: torch.dtype = torch.bfloat16,
        on_token: Callable[[int], None] | None = None,
        timings: GenerationTimings | None = None,
    ) -> list[Generation]:
        """Plain decoding of one batch, one token per target pass; the reference that speculation must reproduce.

        `max_new_tokens`: for all, or one for each. `request_indices` seed each request's own generator, so results do
        not depend on the batch it sits in.
        With `capture`, hidden states are kept as they are computed: no second pass over the answers is needed.
        """
        if any(len(prompt) == 0 for prompt in prompts):
            raise UserError("a prompt is empty; every request needs at least one token")
        limits = [max_new_tokens] * len(prompts) if isinstance(max_new_tokens, int) else max_new_tokens
        room = [min(n, self.max_length - len(prompt)) for n, prompt in zip(limits, prompts, strict=True)]
        if min(room) < 1:
            raise UserError(
                f"a prompt of {max(map(len, prompts))} tokens leaves no room: the target's limit is {self.max_length}"
            )
        spec = capture or FeatureSpec((), last_hidden=False)
        generators = RequestGenerators(sampling, list(request_indices or range(len(prompts))))
        lengths = [len(prompt) for prompt in prompts]
        cache = self.new_cache(max(n + r for n, r in zip(lengths, room, strict=True)))
        outputs: list[list[int]] = [[] for _ in prompts]
        reasons = ["length"] * len(prompts)
        begun = clock(self.device)
        hidden, features = self.prefill(prompts, cache, spec)
        store = _CaptureStore(features, lengths, room, capture_dtype) if capture else None
        if timings:
            timings.prefill += clock(self.device) - begun
        begun = clock(self.device)
        rows = torch.arange(len(prompts))  # which request each cache row serves
        active = torch.ones(len(prompts), dtype=torch.bool)
        position = torch.tensor(lengths)
        while True:
            logits = self.logits(hidden)
            if store:
                # Stored states that are rounded have a logsumexp of their own.
                kept = logits if capture_dtype == self.dtype else self.logits(hidden.to(capture_dtype))
                store.add_lse(rows[active], position[active] - 1, torch.logsumexp(kept.float(), -1).cpu()[active])
            tokens = _choose(logits, sampling, generators, rows)
            for slot, (row, token) in enumerate(zip(rows.tolist(), tokens.tolist(), strict=True)):
                if not active[slot]:
                    continue
                outputs[row].append(token)
                if token in self.eos_token_ids:
                    reasons[row] = "stop"
                active[slot] = token not in self.eos_token_ids and len(outputs[row]) < room[row]
            if on_token:
                on_token(sum(map(len, outputs)))
            if not active.any():
                break
            # Finished rows ride along until dropping them pays for the copy of the cache.
            if int(active.sum()) <= 0.8 * len(rows):
                cache.select(active.nonzero()[:, 0].to(self.device))
                rows, position, tokens = rows[active], position[active], tokens[active]
                active = torch.ones(len(rows), dtype=torch.bool)
            here = position.clamp(max=cache.max_length - 1)
            hidden_B1H, features = self.step(
                tokens[:, None].to(self.device), here[:, None].to(self.device), cache, spec
            )
            if store:
                store.add(rows, position, active, features)
            hidden, position = hidden_B1H[:, 0], position + active.long()
            if timings:
                timings.steps += 1
        if timings:
            timings.decode += clock(self.device) - begun
        return [
            Generation(out, reason, *(store.row(row, lengths[row] + len(out) - 1) if store else (None, None)))
            for row, (out, reason) in enumerate(zip(outputs, reasons, strict=True))
        ]


@contextmanager
def understood(name: str, family: str, known: tuple[type[Exception], ...] = ()) -> Iterator[None]:
    """Inside, whatever a family that we do not know raises becomes one line; errors that are `known` pass."""
    try:
        yield
    except Exception as error:
        if isinstance(error, (UserError, torch.OutOfMemoryError, *known)):
            raise
        first = (str(error).strip().splitlines() or [""])[0]
        raise UserError(
            f"target {name}: models of type {family} are not supported ({type(error).__name__}: {first})"
        ) from error


def outline(config: Any, name: str) -> TargetModel:
    """The target of a config without its weights: parts and sizes, to see what can be trained beside it."""
    attention = attention_of(config)
    with torch.device("meta"), understood(name, str(config.model_type)):
        model = auto_class(config, name).from_config(config, attn_implementation=attention)
    return TargetModel(model, name, torch.device("meta"))


def attention_of(config: Any) -> str:
    """Which attention of Transformers a model of this config runs with: ours where it knows the family's."""
    text: Any = config.get_text_config()
    needs_eager = getattr(text, "attn_logit_softcapping", None) is not None or text.model_type in _OWN_ATTENTION
    return "eager" if needs_eager else GROUPED_ATTENTION


def auto_class(config: Any, name: str) -> Any:
    """What loads a model of this kind: some families exist only with a vision tower beside them, which stays idle."""
    classes = (AutoModelForCausalLM, AutoModelForImageTextToText)
    known = [auto for auto in classes if type(config) in auto._model_mapping]
    if not known:
        raise UserError(f"target.model {name}: {config.model_type} is not a language model that transformers can run")
    return known[0]


class _MiMoConfig(Qwen2Config):  # type: ignore[misc]  # transformers is untyped
    model_type = "mimo"


class _MiMo(Qwen2ForCausalLM):  # type: ignore[misc]
    config_class = _MiMoConfig


def know_mimo() -> None:
    """MiMo's body is Qwen2; its repository says so in remote code, which is never run. Its MTP layers are left out."""
    AutoConfig.register("mimo", _MiMoConfig, exist_ok=True)
    AutoModelForCausalLM.register(_MiMoConfig, _MiMo, exist_ok=True)


class _CaptureStore:
    """Hidden states collected while a batch is generated, on the CPU in the storage dtype."""

    def __init__(self, prompt: Features, lengths: Sequence[int], room: Sequence[int], dtype: torch.dtype) -> None:
        width = max(n + r for n, r in zip(lengths, room, strict=True))
        self.parts: list[Tensor | None] = []
        for part in (prompt.aux_hidden, prompt.last_hidden):
            if part is None:
                self.parts.append(None)
                continue
            buffer = torch.zeros(part.shape[0], width, part.shape[2], dtype=dtype)
            buffer[:, : part.shape[1]] = part.to("cpu", dtype)
            self.parts.append(buffer)
        self.lse = torch.zeros(len(lengths), width, dtype=torch.float32)

    def add(self, rows: Tensor, position: Tensor, active: Tensor, features: Features) -> None:
        """Store the states of one token per active row."""
        for buffer, part in zip(self.parts, (features.aux_hidden, features.last_hidden), strict=True):
            if buffer is not None and part is not None:
                buffer[rows[active], position[active]] = part[:, 0].to("cpu", buffer.dtype)[active]

    def add_lse(self, rows: Tensor, position: Tensor, lse: Tensor) -> None:
        """Store the logsumexp of the logits from `position`."""
        self.lse[rows, position] = lse

    def row(self, row: int, length: int) -> tuple[Features, Tensor]:
        """Features and logsumexp of the first `length` positions of a request."""
        aux, last = (None if part is None else part[row, :length].clone() for part in self.parts)
        return Features(aux, last), self.lse[row, :length].clone()


def _choose(logits_BV: Tensor, sampling: Sampling, generators: RequestGenerators, rows: Tensor) -> Tensor:
    """One token per row (int64 on the CPU): argmax, or a draw from the filtered law with the request's generator."""
    if sampling.greedy:
        return logits_BV.argmax(-1).cpu()
    probs = target_probs(logits_BV, sampling)
    return torch.tensor([generators.draw(probs[slot], int(row)) for slot, row in enumerate(rows)], dtype=torch.long)


def _keep_input(states: dict[int, Tensor]) -> Callable[..., None]:
    def hook(_module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        states[0] = args[0] if args else kwargs["hidden_states"]

    return hook


def _keep_output(states: dict[int, Tensor], k: int) -> Callable[..., None]:
    def hook(_module: nn.Module, _args: tuple[Any, ...], output: Any) -> None:
        states[k] = output[0] if isinstance(output, tuple) else output

    return hook


def length_limit(config: Any) -> int:
    """How many tokens a target's (text) config allows; a table of positions, where it has one, ends there."""
    limit = getattr(config, "max_position_embeddings", None) or getattr(config, "seq_length", None)
    return int(limit or 1 << 20)


def _decoder_layers(decoder: nn.Module, num_layers: int, name: str) -> nn.ModuleList:
    """The stack of decoder layers, whatever the family calls it."""
    for child in decoder.children():
        if isinstance(child, nn.ModuleList) and len(child) == num_layers:
            return child
    raise UserError(
        f"target {name}: no stack of {num_layers} decoder layers found in {type(decoder).__name__}; unsupported model"
    )


def _attention_windows(config: Any, num_layers: int, name: str) -> dict[str, int | None]:
    """Sliding window by kind of layer (None = full attention); one entry where all layers are alike."""
    kinds = list(getattr(config, "layer_types", None) or [])
    window = getattr(config, "sliding_window", None)
    unknown = sorted(set(kinds) - {"full_attention", "sliding_attention", LINEAR})
    if unknown:
        raise UserError(
            f"target {name}: layers of kind {', '.join(unknown)} are not supported; full, sliding and linear "
            "attention are"
        )
    if not kinds:
        return {"all": window}
    return {kind: window if kind == "sliding_attention" else None for kind in sorted(set(kinds) - {LINEAR})}


def _alibi(key_BT: Tensor, _mask: Tensor, num_heads: int, dtype: torch.dtype) -> Tensor:
    """Bloom's bias [B * heads, 1, T] for keys at these positions, which it would count off a mask of two dimensions."""
    unit: Tensor = build_alibi_tensor(
        key_BT.new_ones(1, 2), num_heads, torch.float32
    )  # position 1 is biased by the slope
    bias_BTh: Tensor = unit[:, 0, 1] * key_BT[..., None]
    return bias_BTh.transpose(1, 2).reshape(-1, 1, key_BT.shape[1]).to(dtype)
