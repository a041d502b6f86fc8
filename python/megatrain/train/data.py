"""Fixed-length rows over a token stream, and the micro-batches of a step."""

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from .config import BatchSettings
from .tokenizer import TokenStream

Batch = dict[str, torch.Tensor]


@dataclass(frozen=True)
class Rows:
    """Rows of `length` tokens, each a slice of the stream. Every target of the stream (all labels
    but those of the first token and of -100) is a target of exactly one row: a row begins with
    `context` tokens (at least one, since a model predicts from the token before) whose labels are
    cleared, and the last row is moved back to be full rather than padded."""

    stream: TokenStream
    length: int
    context: int = 0

    def __post_init__(self) -> None:
        if len(self.stream.ids) < 2 or not 0 <= self.context < self.length:
            raise ValueError(
                f"rows of {self.length} with context {self.context} over {len(self.stream.ids)} tokens"
            )

    @property
    def row_length(self) -> int:
        """Shorter than `length` only where the whole stream is."""
        return min(self.length, len(self.stream.ids))

    @property
    def _stride(self) -> int:
        return self.length - max(1, self.context)

    def __len__(self) -> int:
        beyond = len(self.stream.ids) - self.row_length
        return 1 + -(-beyond // self._stride)

    def row(self, index: int) -> Batch:
        """input_ids and labels, int64 [row_length]."""
        total = len(self.stream.ids)
        start = min(index * self._stride, total - self.row_length)
        labels = self.stream.labels[start : start + self.row_length].clone()
        covered = (index - 1) * self._stride + self.length if index else 1
        labels[: covered - start] = -100
        return {"input_ids": self.stream.ids[start : start + self.row_length], "labels": labels}

    def batch(self, indices: list[int]) -> Batch:
        """[len(indices), row_length] each."""
        rows = [self.row(index) for index in indices]
        return {name: torch.stack([row[name] for row in rows]) for name in rows[0]}


def training_steps(rows: Rows, batch: BatchSettings, steps: int, seed: int) -> Iterator[list[Batch]]:
    """The micro-batches of each step. Each pass over the rows has an order of its own, drawn from
    (seed, pass); a batch may end one pass and begin the next."""
    order = _order(rows, seed)
    for _ in range(steps):
        yield [rows.batch([next(order) for _ in range(batch.micro_batch)]) for _ in range(batch.accumulate)]


def in_order(rows: Rows, micro_batch: int) -> Iterator[Batch]:
    """Every row once; the last batch may have fewer rows."""
    for first in range(0, len(rows), micro_batch):
        yield rows.batch(list(range(first, min(first + micro_batch, len(rows)))))


def _order(rows: Rows, seed: int) -> Iterator[int]:
    generator = torch.Generator()
    epoch = 0
    while True:
        generator.manual_seed((seed * 1_000_003 + epoch) % 2**63)
        yield from torch.randperm(len(rows), generator=generator).tolist()
        epoch += 1
