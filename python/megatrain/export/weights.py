"""Tensors for an export, a piece at a time: of a model's tiles, or of the files of a checkpoint.

Of either the values are the same: in bf16 what is streamed, in fp32 the exact master."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any, Protocol

import torch

from megatrain._native import Section
from megatrain.checkpoint import persistent_buffers
from megatrain.checkpoints.store import BUFFERS, STATE, tile_name

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from megatrain.model import StreamedModel

_PIECE_ELEMENTS = 1 << 20


class Weights(Protocol):
    """Parameters in `dtype`, but for those that stay fp32, and buffers in their own type; `pieces` are of `count`
    elements from `first` on, flat, on the host, in order."""

    dtype: torch.dtype

    def shape(self, name: str) -> list[int]: ...

    def dtype_of(self, name: str) -> torch.dtype: ...

    def pieces(self, name: str, first: int, count: int) -> Iterator[torch.Tensor]: ...


class ModelWeights:
    """Views of the tiles where `dtype` is what they hold."""

    def __init__(self, model: StreamedModel, dtype: torch.dtype) -> None:
        self.dtype = dtype
        self._tiles = model._parts.tiles
        self._parameters = {parameter.name: parameter for parameter in model._parts.units.parameters}
        buffers = persistent_buffers(model.module, model._parts.blocks)
        self._buffers: dict[str, Any] = {name: owner._buffers[inner] for name, owner, inner in buffers}

    def shape(self, name: str) -> list[int]:
        return list(self._parameters[name].shape if name in self._parameters else self._buffers[name].shape)

    def dtype_of(self, name: str) -> torch.dtype:
        parameter = self._parameters.get(name)
        own: torch.dtype = self._buffers[name].dtype if parameter is None else self.dtype
        return torch.float32 if parameter is not None and parameter.stays_fp32 else own

    def pieces(self, name: str, first: int, count: int) -> Iterator[torch.Tensor]:
        if name not in self._parameters:
            yield self._buffers[name].detach().cpu().reshape(-1)[first : first + count]
            return
        parameter = self._parameters[name]
        weights = self._tiles.view(parameter, Section.weights).view(-1)
        split = parameter.trainable and self._tiles.store.layout(parameter.tile).format.weights == "bf16_split"
        joined = split and self.dtype == torch.float32
        low = self._tiles.view(parameter, Section.master_low).view(-1) if joined else None
        for begin, end in _ranges(first, count):
            piece = weights[begin:end]
            yield piece.to(self.dtype_of(name)) if low is None else _joined(piece, low[begin:end])


class CheckpointWeights:
    """Of a whole checkpoint, as `checkpoints.directory.find` gives it. `dtype` None: as it was streamed."""

    def __init__(self, path: Path, dtype: torch.dtype | None = None) -> None:
        from safetensors import safe_open
        from safetensors.torch import load as safetensors_tensors

        state = json.loads((path / STATE).read_bytes())
        self.dtype = dtype or getattr(torch, state["model"]["dtype"])
        self.contents: dict[str, Any] | None = state.get("export")
        """As Contents.to_plain gives them; None of a checkpoint that an older megatrain saved."""
        self._open: Any = lambda tile: safe_open(path / tile_name(tile), framework="pt")
        self._places = {
            parameter["name"]: (tile, parameter)
            for tile, entry in enumerate(state["model"]["tiles"])
            for parameter in entry["parameters"]
        }
        self._buffers = safetensors_tensors((path / BUFFERS).read_bytes())

    def shape(self, name: str) -> list[int]:
        return list(self._places[name][1]["shape"] if name in self._places else self._buffers[name].shape)

    def dtype_of(self, name: str) -> torch.dtype:
        if name not in self._places:
            return self._buffers[name].dtype
        stays_fp32 = self._places[name][1].get("stays_fp32", False)
        return torch.float32 if stays_fp32 else self.dtype

    def pieces(self, name: str, first: int, count: int) -> Iterator[torch.Tensor]:
        if name not in self._places:
            yield self._buffers[name].reshape(-1)[first : first + count]
            return
        tile, parameter = self._places[name]
        with self._open(tile) as file:
            weights = file.get_slice("weights")
            split = parameter["trainable"] and "master_low" in file.keys()
            low = file.get_slice("master_low") if split and self.dtype == torch.float32 else None
            for begin, end in _ranges(parameter["offset"] + first, count):
                piece = weights[begin:end]
                yield piece.to(self.dtype_of(name)) if low is None else _joined(piece, low[begin:end])


def _ranges(first: int, count: int) -> Iterator[tuple[int, int]]:
    for begin in range(first, first + count, _PIECE_ELEMENTS):
        yield begin, min(begin + _PIECE_ELEMENTS, first + count)


def _joined(high: torch.Tensor, low: torch.Tensor) -> torch.Tensor:
    """fp32 values of the two halves: bits = (high << 16) + low, where low is signed."""
    bits = high.view(torch.int16).to(torch.int32)
    bits <<= 16
    bits += low
    return bits.view(torch.float32)
