"""Small modules with stacks of blocks in which the traits are drawn that break streaming, and their batches."""

from __future__ import annotations

from contextvars import ContextVar
from dataclasses import dataclass

import torch
from torch import nn

_COLLECTED: ContextVar[list[torch.Tensor]] = ContextVar("collected")
"""By hooks, in one forward."""


@dataclass(frozen=True)
class BlockSpec:
    inner: int
    """Width inside of the block."""
    bias: bool
    scale: float
    """An attribute: blocks of equal shapes differ in it."""
    buffer: bool
    experts: int
    """Listed ones, of which a row goes to the one that the batch says; 0 for none."""
    idle: bool
    """A parameter between the others that no forward uses."""
    sometimes: bool
    """The same, used by batches whose number is odd."""
    shares: bool
    """A parameter with the first block of the stack."""
    writes: bool
    """Into a mapping, which all blocks read."""
    twice: bool
    """Called two times in a forward."""
    dropout: float


@dataclass(frozen=True)
class StackSpec:
    width: int
    stacks: tuple[tuple[BlockSpec, ...], ...]
    tied: bool
    """The inlet with the outlet."""
    hooked: bool
    """What inner modules compute is collected by hooks, and is part of the loss."""
    frozen: tuple[int, ...]
    """Parameters by number, modulo how many there are."""


@dataclass
class Output:
    loss: torch.Tensor


class Block(nn.Module):
    def __init__(self, width: int, spec: BlockSpec) -> None:
        super().__init__()
        self.spec = spec
        self.first = nn.Linear(width, spec.inner, bias=spec.bias)
        if spec.idle:
            self.idle = nn.Parameter(torch.randn(5))
        if spec.sometimes:
            self.now_and_then = nn.Parameter(torch.randn(spec.inner))
        self.shared = nn.Parameter(torch.randn(width))
        self.experts = nn.ModuleList(nn.Linear(spec.inner, spec.inner) for _ in range(spec.experts))
        if spec.buffer:
            self.register_buffer("shift", torch.randn(spec.inner))
        self.last = nn.Linear(spec.inner, width, bias=spec.bias)

    def forward(
        self, x: torch.Tensor, expert: torch.Tensor, *, number: torch.Tensor, notes: dict[str, torch.Tensor]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        y = torch.tanh(self.first(x * self.shared))
        if self.spec.buffer:
            y = y + self.shift
        if self.spec.sometimes and number[0] % 2:
            y = y * self.now_and_then
        if self.spec.experts:
            routed = torch.zeros_like(y)
            for index, inner in enumerate(self.experts):
                rows = expert % self.spec.experts == index
                if rows.any():
                    routed[rows] = inner(y[rows])
            y = y + torch.tanh(routed)
        y = nn.functional.dropout(y, self.spec.dropout, self.training)
        for note in notes.values():
            x = x + 0.1 * note
        if self.spec.writes:
            notes[f"of {self.spec.inner}"] = torch.sin(self.last(y))
        return x + self.spec.scale * self.last(y), y.square().mean()


class RandomStacks(nn.Module):
    def __init__(self, spec: StackSpec) -> None:
        super().__init__()
        self.spec = spec
        self.inlet = nn.Linear(spec.width, spec.width)
        self.stacks = nn.ModuleDict(
            {f"stack{i}": nn.ModuleList(Block(spec.width, b) for b in blocks) for i, blocks in enumerate(spec.stacks)}
        )
        self.outlet = nn.Linear(spec.width, spec.width)
        if spec.tied:
            self.outlet.weight = self.inlet.weight
        for stack in self.stacks.values():
            for block in stack:
                if block.spec.shares:
                    block.shared = stack[0].shared
        parameters = list(self.parameters())
        for number in spec.frozen:
            parameters[number % len(parameters)].requires_grad_(False)
        if spec.hooked:
            for stack in self.stacks.values():
                stack[-1].first.register_forward_hook(self._collect)

    @staticmethod
    def _collect(module: nn.Module, args: tuple[torch.Tensor], output: torch.Tensor) -> None:
        _COLLECTED.get().append(output)

    def forward(self, x: torch.Tensor, y: torch.Tensor, expert: torch.Tensor, number: torch.Tensor) -> Output:
        collected: list[torch.Tensor] = []
        _COLLECTED.set(collected)
        aside = torch.zeros((), device=x.device)
        x = self.inlet(x)
        notes: dict[str, torch.Tensor] = {}
        for stack in self.stacks.values():
            for block in stack:
                for _ in range(2 if block.spec.twice else 1):
                    x, of_block = block(x, expert, number=number, notes=notes)
                    aside = aside + of_block
        for entry in collected:
            aside = aside + entry.cos().mean()
        return Output((self.outlet(x) - y).square().mean() + 0.1 * aside)


def random_batch(seed: int, rows: int, width: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    x, y = (torch.randn(rows, width, generator=generator) for _ in range(2))
    expert = torch.randint(0, 3, (rows,), generator=generator)
    return dict(x=x, y=y, expert=expert, number=torch.full((rows,), seed))
