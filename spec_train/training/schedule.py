"""The learning rate as a pure function of the step, so that a resumed run needs no scheduler state."""

from __future__ import annotations

import math
from typing import Literal

Schedule = Literal["cosine", "linear", "constant"]


def learning_rate_scale(
    step: int, total_steps: int, *, warmup_ratio: float, schedule: Schedule, min_lr_ratio: float
) -> float:
    """The factor on the peak learning rate in optimiser step `step` (0-based) of `total_steps`.

    Rises linearly over the first `warmup_ratio` of the steps and is 1 from there on ("constant") or falls to
    `min_lr_ratio` after the last step, along half a cosine or a line. The first step is never 0.
    """
    warmup_steps = math.ceil(warmup_ratio * total_steps)
    if step < warmup_steps:
        return (step + 1) / (warmup_steps + 1)
    if schedule == "constant":
        return 1.0
    progress = min(1.0, (step - warmup_steps) / max(1, total_steps - warmup_steps))
    fall = 0.5 * (1.0 + math.cos(math.pi * progress)) if schedule == "cosine" else 1.0 - progress
    return min_lr_ratio + (1.0 - min_lr_ratio) * fall
