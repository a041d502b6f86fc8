"""Which attention kernel runs: cuDNN's before flash attention where torch may choose."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any, cast

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

if TYPE_CHECKING:
    from collections.abc import Mapping

PREFERRED = [
    SDPBackend.CUDNN_ATTENTION,
    SDPBackend.FLASH_ATTENTION,
    SDPBackend.EFFICIENT_ATTENTION,
    SDPBackend.MATH,
]


def preferred_attention(device: torch.device, *, masked: bool = False) -> AbstractContextManager[None]:
    """On CUDA, torch's attention tries these in this order, unless the caller has restricted its choice or asked
    for deterministic algorithms.

    masked: the choice is left to torch, as `masks_tokens` says why."""
    switches = ("cudnn", "flash", "mem_efficient", "math")
    free = all(getattr(torch.backends.cuda, f"{name}_sdp_enabled")() for name in switches)
    if masked or device.type != "cuda" or not free or torch.are_deterministic_algorithms_enabled():
        return nullcontext()
    return cast("AbstractContextManager[None]", sdpa_kernel(PREFERRED, set_priority=True))


def masks_tokens(batch: Mapping[str, Any]) -> bool:
    """A mask in the batch excludes tokens, or lies on a device, where nobody looks.

    Padding on the left leaves rows of attention that see nothing, and the first label is predicted from one of them.
    cuDNN's kernel gives other values there than torch's own ones (zeros), which a plain module would have run."""
    masks = [value for name, value in batch.items() if "mask" in name and isinstance(value, torch.Tensor)]
    return any(mask.device.type != "cpu" or not bool(mask.all()) for mask in masks)
