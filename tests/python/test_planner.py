"""The planner: pure functions of figures, so nothing here is timed or needs a device."""

from __future__ import annotations

import json
import time
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatrain._native import TileFormat
from megatrain.placement import BlockPlacement, Placement
from megatrain.planner import (
    PRESETS,
    Batch,
    CannotFit,
    Hardware,
    Job,
    ModelShape,
    describe,
    make_plan,
    make_plan_for_tokens,
    predict,
    preset,
)
from megatrain.planner.bounds import tables
from megatrain.planner.hardware import GIB
from megatrain.planner.memory import memory, usable_device, usable_host
from megatrain.planner.search import exhaustive, search
from megatrain.planner.shape import BlockShape, UnitShape
from megatrain.planner.timeline import Steps

H200 = PRESETS["H200"]
SPLIT = TileFormat("bf16_split", "fp32")


def block(index: int, width: int = 3584, inner: int = 18944, heads: int = 3584, shared: int = 512) -> BlockShape:
    """A Llama-like one: attention, then three products."""
    attention = [width * heads, width * shared, width * shared, heads * width]
    products = [*attention, width * inner, width * inner, inner * width]
    return BlockShape(
        name=f"model.layers.{index}",
        parameters=tuple((elements, True) for elements in (*products, heads + 2 * shared, 2 * width)),
        flops=2.0 * sum(products),
        trained_flops=2.0 * sum(products),
        last_flops=2.0 * inner * width,
        attention_width=heads,
        window=0,
        inputs=width,
        everything=4 * width + 2 * heads + 2 * shared + 3 * inner,
        products=2 * heads + 2 * shared + width + 2 * inner,
    )


def model(blocks: int = 28, vocabulary: int = 152064, **sizes: int) -> ModelShape:
    """Of Qwen2.5-7B unless told otherwise."""
    width = sizes.get("width", 3584)
    embedding = UnitShape(name="model.embed_tokens", parameters=((vocabulary * width, True),))
    norm = UnitShape(name="model.norm", parameters=((width, True),))
    head = UnitShape(name="lm_head", parameters=((vocabulary * width, True),))
    return ModelShape(
        name=f"{blocks} blocks",
        blocks=tuple(block(index, **sizes) for index in range(blocks)),
        outside=(embedding, norm, head),
        head=(vocabulary, width),
        head_unit="lm_head",
    )


SEVEN = model()


# held against runs


EMBEDDING = {"model.embed_tokens": "all"}


@dataclass(frozen=True)
class Recorded:
    """A row of benchmarks/results/2026-11-30-h200-placements.md. shape: micro-batches, rows, length. gib: the peak that
    torch reserved. updates: GB/s of the host's in the run. cap: GiB that torch was told to use."""

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
    memory_off: float = 0.05

    @property
    def job(self) -> Job:
        micro_batches, rows, length = self.shape
        batch = Batch(micro_batches=micro_batches, rows=rows, length=length)
        return Job(batch=batch, updates_wait=self.clipping, slots=self.slots)

    @property
    def placement(self) -> Placement:
        return Placement.spread(28, **self.placed)


FOUR, TWO = (4, 16, 1024), (2, 32, 1024)
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
    Recorded("8x8192", "a051481", (4, 2, 8192), dict(resident=8, selected=16, outside=EMBEDDING), 6.062, 131.3, 111.0),
    Recorded("cap80-4", "a051481", FOUR, dict(resident=6, selected=5, outside=EMBEDDING), 5.833, 73.4, 91.0, cap=80),
    # Eight micro-batches' fp32 sums outside the stacks are taken to be there at once; 1.2 GiB of them were not.
    Recorded("cap24-8", "a051481", (8, 8, 1024), dict(inputs_on="host"), 6.837, 15.8, 90.0, cap=24, memory_off=0.08),
    Recorded("best", "ddd203d", TWO, dict(resident=5, selected=21, **ON_HOST), 5.126, 133.7, 116.0),
    Recorded("noclip", "ddd203d", TWO, dict(selected=24, **ON_HOST), 5.062, 132.2, 119.0, clipping=False),
    Recorded("cap80", "ddd203d", TWO, dict(resident=8, selected=6, **ON_HOST), 5.534, 73.6, 111.0, cap=80),
    Recorded("cap24", "ddd203d", FOUR, ON_HOST, 5.947, 23.9, 117.0, cap=24),
    Recorded("base", "ddd203d", TWO, dict(resident=6, selected=16, outside=EMBEDDING), 5.234, 123.8, 127.0),
    Recorded("slot", "ddd203d", TWO, dict(resident=6, selected=16, outside=EMBEDDING), 5.479, 123.5, 125.0, slots=1),
    Recorded("no-resident", "ddd203d", TWO, dict(selected=16), 5.738, 99.5, 121.0),
    Recorded("all-recomputed", "ddd203d", TWO, dict(resident=6, outside=EMBEDDING), 5.667, 51.5, 119.0),
]


@pytest.mark.parametrize("row", RECORDED, ids=[row.name for row in RECORDED])
def test_predictions_hold_against_recorded_steps(row: Recorded) -> None:
    """Qwen2.5-7B on H200s with 16 cores; the mean of the steps after the first ones.

    The H200's figures and four constants in `work.py` and `memory.py` were fitted to short bursts of one layer and to
    the rows of 185cbf9 and 51a8c08; those of the other commits were foreseen, but for what gradients outside the stacks
    take since 4cfde1c. SHELF_EXTRA rests on a row with activations on the host. Updates ran between 88 and 127 GB/s on
    machines of this one kind: with the preset's 113, seconds are off by up to 9 %."""
    measured = replace(H200, update=row.updates * 1e9, update_beside_copies=row.updates * 1e9)
    found = predict(SEVEN, row.job, measured, row.placement)
    assert found.seconds == pytest.approx(row.seconds, rel=0.07)
    assert predict(SEVEN, row.job, H200, row.placement).seconds == pytest.approx(row.seconds, rel=0.09)
    assert found.memory.device_bytes / GIB == pytest.approx(row.gib, rel=row.memory_off)


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


# shapes


def test_a_configuration_gives_the_shape() -> None:
    from transformers import Qwen2Config

    config = Qwen2Config(
        vocab_size=1000,
        hidden_size=64,
        intermediate_size=160,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        tie_word_embeddings=False,
    )
    found = ModelShape.from_config(config)
    assert len(found.blocks) == 3
    assert [unit.name for unit in found.outside] == ["model.embed_tokens", "model.norm", "lm_head"]
    assert (found.head, found.head_unit) == ((1000, 64), "lm_head")
    mine = block(0, width=64, inner=160, heads=64, shared=32)
    first = found.blocks[0]
    assert first.numel == mine.numel
    for name in ("flops", "trained_flops", "last_flops", "attention_width", "inputs", "everything", "products"):
        assert getattr(first, name) == getattr(mine, name), name


def test_a_token_goes_to_few_experts() -> None:
    from transformers import Qwen3MoeConfig

    few, many = (
        ModelShape.from_config(
            Qwen3MoeConfig(
                vocab_size=500,
                hidden_size=64,
                num_hidden_layers=2,
                num_attention_heads=4,
                num_key_value_heads=2,
                head_dim=16,
                moe_intermediate_size=32,
                num_experts=count,
                num_experts_per_tok=2,
            )
        ).blocks[0]
        for count in (4, 16)
    )
    assert many.numel > 2.5 * few.numel
    router = 2.0 * 64 * (16 - 4)
    assert many.flops == pytest.approx(few.flops + router)
    experts = 2 * 3 * 2.0 * 64 * 32
    attention = 4 * 2.0 * 64 * 64 - 2 * 2.0 * 64 * 32
    assert few.flops == pytest.approx(experts + attention + 2.0 * 64 * 4)


def test_windows_and_tied_heads() -> None:
    from transformers import Gemma3TextConfig

    config = Gemma3TextConfig(
        vocab_size=500,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=6,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        sliding_window=32,
    )
    found = ModelShape.from_config(config)
    assert {one.window for one in found.blocks} == {0, 32}
    assert found.blocks[0].attention_flops(1024) == 4.0 * 64 * 32
    assert found.head_unit == found.outside[0].name == "model.embed_tokens"
    assert not Steps(found, Job(), H200).used_last(0)


def test_frozen_parameters_are_neither_updated_nor_differentiated() -> None:
    import torch
    from torch import nn

    module = nn.Module()
    module.layers = nn.ModuleList(nn.Sequential(nn.Linear(32, 64), nn.Linear(64, 32)) for _ in range(2))
    module.layers[0].requires_grad_(False)
    with torch.device("meta"):
        found = ModelShape.from_module(module)
    frozen, trained = found.blocks
    assert (frozen.trained_flops, trained.trained_flops) == (0, trained.flops)
    assert frozen.bytes(SPLIT).update == frozen.bytes(SPLIT).gradients == 0
    assert frozen.bytes(SPLIT).weights > 0


@pytest.mark.parametrize(
    ("weights", "moments", "moved"),
    [("bf16_split", "fp32", 26), ("bf16", "fp32", 22), ("bf16_split", "bf16", 18), ("bf16", "int8", 10.03)],
)
def test_bytes_an_update_moves(weights: str, moments: str, moved: float) -> None:
    one = SEVEN.blocks[0]
    assert one.bytes(TileFormat(weights, moments)).update / one.numel == pytest.approx(moved, rel=1e-3)


# the search


def small(length: int = 1024, **changes: Any) -> tuple[ModelShape, Job]:
    shape = model(blocks=3, vocabulary=32000)
    return shape, Job(**dict(batch=Batch(micro_batches=2, rows=8, length=length)) | changes)


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
    assert found[0].timeline.seconds == pytest.approx(expected.timeline.seconds, rel=1e-3)
    assert found == sorted(found, key=lambda timed: timed.timeline.seconds)


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
    assert after.seconds <= before.seconds * (1 + 2e-4)
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


def test_all_fits_and_nothing_moves() -> None:
    shape = model(blocks=4, vocabulary=32000)
    found = make_plan(shape, Job(batch=Batch(micro_batches=2, rows=4)), H200)
    assert all(found.placement.block(i).resident == "all" for i in range(4))
    assert all(found.placement.block(i).keep == "everything" for i in range(4))
    assert found.timeline.up == found.timeline.down == found.timeline.updates == found.timeline.recompute == 0
    assert found.timeline.stall == pytest.approx(0, abs=1e-9)


# the timeline


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


# refusals


def test_too_little_host_memory_is_refused_with_figures() -> None:
    with pytest.raises(CannotFit) as refused:
        make_plan(SEVEN, Job(batch=Batch(micro_batches=4, rows=4)), replace(H200, host_memory=64 * GIB))
    text = str(refused.value)
    assert "28 blocks needs 99.3 GiB of host memory (14.0 bytes a parameter), but 60.0 GiB of 64.0 GiB" in text
    assert "what would fit: master split with int8 moments (8.0 bytes a parameter); 104 GiB of host memory" in text


def test_too_little_device_memory_is_refused_with_figures() -> None:
    with pytest.raises(CannotFit) as refused:
        make_plan(SEVEN, Job(batch=Batch(rows=64)), replace(PRESETS["RTX 4090"], host_memory=128 * GIB))
    text = str(refused.value)
    assert "of device memory at 64 x 1024 tokens a micro-batch (workspace, head and loss" in text
    assert "what would fit: micro-batches of 32 rows; a device of " in text


def test_what_is_said_to_fit_does() -> None:
    machine = replace(PRESETS["RTX 4090"], host_memory=128 * GIB)
    make_plan(SEVEN, Job(batch=Batch(micro_batches=4, rows=16)), machine)
    narrow = Job(batch=Batch(micro_batches=4, rows=4), tile_format=TileFormat("bf16_split", "int8"))
    make_plan(SEVEN, narrow, replace(H200, host_memory=66 * GIB))
    make_plan(SEVEN, Job(batch=Batch(micro_batches=4, rows=4)), replace(H200, host_memory=104 * GIB))


def test_both_too_small_names_two_changes() -> None:
    with pytest.raises(CannotFit) as refused:
        make_plan(SEVEN, Job(batch=Batch(rows=64)), replace(PRESETS["RTX 4090"], host_memory=64 * GIB))
    text = str(refused.value)
    assert "of host memory (14.0" in text
    assert "of device memory at 64 x 1024" in text
    assert "master split with int8 moments (8.0 bytes a parameter) and micro-batches of " in text


@pytest.mark.parametrize("name", ["rows", "micro_batches", "length"])
def test_batches_are_checked(name: str) -> None:
    with pytest.raises(ValueError, match=f"{name} is 0"):
        Batch(**{name: 0})


def test_hardware_is_checked() -> None:
    with pytest.raises(ValueError, match="update of H200 is 0"):
        replace(H200, update=0.0)
    with pytest.raises(ValueError, match='"TPU" is no preset; there are presets of H200, H100'):
        preset("TPU")


def test_presets_are_found_by_name() -> None:
    assert preset("rtx4090") is preset("4090") is PRESETS["RTX 4090"]


# the batch, the words, the JSON


def test_the_micro_batch_is_chosen_where_only_tokens_are_given() -> None:
    machine = replace(PRESETS["RTX 4090"], host_memory=128 * GIB)
    job = Job(batch=Batch(micro_batches=64, rows=1))
    found = make_plan_for_tokens(SEVEN, job, machine)
    assert found.job.batch.tokens == 65536
    for rows in (1, 8):
        other = make_plan(SEVEN, Job(batch=Batch(micro_batches=64 // rows, rows=rows)), machine)
        assert found.seconds <= other.seconds
    with pytest.raises(CannotFit):
        make_plan_for_tokens(SEVEN, job, replace(machine, gpu_memory=6 * GIB))


def test_words_and_json_say_the_same() -> None:
    found = make_plan(SEVEN, Job(batch=Batch(micro_batches=4, rows=16)), H200)
    words = "\n".join(describe(found))
    for part in ("7.62B parameters in 28 blocks", "4 x 16 x 1024 = 65,536 tokens", "bound by computation", "next best"):
        assert part in words
    values = json.loads(json.dumps(found.to_json()))
    assert values["predicted"]["seconds"] == found.seconds
    assert sum(values["predicted"]["device"].values()) == found.memory.device_bytes
    assert values["hardware"]["name"] == "H200"
    first = values["placement"]["blocks"][0]
    assert (first["first"], first["resident"]) == (0, "all")
    assert values["placement"]["blocks"][-1]["last"] == 27
    assert len(found.alternatives) == 3
    assert all(other.seconds >= found.seconds for other in found.alternatives)
    assert found.default_seconds is not None and found.default_seconds > found.seconds


def test_memory_counts_the_tiles_to_the_byte() -> None:
    taken = memory(SEVEN, Job(), Placement())
    tiles = sum(unit.bytes(SPLIT).tile for unit in (*SEVEN.blocks, *SEVEN.outside))
    assert taken.host == {"tiles": tiles}
    assert taken.device["slots"] == 2 * SEVEN.blocks[0].bytes(SPLIT).weights
