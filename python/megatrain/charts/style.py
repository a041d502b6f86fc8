"""How charts look: colours that differ for everyone, one size, no state of matplotlib's own."""

from __future__ import annotations

import io
from typing import TYPE_CHECKING

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

if TYPE_CHECKING:
    from matplotlib.axes import Axes

WIDTH = 11.0
"""Inches."""
DPI = 160
INK, FAINT, GRID = "#222222", "#767676", "#e4e4e4"
# Paul Tol's "bright" palette, https://sronpersonalpages.nl/~pault/
BLUE, CYAN, GREEN, YELLOW, RED, PURPLE, GREY = (
    "#4477AA", "#66CCEE", "#228833", "#CCBB44", "#EE6677", "#AA3377", "#BBBBBB",
)  # fmt: skip
SERIES = (BLUE, CYAN, GREEN, YELLOW, RED, PURPLE, GREY, "#99DDFF", "#44BB99", "#FFAABB")
GIB, MIB = 1 << 30, 1 << 20


def figure(height: float) -> Figure:
    made = Figure(figsize=(WIDTH, height), dpi=DPI, facecolor="white", layout="constrained")
    FigureCanvasAgg(made)
    return made


def plain(axes: Axes, *, grid: str = "x") -> None:
    """Only the lines that are read."""
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    for side in ("left", "bottom"):
        axes.spines[side].set_color(GRID)
    axes.tick_params(colors=INK, labelsize=9, length=0)
    axes.grid(axis=grid, color=GRID, linewidth=0.8)  # type: ignore[arg-type]
    axes.set_axisbelow(True)


def png(made: Figure) -> bytes:
    """The same bytes for the same figure: without a date."""
    buffer = io.BytesIO()
    made.savefig(buffer, format="png", metadata={"Software": None})
    return buffer.getvalue()


def size(nbytes: float) -> str:
    return f"{nbytes / GIB:.1f} GiB" if nbytes >= 0.1 * GIB else f"{nbytes / MIB:.1f} MiB"


def seconds(value: float) -> str:
    return f"{value:.3g} s" if value >= 1 else f"{value * 1e3:.3g} ms"
