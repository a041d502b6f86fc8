"""What the machine can do, measured, and the number of update threads taken from it."""

import dataclasses

import pytest
import torch

import megatrain
from megatrain import _native, machine
from megatrain._native import HostBackend


@pytest.fixture(scope="module")
def host() -> machine.MachineSpeed:
    return megatrain.machine_speed("cpu")


def test_every_rate_is_measured(host: machine.MachineSpeed) -> None:
    assert min(host.up, host.down, host.up_together, host.down_together) > 1e6
    cores = _native.usable_cores()
    assert host.updates[-1].threads == cores
    assert [row.threads for row in host.updates] == sorted({row.threads for row in host.updates})
    for row in host.updates:
        assert min(row.alone, row.beside_copies, row.up, row.down) > 0


def test_the_recommendation_is_the_fewest_threads_near_the_best_ring(host: machine.MachineSpeed) -> None:
    ring = {row.threads: min(row.up / 4, row.down / 2, row.beside_copies) for row in host.updates}
    good = [threads for threads, rate in ring.items() if rate >= 0.98 * max(ring.values())]
    assert host.threads == min(good)


def test_a_device_is_measured_once(host: machine.MachineSpeed) -> None:
    assert megatrain.machine_speed(HostBackend()) is host
    with pytest.raises(dataclasses.FrozenInstanceError):
        host.threads = 1  # type: ignore[misc]


def test_threads_that_are_named_and_the_host_are_not_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise AssertionError("measured")

    monkeypatch.setattr(machine, "machine_speed", fail)
    assert machine.update_threads(3, HostBackend()) == 3
    assert machine.update_threads(0, HostBackend()) == 0  # TileStore leaves one core


class Cuda:
    name = "cuda"
    device_index = 0


def test_on_cuda_no_number_becomes_the_measured_one(
    host: machine.MachineSpeed, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(machine, "machine_speed", lambda device: dataclasses.replace(host, threads=7))
    assert machine.update_threads(0, Cuda()) == 7  # type: ignore[arg-type]
    assert machine.update_threads(2, Cuda()) == 2  # type: ignore[arg-type]


def test_memory_that_suffices_for_the_model_alone_is_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_: object) -> None:
        raise MemoryError

    monkeypatch.setattr(machine, "machine_speed", refuse)
    assert machine.update_threads(0, Cuda()) == 0  # type: ignore[arg-type]


def test_what_cannot_be_measured_is_refused() -> None:
    memory = torch.empty(1 << 16, dtype=torch.uint8)
    with pytest.raises(ValueError, match="0 parameters"):
        _native.measure_machine(HostBackend(), memory.data_ptr(), memory.numel(), parameters=0)
    with pytest.raises(ValueError, match="device_memory is 0"):
        _native.measure_machine(HostBackend(), 0, memory.numel())
    for seconds in (0.0, float("inf"), float("nan")):
        with pytest.raises(ValueError, match="it takes more than 0 and at most 60"):
            _native.measure_machine(HostBackend(), memory.data_ptr(), memory.numel(), seconds=seconds)
    with pytest.raises(MemoryError, match="are needed"):
        _native.measure_machine(HostBackend(), memory.data_ptr(), memory.numel(), parameters=1 << 45)


def test_a_cache_may_be_named() -> None:
    memory = torch.empty(1 << 16, dtype=torch.uint8)
    small = {"parameters": 10_000, "seconds": 0.005, "rounds": 1}
    measured = _native.measure_machine(
        HostBackend(), memory.data_ptr(), memory.numel(), cache_bytes=1 << 20, **small
    )
    assert all(row.updates_alone > 0 for row in measured.by_threads)
    with pytest.raises(TypeError):
        _native.measure_machine(HostBackend(), memory.data_ptr(), memory.numel(), cache_bytes=-1, **small)
