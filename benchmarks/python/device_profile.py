"""Where the device's time of one step goes: kernels by time, and when the device computed nothing."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch.autograd import DeviceType

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

LONG_IDLE = 1e-3
"""Seconds without a kernel that are worth a line."""


class Kernel(NamedTuple):
    begin: float
    """Seconds since the profile began."""
    end: float
    name: str


class Idle(NamedTuple):
    begin: float
    seconds: float
    before: str
    """The kernel that ended it began with."""
    after: str


@dataclass(frozen=True)
class DeviceProfile:
    wall: float
    """Seconds from the first kernel to the end of the last."""
    busy: float
    """Seconds of these in which at least one kernel ran; copies by the copy engines do not count."""
    by_name: list[tuple[str, float, int]]
    """Name, seconds, calls; most seconds first."""
    idle: list[Idle]
    """In order of time."""

    def __str__(self) -> str:
        lines = [f"device: {self.wall:.4f} s from first to last kernel, {self.busy:.4f} s with one running"]
        lines += [f"  {seconds:8.4f} s {calls:6d} x {name[:90]}" for name, seconds, calls in self.by_name[:30]]
        lines.append(f"idle for more than {LONG_IDLE * 1e3:.0f} ms:")
        lines += [
            f"  at {gap.begin:8.4f} s for {gap.seconds * 1e3:7.2f} ms, after {gap.after[:50]}, before {gap.before[:50]}"
            for gap in self.idle
        ]
        return "\n".join(lines)


def summarize(kernels: Iterable[Kernel]) -> DeviceProfile:
    """ValueError where there is no kernel."""
    ordered = sorted(kernels)
    if not ordered:
        raise ValueError("the profile holds no kernel")
    seconds: dict[str, float] = defaultdict(float)
    calls: dict[str, int] = defaultdict(int)
    idle, busy = [], 0.0
    first = ordered[0]
    until, last = first.begin, first.name
    for kernel in ordered:
        seconds[kernel.name] += kernel.end - kernel.begin
        calls[kernel.name] += 1
        if kernel.begin - until > LONG_IDLE:
            idle.append(Idle(until - first.begin, kernel.begin - until, before=kernel.name, after=last))
        busy += max(0.0, kernel.end - max(kernel.begin, until))
        if kernel.end > until:
            until, last = kernel.end, kernel.name
    by_name = sorted(((name, seconds[name], calls[name]) for name in seconds), key=lambda row: -row[1])
    return DeviceProfile(until - first.begin, busy, by_name, idle)


def profile(run: Callable[[], object]) -> DeviceProfile:
    """`run` queues work on the current CUDA device; its end is waited for."""
    torch.cuda.synchronize()
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profiler:
        run()
        torch.cuda.synchronize()
    events = profiler.events() or []
    return summarize(
        Kernel(event.time_range.start / 1e6, event.time_range.end / 1e6, event.name)
        for event in events
        if event.device_type == DeviceType.CUDA and not event.name.startswith(("Memcpy", "Memset"))
    )
