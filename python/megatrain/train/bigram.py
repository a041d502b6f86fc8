"""The yardstick: a byte bigram with Witten-Bell smoothing.

A document is its bytes between two boundaries; the model predicts every byte and the boundary
behind the last one, as the trained model does."""

from collections.abc import Sequence

import numpy as np

from .text import Document

_BOUNDARY = 256
_SYMBOLS = 257


class ByteBigram:
    """P(b | a) = (count(a, b) + d(a) P(b)) / (count(a) + d(a)), where d(a) is the number of distinct
    successors of a, and P(b) = (count(b) + 1) / (count + 257)."""

    def __init__(self, documents: Sequence[Document]) -> None:
        counts = np.zeros((_SYMBOLS, _SYMBOLS), dtype=np.int64)
        for document in documents:
            counts += _pair_counts(document)
        single = counts.sum(axis=0) + 1.0
        single /= single.sum()
        distinct = np.maximum((counts > 0).sum(axis=1, keepdims=True), 1)
        self.probabilities = (counts + distinct * single) / (counts.sum(axis=1, keepdims=True) + distinct)

    def bits_per_byte(self, documents: Sequence[Document]) -> float:
        bits = sum(float(-(_pair_counts(d) * np.log2(self.probabilities)).sum()) for d in documents)
        return bits / sum(document.nbytes for document in documents)


def _pair_counts(document: Document) -> np.ndarray:
    """[257, 257]: how often the second symbol follows the first."""
    symbols = np.frombuffer(document.text.encode("utf-8"), dtype=np.uint8).astype(np.int64)
    before = np.concatenate(([_BOUNDARY], symbols))
    after = np.concatenate((symbols, [_BOUNDARY]))
    return np.bincount(before * _SYMBOLS + after, minlength=_SYMBOLS**2).reshape(_SYMBOLS, _SYMBOLS)
