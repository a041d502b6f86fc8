"""The planner: from a model's shape, what is asked of a step and a machine's figures to a placement with its predicted
time and memory, or to a refusal that says what would fit. Pure: nothing is allocated, measured or looked up."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from typing import Any

from megatrain.placement import BlockPlacement, Placement
from megatrain.planner.hardware import Hardware
from megatrain.planner.job import Batch, Job
from megatrain.planner.memory import Memory, fits, memory
from megatrain.planner.refusal import refusal
from megatrain.planner.search import search
from megatrain.planner.shape import ModelShape
from megatrain.planner.timeline import Steps, Timeline
from megatrain.planner.work import kept_side

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
            "placement": placement_json(self.placement, len(self.shape.blocks)),
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
                    "placement": placement_json(other.placement, len(self.shape.blocks)),
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
    there_is_room = fits(default_taken, hardware)
    return Plan(
        shape=shape,
        job=job,
        hardware=hardware,
        placement=best.placement,
        timeline=best.timeline,
        memory=taken(best.placement),
        alternatives=others,
        default_seconds=steps.run(default).seconds if there_is_room else None,
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


def placement_json(placement: Placement, blocks: int) -> dict[str, Any]:
    """Plain values; `blocks` is the model's number of blocks."""
    return {
        "order": placement.order,
        "blocks": [
            {
                "first": first,
                "last": last,
                "keep": place.keep,
                "kept_on": kept_side(place),
                "inputs_on": place.inputs_side,
                "resident": place.resident,
            }
            for first, last, place in runs(placement, blocks)
        ],
        "outside": dict(placement.outside),
        "experts": placement.experts,
    }
