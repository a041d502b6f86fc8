"""StreamedModel: the step as one would draw it."""

from __future__ import annotations

import gc
import time
import warnings
import weakref
from collections.abc import Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import nn

from megatrain import checkpoint, checkpoints, export, stacks
from megatrain._native import Engine, TileStore
from megatrain.adapters import reach_adapters
from megatrain.auto_placement import AutoPlacement
from megatrain.autograd import DirectCalls
from megatrain.blocks import BlockCaller
from megatrain.calls import BlockRunner
from megatrain.decay import biases_and_norms
from megatrain.device_weights import DeviceWeights
from megatrain.errors import UnsupportedModelError
from megatrain.export.adapter import adapter_of
from megatrain.face import ParameterFace
from megatrain.generation import generate
from megatrain.gradients import GradientSink
from megatrain.interop import compute_device
from megatrain.interrupts import DeferredInterrupts
from megatrain.limits import memory_report, require_device_memory, require_memory
from megatrain.logprobs import label_logprobs
from megatrain.loss import shifts_labels, tokens_of, weight_of
from megatrain.machine import update_threads
from megatrain.optimizer import StreamedOptimizer
from megatrain.placement import Placement
from megatrain.pretrained import Source, stream_pretrained
from megatrain.report import EvaluationReport, MemoryReport, StepReport, during_step, write_chrome_trace
from megatrain.rng import preserved
from megatrain.rules import AdamW, Optimizer
from megatrain.self_check import buffers_kept, check_model, tiny_batch
from megatrain.settings import Settings, chosen_isa, parse_bytes, resolve_backend
from megatrain.step_runner import StepRunner
from megatrain.surroundings import Surroundings
from megatrain.takeover import (
    Router,
    check_overlaps,
    check_registry,
    evaluation_mode,
    move_buffers,
    refuse_state_dict,
    renew_outside,
    take_blocks,
    take_outside,
)
from megatrain.tiles import Tiles
from megatrain.transfers import Transfers
from megatrain.units import plan_units
from megatrain.updates import Updates

if TYPE_CHECKING:
    import os
    from collections.abc import Callable, Iterator, Sequence
    from pathlib import Path

    from megatrain._native import CudaBackend, HostBackend
    from megatrain.checkpoints import PendingCheckpoint
    from megatrain.parameters import TileParameter
    from megatrain.planner import Batch, Hardware, Plan
    from megatrain.step_runner import Active
    from megatrain.units import TiledParameter, Unit


class StreamedModel:
    """A module whose weights, gradients and optimizer state live in host memory and whose blocks are
    streamed through the compute device.

    module: any nn.Module with one or more stacks of blocks (ModuleLists), a Hugging Face model for
        instance. It is taken over: its storage is released tensor by tensor.
    optimizer: settings of the update, `AdamW` or `Lion`, in fp32 arithmetic.
    max_grad_norm: clip the norm of all gradients to this; None for no clipping.
    dtype: of the streamed weights. torch.bfloat16 keeps an exact fp32 master split into the bf16 weight
        and 16 more bits (14 bytes a parameter on the host with gradients and moments); torch.float32
        streams fp32 (16 bytes).
    master: "split" as said; "none" drops the 16 bits and rounds bf16 weights stochastically (12 bytes).
    moments: of Adam: "fp32"; "bf16", rounded stochastically (4 bytes a parameter less); "int8", 8-bit
        floating codes in blocks of 128 that share an exponent, rounded stochastically (6 bytes less): within
        1/8 (first) and 1/16 (second moment) of the value. Rounding is keyed by `seed`, the parameter's name,
        its step and the element's index.
    device: "auto", "cuda", "cuda:1", "cpu" (the host backend), or a backend object.
    placement: what stays on the device, what forwards keep for backwards, in which order a step works: a
        `Placement`, or "auto" for what the planner finds fastest in the memory there is. It plans at the first
        `step()`, from the shape of its batch, and again where batches outgrow it; a plan that runs out of memory in
        its first step gives way to a smaller one, with a warning. `plan` is what it found, `unplanned` says why it
        did not: on the host, or for modules it does not understand, every block streams and keeps its inputs.
    hardware: the figures that the planner uses: None to measure them (CUDA; about two seconds, once a process), the
        name of a preset ("RTX 4090"), or a `megatrain.planner.Hardware`.
    slots: streamed blocks' weights that the device holds at a time. With 1 no copy overlaps computation.
    compile: torch.compile the blocks; None for True on CUDA.
    skip_nonfinite: a step whose gradient norm is not finite updates nothing and is counted.
    host_memory, device_memory: bytes (or "100GiB") that may be used; None for what is free.
    seed: keys the randomness of `step()`, see `megatrain.rng.seed_for`.
    example_batch: a batch to find the stacks and check the gradients with now; else the first one is used.
    blocks: names of the containers whose entries are the blocks; None to find them.
    threads: of the update; 0 for what `megatrain.machine_speed()` recommends on CUDA (measured in about a
        second, once a process), and for the usable cores less one on the host.
    isa: instruction set of the update's kernel; "" for MEGATRAIN_ISA of the environment, else the fastest.
    staging_bytes: of the pinned ring that copies go through where tiles cannot be pinned.
    keep_gradients: let `parameter.grad` show the gradients of the last backward.
    self_check: compare gradients with a resident run of the first blocks before the first update.
    transfers: how copies and updates are scheduled, see `Transfers`.

    Raises UnsupportedModelError for what cannot be streamed exactly, ValueError for settings,
    MemoryError before anything is allocated that does not fit.
    """

    def __init__(
        self,
        module: nn.Module,
        *,
        optimizer: Optimizer | None = None,
        max_grad_norm: float | None = None,
        dtype: torch.dtype = torch.bfloat16,
        master: str = "split",
        moments: str = "fp32",
        placement: Placement | Literal["auto"] = "auto",
        hardware: Hardware | str | None = None,
        device: str | torch.device | HostBackend | CudaBackend = "auto",
        slots: int = 2,
        compile: bool | None = None,
        skip_nonfinite: bool = True,
        host_memory: int | str | None = None,
        device_memory: int | str | None = None,
        seed: int = 0,
        example_batch: Mapping[str, Any] | None = None,
        blocks: Sequence[str] | None = None,
        threads: int = 0,
        isa: str = "",
        staging_bytes: int = 64 << 20,
        keep_gradients: bool = False,
        self_check: bool = True,
        transfers: Transfers | None = None,
    ) -> None:
        self.settings = Settings(
            optimizer=optimizer or AdamW(),
            max_grad_norm=max_grad_norm,
            dtype=dtype,
            master=master,
            moments=moments,
            slots=slots,
            compile=compile,
            skip_nonfinite=skip_nonfinite,
            host_memory=parse_bytes(host_memory, "host_memory"),
            device_memory=parse_bytes(device_memory, "device_memory"),
            seed=seed,
            threads=threads,
            isa=isa,
            staging_bytes=staging_bytes,
            keep_gradients=keep_gradients,
            self_check=self_check,
            placement=_first_placement(placement),
            transfers=transfers or Transfers(),
        )
        backend = self._backend = resolve_backend(device)
        self.module = module
        self.device = compute_device(backend)
        self.dtype = dtype
        self._shifted = shifts_labels(module)

        check_registry(module)
        check_overlaps(module)
        found = stacks.named(module, blocks) if blocks is not None else stacks.candidates(module)
        if example_batch is not None and blocks is None and not _on_meta(module):
            probe = tiny_batch(example_batch, self._shifted)
            with preserved(self.device), buffers_kept(module):
                found = stacks.called(module, found, lambda: module(**probe))
        if not found:
            raise UnsupportedModelError(
                f"{type(module).__name__} has no ModuleList of at least two blocks that it calls; name one with blocks="
            )
        plan = plan_units(module, found, self.settings.tile_format)
        undecayed = biases_and_norms(module)
        self._plan = plan
        self._unit_by_tile = {unit.tile: unit for unit in plan.units}
        require_memory(plan, self.settings, backend)
        compiled = self.device.type == "cuda" if compile is None else compile
        self._auto = AutoPlacement(module, plan, found, backend, hardware, compiled)
        self._automatic = placement == "auto"

        threads = update_threads(threads, backend)
        store = TileStore(backend, threads=threads, isa=chosen_isa(isa), staging_bytes=staging_bytes)
        self._tiles = Tiles(store, plan)
        self._source = Source()
        self._adapter = adapter_of(module)
        self._pending_save: PendingCheckpoint | None = None
        self._unloaded = {p.name for p in plan.parameters if p.original.device.type == "meta"}
        self._engine = Engine(store)
        self._engine.copy_by_parameter(self.settings.transfers.burst == "parameter")
        if self.settings.host_memory is not None:
            self._engine.limit_kept(self.settings.host_memory - plan.nbytes - staging_bytes)
        self._weights = DeviceWeights(self._engine, plan, self.device, slots, self.settings.placement)
        self._sink = GradientSink(
            self._engine, self._tiles, self.device, self._weights.resident, compiled and self.device.type == "cuda"
        )
        self._updates = Updates(self._engine, self._tiles, self._weights, self._sink, self.settings)

        self._face = ParameterFace(self._tiles, self._engine, self._weights.mark_edited, self._kept_gradient)
        self._router = Router()
        self._stacks = found
        self._blocks = take_blocks(found, plan, self._router, self.device, dtype)
        take_outside(module, plan, self._weights, self._router)
        move_buffers(module, self._blocks, self.device)
        refuse_state_dict(module)
        self._updates.hook_outside()
        reach_adapters(module, self._blocks, self._router, self._face.by_name)
        self._surroundings = Surroundings(module, self.device, compiled, self._outside_version)
        self._runner = BlockRunner(BlockCaller(compiled), self.device, self._face.is_trainable)
        self._steps = StepRunner(
            module,
            self._engine,
            self._weights,
            self._runner,
            self._router,
            self._surroundings,
            self.settings.placement,
            plan,
            seed,
        )
        self._direct = DirectCalls(
            self._weights, self._runner, self._sink, self.device, self._unit_of, self._steps.keeping
        )
        self._router.default = self._direct
        self.optimizer = StreamedOptimizer(
            self.settings.optimizer,
            self._tiles,
            self._face.by_name,
            self._updates.apply,
            self._drain,
            self._updates.forget,
            self._weights.mark_moments_edited,
            seed,
            undecayed,
        )
        self._updates.optimizer = self.optimizer
        self._updates.take_over_edits = self._face.take_over_edits
        weakref.finalize(self, self._engine.close)  # before the slots that its threads write to go away
        self._checked = not self_check
        for note in self.memory_report().notes:
            warnings.warn(note, stacklevel=2)
        if example_batch is not None and not self._unloaded:
            self._check(example_batch)

    # the step

    @property
    def steps(self) -> int:
        """Calls of step() and of optimizer.step() so far; to be set when a run goes on from a saved state."""
        return self._updates.steps

    @steps.setter
    def steps(self, value: int) -> None:
        self._updates.steps = value

    @property
    def skipped_steps(self) -> int:
        """Steps that a norm that is not finite kept from updating anything."""
        return self._updates.skipped_steps

    @property
    def last_grad_norm(self) -> float | None:
        """Norm of the gradients that the last update read, before clipping."""
        return self._updates.last_grad_norm

    def step(self, batch: Mapping[str, Any] | Sequence[Mapping[str, Any]]) -> StepReport:
        """One optimizer step: forward, backward, clip, update.

        batch: keyword arguments of the module, or a list of them, the micro-batches of the step. Host
        tensors; labels on the device make the call wait for it. The loss is
        sum(w_i * loss_i) / sum(w_i) over the micro-batches, where loss_i is the module's own loss and w_i
        is "weight" of the batch if given, else the number of its labels other than -100 (after the shift,
        for causal models), else its rows. Micro-batches of weight 0 are not run.

        Returns before the updates have ended; the next call, and every look at the weights, sees them."""
        started = time.perf_counter()
        batches = _micro_batches(batch)
        if self._sink.pending:
            raise RuntimeError("a backward() is waiting for optimizer.step() or optimizer.zero_grad()")
        loads = [weight_of(entry, self._shifted) for entry in batches]
        tokens = sum(tokens_of(entry) for entry in batches)
        active = [(i, entry, load) for i, (entry, load) in enumerate(zip(batches, loads, strict=True)) if load > 0]
        total = sum(loads)
        waited = self._engine.wait_totals()
        with torch.inference_mode(False):
            loss = torch.zeros((), dtype=torch.float64, device=self.device)
        if active:
            with DeferredInterrupts() as interrupts:
                while not self._attempt(batches, active, loss, interrupts):
                    gc.collect()  # what the error's frames held
                    loss.zero_()
        else:
            self._updates.nothing_to_update()
        totals = self._engine.wait_totals()
        up_ns, update_ns, down_ns = (after - before for after, before in zip(totals, waited, strict=True))
        return StepReport(
            step=self.steps - 1,
            grad_norm=self._updates.last_grad_norm,
            tokens=tokens,
            targets=total,
            skipped=self._updates.skipped,
            seconds=time.perf_counter() - started,
            wait_copy_seconds=up_ns / 1e9,
            wait_down_seconds=down_ns / 1e9,
            wait_update_seconds=update_ns / 1e9,
            loss_tensor=loss,
        )

    def _attempt(
        self,
        batches: Sequence[Mapping[str, Any]],
        active: Sequence[Active],
        loss: torch.Tensor,
        interrupts: DeferredInterrupts,
    ) -> bool:
        """Forward, backward and update; the weighted mean is added to `loss`. False where a planned placement ran out
        of memory: nothing has been updated then, and the step can begin anew with the smaller plan that there is."""
        try:
            with torch.inference_mode(False), torch.enable_grad():
                self._prepare(active[0][1])
                self._follow_plan(batches)
                may_fail = self.plan is not None and not self._auto.proven
                self._engine.begin_step(self.steps)
                self._updates.begin_step(may_fail=may_fail)
                with (
                    buffers_kept(self.module, only_after_errors=True) if may_fail else nullcontext(),
                    preserved(self.device),
                    self._surroundings.around(batches),
                ):
                    self._updates.next_uses = self._steps.train(
                        self.steps,
                        active,
                        loss,
                        self._updates.next_uses,
                        self._sink,
                        self._unit_of,
                        self._updates.complete,
                        interrupts.check,
                    )
            interrupts.check()
            self._auto.proven = True
            self.optimizer.step()
        except BaseException as error:
            self._updates.forget()
            self._steps.recover()
            if not (self._automatic and self._auto.go_smaller(error)):
                raise
            return False
        return True

    # the plan

    @property
    def plan(self) -> Plan | None:
        """Placement and predictions that the planner made for steps as they came so far; None where `unplanned`
        says why."""
        return self._auto.plan if self._automatic else None

    @property
    def unplanned(self) -> str:
        """Why there is no plan; "" where there is one."""
        return self._auto.reason if self._automatic else "the placement was given by hand"

    def plan_for(self, batch: Batch) -> Plan | None:
        """Plan now for steps of this shape, which `step()` does otherwise; the next step places what the plan says.
        CannotFit (a MemoryError), with figures, where nothing fits."""
        if self._automatic:
            self._auto.plan_for(batch, self.settings, self._held())
        return self.plan

    def _follow_plan(self, batches: Sequence[Mapping[str, Any]]) -> None:
        batch = self._auto.batch_of(batches) if self._automatic else None
        if batch is not None:
            self.plan_for(batch)
        if self.plan is not None and self.plan.placement is not self.placement:
            self._place(self.plan.placement)

    def _held(self) -> int:
        return self._plan.nbytes + self._engine.kept_bytes()

    # plain PyTorch

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The module's own forward. With gradients on, `loss.backward()` and `optimizer.step()` train it as
        any module; several backwards accumulate. Host tensors are moved to the compute device."""
        return self._forward(args, kwargs)

    def _forward(
        self,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        *,
        lazy_logits: bool = False,
        call: Callable[..., Any] | None = None,
    ) -> Any:
        with_gradients = torch.is_grad_enabled()
        self._before_forward()
        if with_gradients:
            self._prepare(kwargs if kwargs and not args else None)
        moved_args, moved_kwargs = self._surroundings.arguments_to_device(args, kwargs)
        uses = self._updates.next_uses
        self._weights.begin_pass([*uses, *(uses[::-1] if with_gradients else [])])
        self._engine.begin_step(self.steps)
        try:
            lazily = self._surroundings.lazily() if lazy_logits else nullcontext()
            with self._surroundings.around([kwargs], caches=not with_gradients), lazily:
                output = (call or self.module)(*moved_args, **moved_kwargs)
        except BaseException:
            self._steps.recover()
            raise
        self._updates.next_uses = list(self._weights.uses) or self._updates.next_uses
        return output

    def evaluate(self, batch: Mapping[str, Any] | Sequence[Mapping[str, Any]]) -> EvaluationReport:
        """The loss in evaluation mode, weighted as in `step()`; changes nothing."""
        batches = _micro_batches(batch)
        loads = [weight_of(entry, self._shifted) for entry in batches]
        total = sum(loads)
        active = [(i, entry, load) for i, (entry, load) in enumerate(zip(batches, loads, strict=True)) if load > 0]
        self._require_loaded()
        with (
            torch.no_grad(),
            evaluation_mode(self.module, self._blocks),
            preserved(self.device),
            self._surroundings.around(batches),
        ):
            self._face.take_over_edits()
            results = self._steps.evaluate(self.steps, active, self._updates.next_uses)
        losses = [result * load for result, (_, _, load) in zip(results, active, strict=True)]
        loss = float(torch.stack(losses).sum()) / total if losses else 0.0
        return EvaluationReport(loss=loss, tokens=sum(map(tokens_of, batches)), targets=total)

    def logprobs(self, batch: Mapping[str, Any], *, temperature: float = 1.0) -> torch.Tensor:
        """Log-probabilities of the labels' tokens, for losses of one's own and plain `backward()`.

        batch: arguments of the module with "labels" (rows, length). Returns fp32 (rows, length) on the compute
        device: at each position the log-probability of its label under softmax(logits / temperature), given what
        is before it for causal models; 0 where the label is -100, and at a causal model's first position. Logits
        are made in chunks, forward and backward, and never held at once. ValueError for labels of another shape.

        With gradients off nothing is kept; PEFT's `model.module.disable_adapter()` around it makes the frozen
        base the reference model."""
        return label_logprobs(self, batch, temperature)

    def generate(self, *args: Any, **kwargs: Any) -> Any:
        """The module's own `generate()` in evaluation mode, with its cache of keys and values; arguments and
        result are those of transformers. Draws from torch's global generators, as transformers does. Weights go
        through the ring once a token, so many rows at a time are what makes it worth its time. Changes nothing
        of the training; gradients that wait for `optimizer.step()` stay."""
        self._before_forward()
        return generate(self, args, kwargs)

    # before a forward

    def _before_forward(self) -> None:
        if self._direct.cut_short:
            self._direct.cut_short = False
            self._steps.recover()
        self._require_loaded()
        self._face.take_over_edits()

    def _prepare(self, batch: Mapping[str, Any] | None) -> None:
        self._require_loaded()
        if self.dtype == torch.float32 and torch.is_autocast_enabled(self.device.type):
            raise UnsupportedModelError(
                "fp32 weights under torch.autocast: the casts would outlive the slots; use dtype=torch.bfloat16, "
                "or leave autocast"
            )
        self._face.take_over_edits()
        for outside in self._weights.outside.values():
            for parameter, leaf in outside.leaves():
                leaf.requires_grad_(self._face.is_trainable(parameter))
        if not self._checked and batch is not None:
            self._check(batch)

    def _check(self, batch: Mapping[str, Any]) -> None:
        with self._surroundings.own_arithmetic():
            self._checked = check_model(self, batch)

    def _require_loaded(self) -> None:
        if self._unloaded:
            first = next(iter(self._unloaded))
            raise RuntimeError(
                f"{len(self._unloaded)} parameters have no values yet, the first {first}: the module was on the meta "
                "device; call load_state_dict, or use from_pretrained"
            )

    # parameters

    def named_parameters(self) -> Iterator[tuple[str, TileParameter]]:
        """(name, parameter), tied ones once. Host views of the weights; see `TileParameter`."""
        yield from self._face.by_name.items()

    def parameters(self) -> Iterator[TileParameter]:
        yield from self._face.by_name.values()

    @contextmanager
    def edit_parameters(self) -> Iterator[dict[str, torch.Tensor]]:
        """The exact fp32 values by name, to be changed in place; written back at the end of the `with`."""
        with self._face.edit() as values:
            yield values

    @property
    def units(self) -> tuple[Unit, ...]:
        """What shares a tile: one unit a block, one a module outside the stacks."""
        return self._plan.units

    @property
    def placement(self) -> Placement:
        return self.settings.placement

    def place(
        self,
        placement: Placement | Literal["auto"],
        *,
        slots: int | None = None,
        transfers: Transfers | None = None,
    ) -> None:
        """Go on with another placement, and if given other slots and transfers. Between steps. "auto" plans anew at
        the next step; with a placement given by hand nothing is planned any more."""
        self._place(_first_placement(placement), slots=slots, transfers=transfers)
        self._auto.forget()
        self._automatic = placement == "auto"

    def _place(
        self, placement: Placement, *, slots: int | None = None, transfers: Transfers | None = None
    ) -> None:
        if self._sink.pending:
            raise RuntimeError("a backward() is waiting for optimizer.step() or optimizer.zero_grad()")
        settings = replace(
            self.settings,
            placement=placement,
            slots=slots or self.settings.slots,
            transfers=transfers or self.settings.transfers,
        )
        self._drain()
        require_device_memory(
            self._plan, settings, self._backend, self._weights.nbytes + self._weights.resident_bytes
        )
        self._sink.release_memory()
        self._weights.place(placement, settings.slots)
        self.settings = self._updates.settings = settings
        self._steps.placement = placement
        self._engine.copy_by_parameter(settings.transfers.burst == "parameter")
        self._updates.forget_known()
        renew_outside(self.module, self._plan, self._weights)
        self._updates.hook_outside()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    def train(self, mode: bool = True) -> StreamedModel:
        self.module.train(mode)
        return self

    def eval(self) -> StreamedModel:
        return self.train(False)

    @property
    def training(self) -> bool:
        return self.module.training

    def _unit_of(self, parameter: TiledParameter) -> Unit:
        return self._unit_by_tile[parameter.tile]

    def _kept_gradient(self, parameter: TiledParameter) -> torch.Tensor | None:
        if not self.settings.keep_gradients:
            raise RuntimeError(
                f"{parameter.name}.grad: gradients live in the tiles and are clipped by max_grad_norm= or "
                "model.clip_grad_norm_(); make the model with keep_gradients=True to look at them"
            )
        return self._updates.gradient(parameter)

    def clip_grad_norm_(self, max_norm: float) -> float:
        """Clip the gradients of the next `optimizer.step()` to this norm; returns their norm now."""
        return self._updates.clip_grad_norm_(max_norm)

    def _outside_version(self) -> int:
        return sum(self._engine.version(tile) for tile in self._weights.outside)

    # state

    def state_dict(self, *, dtype: torch.dtype | None = None) -> dict[str, torch.Tensor]:
        """Every parameter and persistent buffer by the module's names. Trainable parameters as exact fp32
        values (new tensors), so that loading them resumes to the bit; with `dtype`, in that type, and
        views of the tiles where it is the streamed one."""
        self._drain()
        return checkpoint.state_dict(self.module, self._tiles, self._blocks, dtype)

    def load_state_dict(self, state_dict: Mapping[str, torch.Tensor], strict: bool = True) -> None:
        """Write weights, masters and buffers. Nothing is changed if a name or a shape does not fit."""
        self._drain()
        loaded = checkpoint.load_state_dict(self.module, self._tiles, self._blocks, state_dict, strict, self.device)
        self._unloaded -= loaded
        for unit in self._plan.units:
            self._weights.mark_edited(unit.tile)

    def save_pretrained(
        self,
        directory: str | os.PathLike[str],
        *,
        dtype: torch.dtype | None = None,
        max_shard_size: str | None = None,
    ) -> None:
        """Weights as sharded safetensors with the module's configuration, straight from the tiles; of a module made
        by PEFT the adapter alone, in PEFT's format. dtype: torch.bfloat16 or torch.float32 (the exact masters); None
        for the streamed type. max_shard_size: divide anew, by "5GB" for instance; None for the files that
        `from_pretrained` found, else 5 GB. ValueError for another dtype, and where no file has a place for what was
        trained; OSError if it cannot be written."""
        if dtype not in (None, torch.bfloat16, torch.float32):
            raise ValueError(f"dtype is {dtype}; weights are saved as torch.bfloat16 or torch.float32")
        self._require_loaded()
        self._drain()
        weights = export.ModelWeights(self, dtype or self.dtype)
        export.write_directory(directory, export.contents_of(self), weights, max_shard_size)

    def save_checkpoint(
        self, directory: str | os.PathLike[str], *, extra: Any = None, keep: int | None = None
    ) -> Path:
        """Everything for an exact resume, as `directory`/checkpoint-<steps>: there whole or not at all, whenever
        the process or the machine ends. Tiles are written one by one from where they are; with `keep`, older
        checkpoints but the last keep - 1 are removed afterwards. extra: plain values (as JSON has them) of the
        caller's, such as the position in the data. OSError if it cannot be written: what was there still is."""
        return checkpoints.save(self, directory, extra, keep)

    def begin_checkpoint(
        self, directory: str | os.PathLike[str], *, extra: Any = None, keep: int | None = None
    ) -> PendingCheckpoint:
        """`save_checkpoint` that returns before the tiles are written; the next steps go on meanwhile. What is saved
        is the state of now, to the bit: an update of a tile that is not yet written waits, and with it the next use
        of its weights. Looking at weights, or changing them, waits for all tiles. `wait()` of what is returned, or
        the next save or load, ends it."""
        self._wait_saved()
        self._pending_save = checkpoints.begin(self, directory, extra, keep)
        return self._pending_save

    def _wait_saved(self) -> None:
        """Throws a failure that `wait` has not thrown yet."""
        pending, self._pending_save = self._pending_save, None
        if pending is not None and not pending.failure_seen:
            pending.wait()

    def load_checkpoint(self, directory: str | os.PathLike[str]) -> Any:
        """Go on from a checkpoint, or from the newest whole one in a directory of them, past damaged ones with a
        warning; returns its `extra`. Weights, masters, moments, step counts, groups of the optimizer, buffers and
        the states of the random generators of torch, numpy and Python are as they were. The placement may be
        another; CheckpointError, and nothing is changed, where dtype, master, moments, seed, names, shapes or
        groups are."""
        return checkpoints.load(self, directory)

    @classmethod
    def from_pretrained(
        cls, path: str | os.PathLike[str], *, trust_remote_code: bool = False, adapter: Any = None, **kwargs: Any
    ) -> StreamedModel:
        """Stream a Hugging Face model: safetensors, or the tensors of .bin files, go into the tiles one by one. `path`
        is a directory or an id of the hub (safetensors alone); keyword arguments are those of the constructor.
        ValueError names tensors that are missing or misshapen, a warning those that have no place. Code is never
        unpickled; Python files of the directory run only with `trust_remote_code`. adapter: a LoraConfig of PEFT; then
        the model's own weights are frozen, and a new adapter is trained."""
        return stream_pretrained(cls, path, trust_remote_code, adapter, **kwargs)

    def _drain(self) -> None:
        self._engine.wait_updates()

    def synchronize(self) -> None:
        """Block until updates and copies have ended."""
        if self.device.type == "cuda":
            torch.cuda.current_stream(self.device).synchronize()
        self._engine.synchronize()

    def close(self) -> None:
        """Stop the worker threads. The model cannot be used afterwards."""
        self._engine.close()

    # looking inside

    def memory_report(self) -> MemoryReport:
        """What megatrain itself holds, on the host and on the device."""
        return memory_report(
            self._plan,
            self._tiles.store,
            self._weights.nbytes,
            self._weights.resident_bytes,
            self._engine.kept_bytes(),
            self.settings.staging_bytes,
        )

    def update_bandwidth(self) -> float:
        """Bytes per second that the updates in the trace read and wrote; 0 before the first. Waits for
        updates that are queued."""
        spans = [span for span in self._engine.trace() if span.kind == "update"]
        nanoseconds = sum(span.end_ns - span.begin_ns for span in spans)
        return sum(span.nbytes for span in spans) / nanoseconds * 1e9 if nanoseconds else 0.0

    def export_trace(self, path: str | os.PathLike[str], *, step: int | None = None) -> None:
        """Copies, compute, updates and waits so far, or only what ran while that step computed (numbered as in
        `StepReport`), as a Chrome/Perfetto trace (JSON)."""
        spans = self._engine.trace()
        if step is not None:
            spans = during_step(spans, step)
        write_chrome_trace(spans, [unit.name for unit in self._plan.units], path)


def _first_placement(placement: Placement | Literal["auto"]) -> Placement:
    """With "auto" every block streams until a step has been planned for."""
    if placement == "auto":
        return Placement()
    if not isinstance(placement, Placement):
        raise ValueError(f'placement is {placement!r}; it must be a Placement or "auto"')
    return placement


def _on_meta(module: nn.Module) -> bool:
    return any(parameter.device.type == "meta" for parameter in module.parameters())


def _micro_batches(batch: Mapping[str, Any] | Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    batches: list[Any] = list(batch) if isinstance(batch, list | tuple) else [batch]
    if not batches:
        raise ValueError("the list of micro-batches is empty; a step needs at least one")
    for entry in batches:
        if not isinstance(entry, Mapping):
            raise ValueError(f"a batch is a {type(entry).__name__}; it must be a mapping of the module's arguments")
    return batches
