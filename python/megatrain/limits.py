"""The plan held against the machine's memory before anything is allocated, and what was allocated."""

from __future__ import annotations

from typing import TYPE_CHECKING

from megatrain._native import Section, require_host_memory
from megatrain.report import MemoryReport

if TYPE_CHECKING:
    from megatrain._native import Backend, TileStore
    from megatrain.settings import Settings
    from megatrain.units import UnitPlan

GIB = 1 << 30


def require_memory(plan: UnitPlan, settings: Settings, backend: Backend) -> None:
    """MemoryError with both figures if the tiles or the weights on the device do not fit."""
    require_host_memory(plan.nbytes + settings.staging_bytes, settings.host_memory or 0)
    if backend.name != "cuda":
        return
    weights = {unit: unit.layout.section(Section.weights)[1] for unit in plan.units}
    ring = settings.slots * max(nbytes for unit, nbytes in weights.items() if unit.is_block)
    outside = sum(nbytes for unit, nbytes in weights.items() if not unit.is_block)
    free, _ = backend.device_memory()
    limit = min(free, settings.device_memory or free)
    if ring + outside > limit:
        raise MemoryError(
            f"the weights on the device need {(ring + outside) / GIB:.2f} GiB ({settings.slots} slots and what is "
            f"outside the stacks), but {limit / GIB:.2f} GiB may be used; use fewer slots or smaller blocks"
        )


def memory_report(plan: UnitPlan, store: TileStore, device_weights: int, staging_bytes: int) -> MemoryReport:
    """What megatrain holds now."""
    count = sum(parameter.numel for parameter in plan.parameters)
    unpinned = store.nbytes - store.pinned_bytes
    notes = []
    if unpinned:
        notes.append(
            f"{unpinned / GIB:.2f} GiB could not be pinned; their copies go through a staging ring of "
            f"{staging_bytes / (1 << 20):.2f} MiB"
        )
    return MemoryReport(
        parameters=count,
        host_tiles=store.nbytes,
        host_pinned=store.pinned_bytes,
        host_bytes_per_parameter=store.nbytes / max(count, 1),
        device_weights=device_weights,
        largest_tile=max(unit.layout.nbytes for unit in plan.units),
        notes=tuple(notes),
    )
