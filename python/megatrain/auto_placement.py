"""`placement="auto"`: the planner's placement for the batches that come, and a smaller one where it does not fit."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from megatrain._native import MemoryLimitError
from megatrain.hardware_probe import free_memory, measured_hardware
from megatrain.planner import Batch, CannotFit, Hardware, Job, ModelShape, Plan, make_plan, predict, preset
from megatrain.planner.hardware import GIB
from megatrain.planner.memory import CONTEXT, HOST_PROCESS, SHARE, fits
from megatrain.surroundings import output_embeddings

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import nn

    from megatrain._native import CudaBackend, HostBackend
    from megatrain.settings import Settings
    from megatrain.stacks import Stack
    from megatrain.units import UnitPlan

SMALLER = 0.9
"""Of the device memory that a plan took by its prediction, which the next one may take when it did not fit."""
MUCH_MORE = 2
"""Times the tokens that a placement was chosen for: then a better one is looked for."""
COMPILE_WORKER = int(0.6 * GIB)
"""Of host memory, each process that inductor compiles with: 16 of them beside 111 GiB of tiles and activations were
more than 126 GiB (one run)."""


class AutoPlacement:
    """Of one model. Made before the module is taken over."""

    def __init__(
        self,
        module: nn.Module,
        units: UnitPlan,
        stacks: Sequence[Stack],
        backend: HostBackend | CudaBackend,
        hardware: Hardware | str | None,
        compiled: bool,
        *,
        by_hand: bool,
    ) -> None:
        self._backend = backend
        self._given = preset(hardware) if isinstance(hardware, str) else hardware
        self._compiled = compiled
        self._shape: ModelShape | None = None
        self._unplannable = self._why_not(module, stacks)
        if not self._unplannable:
            head = output_embeddings(module)
            assert head is not None
            config = getattr(module, "config", None)
            name = Path(getattr(config, "name_or_path", "") or type(module).__name__).name
            self._shape = ModelShape.from_plan(units, config=config, head=head.weight, name=name)
        self.forget(by_hand=by_hand)

    def forget(self, *, by_hand: bool) -> None:
        """Begin as if no step had been asked for. by_hand: plan for none from here on."""
        self._by_hand = by_hand
        self.plan: Plan | None = None
        self.proven = False
        """A step of the plan's shape has run under its placement, or so far that it updates."""
        self.reason = self._unplannable or "no step has been asked for yet"
        if by_hand:
            self.reason = "the placement was given by hand"
        """Why there is no plan; "" where there is one."""
        self._planned_tokens = 0
        self._device_limit: int | None = None
        self._host_limit: int | None = None

    def prove(self) -> None:
        self.proven = True

    def _why_not(self, module: nn.Module, stacks: Sequence[Stack]) -> str:
        name = type(module).__name__
        if self._backend.name != "cuda" and self._given is None:
            return "on the host backend there is nothing to plan for; hardware= names a machine to plan as for"
        if len(stacks) > 1:
            names = ", ".join(stack.name for stack in stacks)
            return f"{name} has {len(stacks)} stacks of blocks ({names}), of which the tokens of each are not known"
        if output_embeddings(module) is None:
            return f"{name} has no get_output_embeddings() that gives a Linear, so what its loss takes is not known"
        return ""

    def batch_of(self, batches: Sequence[Mapping[str, Any]]) -> Batch | None:
        """The shape that holds all micro-batches; None where it cannot be told, with the reason, or is not wanted."""
        if self._by_hand:
            return None
        rows = length = tokens = 0
        for entry in batches:
            found = entry.get("input_ids")
            ids = found if isinstance(found, torch.Tensor) else entry.get("inputs_embeds")
            dimensions = 2 if ids is found else 3
            if not isinstance(ids, torch.Tensor) or ids.dim() != dimensions or not ids.numel() or "labels" not in entry:
                if self._shape is not None and self.plan is None:
                    self.reason = "a batch has no labels, or no input_ids [rows, length], to tell its tokens by"
                return None
            rows, length = ids.shape[0], max(length, ids.shape[1])
            tokens = max(tokens, rows * ids.shape[1])
        return Batch(micro_batches=len(batches), rows=-(-tokens // length), length=length)

    def plan_for(self, batch: Batch, settings: Settings, held: int) -> None:
        """See that the plan is one for steps of this shape. held: bytes of host memory that the model has already.
        CannotFit where nothing fits."""
        if self._shape is None or self._by_hand:
            return
        if self.plan is not None:
            covered = self.plan.job.batch
            batch = _both(covered, batch)
            if batch == covered:
                return
        hardware = self._hardware(settings, held)
        if hardware is None:
            return
        job = Job(
            batch=batch,
            tile_format=settings.tile_format,
            updates_wait=settings.max_grad_norm is not None or settings.skip_nonfinite,
            slots=settings.slots,
        )
        self.proven = False
        if self.plan is not None and batch.tokens < MUCH_MORE * self._planned_tokens:
            same = predict(self._shape, job, hardware, self.plan.placement)
            if fits(same.memory, hardware):
                self.plan = same
                return
        self.plan, self._planned_tokens, self.reason = make_plan(self._shape, job, hardware), batch.tokens, ""

    def go_smaller(self, error: BaseException) -> bool:
        """Plan with less after the first step of a plan ran out of memory, with a warning; False where the error has
        to stand."""
        if self.plan is None or self.proven or isinstance(error, CannotFit):
            return False
        before, hardware = self.plan, self.plan.hardware
        if isinstance(error, MemoryLimitError):
            side, limit = "host", before.memory.host["tiles"] + HOST_PROCESS
            self._host_limit = limit
            smaller = replace(hardware, host_memory=limit)
        elif isinstance(error, torch.OutOfMemoryError | MemoryError):
            side, limit = "device", int((SMALLER * before.memory.device_bytes + CONTEXT) / SHARE)
            self._device_limit = limit
            smaller = replace(hardware, gpu_memory=limit)
        else:
            return False
        if smaller == hardware:
            return False
        try:
            self.plan = make_plan(before.shape, before.job, smaller)
        except CannotFit:
            return False
        predicted = before.memory.host_bytes if side == "host" else before.memory.device_bytes
        warnings.warn(
            f"the planned placement, {predicted / GIB:.1f} GiB of {side} memory by prediction, ran out of it; going on "
            f"with one of {self.plan.memory.device_bytes / GIB:.1f} GiB on the device and "
            f"{self.plan.memory.host_bytes / GIB:.1f} GiB on the host ({self.plan.seconds:.3g} s a step by prediction, "
            f"not {before.seconds:.3g})",
            stacklevel=4,
        )
        return True

    def _hardware(self, settings: Settings, held: int) -> Hardware | None:
        try:
            hardware = self._given or measured_hardware(self._backend)
        except (MemoryError, torch.OutOfMemoryError) as error:
            self.reason, self._shape = f"the machine could not be measured: {error}", None
            return None
        device, host = [hardware.gpu_memory], [hardware.host_memory]
        if self._backend.name == "cuda":
            memory = free_memory(self._backend)
            device.append(memory.device)
            # Measured, both are what is left beside the model.
            host = [memory.host + held] if self._given is None else [*host, memory.host + held]
        device += [limit for limit in (settings.device_memory, self._device_limit) if limit is not None]
        if settings.host_memory is not None:
            host = [settings.host_memory]
        if self._compiled:
            from torch._inductor import config

            host = [min(host) - (config.compile_threads or 1) * COMPILE_WORKER]
        if self._host_limit is not None:
            host.append(self._host_limit)
        # The tiles are there.
        return replace(hardware, gpu_memory=min(device), host_memory=max(min(host), held + HOST_PROCESS))


def _both(one: Batch, other: Batch) -> Batch:
    """The smallest shape that holds micro-batches of either."""
    length = max(one.length, other.length)
    tokens = max(one.micro_tokens, other.micro_tokens)
    if length == one.length and tokens == one.micro_tokens:
        return replace(one, micro_batches=max(one.micro_batches, other.micro_batches))
    return Batch(
        micro_batches=max(one.micro_batches, other.micro_batches), rows=-(-tokens // length), length=length
    )
