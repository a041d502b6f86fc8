"""Achieved against predicted: a step as two bars, and all figures as rows."""

from __future__ import annotations

from typing import TYPE_CHECKING

from megatrain.charts import style

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from megatrain.train.records import AchievedFile, PlanRecord

Parts = list[tuple[str, float, str]]
"""(name, seconds, colour)."""


def draw_comparison(plan: PlanRecord | None, achieved: AchievedFile) -> Figure:
    """Seconds of the device in one step."""
    made = style.figure(2.0 if plan is None else 2.6)
    axes = made.subplots()
    waits = achieved.wait_copy_seconds
    updates = min(achieved.wait_update_seconds, waits)
    bars: list[tuple[str, Parts]] = [
        (
            f"achieved\n{style.seconds(achieved.seconds)}",
            [
                ("at work", max(0.0, achieved.seconds - waits), style.BLUE),
                ("waiting for copies", waits - updates, style.GREY),
                ("waiting for updates", updates, style.RED),
            ],
        )
    ]
    if plan is not None:
        line = plan.predicted
        planned: Parts = [
            ("computing", line.compute, style.GREEN),
            ("recomputing", line.recompute, style.YELLOW),
            ("waiting", line.stall, "#dddddd"),
        ]
        bars.insert(0, (f"predicted\n{style.seconds(line.seconds)}", planned))
    longest = max(sum(seconds for _, seconds, _ in parts) for _, parts in bars)
    scale, unit = (1.0, "s") if longest >= 1 else (1e3, "ms")
    for row, (_, parts) in enumerate(bars):
        _stack(axes, row, parts, scale)
    axes.set_yticks(range(len(bars)), [name for name, _ in bars])
    axes.set_ylim(len(bars) - 0.5, -0.5)
    axes.set_xlim(0, longest * scale * 1.02)
    axes.set_xlabel(f"{unit} a step", fontsize=9, color=style.INK)
    style.plain(axes)
    axes.legend(loc="upper left", bbox_to_anchor=(1.0, 1.05), fontsize=8, frameon=False, handlelength=1.0)
    return made


def _stack(axes: Axes, row: int, parts: Parts, scale: float) -> None:
    left = 0.0
    for name, seconds, colour in parts:
        if seconds < 1e-9:
            continue
        axes.barh(
            row, seconds * scale, left=left, height=0.55, color=colour, edgecolor="white", linewidth=0.6, label=name
        )
        left += seconds * scale


def comparison_rows(plan: PlanRecord | None, achieved: AchievedFile | None) -> list[tuple[str, str, str, str]]:
    """(what, predicted, achieved, difference); "–" where there is none."""
    predicted = plan.predicted if plan is not None else None
    table = (
        ("seconds a step", predicted and predicted.seconds, achieved and achieved.seconds, style.seconds),
        (
            "tokens a second",
            predicted and predicted.tokens_per_second,
            achieved and achieved.tokens_per_second,
            "{:,.0f}".format,
        ),
        (
            "device memory at its peak",
            predicted and predicted.device_bytes,
            achieved and achieved.device_bytes,
            style.size,
        ),
        ("host memory", predicted and predicted.host_bytes, achieved and achieved.host_bytes, style.size),
    )
    rows = []
    for what, before, after, words in table:
        difference = f"{after / before - 1:+.1%}" if before and after else "–"
        rows.append((what, words(before) if before else "–", words(after) if after else "–", difference))
    return rows
