"""Whole training steps at a Qwen2.5 shape, one row a placement: TFLOPS, share of the resident step, waits.

    python benchmarks/python/step.py --model 7b --host-memory 120GiB \
        --row "streamed micro=16 accumulate=4" \
        --row "nine resident micro=16 accumulate=4 resident=9 everything=5 outside=all"

    python benchmarks/python/step.py --model 7b --host-memory 120GiB --row "best planned micro=16 accumulate=4"

A row is a name and settings: micro, length, accumulate (rows, tokens and number of micro-batches), steps,
resident, everything, selected (numbers of blocks, see Placement.spread), kept_on, inputs_on, order, outside
("all" or the names of modules, joined by +), slots, cap (GiB of device memory), update_order, overlap_updates,
burst, clipping (False: and no wait for a finite norm either), text (True: other bytes of the standard library's sources
in each step, in place of the same random tokens). With the word `planned` the planner places, from figures
that it measures, in the memory that the cap leaves; nothing may be placed by hand in such a row. Beside what each row
achieved stands what the planner predicts of its placement with these figures. All rows are checked before the first
one runs.

TFLOPS = 6 * all parameters * tokens / wall time. The wall time runs from the return of a row's first step to
the return of its last: each step's updates overlap the next one, so every step is counted with one update, and a row
has at least two.

stream: bytes of weights that went up / (bytes of all weights * passes over them, forward and backward). Less than 100 %
where weights are resident, or still on the device from the pass before; what is kept on the host is not counted."""

from __future__ import annotations

import argparse
import gc
import json
import multiprocessing
import os
import time
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

os.environ.setdefault("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")

import torch
from device_profile import profile
from machine import machine
from resident import resident_step
from shapes import fill_random, meta_model
from tokens import random_steps, text_steps

import megatrain
from megatrain import Placement, Transfers
from megatrain.device_weights import residences, weight_bytes
from megatrain.planner import Batch, Hardware, Job, ModelShape, Plan, describe, predict, preset
from megatrain.planner.plan import placement_json
from megatrain.stacks import candidates
from megatrain.units import UnitPlan, plan_units

GIB = 1 << 30
BY_HAND = ("resident", "everything", "selected", "kept_on", "inputs_on", "order", "outside")
DEFAULTS: dict[str, Any] = dict(
    micro=16,
    length=1024,
    accumulate=4,
    steps=6,
    resident=0,
    everything=0,
    selected=0,
    kept_on="device",
    inputs_on="device",
    clipping=True,
    order="layer-major",
    outside="none",
    slots=2,
    cap=0,
    update_order="next-use",
    overlap_updates=True,
    burst="tile",
    text=False,
)
LEAST = dict(micro=1, length=1, accumulate=1, steps=2, slots=1, cap=0)
"""The first of a row's steps is not counted."""


def parse_row(text: str) -> dict[str, Any]:
    words = text.split()
    name = " ".join(word for word in words if "=" not in word)
    row: dict[str, Any] = dict(DEFAULTS, name=name, planned="planned" in words)
    for word in words:
        key, separator, value = word.partition("=")
        if not separator:
            continue
        if key not in DEFAULTS:
            raise SystemExit(f'row "{text}": unknown setting {key}; there are {", ".join(DEFAULTS)}')
        if row["planned"] and key in BY_HAND:
            raise SystemExit(f'row "{text}": is planned, so {key} is not set by hand')
        row[key] = parse_value(text, key, value)
    if row["planned"]:
        for key in BY_HAND:  # the plan's are in "placement"
            del row[key]
    for key, least in LEAST.items():
        if row[key] < least:
            raise SystemExit(f'row "{text}": {key} is {row[key]}; it must be at least {least}')
    return row


def parse_value(text: str, key: str, value: str) -> bool | int | str:
    """Of the type of the setting's default."""
    kind = type(DEFAULTS[key])
    if kind is bool:
        if value.lower() not in ("true", "false"):
            raise SystemExit(f'row "{text}": {key} is "{value}"; it must be True or False')
        return value.lower() == "true"
    if kind is int:
        try:
            return int(value)
        except ValueError:
            raise SystemExit(f'row "{text}": {key} is "{value}"; it must be a whole number') from None
    return value


def check_rows(rows: list[dict[str, Any]], units: UnitPlan) -> None:
    """Make what the rows ask for: a wrong name or number in a late row must not end the run hours into it."""
    blocks = sum(unit.is_block for unit in units.units)
    for row in rows:
        try:
            transfers_of(row)
            if not row["planned"]:
                list(residences(units, placement_of(row, blocks)))  # refuses names that the model does not have
        except ValueError as error:
            raise SystemExit(f"row {row['name']}, of a model with {blocks} blocks: {error}") from error


def transfers_of(row: dict[str, Any]) -> Transfers:
    return Transfers(
        update_order=row["update_order"], overlap_updates=row["overlap_updates"], burst=row["burst"]
    )


def placement_of(row: dict[str, Any], blocks: int) -> Placement:
    named = row["outside"] in ("none", "all")
    return Placement.spread(
        blocks,
        order=row["order"],
        resident=row["resident"],
        everything=row["everything"],
        selected=row["selected"],
        kept_on=row["kept_on"],
        inputs_on=row["inputs_on"],
        outside=row["outside"] if named else dict.fromkeys(row["outside"].split("+"), "all"),
    )


def place_row(model: megatrain.StreamedModel, row: dict[str, Any], shape: ModelShape, hardware: Hardware | None) -> Any:
    """The row's placement; its plan, of one by hand with predictions only, None without figures of the machine."""
    transfers = transfers_of(row)
    batch = Batch(micro_batches=row["accumulate"], rows=row["micro"], length=row["length"])
    if row["planned"]:
        model.place("auto", slots=row["slots"], transfers=transfers)
        plan = model.plan_for(batch)
        if plan is None:
            raise SystemExit(f"row {row['name']}: {model.unplanned}")
        print("\n".join(describe(plan)), flush=True)
        return plan
    placement = placement_of(row, len(shape.blocks))
    model.place(placement, slots=row["slots"], transfers=transfers)
    if hardware is None:
        return None
    settings = model.settings
    job = Job(
        batch=batch,
        tile_format=settings.tile_format,
        updates_wait=settings.max_grad_norm is not None or settings.skip_nonfinite,
        slots=row["slots"],
    )
    return predict(shape, job, hardware, placement)


def run_row(
    model: megatrain.StreamedModel,
    row: dict[str, Any],
    model_shape: ModelShape,
    resident_seconds: float | None,
    hardware: Hardware | None,
    profiled: bool,
) -> dict[str, Any]:
    on_cuda = model.device.type == "cuda"
    if on_cuda:
        total = torch.cuda.get_device_properties(model.device).total_memory
        torch.cuda.empty_cache()
        torch.cuda.set_per_process_memory_fraction(min(1.0, row["cap"] * GIB / total) if row["cap"] else 1.0)
    # Not a knob of a model in use: a benchmark's way to measure both with one set of tiles.
    model._parts.settings = replace(
        model.settings,
        max_grad_norm=1.0 if row["clipping"] else None,
        skip_nonfinite=row["clipping"],
    )
    plan = place_row(model, row, model_shape, hardware)
    shape = (row["accumulate"], row["micro"], row["length"])
    steps = text_steps(shape) if row["text"] else random_steps(shape)
    tokens = row["accumulate"] * row["micro"] * row["length"]
    memory = model.memory_report()
    flops = 6.0 * memory.parameters * tokens
    ends, reports = [], []
    for step in range(row["steps"]):
        if step == 1:
            model._parts.engine.clear_trace()
            if on_cuda:
                torch.cuda.reset_peak_memory_stats()
        reports.append(model.step(batches_of(next(steps))))
        ends.append(time.perf_counter())
        if step > 0:  # reading a loss waits for the device: only when the next step is queued
            print_step(row, step, reports[-2])
    model.synchronize()
    drained = time.perf_counter()
    print_step(row, row["steps"], reports[-1])
    counted = row["steps"] - 1
    steady = (ends[-1] - ends[0]) / counted
    spans = model._parts.engine.trace()
    weights = sum(map(weight_bytes, model.units))
    passes = 2 * (1 if model.placement.order == "layer-major" else row["accumulate"])
    wall = steady * counted
    result = dict(
        row,
        tokens=tokens,
        seconds=steady,
        tflops=flops / steady / 1e12,
        tflops_drained=flops * counted / (drained - ends[0]) / 1e12,
        tokens_per_second=tokens / steady,
        of_resident=resident_seconds / steady if resident_seconds else None,
        streamed=weights_up(model, spans) / counted / (weights * passes),
        wait_up=sum(r.wait_copy_seconds - r.wait_update_seconds for r in reports[1:]) / wall,
        wait_updates=sum(r.wait_update_seconds for r in reports[1:]) / wall,
        wait_down=sum(r.wait_down_seconds for r in reports[1:]) / wall,
        compute=sum(s.end_ns - s.begin_ns for s in spans if s.kind == "compute") / 1e9 / wall,
        update_gb_per_s=model.update_bandwidth() / 1e9,
        peak_reserved_gib=torch.cuda.max_memory_reserved() / GIB if on_cuda else 0.0,
        placement=placement_json(model.placement, len(model_shape.blocks)),
        blocks=len(model_shape.blocks),
        parameters=memory.parameters,
        peak_allocated_gib=torch.cuda.max_memory_allocated() / GIB if on_cuda else 0.0,
        host_kept_gib=model.memory_report().host_kept / GIB,
        losses=[report.loss for report in reports],
        norms=[report.grad_norm for report in reports],
        step_seconds=[b - a for a, b in pairwise(ends)],
        **predictions(model.plan or plan),
    )
    if profiled and on_cuda:
        found = profile(lambda: model.step(batches_of(next(steps))))
        print(f"{row['name']}, a step more under the profiler\n{found}", flush=True)
    if on_cuda:
        torch.cuda.set_per_process_memory_fraction(1.0)
    return result


def weights_up(model: megatrain.StreamedModel, spans: list[megatrain._native.TraceSpan]) -> int:
    """Bytes. A unit's weights go up in one span of their size; tensors that its forward kept come back up under the
    same tile and kind, in other sizes."""
    whole = [weight_bytes(unit) for unit in model.units]
    return sum(span.nbytes for span in spans if span.kind == "copy_up" and span.nbytes == whole[span.tile])


def placement_of_failed(model: megatrain.StreamedModel, row: dict[str, Any], blocks: int) -> dict[str, Any] | None:
    """What a row that ran out of memory asked for; None where nothing was planned."""
    if not row["planned"]:
        return placement_json(placement_of(row, blocks), blocks)
    return None if model.plan is None else placement_json(model.plan.placement, blocks)


def batches_of(ids: torch.Tensor) -> list[dict[str, torch.Tensor]]:
    return [dict(input_ids=rows, labels=rows) for rows in ids]


def print_step(row: dict[str, Any], number: int, report: megatrain.StepReport) -> None:
    print(f"  {row['name']}, step {number}: {report.seconds:.3f} s, loss {report.loss:.5f}", flush=True)


def resident_steps(
    model: str, layers: int | None, rows: list[dict[str, Any]]
) -> dict[tuple[int, int, int], float]:
    """Seconds by micro, length and accumulate. In a process of its own: what its compiler leaves in host memory
    would be missing for tiles."""
    seconds: dict[tuple[int, int, int], float] = {}
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as process:
        for key in dict.fromkeys((row["micro"], row["length"], row["accumulate"]) for row in rows):
            found = process.submit(resident_step, model, *key, layers).result()
            seconds[key] = found.seconds
            print(f"resident step {key}: {found.seconds:.3f} s, {found.tflops:.1f} TFLOPS {found}", flush=True)
    return seconds


def predictions(plan: Plan | None) -> dict[str, Any]:
    """Of the last plan, where one had to give way to a smaller one."""
    if plan is None:
        return dict(predicted_seconds=None, predicted_gib=None, plan=None)
    return dict(
        predicted_seconds=plan.seconds, predicted_gib=plan.memory.device_bytes / GIB, plan=plan.to_json()
    )


def against(predicted: float | None, achieved: float) -> str:
    """The prediction and by how much it is off."""
    if predicted is None or not achieved:
        return "-"
    return f"{predicted:.3f} {predicted / achieved - 1:+.1%}"


def share(value: float | None) -> str:
    return "-" if value is None else f"{value:.1%}"


def table(results: list[dict[str, Any]]) -> str:
    lines = [
        f"{'row':34} {'s/step':>7} {'TFLOPS':>7} {'drained':>7} {'tok/s':>6} {'of res.':>7} {'stream':>6} {'w.up':>5} "
        f"{'w.upd':>5} {'w.down':>6} {'upd GB/s':>8} {'GiB':>6} {'alloc':>6} {'pred. s':>13} {'pred. GiB':>14}"
    ]
    for r in results:
        if "error" in r:
            lines.append(f"{r['name']:34} {r['error']}")
            continue
        lines.append(
            f"{r['name']:34} {r['seconds']:7.3f} {r['tflops']:7.1f} {r['tflops_drained']:7.1f} "
            f"{r['tokens_per_second']:6.0f} {share(r['of_resident']):>7} {r['streamed']:6.1%} {r['wait_up']:5.1%} "
            f"{r['wait_updates']:5.1%} {r['wait_down']:6.1%} {r['update_gb_per_s']:8.0f} {r['peak_reserved_gib']:6.1f} "
            f"{r['peak_allocated_gib']:6.2f} "
            f"{against(r['predicted_seconds'], r['seconds']):>13} "
            f"{against(r['predicted_gib'], r['peak_reserved_gib']):>14}"
        )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="7b")
    parser.add_argument("--layers", type=layer_counts, default=[None], help="28,56: all rows with 28 blocks, then 56")
    parser.add_argument("--row", action="append", default=[])
    parser.add_argument("--no-resident", action="store_true", help="leave out the resident step")
    parser.add_argument("--master", default="split")
    parser.add_argument("--moments", default="fp32")
    parser.add_argument("--threads", type=int, default=0)
    parser.add_argument("--host-memory")
    parser.add_argument("--hardware", help="a preset whose figures predictions use, in place of measured ones")
    parser.add_argument("--commit", default="", help="of the source, where git cannot say")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--trace", type=Path, metavar="FOLDER", help="for a trace of each row")
    parser.add_argument("--profile", action="store_true", help="one more step a row: kernels by time, idle times")
    arguments = parser.parse_args()
    rows = [parse_row(text) for text in arguments.row or ["streamed"]]
    for layers in arguments.layers:
        module = meta_model(arguments.model, layers)
        check_rows(rows, plan_units(module, candidates(module), megatrain._native.TileFormat.bf16_split))
    results: list[dict[str, Any]] = []
    about: dict[str, Any] = {}
    for layers in arguments.layers:
        about = run_model(arguments, layers, rows, results)
        gc.collect()  # the model's tiles, before those of the next
    print(json.dumps(about))
    print(f"master {arguments.master}, {arguments.moments} moments, clipping 1.0 where the row does not say otherwise")
    print(table(results))


def run_model(
    arguments: argparse.Namespace, layers: int | None, rows: list[dict[str, Any]], results: list[dict[str, Any]]
) -> dict[str, Any]:
    """All rows with one model; appends to `results`, and returns what is known of the machine."""
    resident: dict[tuple[int, int, int], float] = {}
    if torch.cuda.is_available() and not arguments.no_resident:
        resident = resident_steps(arguments.model, layers, rows)
    started = time.perf_counter()
    module = meta_model(arguments.model, layers)
    shape = ModelShape.from_module(module, arguments.model)
    model = megatrain.StreamedModel(
        module,
        optimizer=megatrain.AdamW(lr=1e-5, weight_decay=0.01),
        master=arguments.master,
        moments=arguments.moments,
        threads=arguments.threads,
        host_memory=arguments.host_memory,
        hardware=arguments.hardware,
        max_grad_norm=1.0,
    )
    fill_random(model)
    print(f"{arguments.model}, {len(shape.blocks)} blocks; tiles and weights in {time.perf_counter() - started:.1f} s")
    print(model.memory_report(), flush=True)
    hardware = preset(arguments.hardware) if arguments.hardware else None
    if hardware is None and model.device.type == "cuda":
        hardware = megatrain.measured_hardware()
    print(hardware, flush=True)
    about = machine(model, arguments.commit)
    for row in rows:
        key = (row["micro"], row["length"], row["accumulate"])
        if len(arguments.layers) > 1:
            row = dict(row, name=f"{row['name']}, {layers} blocks")
        try:
            results.append(run_row(model, row, shape, resident.get(key), hardware, arguments.profile))
        except (torch.cuda.OutOfMemoryError, MemoryError) as error:
            placed = placement_of_failed(model, row, len(shape.blocks))
            results.append(dict(row, placement=placed, error=str(error).splitlines()[0][:150]))
            torch.cuda.set_per_process_memory_fraction(1.0)
        if arguments.trace:
            model.export_trace(arguments.trace / f"{row['name'].replace(' ', '-')}.trace.json")
        if arguments.json:
            asked = {key: value for key, value in vars(arguments).items() if not isinstance(value, Path)}
            found = dict(machine=about, arguments=asked, rows=results)
            arguments.json.write_text(json.dumps(found, indent=1, default=str) + "\n")
    model.close()
    return about


def layer_counts(text: str) -> list[int]:
    return [int(count) for count in text.split(",")]


if __name__ == "__main__":
    main()
