"""What a run left in its directory, as the charts need it."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from megatrain.train.errors import UserError, one_line
from megatrain.train.records import ACHIEVED, PLAN, TRACE, AchievedFile, PlanFile, Record

if TYPE_CHECKING:
    from collections.abc import Iterator

METRICS = "metrics.jsonl"
AnyRecord = TypeVar("AnyRecord", bound=Record)


@dataclass(frozen=True)
class Span:
    """Of the trace. begin, seconds: from the first span's begin."""

    kind: str
    """copy_up, compute, copy_down, update, wait or wait_down."""
    unit: str
    step: int
    begin: float
    seconds: float
    nbytes: int

    @property
    def end(self) -> float:
        return self.begin + self.seconds


Points = list[tuple[int, float]]
"""(step, value)."""


@dataclass(frozen=True)
class RunFiles:
    """plan, achieved: None, and spans empty, where the run did not come to write them."""

    path: Path
    plan: PlanFile | None
    achieved: AchievedFile | None
    spans: tuple[Span, ...]
    loss: Points
    eval_loss: Points
    tokens_per_second: Points
    """Means of the steps up to each."""

    @staticmethod
    def read(path: Path) -> RunFiles:
        """UserError for what is no run, or holds files that cannot be read."""
        if not path.is_dir():
            raise UserError(f"{path}: no such directory")
        if not (path / METRICS).is_file() and not (path / PLAN).is_file():
            raise UserError(f"{path}: holds neither {METRICS} nor {PLAN}, so it is no run of `megatrain train`")
        metrics = list(_metrics(path / METRICS))
        return RunFiles(
            path=path,
            plan=_record(path / PLAN, PlanFile),
            achieved=_record(path / ACHIEVED, AchievedFile),
            spans=tuple(_spans(path / TRACE)),
            loss=_points(metrics, "step", "loss"),
            eval_loss=_points(metrics, "step", "eval_loss"),
            tokens_per_second=_points(metrics, "through_step", "tokens_per_second"),
        )


def _record(path: Path, kind: type[AnyRecord]) -> AnyRecord | None:
    if not path.is_file():
        return None
    try:
        return kind.read(path)
    except ValueError as error:
        raise UserError(f"{path}: {one_line(error)}") from error


def _metrics(path: Path) -> Iterator[dict[str, Any]]:
    if not path.is_file():
        return
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        try:
            yield json.loads(line)
        except ValueError as error:
            raise UserError(f"{path}:{number}: {one_line(error)}") from error


def _points(metrics: list[dict[str, Any]], step: str, name: str) -> Points:
    """Numbers that were not finite are null there and left out."""
    return [(record[step], record[name]) for record in metrics if step in record and record.get(name) is not None]


def _spans(path: Path) -> Iterator[Span]:
    if not path.is_file():
        return
    try:
        events = json.loads(path.read_text(encoding="utf-8"))["traceEvents"]
        for event in events:
            if event["ph"] == "X":
                own = event["args"]
                begin, seconds = event["ts"] / 1e6, event["dur"] / 1e6
                yield Span(event["cat"], event["name"], own["step"], begin, seconds, own["bytes"])
    except (ValueError, KeyError, TypeError) as error:
        raise UserError(f"{path}: is not a trace of megatrain's: {one_line(error)}") from error
