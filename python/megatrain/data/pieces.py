"""Examples as they fit into rows: each is a stretch of the token store, long ones are cut."""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np

from .encode import Encoded
from .records import BadValueError
from .store import IGNORED, TokenStore, TokenWriter

TOO_LONG = ("split", "truncate", "skip", "error")


@dataclass(frozen=True)
class Pieces:
    """begins, lengths: int64 [pieces], in the store. The first `givens` labels of a piece are ignored: they are
    targets of the piece before, or have nothing to be predicted from."""

    store: TokenStore
    begins: np.ndarray
    lengths: np.ndarray
    givens: np.ndarray

    def __len__(self) -> int:
        return len(self.begins)

    @property
    def tokens(self) -> int:
        """Of all pieces together."""
        return int(self.lengths.sum())

    def read(self, index: int) -> tuple[np.ndarray, np.ndarray]:
        """(ids, labels) int64 of a piece."""
        ids, labels = self.store.read(int(self.begins[index]), int(self.lengths[index]))
        labels[: self.givens[index]] = IGNORED
        return ids, labels


@dataclass
class PieceWriter:
    """Cuts examples into pieces of at most `length` tokens.

    too_long: "split" into pieces that begin with the last `context` tokens (at least one, from which to predict)
    of the one before, so that every target is a target of exactly one piece; "truncate" to the first tokens;
    "skip"; "error"."""

    writer: TokenWriter
    length: int
    too_long: str = "split"
    context: int = 1
    truncated: int = 0
    skipped: int = 0
    pieces: array[int] = field(default_factory=lambda: array("q"))

    def add(self, encoded: Encoded) -> None:
        """BadValueError for an example that cannot be used."""
        size = len(encoded.ids)
        if size > self.length and self.too_long != "split":
            if self.too_long == "error":
                raise BadValueError(f"{size} tokens, but sequence_length is {self.length}")
            if self.too_long == "skip" or not encoded.targets[: self.length].any():
                self.skipped += 1
                return
            self.truncated += 1
            encoded, size = Encoded(encoded.ids[: self.length], encoded.targets[: self.length]), self.length
        if size < 2 or not encoded.targets.any():
            raise BadValueError("no token to learn from")
        begin = self.writer.add(encoded)
        for first, given in self._cuts(size):
            last = min(first + self.length, size)
            if encoded.targets[first + given : last].any():
                self.pieces.extend((begin + first, last - first, given))

    def add_parts(self, parts: Iterator[Encoded]) -> None:
        """One example that comes in parts, of which only one is held at a time. All but the first of its tokens
        are targets."""
        if self.too_long != "split":
            self.add(_head(parts, self.length + 1))
            return
        begin, size = len(self.writer), 0
        for part in parts:
            self.writer.add(part)
            size += len(part.ids)
        for first, given in self._cuts(size):
            self.pieces.extend((begin + first, min(self.length, size - first), given))

    def _cuts(self, size: int) -> Iterator[tuple[int, int]]:
        """(first token, labels to ignore) of each piece."""
        overlap = max(1, self.context)
        first, given = 0, 1
        while True:
            yield first, given
            if first + self.length >= size:
                return
            first, given = first + self.length - overlap, overlap

    def finish(self) -> Pieces:
        table = np.array(self.pieces, dtype=np.int64).reshape(-1, 3)
        begins, lengths, givens = (np.ascontiguousarray(column) for column in table.T)
        return Pieces(self.writer.finish(), begins, lengths, givens)


def _head(parts: Iterator[Encoded], size: int) -> Encoded:
    held: list[Encoded] = []
    for part in parts:
        held.append(part)
        size -= len(part.ids)
        if size <= 0:
            break
    return Encoded(np.concatenate([part.ids for part in held]), np.concatenate([part.targets for part in held]))
