"""Does this model keep packed documents apart? Asked of the model itself, since not every architecture does:
recurrent layers and some attention kernels go over the boundary, silently."""

from __future__ import annotations

from collections.abc import Callable

import torch

TOLERANCES = {torch.float32: 1e-3, torch.bfloat16: 3e-2}
"""Of the largest logit. What leaks changes the logits of the next tokens by far more."""


def leaks_between_documents(
    logits: Callable[[dict[str, torch.Tensor]], torch.Tensor], vocabulary: int, dtype: torch.dtype, *, size: int = 12
) -> str | None:
    """How a packed document depends on the one before it; None if it does not. `logits` gives those of a batch
    of input_ids and position_ids (dropout off)."""
    generator = torch.Generator().manual_seed(0)
    first, other, second = (torch.randint(0, vocabulary, (size,), generator=generator) for _ in range(3))
    positions = torch.arange(size).repeat(2)
    batch = {
        "input_ids": torch.stack([torch.cat([first, second]), torch.cat([other, second]), torch.cat([second, first])]),
        "position_ids": torch.stack([positions] * 3),
    }
    found = logits(batch).detach().float().cpu()
    after_first, after_other, alone = found[0, size:], found[1, size:], found[2, :size]
    allowed = TOLERANCES[dtype] * float(found.abs().max())
    if float((after_first - after_other).abs().max()) > allowed:
        return "what a document says changes with the text of the document before it in the row"
    if float((after_first - alone).abs().max()) > allowed:
        return "a document behind another gives other logits than at the beginning of a row"
    return None
