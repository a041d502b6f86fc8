"""The forwards and backwards of one step, in the order that the placement asks for."""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING, Any

import torch

from megatrain.calls import Keeping
from megatrain.host_shelf import HostShelf
from megatrain.joined import JoinedPass, can_join
from megatrain.loss import loss_in
from megatrain.parking import ParkedForward
from megatrain.rng import RngState, seed_for, seed_generators
from megatrain.schedule import ForwardAndBack

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from torch import nn

    from megatrain._native import Engine
    from megatrain.block_runner import BlockRunner
    from megatrain.blocks import Block
    from megatrain.device_weights import DeviceWeights
    from megatrain.gradients import GradientSink
    from megatrain.placement import Placement
    from megatrain.surroundings import Surroundings
    from megatrain.takeover import Router
    from megatrain.units import TiledParameter, Unit

Active = tuple[int, "Mapping[str, Any]", float]
"""A micro-batch that is run: its number in the step, itself, its weight."""


class StepRunner:
    """Of one model."""

    def __init__(
        self,
        module: nn.Module,
        engine: Engine,
        weights: DeviceWeights,
        runner: BlockRunner,
        router: Router,
        surroundings: Surroundings,
        placement: Placement,
        blocks: Sequence[Block],
        seed: int,
    ) -> None:
        self._module = module
        self._weights = weights
        self._runner = runner
        self._router = router
        self._surroundings = surroundings
        self.placement = placement
        self._blocks = blocks
        in_order = sorted(block.unit.tile for block in blocks)
        self._index = {tile: index for index, tile in enumerate(in_order)}
        self._seed = seed
        self._shelf = HostShelf(engine, weights.device)
        self._backward_uses: list[int] = []

    def keeping(self, block: Block, micro_batch: int) -> Keeping:
        placement = self.placement.block(self._index[block.unit.tile])
        return Keeping(
            placement.keep_for(micro_batch),
            self._shelf if placement.kept_on == "host" else None,
            self._shelf if placement.inputs_side == "host" else None,
        )

    def train(
        self,
        step: int,
        active: Sequence[Active],
        loss: torch.Tensor,
        forward_uses: list[int],
        sink: GradientSink,
        unit_of: Callable[[TiledParameter], Unit],
        complete: Callable[[Unit], None],
        check_interrupts: Callable[[], None],
    ) -> list[int]:
        """Forward and backward of every micro-batch; adds their weighted mean to `loss`. `complete` is called as
        the gradient of a block's unit becomes final. Returns the tiles that a forward used, in order."""
        self._shelf.collect()  # what a step that was cut short left on its way down
        together = self._together(active)
        total = sum(weight for _, _, weight in active)
        sink.expect(len(active), together)
        self._weights.begin_pass([*forward_uses, *self._backward_uses] * (-(-len(active) // together)))
        used = forward_uses
        joined = can_join(self._blocks, self.placement, self._weights, len(active))
        for first in range(0, len(active), together):
            group = active[first : first + together]
            last = first + together >= len(active)
            shares = [weight / total for _, _, weight in group]
            when_final = complete if last else lambda unit: None
            if joined:
                own_pass = JoinedPass(self._weights, self._runner, self._router, sink, check_interrupts, last=last)
                used_here = self._train_joined(step, group[0], shares[0], loss, own_pass, when_final)
            else:
                order = ForwardAndBack(
                    self._weights, self._runner, self._weights.device, self.keeping, check_interrupts, first
                )
                used_here = self._train_parked(step, group, shares, loss, order, sink, unit_of, when_final)
            if first == 0:  # later ones find what is outside the stacks on the device
                used = used_here
        self._shelf.collect()
        return used

    def _train_joined(
        self,
        step: int,
        micro_batch: Active,
        share: float,
        loss: torch.Tensor,
        joined: JoinedPass,
        when_final: Callable[[Unit], None],
    ) -> list[int]:
        """One micro-batch, in this thread. Returns the tiles that the forward used, in order."""
        number, entry, _ = micro_batch
        arguments = self._arguments(step, number, entry)
        own_loss = loss_in(joined.forward(lambda: self._module(**arguments)))
        loss.add_(own_loss.detach().double(), alpha=share)
        used, self._weights.uses = self._weights.uses, []
        units = joined.backward(own_loss * share)
        self._backward_uses, self._weights.uses = self._weights.uses, []
        for unit in units:
            when_final(unit)
        return used

    def _train_parked(
        self,
        step: int,
        group: Sequence[Active],
        shares: Sequence[float],
        loss: torch.Tensor,
        order: ForwardAndBack,
        sink: GradientSink,
        unit_of: Callable[[TiledParameter], Unit],
        when_final: Callable[[Unit], None],
    ) -> list[int]:
        """Some micro-batches, side by side. Returns the tiles that their forwards used, in order."""

        def when_done(index: int, output: Any) -> None:
            self._shelf.settle()
            own_loss = loss_in(output)
            loss.add_(own_loss.detach().double(), alpha=shares[index])
            if own_loss.requires_grad:
                torch.autograd.backward([own_loss * shares[index]], retain_graph=True)

        runs = [self._parked(step, number, entry) for number, entry, _ in group]
        try:
            order.forward(runs, when_done, differentiable=True)
            used, self._weights.uses = self._weights.uses, []
            for unit in self._weights.outside_units():
                if not order.reaches(unit.tile, self._weights.outside[unit.tile].leaf_ids()):
                    when_final(unit)
            self._shelf.collect()  # while the device takes losses
            order.backward(sink, unit_of, when_final)
            self._backward_uses, self._weights.uses = self._weights.uses, []
        except BaseException:
            for run in runs:
                run.abandon()
            raise
        return used

    def evaluate(self, step: int, active: Sequence[Active], forward_uses: list[int]) -> list[torch.Tensor]:
        """The loss of each micro-batch, fp64 scalars on the device. In the order of a step, so that no more forwards
        are under way at once, whose activations device memory has to hold."""
        losses: list[torch.Tensor] = []
        together = self._together(active)
        self._weights.begin_pass(list(forward_uses) * (-(-len(active) // together)))
        for first in range(0, len(active), together):
            group = active[first : first + together]
            order = ForwardAndBack(self._weights, self._runner, self._weights.device, self.keeping)
            runs = [self._parked(step, number, entry) for number, entry, _ in group]
            results: dict[int, torch.Tensor] = {}

            def when_done(index: int, output: Any, results: dict[int, torch.Tensor] = results) -> None:
                results[index] = loss_in(output).double()

            try:
                order.forward(runs, when_done, differentiable=False)
            except BaseException:
                for run in runs:
                    run.abandon()
                self.recover()
                raise
            losses.extend(results[index] for index in range(len(group)))
        return losses

    def _together(self, active: Sequence[Active]) -> int:
        """Micro-batches that go through the blocks side by side."""
        return max(1, len(active)) if self.placement.order == "layer-major" else 1

    def recover(self) -> None:
        """After work that was cut short; an engine that has stopped says why by the error on its way."""
        with suppress(RuntimeError):
            self._weights.recover()

    def _arguments(self, step: int, number: int, batch: Mapping[str, Any]) -> dict[str, Any]:
        """Of a micro-batch's forward, which draws from the generators as they are now."""
        arguments = self._surroundings.to_device({k: v for k, v in batch.items() if k != "weight"})
        seed_generators(seed_for(self._seed, step, number), self._weights.device)
        return arguments

    def _parked(self, step: int, number: int, batch: Mapping[str, Any]) -> ParkedForward:
        arguments = self._arguments(step, number, batch)
        state = RngState.capture(self._weights.device)
        return ParkedForward(
            lambda: self._module(**arguments),
            self._weights.device,
            state,
            lambda run: self._router.handle_here(run.park),
        )
