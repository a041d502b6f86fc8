"""What a step, an evaluation and the memory look like from outside."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    import os
    from collections.abc import Sequence

    from megatrain._native import TraceSpan


@dataclass(frozen=True, kw_only=True)
class StepReport:
    """One optimizer step. Reading `loss` waits for the device; the other fields are known.

    loss: weighted mean over the micro-batches, sum(w_i * loss_i) / sum(w_i)."""

    step: int
    grad_norm: float | None
    """2-norm of the gradients before clipping; None where neither clipping nor `skip_nonfinite` asked for it."""
    tokens: int
    """Tokens that are not padding."""
    targets: float
    """The sum of the micro-batches' weights."""
    skipped: bool
    """Nothing was updated: the norm was not finite, or there were no targets."""
    seconds: float
    """Wall time of the call; updates may go on after it."""
    wait_copy_seconds: float
    """Of the device's time: waiting for weights and kept activations on their way up."""
    wait_down_seconds: float
    """Of the device's time: waiting for gradients on their way down to free their buffer, and out of work while the
    host waited for activations on theirs. A wait of the host during which the device computes does not count."""
    wait_update_seconds: float
    """Of the device's time: waiting for weights whose update had not ended."""
    loss_tensor: torch.Tensor = field(repr=False)
    """fp64 scalar on the compute device."""

    @property
    def loss(self) -> float:
        return float(self.loss_tensor)


@dataclass(frozen=True, kw_only=True)
class EvaluationReport:
    """loss: weighted mean as in `StepReport`."""

    loss: float
    tokens: int
    targets: float


@dataclass(frozen=True, kw_only=True)
class MemoryReport:
    """Bytes that megatrain itself holds."""

    parameters: int
    host_tiles: int
    host_pinned: int
    host_bytes_per_parameter: float
    host_kept: int
    """Activations that wait on the host, at most so far."""
    device_weights: int
    """Slots of the ring, weights outside the stacks, and blocks of which only the weights are resident."""
    device_resident: int
    """Units that are resident with their optimizer state."""
    largest_tile: int
    notes: tuple[str, ...] = ()

    def __str__(self) -> str:
        gib = 1 << 30
        lines = [
            f"{self.parameters:,} parameters",
            f"host    {self.host_tiles / gib:8.2f} GiB in tiles ({self.host_bytes_per_parameter:.2f} B/parameter), "
            f"{self.host_pinned / gib:.2f} GiB of it pinned; the largest tile {self.largest_tile / gib:.2f} GiB",
            f"device  {self.device_weights / gib:8.2f} GiB of weights, {self.device_resident / gib:.2f} GiB of "
            f"resident units; {self.host_kept / gib:.2f} GiB of activations on the host",
            *self.notes,
        ]
        return "\n".join(lines)


def during_step(spans: Sequence[TraceSpan], step: int) -> list[TraceSpan]:
    """What ran between the step's first computation of a block and that of the next step, updates of the step before
    included; to the end of the step's own spans where there is no next one."""
    starts: dict[int, int] = {}
    for span in spans:
        if span.kind == "compute":
            starts[span.step] = min(span.begin_ns, starts.get(span.step, span.begin_ns))
    if step not in starts:
        return []
    begin = starts[step]
    end = starts.get(step + 1, max(span.end_ns for span in spans if span.step == step))
    return [span for span in spans if span.begin_ns < end and span.end_ns > begin]


LANES = {"compute": 0, "copy_up": 1, "copy_down": 2, "update": 3, "wait": 4, "wait_down": 5}


def write_chrome_trace(spans: Sequence[TraceSpan], names: Sequence[str], path: str | os.PathLike[str]) -> None:
    """The spans as a trace that chrome://tracing and Perfetto open: one lane a kind, time in us from the
    first span."""
    origin = min((span.begin_ns for span in spans), default=0)
    events: list[dict[str, Any]] = [
        {"ph": "M", "pid": 0, "tid": lane, "name": "thread_name", "args": {"name": kind}}
        for kind, lane in LANES.items()
    ]
    for span in spans:
        events.append(
            {
                "ph": "X",
                "pid": 0,
                "tid": LANES[span.kind],
                "name": names[span.tile],
                "cat": span.kind,
                "ts": (span.begin_ns - origin) / 1e3,
                "dur": (span.end_ns - span.begin_ns) / 1e3,
                "args": {"step": span.step, "bytes": span.nbytes, "gate_us": span.gate_ns / 1e3},
            }
        )
    Path(path).write_text(json.dumps({"traceEvents": events, "displayTimeUnit": "ms"}))
