"""The plan of a run and what came of it, as files of its directory: before the first step, then as steps are done."""

from dataclasses import asdict

import torch

from megatrain.errors import UnsupportedModelError
from megatrain.model import StreamedModel
from megatrain.planner import Batch, CannotFit, describe
from megatrain.planner.plan import placement_json

from .config import TrainSettings
from .errors import UserError, one_line
from .hooks import Hook, Run
from .loop import Interval
from .records import ACHIEVED, PLAN, TRACE, AchievedFile, BatchRecord, PlacementRecord, PlanFile, PlanRecord

TRACED = 2
"""Of the steps of this process, from 1: the first compiles."""


def plan_run(model: StreamedModel, settings: TrainSettings) -> None:
    """Plan for the run's batches and print the plan. UserError where nothing fits."""
    try:
        plan = model.plan_for(_batch(settings))
    except CannotFit as refused:
        raise UserError(str(refused)) from refused
    except UnsupportedModelError as error:
        raise UserError(f"model: {one_line(error)}") from error
    if plan is None:
        print(f"plan: every block streams; {model.unplanned}", flush=True)
        return
    print("plan:")
    for line in describe(plan):
        print(f"  {line}".rstrip())
    print(flush=True)


def _batch(settings: TrainSettings) -> Batch:
    """Of a step, at most."""
    batch = settings.batch
    return Batch(micro_batches=batch.accumulate, rows=batch.micro_batch, length=settings.sequence_length)


class Account(Hook):
    """Of one run."""

    def __init__(self) -> None:
        self._first: Interval | None = None
        self._steps = 0
        self._seconds = self._copies = self._updates = 0.0
        self._tokens = 0
        self._done = 0
        self._traced = False

    def write_plan(self, run: Run) -> None:
        model, path = run.model, run.directory.path
        assert path is not None
        blocks = sum(unit.is_block for unit in model.units)
        PlanFile(
            plan=None if model.plan is None else PlanRecord.model_validate(model.plan.to_json()),
            unplanned=model.unplanned,
            batch=BatchRecord(**asdict(_batch(run.settings))),
            placement=PlacementRecord.model_validate(
                placement_json(model.placement if model.plan is None else model.plan.placement, blocks)
            ),
        ).write(path / PLAN)

    def add(self, run: Run, interval: Interval) -> None:
        """The run's steps since the last call, in their order."""
        if self._first is None:
            self._first = interval
            if run.model.device.type == "cuda":
                torch.cuda.reset_peak_memory_stats(run.model.device)
        else:
            self._steps += len(interval.records)
            self._seconds += interval.seconds
            self._tokens += interval.tokens
            self._copies += interval.wait_copy_seconds
            self._updates += interval.wait_update_seconds
        self._write_achieved(run, interval.records[-1].step)

    def _write_achieved(self, run: Run, through: int) -> None:
        model, path, first = run.model, run.directory.path, self._first
        assert path is not None and first is not None
        steps, seconds, tokens = self._steps, self._seconds, self._tokens
        waits = self._copies, self._updates
        if not steps:
            steps, seconds, tokens = len(first.records), first.seconds, first.tokens
            waits = first.wait_copy_seconds, first.wait_update_seconds
        memory, plan = model.memory_report(), model.plan
        AchievedFile(
            through_step=through,
            steps=steps,
            seconds=seconds / steps,
            tokens_per_second=tokens / seconds,
            wait_copy_seconds=waits[0] / steps,
            wait_update_seconds=waits[1] / steps,
            device_bytes=torch.cuda.max_memory_reserved(model.device) if model.device.type == "cuda" else None,
            host_bytes=memory.host_tiles + memory.host_kept,
            predicted_seconds=None if plan is None else plan.seconds,
            predicted_device_bytes=None if plan is None else plan.memory.device_bytes,
            predicted_host_bytes=None if plan is None else plan.memory.host_bytes,
        ).write(path / ACHIEVED)

    # the timeline of one step

    def after_step(self, run: Run) -> None:
        self._done += 1
        if self._done == TRACED + 1:  # its updates run beside the next one
            self._write_trace(run, run.model.steps - 2)

    def ended(self, run: Run) -> None:
        if self._done and not self._traced:
            self._write_trace(run, run.model.steps - 1)

    def _write_trace(self, run: Run, step: int) -> None:
        assert run.directory.path is not None
        run.model.export_trace(run.directory.path / TRACE, step=step)
        self._traced = True
