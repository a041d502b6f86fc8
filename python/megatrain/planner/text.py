"""A plan in words."""

from __future__ import annotations

import textwrap
from typing import TYPE_CHECKING

from megatrain.planner.hardware import GIB
from megatrain.planner.memory import usable_device, usable_host
from megatrain.planner.plan import runs
from megatrain.planner.work import kept_side

if TYPE_CHECKING:
    from collections.abc import Iterator

    from megatrain.placement import BlockPlacement, Placement
    from megatrain.planner.plan import Plan

RESIDENT = {
    "none": "stream through the slots",
    "weights": "weights stay on the device",
    "all": "stay on the device with their optimizer state",
}
KEEP = {"inputs": "keep their inputs", "selected": "keep selected outputs", "everything": "keep everything"}


def describe(plan: Plan) -> Iterator[str]:
    """Lines."""
    shape, job, line = plan.shape, plan.job, plan.timeline
    batch = job.batch
    waits = "after the norm" if job.updates_wait else "as gradients land"
    trained = "" if shape.trained == shape.numel else f", {shape.trained / 1e9:.3g}B of them trained,"
    yield f"model      {shape.name}: {shape.numel / 1e9:.2f}B parameters{trained} in {len(shape.blocks)} blocks"
    yield (
        f"step       {batch.micro_batches} x {batch.rows} x {batch.length} = {batch.tokens:,} tokens; "
        f"{precision(plan)}; updates {waits}"
    )
    hardware = plan.hardware
    yield (
        f"machine    {hardware.name}, {hardware.gpu_memory / GIB:.1f} GiB; host {hardware.host_memory / GIB:.0f} GiB; "
        f"copies {hardware.up / 1e9:.0f} up, {hardware.down / 1e9:.0f} down, updates {hardware.update / 1e9:.0f} GB/s"
    )
    yield ""
    placed: list[tuple[str, str]] = [("order", plan.placement.order)]
    placed += [(_span(first, last), _words(place)) for first, last, place in runs(plan.placement, len(shape.blocks))]
    for unit in shape.outside:
        resident = plan.placement.residence(unit.name) == "all"
        words = "stays on the device with its optimizer state" if resident else "fetched after each update"
        placed.append((unit.name, words))
    width = max(len(name) for name, _ in placed)
    for name, words in placed:
        yield f"{name:<{width}}  {words}"
    yield ""
    yield (
        f"predicted  {line.seconds:.3g} s a step, {plan.tokens_per_second:,.0f} tokens/s, {plan.tflops:.0f} TFLOPS; "
        f"bound by {line.binding}"
    )
    yield (
        f"           compute {line.compute:.2f} s, recompute {line.recompute:.2f}, waiting {line.stall:.2f}; beside "
        f"them copies up {line.up:.2f}, copies down {line.down:.2f}, host updates {line.updates:.2f}"
    )
    for name, items, total, limit in (
        ("device", plan.memory.device, plan.memory.device_bytes, usable_device(hardware.gpu_memory)),
        ("host", plan.memory.host, plan.memory.host_bytes, usable_host(hardware.host_memory)),
    ):
        listed = ", ".join(f"{item} {nbytes / GIB:.1f}" for item, nbytes in items.items())
        yield from _wrapped(f"{name:<10} {total / GIB:.1f} of {limit / GIB:.1f} GiB: {listed}", 11)
    if plan.alternatives:
        yield ""
        yield "next best"
    for other in plan.alternatives:
        slower = other.seconds / plan.seconds - 1
        yield from _wrapped(
            f"  {other.seconds:.3g} s ({slower:+.1%}), device {other.device_bytes / GIB:.1f} GiB: "
            f"{in_one_line(other.placement, len(shape.blocks))}",
            4,
        )
    if plan.default_seconds is not None:
        yield f"  {plan.default_seconds:.3g} s with the default placement: every block streams and keeps its inputs"


def _wrapped(line: str, indent: int) -> list[str]:
    return textwrap.wrap(line, 118, subsequent_indent=" " * indent, break_on_hyphens=False)


def precision(plan: Plan) -> str:
    tile_format = plan.job.tile_format
    weights = {
        "bf16_split": "bf16 weights with fp32 masters",
        "bf16": "bf16 weights without masters",
        "fp32": "fp32 weights",
    }[tile_format.weights]
    return f"{weights}, {tile_format.moments} moments"


def in_one_line(placement: Placement, blocks: int) -> str:
    parts: list[str] = [placement.order]
    for first, last, place in runs(placement, blocks):
        resident = {"none": "", "weights": " weights resident,", "all": " resident,"}[place.resident]
        parts.append(f"{_span(first, last)}{resident} {place.keep} on {kept_side(place)}{_inputs(place, ' ')}")
    kept = [name for name, residence in placement.outside.items() if residence == "all"]
    if kept:
        parts.append(f"resident {', '.join(kept)}")
    return "; ".join(parts)


def _span(first: int, last: int) -> str:
    return f"block {first}" if first == last else f"blocks {first}-{last}"


def _words(place: BlockPlacement) -> str:
    kept = place.keep if isinstance(place.keep, str) else place.keep[0]
    return f"{RESIDENT[place.resident]}; {KEEP[kept]} on the {kept_side(place)}{_inputs(place, ' the ')}"


def _inputs(place: BlockPlacement, the: str) -> str:
    """Where inputs wait, if not where the rest does."""
    return "" if place.inputs_side == kept_side(place) else f", inputs on{the}{place.inputs_side}"
