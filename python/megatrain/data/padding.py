"""Pieces of about one length side by side, padded to the longest, where rows are not packed."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from .packing import Batch
from .pieces import Pieces
from .store import IGNORED

MULTIPLE = 8
"""Of which a row's length is one, for the matrix units' sake."""


@dataclass(frozen=True)
class PaddedRows:
    """A piece a row."""

    pieces: Pieces
    length: int
    pad: int

    def __len__(self) -> int:
        return len(self.pieces)

    def batch(self, rows: list[int]) -> Batch:
        """input_ids, labels and attention_mask, int64 [len(rows), longest], padded behind."""
        longest = int(self.pieces.lengths[rows].max())
        width = min(-(-longest // MULTIPLE) * MULTIPLE, self.length)
        ids = np.full((len(rows), width), self.pad, dtype=np.int64)
        labels = np.full((len(rows), width), IGNORED, dtype=np.int64)
        mask = np.zeros((len(rows), width), dtype=np.int64)
        for place, row in enumerate(rows):
            piece_ids, piece_labels = self.pieces.read(row)
            end = len(piece_ids)
            ids[place, :end], labels[place, :end], mask[place, :end] = piece_ids, piece_labels, 1
        return {
            "input_ids": torch.from_numpy(ids),
            "labels": torch.from_numpy(labels),
            "attention_mask": torch.from_numpy(mask),
        }

    def tokens(self, rows: list[int]) -> int:
        """Of these rows, without padding."""
        return int(self.pieces.lengths[rows].sum())


def by_length(lengths: np.ndarray, micro_batch: int, generator: np.random.Generator) -> list[np.ndarray]:
    """Micro-batches of one pass: pieces are drawn into groups of 64 micro-batches, sorted by length within a
    group and cut, and the micro-batches shuffled. Only the last one of the longest group may be smaller."""
    order = generator.permutation(len(lengths))
    group = 64 * micro_batch
    batches = []
    for first in range(0, len(order), group):
        members = order[first : first + group]
        members = members[np.argsort(lengths[members], kind="stable")]
        batches += [members[at : at + micro_batch] for at in range(0, len(members), micro_batch)]
    return [batches[index] for index in generator.permutation(len(batches))]
