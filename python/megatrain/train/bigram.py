"""The yardstick: a byte bigram with Witten-Bell smoothing.

A document is its bytes between two boundaries; the model predicts every byte and the boundary
behind the last one, as the trained model does."""

from collections.abc import Iterable
from itertools import chain

import numpy as np

_BOUNDARY = 256
_SYMBOLS = 257


class ByteBigram:
    """P(b | a) = (count(a, b) + d(a) P(b)) / (count(a) + d(a)), where d(a) is the number of distinct
    successors of a, and P(b) = (count(b) + 1) / (count + 257). Documents come in blocks of text."""

    def __init__(self, documents: Iterable[Iterable[str]]) -> None:
        counts = np.zeros((_SYMBOLS, _SYMBOLS), dtype=np.int64)
        for document in documents:
            counts += _pair_counts(document)[0]
        single = counts.sum(axis=0) + 1.0
        single /= single.sum()
        distinct = np.maximum((counts > 0).sum(axis=1, keepdims=True), 1)
        self.probabilities = (counts + distinct * single) / (counts.sum(axis=1, keepdims=True) + distinct)

    def bits_per_byte(self, documents: Iterable[Iterable[str]]) -> float:
        bits, nbytes = 0.0, 0
        for document in documents:
            counts, size = _pair_counts(document)
            bits -= float((counts * np.log2(self.probabilities)).sum())
            nbytes += size
        return bits / nbytes


def _pair_counts(blocks: Iterable[str]) -> tuple[np.ndarray, int]:
    """How often the second symbol follows the first, [257, 257], and the document's bytes."""
    counts = np.zeros(_SYMBOLS**2, dtype=np.int64)
    last, nbytes = _BOUNDARY, 0
    for block in chain(blocks, [None]):
        symbols = [_BOUNDARY] if block is None else np.frombuffer(block.encode("utf-8"), dtype=np.uint8)
        after = np.asarray(symbols, dtype=np.int64)
        if not len(after):
            continue
        before = np.concatenate(([last], after[:-1]))
        counts += np.bincount(before * _SYMBOLS + after, minlength=_SYMBOLS**2)
        last = int(after[-1])
        nbytes += 0 if block is None else len(after)
    return counts.reshape(_SYMBOLS, _SYMBOLS), nbytes
