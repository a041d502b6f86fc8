"""Does this model keep packed documents apart? Asked of the model itself, since not every architecture does:
recurrent layers and some attention kernels go over the boundary, silently."""

from __future__ import annotations

from collections.abc import Callable

import torch

from .packing import Batch
from .store import IGNORED

SAME = {torch.float32: 1e-6, torch.bfloat16: 1e-4}
"""How far two losses may be apart that come of the same additions, relative to the loss."""
CLOSE = {torch.float32: 1e-4, torch.bfloat16: 1e-2}
"""The same, where the additions are the same in another order."""


def leaks_between_documents(
    loss: Callable[[Batch], float], vocabulary: int, dtype: torch.dtype, *, rows: int, length: int
) -> str | None:
    """How a packed document depends on the one before it; None if it does not. `loss` gives the mean loss of a
    batch of input_ids, labels and position_ids, [rows, length], as it is computed in training, with dropout off.
    length is at least 4."""
    size = min(12, length // 2)
    generator = torch.Generator().manual_seed(0)
    first, other, second = (torch.randint(0, vocabulary, (size,), generator=generator) for _ in range(3))

    def batch(documents: list[torch.Tensor], learned: int) -> Batch:
        """Rows of these documents and padding, where one of them is learned, but for its first token."""
        pad = torch.zeros(length - 2 * size, dtype=torch.int64)
        ids = torch.cat([*documents, pad])
        labels = torch.full((length,), IGNORED)
        begin = learned * size
        labels[begin + 1 : begin + size] = ids[begin + 1 : begin + size]
        positions = torch.cat([torch.arange(len(part)) for part in (*documents, pad)])
        return {
            "input_ids": ids.repeat(rows, 1),
            "labels": labels.repeat(rows, 1),
            "position_ids": positions.repeat(rows, 1),
        }

    behind_first, behind_other = loss(batch([first, second], 1)), loss(batch([other, second], 1))
    in_front = loss(batch([second, first], 0))
    if not abs(behind_first - behind_other) <= SAME[dtype] * behind_first:
        return "what a document says changes with the text of the document before it in the row"
    if not abs(behind_first - in_front) <= CLOSE[dtype] * behind_first:
        return "a document behind another has another loss than at the beginning of a row"
    return None
