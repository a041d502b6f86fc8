"""A transformers tokenizer and the tokens put around a document."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class TextTokenizer:
    tokenizer: Any
    begin: int | None
    """In front of each document, given and never predicted."""
    end: int
    """Behind each document, predicted."""

    @property
    def size(self) -> int:
        return len(self.tokenizer)

    def encode(self, text: str) -> list[int]:
        """Names of special tokens in the text are text."""
        return self.encode_all([text])[0]

    def encode_all(self, texts: Sequence[str]) -> list[list[int]]:
        """Many at once, which the tokenizers library does on all cores."""
        if not texts:
            return []
        ids: list[list[int]] = self.tokenizer(
            list(texts), add_special_tokens=False, split_special_tokens=True, verbose=False
        ).input_ids
        return ids

    def decode(self, ids: Sequence[int]) -> str:
        text: str = self.tokenizer.decode(list(ids), skip_special_tokens=False, clean_up_tokenization_spaces=False)
        return text

    def first(self) -> int:
        """The token that a text begins after."""
        return self.end if self.begin is None else self.begin
