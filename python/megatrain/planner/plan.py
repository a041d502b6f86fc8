"""The planner: from a model's shape, what is asked of a step and a machine's figures to a placement with its predicted
time and memory, or to a refusal that says what would fit. Pure: nothing is allocated, measured or looked up."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from typing import Any

from megatrain._native import TileFormat
from megatrain.placement import BlockPlacement, Order, Placement, Side
from megatrain.planner.hardware import GIB, Hardware
from megatrain.planner.job import Batch, Job
from megatrain.planner.memory import CONTEXT, HOST_PROCESS, SHARE, Memory, Sizes, memory, usable_device, usable_host
from megatrain.planner.search import search
from megatrain.planner.shape import ModelShape
from megatrain.planner.timeline import Steps, Timeline

ALTERNATIVES = 3


class CannotFit(MemoryError):
    """With what is needed, what there is, and what would fit."""


@dataclass(frozen=True)
class Alternative:
    """Another placement that fits, of another kind."""

    placement: Placement
    seconds: float
    device_bytes: int


@dataclass(frozen=True)
class Plan:
    """timeline, memory: predicted. alternatives: the next best, the fastest first. default_seconds: of the placement in
    which every block streams and keeps its inputs, None where that does not fit."""

    shape: ModelShape
    job: Job
    hardware: Hardware
    placement: Placement
    timeline: Timeline
    memory: Memory
    alternatives: tuple[Alternative, ...] = ()
    default_seconds: float | None = None

    @property
    def seconds(self) -> float:
        return self.timeline.seconds

    @property
    def tokens_per_second(self) -> float:
        return self.job.batch.tokens / self.seconds

    @property
    def tflops(self) -> float:
        """6 * all parameters * tokens / seconds."""
        return 6.0 * self.shape.numel * self.tokens_per_second / 1e12

    def to_json(self) -> dict[str, Any]:
        """Plain values: seconds, bytes, bytes a second."""
        return {
            "model": {"name": self.shape.name, "parameters": self.shape.numel, "blocks": len(self.shape.blocks)},
            "batch": asdict(self.job.batch),
            "precision": {"weights": self.job.tile_format.weights, "moments": self.job.tile_format.moments},
            "updates_wait": self.job.updates_wait,
            "slots": self.job.slots,
            "hardware": asdict(self.hardware),
            "placement": _placement_json(self.placement, len(self.shape.blocks)),
            "predicted": {
                **asdict(self.timeline),
                "stall": self.timeline.stall,
                "binding": self.timeline.binding,
                "tokens_per_second": self.tokens_per_second,
                "tflops": self.tflops,
                "device_bytes": self.memory.device_bytes,
                "device": dict(self.memory.device),
                "host_bytes": self.memory.host_bytes,
                "host": dict(self.memory.host),
            },
            "alternatives": [
                {
                    "placement": _placement_json(other.placement, len(self.shape.blocks)),
                    "seconds": other.seconds,
                    "device_bytes": other.device_bytes,
                }
                for other in self.alternatives
            ],
            "default_seconds": self.default_seconds,
        }


def make_plan(shape: ModelShape, job: Job, hardware: Hardware) -> Plan:
    """The fastest placement that fits; CannotFit if none does."""
    steps = Steps(shape, job, hardware)
    found = search(steps, hardware.gpu_memory, hardware.host_memory)
    if not found:
        raise CannotFit(refusal(shape, job, hardware))
    best = found[0]

    def taken(placement: Placement) -> Memory:
        return memory(shape, job, placement, steps.sizes)

    others = tuple(
        Alternative(other.placement, other.timeline.seconds, taken(other.placement).device_bytes)
        for other in found[1 : 1 + ALTERNATIVES]
    )
    default = Placement()
    default_taken = taken(default)
    fits = _fits(default_taken, hardware)
    return Plan(
        shape=shape,
        job=job,
        hardware=hardware,
        placement=best.placement,
        timeline=best.timeline,
        memory=taken(best.placement),
        alternatives=others,
        default_seconds=steps.run(default).seconds if fits else None,
    )


def make_plan_for_tokens(shape: ModelShape, job: Job, hardware: Hardware) -> Plan:
    """The same with the rows of `job.batch` in micro-batches of whichever size is fastest."""
    plans = []
    for batch in _sizes_to_try(job.batch):
        try:
            plans.append(make_plan(shape, replace(job, batch=batch), hardware))
        except CannotFit:
            continue
    if not plans:
        raise CannotFit(refusal(shape, replace(job, batch=job.batch.splits()[-1]), hardware))
    return min(plans, key=lambda plan: plan.seconds)


MOST_MICRO_TOKENS = 65536
LEAST_MICRO_TOKENS = 512


def _sizes_to_try(batch: Batch) -> list[Batch]:
    """Halved each time: the time between two of them differs little."""
    tried: list[Batch] = []
    for split in batch.splits():
        within = LEAST_MICRO_TOKENS <= split.micro_tokens <= MOST_MICRO_TOKENS or split.rows == 1
        if within and (not tried or split.rows * 2 <= tried[-1].rows):
            tried.append(split)
    return tried or [batch]


def predict(shape: ModelShape, job: Job, hardware: Hardware, placement: Placement) -> Plan:
    """Of a placement that was made by hand, whether it fits or not."""
    steps = Steps(shape, job, hardware)
    return Plan(shape, job, hardware, placement, steps.run(placement), memory(shape, job, placement, steps.sizes))


# what cannot fit


def _fits(taken: Memory, hardware: Hardware) -> bool:
    device_fits = taken.device_bytes <= usable_device(hardware.gpu_memory)
    return device_fits and taken.host_bytes <= usable_host(hardware.host_memory)


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
    return any(_fits(taken, hardware) for taken in _smallest(shape, job))


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


# in words and in JSON


def runs(placement: Placement, blocks: int) -> list[tuple[int, int, BlockPlacement]]:
    """(first, last, placement) of neighbours that are placed alike."""
    found: list[tuple[int, int, BlockPlacement]] = []
    for index in range(blocks):
        place = placement.block(index)
        if found and found[-1][2] == place:
            found[-1] = (found[-1][0], index, place)
        else:
            found.append((index, index, place))
    return found


def _placement_json(placement: Placement, blocks: int) -> dict[str, Any]:
    return {
        "order": placement.order,
        "blocks": [
            {"first": first, "last": last, "keep": place.keep, "kept_on": place.kept_on, "resident": place.resident}
            for first, last, place in runs(placement, blocks)
        ],
        "outside": dict(placement.outside),
    }
