"""From a record to token ids with a mark on each that is a target."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

import numpy as np

from .chat import ChatEncoder
from .plain_text import Text, text_blocks
from .records import BadRecord, BadValueError, DataError, Record
from .shapes import ChatExample, Example, PairExample, TextExample, to_example
from .text_tokenizer import TextTokenizer

_BLOCKS = 8
LOSSES = ("auto", "assistant", "completion", "all")


@dataclass(frozen=True, slots=True)
class Encoded:
    """ids: int32; targets: bool, of the same length. The first token is never a target."""

    ids: np.ndarray
    targets: np.ndarray


class Encoder:
    """Records of one shape to tokens. Can be pickled, to be sent to a worker.

    loss: what is learned of a chat or a pair. "assistant": every turn of the assistant; "completion": the last
    one, or the completion of a pair; "all": everything; "auto": "assistant" for chats, "completion" for pairs.
    Texts are learned whole."""

    def __init__(
        self,
        tokenizer: TextTokenizer,
        shape: str,
        *,
        loss: str = "auto",
        chat_template: str | None = None,
    ) -> None:
        if loss not in LOSSES:
            raise DataError(f'loss is "{loss}"; it must be one of {", ".join(LOSSES)}')
        self._tokenizer = tokenizer
        self._shape = shape
        self._loss = loss
        self._chat = ChatEncoder(tokenizer, chat_template)

    def example(self, value: dict[str, Any]) -> Example:
        return to_example(value, self._shape, chat_template=self._chat.has_template)

    def encode_records(self, records: Sequence[Record]) -> list[Encoded | BadRecord]:
        """In their order. Many texts go to the tokenizer together, which then uses all cores."""
        results: list[Encoded | BadRecord | None] = [None] * len(records)
        texts: list[tuple[int, list[str]]] = []
        for number, record in enumerate(records):
            try:
                example = self.example(record.value)
                if isinstance(example, TextExample):
                    texts.append((number, list(text_blocks(example.text))))
                else:
                    results[number] = self.encode(example)
            except BadValueError as error:
                results[number] = BadRecord(record.where, str(error))
        pieces = iter(self._tokenizer.encode_all([block for _, blocks in texts for block in blocks]))
        for number, blocks in texts:
            results[number] = self._text([token for _ in blocks for token in next(pieces)])
        return [result for result in results if result is not None]

    def encode(self, example: Example) -> Encoded:
        """Raises BadValueError for what this example makes impossible, DataError for what no example can do."""
        if isinstance(example, TextExample):
            blocks = self._tokenizer.encode_all(list(text_blocks(example.text)))
            return self._text([token for block in blocks for token in block])
        if isinstance(example, PairExample):
            return self._pair(example)
        loss = "assistant" if self._loss == "auto" else self._loss
        assert isinstance(example, ChatExample)
        return _encoded(*self._chat.encode(example, loss=loss))

    def text_parts(self, text: Text) -> Iterator[Encoded]:
        """A text of any size in parts, a few blocks at a time."""
        blocks = text_blocks(text)
        begins = True
        while group := list(islice(blocks, _BLOCKS)):
            tokens = [token for block in self._tokenizer.encode_all(group) for token in block]
            ids = [self._tokenizer.first(), *tokens] if begins else tokens
            marks = np.ones(len(ids), dtype=bool)
            marks[: int(begins)] = False
            yield Encoded(np.array(ids, dtype=np.int32), marks)
            begins = False
        yield Encoded(np.array([self._tokenizer.end], dtype=np.int32), np.ones(1, dtype=bool))

    def _text(self, tokens: list[int]) -> Encoded:
        ids = [self._tokenizer.first(), *tokens, self._tokenizer.end]
        return _encoded(ids, [True] * len(ids))

    def _pair(self, example: PairExample) -> Encoded:
        """The completion's tokens follow the prompt's as they do when a model goes on from the prompt."""
        prompt, completion = self._tokenizer.encode_all([example.prompt, example.completion])
        given = [] if self._tokenizer.begin is None else [self._tokenizer.begin]
        given = given + prompt or [self._tokenizer.first()]
        said = [*completion, self._tokenizer.end]
        learned = self._loss == "all"
        return _encoded(given + said, [learned] * len(given) + [True] * len(said))


def _encoded(ids: list[int], targets: list[bool]) -> Encoded:
    marks = np.array(targets, dtype=bool)
    marks[:1] = False
    return Encoded(np.array(ids, dtype=np.int32), marks)
