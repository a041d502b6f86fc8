"""The optimizer steps. Reports are read only when a line is due, since reading one waits for the
device."""

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import megatrain
from megatrain.interrupts import DeferredInterrupts

from .hooks import Hook, Run
from .schedule import lr_factor
from .signals import Termination


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


class _Pending:
    """Steps whose reports have not been read."""

    def __init__(self) -> None:
        self.clear()

    def clear(self) -> None:
        self.reports: list[tuple[int, float, megatrain.StepReport]] = []
        self.tokens = 0
        self.started = time.perf_counter()

    def interval(self) -> Interval:
        waits = [(report.wait_copy_seconds, report.wait_update_seconds) for _, _, report in self.reports]
        return Interval(
            records=[_read(*entry) for entry in self.reports],
            tokens=self.tokens,
            seconds=time.perf_counter() - self.started,
            wait_copy_seconds=sum(copy for copy, _ in waits),
            wait_update_seconds=sum(update for _, update in waits),
        )


def run_steps(run: Run, hooks: Sequence[Hook], on_interval: Callable[[Interval], None]) -> None:
    """Steps until run.steps are done, the data end, or run.stopped is set. on_interval hears of the first step,
    of every settings.output.log_every steps and of the last. An interrupted step leaves model, position and
    counts as they were before it."""
    settings, loader = run.settings, run.prepared.loader
    pending = _Pending()
    first = run.step + 1
    run.model.train()

    def show() -> None:
        if pending.reports:
            on_interval(pending.interval())
        pending.clear()

    def watch() -> None:
        began = time.perf_counter()
        for hook in hooks:
            hook.after_step(run)
        run.watched = run.step
        pending.started += time.perf_counter() - began  # the steps' own speed

    with Termination() as termination:
        try:
            if run.step == 0:
                for hook in hooks:
                    hook.before_first_step(run)
                pending.clear()  # begins the clock
            if run.watched < run.step:  # the run was interrupted behind this step
                watch()
            while run.step < run.steps and run.stopped is None:
                position, done, model_steps = loader.state_dict(), run.step, run.model.steps
                micro_batches = next(loader, None)
                if micro_batches is None:
                    break
                lr = settings.optimizer.lr * lr_factor(settings.schedule, run.step, run.steps, settings.optimizer.lr)
                for group in run.model.optimizer.param_groups:
                    group["lr"] = lr
                try:
                    report = run.model.step(micro_batches)
                    with DeferredInterrupts():
                        run.step += 1
                        pending.reports.append((run.step, lr, report))
                        pending.tokens += loader.last_tokens
                        if run.step == first or run.step % settings.output.log_every == 0 or run.step == run.steps:
                            show()
                except BaseException:
                    if run.model.steps == model_steps:
                        loader.load_state_dict(position)
                    elif run.step == done:  # the interrupt came right behind the step
                        run.step += 1
                    raise
                watch()
                termination.check()
        finally:
            with DeferredInterrupts():
                show()
    run.model.synchronize()


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
