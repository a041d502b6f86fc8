"""The micro-batches of each step, in an order drawn from the seed, from a position that can be saved."""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from .packing import Batch, PackedRows
from .padding import PaddedRows, by_length
from .records import DataError

Rows = PackedRows | PaddedRows


class Loader:
    """An iterator over steps, each a list of `accumulate` micro-batches of `micro_batch` rows; without end, or
    until `passes` over the data are done, whose last step may be smaller. Each pass has an order of its own.

    Packed rows follow each other across passes, so that every micro-batch is full; padded rows are put together
    by length within a pass. The position counts what was handed out: `state_dict()` after a step is where the
    next one begins."""

    def __init__(
        self, rows: Rows, *, micro_batch: int, accumulate: int = 1, seed: int = 0, passes: float | None = None
    ) -> None:
        if not len(rows):
            raise DataError("no row to train on")
        self.rows = rows
        self._micro_batch = micro_batch
        self._accumulate = accumulate
        self._seed = seed
        self._packed = isinstance(rows, PackedRows)
        # What is counted: rows where they are packed, else micro-batches.
        self._per_pass = len(rows) if self._packed else -(-len(rows) // micro_batch)
        self._per_step = accumulate * (micro_batch if self._packed else 1)
        self._end = None if passes is None else max(1, round(passes * self._per_pass))
        self._position = 0
        self._fingerprint: str | None = None
        self.last_tokens = 0
        """Of the step handed out last, without padding."""
        self._pass: tuple[int, list[np.ndarray] | np.ndarray] | None = None

    @property
    def steps(self) -> int | None:
        """In all passes together; None without end."""
        return None if self._end is None else -(-self._end // self._per_step)

    @property
    def steps_per_pass(self) -> float:
        return self._per_pass / self._per_step

    @property
    def passes_done(self) -> float:
        return self._position / self._per_pass

    def __iter__(self) -> Iterator[list[Batch]]:
        return self

    def __next__(self) -> list[Batch]:
        stop = self._position + self._per_step
        if self._end is not None:
            stop = min(stop, self._end)
        if stop <= self._position:
            raise StopIteration
        units = [self._unit(number) for number in range(self._position, stop)]
        if self._packed:
            size = self._micro_batch
            groups = [np.array(units[at : at + size]) for at in range(0, len(units), size)]
        else:
            groups = units
        members = [group.tolist() for group in groups]
        batches = [self.rows.batch(rows) for rows in members]
        self.last_tokens = sum(self.rows.tokens(rows) for rows in members)
        self._position = stop
        return batches

    def _unit(self, number: int) -> Any:
        """The row, or the rows of the micro-batch, with this number since the start."""
        turn, place = divmod(number, self._per_pass)
        if self._pass is None or self._pass[0] != turn:
            generator = np.random.default_rng([self._seed, turn])
            if self._packed:
                self._pass = turn, generator.permutation(len(self.rows))
            else:
                self._pass = turn, by_length(self.rows.pieces.lengths, self._micro_batch, generator)
        return self._pass[1][place]

    def state_dict(self) -> dict[str, Any]:
        """A few plain values: where the next step begins, and a fingerprint of what is counted."""
        return {"position": self._position, "fingerprint": self.fingerprint()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """ValueError if the state is of other data, another division into rows or another seed."""
        found, expected = state.get("fingerprint"), self.fingerprint()
        if found != expected:
            raise DataError(
                f"the saved position ({found}) is of other data than this ({expected}): text, tokenizer, "
                "sequence_length, micro_batch, packing and seed must be as they were"
            )
        position = state.get("position")
        if not isinstance(position, int) or position < 0:
            raise DataError(f"the saved position is {position!r}; it must be a whole number of at least 0")
        self._position = position

    def fingerprint(self) -> str:
        """Of the tokens, the rows and their order; `accumulate` may change between runs."""
        self._fingerprint = self._fingerprint or self._make_fingerprint()
        return self._fingerprint

    def _make_fingerprint(self) -> str:
        pieces = self.rows.pieces
        value = zlib.crc32(pieces.begins.tobytes(), pieces.store.digest)
        value = zlib.crc32(pieces.lengths.tobytes(), value)
        # Packed rows are counted one by one, so their micro-batch may change, too.
        counted = "packed" if self._packed else f"padded by {self._micro_batch}"
        value = zlib.crc32(f"{len(self.rows)} {self.rows.length} {self._seed} {counted}".encode(), value)
        return f"{value:08x}"


def in_order(rows: Rows, micro_batch: int) -> Iterator[Batch]:
    """Every row once; the last batch may have fewer rows. Padded rows come by length."""
    order = np.arange(len(rows))
    if isinstance(rows, PaddedRows):
        order = np.argsort(rows.pieces.lengths, kind="stable")
    for first in range(0, len(rows), micro_batch):
        yield rows.batch(order[first : first + micro_batch].tolist())
