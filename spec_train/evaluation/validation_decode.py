"""A real decode of a few validation prompts in the middle of training, beside the estimate that predicts it.

Plain and speculative decoding are greedy and give the same text, so two figures of it must agree: the acceptance
length that decoding measured, and the renewal estimate on the very same answers. In float32 they agree to the last
token; in half precision a pass over several rows may round the other way than a pass over one, now and then.

At a temperature the answers of a speculative decode are the target's own samples, whatever drafted them, so both ways
of picking drafts are estimated on them. Given the text a greedy draft was accepted or it was not, so the estimate for
greedy drafts equals a decode with greedy drafts; for drawn drafts it is the expectation of a decode that draws them.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from spec_train.data.documents import Document, prompts_of
from spec_train.decoding.acceptance import decoded_length
from spec_train.decoding.engine import plain_decode, speculative_decode
from spec_train.decoding.sampling import Sampling
from spec_train.decoding.trace import DecodeTrace
from spec_train.evaluation.estimate import estimator
from spec_train.evaluation.metrics import compare_lossless
from spec_train.speculators import load_speculator
from spec_train.speculators.base import Speculator
from spec_train.target import TargetModel


class ValidationDecode:
    """Decodes the prompts of the first `num_prompts` documents with K = `num_draft_tokens`, `max_new_tokens` each.

    Called with a checkpoint directory it loads the speculator as evaluation does, so the weights in training are not
    touched; that copy, in the target's dtype, and the caches of the prompts are its whole memory, freed afterwards.
    """

    def __init__(
        self,
        target: TargetModel,
        documents: Sequence[Document],
        num_prompts: int,
        max_new_tokens: int,
        num_draft_tokens: int,
        samplings: Sequence[Sampling] = (),
    ) -> None:
        """`samplings`: further settings to decode with, none of them greedy."""
        self.target, self.max_new_tokens, self.num_draft_tokens = target, max_new_tokens, num_draft_tokens
        self.samplings = samplings
        _, prompts = prompts_of(documents)
        self.prompts = [prompt for prompt in prompts if len(prompt) < target.max_length][:num_prompts]
        self._plain: DecodeTrace | None = None  # the target stays as it is, so its own text is decoded once

    def __call__(self, checkpoint: Path) -> dict[str, float]:
        """Figures by their names in log.jsonl (`prompts` must not be empty):

        decode@K           the acceptance length of the decode
        decode_renewal@K   the renewal estimate on its answers
        decode_text_equal  share of the answers that equal plain decoding

        and for each of `samplings`, here at temperature 0.7:

        decode_T0.7@K                        the acceptance length of that decode
        decode_renewal_T0.7_greedy@K         the estimates on its answers
        decode_renewal_T0.7_probabilistic@K
        """
        # Modules draw random numbers when they are built; training must not notice.
        with torch.random.fork_rng(devices=[]):
            speculator = load_speculator(checkpoint, self.target)
        figures = self._greedy(speculator)
        for sampling in self.samplings:
            figures |= self._sampled(speculator, sampling)
        return figures

    def _greedy(self, speculator: Speculator) -> dict[str, float]:
        if self._plain is None:
            self._plain = plain_decode(
                self.target, self.prompts,
                sampling=Sampling(), max_new_tokens=self.max_new_tokens, batch_size=len(self.prompts),
            )  # fmt: skip
        trace, estimate = self._decode(speculator, Sampling())
        same = compare_lossless(self._plain.requests, trace.requests)
        return {
            f"decode@{self.num_draft_tokens}": decoded_length(trace.requests),
            f"decode_renewal@{self.num_draft_tokens}": estimate["renewal"],
            "decode_text_equal": same["identical"] / same["checked"],
        }

    def _sampled(self, speculator: Speculator, sampling: Sampling) -> dict[str, float]:
        trace, estimate = self._decode(speculator, sampling)
        name, k = f"T{sampling.temperature:g}", self.num_draft_tokens
        figures = {f"decode_{name}@{k}": decoded_length(trace.requests)}
        for method, on_text in estimate["by_draft_sample_method"].items():
            figures[f"decode_renewal_{name}_{method}@{k}"] = on_text["renewal"]
        return figures

    def _decode(self, speculator: Speculator, sampling: Sampling) -> tuple[DecodeTrace, dict[str, Any]]:
        """The decode, and the estimate on its answers."""
        k, batch_size = self.num_draft_tokens, len(self.prompts)
        trace = speculative_decode(
            self.target, speculator, self.prompts,
            num_draft_tokens=k, sampling=sampling, max_new_tokens=self.max_new_tokens, batch_size=batch_size,
        )  # fmt: skip
        estimate = estimator(
            self.target, speculator, trace.requests, sampling=sampling, max_draft_tokens=k, batch_size=batch_size
        )
        return trace, estimate(k)
