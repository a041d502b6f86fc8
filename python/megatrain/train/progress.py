"""Lines of progress, with a bar below them on a terminal."""

import time
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Protocol, TextIO

if TYPE_CHECKING:
    from .loop import Interval


class Progress(Protocol):
    def __enter__(self) -> "Progress": ...
    def __exit__(self, *exception: object) -> None: ...
    def show(self, interval: "Interval") -> None: ...
    def note(self, line: str) -> None:
        """Anything else that is to be read."""


def open_progress(steps: int, stream: TextIO) -> Progress:
    return _TerminalProgress(steps, stream) if stream.isatty() else _PlainProgress(steps, stream)


def reading(stream: TextIO) -> AbstractContextManager[object]:
    """On a terminal, a sign of life while data are read, which may take long."""
    if not stream.isatty():
        return nullcontext()
    from rich.console import Console

    return Console(file=stream).status("reading and tokenizing the data")


def describe(interval: "Interval") -> str:
    """Loss (mean of the interval), the last step's norm and lr, speed, share of the time waiting."""
    last = interval.records[-1]
    copies = interval.wait_copy_seconds / interval.seconds
    updates = interval.wait_update_seconds / interval.seconds
    line = (
        f"loss {interval.loss:.4f}  norm {last.grad_norm:.3f}  lr {last.lr:.2e}  "
        f"{interval.tokens_per_second:,.0f} tokens/s  waiting for copies {copies:.1%}, updates {updates:.1%}"
    )
    skipped = sum(record.skipped for record in interval.records)
    return f"{line}  skipped {skipped} (not finite)" if skipped else line


class _PlainProgress:
    def __init__(self, steps: int, stream: TextIO) -> None:
        self.steps_ = steps
        self.stream_ = stream
        self.started_ = time.perf_counter()
        self.first_ = 0

    def __enter__(self) -> "_PlainProgress":
        return self

    def __exit__(self, *exception: object) -> None:
        pass

    def show(self, interval: "Interval") -> None:
        step = interval.records[-1].step
        # From a resumed run's own first step on.
        self.first_ = self.first_ or interval.records[0].step
        done = step - self.first_ + 1
        left = (time.perf_counter() - self.started_) / done * (self.steps_ - step)
        print(
            f"step {step}/{self.steps_}  {describe(interval)}  {left:.0f} s left",
            file=self.stream_,
            flush=True,
        )

    def note(self, line: str) -> None:
        print(line, file=self.stream_, flush=True)


class _TerminalProgress:
    def __init__(self, steps: int, stream: TextIO) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, TimeRemainingColumn
        from rich.progress import Progress as Bar

        self.bar_ = Bar(
            MofNCompleteColumn(),
            BarColumn(),
            TimeRemainingColumn(),
            console=Console(file=stream),
        )
        self.task_ = self.bar_.add_task("", total=steps)

    def __enter__(self) -> "_TerminalProgress":
        self.bar_.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self.bar_.stop()

    def show(self, interval: "Interval") -> None:
        step = interval.records[-1].step
        self.note(f"step {step}  {describe(interval)}")
        self.bar_.update(self.task_, completed=step, refresh=True)

    def note(self, line: str) -> None:
        self.bar_.console.print(line, highlight=False, markup=False, soft_wrap=True)
