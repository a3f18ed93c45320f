"""Sampling settings of a request and the law they induce."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class Sampling:
    """How the target samples, and how drafts are drawn.

    temperature 0 (or anything below 1e-5) means argmax; negative is refused. top_k 0 and top_p 1.0 mean no filter.
    `draft_sample_method` follows vLLM: "greedy" drafts are the draft's argmax (their law is one-hot),
    "probabilistic" drafts are drawn from the draft's own distribution. `seed` seeds one generator per request.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    draft_sample_method: Literal["greedy", "probabilistic"] = "greedy"
    seed: int = 0

    @property
    def greedy(self) -> bool:
        """True where the target takes its argmax."""
        return self.temperature < 1e-5
