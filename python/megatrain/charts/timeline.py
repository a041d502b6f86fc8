"""The timeline of one step: a lane each for copies up, computation, copies down and updates."""

from __future__ import annotations

from typing import TYPE_CHECKING

from megatrain.charts import style

if TYPE_CHECKING:
    from collections.abc import Sequence

    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from megatrain.charts.run_files import Span

LANES: tuple[tuple[str, str, tuple[str, str]], ...] = (
    ("copies up", "copy_up", (style.BLUE, "#7799cc")),
    ("compute", "compute", (style.GREEN, "#66aa77")),
    ("copies down", "copy_down", (style.PURPLE, "#c477a0")),
    ("updates", "update", (style.RED, "#f4a3ad")),
)
"""(name, kind of span, colours that neighbouring units take by turns)."""
WAITS = ("wait", "wait_down")
LEAST_LABEL = 0.015
"""Of the width: what is narrower has no number."""


def draw_timeline(spans: Sequence[Span]) -> Figure:
    """Units are numbered in the order of their first computation."""
    made = style.figure(3.4)
    axes = made.subplots()
    begin = min(span.begin for span in spans)
    end = max(span.end for span in spans)
    scale, unit = (1.0, "s") if end - begin >= 1 else (1e3, "ms")
    numbers = _numbers(spans)
    width = (end - begin) * scale
    for row, (_, kind, colours) in enumerate(LANES):
        for span in spans:
            if span.kind == kind:
                number = numbers.get(span.unit)
                colour = colours[(number or 0) % 2]
                _bar(axes, row, (span.begin - begin) * scale, span.seconds * scale, colour)
                if number is not None and span.seconds * scale > LEAST_LABEL * width:
                    middle = (span.begin + span.seconds / 2 - begin) * scale
                    ink = style.INK if number % 2 else "white"
                    axes.text(middle, row, str(number), ha="center", va="center", fontsize=7, color=ink)
    compute = next(row for row, (_, kind, _) in enumerate(LANES) if kind == "compute")
    for span in spans:
        if span.kind in WAITS and span.seconds > 0:
            axes.broken_barh(
                [((span.begin - begin) * scale, span.seconds * scale)],
                (compute - 0.36, 0.72),
                facecolor="white",
                edgecolor=style.FAINT,
                hatch="////",
                linewidth=0.4,
            )
    axes.set_yticks(range(len(LANES)), [f"{name}\n{_busy(spans, kind, end - begin):.0%}" for name, kind, _ in LANES])
    axes.set_ylim(len(LANES) - 0.5, -0.5)
    axes.set_xlim(0, width)
    axes.set_xlabel(f"{unit} from the step's first block", fontsize=9, color=style.INK)
    style.plain(axes)
    return made


def _bar(axes: Axes, row: int, begin: float, length: float, colour: str) -> None:
    axes.broken_barh([(begin, length)], (row - 0.36, 0.72), facecolor=colour, edgecolor="white", linewidth=0.3)


def _numbers(spans: Sequence[Span]) -> dict[str, int]:
    names = dict.fromkeys(span.unit for span in sorted(spans, key=lambda span: span.begin) if span.kind == "compute")
    return {name: number for number, name in enumerate(names)}


def _busy(spans: Sequence[Span], kind: str, whole: float) -> float:
    """Share of the time in which at least one of the kind runs."""
    covered, until = 0.0, float("-inf")
    for span in sorted((span for span in spans if span.kind == kind), key=lambda span: span.begin):
        covered += max(0.0, span.end - max(span.begin, until))
        until = max(until, span.end)
    return covered / whole if whole else 0.0
