"""A real decode of a few held-out prompts in the middle of training, beside the estimate that predicts it.

Plain and speculative decoding are greedy and give the same text, so two figures of it must agree: the acceptance
length that decoding measured, and the renewal estimate on the very same answers. In float32 they agree to the last
token; in half precision a pass over several rows may round the other way than a pass over one, now and then.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch

from spec_train.data.documents import Document
from spec_train.decoding.engine import plain_decode, speculative_decode
from spec_train.decoding.sampling import Sampling
from spec_train.decoding.trace import DecodeTrace
from spec_train.evaluation.estimate import estimator
from spec_train.evaluation.metrics import compare_lossless, drafted_rounds
from spec_train.speculators import load_speculator
from spec_train.target import TargetModel


class HeldOutDecode:
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
    ) -> None:
        self.target, self.max_new_tokens, self.num_draft_tokens = target, max_new_tokens, num_draft_tokens
        prompts = [document.input_ids[: document.spans[0][0]] for document in documents if document.spans]
        self.prompts = [prompt for prompt in prompts if 0 < len(prompt) < target.max_length][:num_prompts]
        self._plain: DecodeTrace | None = None  # the target stays as it is, so its own text is decoded once

    def __call__(self, checkpoint: Path) -> dict[str, float]:
        """Figures by their names in log.jsonl (`prompts` must not be empty):

        decode@K           the acceptance length of the decode
        decode_renewal@K   the renewal estimate on its answers
        decode_text_equal  share of the answers that equal plain decoding
        """
        # Modules draw random numbers when they are built; training must not notice.
        with torch.random.fork_rng(devices=[]):
            speculator = load_speculator(checkpoint, self.target)
        k, sampling, limit = self.num_draft_tokens, Sampling(), self.max_new_tokens
        batch_size = len(self.prompts)
        if self._plain is None:
            self._plain = plain_decode(
                self.target, self.prompts, sampling=sampling, max_new_tokens=limit, batch_size=batch_size
            )
        trace = speculative_decode(
            self.target, speculator, self.prompts,
            num_draft_tokens=k, sampling=sampling, max_new_tokens=limit, batch_size=batch_size,
        )  # fmt: skip
        estimate = estimator(
            self.target, speculator, trace.requests, sampling=sampling, max_draft_tokens=k, batch_size=batch_size
        )
        rounds = drafted_rounds(trace.requests)
        same = compare_lossless(self._plain.requests, trace.requests)
        return {
            f"decode@{k}": 1.0 + sum(cycle.kept for cycle in rounds) / max(len(rounds), 1),
            f"decode_renewal@{k}": estimate(k)["renewal"],
            "decode_text_equal": same["identical"] / same["checked"],
        }
