"""The order of work: micro-batches through blocks, forward and back.

Each micro-batch's own forward is parked at its next block; the scheduler runs that block for all that are
parked there. With all micro-batches at once that is layer-major order, with one after the other
micro-batch-major. Back, the log of calls is walked in reverse."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import torch

from megatrain.calls import BlockCall, CallRecord, OutputSlot
from megatrain.rng import RngState

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence
    from contextlib import AbstractContextManager

    from torch.autograd.graph import GradientEdge

    from megatrain.block_runner import BlockRunner
    from megatrain.blocks import Block
    from megatrain.calls import BlockOutput, Keeping
    from megatrain.parking import ParkedForward
    from megatrain.units import TiledParameter, Unit


class Weights(Protocol):
    """Where blocks get their weights: the device's memory, or copies for the self-check."""

    def on_device(self, block: Block) -> AbstractContextManager[dict[str, torch.Tensor]]:
        """The block's weights, by their names in it, for work queued inside of the `with`."""

    def version(self, block: Block) -> object:
        """Changes when the block's weights do."""


class Sink(Protocol):
    """Where gradients go."""

    def add(self, unit: Unit, gradients: Iterable[tuple[TiledParameter, torch.Tensor | None]]) -> None:
        """Add to the unit's sum."""

    def count_experts(self, unit: Unit, used: torch.Tensor) -> None:
        """Those of the unit that got tokens in a call whose gradients were added."""

    def store(self, unit: Unit) -> None:
        """The unit's sum is complete."""

    def clear(self) -> None:
        """Forget all gradients."""


@dataclass(eq=False)
class LoggedCall:
    """A call of one micro-batch, kept until its gradients are taken."""

    micro_batch: int
    record: CallRecord
    outputs: list[OutputSlot | None]
    """By the flattened output; None for what is no fresh leaf."""


@dataclass(eq=False)
class Round:
    """One block, run for the micro-batches that were parked at it."""

    block: Block
    calls: list[LoggedCall]


class Boundary:
    """A tensor that flows into blocks without being a block's output itself (a mask made from the embedding,
    the encoder's states). Its gradient is summed over the blocks that take it, and goes on through the graph
    behind it once, when the first of them has been walked back."""

    def __init__(self, edge: GradientEdge) -> None:
        self.edge = edge
        self.uses = 0
        self._sum: torch.Tensor | None = None

    def add(self, gradient: torch.Tensor | None) -> None:
        if gradient is not None:
            self._sum = gradient if self._sum is None else self._sum + gradient
        self.uses -= 1
        if self.uses == 0 and self._sum is not None:
            # The graphs of several boundaries may share nodes.
            torch.autograd.backward([self.edge], [self._sum], retain_graph=True)
            self._sum = None


class ForwardAndBack:
    """The forwards of some micro-batches of a step, run side by side, and their way back. Used once.

    keeping: by block and micro-batch. first: the number of the first of these micro-batches in the step."""

    FETCHED_AHEAD = 2
    """Calls whose tensors are on their way back from the host before their turn."""

    def __init__(
        self,
        weights: Weights,
        runner: BlockRunner,
        device: torch.device,
        keeping: Callable[[Block, int], Keeping],
        check_interrupts: Callable[[], None] = lambda: None,
        first: int = 0,
    ) -> None:
        self._weights = weights
        self._runner = runner
        self._device = device
        self._keeping = keeping
        self._check_interrupts = check_interrupts
        self._first = first
        self._rounds: list[Round] = []
        self._boundaries: dict[tuple[object, int], Boundary] = {}

    def forward(
        self, runs: Sequence[ParkedForward], when_done: Callable[[int, Any], None], differentiable: bool
    ) -> None:
        """Run all forwards to their ends; `when_done(micro-batch, result)` is called as each ends, so
        that what only its loss needs is freed before the next. `differentiable` logs the calls for
        `backward`."""
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
                    run.parked = None  # its arguments live as long as the call needs them
                    call = BlockCall.capture(block, parked.args, parked.kwargs, parked.rng)
                    call.rng.restore(self._device)
                    keeping = self._keeping(block, self._first + index)
                    backward = differentiable and parked.grad_enabled
                    # In the micro-batch's own context: hooks on sub-modules may look at its variables.
                    with torch.set_grad_enabled(parked.grad_enabled):
                        output = parked.context.run(
                            self._runner.run, call, weights, keeping, differentiable=backward
                        )
                    del parked
                    results.append((index, run, output, RngState.capture(self._device)))
                    if backward:
                        outputs = [
                            OutputSlot(leaf) if leaf is not None and leaf.requires_grad else None
                            for leaf in output.leaves
                        ]
                        if any(slot is not None for slot in outputs):
                            logged.append(LoggedCall(index, output.record, outputs))
            if logged:
                self._log(Round(block, logged))
            while results:  # what the modules do not hold any more is freed as they go on
                index, run, output, rng = results.pop(0)
                tree, output = output.tree, None  # type: ignore[assignment]
                self._resume(index, run, tree, rng, when_done)

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
            for given in logged.record.call.inputs:
                if given.edge is not None:
                    self._boundaries.setdefault(_key(given.edge), Boundary(given.edge)).uses += 1

    def backward(
        self,
        sink: Sink,
        outside: Callable[[TiledParameter], Unit],
        when_complete: Callable[[Unit], None] = lambda unit: None,
    ) -> None:
        """Walk the log back. `when_complete` is called for a block's unit when its first call has been walked."""
        calls_left = Counter(finished.block.unit.tile for finished in self._rounds)
        ahead = self._calls_back()
        while self._rounds:
            self._check_interrupts()
            finished = self._rounds.pop()
            unit = finished.block.unit
            with self._weights.on_device(finished.block) as weights:
                for position, logged in enumerate(finished.calls):
                    next(ahead, None)
                    self._walk(logged, weights, sink, outside)
                    finished.calls[position] = None  # type: ignore[call-overload]
                    del logged
            calls_left[unit.tile] -= 1
            if calls_left[unit.tile] == 0:
                when_complete(unit)
        self._boundaries.clear()

    def reaches(self, tile: int, leaves: set[int]) -> bool:
        """The way back can still bring gradients to this unit outside the stacks, whose leaves (by id) these are: a
        graph between blocks ends at one, or a block uses a weight of it."""
        if any(p.tile == tile for finished in self._rounds for _, p in finished.block.parameters):
            return True
        waiting = [boundary.edge.node for boundary in self._boundaries.values()]
        seen = set(waiting)
        while waiting:
            node = waiting.pop()
            if id(getattr(node, "variable", None)) in leaves:
                return True
            for following, _ in node.next_functions:
                if following is not None and following not in seen:
                    seen.add(following)
                    waiting.append(following)
        return False

    def _calls_back(self) -> Iterator[None]:
        """Each `next` starts bringing back what the next calls of the walk need."""
        order = [logged.record for finished in reversed(self._rounds) for logged in finished.calls]
        for index in range(len(order)):
            for record in order[index : index + 1 + self.FETCHED_AHEAD]:
                record.fetch()
            order[index] = None  # type: ignore[call-overload]
            yield

    def _walk(
        self,
        logged: LoggedCall,
        weights: dict[str, torch.Tensor],
        sink: Sink,
        outside: Callable[[TiledParameter], Unit],
    ) -> None:
        record = logged.record
        inputs = record.call.inputs
        output_gradients = [None if slot is None else slot.gradient for slot in logged.outputs]
        input_gradients: Sequence[torch.Tensor | None] = [None] * len(inputs)
        if any(gradient is not None for gradient in output_gradients):
            input_gradients, parameter_gradients = self._runner.gradients(record, weights, output_gradients)
            for unit, gradients in by_unit(parameter_gradients, outside):
                sink.add(unit, gradients)
            if record.experts is not None and record.experts.used is not None:
                sink.count_experts(record.call.block.unit, record.experts.used)
        for slot in logged.outputs:
            if slot is not None:
                slot.gradient = None
        for given, gradient in zip(inputs, input_gradients, strict=True):
            if given.slot is not None:
                given.slot.add(gradient)
            elif given.edge is not None:
                boundary = self._boundaries[_key(given.edge)]
                boundary.add(gradient)
                if boundary.uses == 0:
                    del self._boundaries[_key(given.edge)]


def by_unit(
    gradients: Iterable[tuple[TiledParameter, torch.Tensor | None]], unit_of: Callable[[TiledParameter], Unit]
) -> list[tuple[Unit, list[tuple[TiledParameter, torch.Tensor | None]]]]:
    """A call's gradients, a list for each unit that owns some of the parameters."""
    found: dict[int, list[tuple[TiledParameter, torch.Tensor | None]]] = {}
    for parameter, gradient in gradients:
        found.setdefault(parameter.tile, []).append((parameter, gradient))
    return [(unit_of(entries[0][0]), entries) for entries in found.values()]


def _key(edge: GradientEdge) -> tuple[object, int]:
    return edge.node, edge.output_nr


def each_unit(units: Sequence[Unit], order: Sequence[int]) -> Iterator[Unit]:
    """The units, those named in `order` (by tile) first and in that order."""
    by_tile = {unit.tile: unit for unit in units}
    for tile in dict.fromkeys([*order, *by_tile]):
        if tile in by_tile:
            yield by_tile[tile]
