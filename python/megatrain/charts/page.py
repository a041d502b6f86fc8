"""One page that holds everything: charts as PNG files beside it and inlined in it, so that it opens anywhere."""

from __future__ import annotations

import base64
import html
from typing import TYPE_CHECKING

from megatrain.charts import style
from megatrain.charts.comparison import comparison_rows, draw_comparison
from megatrain.charts.curves import draw_curves
from megatrain.charts.memory import draw_memory
from megatrain.charts.timeline import draw_timeline

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    from megatrain.charts.run_files import RunFiles
    from megatrain.train.records import BlocksRecord, PlanFile

PAGE = "report.html"
CSS = """
body { margin: 0 auto; max-width: 1080px; padding: 24px; background: #fff; color: #222;
       font: 15px/1.5 system-ui, -apple-system, "Segoe UI", "DejaVu Sans", sans-serif; }
h1 { font-size: 24px; margin: 0 0 4px; } h2 { font-size: 17px; margin: 36px 0 8px; }
p { margin: 4px 0 10px; max-width: 78ch; } .faint { color: #666; }
figure { margin: 8px 0; } img { width: 100%; height: auto; display: block; }
table { border-collapse: collapse; margin: 8px 0; }
th, td { text-align: left; padding: 5px 22px 5px 0; border-bottom: 1px solid #e4e4e4; vertical-align: top; }
th { font-weight: 600; color: #666; } td.number, th.number { text-align: right; font-variant-numeric: tabular-nums; }
"""


def write_report(run: RunFiles, folder: Path) -> Path:
    """Write the PNG files and the page; returns the page."""
    folder.mkdir(parents=True, exist_ok=True)
    charts = _charts(run)
    for name, image in charts.items():
        (folder / f"{name}.png").write_bytes(image)
    page = folder / PAGE
    page.write_text("\n".join(_page(run, charts)) + "\n", encoding="utf-8")
    return page


def _charts(run: RunFiles) -> dict[str, bytes]:
    plan = run.plan.plan if run.plan is not None else None
    made = {}
    if run.achieved is not None:
        made["step"] = draw_comparison(plan, run.achieved)
    if run.spans:
        made["timeline"] = draw_timeline(run.spans)
    if plan is not None:
        made["memory"] = draw_memory(plan, run.achieved)
    if run.loss:
        made["curves"] = draw_curves(run)
    return {name: style.png(chart) for name, chart in made.items()}


def _page(run: RunFiles, charts: dict[str, bytes]) -> Iterator[str]:
    title = html.escape(run.path.resolve().name)
    yield '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">'
    yield '<meta name="viewport" content="width=device-width, initial-scale=1">'
    yield f"<title>{title}</title>\n<style>{CSS}</style>\n</head>\n<body>"
    yield f"<h1>{title}</h1>"
    yield f"<p>{html.escape(_summary(run))}</p>"
    yield "<h2>Achieved against predicted</h2>"
    yield from _comparison(run, charts)
    yield "<h2>A step</h2>"
    if "timeline" in charts:
        yield (
            "<p>From the first block of one step to that of the next. Numbers are blocks; hatched: the device waits; "
            "under a lane's name, its busy share of the time. Head, loss and embedding are not drawn.</p>"
        )
        yield _image("timeline", charts, "Copies up, computation, copies down and updates of one step")
    else:
        yield "<p>The run did not come far enough to have a step traced.</p>"
    yield "<h2>Memory</h2>"
    if "memory" in charts:
        yield _image("memory", charts, "The plan's items of device and host memory")
    else:
        yield "<p>There is no plan to take memory apart by.</p>"
    yield "<h2>Placement</h2>"
    yield from _placement(run.plan)
    yield "<h2>Training</h2>"
    if "curves" in charts:
        yield _image("curves", charts, "Loss and tokens a second over the steps")
    else:
        yield "<p>No step was logged.</p>"
    yield "</body>\n</html>"


def _summary(run: RunFiles) -> str:
    plan = run.plan.plan if run.plan is not None else None
    words = []
    if plan is not None:
        model, batch = plan.model, plan.batch
        tokens = batch.micro_batches * batch.rows * batch.length
        words.append(
            f"{model.name}, {_count(model.parameters)} parameters in {model.blocks} blocks; "
            f"{batch.micro_batches} x {batch.rows} x {batch.length} = {tokens:,} tokens a step; planned for "
            f"{plan.hardware.name}, bound by {plan.predicted.binding}."
        )
    elif run.plan is not None:
        words.append(f"Nothing was planned: {run.plan.unplanned}.")
    if run.loss:
        words.append(f"{run.loss[-1][0]} steps, loss {run.loss[0][1]:.4f} to {run.loss[-1][1]:.4f}.")
    return " ".join(words)


def _count(parameters: int) -> str:
    return f"{parameters / 1e9:.3g}B" if parameters >= 1e9 else f"{parameters / 1e6:.3g}M"


def _comparison(run: RunFiles, charts: dict[str, bytes]) -> Iterator[str]:
    if run.achieved is None:
        yield "<p>The run ended before its first step did.</p>"
    else:
        steps = "1 step" if run.achieved.steps == 1 else f"{run.achieved.steps:,} steps"
        yield f"<p>Means of {steps}; the first, which compiles, only counts where it is alone.</p>"
    plan = run.plan.plan if run.plan is not None else None
    yield from _table(("", "predicted", "achieved", "difference"), comparison_rows(plan, run.achieved), numbers=3)
    if "step" in charts:
        yield _image("step", charts, "Seconds of a step, predicted and achieved")


def _placement(plan: PlanFile | None) -> Iterator[str]:
    if plan is None:
        yield "<p>The run wrote no plan.json.</p>"
        return
    yield f"<p>Order of work: {plan.placement.order}.</p>"
    rows = [_blocks(blocks) for blocks in plan.placement.blocks]
    for name, residence in plan.placement.outside.items():
        rows.append((name or "other units", "–", RESIDENT[residence]))
    yield from _table(("", "forwards keep", "weights and state"), rows)
    if plan.plan is not None and plan.plan.alternatives:
        others = ", ".join(
            f"{style.seconds(other.seconds)} in {style.size(other.device_bytes)} of device memory"
            for other in plan.plan.alternatives
        )
        yield f'<p class="faint">Next best placements of other kinds: {others}.</p>'


RESIDENT = {
    "none": "stream from the host",
    "weights": "weights stay on the device",
    "all": "stay on the device with their optimizer state",
}


def _blocks(blocks: BlocksRecord) -> tuple[str, str, str]:
    span = f"block {blocks.first}" if blocks.first == blocks.last else f"blocks {blocks.first} to {blocks.last}"
    keeps = blocks.keep if isinstance(blocks.keep, str) else "/".join(blocks.keep)
    words = f"{keeps}, on the {blocks.kept_on}"
    if blocks.inputs_on != blocks.kept_on:
        words += f", inputs on the {blocks.inputs_on}"
    return span, words, RESIDENT[blocks.resident]


def _table(head: Sequence[str], rows: Sequence[Sequence[str]], numbers: int = 0) -> Iterator[str]:
    """The last `numbers` columns are right-aligned."""

    def cells(row: Sequence[str], tag: str) -> str:
        kinds = [""] * (len(row) - numbers) + [' class="number"'] * numbers
        return "".join(f"<{tag}{kind}>{html.escape(cell)}</{tag}>" for kind, cell in zip(kinds, row, strict=True))

    yield f"<table>\n<tr>{cells(head, 'th')}</tr>"
    for row in rows:
        yield f"<tr>{cells(row, 'td')}</tr>"
    yield "</table>"


def _image(name: str, charts: dict[str, bytes], words: str) -> str:
    data = base64.b64encode(charts[name]).decode()
    return f'<figure><img id="{name}" alt="{html.escape(words)}" src="data:image/png;base64,{data}"></figure>'
