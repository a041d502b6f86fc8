"""What this machine's memory and its link to the device can do, measured, and the update threads that follow."""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch

from megatrain import _native
from megatrain._native import CudaBackend, HostBackend
from megatrain.settings import resolve_backend


@dataclass(frozen=True, kw_only=True)
class UpdateSpeed:
    """AdamW in the default format with `threads` threads: parameters/s `alone` and `beside_copies` that go both
    ways without a pause, and bytes/s of those copies, `up` and `down`."""

    threads: int
    alone: float
    beside_copies: float
    up: float
    down: float


@dataclass(frozen=True, kw_only=True)
class MachineSpeed:
    """Bytes/s of copies `up` to the device and `down` from it, one direction at a time and together; updates by
    number of threads; and the recommended number of update threads.

    Of a step without computation the slowest of copies up (4 bytes a parameter), copies down (2) and updates
    decides; recommended are the fewest threads that come within 2 % of the best."""

    up: float
    down: float
    up_together: float
    down_together: float
    updates: tuple[UpdateSpeed, ...]
    threads: int


def machine_speed(device: str | torch.device | HostBackend | CudaBackend = "auto") -> MachineSpeed:
    """Measured in one to two seconds, once a process and device; later calls return the first result.

    All of it goes through host memory, as in training: no cache holds what is updated and copied. For that it takes
    eight times the processors' last-level caches meanwhile, 0.5 to 4.5 GiB (2.8 for 300 MiB of cache), and 32 MiB of
    the device's. Where the host has not twice as much free, it takes about half of what is free, down to 0.5 GiB, and
    figures of updates may be too high; MemoryError where that is not there. Other work on the machine at that time is
    measured too."""
    return _measured(_Place(resolve_backend(device)))


def update_threads(threads: int, backend: HostBackend | CudaBackend) -> int:
    """The setting `threads` as TileStore takes it: 0, on CUDA, becomes the measured number."""
    if threads != 0 or backend.name != "cuda":
        return threads
    try:
        return machine_speed(backend).threads
    except MemoryError:  # what is there may be enough for the model
        return 0


class _Place:
    """A backend that equals every other one of the same device."""

    def __init__(self, backend: HostBackend | CudaBackend) -> None:
        self.backend = backend
        self._key = (backend.name, backend.device_index)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Place) and self._key == other._key

    def __hash__(self) -> int:
        return hash(self._key)


@functools.cache
def _measured(place: _Place) -> MachineSpeed:
    backend = place.backend
    on = torch.device("cuda", backend.device_index) if backend.name == "cuda" else torch.device("cpu")
    memory = torch.empty(_native.PROBE_DEVICE_BYTES, dtype=torch.uint8, device=on)
    if on.type == "cuda":
        torch.cuda.synchronize(on)  # whoever had this memory before may still use it
    measured = _native.measure_machine(backend, memory.data_ptr(), memory.numel())
    return MachineSpeed(
        up=measured.up,
        down=measured.down,
        up_together=measured.up_together,
        down_together=measured.down_together,
        updates=tuple(
            UpdateSpeed(
                threads=row.threads, alone=row.updates_alone, beside_copies=row.updates, up=row.up, down=row.down
            )
            for row in measured.by_threads
        ),
        threads=measured.recommended_threads,
    )
