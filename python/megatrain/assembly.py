"""What a streamed model consists of, put together in the order in which it takes a module over."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from megatrain import stacks
from megatrain._native import Engine, TileStore
from megatrain.adapters import reach_adapters, refuse_adapters_of_parameters
from megatrain.autograd import DirectCalls
from megatrain.block_runner import BlockRunner
from megatrain.blocks import BlockCaller
from megatrain.decay import biases_and_norms
from megatrain.device_weights import DeviceWeights
from megatrain.errors import UnsupportedModelError
from megatrain.experts import experts_of, require_skippable
from megatrain.face import ParameterFace
from megatrain.gradients import GradientSink
from megatrain.interop import compute_device
from megatrain.limits import require_device_memory, require_memory
from megatrain.loss import shifts_labels
from megatrain.machine import update_threads
from megatrain.optimizer import StreamedOptimizer
from megatrain.rng import preserved
from megatrain.self_check import buffers_kept, tiny_batch
from megatrain.settings import Settings, chosen_isa
from megatrain.step_runner import StepRunner
from megatrain.surroundings import Surroundings
from megatrain.switches import reach_parameters
from megatrain.takeover import (
    Router,
    check_overlaps,
    check_registry,
    let_go_of_outside,
    move_buffers,
    refuse_state_dict,
    renew_outside,
    take_blocks,
    take_outside,
)
from megatrain.tiles import Tiles
from megatrain.units import plan_units
from megatrain.updates import Updates

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from torch import nn

    from megatrain._native import CudaBackend, HostBackend
    from megatrain.placement import Placement
    from megatrain.stacks import Stack
    from megatrain.transfers import Transfers
    from megatrain.units import TiledParameter, Unit, UnitPlan


class Discovery:
    """A module looked at, before anything of it is taken over.

    UnsupportedModelError where it has no stack of blocks, or registers its parameters in a way that cannot be
    streamed."""

    def __init__(
        self,
        module: nn.Module,
        settings: Settings,
        backend: HostBackend | CudaBackend,
        blocks: Sequence[str] | None,
        example_batch: Mapping[str, Any] | None,
    ) -> None:
        self.module = module
        self.shifted = shifts_labels(module)
        self.device = compute_device(backend)
        check_registry(module)
        check_overlaps(module)
        refuse_adapters_of_parameters(module)
        self.stacks = self._stacks(blocks, example_batch)
        self.units: UnitPlan = plan_units(module, self.stacks, settings.tile_format)
        self.experts = experts_of(self.stacks, self.units)
        if settings.skip_idle_experts:
            require_skippable(module, self.experts.values(), settings.moments)
        self.undecayed = biases_and_norms(module)
        require_memory(self.units, settings, backend)

    def _stacks(self, blocks: Sequence[str] | None, example_batch: Mapping[str, Any] | None) -> Sequence[Stack]:
        module = self.module
        if blocks is not None:
            found = stacks.named(module, blocks)
        else:
            found = stacks.candidates(module)
            if example_batch is not None and not _on_meta(module):
                probe = tiny_batch(example_batch, self.shifted)
                with preserved(self.device), buffers_kept(module):
                    found = stacks.called(module, found, lambda: module(**probe))
        if not found:
            raise UnsupportedModelError(
                f"{type(module).__name__} has no ModuleList of at least two blocks that it calls; name one with blocks="
            )
        return found


class Parts:
    """Of one model."""

    def __init__(
        self, found: Discovery, settings: Settings, backend: HostBackend | CudaBackend, compiled: bool
    ) -> None:
        module = self.module = found.module
        device = self.device = found.device
        units = self.units = found.units
        self.settings = settings
        self.backend = backend
        self.shifted = found.shifted
        self.stacks = found.stacks
        self._unit_by_tile = {unit.tile: unit for unit in units.units}
        self.unloaded = {p.name for p in units.parameters if p.original.device.type == "meta"}
        """Names of parameters that have no values yet."""
        self.unplaced = False
        """The device did not even have room for the placement before the last one."""

        threads = update_threads(settings.threads, backend)
        store = TileStore(
            backend, threads=threads, isa=chosen_isa(settings.isa), staging_bytes=settings.staging_bytes
        )
        self.tiles = Tiles(store, units)
        self.engine = Engine(store)
        self.engine.copy_by_parameter(settings.transfers.burst == "parameter")
        if settings.host_memory is not None:
            self.engine.limit_kept(settings.host_memory - units.nbytes - settings.staging_bytes)
        self.weights = DeviceWeights(
            self.engine,
            units,
            device,
            settings.slots,
            settings.placement,
            found.experts,
            settings.skip_idle_experts,
        )
        self.sink = GradientSink(self.engine, self.tiles, device, self.weights.resident)
        self.updates = Updates(self.engine, self.tiles, self.weights, self.sink, settings)

        self.face = ParameterFace(self.tiles, self.engine, self.weights.mark_edited, self._kept_gradient)
        self.router = Router()
        self.blocks = take_blocks(self.stacks, units, self.router, device, settings.dtype)
        take_outside(module, units, self.weights, self.router)
        move_buffers(module, self.blocks, device)
        refuse_state_dict(module)
        self.updates.hook_outside()
        reach_adapters(module, self.blocks, self.router, self.face.by_name)
        reach_parameters(module, self.blocks, units.names, self.face.by_name)
        self.surroundings = Surroundings(module, device, compiled, self._outside_version)
        self.runner = BlockRunner(BlockCaller(compiled), device, self.face.is_trainable)
        self.steps = StepRunner(
            module,
            self.engine,
            self.weights,
            self.runner,
            self.router,
            self.surroundings,
            settings.placement,
            self.blocks,
            settings.seed,
        )
        self.direct = DirectCalls(self.weights, self.runner, self.sink, device, self.unit_of, self.steps.keeping)
        self.router.default = self.direct
        self.optimizer = StreamedOptimizer(
            settings.optimizer,
            self.tiles,
            self.face.by_name,
            self.updates.apply,
            self.drain,
            self.updates.forget,
            self.weights.mark_moments_edited,
            settings.seed,
            found.undecayed,
            self.weights.skipped_experts(),
        )
        self.updates.optimizer = self.optimizer
        self.updates.take_over_edits = self.face.take_over_edits

    def place(
        self, placement: Placement, *, slots: int | None = None, transfers: Transfers | None = None
    ) -> None:
        """Go on with another placement. An error, and nothing is changed, where it does not fit."""
        self.require_no_backward()
        before = self.settings
        settings = replace(
            before,
            placement=placement,
            slots=before.slots if slots is None else slots,
            transfers=before.transfers if transfers is None else transfers,
        )
        self.drain()
        require_device_memory(self.units, settings, self.backend, self.weights.nbytes + self.weights.resident_bytes)
        self.sink.release_memory()
        try:
            self._take_places(settings)
        except BaseException:
            self.unplaced = True
            self._take_places(before)
            raise

    def _take_places(self, settings: Settings) -> None:
        let_go_of_outside(self.module)
        self.weights.place(settings.placement, settings.slots)
        self.settings = self.updates.settings = settings
        self.steps.placement = settings.placement
        self.engine.copy_by_parameter(settings.transfers.burst == "parameter")
        self.updates.forget_known()
        renew_outside(self.module, self.units, self.weights)
        self.updates.hook_outside()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()
        self.unplaced = False

    def drain(self) -> None:
        """Wait until every update has ended."""
        self.engine.wait_updates()

    def held(self) -> int:
        """Bytes of host memory."""
        return self.units.nbytes + self.engine.kept_bytes()

    def unit_of(self, parameter: TiledParameter) -> Unit:
        return self._unit_by_tile[parameter.tile]

    def require_ready(self) -> None:
        """What every forward needs: weights, and a place for them."""
        self.require_loaded()
        if self.unplaced:
            raise RuntimeError(
                "the last place() ran out of memory, and so did going back to the placement before it; give memory of "
                "the device back, or place() less of the model there"
            )

    def require_loaded(self) -> None:
        if self.unloaded:
            first = next(iter(self.unloaded))
            raise RuntimeError(
                f"{len(self.unloaded)} parameters have no values yet, the first {first}: the module was on the meta "
                "device; call load_state_dict, or use from_pretrained"
            )

    def require_no_backward(self) -> None:
        if self.sink.pending:
            raise RuntimeError("a backward() is waiting for optimizer.step() or optimizer.zero_grad()")

    def _kept_gradient(self, parameter: TiledParameter) -> torch.Tensor | None:
        if not self.settings.keep_gradients:
            raise RuntimeError(
                f"{parameter.name}.grad: gradients live in the tiles and are clipped by max_grad_norm= or "
                "model.clip_grad_norm_(); make the model with keep_gradients=True to look at them"
            )
        return self.updates.gradient(parameter)

    def _outside_version(self) -> int:
        return sum(self.engine.version(tile) for tile in self.weights.outside)


def _on_meta(module: nn.Module) -> bool:
    return any(parameter.device.type == "meta" for parameter in module.parameters())
