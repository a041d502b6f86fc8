"""Blocks of which nothing leaves the device, called where the module calls them and differentiated by autograd itself.

Where all blocks of a step are such, no forward has to stop at one, and no graph has to be cut: a micro-batch is one
graph from its inputs to its loss, and the host has about as little to do for each block as in plain PyTorch. What the
gradients of weights are asked for, how they are summed and when they are used is as everywhere."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any

import torch

from megatrain.interop import stream_handle
from megatrain.strays import stray
from megatrain.trees import flatten

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from megatrain._native import Engine
    from megatrain.blocks import Block, BlockResult
    from megatrain.calls import BlockRunner
    from megatrain.chosen_experts import BlockWeights
    from megatrain.device_weights import DeviceWeights
    from megatrain.gradients import GradientSink
    from megatrain.placement import Placement
    from megatrain.takeover import Router
    from megatrain.units import TiledParameter


class JoinedPass:
    """One micro-batch's forward and backward. Used once, in the thread that runs it."""

    def __init__(
        self,
        engine: Engine,
        weights: DeviceWeights,
        runner: BlockRunner,
        router: Router,
        sink: GradientSink,
        check_interrupts: Callable[[], None],
        *,
        last: bool,
    ) -> None:
        """last: of the step's, so that sums need not wait for others."""
        self._engine = engine
        self._weights = weights
        self._runner = runner
        self._router = router
        self._sink = sink
        self._check_interrupts = check_interrupts
        self._last = last
        self._going_back = False
        self._inside = False
        """A block's forward is being run: also on the way back, where the module recomputes it."""
        self._computing = False
        self._over = False
        self.called: list[Block] = []
        self._left: Counter[int] = Counter()
        """Calls, by the block's tile, that have not been walked back."""

    def forward(self, function: Callable[[], Any]) -> Any:
        """What it returns; blocks that it calls are run here."""
        self._router.handle_here(self._call)
        try:
            return function()
        finally:
            self._router.handle_here(None)

    def backward(self, loss: torch.Tensor) -> None:
        """Gradients of blocks go to the sink as they come."""
        self._going_back = True
        # For a module that checkpoints its blocks itself; autograd may call them in a thread of its own.
        before, self._router.default = self._router.default, self._call
        try:
            if loss.requires_grad:
                torch.autograd.backward([loss])
        finally:
            self._router.default = before
            self._going_back, self._over = False, True
            self._end_span()

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
        tile = block.unit.tile

        def take(parameters: Sequence[TiledParameter], gradients: Sequence[torch.Tensor | None]) -> None:
            if self._over:  # a hook has kept a tensor of this pass
                raise stray(block.name)
            with torch.no_grad():
                self._sink.add(block.unit, zip(parameters, gradients, strict=True))
                self._left[tile] -= 1
                if self._last and self._going_back and self._left[tile] == 0:
                    # Now: a function of the module's may have given a buffer that it uses again.
                    self._sink.store(block.unit)
            self._end_span()

        result = self._runner.run_joined(block, weights, args, kwargs, take)
        self.called.append(block)
        self._left[tile] += 1
        given = {id(leaf) for leaf in flatten((args, kwargs))[0]}
        for leaf in flatten(result.output)[0]:
            # Of what was only passed through, a hook would say something else, and might stay for good.
            if isinstance(leaf, torch.Tensor) and leaf.grad_fn is not None and id(leaf) not in given:
                leaf.register_hook(lambda gradient: self._begin_span(block))  # type: ignore[no-untyped-call]
                break
        return result

    # spans of the trace on the way back: from the gradient of a block's output to those of its weights

    def _begin_span(self, block: Block) -> None:
        if not self._going_back or self._inside:
            return
        self._end_span()
        self._engine.begin_compute(block.unit.tile, stream_handle(self._weights.device))
        self._computing = True

    def _end_span(self) -> None:
        if self._computing:
            self._computing = False
            self._engine.end_compute(stream_handle(self._weights.device))


def can_join(blocks: Sequence[Block], placement: Placement, weights: DeviceWeights, micro_batches: int) -> bool:
    """The placement lets all of a step rest, and no block has weights of others, or experts that are counted."""
    return placement.rests(len(blocks), micro_batches) and all(
        block.unit.tile not in weights.experts and all(p.tile == block.unit.tile for _, p in block.parameters)
        for block in blocks
    )
