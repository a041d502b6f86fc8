"""placement="auto": what is planned for the batches that come, what is not, and what happens where it does not fit.

A machine is given as figures (`hardware=`), so that plans are made for the host backend, too."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import families
import pytest
import torch
from families import FAMILIES
from test_equality import HYPERPARAMETERS
from torch import nn

import megatrain
from megatrain import Placement, stacks, step_runner
from megatrain._native import TileFormat
from megatrain.auto_placement import AutoPlacement
from megatrain.planner import PRESETS, Batch, CannotFit, Hardware, Job, ModelShape, make_plan, predict
from megatrain.planner.memory import CONTEXT, HOST_PROCESS, SHARE, usable_device
from megatrain.settings import Settings
from megatrain.units import plan_units

BY_NAME = {family.name: family for family in FAMILIES}
QWEN = BY_NAME["qwen2"]
H200 = PRESETS["H200"]
MIB = 1 << 20
BATCH = Batch(micro_batches=2, rows=2, length=9)
SLOW = replace(
    H200, name="slow", up_together=1e9, down_together=1e9, up_beside_updates=1e9, update=1e9, update_beside_copies=1e9
)
"""So slow beside the GPU that it pays to have all of a small model there."""
BIG = dict(hidden_size=256, intermediate_size=1024, num_hidden_layers=4)


@contextmanager
def streamed(module: nn.Module | None = None, **changes: Any) -> Iterator[megatrain.StreamedModel]:
    settings: dict[str, Any] = dict(
        optimizer=megatrain.AdamW(**HYPERPARAMETERS), max_grad_norm=0.5, dtype=torch.float32, device="cpu"
    )
    model = megatrain.StreamedModel(module or families.build(QWEN), **{**settings, **changes})
    try:
        yield model
    finally:
        model.close()


def micro_batches(step: int, count: int = 2, **sizes: int) -> list[dict[str, torch.Tensor]]:
    return [families.text_batch(10 * step + index, **sizes) for index in range(count)]


def trained(steps: int = 3, **changes: Any) -> tuple[list[float], dict[str, torch.Tensor]]:
    # Tied, head and embedding are summed in another order where micro-batches run one by one.
    with streamed(families.build(QWEN, dropout=True, tie_word_embeddings=False), **changes) as model:
        losses = [model.step(micro_batches(step)).loss for step in range(steps)]
        return losses, {name: value.clone() for name, value in model.state_dict().items()}


def device_of(memory_bytes: float) -> int:
    """A device of which so much may be used."""
    return int((memory_bytes + CONTEXT) / SHARE)


def tight(share: float) -> Hardware:
    """A slow machine with device memory between what `BATCH` takes at least and with all resident, for the model of
    `BIG`."""
    shape = ModelShape.from_module(families.build(QWEN, **BIG))
    job = Job(batch=BATCH, tile_format=TileFormat("fp32", "fp32"))
    least, most = (
        predict(shape, job, SLOW, placement).memory.device_bytes
        for placement in (Placement(), make_plan(shape, job, SLOW).placement)
    )
    assert most > least + 30 * MIB
    return replace(SLOW, gpu_memory=device_of(least + share * (most - least) + MIB))


# what is planned, and when


def test_the_first_step_plans_and_results_are_the_same() -> None:
    expected = trained()
    with streamed(families.build(QWEN, dropout=True, tie_word_embeddings=False), hardware="H200") as model:
        assert (model.plan, model.unplanned) == (None, "no step has been asked for yet")
        assert model.placement == Placement()
        losses = [model.step(micro_batches(step)).loss for step in range(3)]
        plan = model.plan
        assert plan is not None and model.unplanned == ""
        assert plan.job.batch == BATCH
        assert plan.placement is model.placement
        assert model.memory_report().device_resident == plan.memory.device["resident"] > 0
        assert (plan.hardware.name, plan.job.updates_wait, plan.job.slots) == ("H200", True, 2)
        found = {name: value.clone() for name, value in model.state_dict().items()}
    assert losses == expected[0]
    for name, value in expected[1].items():
        assert torch.equal(found[name], value), name


def test_on_the_host_nothing_is_planned_or_measured() -> None:
    with streamed() as model:
        model.step(micro_batches(0))
        assert model.plan is None
        assert model.unplanned.startswith("on the host backend there is nothing to plan for")
        assert model.placement == Placement()
        assert model.plan_for(BATCH) is None


def test_what_is_given_by_hand_stays() -> None:
    by_hand = Placement.spread(4, resident=1, selected=2)
    with streamed(hardware="H200", placement=by_hand, slots=3) as model:
        model.step(micro_batches(0))
        assert model.placement is by_hand
        assert (model.plan, model.unplanned) == (None, "the placement was given by hand")
    with streamed(hardware="H200", slots=3, max_grad_norm=None, skip_nonfinite=False) as model:
        plan = model.plan_for(BATCH)
        assert plan is not None
        assert (plan.job.slots, plan.job.updates_wait, plan.job.tile_format.weights) == (3, False, "fp32")
        assert model.placement == Placement()  # until the step, whose self-check needs the room
        model.step(micro_batches(0))
        assert model.plan is plan and model.placement is plan.placement
        model.place(by_hand)
        model.step(micro_batches(0))
        assert model.placement is by_hand and model.plan is None
        model.place("auto")
        assert model.placement == Placement()
        model.step(micro_batches(0))
        assert model.plan is not None and model.placement is model.plan.placement


@pytest.mark.parametrize("wrong", [None, "planned"])
def test_anything_else_is_no_placement(wrong: Any) -> None:
    with pytest.raises(ValueError, match='it must be a Placement or "auto"'), streamed(placement=wrong):
        pass


def test_limits_are_the_callers() -> None:
    hardware = tight(0.5)
    with streamed(families.build(QWEN, **BIG), hardware=SLOW, device_memory=hardware.gpu_memory) as model:
        model.step(micro_batches(0))
        plan = model.plan
        assert plan is not None
        assert plan.hardware.gpu_memory == hardware.gpu_memory
        assert plan.memory.device_bytes <= usable_device(hardware.gpu_memory)
        assert {model.placement.block(index).resident for index in range(4)} != {"all"}
    with streamed(hardware=H200, host_memory="20GiB") as model:
        plan = model.plan_for(BATCH)
        assert plan is not None and plan.hardware.host_memory == 20 << 30
    with streamed(hardware=H200, host_memory="1GiB") as model:  # the tiles are there: nothing more is
        plan = model.plan_for(BATCH)
        assert plan is not None and plan.hardware.host_memory == model.memory_report().host_tiles + HOST_PROCESS


def test_what_cannot_fit_is_refused_with_figures() -> None:
    with streamed(hardware=replace(H200, gpu_memory=device_of(300 * MIB))) as model:
        with pytest.raises(CannotFit, match=r"of device memory at 2 x 9 tokens a micro-batch"):
            model.step(micro_batches(0))
        assert model.steps == 0


# batches that grow


def test_only_what_outgrows_the_plan_is_planned_for() -> None:
    with streamed(hardware=H200) as model:
        model.step(micro_batches(0, 2, rows=3, length=12))
        first = model.plan
        assert first is not None
        for smaller in (dict(rows=2, length=12), dict(rows=3, length=6), dict(rows=4, length=9)):
            model.step(micro_batches(1, 1, **smaller))
            assert model.plan is first
        model.step(micro_batches(2, 2, rows=3, length=13))
        second = model.plan
        assert second is not None and second is not first
        assert second.job.batch == Batch(micro_batches=2, rows=3, length=13)
        assert second.placement is first.placement  # it still fits
        model.step(micro_batches(3, 4, rows=2, length=20))
        third = model.plan
        assert third is not None
        assert third.job.batch == Batch(micro_batches=4, rows=2, length=20)
        assert model.placement is third.placement is not first.placement


def test_a_batch_that_needs_more_memory_moves_out_what_was_resident() -> None:
    with streamed(families.build(QWEN, **BIG), hardware=tight(0.4)) as model:
        model.step(micro_batches(0))
        before = model.memory_report().device_resident
        assert before > 0
        model.step(micro_batches(1, 2, rows=32, length=9))
        plan = model.plan
        assert plan is not None
        assert plan.memory.device_bytes <= usable_device(tight(0.4).gpu_memory)
        assert model.memory_report().device_resident < before


# memory that does not suffice


@pytest.fixture
def small_device(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Steps run out of memory in their backward, behind their first gradients, while resident tiles take more than
    the bytes in this list; the second number counts how often."""
    limit = [0, 0]
    real = step_runner.StepRunner.train

    def train(self: Any, step: int, active: Any, loss: Any, uses: Any, sink: Any, *rest: Any) -> Any:
        if self._weights.resident_bytes <= limit[0]:
            return real(self, step, active, loss, uses, sink, *rest)
        store, left = sink.store, [2]

        def failing(unit: Any) -> None:
            left[0] -= 1
            if left[0] == 0:
                limit[1] += 1
                raise torch.OutOfMemoryError("CUDA out of memory")
            store(unit)

        sink.store = failing
        try:
            return real(self, step, active, loss, uses, sink, *rest)
        finally:
            del sink.store

    monkeypatch.setattr(step_runner.StepRunner, "train", train)
    return limit


@pytest.mark.parametrize("clip", [0.5, None], ids=["clipping", "updates while gradients land"])
def test_a_plan_that_does_not_fit_gives_way(
    clip: float | None, small_device: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("megatrain.auto_placement.SMALLER", 0.98)  # most of what a small model takes is fixed
    settings = dict(max_grad_norm=clip, skip_nonfinite=clip is not None)
    batches = [micro_batches(step) for step in range(3)]

    def train(**changes: Any) -> tuple[list[float], dict[str, torch.Tensor]]:
        with streamed(families.build(QWEN, dropout=True, **BIG), **settings, **changes) as model:
            losses = [model.step(batch).loss for batch in batches]
            return losses, {name: value.clone() for name, value in model.state_dict().items()}

    small_device[0] = 1 << 40
    expected = train()
    with streamed(families.build(QWEN, **BIG), hardware=tight(1.0), **settings) as model:
        model.step(batches[0])
        small_device[0] = model.memory_report().device_resident - 1
    with pytest.warns(UserWarning, match="ran out of it; going on with one of ") as warned:
        losses, state = train(hardware=tight(1.0))
    own = [str(w.message) for w in warned if "planned placement" in str(w.message)]
    assert len(own) == small_device[1] >= 1
    assert "GiB of device memory by prediction" in own[0]
    assert losses == expected[0]
    for name, value in expected[1].items():
        assert torch.equal(state[name], value), name


def test_a_plan_that_has_run_is_believed(small_device: list[int]) -> None:
    small_device[0] = 1 << 40
    with streamed(hardware=H200) as model:
        model.step(micro_batches(0))
        small_device[0] = 0
        with pytest.raises(torch.OutOfMemoryError):
            model.step(micro_batches(1))
        small_device[0] = 1 << 40
        model.step(micro_batches(1))
        assert model.steps == 2


def test_a_plan_is_believed_once_half_of_its_gradients_are_there() -> None:
    """Without clipping: updates wait so long in its first step, and for no gradient but their own afterwards."""
    events: list[str] = []
    settings: dict[str, Any] = dict(hardware=H200, max_grad_norm=None, skip_nonfinite=False)
    with streamed(families.build(QWEN, **BIG), **settings) as model:
        updates = model._parts.updates
        complete, queue = updates.complete, updates._queue

        def completing(unit: Any) -> None:
            events.append("final")
            complete(unit)

        def queueing(*arguments: Any) -> None:
            events.append("update" if model._auto.proven else "too early")
            queue(*arguments)

        updates.complete, updates._queue = completing, queueing
        model.step(micro_batches(0))
        half = len(model._parts.units.units) // 2
        assert half > 2
        assert events[: half + 2] == ["final"] * half + ["update"] * 2
        assert events.count("update") == len(model._parts.units.units)
        events.clear()
        model.step(micro_batches(1))
        assert events[:4] == ["final", "update"] * 2


def test_what_no_smaller_plan_helps_stays_an_error(small_device: list[int]) -> None:
    small_device[0] = -1
    with streamed(hardware=tight(0.0)) as model, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with pytest.raises(torch.OutOfMemoryError):
            model.step(micro_batches(0))


def made(module: nn.Module, backend: Any, hardware: Hardware | None) -> AutoPlacement:
    found = stacks.candidates(module)
    plan = plan_units(module, found, TileFormat("bf16_split", "fp32"))
    return AutoPlacement(module, plan, found, backend, hardware, compiled=False, by_hand=False)


def test_host_memory_that_runs_out_is_planned_without() -> None:
    auto = made(families.build(QWEN, **BIG), megatrain.HostBackend(), H200)
    auto.plan_for(BATCH, Settings(), 0)
    assert auto.plan is not None
    on_host = Placement(blocks=(megatrain.BlockPlacement(kept_on="host"),))
    auto.plan = predict(auto.plan.shape, auto.plan.job, auto.plan.hardware, on_host)
    assert auto.plan.memory.host["kept activations"] > 0
    with pytest.warns(UserWarning, match="GiB of host memory by prediction"):
        assert auto.go_smaller(megatrain.MemoryLimitError("no more"))
    assert set(auto.plan.memory.host) == {"tiles"}


# what is not planned


class Scorer(nn.Module):
    """Has no output embeddings."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return nn.functional.mse_loss(x, labels)


def test_modules_that_are_not_understood_stream_and_say_why() -> None:
    with streamed(Scorer(), hardware=H200) as model:
        model.step(dict(x=torch.randn(4, 8), labels=torch.randn(4, 8)))
        assert model.plan is None and model.placement == Placement()
        assert "Scorer has no get_output_embeddings() that gives a Linear" in model.unplanned
    with streamed(families.build(BY_NAME["t5"]), hardware=H200) as model:
        assert "has 2 stacks of blocks (encoder.block, decoder.block)" in model.unplanned


def test_a_batch_without_labels_is_not_planned_for() -> None:
    with streamed(hardware=H200) as model:
        ids = families.text_batch(0)["input_ids"]
        model.module.config.return_dict = True
        logits = model(input_ids=ids).logits
        logits.float().pow(2).mean().backward()
        model.optimizer.step()
        assert model.plan is None and model.placement == Placement()
        assert model._auto.batch_of([dict(input_ids=ids)]) is None
        assert model.unplanned == "a batch has no labels, or no input_ids [rows, length], to tell its tokens by"


def test_a_machine_that_cannot_be_measured_streams() -> None:
    class Cuda:
        name, device_index = "cuda", 0

    auto = made(families.build(QWEN), Cuda(), None)
    auto.plan_for(BATCH, Settings(), 0)
    assert auto.plan is None
    assert auto.reason == "the machine could not be measured: tests do not measure"


@pytest.mark.gpu
def test_a_gpu_is_measured_and_planned_for(monkeypatch: pytest.MonkeyPatch) -> None:
    if megatrain._native.cuda_device_count() == 0:
        pytest.skip(f"no GPU: {megatrain._native.cuda_unavailable_reason()}")
    monkeypatch.setattr("megatrain.auto_placement.measured_hardware", megatrain.measured_hardware)
    with streamed(device="cuda", compile=False) as model:
        model.step(micro_batches(0))
        plan = model.plan
        assert plan is not None
        assert plan.hardware.name == torch.cuda.get_device_name()
        assert model.memory_report().device_resident == plan.memory.device["resident"] > 0
