"""Train and decode every method on one GPU, from nothing: random weights, no data, no network.

A Llama of the 1B shape with random weights answers random prompts, a head is trained on those answers with features
made in the process, and the decoder is timed with and without it. The other methods then train a little each and must
leave the text as it is. `--cuda-graphs` times decoding with and without graphs in turn as well. The result is one JSON
file: training tokens/s and their share of the card's measured matrix-product rate, peak memory, acceptance, speed-up.

    python tests/gpu/run_gpu.py --out results                      about four minutes on a data-centre card
    python tests/gpu/run_gpu.py --tiny --device cpu --out results  the same path in seconds

The target knows no language, so its acceptance says nothing about a real one; its speed does.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # a bare clone runs without an installation

import accelerate
import transformers
from transformers import LlamaConfig, LlamaForCausalLM

from spec_train.data.documents import Document
from spec_train.decoding.engine import plain_decode, speculative_decode
from spec_train.decoding.sampling import Sampling
from spec_train.decoding.trace import DecodeTrace
from spec_train.evaluation.graph_speed import bench_graphs
from spec_train.evaluation.metrics import (
    compare_lossless,
    explain_speed,
    speed_summary,
    summarise,
)
from spec_train.evaluation.report import result_markdown, write_results
from spec_train.kv_cache import GROUPED_ATTENTION
from spec_train.recipe import OptimSection, TrainSection
from spec_train.speculators import options_class, speculator_class
from spec_train.speculators.eagle3 import Eagle3, Eagle3Options, eagle3_config
from spec_train.target import TargetModel
from spec_train.training.trainer import TrainResult, train

GREEDY = Sampling()
# Options by method; "loss" or "draft": which vocabulary is reduced.
OTHER_METHODS: dict[str, dict[str, Any]] = {
    "mtp": {"loss_vocab_size": True},
    "draft_lm": {"loss_vocab_size": True, "start_layers": 2},
    "mlp": {"draft_vocab_size": True},
    "medusa": {"draft_vocab_size": True},
    "eagle1": {"loss_vocab_size": True},
    "peagle": {"draft_vocab_size": True},
    "pard": {"loss_vocab_size": True, "start_layers": 2, "num_depths": 4},
}


@dataclass(frozen=True)
class Size:
    """What is run: the target's shape, the data, the training and the decoding."""

    model: dict[str, int]
    dtype: torch.dtype
    precision: str
    draft_vocab_size: int
    documents: int
    held_out: int
    prompt_tokens: int
    answer_tokens: int
    generate_batch: int
    micro_batch_tokens: int
    steps: int
    decode_prompts: int
    decode_tokens: int
    matmul: int


FULL = Size(
    model={
        "vocab_size": 128256,
        "hidden_size": 2048,
        "intermediate_size": 8192,
        "num_hidden_layers": 16,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 64,
        "max_position_embeddings": 4096,
    },
    dtype=torch.bfloat16,
    precision="bf16",
    draft_vocab_size=32000,
    documents=512,
    held_out=32,
    prompt_tokens=32,
    answer_tokens=224,
    generate_batch=128,
    micro_batch_tokens=4096,
    steps=300,
    decode_prompts=8,
    decode_tokens=128,
    matmul=8192,
)
TINY = Size(
    model={
        "vocab_size": 320,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "max_position_embeddings": 256,
    },
    dtype=torch.float32,
    precision="fp32",
    draft_vocab_size=200,
    documents=24,
    held_out=4,
    prompt_tokens=6,
    answer_tokens=32,
    generate_batch=8,
    micro_batch_tokens=256,
    steps=30,
    decode_prompts=3,
    decode_tokens=24,
    matmul=256,
)


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    arguments.add_argument("--tiny", action="store_true", help="seconds instead of minutes, in float32")
    arguments.add_argument("--steps", type=int, help="optimiser steps instead of the size's own")
    arguments.add_argument("--num-draft-tokens", type=int, nargs="+", default=[3, 5])
    arguments.add_argument("--cuda-graphs", action="store_true", help="time decoding with CUDA graphs too")
    arguments.add_argument("--out", type=Path, default=Path(os.environ.get("OUT", "gpu_results")))
    options = arguments.parse_args()
    size = TINY if options.tiny else FULL
    steps = options.steps or size.steps
    started = time.perf_counter()

    def note(text: str) -> None:
        print(f"[{time.perf_counter() - started:6.1f} s] {text}", flush=True)

    device = torch.device(options.device)
    rate = matmul_rate(size, device)
    note(f"{card_name(device)}: {rate / 1e12:.2f} TFLOP/s in {size.dtype} matrix products")
    target = random_target(size, device)
    documents = answered_documents(target, size)
    note(f"{len(documents)} documents of {size.prompt_tokens}+{size.answer_tokens} tokens, answered by the target")
    head, result, training = train_head(target, documents, size, steps, options, rate)
    note(f"{result.steps} steps at {training['tokens_per_second']:.0f} supervised tokens/s; {training['estimate']}")
    results = decode(target, head, documents[: size.decode_prompts], size, options.num_draft_tokens)
    others = []
    for kind, fields in OTHER_METHODS.items():
        others.append(train_other(kind, fields, target, documents, size, max(2, steps // 6), options))
        note(f"{kind}: {others[-1]}")
    report = {
        "other_methods": others,
        "card": card_name(device),
        "tiny": options.tiny,
        "matmul_tflops": rate / 1e12,
        "training": training,
        "decoding": results,
        "peak_memory_bytes": peak_memory(device),
        "seconds": time.perf_counter() - started,
        "versions": versions(),
    }
    options.out.mkdir(parents=True, exist_ok=True)
    write_report(options.out, report)
    write_results(options.out / "eval", results)
    print(result_markdown(results))
    for row in results:
        print(f"K={row['num_draft_tokens']}, batch {row['batch_size']}: {row['speed']['explanation']}")
    if options.cuda_graphs:
        report["cuda_graphs"] = decode_with_graphs(target, head, documents, size, options.num_draft_tokens)
        for entry in report["cuda_graphs"]:
            note(f"with graphs: {entry}")
        write_report(options.out, report)
    note(f"wrote {options.out / 'gpu.json'}")


def write_report(folder: Path, report: dict[str, Any]) -> None:
    (folder / "gpu.json").write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")


def matmul_rate(size: Size, device: torch.device) -> float:
    """FLOP/s of square matrix products in the target's dtype: what the card gives, not what its sheet says."""
    a = torch.randn(size.matmul, size.matmul, device=device, dtype=size.dtype)
    repeats = 20
    for _ in range(3):
        a @ a
    synchronize(device)
    clock = time.perf_counter()
    for _ in range(repeats):
        a @ a
    synchronize(device)
    return repeats * 2 * size.matmul**3 / (time.perf_counter() - clock)


def random_target(size: Size, device: torch.device) -> TargetModel:
    """A Llama with random weights and random norms, made on the device."""
    torch.manual_seed(0)
    config = LlamaConfig(**size.model, bos_token_id=None, eos_token_id=None, tie_word_embeddings=True)
    config._attn_implementation = GROUPED_ATTENTION
    with torch.device(device):
        model = LlamaForCausalLM(config).to(size.dtype)
    for name, parameter in model.named_parameters():
        if "norm" in name:
            parameter.data.uniform_(0.5, 1.5)
    return TargetModel(model, "random-llama", device)


def answered_documents(target: TargetModel, size: Size) -> list[Document]:
    """Random prompts with the target's own greedy answers."""
    generator = torch.Generator().manual_seed(1)
    shape = (size.held_out + size.documents, size.prompt_tokens)
    prompts = torch.randint(0, target.vocab_size, shape, generator=generator).tolist()
    documents = []
    for start in range(0, len(prompts), size.generate_batch):
        chunk = prompts[start : start + size.generate_batch]
        for prompt, answer in zip(chunk, target.generate(chunk, GREEDY, size.answer_tokens), strict=True):
            ids = prompt + answer.output_ids
            documents.append(Document(f"random-{len(documents)}", ids, [(len(prompt), len(ids))]))
    return documents


def train_head(
    target: TargetModel, documents: list[Document], size: Size, steps: int, options: argparse.Namespace, rate: float
) -> tuple[Eagle3, TrainResult, dict[str, Any]]:
    """The library's own training loop with features made as they are needed."""
    section = Eagle3Options(type="eagle3", ttt_steps=4)
    draft_ids = commonest(target, documents, size)
    config = eagle3_config(section, target, len(draft_ids))
    head = Eagle3.from_target(config, target, draft_ids, section.init, seed=0)
    held_out, training = documents[: size.held_out], documents[size.held_out :]
    head.to(target.device)
    head.borrow(target)
    result = train(
        head,
        training,
        held_out,
        lambda batch: target.fill_features(batch, head.feature_spec, size.dtype),
        optim=OptimSection(lr=1e-3),
        train=TrainSection(
            max_steps=steps,
            micro_batch_tokens=size.micro_batch_tokens,
            precision=size.precision,
            save_every=steps,
            log_every=max(1, steps // 20),
        ),
        seed=0,
        device=options.device,
        num_draft_tokens=options.num_draft_tokens,
        output_dir=options.out / "train",
        speculator_config=asdict(config),
        run_config={"name": "gpu"},
    )
    lines = [json.loads(line) for line in (options.out / "train" / "log.jsonl").read_text().splitlines()]
    logged = [line for line in lines if "tokens_per_second" in line]
    rates = [line["tokens_per_second"] for line in logged]
    speed = statistics.median(rates[len(rates) // 4 :])  # the first steps compile kernels and warm caches
    share = size.answer_tokens / (size.prompt_tokens + size.answer_tokens)
    flops = speed * flops_per_supervised_token(head, target, share)
    figures = {
        "steps": result.steps,
        "seconds": result.seconds,
        "tokens_per_second": speed,
        "hit_first": logged[0]["hit_0"],  # share of first drafts that are right
        "hit_last": logged[-1]["hit_0"],
        "best_metric": result.best_metric,
        "best_value": result.best_value,
        "estimate": {name: value for name, value in lines[-1].items() if name.startswith("renewal@")},
        "tflops": flops / 1e12,
        "share_of_matmul_rate": flops / rate,
        "peak_memory_bytes": result.peak_memory,
    }
    return head.to(size.dtype).eval().requires_grad_(False), result, figures


def commonest(target: TargetModel, documents: list[Document], size: Size) -> torch.Tensor:
    """The commonest tokens of the answers, ascending."""
    answers = torch.tensor([token for document in documents for token in document.input_ids[size.prompt_tokens :]])
    counts = answers.bincount(minlength=target.vocab_size)
    return counts.argsort(descending=True, stable=True)[: size.draft_vocab_size].sort().values


def train_other(
    kind: str,
    fields: dict[str, Any],
    target: TargetModel,
    documents: list[Document],
    size: Size,
    steps: int,
    options: argparse.Namespace,
) -> dict[str, Any]:
    """A few steps of another method, its estimate and its decode of the held-out prompts."""
    sizes = {name: size.draft_vocab_size for name, value in fields.items() if value is True}
    section = options_class(kind)(type=kind, **{**fields, **sizes})
    speculator: Any = speculator_class(kind).from_recipe(section, target, commonest(target, documents, size), 0)
    speculator.to(target.device)
    speculator.borrow(target)
    spec = speculator.required_features(section, target)
    result = train(
        speculator,
        documents[size.held_out :],
        documents[: size.held_out],
        lambda batch: target.fill_features(batch, spec, size.dtype),
        optim=OptimSection(lr=1e-3),
        train=TrainSection(
            max_steps=steps, micro_batch_tokens=size.micro_batch_tokens, precision=size.precision, log_every=1
        ),
        seed=0,
        device=options.device,
        num_draft_tokens=[3],
        output_dir=options.out / kind,
        speculator_config={},
        run_config={"name": "gpu"},
    )
    speculator.to(size.dtype).eval().requires_grad_(False)
    speculator.borrow(target)
    prompts = [document.input_ids[: size.prompt_tokens] for document in documents[: size.decode_prompts]]
    common: dict[str, Any] = {"sampling": GREEDY, "max_new_tokens": size.decode_tokens, "batch_size": len(prompts)}
    plain = plain_decode(target, prompts, **common)
    decoded = speculative_decode(target, speculator, prompts, num_draft_tokens=3, **common)
    rounds = [cycle for request in decoded.requests for cycle in request.cycles]
    return {
        "type": kind,
        "steps": result.steps,
        "tokens_per_second": result.trained_tokens / result.seconds,
        "estimate": result.best_value,
        "tokens_per_pass": sum(cycle.emitted for cycle in rounds) / max(1, len(rounds)),
        "lossless": compare_lossless(plain.requests, decoded.requests),
    }


def flops_per_supervised_token(head: Eagle3, target: TargetModel, share: float) -> float:
    """Matrix-product FLOPs of one training step per supervised token; attention scores are left out.

    Per token: the target's layers forward, the head's projection and its keys and values forward and backward. Per
    supervised token: the target's whole output head (logsumexp) and its draft rows forward; and for every depth the
    draft layer and the draft output head forward and backward. `share`: supervised tokens over all tokens.
    """
    layers = sum(p.numel() for p in target.layers.parameters())
    draft_layer = sum(p.numel() for p in head.layers.parameters())
    output = head.lm_head.weight.numel()
    keys_values = head.layers[0].self_attn.k_proj.weight.numel() + head.layers[0].self_attn.v_proj.weight.numel()
    per_token = 2 * layers + 6 * (head.fc.weight.numel() + keys_values)
    head_rows = 2 * target.hidden_size * (target.vocab_size + head.config.draft_vocab_size)
    return per_token / share + head_rows + head.config.ttt_steps * 6 * (draft_layer + output)


def decode(
    target: TargetModel, head: Eagle3, documents: list[Document], size: Size, num_draft_tokens: list[int]
) -> list[dict[str, Any]]:
    """Plain against speculative decoding of held-out prompts, one request at a time and all at once."""
    head.borrow(target)
    prompts = [document.input_ids[: size.prompt_tokens] for document in documents]
    common: dict[str, Any] = {"sampling": GREEDY, "max_new_tokens": size.decode_tokens}
    plain_decode(target, prompts[:1], sampling=GREEDY, max_new_tokens=8)
    speculative_decode(target, head, prompts[:1], num_draft_tokens=3, sampling=GREEDY, max_new_tokens=8)
    results = []
    for batch_size in (1, len(prompts)):
        plain = plain_decode(target, prompts, batch_size=batch_size, **common)
        for depth in num_draft_tokens:
            spec = speculative_decode(target, head, prompts, num_draft_tokens=depth, batch_size=batch_size, **common)
            results.append(describe(target, plain, spec, size))
    return results


def decode_with_graphs(
    target: TargetModel, head: Eagle3, documents: list[Document], size: Size, num_draft_tokens: list[int]
) -> list[dict[str, Any]]:
    """Plain and speculative decoding without and with graphs, in turn, one request at a time and several at once."""
    prompts = [document.input_ids[: size.prompt_tokens] for document in documents[: size.decode_prompts]]
    return [
        entry
        for batch_size, some in ((1, prompts[:2]), (len(prompts), prompts))
        for entry in bench_graphs(
            target,
            head,
            some,
            num_draft_tokens=num_draft_tokens,
            max_new_tokens=size.decode_tokens,
            batch_size=batch_size,
        )
    ]


def describe(target: TargetModel, plain: DecodeTrace, spec: DecodeTrace, size: Size) -> dict[str, Any]:
    """The evaluation's JSON, with the reason for the speed in words."""
    speed = speed_summary([plain], [spec])
    speed["explanation"] = explain_speed(speed, speed["plain_steps_per_round"], spec.num_draft_tokens)
    return summarise(
        spec,
        target=target.name,
        speculator="eagle3",
        kind="eagle3",
        method="eagle3",
        suite=f"random-batch{spec.batch_size}",
        device=card_name(target.device),
        dtype=str(size.dtype).removeprefix("torch."),
        sampling=GREEDY,
        lossless=compare_lossless(plain.requests, spec.requests),
        speed=speed,
        versions=versions(),
    )


def card_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else platform.processor() or "cpu"


def peak_memory(device: torch.device) -> int | None:
    return torch.cuda.max_memory_allocated(device) if device.type == "cuda" else None


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def versions() -> dict[str, str]:
    named = {"torch": torch, "transformers": transformers, "accelerate": accelerate}
    return {"python": platform.python_version(), **{name: module.__version__ for name, module in named.items()}}


if __name__ == "__main__":
    main()
