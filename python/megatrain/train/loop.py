"""The optimizer steps. Reports are read only when a line is due, since reading one waits for the
device."""

import math
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from torch.optim.lr_scheduler import LambdaLR

import megatrain

from .config import TrainSettings
from .data import Batch
from .schedule import lr_factor


@dataclass(frozen=True)
class StepRecord:
    step: int  # from 1
    loss: float  # mean over the step's targets, in nats
    grad_norm: float  # before clipping
    lr: float
    targets: int
    skipped: bool  # not finite, so nothing was updated


@dataclass(frozen=True)
class Interval:
    """The steps since the last one of these."""

    records: list[StepRecord]
    tokens: int  # that are not padding
    seconds: float
    wait_copy_seconds: float
    wait_update_seconds: float

    @property
    def tokens_per_second(self) -> float:
        return self.tokens / self.seconds

    @property
    def loss(self) -> float:
        """Mean over the targets."""
        targets = sum(record.targets for record in self.records)
        return sum(record.loss * record.targets for record in self.records) / max(targets, 1)


def run_steps(
    model: megatrain.StreamedModel,
    batches: Iterable[list[Batch]],
    settings: TrainSettings,
    on_interval: Callable[[Interval], None],
) -> None:
    """One optimizer step for each list of micro-batches; on_interval hears of the first step, of
    every settings.output.log_every steps and of the last."""
    peak = settings.optimizer.lr
    scheduler = LambdaLR(
        model.optimizer, lambda step: lr_factor(settings.schedule, step, settings.steps, peak)
    )
    model.train()
    pending: list[tuple[int, float, megatrain.StepReport]] = []
    tokens, started = 0, time.perf_counter()
    for step, micro_batches in enumerate(batches, start=1):
        lr = scheduler.get_last_lr()[0]
        report = model.step(micro_batches)
        scheduler.step()
        pending.append((step, float(lr), report))
        tokens += report.tokens
        if step == 1 or step % settings.output.log_every == 0 or step == settings.steps:
            records = [_read(*entry) for entry in pending]
            now = time.perf_counter()
            on_interval(
                Interval(
                    records=records,
                    tokens=tokens,
                    seconds=now - started,
                    wait_copy_seconds=sum(report.wait_copy_seconds for _, _, report in pending),
                    wait_update_seconds=sum(report.wait_update_seconds for _, _, report in pending),
                )
            )
            pending, tokens, started = [], 0, now
    model.synchronize()


def _read(step: int, lr: float, report: megatrain.StepReport) -> StepRecord:
    norm = math.nan if report.grad_norm is None else report.grad_norm
    return StepRecord(
        step=step,
        loss=report.loss,
        grad_norm=norm,
        lr=lr,
        targets=int(report.targets),
        skipped=report.skipped,
    )
