"""`megatrain plan CONFIG`: what would go where, and how long a step would take."""

import argparse
import importlib.util
import json
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatrain import _native
from megatrain.train.errors import UserError, one_line

from .places import check_file

if TYPE_CHECKING:
    from megatrain.planner import Hardware, Job, ModelShape
    from megatrain.train.config import TrainSettings

_NEEDS = ("yaml", "pydantic")


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "config",
        metavar="CONFIG",
        nargs="?",
        help="YAML file of a run, of which model: suffices, or a model directory; config.json suffices in either",
    )
    parser.add_argument(
        "--gpu",
        metavar="PRESET",
        help="H200, H100, A100, RTX 4090, RTX 3090 or GH200; without, this machine is measured",
    )
    parser.add_argument("--gpu-memory", metavar="SIZE", help="of the device that may be used, such as 24GiB")
    parser.add_argument("--host-memory", metavar="SIZE", help="that may be used, such as 128GiB")
    parser.add_argument(
        "--tokens",
        metavar="N",
        type=int,
        help="of a step; the size of the micro-batch is chosen, in place of the batch in CONFIG",
    )
    parser.add_argument(
        "--set", dest="overrides", metavar="KEY=VALUE", action="append", default=[], help="as of `megatrain train`"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the plan there, too")
    parser.add_argument("--table", action="store_true", help="print docs/which-model-fits.md; takes minutes")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> None:
    if arguments.table:
        from megatrain.planner.table import page

        for line in page():
            print(line, flush=True)
        return
    if arguments.json is not None:
        check_file(arguments.json, f"--json {arguments.json}")
    if arguments.config is None:
        raise UserError("the following arguments are required: CONFIG (see `megatrain plan --help`)")
    missing = [name for name in _NEEDS if importlib.util.find_spec(name) is None]
    if missing:
        raise UserError(f'{", ".join(missing)} not installed; run: pip install "megatrain[train]"')
    from megatrain.planner import CannotFit, describe, make_plan, make_plan_for_tokens

    settings = _settings(arguments.config, arguments.overrides)
    hardware = _hardware(arguments, settings)
    job = _job(settings, arguments.tokens)
    shape = _shape(settings)
    make = make_plan if arguments.tokens is None else make_plan_for_tokens
    try:
        plan = make(shape, job, hardware)
    except CannotFit as refused:
        raise UserError(str(refused)) from None
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(plan.to_json(), indent=2) + "\n")
    for line in describe(plan):
        print(line)


def _settings(config: str, overrides: list[str]) -> "TrainSettings":
    from megatrain.train.config_file import check, read_values

    values: dict[str, Any]
    if Path(config).is_dir():
        values = {"model": config}
        if overrides:
            raise UserError("--set needs a YAML file, not a model directory")
    else:
        values = read_values(config, overrides)
    # A plan needs neither text nor a number of steps.
    length = {} if "epochs" in values else {"steps": 1}
    return check({"data": "none", **length, **values}, config)


def _job(settings: "TrainSettings", tokens: int | None) -> "Job":
    from megatrain.planner import Batch, Job

    length = settings.sequence_length
    batch = Batch(micro_batches=settings.batch.accumulate, rows=settings.batch.micro_batch, length=length)
    if tokens is not None:
        if tokens < length or tokens % length:
            raise UserError(f"--tokens is {tokens}; it should be a multiple of sequence_length, {length}")
        batch = Batch(micro_batches=tokens // length, rows=1, length=length)
    precision = settings.precision
    # "auto" is bfloat16 wherever there is a GPU, and a plan is for one.
    weights = "fp32" if precision.dtype == "float32" else "bf16_split" if precision.master == "split" else "bf16"
    # The trainer skips steps whose norm is not finite, clipping or not: updates wait for the norm.
    return Job(batch=batch, tile_format=_native.TileFormat(weights, precision.moments), slots=settings.slots)


def _shape(settings: "TrainSettings") -> "ModelShape":
    from megatrain.planner import ModelShape
    from megatrain.train.model import describe_shape, lora_config, open_directory

    if isinstance(settings.model, str):
        source = open_directory(settings.model, weights=False)
        name = Path(settings.model).name
    else:
        vocabulary = 257 if settings.tokenizer.type == "bytes" else settings.tokenizer.vocab_size
        source = describe_shape(settings.model, vocabulary, None)
        name = f"new {settings.model.type}"
    try:
        return ModelShape.from_config(source.config, name, lora_config(settings))
    except (ValueError, TypeError, ZeroDivisionError, KeyError) as error:
        raise UserError(f"model: {one_line(error)}") from error


def _hardware(arguments: argparse.Namespace, settings: "TrainSettings") -> "Hardware":
    """What the command line says goes before what the run's file says."""
    from megatrain.planner import preset
    from megatrain.settings import parse_bytes

    try:
        gpu_memory = parse_bytes(arguments.gpu_memory, "--gpu-memory")
        gpu_memory = gpu_memory or parse_bytes(settings.device_memory, "device_memory")
        host_memory = parse_bytes(arguments.host_memory, "--host-memory")
        host_memory = host_memory or parse_bytes(settings.host_memory, "host_memory")
        gpu = arguments.gpu or (None if settings.hardware == "auto" else settings.hardware)
        hardware = _this_machine() if gpu is None else preset(gpu)
    except ValueError as error:
        raise UserError(str(error)) from None
    return replace(
        hardware,
        gpu_memory=gpu_memory or hardware.gpu_memory,
        host_memory=host_memory or hardware.host_memory,
    )


def _this_machine() -> "Hardware":
    """Measured in two seconds."""
    import torch

    from megatrain.hardware_probe import measured_hardware
    from megatrain.planner.hardware import PRESETS

    if _native.cuda_device_count() == 0 or not torch.cuda.is_available():
        raise ValueError(f"there is no GPU here to plan for: name one with --gpu ({', '.join(PRESETS)})")
    return measured_hardware()
