"""What is asked of the planner: refusals with figures, batches, words and JSON."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from planned_shapes import H200, SEVEN, SPLIT

from megatrain._native import TileFormat
from megatrain.placement import Placement
from megatrain.planner import (
    PRESETS,
    Batch,
    CannotFit,
    Job,
    describe,
    make_plan,
    make_plan_for_tokens,
    preset,
)
from megatrain.planner.hardware import GIB
from megatrain.planner.memory import memory


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
