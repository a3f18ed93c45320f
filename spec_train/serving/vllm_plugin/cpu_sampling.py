"""Make rejection sampling at temperature > 0 right in a CPU build of vLLM.

vLLM lays each request's temperature, top-k and top-p out over its draft rows with a kernel. The CPU stand-in of that
kernel writes into an int64 copy of the output which is thrown away, so the rows are scaled by uninitialised memory and
the text follows another law than the target's (vLLM 0.32.0 run, 0.33.0 read: `utils/cpu_triton_utils.py`). Greedy
requests never read those numbers. Here plain tensor operations take the kernel's place.
"""

from __future__ import annotations

import torch
from torch import Tensor


def per_token(
    values_B: Tensor, row_ends_B: Tensor, num_tokens: int, replace_from: float = 0, replace_to: float = 0
) -> Tensor:
    """values_B[b] for every row of request b, [num_tokens]; request b's rows end before `row_ends_B[b]` (cumulative).
    Values equal to `replace_from` become `replace_to`, as in vLLM's own function."""
    rows_B = torch.diff(row_ends_B, prepend=row_ends_B.new_zeros(1)).long()
    replaced_B = values_B.masked_fill(values_B == replace_from, replace_to)
    return replaced_B.repeat_interleave(rows_B, output_size=num_tokens)


def repair() -> None:
    """Put `per_token` in the place of vLLM's function, in this process."""
    from vllm.v1.sample import rejection_sampler

    rejection_sampler.expand_batch_to_tokens = per_token
