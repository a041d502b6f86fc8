"""What the planner predicts, against steps that were run on H200s."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import pytest
from planned_shapes import H200, SEVEN

from megatrain.placement import Placement
from megatrain.planner import Batch, Job, make_plan, predict
from megatrain.planner.hardware import GIB
from megatrain.planner.memory import usable_device
from megatrain.planner.timeline import Steps

EMBEDDING = {"model.embed_tokens": "all"}


@dataclass(frozen=True)
class Recorded:
    """A row of benchmarks/results/2026-11-30-h200-placements.md or of the next day's. shape: micro-batches, rows,
    length. gib: the peak that torch reserved. updates: GB/s of the host's in the run. cap: GiB that torch was told
    to use."""

    name: str
    commit: str
    shape: tuple[int, int, int]
    placed: dict[str, Any]
    seconds: float
    gib: float
    updates: float
    clipping: bool = True
    slots: int = 2
    cap: float = 139.8

    @property
    def job(self) -> Job:
        micro_batches, rows, length = self.shape
        batch = Batch(micro_batches=micro_batches, rows=rows, length=length)
        return Job(batch=batch, updates_wait=self.clipping, slots=self.slots)

    @property
    def placement(self) -> Placement:
        return Placement.spread(28, **self.placed)


FOUR, TWO, LONG = (4, 16, 1024), (2, 32, 1024), (4, 2, 8192)
ON_HOST: dict[str, Any] = dict(inputs_on="host", outside=EMBEDDING)
RECORDED = [
    Recorded("streamed", "185cbf9", FOUR, {}, 6.076, 26.67, 117.5),
    Recorded("keep8", "185cbf9", FOUR, dict(everything=8), 6.314, 99.93, 88.0),
    Recorded("selected10", "185cbf9", FOUR, dict(selected=10), 6.329, 72.39, 90.2),
    Recorded("res9keep5", "185cbf9", FOUR, dict(resident=9, everything=5, outside="all"), 5.574, 111.57, 104.3),
    Recorded("best4", "51a8c08", FOUR, dict(resident=8, selected=16, outside=EMBEDDING), 5.339, 131.65, 100.8),
    Recorded("best2", "a051481", TWO, dict(resident=7, selected=16, outside=EMBEDDING), 5.227, 126.5, 111.0),
    Recorded("streamed2", "a051481", TWO, dict(selected=20), 5.423, 117.5, 114.0),
    Recorded("streamed-noclip", "a051481", TWO, dict(selected=20), 5.408, 117.9, 107.0, clipping=False),
    Recorded("16k", "a051481", (1, 16, 1024), dict(resident=28, selected=14, outside="all"), 1.358, 124.0, 100.0),
    Recorded("8x8192", "a051481", LONG, dict(resident=8, selected=16, outside=EMBEDDING), 6.062, 131.3, 111.0),
    Recorded("cap80-4", "a051481", FOUR, dict(resident=6, selected=5, outside=EMBEDDING), 5.833, 73.4, 91.0, cap=80),
    Recorded("best", "ddd203d", TWO, dict(resident=5, selected=21, **ON_HOST), 5.126, 133.7, 116.0),
    Recorded("noclip", "ddd203d", TWO, dict(selected=24, **ON_HOST), 5.062, 132.2, 119.0, clipping=False),
    Recorded("cap80", "ddd203d", TWO, dict(resident=8, selected=6, **ON_HOST), 5.534, 73.6, 111.0, cap=80),
    Recorded("base", "ddd203d", TWO, dict(resident=6, selected=16, outside=EMBEDDING), 5.234, 123.8, 127.0),
    Recorded("slot", "ddd203d", TWO, dict(resident=6, selected=16, outside=EMBEDDING), 5.479, 123.5, 125.0, slots=1),
    Recorded("no-resident", "ddd203d", TWO, dict(selected=16), 5.738, 99.5, 121.0),
    Recorded("all-recomputed", "ddd203d", TWO, dict(resident=6, outside=EMBEDDING), 5.667, 51.5, 119.0),
    Recorded("cap24", "f610d60", FOUR, ON_HOST, 6.173, 22.5, 104.0, cap=24),
    Recorded("best6", "f610d60", TWO, dict(resident=6, selected=20, **ON_HOST), 5.624, 130.7, 79.0),
    Recorded("noclip25", "f610d60", TWO, dict(selected=25, **ON_HOST), 5.026, 135.5, 117.0, clipping=False),
    Recorded(
        "by-micro-batch",
        "f610d60",
        TWO,
        dict(order="micro-batch-major", resident=1, everything=8, selected=20, **ON_HOST),
        5.019,
        120.8,
        103.0,
        clipping=False,
    ),
    Recorded(
        "noclip-14-13",
        "78363d0",
        TWO,
        dict(order="micro-batch-major", resident=1, everything=14, selected=13, **ON_HOST),
        4.704,
        132.4,
        108.0,
        clipping=False,
    ),
    Recorded("fast-best6", "78363d0", TWO, dict(resident=6, selected=20, **ON_HOST), 5.067, 130.5, 121.0),
    Recorded("fast-cap80", "78363d0", TWO, dict(resident=5, selected=8, **ON_HOST), 5.359, 75.1, 113.0, cap=80),
    Recorded("fast-8x8192", "78363d0", LONG, dict(resident=2, selected=22, **ON_HOST), 6.012, 130.4, 103.0),
    Recorded("planned", "b514c57", TWO, dict(resident=8, everything=1, selected=17, **ON_HOST), 5.116, 131.8, 105.0),
    Recorded(
        "noclip-planned",
        "b514c57",
        TWO,
        dict(order="micro-batch-major", resident=2, everything=13, selected=15, **ON_HOST),
        4.823,
        135.5,
        106.0,
        clipping=False,
    ),
    Recorded("cap24-planned", "b514c57", FOUR, ON_HOST, 6.025, 22.1, 107.0, cap=24),
    Recorded(
        "cap80-planned",
        "b514c57",
        TWO,
        dict(resident=8, everything=1, selected=5, **ON_HOST),
        5.468,
        76.0,
        100.0,
        cap=80,
    ),
    Recorded("8x8192-planned", "b514c57", LONG, dict(resident=4, selected=21, **ON_HOST), 5.924, 130.3, 110.0),
]


@pytest.mark.parametrize("row", RECORDED, ids=[row.name for row in RECORDED])
def test_predictions_hold_against_recorded_steps(row: Recorded) -> None:
    """Qwen2.5-7B on H200s with 16 cores; the mean of the steps after the first ones.

    The H200's figures and constants in `work.py` and `memory.py` were fitted to short bursts of one layer and to
    the rows of 185cbf9 and 51a8c08; those of the other commits were foreseen, but for what gradients outside the stacks
    take since 4cfde1c. Updates ran between 88 and 127 GB/s on
    machines of this one kind: with the preset's 113, seconds are off by up to 9 %."""
    measured = replace(H200, update=row.updates * 1e9, update_beside_copies=row.updates * 1e9)
    found = predict(SEVEN, row.job, measured, row.placement)
    assert found.seconds == pytest.approx(row.seconds, rel=0.07)
    assert predict(SEVEN, row.job, H200, row.placement).seconds == pytest.approx(row.seconds, rel=0.09)
    assert found.memory.device_bytes / GIB == pytest.approx(row.gib, rel=0.05)


@pytest.mark.parametrize("row", RECORDED[4:], ids=[row.name for row in RECORDED[4:]])
def test_what_is_planned_is_as_good_as_what_was_found_by_hand(row: Recorded) -> None:
    """By the planner's own predictions, in the device memory of the run by hand; where that took what the planner
    leaves free, within 2 %."""
    hardware = replace(H200, gpu_memory=int(row.cap * GIB), update=row.updates * 1e9)
    by_hand = predict(SEVEN, row.job, hardware, row.placement)
    fits = by_hand.memory.device_bytes <= usable_device(hardware.gpu_memory)
    assert make_plan(SEVEN, row.job, hardware).seconds <= by_hand.seconds * (1.0 if fits else 1.02)


def test_a_burst_of_one_layer() -> None:
    """Milliseconds for 16,384 tokens, 6.5 % longer in a whole step than in a burst."""
    work = Steps(SEVEN, Job(batch=Batch(rows=16)), H200).work
    slower = 1.065
    assert work.forward[0] == pytest.approx(11.0e-3 * slower, rel=0.05)
    assert work.forward[0] + work.backward[0] == pytest.approx(36.5e-3 * slower, rel=0.05)
    whole = work.forward[0] + work.backward[0] + work.recompute(0, "inputs")
    assert whole == pytest.approx(44.1e-3 * slower, rel=0.05)
    assert work.head == pytest.approx(91e-3 * slower, rel=0.05)


def test_what_is_kept_of_a_token() -> None:
    one = SEVEN.blocks[0]
    assert 2 * one.inputs == pytest.approx(7.2e3, rel=0.01)
    assert 2 * (one.selected - one.inputs) == pytest.approx(75e3, rel=0.02)
    assert 2 * one.everything == pytest.approx(159e3, rel=0.01)
