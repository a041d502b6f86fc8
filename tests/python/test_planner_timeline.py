"""The timeline of a predicted step."""

from __future__ import annotations

import pytest
from planned_shapes import H200, SEVEN

from megatrain.placement import BlockPlacement, Placement
from megatrain.planner import Batch, Job, describe, predict
from megatrain.planner.timeline import Steps


def test_clipping_costs_what_the_next_step_cannot_hide() -> None:
    batch = Batch(micro_batches=4, rows=16)
    waits = predict(SEVEN, Job(batch=batch), H200, Placement())
    free = predict(SEVEN, Job(batch=batch, updates_wait=False), H200, Placement())
    assert waits.seconds > free.seconds
    assert waits.timeline.stall > 0.4
    speed = Steps(SEVEN, waits.job, H200).update_speed(Placement())
    assert waits.timeline.updates == pytest.approx(26 * SEVEN.numel / speed, rel=0.01)


def test_orders_differ_in_what_goes_up() -> None:
    job = Job(batch=Batch(micro_batches=4, rows=16))
    layer, micro = (
        predict(SEVEN, job, H200, Placement(order=order)) for order in ("layer-major", "micro-batch-major")
    )
    assert micro.timeline.up > 3 * layer.timeline.up
    # One micro-batch's inputs, but sums of every gradient.
    assert micro.memory.device["kept activations"] < layer.memory.device["kept activations"] / 3
    assert micro.memory.device["sums of gradients"] > 5 * layer.memory.device["sums of gradients"]


def test_long_runs_of_micro_batches_are_not_simulated_one_by_one() -> None:
    few, many = (
        predict(
            SEVEN, Job(batch=Batch(micro_batches=count, rows=4)), H200, Placement(order="micro-batch-major")
        ).seconds
        for count in (8, 16)
    )
    more = predict(
        SEVEN, Job(batch=Batch(micro_batches=24, rows=4)), H200, Placement(order="micro-batch-major")
    ).seconds
    assert more - many == pytest.approx(many - few, rel=1e-6)


def test_one_slot_hides_no_copy() -> None:
    batch = Batch(micro_batches=1, rows=4)
    one, two = (predict(SEVEN, Job(batch=batch, slots=slots), H200, Placement()) for slots in (1, 2))
    assert one.seconds > two.seconds
    assert one.memory.device["slots"] == pytest.approx(two.memory.device["slots"] / 2)


def test_keeping_a_tuple_counts_each_micro_batch() -> None:
    job = Job(batch=Batch(micro_batches=2, rows=4))
    half = Placement(blocks=(BlockPlacement(keep=("everything", "inputs")),))
    found = [
        predict(SEVEN, job, H200, placement)
        for placement in (Placement(), half, Placement(blocks=(BlockPlacement(keep="everything"),)))
    ]
    recompute = [one.timeline.recompute for one in found]
    assert recompute == pytest.approx([recompute[0], recompute[0] / 2, 0])


def test_inputs_may_wait_on_the_host_beside_what_is_kept_on_the_device() -> None:
    job = Job(batch=Batch(micro_batches=2, rows=32))
    near, far = (
        predict(SEVEN, job, H200, Placement.spread(28, selected=20, inputs_on=side)) for side in ("device", "host")
    )
    inputs = 2 * 3584 * job.batch.tokens
    # That of the first block is the embedding's output, and stays.
    assert far.memory.host["kept activations"] == 27 * inputs
    assert near.memory.device["kept activations"] - far.memory.device["kept activations"] == 27 * inputs
    assert far.timeline.up > near.timeline.up and far.timeline.down > near.timeline.down
    assert far.timeline.recompute == near.timeline.recompute
    words = " ".join(describe(far))
    assert "keep selected outputs on the device, inputs on the host" in words
    assert far.to_json()["placement"]["blocks"][-1]["inputs_on"] == "host"
