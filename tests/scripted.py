"""A target that says what it is told to: answers by the text that a prompt ends with."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from spec_train.target import Generation


class ScriptedTarget:
    """`replies`: the answer (with the token that ends it) to a prompt that ends with the key and the generation prompt;
    the longest key wins. `prompts`: every prompt that was answered, as text, special tokens included."""

    max_length = 40000

    def __init__(self, tokenizer: Any, replies: Mapping[str, str], stops: Sequence[str]) -> None:
        self.tokenizer, self.replies = tokenizer, replies
        self.eos_token_ids = frozenset(tokenizer.convert_tokens_to_ids(list(stops)))
        self.prompts: list[str] = []

    def generate(
        self, prompts: Sequence[Sequence[int]], sampling: Any, limits: Sequence[int], **_: Any
    ) -> list[Generation]:
        texts = [self.tokenizer.decode(prompt, skip_special_tokens=False) for prompt in prompts]
        self.prompts += texts
        answers = [self.tokenizer.encode(self._reply(text), add_special_tokens=False) for text in texts]
        return [Generation(answer[:limit], "stop") for answer, limit in zip(answers, limits, strict=True)]

    def _reply(self, text: str) -> str:
        last = max(self.replies, key=lambda key: (text.rfind(key), len(key)))
        assert last in text, text
        return self.replies[last]
