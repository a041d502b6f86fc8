"""Blocks of which nothing leaves the device, called where the module calls them and differentiated by autograd itself.

Where all blocks of a step are such, no forward has to stop at one, and no graph has to be cut: a micro-batch is one
graph from its inputs to its loss, and the host has about as little to do for each block as in plain PyTorch. What the
gradients of weights are asked for, how they are summed and when they are used is as everywhere."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

import torch

from megatrain.interop import stream_handle
from megatrain.strays import stray

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from megatrain.block_runner import BlockRunner
    from megatrain.blocks import Block, BlockResult
    from megatrain.chosen_experts import BlockWeights
    from megatrain.device_weights import DeviceWeights
    from megatrain.gradients import GradientSink
    from megatrain.placement import Placement
    from megatrain.takeover import Router
    from megatrain.units import TiledParameter, Unit


class JoinedPass:
    """One micro-batch's forward and backward. Used once, in the thread that runs it.

    last: of the step's, so that sums need not wait for others."""

    def __init__(
        self,
        weights: DeviceWeights,
        runner: BlockRunner,
        router: Router,
        sink: GradientSink,
        check_interrupts: Callable[[], None],
        *,
        last: bool,
    ) -> None:
        self._weights = weights
        self._runner = runner
        self._router = router
        self._sink = sink
        self._check_interrupts = check_interrupts
        self._last = last
        self._phase: Literal["forward", "back", "over"] = "forward"
        self._inside = False
        """A block's forward is being run: also on the way back, where the module recomputes it."""
        self._computing = False
        """A span of the trace is open."""
        self._left: dict[Block, int] = {}
        """Calls that have not been walked back, in the order in which blocks were first called."""

    def forward(self, function: Callable[[], Any]) -> Any:
        """What it returns; blocks that it calls are run here."""
        self._router.handle_here(self._call)
        try:
            return function()
        finally:
            self._router.handle_here(None)

    def backward(self, loss: torch.Tensor) -> list[Unit]:
        """Gradients of blocks go to the sink as they come. Returns the units of the blocks that were called, the last
        one first."""
        self._phase = "back"
        # For a module that checkpoints its blocks itself; autograd may call them in a thread of its own.
        before, self._router.default = self._router.default, self._call
        try:
            if loss.requires_grad:
                torch.autograd.backward([loss])
        finally:
            self._router.default = before
            self._phase = "over"
            self._end_span()
        return [block.unit for block in reversed(self._left)]

    def _call(self, block: Block, args: tuple[Any, ...], kwargs: dict[str, Any]) -> BlockResult:
        self._check_interrupts()
        self._end_span()
        self._inside = True
        try:
            with self._weights.on_device(block) as weights:
                if torch.is_grad_enabled():
                    return self._differentiable(block, weights, args, kwargs)
                return self._runner.call_plainly(block, weights, args, kwargs)
        finally:
            self._inside = False

    def _differentiable(
        self, block: Block, weights: BlockWeights, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> BlockResult:
        def take(parameters: Sequence[TiledParameter], gradients: Sequence[torch.Tensor | None]) -> None:
            if self._phase == "over":  # a hook has kept a tensor of this pass
                raise stray(block.name)
            with torch.no_grad():
                self._sink.add(block.unit, zip(parameters, gradients, strict=True))
                self._left[block] -= 1
                if self._last and self._phase == "back" and self._left[block] == 0:
                    # Now: a function of the module's may have given a buffer that it uses again.
                    self._sink.store(block.unit)
            self._end_span()

        result, made = self._runner.run_joined(block, weights, args, kwargs, take)
        self._left[block] = self._left.get(block, 0) + 1
        if made is not None:
            made.register_hook(lambda gradient: self._begin_span(block))  # type: ignore[no-untyped-call]
        return result

    # spans of the trace on the way back: from the gradient of a block's output to those of its weights

    def _begin_span(self, block: Block) -> None:
        if self._phase != "back" or self._inside:
            return
        self._end_span()
        self._weights.engine.begin_compute(block.unit.tile, stream_handle(self._weights.device))
        self._computing = True

    def _end_span(self) -> None:
        if self._computing:
            self._computing = False
            self._weights.engine.end_compute(stream_handle(self._weights.device))


def can_join(blocks: Sequence[Block], placement: Placement, weights: DeviceWeights, micro_batches: int) -> bool:
    """The placement lets all of a step rest, and no block has weights of others, or experts that are counted."""
    return placement.rests(len(blocks), micro_batches) and all(
        block.unit.tile not in weights.experts and all(p.tile == block.unit.tile for _, p in block.parameters)
        for block in blocks
    )
