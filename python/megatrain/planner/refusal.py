"""Why nothing fits, and what would."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import TYPE_CHECKING

from megatrain._native import TileFormat
from megatrain.placement import BlockPlacement, Order, Placement, Side
from megatrain.planner.hardware import GIB
from megatrain.planner.memory import CONTEXT, HOST_PROCESS, SHARE, Sizes, fits, memory, usable_device, usable_host

if TYPE_CHECKING:
    from collections.abc import Iterator

    from megatrain.planner.hardware import Hardware
    from megatrain.planner.job import Batch, Job
    from megatrain.planner.memory import Memory
    from megatrain.planner.shape import ModelShape


def refusal(shape: ModelShape, job: Job, hardware: Hardware) -> str:
    """Why nothing fits, with figures, and what would."""
    smallest = _smallest(shape, job)
    least_host = min(smallest, key=lambda taken: taken.host_bytes)
    least_device = min(smallest, key=lambda taken: taken.device_bytes)
    name = shape.name or f"the model of {shape.numel / 1e9:.1f}B parameters"
    reasons = []
    host, device = usable_host(hardware.host_memory), usable_device(hardware.gpu_memory)
    if least_host.host_bytes > host:
        each = least_host.host["tiles"] / shape.numel
        reasons.append(
            f"{name} needs {_gib(least_host.host_bytes)} of host memory ({each:.1f} bytes a parameter), but "
            f"{_gib(host)} of {_gib(hardware.host_memory)} may be used"
        )
    if least_device.device_bytes > device:
        largest = sorted(least_device.device.items(), key=lambda item: -item[1])[:4]
        items = ", ".join(f"{item} {nbytes / GIB:.1f}" for item, nbytes in largest)
        reasons.append(
            f"{name} needs {_gib(least_device.device_bytes)} of device memory at {job.batch.rows} x "
            f"{job.batch.length} tokens a micro-batch ({items}), but {_gib(device)} of {_gib(hardware.gpu_memory)} may "
            "be used"
        )
    if not reasons:
        reasons.append(
            f"{name} needs {_gib(least_device.host_bytes)} of host memory with activations on the host "
            f"({_gib(host)} may be used), or {_gib(least_host.device_bytes)} of device memory with them there "
            f"({_gib(device)} may be used)"
        )
    options = list(_what_fits(shape, job, hardware, smallest))
    return "; ".join(reasons) + (f"; what would fit: {'; '.join(options)}" if options else "")


NARROWER = (("bf16_split", "bf16"), ("bf16_split", "int8"), ("bf16", "bf16"), ("bf16", "int8"))


def _what_fits(shape: ModelShape, job: Job, hardware: Hardware, smallest: list[Memory]) -> Iterator[str]:
    """One change each; two together where no one helps."""
    formats = [TileFormat(*pair) for pair in NARROWER]
    formats = [narrower for narrower in formats if _tile(shape, narrower) < _tile(shape, job.tile_format)]
    batches = [batch for batch in job.batch.splits() if batch.rows < job.batch.rows]
    batches += [replace(batches[-1] if batches else job.batch, length=n) for n in _shorter(job.batch.length)]
    smaller = next((b for b in batches if _anything_fits(shape, replace(job, batch=b), hardware)), None)
    if smaller is not None:
        yield _named(shape, job, batch=smaller)
    leaner = next((f for f in formats if _anything_fits(shape, replace(job, tile_format=f), hardware)), None)
    if leaner is not None:
        yield _named(shape, job, tile_format=leaner)
    if smaller is None and leaner is None:
        for leaner, smaller in itertools.product(formats, batches):
            if _anything_fits(shape, replace(job, tile_format=leaner, batch=smaller), hardware):
                yield _named(shape, job, tile_format=leaner, batch=smaller)
                break
    device, host = usable_device(hardware.gpu_memory), usable_host(hardware.host_memory)
    needs_host = [taken.host_bytes for taken in smallest if taken.device_bytes <= device]
    if needs_host:
        yield f"{_up((min(needs_host) + HOST_PROCESS) / GIB)} GiB of host memory"
    needs_device = [taken.device_bytes for taken in smallest if taken.host_bytes <= host]
    if needs_device:
        yield f"a device of {_up((min(needs_device) + CONTEXT) / SHARE / GIB)} GiB"
    if not needs_host and not needs_device:
        least = min(smallest, key=lambda taken: taken.device_bytes)
        yield (
            f"{_up((least.host_bytes + HOST_PROCESS) / GIB)} GiB of host memory with a device of "
            f"{_up((least.device_bytes + CONTEXT) / SHARE / GIB)} GiB"
        )


def _named(shape: ModelShape, job: Job, *, tile_format: TileFormat | None = None, batch: Batch | None = None) -> str:
    parts = []
    if tile_format is not None:
        master = "split" if tile_format.weights == "bf16_split" else "none"
        each = _tile(shape, tile_format) / shape.numel
        parts.append(f"master {master} with {tile_format.moments} moments ({each:.1f} bytes a parameter)")
    if batch is not None:
        rows = f"micro-batches of {batch.rows} {'row' if batch.rows == 1 else 'rows'}"
        parts.append(rows if batch.length == job.batch.length else f"{rows} of {batch.length} tokens")
    return " and ".join(parts)


def _tile(shape: ModelShape, tile_format: TileFormat) -> int:
    return sum(unit.bytes(tile_format).tile for unit in (*shape.blocks, *shape.outside))


def _shorter(length: int) -> Iterator[int]:
    while length > 128:
        length //= 2
        yield length


def _up(gib: float) -> str:
    return f"{int(gib) + 1:,}"


def _gib(nbytes: float) -> str:
    return f"{nbytes / GIB:,.1f} GiB"


def _smallest(shape: ModelShape, job: Job) -> list[Memory]:
    """Of the placements that take least."""
    sizes = Sizes(shape, job)
    orders: tuple[Order, ...] = ("layer-major", "micro-batch-major")
    sides: tuple[Side, ...] = ("device", "host")
    return [
        memory(shape, job, Placement(order=order, blocks=(BlockPlacement(kept_on=side),)), sizes)
        for order, side in itertools.product(orders, sides)
    ]


def _anything_fits(shape: ModelShape, job: Job, hardware: Hardware) -> bool:
    return any(fits(taken, hardware) for taken in _smallest(shape, job))
