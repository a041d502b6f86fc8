"""StreamedModel: the face. A step, as one would draw it, is in passes.py."""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import nn

from megatrain import checkpoint, checkpoints, export
from megatrain.assembly import Discovery, Parts
from megatrain.auto_placement import AutoPlacement
from megatrain.export.adapter import adapter_of
from megatrain.generation import generate
from megatrain.limits import memory_report
from megatrain.logprobs import label_logprobs
from megatrain.passes import Passes
from megatrain.placement import Placement
from megatrain.pretrained import Source, stream_pretrained
from megatrain.report import EvaluationReport, MemoryReport, StepReport, during_step, write_chrome_trace
from megatrain.rules import AdamW, Optimizer
from megatrain.settings import Settings, parse_bytes, resolve_backend
from megatrain.transfers import Transfers

if TYPE_CHECKING:
    import os
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    from megatrain._native import CudaBackend, HostBackend
    from megatrain.checkpoints import PendingCheckpoint
    from megatrain.parameters import TileParameter
    from megatrain.planner import Batch, Hardware, Plan
    from megatrain.units import Unit


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
    skip_nonfinite: a step whose gradient norm is not finite updates nothing and is counted. Without it and without
        max_grad_norm updates run while gradients are still being computed: an exception in the midst of such a step
        leaves a part of the parameters updated.
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
    skip_idle_experts: of tensors that hold an expert in each entry of their first dimension, update only the experts
        that got tokens in the step, each with a step count of its own; the others keep weights and moments. False is
        torch's rule, by which an idle expert has a gradient of zeros: it decays, and its moments fade.

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
        skip_idle_experts: bool = False,
    ) -> None:
        settings = Settings(
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
            skip_idle_experts=skip_idle_experts,
            placement=_first_placement(placement),
            transfers=transfers or Transfers(),
        )
        backend = resolve_backend(device)
        found = Discovery(module, settings, backend, blocks, example_batch)
        compiled = found.device.type == "cuda" if compile is None else compile
        self._auto = AutoPlacement(
            module, found.units, found.stacks, backend, hardware, compiled, by_hand=placement != "auto"
        )
        self._source = Source()
        self._adapter = adapter_of(module)
        self._pending_save: PendingCheckpoint | None = None
        self._parts = Parts(found, settings, backend, compiled)
        self._passes = Passes(self._parts, self._auto)
        self.module = module
        self.device = found.device
        self.dtype = dtype
        self.optimizer = self._parts.optimizer
        # Before the slots that its threads write to go away.
        weakref.finalize(self, self._parts.engine.close)
        for note in self.memory_report().notes:
            warnings.warn(note, stacklevel=2)
        if example_batch is not None and not self._parts.unloaded:
            self._passes.check(example_batch)

    # the step

    @property
    def steps(self) -> int:
        """Calls of step() and of optimizer.step() so far; to be set when a run goes on from a saved state."""
        return self._parts.updates.steps

    @steps.setter
    def steps(self, value: int) -> None:
        self._parts.updates.steps = value

    @property
    def skipped_steps(self) -> int:
        """Steps that a norm that is not finite kept from updating anything."""
        return self._parts.updates.skipped_steps

    @property
    def last_grad_norm(self) -> float | None:
        """Norm of the gradients that the last update read, before clipping."""
        return self._parts.updates.last_grad_norm

    def step(self, batch: Mapping[str, Any] | Sequence[Mapping[str, Any]]) -> StepReport:
        """One optimizer step: forward, backward, clip, update.

        batch: keyword arguments of the module, or a list of them, the micro-batches of the step. Host
        tensors; labels on the device make the call wait for it. The loss is
        sum(w_i * loss_i) / sum(w_i) over the micro-batches, where loss_i is the module's own loss and w_i
        is "weight" of the batch if given, else the number of its labels other than -100 (after the shift,
        for causal models), else its rows. Micro-batches of weight 0 are not run.

        Returns before the updates have ended; the next call, and every look at the weights, sees them.
        RuntimeError for steps, evaluations, forwards and placing from inside of it, as from a hook."""
        return self._passes.alone("step()", lambda: self._passes.step(batch))

    # the plan

    @property
    def plan(self) -> Plan | None:
        """Placement and predictions that the planner made for steps as they came so far; None where `unplanned`
        says why."""
        return self._auto.plan

    @property
    def unplanned(self) -> str:
        """Why there is no plan; "" where there is one."""
        return self._auto.reason

    def plan_for(self, batch: Batch) -> Plan | None:
        """Plan now for steps of this shape, which `step()` does otherwise; the next step places what the plan says.
        CannotFit (a MemoryError), with figures, where nothing fits."""
        self._passes.plan_for(batch)
        return self.plan

    # plain PyTorch

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The module's own forward. With gradients on, `loss.backward()` and `optimizer.step()` train it as
        any module; several backwards accumulate. Host tensors are moved to the compute device."""
        return self._passes.forward(args, kwargs)

    def evaluate(self, batch: Mapping[str, Any] | Sequence[Mapping[str, Any]]) -> EvaluationReport:
        """The loss in evaluation mode, weighted as in `step()`; changes nothing. Micro-batches run in the
        placement's order: side by side, or one after the other."""
        return self._passes.alone("evaluate()", lambda: self._passes.evaluate(batch))

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
        return generate(self, args, kwargs)

    # parameters

    def named_parameters(self) -> Iterator[tuple[str, TileParameter]]:
        """(name, parameter), tied ones once. Host views of the weights; see `TileParameter`."""
        yield from self._parts.face.by_name.items()

    def parameters(self) -> Iterator[TileParameter]:
        yield from self._parts.face.by_name.values()

    @contextmanager
    def edit_parameters(self) -> Iterator[dict[str, torch.Tensor]]:
        """The exact fp32 values by name, to be changed in place; written back at the end of the `with`."""
        with self._parts.face.edit() as values:
            yield values

    @property
    def units(self) -> tuple[Unit, ...]:
        """What shares a tile: one unit a block, one a module outside the stacks."""
        return self._parts.units.units

    @property
    def settings(self) -> Settings:
        """Those of the constructor, with the placement, slots and transfers of now."""
        return self._parts.settings

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
        chosen = _first_placement(placement)
        self._passes.alone("place()", lambda: self._parts.place(chosen, slots=slots, transfers=transfers))
        self._auto.forget(by_hand=placement != "auto")

    def train(self, mode: bool = True) -> StreamedModel:
        self.module.train(mode)
        return self

    def eval(self) -> StreamedModel:
        return self.train(False)

    @property
    def training(self) -> bool:
        return self.module.training

    def clip_grad_norm_(self, max_norm: float) -> float:
        """Clip the gradients of the next `optimizer.step()` to this norm; returns their norm now."""
        return self._parts.updates.clip_grad_norm_(max_norm)

    # state

    def state_dict(self, *, dtype: torch.dtype | None = None) -> dict[str, torch.Tensor]:
        """Every parameter and persistent buffer by the module's names. Trainable parameters as exact fp32
        values (new tensors), so that loading them resumes to the bit; with `dtype`, in that type, and
        views of the tiles where it is the streamed one."""
        self._parts.drain()
        return checkpoint.state_dict(self.module, self._parts.tiles, self._parts.blocks, dtype)

    def load_state_dict(self, state_dict: Mapping[str, torch.Tensor], strict: bool = True) -> None:
        """Write weights, masters and buffers. Nothing is changed if a name or a shape does not fit."""
        self._parts.drain()
        parts = self._parts
        loaded = checkpoint.load_state_dict(
            self.module, parts.tiles, parts.blocks, state_dict, strict, self.device
        )
        parts.unloaded -= loaded
        for unit in parts.units.units:
            parts.weights.mark_edited(unit.tile)

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
        self._parts.require_loaded()
        self._parts.drain()
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

    def synchronize(self) -> None:
        """Block until updates and copies have ended."""
        if self.device.type == "cuda":
            torch.cuda.current_stream(self.device).synchronize()
        self._parts.engine.synchronize()

    def close(self) -> None:
        """Stop the worker threads. The model cannot be used afterwards."""
        self._parts.engine.close()

    # looking inside

    def memory_report(self) -> MemoryReport:
        """What megatrain itself holds, on the host and on the device."""
        return memory_report(
            self._parts.units,
            self._parts.tiles.store,
            self._parts.weights.nbytes,
            self._parts.weights.resident_bytes,
            self._parts.engine.kept_bytes(),
            self.settings.staging_bytes,
        )

    def update_bandwidth(self) -> float:
        """Bytes per second that the updates in the trace read and wrote; 0 before the first. Waits for
        updates that are queued."""
        spans = [span for span in self._parts.engine.trace() if span.kind == "update"]
        nanoseconds = sum(span.end_ns - span.begin_ns for span in spans)
        return sum(span.nbytes for span in spans) / nanoseconds * 1e9 if nanoseconds else 0.0

    def export_trace(self, path: str | os.PathLike[str], *, step: int | None = None) -> None:
        """Copies, compute, updates and waits so far, or only what ran while that step computed (numbered as in
        `StepReport`), as a Chrome/Perfetto trace (JSON)."""
        spans = self._parts.engine.trace()
        if step is not None:
            spans = during_step(spans, step)
        write_chrome_trace(spans, [unit.name for unit in self._parts.units.units], path)


def _first_placement(placement: Placement | Literal["auto"]) -> Placement:
    """With "auto" every block streams until a step has been planned for."""
    if placement == "auto":
        return Placement()
    if not isinstance(placement, Placement):
        raise ValueError(f'placement is {placement!r}; it must be a Placement or "auto"')
    return placement
