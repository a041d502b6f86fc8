"""Weights on the device: slots of the ring for streamed blocks, memory of their own for what is resident or
outside the stacks."""

from __future__ import annotations

from contextlib import contextmanager, nullcontext
from difflib import get_close_matches
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from megatrain._native import Section
from megatrain.chosen_experts import BlockWeights, ExpertsUse
from megatrain.interop import stream_handle, weight_dtype
from megatrain.resident import ResidentTile

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from megatrain._native import Engine
    from megatrain.blocks import Block
    from megatrain.experts import BlockExperts
    from megatrain.face import ParameterFace
    from megatrain.placement import Placement, Residence
    from megatrain.units import TiledParameter, Unit, UnitPlan


class DeviceWeights:
    """Brings weights to the device through the engine, and remembers the order of their first use."""

    def __init__(
        self,
        engine: Engine,
        plan: UnitPlan,
        device: torch.device,
        slots: int,
        placement: Placement,
        experts: Mapping[int, BlockExperts],
        counts_experts: bool = False,
    ) -> None:
        """counts_experts: which experts get tokens is noted with each call."""
        self.engine = engine
        self.device = device
        self._plan = plan
        self.outside: dict[int, OutsideWeights] = {}
        self.uses: list[int] = []
        """Tiles in the order in which this pass acquired them."""
        self.resident: dict[int, ResidentTile] = {}
        """By tile: those with their optimizer state."""
        self.experts = dict(experts)
        """By tile: those of blocks that can go up without the experts that get no tokens."""
        self._counts_experts = counts_experts
        for tile, found in self.experts.items():
            engine.split(tile, found.parts())
        self._buffers: list[torch.Tensor] = []
        self._slot_of: dict[int, int] = {}
        self._views: dict[tuple[int, int], tuple[torch.Tensor, ...]] = {}
        self.place(placement, slots)

    def skipped_experts(self) -> dict[TiledParameter, range]:
        """Tensors whose experts are counted, with their numbers in the unit."""
        if not self._counts_experts:
            return {}
        tensors = [entry for experts in self.experts.values() for entry in experts.tensors.items()]
        return {parameter: gate.parts for parameter, gate in tensors if parameter.trainable}

    def _place_experts(self, placement: Placement) -> None:
        for tile, experts in self.experts.items():
            self.engine.want(tile, experts.follow(placement.experts))

    def place(self, placement: Placement, slots: int) -> None:
        """Give back what the device holds and take what this placement asks for; between steps only. `outside`
        and `resident` have new entries afterwards."""
        self.release_outside()
        self.engine.clear_device()
        for held in (self.outside, self.resident, self._buffers, self._slot_of, self._views):
            held.clear()
        ring_bytes = -1
        for unit, residence in residences(self._plan, placement):
            if residence == "all":
                self.resident[unit.tile] = ResidentTile(unit, self.engine, self.device)
            elif residence == "weights" or not unit.is_block:
                self._add_slot(weight_bytes(unit), unit.tile)
            else:
                ring_bytes = max(ring_bytes, weight_bytes(unit))
        if ring_bytes >= 0:
            for _ in range(slots):
                self._add_slot(ring_bytes, -1)
        for unit in self._plan.units:
            if not unit.is_block:
                self.outside[unit.tile] = OutsideWeights(self, unit, self._own_views(unit))
        self._place_experts(placement)

    def _add_slot(self, nbytes: int, tile: int) -> int:
        buffer = torch.empty(max(nbytes, 1), dtype=torch.uint8, device=self.device)
        slot = self.engine.add_slot(buffer.data_ptr(), buffer.nbytes, stream_handle(self.device), tile)
        assert slot == len(self._buffers)
        self._buffers.append(buffer)
        if tile != -1:
            self._slot_of[tile] = slot
        return slot

    @property
    def nbytes(self) -> int:
        """Of slots and buffers of weights; resident tiles not included."""
        return sum(buffer.nbytes for buffer in self._buffers)

    @property
    def resident_bytes(self) -> int:
        return sum(tile.nbytes for tile in self.resident.values())

    def _views_in(self, unit: Unit, slot: int) -> tuple[torch.Tensor, ...]:
        """The unit's parameters in a slot; -1 for its resident memory."""
        key = (unit.tile, slot)
        if key not in self._views:
            layout = unit.layout
            dtype = weight_dtype(layout.format)
            with torch.inference_mode(False):  # they are used again outside of it
                if slot == -1:
                    flat = self.resident[unit.tile].section(Section.weights)
                else:
                    flat = self._buffers[slot][: layout.weight_elements * dtype.itemsize].view(dtype)
                self._views[key] = tuple(
                    flat[layout.element_offset(p.index) :][: p.numel].view(p.shape) for p in unit.parameters
                )
        return self._views[key]

    def _own_views(self, unit: Unit) -> tuple[torch.Tensor, ...]:
        return self._views_in(unit, self._slot_of.get(unit.tile, -1))

    def begin_pass(self, expected: Sequence[int]) -> None:
        """A forward starts; `expected` is a guess at the tiles it and its backward will acquire."""
        self.uses = []
        self.expect(expected)

    def expect(self, tiles: Sequence[int]) -> None:
        """A guess at the tiles that will be acquired next, in order."""
        self.engine.expect([tile for tile in tiles if tile not in self.resident])

    @contextmanager
    def on_device(self, block: Block) -> Iterator[BlockWeights]:
        """The block's weights by their names in the block, for work queued on the current stream inside
        of the `with`; a compute span in the trace. Experts' may arrive as late as when they are called."""
        unit = block.unit
        stream = stream_handle(self.device)
        slot = self.acquire(unit.tile)
        try:
            views = self._views_in(unit, slot)
            weights: dict[str, torch.Tensor] = {}
            for name, parameter in block.parameters:
                if parameter.tile == unit.tile:
                    weights[name] = views[parameter.index]
                else:
                    weights[name] = self.outside[parameter.tile].leaf(parameter)
            stay = slot == -1 and all(parameter.tile == unit.tile for _, parameter in block.parameters)
            use = self._use_of_experts(unit, slot)
            self.engine.begin_compute(unit.tile, stream)
            try:
                with nullcontext() if use is None else use.open():
                    yield BlockWeights(weights, use, stay=stay)
            finally:
                self.engine.end_compute(stream)
                if use is not None:
                    self.engine.want(unit.tile, self.experts[unit.tile].after(use))
        finally:
            self.release(slot)

    def _use_of_experts(self, unit: Unit, slot: int) -> ExpertsUse | None:
        experts = self.experts.get(unit.tile)
        if experts is None:
            return None
        counts_on = self.device if self._counts_experts else None
        if slot == -1:
            return ExpertsUse(experts, None, counts_on)

        def bring(parts: Sequence[int]) -> None:
            self.engine.bring(slot, list(parts), stream_handle(self.device))

        if experts.whole:
            bring(range(experts.count))  # nothing to do where they went up with the rest
            return ExpertsUse(experts, None, counts_on)
        return ExpertsUse(experts, bring, counts_on)

    def acquire(self, tile: int) -> int:
        """The tile's weights are there for work queued from now on: in this slot, or (-1) resident."""
        if tile in self.resident:
            self.engine.use_resident(tile, stream_handle(self.device))
            return -1
        self.uses.append(tile)
        return self.engine.acquire(tile, stream_handle(self.device))

    def release(self, slot: int) -> None:
        if slot != -1:
            self.engine.release(slot, stream_handle(self.device))

    def outside_units(self) -> list[Unit]:
        return [outside.unit for outside in self.outside.values()]

    def recover(self) -> None:
        """After work that an exception cut short, wherever it was: nothing is in use, and what is outside is
        fetched again at its next use."""
        for outside in self.outside.values():
            outside.forget()
        self.engine.release_all(stream_handle(self.device))
        self.engine.expect([])

    def version(self, block: Block) -> object:
        """Of all that the block reads, shared parameters included."""
        return tuple(self.engine.version(tile) for tile in dict.fromkeys(p.tile for _, p in block.parameters))

    def mark_edited(self, tile: int) -> None:
        """The host's weights were written. What still holds the old ones outside the stacks gives its own slot
        back first: else the new ones would be brought to another."""
        if tile in self.outside:
            self.outside[tile].release()
        self.engine.mark_edited(tile)

    def mark_moments_edited(self, tile: int) -> None:
        """The host's moments were written: where they are resident, they have to come up again."""
        if tile in self.resident:
            self.mark_edited(tile)

    def release_outside(self) -> None:
        """Before updates: what is outside is fetched again at its next use."""
        for outside in self.outside.values():
            outside.release()


def weight_bytes(unit: Unit) -> int:
    """Of its weights section, which is what goes to the device."""
    return unit.layout.section(Section.weights)[1]


def residences(plan: UnitPlan, placement: Placement) -> list[tuple[Unit, Residence]]:
    """Each unit and what of it stays on the device. Blocks count in the module's order. ValueError for more blocks than
    there are, and for a name outside the stacks that there is not."""
    blocks = sum(unit.is_block for unit in plan.units)
    if len(placement.blocks) > blocks:
        raise ValueError(f"placement.blocks has {len(placement.blocks)} entries; the model has {blocks} blocks")
    known = {name for unit in plan.units if not unit.is_block for name in (unit.owner, unit.name)}
    for name in placement.outside:
        if name and name not in known:
            near = get_close_matches(name, known, 1)
            hint = f'did you mean "{near[0]}"?' if near else f"there are {', '.join(sorted(known))}"
            raise ValueError(f'placement.outside names "{name}", which owns no weights outside the stacks; {hint}')
    found: list[tuple[Unit, Residence]] = []
    index = 0
    for unit in plan.units:
        if unit.is_block:
            found.append((unit, placement.block(index).resident))
            index += 1
        else:
            name = unit.name if unit.name in placement.outside else unit.owner
            found.append((unit, placement.residence(name)))
    return found


class OutsideWeights:
    """One outside unit's buffer. Its parameters are leaves of autograd whose memory is the buffer; they
    are fetched when first touched under a weight version."""

    def __init__(self, owner: DeviceWeights, unit: Unit, views: tuple[torch.Tensor, ...]) -> None:
        self.unit = unit
        self._owner = owner
        self._leaves = tuple(
            nn.Parameter(view, requires_grad=p.trainable) for view, p in zip(views, unit.parameters, strict=True)
        )
        self._switched = [parameter.trainable for parameter in unit.parameters]
        """`requires_grad` of the leaves as it was set here."""
        self._slot: int | None = None
        self._version = -1

    def leaf(self, parameter: TiledParameter) -> nn.Parameter:
        """The device parameter, with current weights for work queued from now on."""
        engine = self._owner.engine
        version = engine.version(self.unit.tile)
        if version != self._version or self._slot is None:
            self.release()
            self._slot = self._owner.acquire(self.unit.tile)
            self._version = version
        return self._leaves[parameter.index]

    def leaves(self) -> Iterator[tuple[TiledParameter, nn.Parameter]]:
        """Without fetching anything."""
        return zip(self.unit.parameters, self._leaves, strict=True)

    def follow(self, faces: ParameterFace) -> list[str]:
        """Give the leaves the `requires_grad` of the faces. Where somebody has switched a leaf, as the module
        hands it out, the face follows it instead; returns the names of these."""
        others = []
        for index, (parameter, leaf) in enumerate(self.leaves()):
            face = faces.by_name[parameter.name]
            if leaf.requires_grad != self._switched[index] and leaf.requires_grad != face.requires_grad:
                face.requires_grad_(leaf.requires_grad)
                others.append(parameter.name)
            self._switched[index] = faces.is_trainable(parameter)
            leaf.requires_grad_(self._switched[index])
        return others

    def leaf_ids(self) -> set[int]:
        """Of the leaves, as autograd's graph holds them."""
        return {id(leaf) for leaf in self._leaves}

    def forget(self) -> None:
        """The acquisition is given up elsewhere; stale gradients of a backward that was cut short too."""
        self._slot = None
        self.drop_gradients()

    def drop_gradients(self) -> None:
        for leaf in self._leaves:
            leaf.grad = None

    def release(self) -> None:
        """The memory may be overwritten from now on."""
        if self._slot is None:
            return
        self._owner.release(self._slot)
        self._slot = None
        if any(parameter.trainable for parameter in self.unit.parameters):
            with torch.no_grad():
                # What is written there does not move the version counter, by which autograd notices that what a
                # graph saved has been overwritten; an edit of no element does.
                for leaf in self._leaves:
                    leaf.view(-1)[:0].zero_()


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
