"""Which attention kernel runs: cuDNN's before flash attention where torch may choose."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import cast

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

PREFERRED = [
    SDPBackend.CUDNN_ATTENTION,
    SDPBackend.FLASH_ATTENTION,
    SDPBackend.EFFICIENT_ATTENTION,
    SDPBackend.MATH,
]


def preferred_attention(device: torch.device) -> AbstractContextManager[None]:
    """On CUDA, torch's attention tries these in this order, unless the caller has restricted its choice or asked
    for deterministic algorithms."""
    switches = ("cudnn", "flash", "mem_efficient", "math")
    free = all(getattr(torch.backends.cuda, f"{name}_sdp_enabled")() for name in switches)
    if device.type != "cuda" or not free or torch.are_deterministic_algorithms_enabled():
        return nullcontext()
    return cast("AbstractContextManager[None]", sdpa_kernel(PREFERRED, set_priority=True))
