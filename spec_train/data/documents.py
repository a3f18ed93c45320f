"""Token sequences with their response spans: what the responses stage writes and training reads."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from spec_train.errors import UserError
from spec_train.manifest import atomic_write_json_lines

TEXT_PROMPT = 32  # tokens


@dataclass(frozen=True)
class Document:
    """One tokenised conversation (or plain text).

    id         unique within a run
    input_ids  token ids exactly as rendered or generated; they are never re-tokenised and never padded
    spans      ascending, disjoint, half-open [start, end) token ranges that the target wrote: the supervised tokens
    """

    id: str
    input_ids: list[int]
    spans: list[tuple[int, int]]
    category: str = ""
    source: str = ""

    @property
    def loss_mask(self) -> list[int]:
        """1 for response tokens, 0 elsewhere; as long as `input_ids`."""
        mask = [0] * len(self.input_ids)
        for start, end in self.spans:
            mask[start:end] = [1] * (end - start)
        return mask

    @property
    def num_response_tokens(self) -> int:
        """How many tokens are supervised."""
        return sum(end - start for start, end in self.spans)

    @property
    def can_be_drafted(self) -> bool:
        """Whether decoding an answer anew would ask for a draft. Its first token is the target's own; of plain text
        that begins with what is supervised it is the second, since nothing predicts the first."""
        return any(end - max(start, 1) > 1 for start, end in self.spans)


def prompts_of(documents: Iterable[Document]) -> tuple[list[Document], list[list[int]]]:
    """The documents that have something to decode from, and what: all before the first answer. Where every one is plain
    text, which has no prompt, half of each text up to TEXT_PROMPT tokens."""
    documents = [document for document in documents if document.spans]
    asked = [document for document in documents if document.spans[0][0] > 0]
    if asked:
        return asked, [document.input_ids[: document.spans[0][0]] for document in asked]
    texts = [document for document in documents if len(document.input_ids) > 1]
    return texts, [text.input_ids[: min(TEXT_PROMPT, len(text.input_ids) // 2)] for text in texts]


def write_documents(path: Path, documents: Iterable[Document]) -> int:
    """Write one JSON object a line, atomically; returns how many."""
    return atomic_write_json_lines(path, (asdict(one) for one in documents))


def read_documents(path: Path) -> list[Document]:
    """Read what `write_documents` wrote. Raises UserError naming the line of a broken or inconsistent row."""
    documents = []
    with open(path, encoding="utf-8") as file:
        for number, line in enumerate(file, 1):
            try:
                documents.append(_document(json.loads(line)))
            except (ValueError, KeyError, TypeError) as error:
                raise UserError(f"{path}:{number}: not a document ({error}); run the responses stage again") from None
    return documents


def _document(row: dict[str, Any]) -> Document:
    ids = row["input_ids"]
    spans = [(start, end) for start, end in row["spans"]]
    if not all(isinstance(token, int) and token >= 0 for token in ids):
        raise ValueError("input_ids must be token ids")
    edges = [0, *(edge for span in spans for edge in span), len(ids)]
    if edges != sorted(edges) or any(start == end for start, end in spans):
        raise ValueError("spans must be ascending, disjoint and inside input_ids")
    return Document(row["id"], ids, spans, row.get("category", ""), row.get("source", ""))
