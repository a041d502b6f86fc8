"""The search for a placement: bounds, comparison with trying all, monotony."""

from __future__ import annotations

import time
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from planned_shapes import H200, SEVEN, model, small

from megatrain.planner import PRESETS, Batch, CannotFit, Hardware, Job, make_plan
from megatrain.planner.bounds import tables
from megatrain.planner.hardware import GIB
from megatrain.planner.memory import memory, usable_device, usable_host
from megatrain.planner.search import AT_REST, exhaustive, search
from megatrain.planner.timeline import Steps

SLOW_HOST = replace(H200, name="slow host", update=20e9, update_beside_copies=15e9)
SLOW_LINK = replace(PRESETS["RTX 4090"], name="slow link", up_together=4e9, up_beside_updates=3e9)


@pytest.mark.parametrize("gib", [10, 17, 40])
@pytest.mark.parametrize("hardware", [H200, SLOW_HOST, SLOW_LINK], ids=lambda hardware: hardware.name)
@pytest.mark.parametrize("waits", [True, False], ids=["clipping", "free"])
def test_nothing_in_the_family_is_faster(gib: int, hardware: Hardware, waits: bool) -> None:
    shape, job = small(updates_wait=waits)
    steps = Steps(shape, job, hardware)
    found = search(steps, gib * GIB, 64 * GIB)
    expected = exhaustive(steps, gib * GIB, 64 * GIB)
    if expected is None:
        assert found == []
        return
    ordered = sorted(found, key=lambda timed: timed.timeline.seconds)
    assert ordered[0].timeline.seconds == pytest.approx(expected.timeline.seconds, rel=1e-3)
    if found[0] is not ordered[0]:
        assert found[0].choice.resident == len(shape.blocks)
        assert found[0].timeline.seconds <= ordered[0].timeline.seconds * (1 + AT_REST)
        found, ordered = found[1:], [timed for timed in ordered if timed is not found[0]]
    assert found == ordered


@pytest.mark.parametrize("hardware", [H200, SLOW_HOST, SLOW_LINK], ids=lambda hardware: hardware.name)
@pytest.mark.parametrize("gib", [14, 22, 60])
def test_closed_forms_are_bounds(gib: int, hardware: Hardware) -> None:
    """Every placement that the search calls possible fits, none is much faster than its bound, and one `selected` more
    would not have fitted."""
    shape = model(blocks=4, vocabulary=32000)
    steps = Steps(shape, Job(batch=Batch(micro_batches=3, rows=8)), hardware)
    device, host = usable_device(gib * GIB), usable_host(64 * GIB)
    seen = 0
    for table in tables(steps, device, host):
        for place in range(0, table.bounds.size, 3):
            if not np.isfinite(table.bounds.flat[place]):
                continue
            seen += 1
            choice = table.choice(place)
            placement = choice.placement(4)
            taken = memory(shape, steps.job, placement, steps.sizes)
            assert taken.device_bytes <= device and taken.host_bytes <= host
            assert steps.run(placement).seconds >= table.bounds.flat[place] * (1 - 1e-3)
            if choice.everything + choice.selected + choice.shelved < 4:
                inputs = table.base.other_inputs_on
                more = replace(choice, selected=choice.selected + 1, other_inputs_on=inputs).placement(4)
                assert memory(shape, steps.job, more, steps.sizes).device_bytes > device
    assert seen > 10 or gib == 14


@settings(deadline=None, max_examples=40)
@given(
    gpu=st.integers(8, 140),
    more_gpu=st.integers(0, 60),
    host=st.integers(20, 200),
    more_host=st.integers(0, 200),
    rows=st.sampled_from([1, 4, 16]),
    micro_batches=st.sampled_from([1, 4]),
    name=st.sampled_from(sorted(PRESETS)),
)
def test_more_memory_is_never_slower(
    gpu: int, more_gpu: int, host: int, more_host: int, rows: int, micro_batches: int, name: str
) -> None:
    shape = model(blocks=6)
    job = Job(batch=Batch(micro_batches=micro_batches, rows=rows))
    less = replace(PRESETS[name], gpu_memory=gpu * GIB, host_memory=host * GIB)
    more = replace(less, gpu_memory=(gpu + more_gpu) * GIB, host_memory=(host + more_host) * GIB)
    try:
        before = make_plan(shape, job, less)
    except CannotFit:
        return
    after = make_plan(shape, job, more)
    assert after.seconds <= before.seconds * (1 + 2e-4 + AT_REST)
    for found, hardware in ((before, less), (after, more)):
        assert found.memory.device_bytes <= usable_device(hardware.gpu_memory)
        assert found.memory.host_bytes <= usable_host(hardware.host_memory)


@settings(deadline=None, max_examples=30)
@given(faster=st.sampled_from(["bf16_flops", "gpu_bandwidth", "up_together", "down_together", "update"]))
def test_a_faster_machine_is_never_slower(faster: str) -> None:
    job = Job(batch=Batch(micro_batches=4, rows=4))
    better = replace(PRESETS["RTX 4090"], **{faster: 2 * getattr(PRESETS["RTX 4090"], faster)}, host_memory=256 * GIB)
    base = replace(PRESETS["RTX 4090"], host_memory=256 * GIB)
    assert make_plan(SEVEN, job, better).seconds <= make_plan(SEVEN, job, base).seconds * (1 + 1e-3)


def test_it_is_deterministic_and_fast() -> None:
    shape = model(blocks=100, width=2048, inner=8192, heads=2048)
    job = Job(batch=Batch(micro_batches=4, rows=16))
    hardware = replace(H200, host_memory=512 * GIB)
    started = time.process_time()
    first = make_plan(shape, job, hardware)
    took = time.process_time() - started
    assert make_plan(shape, job, hardware) == first
    assert took < 10  # about 1 s; a search that has lost its bounds takes minutes


def test_a_step_that_is_bound_by_computation_keeps_the_order_that_was_best_by_hand() -> None:
    found = make_plan(SEVEN, Job(batch=Batch(micro_batches=4, rows=16)), H200)
    assert found.placement.order == "layer-major"
    assert found.timeline.binding == "computation"


def test_where_all_state_fits_none_of_it_waits_on_the_host() -> None:
    """Though updates on the host would cost the device a little less."""
    shape = model(blocks=24, width=896, inner=4864, heads=896, shared=128)
    job = Job(batch=Batch(micro_batches=4, rows=16))
    found = make_plan(shape, job, H200)
    assert all(found.placement.block(i).resident == "all" for i in range(24))
    assert set(found.placement.outside) == {unit.name for unit in shape.outside}
    assert found.timeline.updates == found.timeline.up == 0
    assert min(other.seconds for other in found.alternatives) < found.seconds


def test_all_fits_and_nothing_moves() -> None:
    shape = model(blocks=4, vocabulary=32000)
    found = make_plan(shape, Job(batch=Batch(micro_batches=2, rows=4)), H200)
    assert all(found.placement.block(i).resident == "all" for i in range(4))
    assert all(found.placement.block(i).keep == "everything" for i in range(4))
    assert found.timeline.up == found.timeline.down == found.timeline.updates == found.timeline.recompute == 0
    assert found.timeline.stall == pytest.approx(0, abs=1e-9)
