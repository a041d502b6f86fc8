"""Weights on the device: slots of the ring for blocks, buffers of their own for what is outside."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from megatrain._native import Section
from megatrain.interop import stream_handle, weight_dtype

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from megatrain._native import Engine
    from megatrain.blocks import Block
    from megatrain.units import TiledParameter, Unit, UnitPlan


class DeviceWeights:
    """Brings weights to the device through the engine, and remembers the order of their first use."""

    def __init__(self, engine: Engine, plan: UnitPlan, device: torch.device, slots: int) -> None:
        self.engine = engine
        self.device = device
        self.outside: dict[int, OutsideWeights] = {}
        self.uses: list[int] = []
        """Tiles in the order in which this pass acquired them."""
        self._buffers: list[torch.Tensor] = []
        self._views: dict[tuple[int, int], tuple[torch.Tensor, ...]] = {}
        blocks = [unit for unit in plan.units if unit.is_block]
        if blocks:
            nbytes = max(unit.layout.section(Section.weights)[1] for unit in blocks)
            for _ in range(slots):
                self._add_slot(nbytes, -1)
        for unit in plan.units:
            if not unit.is_block:
                slot = self._add_slot(unit.layout.section(Section.weights)[1], unit.tile)
                self.outside[unit.tile] = OutsideWeights(self, unit, self._unit_views(unit, slot))

    def _add_slot(self, nbytes: int, tile: int) -> int:
        buffer = torch.empty(max(nbytes, 1), dtype=torch.uint8, device=self.device)
        self._buffers.append(buffer)
        return self.engine.add_slot(buffer.data_ptr(), buffer.nbytes, tile)

    @property
    def nbytes(self) -> int:
        return sum(buffer.nbytes for buffer in self._buffers)

    def _unit_views(self, unit: Unit, slot: int) -> tuple[torch.Tensor, ...]:
        key = (unit.tile, slot)
        if key not in self._views:
            layout = unit.layout
            dtype = weight_dtype(layout.format)
            flat = self._buffers[slot][: layout.weight_elements * dtype.itemsize].view(dtype)
            self._views[key] = tuple(
                flat[layout.element_offset(p.index) :][: p.numel].view(p.shape) for p in unit.parameters
            )
        return self._views[key]

    def begin_pass(self, expected: Sequence[int]) -> None:
        """A forward starts; `expected` is a guess at the tiles it and its backward will acquire."""
        self.uses = []
        self.engine.expect(list(expected))

    def note(self, tile: int) -> None:
        self.uses.append(tile)

    @contextmanager
    def on_device(self, block: Block) -> Iterator[dict[str, torch.Tensor]]:
        """The block's weights by their names in the block, for work queued on the current stream inside
        of the `with`; a compute span in the trace."""
        unit = block.unit
        stream = stream_handle(self.device)
        self.note(unit.tile)
        slot = self.engine.acquire(unit.tile, stream)
        try:
            views = self._unit_views(unit, slot)
            weights: dict[str, torch.Tensor] = {}
            for name, parameter in block.parameters:
                if parameter.tile == unit.tile:
                    weights[name] = views[parameter.index]
                else:
                    weights[name] = self.outside[parameter.tile].leaf(parameter)
            self.engine.begin_compute(unit.tile, stream)
            try:
                yield weights
            finally:
                self.engine.end_compute(stream)
        finally:
            self.engine.release(slot, stream)

    def recover(self) -> None:
        """After work that an exception cut short, wherever it was: nothing is in use, and what is outside is
        fetched again at its next use."""
        for outside in self.outside.values():
            outside.forget()
        self.engine.release_all(stream_handle(self.device))
        self.engine.expect([])

    def version(self, block: Block) -> int:
        return self.engine.version(block.unit.tile)

    def release_outside(self) -> None:
        """Before updates: what is outside is fetched again at its next use."""
        for outside in self.outside.values():
            outside.release()


class OutsideWeights:
    """One outside unit's buffer. Its parameters are leaves of autograd whose memory is the buffer; they
    are fetched when first touched under a weight version."""

    def __init__(self, owner: DeviceWeights, unit: Unit, views: tuple[torch.Tensor, ...]) -> None:
        self.unit = unit
        self._owner = owner
        self._leaves = tuple(
            nn.Parameter(view, requires_grad=p.trainable) for view, p in zip(views, unit.parameters, strict=True)
        )
        self._slot: int | None = None
        self._version = -1

    def leaf(self, parameter: TiledParameter) -> nn.Parameter:
        """The device parameter, with current weights for work queued from now on."""
        engine = self._owner.engine
        version = engine.version(self.unit.tile)
        if version != self._version or self._slot is None:
            self.release()
            self._owner.note(self.unit.tile)
            self._slot = engine.acquire(self.unit.tile, stream_handle(self._owner.device))
            self._version = version
            with torch.no_grad():
                # The copy does not move the version counter, by which autograd notices that what a graph
                # saved has been overwritten; an edit of no element does.
                for leaf in self._leaves:
                    leaf.view(-1)[:0].zero_()
        return self._leaves[parameter.index]

    def leaves(self) -> Iterator[tuple[TiledParameter, nn.Parameter]]:
        """Without fetching anything."""
        return zip(self.unit.parameters, self._leaves, strict=True)

    def forget(self) -> None:
        """The acquisition is given up elsewhere; stale gradients of a backward that was cut short too."""
        self._slot = None
        self.drop_gradients()

    def drop_gradients(self) -> None:
        for leaf in self._leaves:
            leaf.grad = None

    def release(self) -> None:
        if self._slot is not None:
            self._owner.engine.release(self._slot, stream_handle(self._owner.device))
            self._slot = None


class FetchedOnAccess(dict[str, Any]):
    """The `_parameters` of a module outside the stacks: reading one brings its weights to the device,
    however the module's forward comes to it."""

    def __init__(self, entries: dict[str, Any], fetch: Callable[[str], nn.Parameter]) -> None:
        super().__init__(entries)
        self._fetch = fetch

    def __getitem__(self, name: str) -> Any:
        return self._fetch(name) if super().__getitem__(name) is not None else None

    def get(self, name: str, default: Any = None) -> Any:
        return self[name] if name in self else default
