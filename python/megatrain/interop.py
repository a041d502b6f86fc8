"""Where torch and the native runtime meet: views of tiles and slots, addresses, streams.

Host tiles reach torch through the buffer protocol, which keeps their owner alive. Device memory is
allocated by torch and handed over as addresses; whoever hands it over keeps the tensor alive until the
engine is closed."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from megatrain._native import CudaBackend, Section, TileFormat

if TYPE_CHECKING:
    from megatrain._native import Backend, TileStore

WEIGHT_DTYPE = {TileFormat.bf16_split.value: torch.bfloat16, TileFormat.fp32.value: torch.float32}


def weight_dtype(tile_format: TileFormat) -> torch.dtype:
    """The type of the weights and gradients of a format."""
    return WEIGHT_DTYPE[tile_format.value]


def section_dtype(tile_format: TileFormat, section: Section) -> torch.dtype:
    """The torch type of the elements of a section."""
    if section.value in (Section.weights.value, Section.gradients.value):
        return weight_dtype(tile_format)
    if section.value == Section.master_low.value:
        return torch.int16
    return torch.float32


def parameter_tensor(store: TileStore, tile: int, parameter: int, section: Section, elements: int) -> torch.Tensor:
    """One parameter's part of a section, flat, sharing its memory. A tensor of its own, not a slice of the
    section's: slices share one version counter, and an edit of one would look like an edit of all."""
    layout = store.layout(tile)
    dtype = section_dtype(layout.format, section)
    if elements == 0:
        return torch.empty(0, dtype=dtype)
    offset = layout.element_offset(parameter) * dtype.itemsize
    return torch.frombuffer(store.view(tile, section), dtype=dtype, count=elements, offset=offset)


def stream_handle(device: torch.device) -> int:
    """The caller's current stream as the native side counts them; 0 on the host backend."""
    if device.type != "cuda":
        return 0
    return int(torch.cuda.current_stream(device).cuda_stream)


def compute_device(backend: Backend) -> torch.device:
    """The torch device whose memory the backend copies to."""
    if isinstance(backend, CudaBackend):
        return torch.device("cuda", backend.device_index)
    return torch.device("cpu")
