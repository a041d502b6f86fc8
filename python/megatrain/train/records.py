"""What a run writes of its plan and of what came of it: plan.json before the first step, achieved.json after it."""

from __future__ import annotations

from pathlib import Path
from typing import Self

from pydantic import BaseModel, ConfigDict

from megatrain.placement import ExpertsWay, Keep, Order, Residence, Side
from megatrain.planner import Hardware

PLAN, ACHIEVED, TRACE = "plan.json", "achieved.json", "trace.json"


class Record(BaseModel):
    """Bytes, seconds, bytes a second."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    def write(self, path: Path) -> None:
        """There whole or not at all."""
        partial = path.with_name(f".{path.name}-partial")
        partial.write_text(self.model_dump_json(indent=2) + "\n", encoding="utf-8")
        partial.replace(path)

    @classmethod
    def read(cls, path: Path) -> Self:
        """ValueError for what is not such a file, OSError where it cannot be read."""
        return cls.model_validate_json(path.read_text(encoding="utf-8"))


class ModelRecord(Record):
    name: str
    parameters: int
    blocks: int


class BatchRecord(Record):
    micro_batches: int
    rows: int
    length: int


class PrecisionRecord(Record):
    weights: str
    moments: str


class BlocksRecord(Record):
    """Neighbours that are placed alike."""

    first: int
    last: int
    keep: Keep | tuple[Keep, ...]
    kept_on: Side
    inputs_on: Side
    resident: Residence


class PlacementRecord(Record):
    order: Order
    blocks: list[BlocksRecord]
    outside: dict[str, Residence]
    experts: ExpertsWay = "auto"
    """Files from before there was a choice do not say."""


class Predicted(Record):
    """Of a step in the long run; see `megatrain.planner.Timeline` and `Memory`."""

    seconds: float
    compute: float
    recompute: float
    up: float
    down: float
    updates: float
    memory_traffic: float
    stall: float
    binding: str
    tokens_per_second: float
    tflops: float
    device_bytes: int
    device: dict[str, int]
    host_bytes: int
    host: dict[str, int]


class AlternativeRecord(Record):
    placement: PlacementRecord
    seconds: float
    device_bytes: int


class PlanRecord(Record):
    """What `megatrain.planner.Plan.to_json` gives."""

    model: ModelRecord
    batch: BatchRecord
    precision: PrecisionRecord
    updates_wait: bool
    slots: int
    hardware: Hardware
    placement: PlacementRecord
    predicted: Predicted
    alternatives: list[AlternativeRecord]
    default_seconds: float | None


class PlanFile(Record):
    """plan: None where nothing was planned, for the reason in `unplanned`; placement: the one in use."""

    plan: PlanRecord | None
    unplanned: str
    batch: BatchRecord
    placement: PlacementRecord


class AchievedFile(Record):
    """Means of the run's steps after its first, or of that one where there is no other."""

    through_step: int
    steps: int
    """That were counted."""
    seconds: float
    """Of a step."""
    tokens_per_second: float
    """That are not padding."""
    wait_copy_seconds: float
    wait_update_seconds: float
    device_bytes: int | None
    """The most that torch held at a time, after the first step; None on a CPU."""
    host_bytes: int
    """Tiles and activations."""
    predicted_seconds: float | None
    predicted_device_bytes: int | None
    predicted_host_bytes: int | None
