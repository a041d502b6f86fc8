"""A model that fits the device: planned by megatrain beside plain PyTorch, in processes that take turns.

    python benchmarks/python/beside_torch.py --model 0.5b --micro 16 --accumulate 4 --host-memory 100GiB

Plain PyTorch is what one would write by hand for speed: all on the device, blocks compiled, nothing recomputed, the
loss in chunks (megatrain's own, which is the faster one), fp32 masters with fused AdamW, gradients of micro-batches
summed in fp32, clipping to 1.0. Both begin with the same weights and see the same tokens, so their losses agree.

Seconds of a step from the return of a process's second step to the return of its last with the device's work done, and
of megatrain its updates too. TFLOPS = 6 * all parameters * tokens / seconds."""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import time
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median

os.environ.setdefault("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")

import torch
from device_profile import profile
from machine import machine
from shapes import attention, fill_random, meta_model, random_weights
from torch import nn

import megatrain
from megatrain.chunked_loss import chunked_cross_entropy

WARM_UP = 2
"""Steps that compile and settle."""


@dataclass(frozen=True)
class Job:
    model: str
    layers: int | None
    micro: int
    length: int
    accumulate: int
    steps: int
    device: str
    host_memory: str | None
    profile: bool

    def micro_batches(self) -> list[torch.Tensor]:
        shape = (self.accumulate, self.micro, self.length)
        return list(torch.randint(0, 150000, shape, generator=torch.Generator().manual_seed(1)))


@dataclass(frozen=True)
class Run:
    system: str
    seconds: float
    losses: list[float]
    parameters: int
    peak_reserved_gib: float
    placement: str
    machine: dict[str, object]


class PlainStep:
    """A training step of PyTorch on fp32 masters."""

    def __init__(self, job: Job) -> None:
        device = torch.device(job.device)
        self.device = device
        self.module = meta_model(job.model, job.layers).to(torch.bfloat16).to_empty(device=device)
        for name, buffer in meta_model(job.model, job.layers).named_buffers():
            owner, _, leaf = name.rpartition(".")
            self.module.get_submodule(owner)._buffers[leaf] = buffer.to(device)
        self.weights = dict(self.module.named_parameters())
        self.masters = {
            name: nn.Parameter(random_weights(name, weight).to(device)) for name, weight in self.weights.items()
        }
        self._round()
        for master in self.masters.values():
            master.grad = torch.zeros_like(master)
        self.sums = [master.grad for master in self.masters.values()]
        decayed = {name for name, weight in self.weights.items() if weight.ndim > 1}
        groups = [
            dict(params=[p for name, p in self.masters.items() if name in decayed], weight_decay=0.01),
            dict(params=[p for name, p in self.masters.items() if name not in decayed], weight_decay=0.0),
        ]
        self.adamw = torch.optim.AdamW(groups, lr=1e-5, fused=True)
        if device.type == "cuda":
            for layer in self.module.model.layers:
                layer.compile()

    @torch.no_grad()
    def _round(self) -> None:
        torch._foreach_copy_(list(self.weights.values()), list(self.masters.values()))

    def step(self, batches: list[torch.Tensor]) -> torch.Tensor:
        targets = sum(ids.shape[0] * (ids.shape[1] - 1) for ids in batches)
        whole = torch.zeros((), device=self.device)
        torch._foreach_zero_(self.sums)
        for ids in batches:
            labels = nn.functional.pad(ids[:, 1:], (0, 1), value=-100).reshape(-1)
            kept = (labels != -100).nonzero().squeeze(1)
            ids, labels = ids.to(self.device, non_blocking=True), labels.to(self.device, non_blocking=True)
            hidden = self.module.model(input_ids=ids).last_hidden_state
            loss = chunked_cross_entropy(
                hidden.reshape(-1, hidden.shape[-1]),
                self.module.lm_head.weight,
                None,
                labels,
                reduction="sum",
                kept_rows=kept,
                compile=True,
            )
            (loss / targets).backward()
            whole += loss.detach() / targets
            gradients = [weight.grad for weight in self.weights.values()]
            torch._foreach_add_(self.sums, gradients)
            for weight in self.weights.values():
                weight.grad = None
        nn.utils.clip_grad_norm_(list(self.masters.values()), 1.0)
        self.adamw.step()
        self._round()
        return whole


def run_plain(job: Job) -> Run:
    with attention():
        plain = PlainStep(job)
        losses, seconds = _timed(job, lambda batches: plain.step(batches), lambda: None)
    parameters = sum(weight.numel() for weight in plain.weights.values())
    return Run("plain PyTorch", seconds, losses, parameters, _peak(), "all on the device", {})


def run_streamed(job: Job) -> Run:
    model = megatrain.StreamedModel(
        meta_model(job.model, job.layers),
        optimizer=megatrain.AdamW(lr=1e-5, weight_decay=0.01),
        max_grad_norm=1.0,
        host_memory=job.host_memory,
        device=job.device,
    )
    fill_random(model)

    def step(batches: list[torch.Tensor]) -> torch.Tensor:
        return model.step([dict(input_ids=ids, labels=ids) for ids in batches]).loss_tensor

    losses, seconds = _timed(job, step, model.synchronize)
    resident = sum(model.placement.block(i).resident == "all" for i in range(len(model._parts.blocks)))
    placement = f"{resident} of {len(model._parts.blocks)} blocks resident; {model.unplanned or 'planned'}"
    parameters = model.memory_report().parameters
    return Run("megatrain", seconds, losses, parameters, _peak(), placement, machine(model, ""))


def _timed(job: Job, step, end) -> tuple[list[float], float]:  # type: ignore[no-untyped-def]
    """Losses of all steps and seconds of one after the warm-up. Losses are read at the end: that waits."""
    batches, losses = job.micro_batches(), []
    begin = 0.0
    for number in range(job.steps):
        losses.append(step(batches))
        if number + 1 == WARM_UP:
            _wait(job, end)
            begin = time.perf_counter()
    _wait(job, end)
    seconds = (time.perf_counter() - begin) / (job.steps - WARM_UP)
    if job.profile and job.device != "cpu":
        print(profile(lambda: step(batches)), flush=True)
    return [float(loss) for loss in losses], seconds


def _wait(job: Job, end) -> None:  # type: ignore[no-untyped-def]
    end()
    if job.device != "cpu":
        torch.cuda.synchronize()


def _peak() -> float:
    return torch.cuda.max_memory_reserved() / 2**30 if torch.cuda.is_available() else 0.0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="0.5b")
    parser.add_argument("--layers", type=int)
    parser.add_argument("--micro", type=int, default=16)
    parser.add_argument("--length", type=int, default=1024)
    parser.add_argument("--accumulate", type=int, default=4)
    parser.add_argument("--steps", type=int, default=8, help=f"of a process, {WARM_UP} of them to warm up")
    parser.add_argument("--rounds", type=int, default=2, help="processes of each")
    parser.add_argument("--host-memory")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--commit", default="", help="of the source, where git cannot say")
    parser.add_argument("--profile", action="store_true", help="one more step a process: kernels by time, idle times")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    if arguments.steps <= WARM_UP:
        raise SystemExit(f"--steps is {arguments.steps}; it must be above {WARM_UP}")
    job = Job(**{name: getattr(arguments, name) for name in Job.__dataclass_fields__})
    runs: list[Run] = []
    for _ in range(arguments.rounds):
        for run in (run_plain, run_streamed):
            with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as process:
                runs.append(process.submit(run, job).result())
            print(f"  {runs[-1].system}: {runs[-1].seconds:.4f} s, losses {runs[-1].losses}", flush=True)
    if arguments.json:
        arguments.json.write_text(json.dumps([asdict(run) for run in runs], indent=1) + "\n")
    tokens = job.micro * job.length * job.accumulate
    print(json.dumps(dict(runs[-1].machine, commit=arguments.commit or runs[-1].machine["commit"])))
    print(f"{job.model}, {runs[0].parameters / 1e9:.2f}B parameters, {tokens} tokens a step, clipping 1.0")
    print(f"{'system':14} {'s/step':>8} {'TFLOPS':>7} {'tok/s':>8} {'GiB':>6}  placement")
    for found in runs:
        tflops = 6.0 * found.parameters * tokens / found.seconds / 1e12
        print(
            f"{found.system:14} {found.seconds:8.4f} {tflops:7.1f} {tokens / found.seconds:8.0f} "
            f"{found.peak_reserved_gib:6.1f}  {found.placement}"
        )
    plain, ours = (median(run.seconds for run in runs if run.system == name) for name in ("plain PyTorch", "megatrain"))
    print(f"megatrain at {plain / ours:.1%} of plain PyTorch's speed")


if __name__ == "__main__":
    main()
