"""Tiles that live on the device: weights, gradients and optimizer state of one unit, laid out as on the host."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from megatrain._native import Section
from megatrain.interop import section_dtype

if TYPE_CHECKING:
    from megatrain._native import Engine
    from megatrain.units import Unit


class ResidentTile:
    """One unit's memory on the device. The engine loads it, updates it there and writes it back."""

    def __init__(self, unit: Unit, engine: Engine, device: torch.device) -> None:
        self._unit = unit
        self._memory = torch.zeros(max(unit.layout.nbytes, 1), dtype=torch.uint8, device=device)
        self._non_finite = torch.zeros(1, dtype=torch.int32, device=device)
        engine.add_resident(unit.tile, self._memory.data_ptr(), self._non_finite.data_ptr())

    @property
    def nbytes(self) -> int:
        return self._memory.nbytes

    def section(self, section: Section) -> torch.Tensor:
        """Flat, sharing the memory."""
        offset, nbytes = self._unit.layout.section(section)
        # A version counter of its own: gradients that are written are no edit of weights.
        return self._memory.data[offset : offset + nbytes].view(section_dtype(self._unit.layout.format, section))
