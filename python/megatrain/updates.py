"""From gradients to updates: clip, skip what is not finite, queue each update in the order of its next use."""

from __future__ import annotations

import math
import warnings
from typing import TYPE_CHECKING, Any

import torch

from megatrain._native import Section
from megatrain.interop import stream_handle
from megatrain.interrupts import DeferredInterrupts
from megatrain.schedule import each_unit

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from megatrain._native import Engine
    from megatrain.device_weights import DeviceWeights
    from megatrain.gradients import GradientSink
    from megatrain.optimizer import StreamedOptimizer
    from megatrain.settings import Settings
    from megatrain.tiles import Tiles
    from megatrain.units import TiledParameter, Unit


class Updates:
    """Of one model. `next_uses` are the tiles of the coming forward, in order."""

    def __init__(
        self, engine: Engine, tiles: Tiles, weights: DeviceWeights, sink: GradientSink, settings: Settings
    ) -> None:
        self._engine = engine
        self._tiles = tiles
        self._plan = tiles.plan
        self._weights = weights
        self._sink = sink
        self.settings = settings
        self.optimizer: StreamedOptimizer
        self.take_over_edits: Callable[[], None]
        """Both set once what they need exists."""
        self.next_uses: list[int] = [unit.tile for unit in self._plan.units]
        self.steps = 0
        self.skipped_steps = 0
        self.last_grad_norm: float | None = None
        self.skipped = False
        """The last step updated nothing."""
        self.clip_next: float | None = None
        """Norm to clip the next update to, in place of the settings' one."""
        self._early: set[int] | None = None
        """Tiles whose updates this step has queued already; None where they wait for the last gradient."""
        self._final: list[Unit] = []
        """Units whose gradients are final and whose updates are held back."""
        self._hold = 0
        self._committed: Callable[[], None]
        self._gradients_known: dict[int, set[int]] = {}
        self._never_trained = {p.name for p in self._plan.parameters if p.trainable}

    # while gradients land

    def begin_step(self, *, may_fail: bool, committed: Callable[[], None]) -> None:
        """A step whose `complete` calls say which gradients are final. Without clipping and without the wait for
        a finite norm, nothing has to wait for the last of them.

        may_fail: the step may have to be begun anew for want of memory, so updates are held back until half of the
        units' gradients are final, when half of what the blocks kept is no longer there. `committed` is called before
        the first update."""
        free = self.settings.max_grad_norm is None and self.clip_next is None and not self.settings.skip_nonfinite
        self._early = set() if free else None
        self._final, self._hold = [], len(self._plan.units) // 2 if may_fail else 0
        self._committed = committed
        if free:
            self.optimizer.check_groups()

    def complete(self, unit: Unit) -> None:
        """The unit's gradient is final: nothing of this step will add to it, or read its weights for one."""
        self._sink.store(unit)
        if self._early is None:
            return
        self._final.append(unit)
        if len(self._final) < self._hold:
            return
        self._committed()
        priorities, groups = self._priorities(), self.optimizer.groups_by_face()
        for final in self._final:
            self._early.add(final.tile)
            self._queue(final, 1.0, priorities.get(final.tile, len(self.next_uses)), groups)
        self._final, self._hold = [], 0

    @property
    def begun(self) -> bool:
        """Updates of this step are queued: it has to come to its end, or part of the model has made the step."""
        return bool(self._early)

    def forget(self) -> None:
        """Gradients are given up."""
        self._sink.clear()
        self.clip_next = None
        self._early, self._final = None, []
        for outside in self._weights.outside.values():
            outside.drop_gradients()

    # once all have

    def apply(self) -> None:
        """Clip, then queue every update; skip if the norm is not finite."""
        self.take_over_edits()
        with DeferredInterrupts():
            self._clip_and_queue()
        if not self.settings.transfers.overlap_updates:
            self._engine.synchronize()

    def restore(self, steps: int, skipped_steps: int, trained: Iterable[str]) -> None:
        """Counts of a run that goes on; `trained`: names of the parameters that have been updated."""
        self.steps, self.skipped_steps = steps, skipped_steps
        self._never_trained.difference_update(trained)
        self._gradients_known = {}

    def nothing_to_update(self) -> None:
        """A step without targets."""
        self.last_grad_norm, self.skipped = 0.0, True
        self.steps += 1

    def _clip_and_queue(self) -> None:
        self.optimizer.check_groups()
        self.store_all()
        clip = self.settings.max_grad_norm if self.clip_next is None else self.clip_next
        skip = self.settings.skip_nonfinite
        early, self._early, self._final = self._early or set(), None, []
        self.clip_next = None
        groups = self.optimizer.groups_by_face()  # while the device is busy: it idles from the norm to the first update
        self.last_grad_norm = self._sink.norm() if clip is not None or skip else None
        self.skipped = skip and self.last_grad_norm is not None and not math.isfinite(self.last_grad_norm)
        self._gradients_known = {tile: set(touched) for tile, touched in self._sink.stored.items()}
        self.steps += 1
        self._watch_for_untrained()
        if self.skipped:
            self.skipped_steps += 1
            self._sink.clear()
            return
        scale = 1.0
        if clip is not None and self.last_grad_norm is not None:
            scale = min(1.0, clip / (self.last_grad_norm + 1e-6))
        self._weights.release_outside()
        landed = self.settings.transfers.update_order == "landed"
        order = list(self._sink.stored) if landed else self.next_uses
        for position, unit in enumerate(each_unit(self._plan.units, order)):
            if unit.tile not in early:
                self._queue(unit, scale, 0 if landed else position, groups)
        self._sink.clear()
        self._weights.expect(self.next_uses)

    def _queue(self, unit: Unit, scale: float, priority: int, groups: Mapping[int, dict[str, Any]]) -> None:
        touched = self._sink.stored.get(unit.tile)
        if not touched:
            return
        parameters = [unit.parameters[index] for index in sorted(touched)]
        updates = self.optimizer.updates(parameters, groups, self._sink.used_experts(unit))
        self._engine.update(unit.tile, updates, scale, priority, stream_handle(self._weights.device))

    def _priorities(self) -> dict[int, int]:
        if self.settings.transfers.update_order == "landed":
            return dict.fromkeys(self.next_uses, len(self.next_uses))
        return {tile: position for position, tile in reversed(list(enumerate(self.next_uses)))}

    def _watch_for_untrained(self) -> None:
        """Name, once, the trainable parameters that none of the first three steps had a gradient for."""
        if self.steps > 3 or not self._never_trained:
            return
        for unit in self._plan.units:
            for index in self._gradients_known.get(unit.tile, ()):
                self._never_trained.discard(unit.parameters[index].name)
        if self.steps == 3 and self._never_trained:
            names = sorted(self._never_trained)
            shown = ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")
            warnings.warn(f"after 3 steps these parameters have had no gradient: {shown}", stacklevel=5)

    # looking at gradients

    def forget_known(self) -> None:
        """The last gradients are not where they were."""
        self._gradients_known = {}

    def clip_grad_norm_(self, max_norm: float) -> float:
        self.store_all()
        self.clip_next = max_norm
        return self._sink.norm()

    def store_all(self) -> None:
        """Blocks' gradients go down as they are complete; those outside the stacks, and of blocks that the last
        micro-batch did not come to, when they are asked for."""
        for unit in self._plan.units:
            self._sink.store(unit)

    def gradient(self, parameter: TiledParameter) -> torch.Tensor | None:
        """Of the last backward, on the host; None where there was none."""
        self.store_all()
        known = self._sink.stored if self._sink.pending else self._gradients_known
        if parameter.index not in known.get(parameter.tile, ()):
            return None
        resident = self._weights.resident.get(parameter.tile)
        if resident is not None:
            offset = self._plan.units[parameter.tile].layout.element_offset(parameter.index)
            flat = resident.section(Section.gradients)[offset : offset + parameter.numel]
            return flat.view(parameter.shape).to("cpu", copy=True)
        self._engine.synchronize()
        return self._tiles.view(parameter, Section.gradients)

    def hook_outside(self) -> None:
        """Gradients that autograd leaves outside the stacks go to the sink."""
        sink = self._sink  # and not self, which autograd would keep alive for ever
        for tile, outside in self._weights.outside.items():
            unit = self._plan.units[tile]
            for parameter, leaf in outside.leaves():
                if not parameter.trainable:
                    continue

                def take(leaf: torch.Tensor, parameter: TiledParameter = parameter, unit: Unit = unit) -> None:
                    gradient, leaf.grad = leaf.grad, None
                    sink.add(unit, [(parameter, gradient)])

                leaf.register_post_accumulate_grad_hook(take)  # type: ignore[no-untyped-call]
