"""Whole steps, evaluations and plain forwards: what must hold before one, and what is made good where it fails."""

from __future__ import annotations

import gc
import time
import warnings
from collections.abc import Mapping
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from megatrain.attention import masks_tokens
from megatrain.errors import UnsupportedModelError
from megatrain.interrupts import DeferredInterrupts
from megatrain.loss import tokens_of, weight_of
from megatrain.report import EvaluationReport, StepReport
from megatrain.rng import preserved
from megatrain.self_check import buffers_kept, check_model
from megatrain.takeover import evaluation_mode

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from megatrain.assembly import Parts
    from megatrain.auto_placement import AutoPlacement
    from megatrain.planner import Batch
    from megatrain.step_runner import Active

T = TypeVar("T")
MicroBatches = list[Mapping[str, Any]]


class Passes:
    """Of one model."""

    def __init__(self, parts: Parts, auto: AutoPlacement) -> None:
        self._parts = parts
        self._auto = auto
        self._checked = not parts.settings.self_check
        self._running: str | None = None
        """What has the slots and the random generators to itself; forwards in their own threads see it, too."""

    def alone(self, name: str, work: Callable[[], T]) -> T:
        """What `work` returns; `name` is what its caller called. No context manager: an interrupt on the way into or
        out of one would leave the model refused for good."""
        self.refuse_inside(name)
        try:
            self._running = name
            return work()
        finally:
            self._running = None

    def refuse_inside(self, name: str) -> None:
        """RuntimeError where a hook of the module, or a loss, calls `name` from inside of a step or a forward."""
        if self._running is not None:
            raise RuntimeError(
                f"{name} was called while {self._running} runs; call it when that has returned, not from a hook or a "
                "loss"
            )

    def step(self, batch: Mapping[str, Any] | Sequence[Mapping[str, Any]]) -> StepReport:
        started = time.perf_counter()
        parts = self._parts
        batches = micro_batches(batch)
        parts.require_no_backward()
        tokens = sum(map(tokens_of, batches))
        active, total = self._active(batches)
        waited = parts.engine.wait_totals()
        with torch.inference_mode(False):
            loss = torch.zeros((), dtype=torch.float64, device=parts.device)
        if active:
            with DeferredInterrupts() as interrupts:
                while not self._attempt(batches, active, loss, interrupts):
                    gc.collect()  # what the error's frames held
                    loss.zero_()
        else:
            parts.updates.nothing_to_update()
        totals = parts.engine.wait_totals()
        up_ns, update_ns, down_ns = (after - before for after, before in zip(totals, waited, strict=True))
        return StepReport(
            step=parts.updates.steps - 1,
            grad_norm=parts.updates.last_grad_norm,
            tokens=tokens,
            targets=total,
            skipped=parts.updates.skipped,
            seconds=time.perf_counter() - started,
            wait_copy_seconds=up_ns / 1e9,
            wait_down_seconds=down_ns / 1e9,
            wait_update_seconds=update_ns / 1e9,
            loss_tensor=loss,
        )

    def evaluate(self, batch: Mapping[str, Any] | Sequence[Mapping[str, Any]]) -> EvaluationReport:
        parts = self._parts
        batches = micro_batches(batch)
        active, total = self._active(batches)
        parts.require_ready()
        with (
            torch.inference_mode(False),
            torch.no_grad(),
            evaluation_mode(parts.module, parts.blocks),
            preserved(parts.device),
            parts.surroundings.around(batches, masked=any(map(masks_tokens, batches))),
        ):
            parts.face.take_over_edits()
            results = parts.steps.evaluate(parts.updates.steps, active, parts.updates.next_uses)
        losses = [result * load for result, (_, _, load) in zip(results, active, strict=True)]
        loss = float(torch.stack(losses).sum()) / total if losses else 0.0
        return EvaluationReport(loss=loss, tokens=sum(map(tokens_of, batches)), targets=total)

    def forward(
        self,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        *,
        lazy_logits: bool = False,
        call: Callable[..., Any] | None = None,
    ) -> Any:
        """The module's own forward, or `call` in its place. lazy_logits: leave those of the whole batch to who asks
        for them, see `megatrain.logits`."""
        return self.alone("a forward", lambda: self._forward(args, kwargs, lazy_logits, call))

    def _forward(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], lazy_logits: bool, call: Callable[..., Any] | None
    ) -> Any:
        parts = self._parts
        with_gradients = torch.is_grad_enabled()
        self.before_forward()
        if with_gradients:
            self._prepare(kwargs if kwargs and not args else None)
        moved_args, moved_kwargs = parts.surroundings.arguments_to_device(args, kwargs)
        uses = parts.updates.next_uses
        parts.weights.begin_pass([*uses, *(uses[::-1] if with_gradients else [])])
        parts.engine.begin_step(parts.updates.steps)
        try:
            lazily = parts.surroundings.lazily() if lazy_logits else nullcontext()
            # What a second argument by position is, only the module knows.
            parts.direct.masked = len(args) > 1 or masks_tokens(kwargs)
            around = parts.surroundings.around([kwargs], caches=not with_gradients, masked=parts.direct.masked)
            with around, lazily:
                output = (call or parts.module)(*moved_args, **moved_kwargs)
        except BaseException:
            parts.steps.recover()
            raise
        parts.updates.next_uses = list(parts.weights.uses) or parts.updates.next_uses
        return output

    def before_forward(self) -> None:
        parts = self._parts
        if parts.direct.cut_short:
            parts.direct.cut_short = False
            parts.steps.recover()
        parts.require_ready()
        parts.face.take_over_edits()

    def check(self, batch: Mapping[str, Any]) -> None:
        """Hold gradients against a resident run, see `megatrain.self_check`; nothing where that is off."""
        if not self._checked:
            with self._parts.surroundings.own_arithmetic(masked=masks_tokens(batch)):
                self._checked = check_model(self._parts, batch)

    def plan_for(self, batch: Batch) -> None:
        self._auto.plan_for(batch, self._parts.settings, self._parts.held())

    def _active(self, batches: MicroBatches) -> tuple[list[Active], float]:
        """What is run, and the sum of all weights."""
        loads = [weight_of(entry, self._parts.shifted) for entry in batches]
        numbered = enumerate(zip(batches, loads, strict=True))
        return [(i, entry, load) for i, (entry, load) in numbered if load > 0], sum(loads)

    def _attempt(
        self, batches: MicroBatches, active: Sequence[Active], loss: torch.Tensor, interrupts: DeferredInterrupts
    ) -> bool:
        """Forward, backward and update; the weighted mean is added to `loss`. False where a planned placement ran out
        of memory before anything was updated: the step can begin anew with the smaller plan that there is."""
        parts, updates = self._parts, self._parts.updates
        try:
            with torch.inference_mode(False), torch.enable_grad():
                self._prepare(active[0][1])
                self._follow_plan(batches)
                may_fail = self._auto.plan is not None and not self._auto.proven
                parts.engine.begin_step(updates.steps)
                updates.begin_step(may_fail=may_fail, committed=self._auto.prove)
                with (
                    buffers_kept(parts.module, only_after_errors=True) if may_fail else nullcontext(),
                    preserved(parts.device),
                    parts.surroundings.around(batches, masked=any(map(masks_tokens, batches))),
                ):
                    updates.next_uses = parts.steps.train(
                        updates.steps,
                        active,
                        loss,
                        updates.next_uses,
                        parts.sink,
                        parts.unit_of,
                        updates.complete,
                        lambda: None if updates.begun else interrupts.check(),
                    )
            if not updates.begun:
                interrupts.check()
            self._auto.prove()
            parts.optimizer.step()
        except BaseException as error:
            updates.forget()
            parts.steps.recover()
            if not self._auto.go_smaller(error):
                raise
            return False
        return True

    def _follow_plan(self, batches: MicroBatches) -> None:
        batch = self._auto.batch_of(batches)
        if batch is not None:
            self.plan_for(batch)
        plan = self._auto.plan
        if plan is not None and plan.placement is not self._parts.settings.placement:
            self._parts.place(plan.placement)

    def _prepare(self, batch: Mapping[str, Any] | None) -> None:
        parts = self._parts
        parts.require_ready()
        if parts.settings.dtype == torch.float32 and torch.is_autocast_enabled(parts.device.type):
            raise UnsupportedModelError(
                "fp32 weights under torch.autocast: the casts would outlive the slots; use dtype=torch.bfloat16, "
                "or leave autocast"
            )
        parts.face.take_over_edits()
        switched = [name for outside in parts.weights.outside.values() for name in outside.follow(parts.face)]
        if switched:
            warnings.warn(
                f"requires_grad of {len(switched)} parameters was changed on the module's own, the first "
                f"{switched[0]}, and those of blocks are not among them: use model.parameters(), or requires_grad_() "
                "of a module",
                stacklevel=4,
            )
        if batch is not None:
            self.check(batch)


def micro_batches(batch: Mapping[str, Any] | Sequence[Mapping[str, Any]]) -> MicroBatches:
    """The entries of a step. ValueError where there is none, or one is no mapping."""
    batches: list[Any] = list(batch) if isinstance(batch, list | tuple) else [batch]
    if not batches:
        raise ValueError("the list of micro-batches is empty; a step needs at least one")
    for entry in batches:
        if not isinstance(entry, Mapping):
            raise ValueError(f"a batch is a {type(entry).__name__}; it must be a mapping of the module's arguments")
    return batches
