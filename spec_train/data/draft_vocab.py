"""The draft's reduced vocabulary: the target ids that its head can propose.

Legend: V target vocabulary (embedding rows, padding included), D draft vocabulary.
`d2t[i] = target id - i` (offsets, as EAGLE-3 checkpoints and vLLM have it, never absolute ids); `t2d` bool [V].
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from spec_train.data.documents import Document
from spec_train.errors import UserError

logger = logging.getLogger(__name__)

LOW_COVERAGE = 0.95


def choose_draft_vocab(
    documents: Iterable[Document],
    vocab_size_target: int,
    size: int,
    *,
    special_ids: Iterable[int],
    tokenizer_len: int,
) -> Tensor:
    """The `size` target ids a draft needs most: int64 [D], ascending, unique.

    `special_ids` (eos and its like) are always in. Then ids by how often the responses use them, ties broken by their
    use in prompts; then ids seen in prompts only; then the lowest unseen ones. Ids from `tokenizer_len` on are padding
    rows of the target and never in, so D is `tokenizer_len` where `size` asks for more. Raises UserError for a size
    that makes no sense.
    """
    if not isinstance(size, int) or isinstance(size, bool) or not 0 < size <= vocab_size_target:
        raise UserError(
            f"speculator.draft_vocab_size must be a whole number from 1 to {vocab_size_target}, got {size!r}"
        )
    usable = min(tokenizer_len, vocab_size_target)
    if size > usable:
        logger.warning("draft vocabulary: %d ids instead of %d, all that the tokenizer has", usable, size)
        size = usable
    always = {token for token in special_ids if 0 <= token < usable}
    if len(always) > size:
        raise UserError(f"speculator.draft_vocab_size {size} cannot hold the {len(always)} tokens that end a response")
    in_responses, everywhere = _counts(documents)
    ranked = sorted(range(usable), key=lambda token: (-in_responses[token], -everywhere[token], token))
    fill = [token for token in ranked if token not in always][: size - len(always)]
    ids = torch.tensor(sorted(always | set(fill)), dtype=torch.int64)
    unseen = sum(in_responses[token] == 0 for token in ids.tolist())
    if unseen:
        logger.info("draft vocabulary: %d of %d ids occur in no response", unseen, size)
    share = sum(in_responses[token] for token in ids.tolist()) / max(1, in_responses.total())
    if share < LOW_COVERAGE:
        logger.warning("draft vocabulary: %d ids cover only %.1f%% of the response tokens", size, 100 * share)
    return ids


def coverage(documents: Iterable[Document], ids: Tensor | Sequence[int]) -> float:
    """Share of the response tokens of `documents` that the draft vocabulary `ids` can express; 1.0 for none."""
    counts, _ = _counts(documents)
    members = set(ids.tolist() if isinstance(ids, Tensor) else ids)
    total = counts.total()
    return sum(count for token, count in counts.items() if token in members) / total if total else 1.0


def d2t(ids: Tensor) -> Tensor:
    """int64 [D]: what to add to a draft id to get its target id."""
    return ids.to(torch.int64) - torch.arange(len(ids), dtype=torch.int64, device=ids.device)


def offsets(ids: Tensor) -> Tensor:
    """What a file holds as target ids (Medusa's `token_map`) as offsets, in the file's own dtype, for `map_problem`."""
    return ids - torch.arange(len(ids), dtype=ids.dtype, device=ids.device) if ids.ndim == 1 else ids


def t2d(ids: Tensor, vocab_size_target: int) -> Tensor:
    """bool [V]: whether the draft can propose a target id."""
    mask = torch.zeros(vocab_size_target, dtype=torch.bool, device=ids.device)
    mask[ids] = True
    return mask


def drafted_ids(
    d2t_D: Tensor | None, t2d_V: Tensor | None, vocab_size_target: int, where: str, size: int | None = None
) -> Tensor:
    """The target ids [D] that the map of a checkpoint or an export stands for. `size`: the D that its config names.
    Raises UserError, begun with `where`, for a map that is not there or not sound (see `map_problem`)."""
    if d2t_D is None:
        raise UserError(f"{where}: d2t, which says what tokens the draft vocabulary holds, is missing")
    problem = map_problem(d2t_D, t2d_V, vocab_size_target)
    if problem is None and size is not None and len(d2t_D) != size:
        problem = f"d2t maps {len(d2t_D)} tokens, the draft vocabulary has {size}"
    if problem:
        raise UserError(f"{where}: {problem}")
    return d2t_D + torch.arange(len(d2t_D), device=d2t_D.device)


def token_problem(token: object, vocab_size_target: int) -> str | None:
    """What is wrong with a token id that a config names, None where the target has it."""
    if isinstance(token, int) and not isinstance(token, bool) and 0 <= token < vocab_size_target:
        return None
    return f"mask_token_id {token!r} is not an id of the target, which are whole numbers below {vocab_size_target}"


def map_problem(d2t_D: Tensor, t2d_V: Tensor | None, vocab_size_target: int) -> str | None:
    """What is wrong with the map of a checkpoint, None if it is sound. `t2d_V` may be missing: engines read `d2t`."""
    if d2t_D.dtype != torch.int64 or d2t_D.ndim != 1:
        return f"d2t is {d2t_D.dtype} of shape {list(d2t_D.shape)}, not a list of int64 offsets"
    ids = torch.arange(len(d2t_D)) + d2t_D.cpu()
    if len(ids) == 0 or int(ids.min()) < 0 or int(ids.max()) >= vocab_size_target or bool((ids[1:] <= ids[:-1]).any()):
        hint = " (it looks like absolute ids)" if bool((d2t_D[1:] > d2t_D[:-1]).all()) else ""
        return f"d2t must be offsets: index + d2t ascending, unique and below {vocab_size_target}{hint}"
    if t2d_V is None:
        return None
    if t2d_V.dtype != torch.bool:
        return f"t2d is {t2d_V.dtype}, not bool"
    if t2d_V.shape == (vocab_size_target,) and torch.equal(t2d(ids, vocab_size_target), t2d_V.cpu()):
        return None
    absolute = t2d_V.shape == (vocab_size_target,) and bool(torch.equal(t2d_V.cpu().nonzero()[:, 0], d2t_D.cpu()))
    hint = ": d2t holds absolute ids where the offsets id - index belong" if absolute else ""
    return f"t2d does not mark exactly the target ids that d2t maps to{hint}"


def _counts(documents: Iterable[Document]) -> tuple[Counter[int], Counter[int]]:
    """How often each id occurs in responses, and in responses and prompts together."""
    in_responses: Counter[int] = Counter()
    everywhere: Counter[int] = Counter()
    for document in documents:
        everywhere.update(document.input_ids)
        for start, end in document.spans:
            in_responses.update(document.input_ids[start:end])
    return in_responses, everywhere
