"""The plan held against the machine's memory before anything is allocated, and what was allocated."""

from __future__ import annotations

from typing import TYPE_CHECKING

from megatrain._native import require_host_memory
from megatrain.device_weights import residences, weight_bytes
from megatrain.report import MemoryReport

if TYPE_CHECKING:
    from megatrain._native import Backend, TileStore
    from megatrain.settings import Settings
    from megatrain.units import UnitPlan

GIB = 1 << 30


def require_memory(plan: UnitPlan, settings: Settings, backend: Backend) -> None:
    """MemoryError with both figures if the tiles or the weights on the device do not fit."""
    require_device_memory(plan, settings, backend)
    require_host_memory(plan.nbytes + settings.staging_bytes, settings.host_memory or 0)


def require_device_memory(plan: UnitPlan, settings: Settings, backend: Backend, given_back: int = 0) -> None:
    """MemoryError if what the placement holds on the device does not fit; `given_back` bytes will be free. ValueError
    for a placement that is none of this model."""
    found = residences(plan, settings.placement)
    if backend.name != "cuda":
        return
    ring = resident = outside = 0
    for unit, residence in found:
        if residence == "all":
            resident += unit.layout.nbytes
        elif residence == "weights":
            resident += weight_bytes(unit)
        elif unit.is_block:
            ring = max(ring, settings.slots * weight_bytes(unit))
        else:
            outside += weight_bytes(unit)
    free, _ = backend.device_memory()
    free += given_back
    limit = min(free, settings.device_memory or free)
    if ring + outside + resident > limit:
        raise MemoryError(
            f"the weights on the device need {(ring + outside + resident) / GIB:.2f} GiB ({settings.slots} slots with "
            f"{ring / GIB:.2f}, outside the stacks {outside / GIB:.2f}, resident {resident / GIB:.2f}), but "
            f"{limit / GIB:.2f} GiB may be used; use fewer resident blocks, fewer slots or smaller blocks"
        )


def memory_report(
    plan: UnitPlan,
    store: TileStore,
    device_weights: int,
    device_resident: int,
    host_kept: int,
    staging_bytes: int,
) -> MemoryReport:
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
        host_kept=host_kept,
        device_weights=device_weights,
        device_resident=device_resident,
        largest_tile=max(unit.layout.nbytes for unit in plan.units),
        notes=tuple(notes),
    )
