"""The figures of training: sums over micro-batches and processes, the estimates of an evaluation, memory."""

from __future__ import annotations

import resource
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from accelerate import Accelerator
from torch import Tensor

from spec_train.batch import Batch
from spec_train.decoding.acceptance import acceptance_length
from spec_train.decoding.sampling import Sampling
from spec_train.speculators.base import ResponseHits
from spec_train.training.acceptance import position_sums, renewal_counts


class Totals:
    """Sums by name over micro-batches, then over processes: totals as they are, means divided by their counts."""

    def __init__(self) -> None:
        self._totals: dict[str, Tensor] = {}
        self._sums: dict[str, Tensor] = {}
        self._counts: dict[str, Tensor] = {}

    def add_total(self, name: str, value: Tensor) -> None:
        """Add one micro-batch's part (a scalar) of a total."""
        self._totals[name] = self._totals.get(name, 0.0) + value.double()

    def add_mean(self, name: str, value: Tensor, count: Tensor) -> None:
        """Add one micro-batch's sum and count, both [depths] or both scalars."""
        self._sums[name] = self._sums.get(name, 0.0) + value.detach().double()
        self._counts[name] = self._counts.get(name, 0.0) + count.detach().double()

    def reduced(self, accelerator: Accelerator) -> dict[str, float]:
        """Totals by name; means as `name`, or `name_0`, `name_1`, ... by depth. A mean over nothing is left out."""
        totals, sums, counts = (
            accelerator.reduce(torch.cat([part[name].reshape(-1) for name in sorted(part)]), "sum").tolist()
            if part
            else []
            for part in (self._totals, self._sums, self._counts)
        )
        labels = [
            name if self._sums[name].ndim == 0 else f"{name}_{depth}"
            for name in sorted(self._sums)
            for depth in range(self._sums[name].numel())
        ]
        means = {label: s / n for label, s, n in zip(labels, sums, counts, strict=True) if n > 0}
        return {**means, **dict(zip(sorted(self._totals), totals, strict=True))}


def estimate_sums(responses: Sequence[ResponseHits], depths: Sequence[int]) -> Tensor:
    """What `estimate_figures` needs, as float64 [n] that add up over processes: for each K of `depths` the accepted
    drafts and rounds of the renewal walk, the leading hits and positions of the position average; then the rounds of
    the deepest K that kept at least 1, 2, ... drafts."""
    counts = [renewal_counts(responses, depth) for depth in depths]
    sums = [[c.accepted, c.steps, *position_sums(responses, k)] for c, k in zip(counts, depths, strict=True)]
    survived = max(counts, key=lambda c: len(c.survived)).survived
    return torch.tensor([*(value for row in sums for value in row), *survived], dtype=torch.float64)


def estimate_figures(sums: Tensor, depths: Sequence[int]) -> dict[str, float]:
    """Figures by their names in log.jsonl, from `estimate_sums` summed over processes:

    renewal@K                 the renewal estimate of the acceptance length, which chooses the best checkpoint
    position_average@K        the usual average over positions, which is biased
    conditional_acceptance_i  share of the estimate's rounds at the deepest K that accept draft i (from 1), of those
                              that accepted the drafts before it; left out where there are none
    """
    values = sums.tolist()
    figures = {}
    for k, row in zip(depths, range(0, 4 * len(depths), 4), strict=True):
        accepted, steps, hits, positions = values[row : row + 4]
        figures[f"renewal@{k}"] = acceptance_length(accepted, steps)
        figures[f"position_average@{k}"] = 1.0 + hits / max(positions, 1.0)
    rounds = values[4 * max(range(len(depths)), key=lambda i: depths[i]) + 1]
    survivors = [rounds, *values[4 * len(depths) :]]
    for i in range(1, len(survivors)):
        if survivors[i - 1] > 0:
            figures[f"conditional_acceptance_{i}"] = survivors[i] / survivors[i - 1]
    return figures


def reduced_estimates(
    accelerator: Accelerator, responses: Sequence[ResponseHits], depths: Sequence[int]
) -> dict[str, float]:
    """`estimate_figures` of the responses of all processes, each giving its own."""
    sums = estimate_sums(responses, depths).to(accelerator.device)
    return estimate_figures(accelerator.reduce(sums, "sum"), depths)


@dataclass(frozen=True)
class SampledAnswers:
    """Held-out answers that the target sampled under the settings which serving will use: on them acceptance at that
    temperature can be estimated, for either way of picking drafts. On other text it cannot.

    sampling   those settings; `rejection_sample_method` is how drafts are judged
    add_probs  adds the target's probability of every answer token under them to a batch with its states
    """

    sampling: Sampling
    add_probs: Callable[[Batch], Batch]

    @property
    def drawn(self) -> Sampling:
        """The settings with drafts drawn from the draft's own law."""
        return replace(self.sampling, draft_sample_method="probabilistic")

    def figures(self, greedy: dict[str, float], drawn: dict[str, float], depths: Sequence[int]) -> dict[str, float]:
        """The estimates of `estimate_figures` for greedy and for drawn drafts, by their names in log.jsonl:

        renewal_T0.7_greedy@K         this is renewal@K: along sampled text a greedy draft is kept where the text has it
        renewal_T0.7_probabilistic@K  drafts drawn at the temperature
        """
        both = {"greedy": greedy, "probabilistic": drawn}
        return {
            f"renewal_T{self.sampling.temperature:g}_{method}@{k}": estimates[f"renewal@{k}"]
            for method, estimates in both.items()
            for k in depths
        }


def peak_memory(device: torch.device) -> int:
    """Bytes at most so far: of the GPU's memory, or of this process on the CPU."""
    if device.type == "cuda":
        return int(torch.cuda.max_memory_allocated(device))
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024  # macOS counts bytes, Linux kilobytes
