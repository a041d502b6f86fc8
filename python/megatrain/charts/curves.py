"""Loss and tokens a second over the steps."""

from __future__ import annotations

from typing import TYPE_CHECKING

from megatrain.charts import style

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from megatrain.charts.run_files import RunFiles

MANY = 60
"""Steps from which on single points are not marked."""


def draw_curves(run: RunFiles) -> Figure:
    made = style.figure(3.3)
    loss, speed = made.subplots(1, 2)
    _line(loss, run.loss, style.BLUE, "training")
    if run.eval_loss:
        steps, values = zip(*run.eval_loss, strict=True)
        loss.plot(steps, values, "o", color=style.RED, markersize=4.5, label="held out")
        loss.legend(fontsize=8, frameon=False)
    loss.set_title("loss, nats a target", loc="left", fontsize=10, color=style.INK)
    # The first step compiles, and would flatten the rest.
    later = run.tokens_per_second[1:] or run.tokens_per_second
    _line(speed, later, style.GREEN, "achieved")
    if run.plan is not None and run.plan.plan is not None:
        predicted = run.plan.plan.predicted.tokens_per_second
        speed.axhline(predicted, color=style.FAINT, linewidth=1.2, linestyle="--", label="predicted, all rows full")
        speed.legend(fontsize=8, frameon=False)
    speed.set_ylim(0, 1.1 * speed.get_ylim()[1])
    speed.yaxis.set_major_formatter("{x:,.0f}")
    speed.set_title("tokens a second, without the first step", loc="left", fontsize=10, color=style.INK)
    for axes in (loss, speed):
        axes.set_xlabel("step", fontsize=9, color=style.INK)
        axes.xaxis.get_major_locator().set_params(integer=True)
        style.plain(axes, grid="y")
    return made


def _line(axes: Axes, points: list[tuple[int, float]], colour: str, label: str) -> None:
    steps = [step for step, _ in points]
    values = [value for _, value in points]
    marker = "o" if len(points) <= MANY else ""
    axes.plot(steps, values, color=colour, linewidth=1.6, marker=marker, markersize=3.5, label=label)
