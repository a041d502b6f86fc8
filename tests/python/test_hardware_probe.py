"""The planner's figures of this machine: what is measured, how it is counted, and the memory that is there."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

import megatrain
from megatrain import compute_speed, hardware_probe
from megatrain.compute_speed import ROWS, ProbeSizes
from megatrain.hardware_probe import FreeMemory, hardware_of
from megatrain.machine import MachineSpeed, UpdateSpeed
from megatrain.planner.examples import examples
from megatrain.planner.work import BACKWARD_PRODUCTS

GIB = 1 << 30
TINY = ProbeSizes(
    product=(8, 16, 32), fp32_product=(4, 8, 16), heads=2, length=16, head_size=8, elements=64,
    warm_up_seconds=0.0, product_seconds=0.0, other_seconds=0.0,
)  # fmt: skip
SPEED = MachineSpeed(
    up=55e9,
    down=54e9,
    up_together=50e9,
    down_together=49e9,
    updates=(
        UpdateSpeed(threads=8, alone=3e9, beside_copies=2e9, up=45e9, down=46e9),
        UpdateSpeed(threads=15, alone=4e9, beside_copies=3e9, up=36e9, down=37e9),
    ),
    threads=15,
)
COMPUTE = compute_speed.ComputeSpeed(
    bf16_flops=750e12, fp32_flops=50e12, attention_flops=540e12, gpu_bandwidth=4e12
)


def test_work_is_counted_as_the_planner_counts_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each operation takes one second, a pass over memory a sixteenth."""
    outputs: list[torch.Tensor] = []

    def counted(operation: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> torch.Tensor:
            outputs.append(operation(*args, **kwargs))
            return outputs[-1]

        return call

    def repeated(work: Any, device: torch.device) -> Any:
        def repeat(seconds: float) -> float:
            before = len(outputs)
            work()
            return sum(1 / 16 if output.shape == (TINY.elements,) else 1.0 for output in outputs[before:])

        return repeat

    monkeypatch.setattr(compute_speed, "_repeated", repeated)
    for module, name in ((torch, "mm"), (torch, "add"), (torch.nn.functional, "scaled_dot_product_attention")):
        monkeypatch.setattr(module, name, counted(getattr(module, name)))
    found = compute_speed.compute_speed(torch.device("cpu"), TINY)
    # A forward's product and the two of its backward, in three seconds, as the planner shares them out.
    forward_seconds = 3 / (1 + 2 / BACKWARD_PRODUCTS)
    assert found.bf16_flops == pytest.approx(2 * 8 * 16 * 32 / forward_seconds)
    assert found.fp32_flops == pytest.approx(2 * 4 * 8 * 16 / forward_seconds)
    assert found.gpu_bandwidth == 2 * 64 * 2 * 16
    block = examples()[0].blocks[0]
    per_width = block.attention_flops(TINY.length) / block.attention_width
    assert found.attention_flops == per_width * TINY.heads * TINY.head_size * ROWS * TINY.length
    shapes = {tuple(output.shape): output.dtype for output in outputs}
    assert all(shapes[shape] == torch.bfloat16 for shape in ((8, 32), (8, 16), (32, 16), (64,), (ROWS, 2, 16, 8)))
    assert shapes[4, 16] == torch.float32
    assert all(bool(torch.isfinite(output).all()) and float(output.abs().max()) > 0 for output in outputs)


def test_work_is_repeated_until_the_time_is_up(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = SimpleNamespace(seconds=0.0, done=0)
    monkeypatch.setattr(compute_speed.time, "perf_counter", lambda: clock.seconds)

    def work() -> None:
        clock.done += 1
        clock.seconds += 0.25

    repeat = compute_speed._repeated(work, torch.device("cpu"))
    assert (repeat(0.0), clock.done) == (0.25, 1)
    clock.seconds = 0.0
    assert repeat(5.0) == 0.25
    assert clock.seconds == pytest.approx(5.0, abs=0.25)


def test_each_figure_comes_from_its_measurement() -> None:
    found = hardware_of("card", SPEED, COMPUTE, FreeMemory(device=100 * GIB, host=200 * GIB))
    assert (found.name, found.gpu_memory, found.host_memory) == ("card", 100 * GIB, 200 * GIB)
    assert (found.up, found.down, found.up_together, found.down_together) == (55e9, 54e9, 50e9, 49e9)
    # With the recommended threads, 26 bytes a parameter.
    assert found.update == pytest.approx(4e9 * 26)
    assert found.update_beside_copies == pytest.approx(3e9 * 26)
    assert found.up_beside_updates == 36e9
    assert (found.bf16_flops, found.fp32_flops) == (750e12, 50e12)
    assert (found.attention_flops, found.gpu_bandwidth) == (540e12, 4e12)


@pytest.mark.parametrize(
    ("free", "held", "fraction", "expected"),
    [(139, 0, 1.0, 140), (39, 100, 1.0, 140), (79, 0, 1.0, 80), (139, 0, 0.25, 36)],
    ids=["idle", "held by this process", "held by another", "torch is capped"],
)
def test_memory_that_others_hold_is_left_out(
    free: int, held: int, fraction: float, expected: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    backend: Any = SimpleNamespace(device_memory=lambda: (free * GIB, 140 * GIB), device_index=0)
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda index: held * GIB)
    monkeypatch.setattr(torch.cuda, "get_per_process_memory_fraction", lambda index: fraction)
    found = hardware_probe.free_memory(backend)
    assert found.device == expected * GIB
    assert found.host == pytest.approx(megatrain._native.host_memory_limit()[0], rel=0.2)


def test_a_machine_without_a_gpu_has_presets() -> None:
    with pytest.raises(ValueError, match="no GPU here to measure; name a preset"):
        megatrain.measured_hardware("cpu")


@pytest.mark.gpu
def test_this_machine_is_measured_once() -> None:
    if megatrain._native.cuda_device_count() == 0:
        pytest.skip(f"no GPU: {megatrain._native.cuda_unavailable_reason()}")
    first, second = megatrain.measured_hardware(), megatrain.measured_hardware()
    assert (first.bf16_flops, first.update) == (second.bf16_flops, second.update)
    assert first.bf16_flops > first.fp32_flops > 0
    assert first.gpu_memory <= torch.cuda.get_device_properties(0).total_memory
