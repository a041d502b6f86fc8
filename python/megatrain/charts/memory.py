"""Where memory goes: the plan's items as one bar a side, with what there is and what was used."""

from __future__ import annotations

from typing import TYPE_CHECKING

from megatrain.charts import style

if TYPE_CHECKING:
    from collections.abc import Mapping

    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from megatrain.train.records import AchievedFile, PlanRecord


def draw_memory(plan: PlanRecord, achieved: AchievedFile | None) -> Figure:
    made = style.figure(3.9)
    device, host = made.subplots(2, 1)
    predicted, hardware = plan.predicted, plan.hardware
    used_device = achieved.device_bytes if achieved is not None else None
    used_host = achieved.host_bytes if achieved is not None else None
    _bar(device, "device", predicted.device, hardware.gpu_memory, used_device)
    _bar(host, "host", predicted.host, hardware.host_memory, used_host)
    return made


def _bar(axes: Axes, name: str, items: Mapping[str, int], limit: int, used: int | None) -> None:
    total = sum(items.values())
    most = max(total, used or 0)
    # A limit far beyond what is used would leave nothing of the bar to see.
    shown = limit if limit <= 4 * most else most
    scale, unit = (style.GIB, "GiB") if shown >= 0.1 * style.GIB else (style.MIB, "MiB")
    left = 0.0
    for (item, nbytes), colour in zip(items.items(), style.SERIES, strict=False):
        label = f"{item} {style.size(nbytes)}"
        axes.barh(0, nbytes / scale, left=left, height=0.5, color=colour, edgecolor="white", linewidth=0.6, label=label)
        left += nbytes / scale
    words = [f"{style.size(total)} planned of {style.size(limit)}"]
    if shown == limit:
        axes.axvline(limit / scale, color=style.INK, linewidth=1.2)
        axes.text(limit / scale, 0.42, "limit ", ha="right", va="bottom", fontsize=8, color=style.INK)
    if used is not None:
        axes.plot([used / scale] * 2, [-0.36, 0.36], color=style.INK, linewidth=1.6, linestyle=(0, (2, 1)))
        words.append(f"{style.size(used)} used (dashed)")
    axes.set_title(f"{name}: {', '.join(words)}", loc="left", fontsize=10, color=style.INK)
    axes.set_yticks([])
    axes.set_ylim(-0.5, 0.75)
    axes.set_xlim(0, shown / scale * 1.02)
    axes.set_xlabel(unit, fontsize=9, color=style.INK)
    style.plain(axes)
    axes.legend(
        loc="upper left", bbox_to_anchor=(1.0, 1.1), fontsize=8, frameon=False, handlelength=1.0, labelspacing=0.3
    )
