"""Layer-major order: all micro-batches at one block before the next, forward and back.

Each micro-batch's own forward is parked at its next block; the scheduler runs that block for all that
are parked there. Back, the log of calls is walked in reverse."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import torch

from megatrain.calls import BlockCall, BlockOutput
from megatrain.rng import RngState

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence
    from contextlib import AbstractContextManager

    from megatrain.blocks import Block
    from megatrain.calls import BlockRunner
    from megatrain.parking import ParkedForward
    from megatrain.units import TiledParameter, Unit


class Weights(Protocol):
    """Where blocks get their weights: the ring of slots, or copies for the self-check."""

    def on_device(self, block: Block) -> AbstractContextManager[dict[str, torch.Tensor]]:
        """The block's weights, by their names in it, for work queued inside of the `with`."""

    def version(self, block: Block) -> int:
        """Changes when the block's weights do."""


class Sink(Protocol):
    """Where gradients go."""

    def add(self, unit: Unit, gradients: Iterable[tuple[TiledParameter, torch.Tensor | None]]) -> None:
        """Add to the unit's sum."""

    def store(self, unit: Unit) -> None:
        """The unit's sum is complete."""

    def clear(self) -> None:
        """Forget all gradients."""


@dataclass(eq=False)
class LoggedCall:
    """A call of one micro-batch, kept until its gradients are taken."""

    micro_batch: int
    call: BlockCall
    output: BlockOutput


@dataclass(eq=False)
class Round:
    """One block, run for the micro-batches that were parked at it."""

    block: Block
    calls: list[LoggedCall]


class Boundary:
    """A tensor that flows into blocks without being a block's output itself (a mask made from the
    embedding, the encoder's states). Its gradient is summed over the blocks that take it, and goes on
    through the graph behind it once, when the first of them has been walked back."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor
        self.uses = 0
        self._sum: torch.Tensor | None = None

    def add(self, gradient: torch.Tensor | None) -> None:
        if gradient is not None:
            self._sum = gradient if self._sum is None else self._sum + gradient
        self.uses -= 1
        if self.uses == 0 and self._sum is not None:
            # The graphs of several boundaries may share nodes.
            torch.autograd.backward([self.tensor], [self._sum], retain_graph=True)
            self._sum = None


class LayerMajor:
    """One step's forwards and their way back. Used once."""

    def __init__(
        self,
        weights: Weights,
        runner: BlockRunner,
        device: torch.device,
        check_interrupts: Callable[[], None] = lambda: None,
    ) -> None:
        self._weights = weights
        self._runner = runner
        self._device = device
        self._check_interrupts = check_interrupts
        self._rounds: list[Round] = []
        self._boundaries: dict[tuple[int, int], Boundary] = {}

    def forward(
        self, runs: Sequence[ParkedForward], when_done: Callable[[int, Any], None], keep: bool
    ) -> None:
        """Run all forwards to their ends; `when_done(micro-batch, result)` is called as each ends, so
        that what only its loss needs is freed before the next. `keep` logs the calls for `backward`."""
        for index, run in enumerate(runs):
            self._resume(index, run, None, None, when_done)
        while waiting := [(index, run) for index, run in enumerate(runs) if run.parked is not None]:
            self._check_interrupts()
            block = min((run.parked.block for _, run in waiting if run.parked), key=lambda b: b.unit.tile)
            at_block = [(index, run) for index, run in waiting if run.parked and run.parked.block is block]
            results: list[tuple[int, ParkedForward, BlockOutput, RngState]] = []
            logged: list[LoggedCall] = []
            with self._weights.on_device(block) as weights:
                for index, run in at_block:
                    parked = run.parked
                    assert parked is not None
                    call = BlockCall.capture(block, parked.args, parked.kwargs, parked.rng)
                    call.rng.restore(self._device)
                    # In the micro-batch's own context: hooks on sub-modules may look at its variables.
                    with torch.set_grad_enabled(parked.grad_enabled):
                        output = parked.context.run(self._runner.run, call, weights)
                    results.append((index, run, output, RngState.capture(self._device)))
                    if keep and parked.grad_enabled:
                        logged.append(LoggedCall(index, call, output))
            if logged:
                self._log(Round(block, logged))
            for index, run, output, rng in results:
                self._resume(index, run, output.tree, rng, when_done)

    @staticmethod
    def _resume(
        index: int,
        run: ParkedForward,
        answer: Any,
        rng: RngState | None,
        when_done: Callable[[int, Any], None],
    ) -> None:
        run.resume(answer, rng)
        if run.done:
            result, run.result = run.result, None
            when_done(index, result)

    def _log(self, finished: Round) -> None:
        self._rounds.append(finished)
        for logged in finished.calls:
            for tensor in logged.call.differentiable():
                key = (logged.micro_batch, id(tensor))
                self._boundaries.setdefault(key, Boundary(tensor)).uses += 1

    def backward(self, sink: Sink, outside: Callable[[TiledParameter], Unit]) -> None:
        """Walk the log back. A block's gradients go down when its first call has been walked."""
        calls_left = Counter(finished.block.unit.tile for finished in self._rounds)
        while self._rounds:
            self._check_interrupts()
            finished = self._rounds.pop()
            unit = finished.block.unit
            with self._weights.on_device(finished.block) as weights:
                for logged in finished.calls:
                    self._walk(logged, weights, sink, outside)
            calls_left[unit.tile] -= 1
            if calls_left[unit.tile] == 0:
                sink.store(unit)
        self._boundaries.clear()

    def _walk(
        self,
        logged: LoggedCall,
        weights: dict[str, torch.Tensor],
        sink: Sink,
        outside: Callable[[TiledParameter], Unit],
    ) -> None:
        call = logged.call
        output_gradients = [None if leaf is None else leaf.grad for leaf in logged.output.leaves]
        tensors = call.tensors()
        input_gradients: Sequence[torch.Tensor | None] = [None] * len(tensors)
        if any(gradient is not None for gradient in output_gradients):
            input_gradients, parameter_gradients = self._runner.gradients(call, weights, output_gradients)
            for parameter, gradient in parameter_gradients:
                sink.add(outside(parameter), [(parameter, gradient)])
        for leaf in logged.output.leaves:
            if leaf is not None:
                leaf.grad = None
        for tensor, gradient in zip(tensors, input_gradients, strict=True):
            if tensor.requires_grad:
                key = (logged.micro_batch, id(tensor))
                boundary = self._boundaries[key]
                boundary.add(gradient)
                if boundary.uses == 0:
                    del self._boundaries[key]


def each_unit(units: Sequence[Unit], order: Sequence[int]) -> Iterator[Unit]:
    """The units, those named in `order` (by tile) first and in that order."""
    by_tile = {unit.tile: unit for unit in units}
    for tile in dict.fromkeys([*order, *by_tile]):
        yield by_tile[tile]
