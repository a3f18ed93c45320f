"""Static passes give what eager ones give: the same text, round by round, and the same states.

Without a GPU a tape stands in for a CUDA graph: it keeps the operations of one pass with the very tensors they read and
wrote, and a replay runs those operations on those tensors again, without the Python around them. What a capture would
bake in by mistake (a number read from a tensor, a tensor at another address) shows in the text.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from spec_train.batch import FeatureSpec
from spec_train.decoding.engine import plain_decode, speculative_decode
from spec_train.decoding.sampling import Sampling
from spec_train.decoding.trace import DecodeTrace
from spec_train.decoding.tree import tree_decode
from spec_train.decoding.tree_draft import dynamic_tree
from spec_train.evaluation.costs import measure_costs
from spec_train.graphs import GraphCache, Graphs, Recorded, bucket
from spec_train.kv_cache import SlotCache
from spec_train.speculators.base import Proposer
from spec_train.speculators.ngram import NgramProposer
from spec_train.speculators.pard import Pard, PardOptions
from spec_train.speculators.peagle import PEagle, PEagleOptions
from spec_train.target import TargetModel
from tests.families import family_target
from tests.parity.test_eagle3 import head_for, train_on_own_text
from tests.parity.test_tree import noisy_draft
from tests.tiny import tiny_model

PROMPTS = [[5, 6, 7, 8, 9, 10, 11], [20, 21, 22], list(range(30, 60)), [7, 7, 7, 7, 7]]
LIMITS = [4, 20, 40, 9]  # rows leave one after another
GREEDY = Sampling()


class Tape(TorchDispatchMode):
    """The operations that run inside, for `replay`. Reading a tensor's value raises, as it does in a capture."""

    def __init__(self) -> None:
        super().__init__()
        self.operations: list[tuple[Any, Any, Any, Any]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (torch.ops.aten._local_scalar_dense.default, torch.ops.aten.nonzero.default):
            raise RuntimeError(f"{func} reads a value")
        out = func(*args, **(kwargs or {}))
        self.operations.append((func, args, kwargs or {}, out))
        return out

    def replay(self) -> None:
        with torch.inference_mode():
            for func, args, kwargs, before in self.operations:
                again = func(*args, **kwargs)
                for kept, new in zip(tree_leaves(before), tree_leaves(again), strict=True):
                    if isinstance(kept, torch.Tensor) and kept.data_ptr() != new.data_ptr():
                        kept.copy_(new)


class Taped(Graphs):
    def captured(self, run: Any, device: torch.device) -> tuple[Recorded, Any]:
        with Tape() as tape:
            outputs = run()
        return tape, outputs


def static(eager_passes: int = 0) -> Graphs:
    return Taped(eager_passes=eager_passes)


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> TargetModel:
    return TargetModel.load(str(tiny_model("llama", tmp_path_factory.mktemp("llama"))))


def test_buckets_grow_by_doubling_and_then_evenly() -> None:
    lengths = [1, 128, 129, 512, 513, 1024, 1025, 4000]
    assert [bucket(n) for n in lengths] == [128, 128, 256, 512, 1024, 1024, 1536, 4096]


@pytest.mark.parametrize("kind", ["llama", "mistral", "gemma3_text", "gpt_neox", "qwen3_moe", "gpt_oss"])
def test_plain_text_and_states_are_the_eager_ones(kind: str, tmp_path: Path) -> None:
    """Windows of 16 tokens, masks that are added, experts; rows leave the batch; the states that training reads."""
    family = family_target if kind in ("qwen3_moe", "gpt_oss") else tiny_model
    target = TargetModel.load(str(family(kind, tmp_path)))
    limits = [*LIMITS[:1], 130, *LIMITS[2:]] if kind == "llama" else LIMITS  # beyond the first bucket of 128 slots
    spec = FeatureSpec((0, 2, 4), last_hidden=True)
    sampling = Sampling(temperature=1.0, seed=3)
    graphs = static()
    eager = target.generate(PROMPTS, sampling, limits, capture=spec, capture_dtype=torch.float32)
    with target.replaying(graphs):
        replayed = target.generate(PROMPTS, sampling, limits, capture=spec, capture_dtype=torch.float32)
        alone = [target.generate([p], GREEDY, 8)[0].output_ids for p in PROMPTS]
    assert [a.output_ids for a in replayed] == [a.output_ids for a in eager]
    for ours, theirs in zip(replayed, eager, strict=True):
        assert ours.features is not None and theirs.features is not None
        for name in ("aux_hidden", "last_hidden"):
            one, other = getattr(ours.features, name), getattr(theirs.features, name)
            assert torch.allclose(one, other, atol=2e-4 * float(other.abs().max()))
    assert alone == [target.generate([p], GREEDY, 8)[0].output_ids for p in PROMPTS]
    assert graphs.passes(target.model) >= 3


def proposer(kind: str, target: TargetModel) -> Proposer:
    if kind == "ngram":
        return NgramProposer(1, 3)
    if kind == "draft_lm":
        return noisy_draft(target)
    if kind == "pard":
        options = PardOptions(type="pard", start_layers=4, num_depths=4)
        return Pard.from_recipe(options, target, torch.arange(320), seed=0).eval().requires_grad_(False)
    if kind == "peagle":
        head = PEagle.from_recipe(PEagleOptions(type="peagle"), target, torch.arange(320), 0)
        return head.eval().requires_grad_(False)
    eagle = head_for(target, num_layers=2)
    train_on_own_text(target, eagle, steps=10)
    return eagle.eval().requires_grad_(False)


def rounds(trace: DecodeTrace) -> list[Any]:
    return [(request.output_ids, request.finish_reason, request.cycles) for request in trace.requests]


@pytest.mark.parametrize("kind", ["ngram", "draft_lm", "eagle3", "peagle", "pard"])
def test_rounds_are_the_eager_ones(kind: str, target: TargetModel) -> None:
    """Drafts too: rows of a batch stand anywhere, rounds have other widths, a second decode finds its passes made."""
    drafts, tokens = proposer(kind, target), 40 if kind == "ngram" else 24

    def decode(batch_size: int) -> list[Any]:
        return rounds(
            speculative_decode(
                target,
                drafts,
                PROMPTS,
                num_draft_tokens=3,
                sampling=GREEDY,
                max_new_tokens=tokens,
                batch_size=batch_size,
            )
        )

    eager = {batch_size: decode(batch_size) for batch_size in (1, 4)}
    assert kind in ("peagle", "pard") or any(cycle.accepted for _, _, cycles in eager[1] for cycle in cycles)
    graphs = static()
    with target.replaying(graphs):
        for batch_size in (4, 1):
            assert decode(batch_size) == eager[batch_size]
        passes = graphs.passes(target.model)
        for batch_size in (4, 1):
            assert decode(batch_size) == eager[batch_size]
        assert graphs.passes(target.model) == passes > 1
    if kind in ("eagle3", "peagle"):
        assert graphs.passes(drafts) > 1  # type: ignore[arg-type]
    if kind in ("draft_lm", "pard"):
        assert graphs.passes(drafts.body.model) > 1  # type: ignore[attr-defined]
    assert decode(4) == eager[4]


def test_the_first_passes_of_a_shape_are_eager(target: TargetModel) -> None:
    graphs = static(eager_passes=2)
    with target.replaying(graphs):
        target.generate([[5, 6, 7]], GREEDY, 3)  # two steps
        assert graphs.passes(target.model) == 0
        found = target.generate([[5, 6, 7]], GREEDY, 12)
        assert graphs.passes(target.model) == 1
    assert [a.output_ids for a in found] == [a.output_ids for a in target.generate([[5, 6, 7]], GREEDY, 12)]


def test_trees_and_wide_passes_are_eager_on_the_same_buffers(target: TargetModel) -> None:
    drafts = noisy_draft(target)
    shape = dynamic_tree(3, 3, 8)

    def decode() -> list[Any]:
        return rounds(
            tree_decode(target, drafts, PROMPTS, shape=shape, sampling=GREEDY, max_new_tokens=30, batch_size=4)
        )

    eager, graphs = decode(), static()
    with target.replaying(graphs):
        assert decode() == eager
    assert graphs.passes(target.model) == 0
    assert eager == decode()


def filled(graphs: Graphs, target: TargetModel, prompts: list[list[int]], length: int = 60) -> SlotCache:
    with target.replaying(graphs):
        cache = target.new_cache(length)
    assert isinstance(cache, GraphCache)
    target.prefill(prompts, cache, FeatureSpec((), last_hidden=False))
    return cache


def addresses(cache: SlotCache) -> list[int]:
    return [entries.data_ptr() for entries in (*cache._keys, *cache._values) if entries is not None]


def test_rows_are_dropped_in_place_and_buffers_serve_the_next_request(target: TargetModel) -> None:
    graphs = static()
    cache = filled(graphs, target, PROMPTS)
    before, keys = addresses(cache), [k.clone() for k in cache._keys if k is not None]
    rows = torch.tensor([1, 3])
    cache.select(rows)
    assert addresses(cache) == before
    for kept, whole in zip(cache._keys, keys, strict=True):
        assert kept is not None and torch.equal(kept, whole[rows])
    twin = filled(graphs, target, PROMPTS[:2])
    assert set(addresses(twin)).isdisjoint(before)  # a living cache shares nothing
    for entries in (*cache._keys, *cache._values):
        assert entries is not None
        entries.fill_(float("nan"))
    del cache, entries, kept
    again = filled(graphs, target, PROMPTS)
    assert addresses(again) == before
    assert all(k is not None and bool(k.isfinite().all()) for k in again._keys)  # a masked NaN would still be one
    longer = filled(graphs, target, PROMPTS[:1], length=300)
    assert set(addresses(longer)).isdisjoint(before)


def test_a_branch_has_storage_of_its_own(target: TargetModel) -> None:
    cache = filled(static(), target, PROMPTS[:2])
    branched = cache.branch(torch.tensor([1, 0, 1]))
    assert type(branched) is SlotCache
    assert set(addresses(branched)).isdisjoint(addresses(cache))
    for copied, whole in zip(branched._values, cache._values, strict=True):
        assert copied is not None and whole is not None
        assert torch.equal(copied, whole[[1, 0, 1]])


def test_costs_are_measured_with_the_same_points(target: TargetModel) -> None:
    graphs = static(eager_passes=2)
    settings: dict[str, Any] = {"deepest": 2, "context": 32, "batch_sizes": (1, 2), "repeats": 1}
    eager = measure_costs(target, NgramProposer(), **settings)
    with target.replaying(graphs):
        costs = measure_costs(target, NgramProposer(), **settings)
    largest = [point for point in costs["target_step"] if point["batch_size"] == 2]
    assert graphs.passes(target.model) == len(largest)  # the buffers of smaller batches were given up for theirs
    for part in ("target_step", "draft", "overhead"):
        assert len(costs[part]) == len(eager[part])


def test_passes_that_are_computed_anew_give_the_eager_text(target: TargetModel) -> None:
    """What runs where there is nothing to capture with."""
    graphs = Graphs(capture=False, eager_passes=1)
    eager = rounds(plain_decode(target, PROMPTS, sampling=GREEDY, max_new_tokens=12, batch_size=4))
    with target.replaying(graphs):
        found = plain_decode(target, PROMPTS, sampling=GREEDY, max_new_tokens=12, batch_size=4)
    assert rounds(found) == eager and graphs.passes(target.model) > 0


def test_linear_attention_stays_eager(tmp_path: Path) -> None:
    target, graphs = TargetModel.load(str(tiny_model("qwen3_5", tmp_path))), static()
    eager = target.generate(PROMPTS, GREEDY, 10)
    with target.replaying(graphs):
        assert target.generate(PROMPTS, GREEDY, 10) == eager
    assert graphs.passes(target.model) == 0 and not list(graphs.refused)


def test_experts_that_are_picked_one_by_one_stay_eager(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    target = TargetModel.load(str(family_target("qwen3_moe", tmp_path)))
    target.model.set_experts_implementation("eager")
    eager, graphs = target.generate(PROMPTS, GREEDY, 10), static()
    with target.replaying(graphs):
        assert target.generate(PROMPTS, GREEDY, 10) == eager
    assert graphs.passes(target.model) == 0 and list(graphs.refused) == [target.model]
    assert capfd.readouterr().err.count("cuda graphs: Qwen3MoeForCausalLM cannot be captured") == 1


@pytest.mark.skipif(torch.cuda.is_available(), reason="a capture would succeed")
def test_what_cannot_be_captured_goes_on_eagerly(target: TargetModel, capfd: pytest.CaptureFixture[str]) -> None:
    """One line, whatever the number of requests, and the same text."""
    eager = rounds(plain_decode(target, PROMPTS, sampling=GREEDY, max_new_tokens=20))
    graphs = Graphs()
    with target.replaying(graphs):
        assert rounds(plain_decode(target, PROMPTS, sampling=GREEDY, max_new_tokens=20)) == eager
    assert graphs.passes(target.model) == 0 and list(graphs.refused) == [target.model]
    lines = capfd.readouterr().err.strip().splitlines()
    assert len(lines) == 1
    assert lines[0].startswith("cuda graphs: LlamaForCausalLM cannot be captured and decodes without them (")


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["llama", "gemma3_text"])
def test_captured_passes_give_the_eager_rounds(kind: str, tmp_path: Path) -> None:
    target = TargetModel.load(str(tiny_model(kind, tmp_path)), device="cuda")
    head = head_for(target).to("cuda").eval().requires_grad_(False)
    head.borrow(target)
    common: dict[str, Any] = {"num_draft_tokens": 3, "sampling": GREEDY, "max_new_tokens": 60}
    for batch_size in (1, 4):
        eager = rounds(speculative_decode(target, head, PROMPTS, batch_size=batch_size, **common))
        graphs = Graphs()
        with target.replaying(graphs):
            for _ in range(2):
                assert rounds(speculative_decode(target, head, PROMPTS, batch_size=batch_size, **common)) == eager
        assert graphs.passes(target.model) > 0 and graphs.passes(head) > 0 and not list(graphs.refused)
