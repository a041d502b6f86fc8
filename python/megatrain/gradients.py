"""Gradients on their way to the host: summed in fp32 on the device, rounded to the tile's type, measured
there, drained in one burst a tile."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch

from megatrain._native import Section
from megatrain.interop import stream_handle, weight_dtype

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from megatrain._native import Engine
    from megatrain.resident import ResidentTile
    from megatrain.tiles import Tiles
    from megatrain.units import TiledParameter, Unit


class _Accumulator:
    """fp32 sums of one unit's gradients, laid out as the tile."""

    def __init__(self, unit: Unit, device: torch.device) -> None:
        # Zeroed once: the gaps between parameters are never written and must not reach the norm.
        self.flat = torch.zeros(unit.layout.trainable_elements, dtype=torch.float32, device=device)
        self.layout = [unit.layout.element_offset(p.index) for p in unit.parameters]
        self.touched: set[int] = set()

    def view(self, parameter: TiledParameter) -> torch.Tensor:
        offset = self.layout[parameter.index]
        return self.flat[offset : offset + parameter.numel].view(parameter.shape)

    def add(self, parameter: TiledParameter, gradient: torch.Tensor) -> None:
        if parameter.index in self.touched:
            self.view(parameter).add_(gradient)
        else:
            self.view(parameter).copy_(gradient)
            self.touched.add(parameter.index)

    def zero_untouched(self, unit: Unit) -> None:
        for parameter in unit.parameters:
            if parameter.trainable and parameter.index not in self.touched:
                self.view(parameter).zero_()


class GradientSink:
    """Takes gradients of parameters, and leaves them in the tiles' gradient sections with their norm.

    `add` sums on the device; `store` sends a unit's sum down, or where the unit is resident puts it into its
    memory there. A unit stored twice before `clear` is added to what is there, in fp32: then its tile has an
    accumulator section, or if it is resident an accumulator on the device."""

    STAGING_BUFFERS = 2
    STAGING_ELEMENTS = 1 << 28  # 512 MiB of bf16: the embedding of a large vocabulary goes down in pieces

    def __init__(
        self, engine: Engine, tiles: Tiles, device: torch.device, resident: Mapping[int, ResidentTile]
    ) -> None:
        self._engine = engine
        self._resident = resident
        self._resident_sums: dict[int, torch.Tensor] = {}
        self._tiles = tiles
        self._device = device
        self._sums: dict[int, _Accumulator] = {}
        self._spare: dict[tuple[int, ...], list[_Accumulator]] = {}
        self._staging: list[torch.Tensor] = []
        self._tickets: list[int | None] = []
        self._next_staging = 0
        self._norms: dict[int, list[torch.Tensor]] = {}
        self.stored: dict[int, set[int]] = {}
        """Parameters (by tile, by index) that have a gradient in their tile."""
        self._in_accumulator: set[int] = set()

    def release_memory(self) -> None:
        """Give the device memory of sums and of what goes down back to torch; between steps."""
        self._engine.synchronize()
        self._spare.clear()
        self._staging.clear()
        self._tickets.clear()
        self._next_staging = 0

    # summing

    def add(self, unit: Unit, gradients: Iterable[tuple[TiledParameter, torch.Tensor | None]]) -> None:
        """Add gradients of the unit's parameters; None adds nothing and does not count as a gradient."""
        for parameter, gradient in gradients:
            if gradient is not None:
                dense = gradient.to_dense() if gradient.layout != torch.strided else gradient
                self._sum_of(unit).add(parameter, dense)

    def _sum_of(self, unit: Unit) -> _Accumulator:
        if unit.tile not in self._sums:
            spare = self._spare.get(_shape_key(unit))
            self._sums[unit.tile] = spare.pop() if spare else _Accumulator(unit, self._device)
        return self._sums[unit.tile]

    @property
    def pending(self) -> bool:
        """There are gradients that no update has used."""
        return bool(self.stored) or bool(self._sums)

    # to the host

    def store(self, unit: Unit) -> None:
        """Send the unit's sum down. The sum is free again for work queued after this call."""
        total = self._sums.pop(unit.tile, None)
        if total is None:
            return
        total.zero_untouched(unit)
        if unit.tile in self.stored:
            if unit.tile in self._resident:
                self._add_resident(unit, total)
            else:
                self._add_stored(unit, total)
        self.stored.setdefault(unit.tile, set()).update(total.touched)
        if unit.tile in self._resident:
            rounded = self._resident[unit.tile].section(Section.gradients)
            rounded.copy_(total.flat)
            self._norms[unit.tile] = [_norm(rounded)]
        else:
            self._drain_rounded(unit, total.flat)
        total.touched.clear()
        self._spare.setdefault(_shape_key(unit), []).append(total)

    def _add_resident(self, unit: Unit, total: _Accumulator) -> None:
        """The same for a resident unit, all on the device."""
        before = self._resident_sums.get(unit.tile)
        if before is None:
            before = self._resident[unit.tile].section(Section.gradients)
        total.flat.add_(before)
        self._resident_sums[unit.tile] = total.flat.clone()

    def _add_stored(self, unit: Unit, total: _Accumulator) -> None:
        """total += what the tile holds, exactly: from then on the tile keeps an fp32 sum beside its
        rounded gradients."""
        stream = stream_handle(self._device)
        elements = total.flat.numel()
        exact = unit.layout.format.weights == "fp32"
        section = Section.accumulator if unit.tile in self._in_accumulator else Section.gradients
        dtype = torch.float32 if exact or unit.tile in self._in_accumulator else weight_dtype(unit.layout.format)
        before = torch.empty(elements, dtype=dtype, device=self._device)
        self._engine.fetch(unit.tile, section, 0, elements, before.data_ptr(), stream)
        total.flat.add_(before)
        if not exact:
            self._tiles.store.add_accumulator(unit.tile)
            self._in_accumulator.add(unit.tile)
            ticket = self._engine.drain(
                unit.tile, Section.accumulator, 0, elements, total.flat.data_ptr(), stream
            )
            self._engine.wait_drain(ticket, stream)

    def _drain_rounded(self, unit: Unit, flat: torch.Tensor) -> None:
        stream = stream_handle(self._device)
        self._norms[unit.tile] = []
        for begin in range(0, flat.numel(), self.STAGING_ELEMENTS):
            piece = flat[begin : begin + self.STAGING_ELEMENTS]
            index, staging = self._staging_buffer(piece.numel(), weight_dtype(unit.layout.format))
            staging.copy_(piece)
            self._norms[unit.tile].append(_norm(staging))
            self._tickets[index] = self._engine.drain(
                unit.tile, Section.gradients, begin, piece.numel(), staging.data_ptr(), stream
            )

    def _staging_buffer(self, elements: int, dtype: torch.dtype) -> tuple[int, torch.Tensor]:
        """The next buffer of the ring, free to be written by work queued from now on."""
        index = self._next_staging
        self._next_staging = (index + 1) % self.STAGING_BUFFERS
        if index == len(self._staging):
            self._staging.append(torch.empty(0, dtype=dtype, device=self._device))
            self._tickets.append(None)
        ticket = self._tickets[index]
        if ticket is not None:
            self._engine.wait_drain(ticket, stream_handle(self._device))
        if self._staging[index].numel() < elements:
            if ticket is not None:
                self._engine.synchronize()  # the smaller buffer goes back to torch: nothing may still read it
            self._staging[index] = torch.empty(elements, dtype=dtype, device=self._device)
        return index, self._staging[index][:elements]

    # the norm

    def norm(self) -> float:
        """The 2-norm of all stored gradients, as rounded for the update; waits for the device."""
        parts = [part for parts in self._norms.values() for part in parts]
        if not parts:
            return 0.0
        return math.sqrt(float(torch.stack(parts).double().square().sum()))

    def clear(self) -> None:
        """Forget all gradients."""
        for unit in self._tiles.plan.units:
            total = self._sums.pop(unit.tile, None)
            if total is not None:
                total.touched.clear()
                self._spare.setdefault(_shape_key(unit), []).append(total)
        self.stored.clear()
        self._norms.clear()
        self._in_accumulator.clear()
        self._resident_sums.clear()


def _norm(gradients: torch.Tensor) -> torch.Tensor:
    norm: torch.Tensor = torch.linalg.vector_norm(gradients, dtype=torch.float32)
    return norm


def _shape_key(unit: Unit) -> tuple[int, ...]:
    layout = unit.layout
    return (layout.trainable_elements, *(layout.element_offset(p.index) for p in unit.parameters))
