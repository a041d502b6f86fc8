"""This machine as the planner sees it: a probe of about two seconds, and the memory that is there now."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from megatrain._native import TileFormat, host_memory_limit
from megatrain.compute_speed import ComputeSpeed, compute_speed
from megatrain.machine import machine_speed
from megatrain.planner.hardware import Hardware
from megatrain.planner.memory import CONTEXT
from megatrain.planner.shape import UnitShape
from megatrain.settings import resolve_backend

if TYPE_CHECKING:
    from megatrain._native import Backend, CudaBackend, HostBackend
    from megatrain.machine import MachineSpeed


@dataclass(frozen=True, kw_only=True)
class FreeMemory:
    """Bytes. device: of its memory what other processes do not use, and no more than torch was told to use; host: what
    may still be allocated."""

    device: int
    host: int


def measured_hardware(device: str | torch.device | HostBackend | CudaBackend = "auto") -> Hardware:
    """Measured in about two seconds, once a process and device; the memory is looked up at each call.

    Takes 0.5 to 4.5 GiB of host memory (machine_speed says what decides) and 0.4 GiB of device memory meanwhile;
    MemoryError or torch.OutOfMemoryError where there is not enough. ValueError where there is no CUDA device. Other
    work on the machine at that time is measured too."""
    backend = resolve_backend(device)
    if backend.name != "cuda":
        raise ValueError("there is no GPU here to measure; name a preset of megatrain.planner")
    on = torch.device("cuda", backend.device_index)
    compute = _compute_speed(backend.device_index)
    return hardware_of(torch.cuda.get_device_name(on), machine_speed(backend), compute, free_memory(backend))


@functools.cache
def _compute_speed(device_index: int) -> ComputeSpeed:
    on = torch.device("cuda", device_index)
    found = compute_speed(on)
    with torch.cuda.device(on):
        torch.cuda.empty_cache()
    return found


def hardware_of(name: str, speed: MachineSpeed, compute: ComputeSpeed, memory: FreeMemory) -> Hardware:
    """Updates run with the recommended number of threads."""
    row = next(row for row in speed.updates if row.threads == speed.threads)
    parameters = 1 << 20
    moved = UnitShape(name="", parameters=((parameters, True),)).bytes(TileFormat("bf16_split", "fp32")).update
    each = moved / parameters
    return Hardware(
        name=name,
        gpu_memory=memory.device,
        bf16_flops=compute.bf16_flops,
        attention_flops=compute.attention_flops,
        fp32_flops=compute.fp32_flops,
        gpu_bandwidth=compute.gpu_bandwidth,
        up=speed.up,
        down=speed.down,
        up_together=speed.up_together,
        down_together=speed.down_together,
        up_beside_updates=row.up,
        update=row.alone * each,
        update_beside_copies=row.beside_copies * each,
        host_memory=memory.host,
    )


def free_memory(backend: Backend) -> FreeMemory:
    """Of a CUDA device and its host, now."""
    free, total = backend.device_memory()
    held = torch.cuda.memory_reserved(backend.device_index)
    others = max(0, total - free - held - CONTEXT)
    # What torch was told to use does not hold its context.
    allowed = torch.cuda.get_per_process_memory_fraction(backend.device_index) * total + CONTEXT
    return FreeMemory(device=int(min(total - others, allowed)), host=host_memory_limit()[0])
