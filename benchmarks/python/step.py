"""Whole training steps at a Qwen2.5 shape: tokens/s, TFLOPS, memory, and what the device waited for.

    python benchmarks/python/step.py --model 7b --micro 16 --length 1024 --accumulate 4 --steps 5

TFLOPS = 6 * all parameters * tokens / wall time. The wall time runs from the return of the first step to
the return of the last: each step's updates overlap the next one, so every step is counted with one update."""

from __future__ import annotations

import argparse
import json
import platform
import subprocess
import time
from pathlib import Path

import torch
from shapes import fill_random, meta_model
from torch.nn.attention import SDPBackend, sdpa_kernel

import megatrain


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="7b")
    parser.add_argument("--layers", type=int)
    parser.add_argument("--micro", type=int, default=16)
    parser.add_argument("--length", type=int, default=1024)
    parser.add_argument("--accumulate", type=int, default=4)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--slots", type=int, default=2)
    parser.add_argument("--threads", type=int, default=0)
    parser.add_argument("--host-memory")
    parser.add_argument("--max-grad-norm", type=float, default=1.0)
    parser.add_argument("--commit", default="", help="of the source, where git cannot say")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--trace", type=Path)
    arguments = parser.parse_args()

    started = time.perf_counter()
    model = megatrain.StreamedModel(
        meta_model(arguments.model, arguments.layers),
        optimizer=megatrain.AdamW(lr=1e-5, weight_decay=0.01),
        max_grad_norm=arguments.max_grad_norm,
        slots=arguments.slots,
        threads=arguments.threads,
        host_memory=arguments.host_memory,
    )
    allocated = time.perf_counter() - started
    fill_random(model)
    memory = model.memory_report()
    print(f"tiles in {allocated:.1f} s, weights in {time.perf_counter() - started - allocated:.1f} s")
    print(memory, flush=True)

    generator = torch.Generator().manual_seed(1)
    shape = (arguments.accumulate, arguments.micro, arguments.length)
    ids = torch.randint(0, 150000, shape, generator=generator)
    batches = [dict(input_ids=rows, labels=rows) for rows in ids]
    tokens = ids.numel()
    flops = 6.0 * memory.parameters * tokens

    rows = []
    ends = []
    with sdpa_kernel([SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION, SDPBackend.MATH], set_priority=True):
        for step in range(1, arguments.steps + 1):
            report = model.step(batches)
            ends.append(time.perf_counter())
            rows.append(
                dict(
                    step=step,
                    seconds=report.seconds,
                    tflops=flops / report.seconds / 1e12,
                    loss=report.loss,
                    grad_norm=report.grad_norm,
                    wait_copy=report.wait_copy_seconds,
                    wait_update=report.wait_update_seconds,
                )
            )
            print(
                f"step {step}: {report.seconds:.3f} s  {rows[-1]['tflops']:.1f} TFLOPS  loss {report.loss:.4f}  "
                f"norm {report.grad_norm:.3f}  waiting: copies {report.wait_copy_seconds:.3f} s, updates "
                f"{report.wait_update_seconds:.3f} s",
                flush=True,
            )
            if step == 1:
                on_cuda = model.device.type == "cuda"
                setup_peak = torch.cuda.max_memory_reserved() if on_cuda else 0
    model.synchronize()
    drained = time.perf_counter()
    bandwidth = model.update_bandwidth()
    steady = (ends[-1] - ends[0]) / (arguments.steps - 1)
    result = dict(
        model=arguments.model,
        layers=arguments.layers,
        parameters=memory.parameters,
        tokens_per_step=tokens,
        micro_batches=arguments.accumulate,
        max_grad_norm=arguments.max_grad_norm,
        seconds_per_step=steady,
        tokens_per_second=tokens / steady,
        tflops=flops / steady / 1e12,
        tflops_with_last_drain=flops * (arguments.steps - 1) / (drained - ends[0]) / 1e12,
        update_bytes_per_second=bandwidth,
        host_bytes_per_parameter=memory.host_bytes_per_parameter,
        device_reserved_gib=(torch.cuda.max_memory_reserved() if on_cuda else 0) / (1 << 30),
        device_reserved_gib_first_step=setup_peak / (1 << 30),
        steps=rows,
        machine=machine(model, arguments.commit),
    )
    if arguments.trace:
        model.export_trace(arguments.trace)
    if arguments.json:
        arguments.json.write_text(json.dumps(result, indent=2) + "\n")
    print(json.dumps(result["machine"]))
    print(
        f"{arguments.model}: {memory.parameters / 1e9:.2f}B parameters, {tokens} tokens/step, "
        f"steps 2-{arguments.steps}: {steady:.3f} s/step, {result['tokens_per_second']:.0f} tokens/s, "
        f"{result['tflops']:.1f} TFLOPS "
        f"({result['tflops_with_last_drain']:.1f} with the last step's updates drained); "
        f"device {result['device_reserved_gib']:.1f} GiB reserved, "
        f"host {memory.host_bytes_per_parameter:.2f} B/parameter; updates at {bandwidth / 1e9:.0f} GB/s"
    )


def machine(model: megatrain.StreamedModel, commit: str) -> dict[str, object]:
    """Hardware, driver, versions and commit."""
    found: dict[str, object] = dict(
        cpu=megatrain._native.cpu_model(),
        cores=megatrain._native.usable_cores(),
        isa=model._tiles.store.isa,
        update_threads=model._tiles.store.threads,
        python=platform.python_version(),
        torch=torch.__version__,
        megatrain=megatrain.__version__,
        date=time.strftime("%Y-%m-%d"),
    )
    import transformers

    found["transformers"] = transformers.__version__
    if model.device.type == "cuda":
        found["gpu"] = torch.cuda.get_device_name(model.device)
        query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
        found["driver"] = subprocess.run(query, capture_output=True, text=True).stdout.strip().splitlines()[0]
    described = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True)
    found["commit"] = commit or described.stdout.strip() or "unknown"
    return found


if __name__ == "__main__":
    main()
