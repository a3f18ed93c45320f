"""Decoding speed in paired runs: against `transformers`, and a batch against single requests.

Every round runs the two sides of each comparison on the same prompts, one after the other, so that a machine that slows
down for a while slows both; figures are medians over rounds, ratios are taken inside a round. Rates hold the prompts'
own passes, which a batch makes no faster: a decode of few tokens gains less from one.

`transformers` counts differently: assisted generation drafts up to `num_assistant_tokens` tokens a pass and stops early
where its confidence threshold says so. Here the schedule is constant and the threshold 0, so it drafts K as we do. Both
sides generate greedily, and exactly `max_new_tokens` tokens where no EOS comes earlier. `transformers` runs with
PyTorch's own linear layers, as it does elsewhere; ours are packed where `packed` packs them.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from typing import Any

import torch
from transformers import PreTrainedModel

from spec_train.decoding.engine import plain_decode, speculative_decode
from spec_train.decoding.sampling import Sampling
from spec_train.decoding.trace import DecodeTrace
from spec_train.evaluation.metrics import tokens_per_step
from spec_train.packed import plain_linears
from spec_train.speculators.base import Proposer
from spec_train.target import TargetModel, clock

GREEDY = Sampling()
PAIRS = (
    ("plain decoding", "plain", "generate"),
    ("speculative, batch 1", "speculative", "assisted"),
    ("plain, batched", "plain_batched", "plain_singly"),
    ("speculative, batched", "speculative_batched", "speculative_singly"),
)  # (what is compared, our side, what it is held against)


def bench_decoding(
    target: TargetModel,
    proposer: Proposer,
    assistant: PreTrainedModel | None,
    prompts: Sequence[list[int]],
    *,
    num_draft_tokens: int,
    max_new_tokens: int,
    batch_size: int = 8,
    single_prompts: int | None = None,
    rounds: int = 3,
) -> dict[str, Any]:
    """Tokens per second of every side, round by round, with medians and ratios; ready for JSON.

    `assistant`: the draft as a Transformers model, None where there is none to compare with. `transformers` is held
    against us on the first `single_prompts` prompts, a batch against single requests on all of them.
    """
    single, k = list(prompts[:single_prompts]), num_draft_tokens
    common: dict[str, Any] = {"sampling": GREEDY, "max_new_tokens": max_new_tokens}
    traces: dict[str, DecodeTrace] = {}

    def plain(batch: int, some: Sequence[list[int]], name: str) -> tuple[int, float]:
        traces[name] = plain_decode(target, some, batch_size=batch, **common)
        return _tokens_and_seconds(traces[name])

    def spec(batch: int, some: Sequence[list[int]], name: str) -> tuple[int, float]:
        traces[name] = speculative_decode(target, proposer, some, num_draft_tokens=k, batch_size=batch, **common)
        return _tokens_and_seconds(traces[name])

    sides: dict[str, Callable[[], tuple[int, float]]] = {
        "generate": lambda: stock_generate(target, single, max_new_tokens),
        "plain": lambda: plain(1, single, "plain"),
        "speculative": lambda: spec(1, single, "speculative"),
        "plain_singly": lambda: plain(1, prompts, "plain_singly"),
        "plain_batched": lambda: plain(batch_size, prompts, "plain_batched"),
        "speculative_singly": lambda: spec(1, prompts, "speculative_singly"),
        "speculative_batched": lambda: spec(batch_size, prompts, "speculative_batched"),
    }
    if assistant is not None:
        sides["assisted"] = lambda: stock_generate(target, single, max_new_tokens, assistant, k)
    stock_generate(target, single[:1], 4)  # the first pass of a process allocates and compiles
    rates: dict[str, list[float]] = {name: [] for name in sides}
    for _ in range(rounds):
        for name, run in sides.items():
            tokens, seconds = run()
            rates[name].append(tokens / seconds)
    return {
        "target": target.name,
        "type": getattr(proposer, "kind", "speculative"),
        "device": str(target.device),
        "threads": torch.get_num_threads(),
        "dtype": str(target.dtype).removeprefix("torch."),
        "num_draft_tokens": k,
        "max_new_tokens": max_new_tokens,
        "batch_size": batch_size,
        "num_prompts": {"single": len(single), "batched": len(prompts)},
        "tokens_per_step": tokens_per_step(traces["speculative"].requests),
        "overhead_share": _overhead_share(traces["speculative"]),
        "same_text": {
            name: _texts(traces[f"{name}_singly"]) == _texts(traces[f"{name}_batched"])
            for name in ("plain", "speculative")
        },
        "tokens_per_second": rates,
        "median": {name: statistics.median(values) for name, values in rates.items()},
        "ratio": {
            what: statistics.median(a / b for a, b in zip(rates[ours], rates[theirs], strict=True))
            for what, ours, theirs in PAIRS
            if theirs in rates
        },
    }


def bench_table(result: dict[str, Any]) -> str:
    """The result as a Markdown table."""
    lines = ["| comparison | tokens/s | against | tokens/s | ratio |", "|---|---:|---|---:|---:|"]
    for what, ours, theirs in PAIRS:
        if what in result["ratio"]:
            left, right = result["median"][ours], result["median"][theirs]
            name = what.replace("speculative", result["type"])
            lines.append(f"| {name} | {left:.1f} | {theirs} | {right:.1f} | {result['ratio'][what]:.2f}x |")
    return "\n".join(lines) + "\n"


@torch.no_grad()
def bench_linears(target: TargetModel, rows: Sequence[int], rounds: int = 5) -> dict[str, Any]:
    """Milliseconds of all linear layers of a pass of the target, with packed weights and with PyTorch's own, by the
    rows of the pass; medians over `rounds` turns. `gflops`: thousand million operations a second when packed."""
    layers = [module for module in target.model.modules() if isinstance(module, torch.nn.Linear)]
    weights = sum(layer.weight.numel() for layer in layers)
    table = []
    for count in rows:
        inputs = [torch.randn(count, x.in_features, dtype=target.dtype, device=target.device) for x in layers]

        def milliseconds(inputs: Sequence[torch.Tensor] = inputs) -> float:
            begun = clock(target.device)
            for layer, x in zip(layers, inputs, strict=True):
                layer(x)
            return 1000 * (clock(target.device) - begun)

        packed, plain = [], []
        for _ in range(rounds + 1):
            packed.append(milliseconds())
            with plain_linears():
                plain.append(milliseconds())
        # The first turn packs and allocates.
        ms, plain_ms = statistics.median(packed[1:]), statistics.median(plain[1:])
        table.append({"rows": count, "ms": ms, "plain_ms": plain_ms, "gflops": 2e-6 * count * weights / ms})
    return {
        "target": target.name,
        "threads": torch.get_num_threads(),
        "dtype": str(target.dtype).removeprefix("torch."),
        "linears": table,
    }


def linears_table(result: dict[str, Any]) -> str:
    """The result as a Markdown table."""
    lines = ["| rows of a pass | linear layers, packed | PyTorch's own | packed, GFLOP/s |", "|---:|---:|---:|---:|"]
    lines += [
        f"| {row['rows']} | {row['ms']:.1f} ms | {row['plain_ms']:.1f} ms | {row['gflops']:.0f} |"
        for row in result["linears"]
    ]
    return "\n".join(lines) + "\n"


def draft_constantly(assistant: PreTrainedModel, num_draft_tokens: int) -> None:
    """Let `transformers` draft K tokens in every round, as we do."""
    settings = assistant.generation_config
    settings.num_assistant_tokens, settings.num_assistant_tokens_schedule = num_draft_tokens, "constant"
    settings.assistant_confidence_threshold = 0.0


def stock_generate(
    target: TargetModel,
    prompts: Sequence[list[int]],
    max_new_tokens: int,
    assistant: PreTrainedModel | None = None,
    num_draft_tokens: int = 0,
) -> tuple[int, float]:
    """(new tokens, seconds) of the stock generation, one request at a time."""
    model: Any = target.model
    extra: dict[str, Any] = {"assistant_model": assistant} if assistant is not None else {}
    if assistant is not None:
        draft_constantly(assistant, num_draft_tokens)
    tokens, begun = 0, clock(target.device)
    for prompt in prompts:
        ids = torch.tensor([prompt], device=target.device)
        with plain_linears():
            out = model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=max_new_tokens,
                do_sample=False,
                eos_token_id=sorted(target.eos_token_ids) or None,
                pad_token_id=0,
                **extra,
            )
        tokens += int(out.shape[1]) - len(prompt)
    return tokens, clock(target.device) - begun


def _tokens_and_seconds(trace: DecodeTrace) -> tuple[int, float]:
    return sum(len(request.output_ids) for request in trace.requests), trace.timings.total


def _texts(trace: DecodeTrace) -> list[list[int]]:
    return [request.output_ids for request in trace.requests]


def _overhead_share(trace: DecodeTrace) -> float:
    """The part of decoding time that is neither a target pass nor drafting."""
    part = trace.timings
    return max(0.0, 1 - (part.prefill + part.target + part.draft) / part.total)
