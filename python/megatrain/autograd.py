"""Blocks under ordinary autograd, for any loss: `loss.backward()` outside of `step()`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from megatrain.attention import preferred_attention
from megatrain.blocks import BlockResult
from megatrain.calls import BlockCall, mark_handed_over
from megatrain.errors import StaleGraphError, UnsupportedModelError
from megatrain.rng import RngState, preserved
from megatrain.schedule import by_unit
from megatrain.trees import flatten, unflatten

if TYPE_CHECKING:
    from collections.abc import Callable

    from megatrain.block_runner import BlockRunner
    from megatrain.blocks import Block
    from megatrain.calls import CallRecord, Keeping
    from megatrain.schedule import Sink, Weights
    from megatrain.trees import Spec
    from megatrain.units import TiledParameter, Unit


class DirectCalls:
    """Runs a block where the module calls it: micro-batch-major order."""

    def __init__(
        self,
        weights: Weights,
        runner: BlockRunner,
        sink: Sink,
        device: torch.device,
        unit_of: Callable[[TiledParameter], Unit],
        keeping: Callable[[Block, int], Keeping],
    ) -> None:
        self.weights = weights
        self.runner = runner
        self.sink = sink
        self.device = device
        self.unit_of = unit_of
        self.keeping = keeping
        self.masked = False
        """Tokens may be in the module's forward that comes next."""
        self.cut_short = False
        """A backward was ended by an exception: acquisitions may be outstanding."""

    def __call__(self, block: Block, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if not torch.is_grad_enabled():
            with self.weights.on_device(block) as weights:
                return self.runner.call_plainly(block, weights, args, kwargs)
        call = BlockCall.capture(block, args, kwargs, RngState.capture(self.device))
        if not self.runner.has_gradients(call):
            with self.weights.on_device(block) as weights:
                return self.runner.run(call, weights, self.keeping(block, 0), differentiable=False).tree
        pending = _PendingCall(self, call)
        # With a frozen embedding nothing else that goes in would require a gradient, and autograd would
        # skip the block and all below it without a word.
        dummy = torch.zeros((), device=self.device, requires_grad=True)
        tensors = call.tensors()
        fresh = _StreamedCall.apply(dummy, pending, *tensors)  # type: ignore[no-untyped-call]
        for tensor in fresh:
            mark_handed_over(tensor)
        return pending.assemble(fresh)


class _PendingCall:
    """What a call's forward leaves for its backward."""

    def __init__(self, owner: DirectCalls, call: BlockCall) -> None:
        self.owner = owner
        self.call = call
        self.masked = owner.masked
        self.record: CallRecord | None = None
        self.version: object = None
        self.flat: list[Any] = []
        self.spec: Spec = None
        self.fresh: list[int] = []
        """Positions in `flat` of the tensors that the block made."""

    def forward(self) -> tuple[torch.Tensor, ...]:
        owner, block = self.owner, self.call.block
        with owner.weights.on_device(block) as weights:
            self.version = owner.weights.version(block)
            output = owner.runner.run(
                self.call, weights, owner.keeping(block, 0), differentiable=True, more_than_once=True
            )
        self.record = output.record
        self.flat, self.spec = flatten(tuple(output.tree))
        self.fresh = [position for position, leaf in enumerate(output.leaves) if leaf is not None]
        made = tuple(self.flat[position] for position in self.fresh)
        for position in self.fresh:
            self.flat[position] = None  # autograd's own objects take their places
        return made

    def assemble(self, fresh: tuple[torch.Tensor, ...]) -> BlockResult:
        flat = list(self.flat)
        for position, tensor in zip(self.fresh, fresh, strict=True):
            flat[position] = tensor
        return BlockResult(*unflatten(flat, self.spec))

    def backward(self, gradients: tuple[torch.Tensor | None, ...]) -> list[torch.Tensor | None]:
        owner, block = self.owner, self.call.block
        if owner.weights.version(block) != self.version:
            owner.sink.clear()
            raise StaleGraphError(
                f"{block.name} was updated or edited after this forward; gradients must be taken before the update"
            )
        by_position: list[torch.Tensor | None] = [None] * len(self.flat)
        for position, gradient in zip(self.fresh, gradients, strict=True):
            by_position[position] = gradient
        try:
            with (
                preserved(owner.device),
                preferred_attention(owner.device, masked=self.masked),
                owner.weights.on_device(block) as weights,
            ):
                assert self.record is not None
                input_gradients, parameter_gradients = owner.runner.gradients(self.record, weights, by_position)
                for unit, unit_gradients in by_unit(parameter_gradients, owner.unit_of):
                    owner.sink.add(unit, unit_gradients)
                if self.record.experts is not None and self.record.experts.used is not None:
                    owner.sink.count_experts(block.unit, self.record.experts.used)
            owner.sink.store(block.unit)
        except BaseException:
            owner.cut_short = True
            raise
        return input_gradients


class _StreamedCall(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, dummy: torch.Tensor, pending: _PendingCall, *tensors: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        ctx.pending = pending
        ctx.set_materialize_grads(False)
        with torch.no_grad():
            return pending.forward()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> tuple[Any, ...]:
        if torch.is_grad_enabled():
            raise UnsupportedModelError(
                f"{ctx.pending.call.block.name}: create_graph=True is not supported by streamed blocks"
            )
        return (None, None, *ctx.pending.backward(gradients))
