"""Pieces laid into full rows, so that little is padding and no document sees another."""

from __future__ import annotations

from bisect import bisect_left, insort
from dataclasses import dataclass

import numpy as np
import torch

from .pieces import Pieces
from .store import IGNORED

Batch = dict[str, torch.Tensor]

WINDOW = 4096
"""Pieces that are fitted together: enough to fill rows, few enough to mix with the rest by chance."""


@dataclass(frozen=True)
class PackedRows:
    """order: int64, piece numbers; row r holds order[bounds[r] : bounds[r + 1]]."""

    pieces: Pieces
    length: int
    pad: int
    order: np.ndarray
    bounds: np.ndarray

    def __len__(self) -> int:
        return len(self.bounds) - 1

    def batch(self, rows: list[int]) -> Batch:
        """input_ids, labels and position_ids, int64 [len(rows), length].

        Positions restart with each document, from which transformers tells documents apart in its masks (with no
        attention_mask and no cache, as in a step). The first label of each document is ignored, so that none is
        predicted from the document before. Padding is a document of its own at the end."""
        shape = (len(rows), self.length)
        ids = np.full(shape, self.pad, dtype=np.int64)
        labels = np.full(shape, IGNORED, dtype=np.int64)
        positions = np.zeros(shape, dtype=np.int64)
        for place, row in enumerate(rows):
            at = 0
            for piece in self.order[self.bounds[row] : self.bounds[row + 1]]:
                piece_ids, piece_labels = self.pieces.read(int(piece))
                end = at + len(piece_ids)
                ids[place, at:end], labels[place, at:end] = piece_ids, piece_labels
                positions[place, at:end] = np.arange(end - at)
                at = end
            positions[place, at:] = np.arange(self.length - at)
        return {
            "input_ids": torch.from_numpy(ids),
            "labels": torch.from_numpy(labels),
            "position_ids": torch.from_numpy(positions),
        }

    def tokens(self, rows: list[int]) -> int:
        """Of these rows, without padding."""
        pieces = [self.order[self.bounds[row] : self.bounds[row + 1]] for row in rows]
        return int(sum(self.pieces.lengths[members].sum() for members in pieces))


def pack(pieces: Pieces, *, length: int, pad: int, seed: int | None) -> PackedRows:
    """Best fit, longest first, among windows of pieces in an order drawn from the seed (None: as they come). A
    row that a window leaves unfilled is offered to the next one."""
    total = len(pieces)
    shuffled = np.arange(total) if seed is None else np.random.default_rng(seed).permutation(total)
    rows: list[list[int]] = []
    open_rows: list[tuple[int, int]] = []  # (room, row), sorted
    for first in range(0, total, WINDOW):
        window = shuffled[first : first + WINDOW]
        window = window[np.argsort(-pieces.lengths[window], kind="stable")]
        for piece in window.tolist():
            size = int(pieces.lengths[piece])
            place = bisect_left(open_rows, (size, -1))
            if place < len(open_rows):
                room, row = open_rows.pop(place)
            else:
                room, row = length, len(rows)
                rows.append([])
            rows[row].append(piece)
            if room - size >= 2:
                insort(open_rows, (room - size, row))
        del open_rows[: max(0, len(open_rows) - 256)]  # the fullest ones stay as they are
    bounds = np.cumsum([0, *(len(row) for row in rows)])
    order = np.fromiter((piece for row in rows for piece in row), dtype=np.int64, count=total)
    return PackedRows(pieces, length, pad, order, bounds)
