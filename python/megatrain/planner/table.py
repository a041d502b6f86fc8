"""Which model fits which machine, as a page of Markdown: predictions of the planner, nothing else."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from megatrain._native import TileFormat
from megatrain.planner.examples import examples
from megatrain.planner.hardware import GIB, PRESETS, Hardware
from megatrain.planner.job import Batch, Job
from megatrain.planner.memory import HOST_PROCESS, usable_host
from megatrain.planner.plan import CannotFit, make_plan

if TYPE_CHECKING:
    from collections.abc import Iterator

    from megatrain.planner.shape import ModelShape

MACHINES = (
    ("RTX 3090", 64),
    ("RTX 4090", 64),
    ("RTX 4090", 192),
    ("A100", 256),
    ("H100", 512),
    ("GH200", 447),
    ("H200", 128),
    ("H200", 256),
    ("H200", 1536),
)
PRECISIONS = (
    ("bf16_split", "fp32", "Masters fp32, moments fp32 (`master: split`, `moments: fp32`)"),
    ("bf16_split", "bf16", "Masters fp32, moments bf16 (`master: split`, `moments: bf16`)"),
    ("bf16_split", "int8", "Masters fp32, moments 8-bit (`master: split`, `moments: int8`)"),
    ("bf16", "int8", "No masters, moments 8-bit (`master: none`, `moments: int8`)"),
)
LENGTH = 1024
ROWS = 64
MICRO_BATCHES = (16, 4, 1)

HEAD = f"""# Which model fits

Predictions, not measurements: tokens a second by the planner for {ROWS * LENGTH:,} tokens a step in rows of {LENGTH:,},
with clipping, the placement and the size of micro-batch ({", ".join(map(str, MICRO_BATCHES))} rows) that it finds
fastest. Of these machines only the H200 with 128 GiB has been measured, with Qwen2.5 7B: predictions are within 9 % of
the steps of 22 placements, to some of which the planner's constants were fitted. Every other figure follows from
data sheets and the same constants, and the host memory's speed, which often decides, differs between machines of one
name. Rates are rounded to two digits. `megatrain plan` predicts for a model, a batch and a machine of your own.

Where the host memory cannot hold the model, what it would need stands in place of a rate. A dash: it holds the model,
but at {ROWS * LENGTH:,} tokens a step there is no room left for gradients and activations on either side.

This page is the output of `megatrain plan --table`.
"""


def page() -> Iterator[str]:
    """Lines; takes minutes."""
    yield HEAD.rstrip("\n")
    for precision in PRECISIONS:
        yield ""
        yield from section(*precision)


def section(weights: str, moments: str, title: str) -> Iterator[str]:
    """Of one precision."""
    tile_format = TileFormat(weights, moments)
    shapes = examples()
    each = sum(u.bytes(tile_format).tile for u in (*shapes[2].blocks, *shapes[2].outside)) / shapes[2].numel
    yield f"## {title}: {each:.1f} bytes a parameter"
    yield ""
    yield f"| | {' | '.join(f'{gpu}, {host} GiB' for gpu, host in MACHINES)} |"
    yield "|---|" + "---:|" * len(MACHINES)
    for shape in shapes:
        yield row(shape, tile_format)


def row(shape: ModelShape, tile_format: TileFormat) -> str:
    cells = [
        cell(shape, tile_format, replace(PRESETS[gpu], host_memory=host * GIB)) for gpu, host in MACHINES
    ]
    return f"| {shape.name} | {' | '.join(cells)} |"


def cell(shape: ModelShape, tile_format: TileFormat, hardware: Hardware) -> str:
    tiles = sum(unit.bytes(tile_format).tile for unit in (*shape.blocks, *shape.outside))
    if tiles > usable_host(hardware.host_memory):
        return f"{int((tiles + HOST_PROCESS) / GIB) + 1:,} GiB"
    seconds = []
    for rows in MICRO_BATCHES:
        job = Job(batch=Batch(micro_batches=ROWS // rows, rows=rows, length=LENGTH), tile_format=tile_format)
        try:
            seconds.append(make_plan(shape, job, hardware).seconds)
        except CannotFit:
            continue
    if not seconds:
        return "–"
    return f"{_rounded(ROWS * LENGTH / min(seconds)):,}"


def _rounded(value: float) -> int:
    """To two digits: no more can be promised."""
    digits = max(0, len(str(int(value))) - 2)
    return int(round(value, -digits))
