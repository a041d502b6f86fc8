"""megatrain's update beside torch's fused CPU AdamW and DeepSpeed's CPU Adam, in turns on the same memory.

    python benchmarks/python/cpu_adam.py --millions 64 --threads 16 --json cpu_adam.json

Kernels are counted by the bytes that each has to move: 26 a parameter for megatrain's default format, 28 for fp32
weights, gradients and moments. A step is what turns gradients that arrived in bf16 into new bf16 weights on an fp32
master: megatrain's update does all of it, the clipping coefficient given; the others' need passes around theirs. Each
round runs everybody once; ratios are medians over rounds of neighbours in time. DeepSpeed is left out, with a line,
where it is not installed."""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

# OpenMP's threads go on spinning for a while after their work, and would take the next one's cores.
PAUSE = 0.03


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--millions", type=int, default=64, help="of parameters")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--commit", default="", help="of the source, for the JSON")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    # Read once, when the OpenMP runtimes of torch and of DeepSpeed's extension are loaded.
    os.environ["OMP_NUM_THREADS"] = str(arguments.threads)
    result = compare(arguments.millions * 10**6, arguments.threads, arguments.rounds)
    if arguments.json:
        arguments.json.write_text(json.dumps({"commit": arguments.commit, **result}, indent=1) + "\n")


def compare(parameters: int, threads: int, rounds: int) -> dict[str, Any]:
    import torch
    from adam_peers import CLIP, FP32, SPLIT, Contestant, Peers, Tiles

    from megatrain import _native

    torch.set_num_threads(threads)
    tiles = Tiles(parameters, threads)
    peers = Peers(tiles)
    optimizers = {"torch fused": peers.torch_fused()}
    try:
        optimizers["DeepSpeed"] = peers.deepspeed()
    except ImportError as error:
        print(f"DeepSpeed: not measured ({error})")
    agree(tiles, peers, optimizers)

    kernels = [
        Contestant("megatrain, default", 26, lambda: tiles.update(SPLIT)),
        Contestant("megatrain, fp32", 28, lambda: tiles.update(FP32)),
        *(Contestant(name, 28, optimizer.step) for name, optimizer in optimizers.items()),
    ]
    steps = [Contestant("megatrain, default", 26, lambda: tiles.update(SPLIT, CLIP))]
    for name, optimizer in optimizers.items():
        steps.append(Contestant(f"{name}, norm given", 42, lambda it=optimizer: peers.clipped_step(it)))
        steps.append(Contestant(f"{name}, all passes", 52, lambda it=optimizer: peers.whole_step(it)))
    seconds = measure([*kernels, *steps], rounds)
    machine = f"{_native.cpu_model()}, {_native.usable_cores()} usable cores, {tiles.store.isa}"
    run = f"{parameters / 1e6:.0f} M parameters, {threads} threads, {rounds} rounds"
    print(f"{machine}; torch {torch.__version__}; {run}")
    rows = {
        "kernels": table("kernel", kernels, seconds[: len(kernels)], parameters),
        "steps": table("step", steps, seconds[len(kernels) :], parameters),
    }
    return {"machine": machine, "python": platform.python_version(), "torch": torch.__version__,
            "parameters": parameters, "threads": threads, "rounds": rounds, **rows}  # fmt: skip


def agree(tiles: Any, peers: Any, optimizers: dict[str, Any]) -> None:
    """All compute the same: one step from the same values, fp32."""
    from adam_peers import FP32, LR

    results = {}
    for name, step in {"megatrain": lambda: tiles.update(FP32), **{k: o.step for k, o in optimizers.items()}}.items():
        tiles.reset()
        step()
        results[name] = peers.parameter.detach()[:100000].clone()
    tiles.reset()
    for name, weights in results.items():
        off = float((weights - results["megatrain"]).abs().max())
        if not off <= 1e-2 * LR:
            raise SystemExit(f"{name} differs from megatrain by {off}, {off / LR:.3f} of the learning rate")


def measure(contestants: Sequence[Any], rounds: int) -> list[list[float]]:
    """Seconds by contestant and round; a first round warms up."""
    seconds: list[list[float]] = [[] for _ in contestants]
    for turn in range(-1, rounds):
        for each, times in zip(contestants, seconds, strict=True):
            time.sleep(PAUSE)
            began = time.perf_counter()
            each.run()
            if turn >= 0:
                times.append(time.perf_counter() - began)
    return seconds


def table(title: str, contestants: Sequence[Any], seconds: Sequence[Sequence[float]], parameters: int) -> list[Any]:
    rows = []
    print(f"\n{title:<26} B/param {'GB/s':>24} {'Mparam/s':>24}  first one, times as fast")
    for each, times in zip(contestants, seconds, strict=True):
        millions = [parameters / taken / 1e6 for taken in times]
        gigabytes = [each.nbytes * rate / 1e3 for rate in millions]
        ratio = statistics.median(own / first for own, first in zip(times, seconds[0], strict=True))
        print(f"{each.name:<26} {each.nbytes:>7} {spread(gigabytes, 1):>24} {spread(millions, 0):>24}  {ratio:.2f}")
        rows.append(dict(name=each.name, bytes_per_parameter=each.nbytes, seconds=list(times), first_is_faster=ratio))
    return rows


def spread(values: Sequence[float], digits: int) -> str:
    return f"{statistics.median(values):.{digits}f} ({min(values):.{digits}f}-{max(values):.{digits}f})"


if __name__ == "__main__":
    main()
