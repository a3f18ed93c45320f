"""Sampling settings of a request, the law they induce, and how tokens are drawn from it.

Shape legend: B requests, Q positions, V target vocabulary.

One float32 vector per position serves the draw, the acceptance test and the residual. Two softmaxes of the same logits
in different precision would be two laws, and the rejection rule would then be biased by their difference.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

from spec_train.errors import UserError

GREEDY_BELOW = 1e-5  # vLLM's _SAMPLING_EPS: a smaller temperature would only overflow the division


@dataclass(frozen=True)
class Sampling:
    """How the target samples, and how drafts are drawn.

    temperature 0 (or anything below 1e-5) means argmax; negative is refused. top_k 0, top_p 1.0 and min_p 0.0 mean no
    filter. `draft_sample_method` follows vLLM: "greedy" drafts are the draft's argmax (their law is one-hot),
    "probabilistic" drafts are drawn from the draft's own distribution (see `drafts`). `rejection_sample_method`,
    vLLM's name too, is how drafts are judged: "standard" token by token, "block" all together (see `verify`). `seed`
    seeds one generator per request.

    Raises UserError for a value outside its range.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    draft_sample_method: Literal["greedy", "probabilistic"] = "greedy"
    seed: int = 0
    min_p: float = 0.0
    rejection_sample_method: Literal["standard", "block"] = "standard"

    def __post_init__(self) -> None:
        if not (math.isfinite(self.temperature) and self.temperature >= 0):
            raise UserError(f"temperature is {self.temperature}: give 0 (argmax) or a positive number")
        if self.top_k < 0:
            raise UserError(f"top_k is {self.top_k}: give 0 (no filter) or how many tokens to keep")
        if not 0 < self.top_p <= 1:
            raise UserError(f"top_p is {self.top_p}: give a number above 0 and up to 1 (1 means no filter)")
        if not 0 <= self.min_p <= 1:
            raise UserError(f"min_p is {self.min_p}: give 0 (no filter) or a number up to 1")
        if self.rejection_sample_method not in ("standard", "block"):
            raise UserError(f"rejection_sample_method is '{self.rejection_sample_method}': give standard or block")
        if self.draft_sample_method not in ("greedy", "probabilistic"):
            raise UserError(f"draft_sample_method is '{self.draft_sample_method}': give greedy or probabilistic")

    @property
    def greedy(self) -> bool:
        """True where the target takes its argmax."""
        return self.temperature < GREEDY_BELOW

    @property
    def greedy_drafts(self) -> bool:
        """True where a draft is the draft's argmax, so that its law is one-hot."""
        return self.greedy or self.draft_sample_method == "greedy"

    @property
    def drafts(self) -> Sampling:
        """How probabilistic drafts are drawn: at the temperature alone, as both of vLLM's runners draw them.

        The filters belong to the target. A draft that they rule out is refused, which costs acceptance and never
        changes the output; drafting under them would promise more than vLLM delivers.
        """
        return replace(self, top_k=0, top_p=1.0, min_p=0.0)


def mask_padding(logits: Tensor, vocab_size: int | None) -> Tensor:
    """`logits` [..., V] with ids from `vocab_size` on at -inf: rows that pad an output head are no tokens."""
    if vocab_size is None or vocab_size >= logits.shape[-1]:
        return logits
    padding = torch.arange(logits.shape[-1], device=logits.device) >= vocab_size
    return logits.masked_fill(padding, -math.inf)


def target_probs(logits: Tensor, sampling: Sampling, vocab_size: int | None = None) -> Tensor:
    """The law that a token is drawn from: `logits` [..., V] -> float32 probabilities [..., V] that sum to 1.

    Order and ties are those of vLLM:
      1. divide by the temperature (argmax, as a one-hot law, where it is 0; the lowest id wins a tie)
      2. min-p: drop every token whose probability is below min_p times the largest
      3. top-k: keep every logit that is not below the k-th largest, so ties at the k-th place all stay
      4. top-p: over the softmax of what is left, drop from the smallest up while the dropped mass is <= 1 - top_p;
         the largest always stays; among equal logits the lower id is dropped first
    (transformers applies min-p last; the laws differ where top-p is set too.)
    The same function gives a draft's own law (pass the draft's logits); ids from `vocab_size` on get probability 0.
    """
    logits = mask_padding(logits, vocab_size).float()
    if sampling.greedy:
        one_hot = torch.zeros_like(logits)
        return one_hot.scatter_(-1, logits.argmax(dim=-1, keepdim=True), 1.0)
    logits = logits / sampling.temperature
    if sampling.min_p > 0:
        # probability < min_p * largest, without a softmax
        logits = logits.masked_fill(logits < logits.amax(dim=-1, keepdim=True) + math.log(sampling.min_p), -math.inf)
    top_k_set = 0 < sampling.top_k < logits.shape[-1]
    if top_k_set and sampling.top_p < 1:
        logits = keep_top_k_top_p(logits, sampling.top_k, sampling.top_p)
    elif top_k_set:
        logits = keep_top_k(logits, sampling.top_k)
    elif sampling.top_p < 1:
        logits = keep_top_p(logits, sampling.top_p)
    return logits.softmax(dim=-1)


def keep_top_k(logits: Tensor, top_k: int) -> Tensor:
    """`logits` [..., V] with everything below the k-th largest at -inf."""
    kth_largest = logits.topk(top_k, dim=-1).values[..., -1:]
    return logits.masked_fill(logits < kth_largest, -math.inf)


def keep_top_p(logits: Tensor, top_p: float) -> Tensor:
    """`logits` [..., V] with the smallest at -inf whose mass together is <= 1 - top_p; the largest stays."""
    ascending, order = logits.sort(dim=-1, stable=True)
    dropped = ascending.softmax(dim=-1).cumsum(dim=-1) <= 1 - top_p
    dropped[..., -1] = False
    return logits.masked_fill(torch.zeros_like(dropped).scatter_(-1, order, dropped), -math.inf)


def keep_top_k_top_p(logits: Tensor, top_k: int, top_p: float) -> Tensor:
    """`keep_top_p(keep_top_k(logits, top_k), top_p)` without sorting the vocabulary.

    Only the k largest are sorted. Rows where further tokens share the k-th place, which all stay, take the plain form;
    which form a row takes depends on nothing but that row, so a request's law is the same in every batch.
    """
    values, ids = logits.topk(top_k, dim=-1)
    ids = ids.sort(dim=-1).values  # topk leaves the order of equals open; by ascending id it is that of the plain form
    largest = torch.full_like(logits, -math.inf).scatter_(-1, ids, keep_top_p(logits.gather(-1, ids), top_p))
    kth_largest = values[..., -1:]
    not_below = (logits >= kth_largest) & (kth_largest > -math.inf)
    crowded = not_below.sum(dim=-1) > top_k
    if crowded.any():
        largest[crowded] = keep_top_p(keep_top_k(logits[crowded], top_k), top_p)
    return largest


def draw_at(probs: Tensor, uniform: Tensor) -> Tensor:
    """Inverse-CDF draw: `probs` [..., V] >= 0 of any positive sum, `uniform` [...] in [0, 1) -> token ids [...] int64.

    The sums run in float64, so the float32 law is sampled as it stands. A token of probability 0 is never drawn: the
    answer is the first index whose cumulative mass exceeds a number strictly below the total.
    """
    cumulative = probs.double().cumsum(dim=-1)
    total = cumulative[..., -1:]
    mass = torch.minimum(uniform.double().unsqueeze(-1) * total, torch.nextafter(total, torch.zeros_like(total)))
    return torch.searchsorted(cumulative, mass, right=True).squeeze(-1)


class RequestGenerators:
    """One generator per request, so that a request's tokens do not depend on the batch it happens to run in.

    `sampling.seed` seeds them. `requests`: the indices of the requests in the whole run, one per row. `stream` keeps
    independent uses apart: the drafts ("draft") must not share random numbers with the test that judges them
    ("target"), or the rejection rule is biased. Generators live on the CPU: a seed means the same on every device.
    """

    def __init__(self, sampling: Sampling, requests: Sequence[int], stream: str = "target") -> None:
        self.generators = [
            torch.Generator().manual_seed(request_seed(sampling.seed, stream, request)) for request in requests
        ]

    def select(self, rows: Tensor | Sequence[int]) -> RequestGenerators:
        """The generators of the chosen rows; they go on where they stand."""
        chosen = RequestGenerators(Sampling(), ())
        chosen.generators = [self.generators[int(row)] for row in rows]
        return chosen

    def uniform(self, count_B: Tensor) -> Tensor:
        """float64 [B, max(count_B)] in [0, 1) on count_B's device: row b takes count_B[b] numbers, the rest is 0."""
        counts = [int(count) for count in count_B.tolist()]
        numbers = torch.zeros(len(counts), max(counts, default=0), dtype=torch.float64)
        for row, (count, generator) in enumerate(zip(counts, self.generators, strict=True)):
            numbers[row, :count] = torch.rand(count, generator=generator, dtype=torch.float64)
        return numbers.to(count_B.device)

    def draw(self, probs_V: Tensor, row: int) -> int:
        """One token for one row."""
        uniform = torch.rand((), generator=self.generators[row], dtype=torch.float64)
        return int(draw_at(probs_V, uniform.to(probs_V.device)))

    def draw_rows(self, probs_BV: Tensor) -> Tensor:
        """One token for every row, int64 [B] on the device of `probs_BV`; the same tokens as `draw` row by row."""
        ones = torch.ones(len(self.generators), dtype=torch.int64, device=probs_BV.device)
        return draw_at(probs_BV, self.uniform(ones)[:, 0])


def request_seed(seed: int, stream: str, request: int) -> int:
    """The seed of one request's generator, hashed: torch's CPU generator reads 32 bits only, and neighbouring seeds
    must not share a stream."""
    digest = hashlib.blake2b(f"{seed}/{stream}/{request}".encode(), digest_size=4).digest()
    return int.from_bytes(digest, "little")
