"""Gradients on their way to the host: summed in fp32 on the device, rounded to the tile's type, measured
there, drained in one burst a tile."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch

from megatrain._native import Section
from megatrain.interop import stream_handle, weight_dtype

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from megatrain._native import Engine
    from megatrain.resident import ResidentTile
    from megatrain.tiles import Tiles
    from megatrain.units import TiledParameter, Unit


HELD_GRADIENTS = 2


class _Accumulator:
    """Gradients of one unit, laid out as the tile. Up to `held` of each parameter are held as they came; with a
    further one of any, fp32 sums of all begin."""

    def __init__(self, unit: Unit, spare: list[torch.Tensor], held: int) -> None:
        self._parameters = [parameter for parameter in unit.parameters if parameter.trainable]
        self._offsets = {p.index: unit.layout.element_offset(p.index) for p in self._parameters}
        self.elements = unit.layout.trainable_elements
        self._spare = spare
        self._most_held = held
        self._held: dict[int, list[torch.Tensor]] = {}
        self._sums: torch.Tensor | None = None
        self._views: dict[int, torch.Tensor] = {}
        """Of the sums, by parameter."""
        self.touched: set[int] = set()

    def add(self, gradients: Sequence[tuple[TiledParameter, torch.Tensor]]) -> None:
        """Of different parameters."""
        targets: list[torch.Tensor] = []
        summands: list[torch.Tensor] = []
        for parameter, gradient in gradients:
            self.touched.add(parameter.index)
            held = self._held.setdefault(parameter.index, [])
            if self._sums is None and len(held) < self._most_held:
                held.append(gradient)
            else:
                if self._sums is None:
                    self.sums(gradient.device)
                targets.append(self._views[parameter.index])
                summands.append(gradient)
        if targets:
            torch._foreach_add_(targets, summands)

    @torch.no_grad()
    def sums(self, device: torch.device) -> torch.Tensor:
        """All sums, fp32, with zeros for what has no gradient."""
        if self._sums is None:
            # The gaps between parameters are never written and must not reach the norm.
            spare = self._spare.pop() if self._spare else None
            self._sums = torch.zeros(self.elements, device=device) if spare is None else spare
            self._views = {p.index: self._view(self._sums, p) for p in self._parameters}
            held = [(self._views[index], gradients) for index, gradients in self._held.items() if gradients]
            idle = [self._views[p.index] for p in self._parameters if not self._held.get(p.index)]
            pairs = [(view, gradients[1]) for view, gradients in held if len(gradients) > 1]
            if idle:
                torch._foreach_zero_(idle)
            if held:
                torch._foreach_copy_([view for view, _ in held], [gradients[0] for _, gradients in held])
            if pairs:
                torch._foreach_add_([view for view, _ in pairs], [second for _, second in pairs])
            self._held.clear()
        return self._sums

    @torch.no_grad()
    def round_into(self, target: torch.Tensor, begin: int) -> None:
        """Elements [begin, begin + len(target)) of the sums, in the target's type."""
        end = begin + target.numel()
        if self._sums is not None:
            target.copy_(self._sums[begin:end])
            return
        written = begin
        for parameter in self._parameters:
            offset = self._offsets[parameter.index]
            low, high = max(offset, begin), min(offset + parameter.numel, end)
            held = self._held.get(parameter.index)
            if low >= high or not held:
                continue
            target[written - begin : low - begin].zero_()
            part = target[low - begin : high - begin]
            if high - low == parameter.numel:
                part = part.view(parameter.shape)
            else:
                held = [gradient.reshape(-1)[low - offset : high - offset] for gradient in held]
            if len(held) == 1:
                part.copy_(held[0])
            elif held[0].dtype == held[1].dtype == part.dtype:
                torch.add(held[0], held[1], out=part)  # adds in fp32 and rounds once, also in bf16
            else:
                part.copy_(held[0].float() + held[1].float())
            written = high
        target[written - begin :].zero_()

    def clear(self) -> None:
        if self._sums is not None:
            self._spare.append(self._sums)
        self._sums = None
        self._views.clear()
        self._held.clear()
        self.touched.clear()

    def _view(self, sums: torch.Tensor, parameter: TiledParameter) -> torch.Tensor:
        offset = self._offsets[parameter.index]
        return sums[offset : offset + parameter.numel].view(parameter.shape)


class GradientSink:
    """Takes gradients of parameters, and leaves them in the tiles' gradient sections with their norm.

    `add` sums on the device; `store` sends a unit's sum down, or where the unit is resident puts it into its
    memory there. A unit stored twice before `clear` is added to what is there, in fp32: then its tile has an
    accumulator section, or if it is resident an accumulator on the device."""

    STAGING_BUFFERS = 2
    STAGING_ELEMENTS = 1 << 28  # 512 MiB of bf16: the embedding of a large vocabulary goes down in pieces

    def __init__(
        self,
        engine: Engine,
        tiles: Tiles,
        device: torch.device,
        resident: Mapping[int, ResidentTile],
    ) -> None:
        self._engine = engine
        self._resident = resident
        self._resident_sums: dict[int, torch.Tensor] = {}
        self._tiles = tiles
        self._device = device
        self._sums: dict[int, _Accumulator] = {}
        self._spare: dict[tuple[int, ...], list[torch.Tensor]] = {}
        self._staging: list[torch.Tensor] = []
        self._tickets: list[int | None] = []
        self._next_staging = 0
        self._norms: dict[int, list[torch.Tensor]] = {}
        self.stored: dict[int, set[int]] = {}
        """Parameters (by tile, by index) that have a gradient in their tile."""
        self._in_accumulator: set[int] = set()
        self._used_experts: dict[int, torch.Tensor] = {}
        self._hold = HELD_GRADIENTS

    def expect(self, gradients: int, together: int) -> None:
        """Until `clear`: how many gradients of each parameter will be added, of which `together` follow each other.
        Where many come far apart, sums of all units are there at once: those are begun with the first, for they would
        hardly fit between the gradients that are held until then."""
        self._hold = 0 if together == 1 and gradients > HELD_GRADIENTS else HELD_GRADIENTS
        if together == 1 and self._hold:
            self._spare.clear()  # sums of all units, of a step with more: what is held now takes their place

    def release_memory(self) -> None:
        """Give the device memory of sums and of what goes down back to torch; between steps."""
        self._engine.synchronize()
        self._spare.clear()
        self._staging.clear()
        self._tickets.clear()
        self._next_staging = 0

    # summing

    def add(self, unit: Unit, gradients: Iterable[tuple[TiledParameter, torch.Tensor | None]]) -> None:
        """Add gradients of different parameters of the unit; None adds nothing and does not count as a gradient."""
        dense = [
            (parameter, gradient if gradient.layout == torch.strided else gradient.to_dense())
            for parameter, gradient in gradients
            if gradient is not None
        ]
        if dense:
            self._sum_of(unit).add(dense)

    def count_experts(self, unit: Unit, used: torch.Tensor) -> None:
        """used: by part of the unit's experts, bool, on the device: it got tokens in a call whose gradients were
        added."""
        before = self._used_experts.get(unit.tile)
        self._used_experts[unit.tile] = used if before is None else before | used

    def used_experts(self, unit: Unit) -> list[bool] | None:
        """Since `clear`; waits for the device. None where they were not counted."""
        used = self._used_experts.get(unit.tile)
        return None if used is None else used.tolist()

    def _sum_of(self, unit: Unit) -> _Accumulator:
        if unit.tile not in self._sums:
            self._sums[unit.tile] = _Accumulator(unit, self._spare.setdefault(_shape_key(unit), []), self._hold)
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
        if unit.tile in self.stored:
            if unit.tile in self._resident:
                self._add_resident(unit, total)
            else:
                self._add_stored(unit, total)
        self.stored.setdefault(unit.tile, set()).update(total.touched)
        if unit.tile in self._resident:
            rounded = self._resident[unit.tile].section(Section.gradients)
            total.round_into(rounded, 0)
            self._norms[unit.tile] = [_norm(rounded)]
        else:
            self._drain_rounded(unit, total)
        total.clear()

    def _add_resident(self, unit: Unit, total: _Accumulator) -> None:
        """The same for a resident unit, all on the device."""
        before = self._resident_sums.get(unit.tile)
        if before is None:
            before = self._resident[unit.tile].section(Section.gradients)
        sums = total.sums(self._device).add_(before)
        self._resident_sums[unit.tile] = sums.clone()

    def _add_stored(self, unit: Unit, total: _Accumulator) -> None:
        """total += what the tile holds, exactly: from then on the tile keeps an fp32 sum beside its
        rounded gradients."""
        stream = stream_handle(self._device)
        elements = total.elements
        exact = unit.layout.format.weights == "fp32"
        section = Section.accumulator if unit.tile in self._in_accumulator else Section.gradients
        dtype = torch.float32 if exact or unit.tile in self._in_accumulator else weight_dtype(unit.layout.format)
        before = torch.empty(elements, dtype=dtype, device=self._device)
        self._engine.fetch(unit.tile, section, 0, elements, before.data_ptr(), stream)
        sums = total.sums(self._device).add_(before)
        if not exact:
            self._tiles.store.add_accumulator(unit.tile)
            self._in_accumulator.add(unit.tile)
            ticket = self._engine.drain(
                unit.tile, Section.accumulator, 0, elements, sums.data_ptr(), stream
            )
            self._engine.wait_drain(ticket, stream)

    def _drain_rounded(self, unit: Unit, total: _Accumulator) -> None:
        stream = stream_handle(self._device)
        self._norms[unit.tile] = []
        for begin in range(0, total.elements, self.STAGING_ELEMENTS):
            count = min(self.STAGING_ELEMENTS, total.elements - begin)
            index, staging = self._staging_buffer(count, weight_dtype(unit.layout.format))
            total.round_into(staging, begin)
            self._norms[unit.tile].append(_norm(staging))
            self._tickets[index] = self._engine.drain(
                unit.tile, Section.gradients, begin, count, staging.data_ptr(), stream
            )

    def _staging_buffer(self, elements: int, dtype: torch.dtype) -> tuple[int, torch.Tensor]:
        """The next buffer of the ring, free to be written by work queued from now on."""
        index = self._next_staging
        self._next_staging = (index + 1) % self.STAGING_BUFFERS
        if index == len(self._staging):
            self._staging.append(torch.empty(0, dtype=torch.uint8, device=self._device))
            self._tickets.append(None)
        ticket = self._tickets[index]
        if ticket is not None:
            self._engine.wait_drain(ticket, stream_handle(self._device))
        nbytes = elements * dtype.itemsize
        if self._staging[index].nbytes < nbytes:
            if ticket is not None:
                self._engine.synchronize()  # the smaller buffer goes back to torch: nothing may still read it
            self._staging[index] = torch.empty(nbytes, dtype=torch.uint8, device=self._device)
        return index, self._staging[index][:nbytes].view(dtype)

    # the norm

    def norm(self) -> float:
        """The 2-norm of all stored gradients, as rounded for the update; waits for the device."""
        parts = [part for parts in self._norms.values() for part in parts]
        if not parts:
            return 0.0
        return math.sqrt(float(torch.stack(parts).double().square().sum()))

    def clear(self) -> None:
        """Forget all gradients."""
        for total in self._sums.values():
            total.clear()
        self._sums.clear()
        self.stored.clear()
        self._norms.clear()
        self._in_accumulator.clear()
        self._resident_sums.clear()
        self._used_experts.clear()
        self._hold = HELD_GRADIENTS


def _norm(gradients: torch.Tensor) -> torch.Tensor:
    norm: torch.Tensor = torch.linalg.vector_norm(gradients, dtype=torch.float32)
    return norm


def _shape_key(unit: Unit) -> tuple[int, ...]:
    """Equal for units whose sums have values, and gaps between them, in the same places."""
    layout = unit.layout
    places = ((layout.element_offset(p.index), p.numel) for p in unit.parameters if p.trainable)
    return (layout.trainable_elements, *(number for place in places for number in place))
