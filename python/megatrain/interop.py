"""Where torch and the native runtime meet: views of tiles and slots, addresses, streams.

Host tiles reach torch through the buffer protocol, which keeps their owner alive. Device memory is
allocated by torch and handed over as addresses; whoever hands it over keeps the tensor alive until the
engine is closed."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from megatrain._native import CudaBackend, Section

if TYPE_CHECKING:
    from megatrain._native import Backend, TileFormat, TileStore

MOMENT_DTYPE = {"fp32": torch.float32, "bf16": torch.bfloat16, "int8": torch.uint8}


def weight_dtype(tile_format: TileFormat) -> torch.dtype:
    """The type of the weights and gradients of a format."""
    return torch.float32 if tile_format.weights == "fp32" else torch.bfloat16


def section_dtype(tile_format: TileFormat, section: Section) -> torch.dtype:
    """The torch type of the elements of a section; codes and exponents of 8-bit moments are bytes."""
    if section.value in (Section.weights.value, Section.gradients.value):
        return weight_dtype(tile_format)
    if section.value == Section.master_low.value:
        return torch.int16
    if section.value in (Section.exp_avg.value, Section.exp_avg_sq.value):
        return MOMENT_DTYPE[tile_format.moments]
    if section.value in (Section.exp_avg_exponents.value, Section.exp_avg_sq_exponents.value):
        return torch.uint8
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
