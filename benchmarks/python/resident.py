"""The resident step: the same model with nothing moved and nothing recomputed, as fast as the device allows.

    python benchmarks/python/resident.py --model 7b --micro 16 --length 1024 --accumulate 4

Layers times the forward and backward of one compiled layer, plus head, loss and embedding, so that models
larger than the device have one too. Neither an update nor the summing of gradients is counted."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from dataclasses import asdict, dataclass

import torch
import torch.nn.functional as F
from shapes import attention, resident_layer


@dataclass(frozen=True)
class ResidentStep:
    """Seconds; TFLOPS = 6 * all parameters * tokens / seconds."""

    seconds: float
    layer_seconds: float
    """Forward and backward of one layer for one micro-batch."""
    outside_seconds: float
    """Head, loss and embedding of one micro-batch."""
    parameters: int
    tokens: int

    @property
    def tflops(self) -> float:
        return 6.0 * self.parameters * self.tokens / self.seconds / 1e12


def resident_step(model: str, micro: int, length: int, accumulate: int, layers: int | None = None) -> ResidentStep:
    """Measured on the current device, whose memory is given back."""
    with attention():
        found = _measure(model, micro, length, accumulate, layers)
    torch.cuda.empty_cache()
    return found


def _measure(name: str, micro: int, length: int, accumulate: int, layers: int | None) -> ResidentStep:
    config, layer, rotary = resident_layer(name, layers)
    hidden = torch.randn(micro, length, config.hidden_size, device="cuda", dtype=torch.bfloat16)
    positions = rotary(hidden, torch.arange(length, device="cuda")[None])
    direction = torch.randn_like(hidden)
    weights = list(layer.parameters())
    compiled = torch.compile(layer)

    def layer_once() -> None:
        entered = hidden.detach().requires_grad_()
        output = compiled(entered, position_embeddings=positions, attention_mask=None)
        torch.autograd.grad(output, [entered, *weights], direction)

    embedding = torch.randn(config.vocab_size, config.hidden_size, device="cuda", dtype=torch.bfloat16)
    head = torch.randn_like(embedding).mul_(0.02).requires_grad_()
    embedding.requires_grad_()
    ids = torch.randint(0, config.vocab_size, (micro * length,), device="cuda")

    def chunk_loss(states: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        normed = F.rms_norm(states, (config.hidden_size,))
        return F.cross_entropy((normed @ head.t()).float(), targets, reduction="sum")

    compiled_loss = torch.compile(chunk_loss)

    def outside_once() -> None:
        entered = hidden.view(-1, config.hidden_size).detach().requires_grad_()
        head_gradient = torch.zeros_like(head)
        for begin in range(0, entered.shape[0], 4096):
            states = entered[begin : begin + 4096]
            loss = compiled_loss(states, ids[begin : begin + 4096])
            gradients = torch.autograd.grad(loss, [entered, head])
            head_gradient += gradients[1]
        torch.autograd.grad(F.embedding(ids, embedding), embedding, direction.view(-1, config.hidden_size))

    layer_seconds, outside_seconds = _seconds(layer_once), _seconds(outside_once)
    count = config.num_hidden_layers
    parameters = count * sum(w.numel() for w in weights) + 2 * embedding.numel() + config.hidden_size
    return ResidentStep(
        seconds=accumulate * (count * layer_seconds + outside_seconds),
        layer_seconds=layer_seconds,
        outside_seconds=outside_seconds,
        parameters=parameters,
        tokens=accumulate * micro * length,
    )


def _seconds(work: Callable[[], None], warm_ups: int = 3, least: float = 2.0) -> float:
    """Of one call: calls go on for `least` seconds, as long as half a step, since a GPU that is busy all the time is
    slower than in a burst. By events, the mean of the second half."""
    for _ in range(warm_ups):
        work()
    halves = []
    for seconds in (least / 2, least / 2):
        repeats, spent = 0, 0.0
        while spent < seconds:
            begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            begin.record()
            for _ in range(8):
                work()
            end.record()
            end.synchronize()
            spent += begin.elapsed_time(end) / 1e3
            repeats += 8
        halves.append(spent / repeats)
    return halves[-1]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="7b")
    parser.add_argument("--layers", type=int)
    parser.add_argument("--micro", type=int, default=16)
    parser.add_argument("--length", type=int, default=1024)
    parser.add_argument("--accumulate", type=int, default=4)
    arguments = parser.parse_args()
    found = resident_step(
        arguments.model, arguments.micro, arguments.length, arguments.accumulate, arguments.layers
    )
    print(json.dumps(asdict(found)))
    print(
        f"resident step of {arguments.model}: {found.seconds:.3f} s, {found.tflops:.1f} TFLOPS (layer "
        f"{found.layer_seconds * 1e3:.2f} ms, head, loss and embedding {found.outside_seconds * 1e3:.2f} ms a "
        "micro-batch)"
    )


if __name__ == "__main__":
    main()
