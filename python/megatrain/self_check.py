"""The self-check: the first blocks, streamed against resident, in fp32 on a small batch.

It compares gradients: several of the ways in which a model can be streamed wrongly (tensors that leave a block
other than by its outputs, for instance) leave the loss exact."""

from __future__ import annotations

import warnings
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from megatrain._native import Section
from megatrain.attention import masks_tokens
from megatrain.autograd import DirectCalls
from megatrain.block_runner import BlockRunner
from megatrain.blocks import BlockCaller, BlockResult
from megatrain.calls import Keeping
from megatrain.errors import UnsupportedModelError
from megatrain.loss import loss_in, weight_of
from megatrain.parking import ParkedForward
from megatrain.rng import RngState, preserved, seed_generators, states_of_others
from megatrain.schedule import ForwardAndBack

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    from megatrain.assembly import Parts
    from megatrain.blocks import Block
    from megatrain.units import TiledParameter, Unit

BLOCK_BUDGET_BYTES = 256 << 20
"""As many leading blocks of each stack as fit into this in fp32 are checked, at least two."""
MAX_TOKENS = 64
TOLERANCE = 1e-3
"""Of the largest element of a gradient: fp32 sums in another order stay below 1e-5, the faults seen begin
at 7e-3."""
HALF_TOLERANCE = 0.1
"""The same where the check must run in bf16."""
_CUTTABLE = {"input_ids", "attention_mask", "labels", "position_ids", "token_type_ids"}


def tiny_batch(batch: Mapping[str, Any], shifted: bool) -> dict[str, Any]:
    """Two rows, one of them that with the most targets, and of token models the last tokens only; all of a
    batch whose rows cannot be told apart."""
    tensors = {k: v for k, v in batch.items() if isinstance(v, torch.Tensor) and v.dim() > 0 and k != "weight"}
    rows = next((v.shape[0] for v in tensors.values()), 1)
    if any(v.shape[0] not in (1, rows) for v in tensors.values()):
        # Not all tensors go by rows (patches of all images behind one another, for instance).
        return {key: value for key, value in batch.items() if key != "weight"}
    labels = tensors.get("labels")
    row = 0
    if labels is not None and labels.dim() > 1 and not labels.is_floating_point():
        row = int((labels != -100).sum(tuple(range(1, labels.dim()))).argmax())

    chosen = sorted({row, (row + 1) % rows})

    def cut(key: str, value: Any) -> Any:
        return value[chosen] if key in tensors and value.shape[0] == rows else value

    one = {key: cut(key, value) for key, value in batch.items() if key != "weight"}
    if set(one) <= _CUTTABLE and all(isinstance(v, torch.Tensor) and v.dim() == 2 for v in one.values()):
        short = {key: value[:, -MAX_TOKENS:] for key, value in one.items()}
        if "labels" not in short or weight_of(short, shifted) > 0:
            return short
    return one


def _turned_round(batch: Mapping[str, Any]) -> dict[str, Any]:
    """`tiny_batch`'s two rows the other way round, as another micro-batch; as they are where they cannot be told
    apart."""
    tensors = [value for value in batch.values() if isinstance(value, torch.Tensor) and value.dim() > 0]
    if any(value.shape[0] != 2 for value in tensors):
        return dict(batch)
    return {k: v.flip(0) if isinstance(v, torch.Tensor) and v.dim() > 0 else v for k, v in batch.items()}


class _Copies:
    """fp32 copies of the weights as leaves; stands for both the ring and the resident module's own."""

    def __init__(self, values: Mapping[TiledParameter, torch.Tensor]) -> None:
        self._values = values

    @contextmanager
    def on_device(self, block: Block) -> Iterator[dict[str, torch.Tensor]]:
        yield {name: self._values[parameter] for name, parameter in block.parameters}

    def version(self, block: Block) -> object:
        return 0


class _Sums:
    """Gradients of streamed blocks, summed by parameter."""

    def __init__(self) -> None:
        self.by_parameter: dict[TiledParameter, torch.Tensor] = {}

    def add(self, unit: Unit, gradients: Iterable[tuple[TiledParameter, torch.Tensor | None]]) -> None:
        for parameter, gradient in gradients:
            if gradient is not None:
                before = self.by_parameter.get(parameter)
                self.by_parameter[parameter] = gradient if before is None else before + gradient

    def count_experts(self, unit: Unit, used: torch.Tensor) -> None:
        pass

    def store(self, unit: Unit) -> None:
        pass

    def clear(self) -> None:
        self.by_parameter.clear()


def check_model(parts: Parts, batch: Mapping[str, Any]) -> bool:
    """Raises UnsupportedModelError, naming the parameter, where streamed and resident gradients differ.
    False if this batch has nothing to check with (no targets)."""
    tiny = tiny_batch(batch, parts.shifted)
    if weight_of(tiny, parts.shifted) == 0:
        return False
    masked = masks_tokens(batch)
    try:
        with buffers_kept(parts.module):
            try:
                _compare(parts, tiny, masked, torch.float32, TOLERANCE)
            except UnsupportedModelError:
                raise
            except RuntimeError:
                if parts.settings.dtype == torch.float32:
                    raise
                # Modules that ask for the type of their weights by name cannot run in another.
                _compare(parts, tiny, masked, parts.settings.dtype, HALF_TOLERANCE)
    except torch.cuda.OutOfMemoryError as error:
        warnings.warn(f"the self-check did not fit the device and was left out: {error}", stacklevel=3)
    finally:
        if parts.device.type == "cuda":
            torch.cuda.empty_cache()
    return True


def _compare(parts: Parts, tiny: Mapping[str, Any], masked: bool, dtype: torch.dtype, tolerance: float) -> None:
    module, device = parts.module, parts.device

    def moved(value: torch.Tensor) -> torch.Tensor:
        return value.to(device, dtype if value.dtype == parts.settings.dtype else value.dtype)

    arguments: dict[str, Any] = pytree.tree_map_only(torch.Tensor, moved, dict(tiny))
    batches = [arguments, _turned_round(arguments)]
    with _leading_blocks(parts) as checked, preserved(device):
        needed = {p for block in checked for _, p in block.parameters}
        needed |= {p for unit in parts.units.units if not unit.is_block for p in unit.parameters}
        values = {
            p: parts.tiles.view(p, Section.weights)
            .to(device, dtype, copy=True)
            .requires_grad_(parts.face.is_trainable(p))
            for p in needed
        }
        copies = _Copies(values)
        caller = BlockCaller(compiled=False)
        runner = BlockRunner(caller, device, parts.face.is_trainable)

        def resident(block: Block, args: tuple[Any, ...], kwargs: dict[str, Any]) -> BlockResult:
            before = states_of_others()
            with copies.on_device(block) as weights:
                output = caller.in_place(block, weights, args, kwargs)
            if states_of_others() != before:
                raise UnsupportedModelError(
                    f"{block.name} draws from Python's or numpy's random generator, whose numbers a recompute would "
                    "not see again; torch's own are repeated"
                )
            return BlockResult(output)

        def run_whole(handler: Callable[[Block, tuple[Any, ...], dict[str, Any]], Any]) -> torch.Tensor:
            parts.router.default = handler
            losses = []
            for batch in batches:
                seed_generators(0, device)
                losses.append(_scalar_in(module(**batch)))
            return torch.stack(losses).sum()

        def take_leaves() -> dict[TiledParameter, torch.Tensor]:
            taken = {p: leaf.grad.to_dense().cpu() for p, leaf in values.items() if leaf.grad is not None}
            for leaf in values.values():
                leaf.grad = None
            return taken

        default = parts.router.default
        parts.router.override = values
        try:
            with torch.enable_grad():
                loss = run_whole(resident)
                if not loss.requires_grad:
                    return
                loss.backward()  # type: ignore[no-untyped-call]
                expected_loss, expected = loss.detach(), take_leaves()

                sums = _Sums()
                direct = DirectCalls(copies, runner, sums, device, parts.unit_of, _keep_inputs)
                direct.masked = masked
                loss = run_whole(direct)
                loss.backward()  # type: ignore[no-untyped-call]
                found = _merged(sums, take_leaves())
                _hold_against(expected_loss, expected, loss.detach(), found, tolerance, "backward()")

                sums = _Sums()
                loss = _parked_backward(parts, batches, copies, runner, sums)
                _hold_against(expected_loss, expected, loss, _merged(sums, take_leaves()), tolerance, "step()")
        finally:
            parts.router.override = None
            parts.router.default = default


def _parked_backward(
    parts: Parts,
    batches: Sequence[Mapping[str, Any]],
    copies: _Copies,
    runner: BlockRunner,
    sums: _Sums,
) -> torch.Tensor:
    """The forwards as a step runs them: side by side, or one after the other."""
    losses: list[torch.Tensor] = []

    def when_done(_: int, output: Any) -> None:
        loss = _scalar_in(output)
        losses.append(loss.detach())
        torch.autograd.backward([loss], retain_graph=True)

    together = len(batches) if parts.settings.placement.order == "layer-major" else 1
    for first in range(0, len(batches), together):
        runs = []
        for batch in batches[first : first + together]:
            seed_generators(0, parts.device)
            runs.append(
                ParkedForward(
                    lambda batch=batch: parts.module(**batch),  # type: ignore[misc]
                    parts.device,
                    RngState.capture(parts.device),
                    lambda run: parts.router.handle_here(run.park),
                )
            )
        order = ForwardAndBack(copies, runner, parts.device, _keep_inputs)
        try:
            order.forward(runs, when_done, differentiable=True)
            order.backward(sums, parts.unit_of)
        except BaseException:
            for run in runs:
                run.abandon()
            raise
    return torch.stack(losses).sum()


def _keep_inputs(block: Block, micro_batch: int) -> Keeping:
    return Keeping()


@contextmanager
def _leading_blocks(parts: Parts) -> Iterator[list[Block]]:
    """The module with its stacks cut to their first blocks."""
    kept_entries: list[tuple[nn.Module, dict[str, nn.Module | None]]] = []
    checked: list[Block] = []
    try:
        for stack in parts.stacks:
            entries = dict(stack.container._modules)
            kept_entries.append((stack.container, entries))
            kept: dict[str, nn.Module | None] = {}
            spent = 0
            for key, entry in entries.items():
                block: Block = vars(entry)["_block"]
                if block in checked:
                    kept[key] = entry
                    continue
                spent += 4 * block.unit.layout.weight_elements
                if len(kept) >= 2 and spent > BLOCK_BUDGET_BYTES:
                    break
                kept[key] = entry
                checked.append(block)
            stack.container._modules = kept
        yield checked
    finally:
        for container, entries in kept_entries:
            container._modules = entries


def _merged(sums: _Sums, leaves: dict[TiledParameter, torch.Tensor]) -> dict[TiledParameter, torch.Tensor]:
    merged = dict(leaves)
    for parameter, gradient in sums.by_parameter.items():
        own = merged.get(parameter)
        merged[parameter] = gradient.cpu() if own is None else own + gradient.cpu()
    return merged


def _hold_against(
    expected_loss: torch.Tensor,
    expected: Mapping[TiledParameter, torch.Tensor],
    loss: torch.Tensor,
    found: Mapping[TiledParameter, torch.Tensor],
    tolerance: float,
    way: str,
) -> None:
    if not torch.allclose(expected_loss, loss, rtol=tolerance, atol=1e-6, equal_nan=True):
        raise UnsupportedModelError(
            f"self-check: streamed through {way} the loss is {float(loss):.6f}, resident {float(expected_loss):.6f}; "
            "in step() the forwards of micro-batches run side by side and must not share what they leave in the module "
            '(in Placement(order="micro-batch-major") they run one after the other)'
        )
    for parameter in dict.fromkeys([*expected, *found]):
        one, other = expected.get(parameter), found.get(parameter)
        if one is None or other is None:
            side = "streamed" if other is None else "resident"
            raise UnsupportedModelError(f"self-check: {parameter.name} gets no gradient when {side} (through {way})")
        if one.numel() == 0 or not bool(torch.isfinite(one).all()):
            continue
        largest = float(one.abs().max())
        difference = float((one - other).abs().max())
        if not difference <= tolerance * largest + 1e-9:
            raise UnsupportedModelError(
                f"self-check: the gradient of {parameter.name} through {way} is off by {difference:.3g} where its "
                f"largest element is {largest:.3g}; tensors may leave a block other than by its return value, hooks or "
                "containers that it was given"
            )


def _scalar_in(output: Any) -> torch.Tensor:
    """The loss; of an output without one, a fixed random projection of what can be differentiated."""
    try:
        return loss_in(output)
    except ValueError:
        pass
    generator = torch.Generator().manual_seed(0)
    total = torch.zeros(())
    for value in pytree.tree_leaves(output):
        if isinstance(value, torch.Tensor) and value.requires_grad:
            weights = torch.randn(value.shape, generator=generator).to(value.device)
            total = total.to(value.device) + (value.float() * weights).mean()
    return total


@contextmanager
def buffers_kept(module: nn.Module, *, only_after_errors: bool = False) -> Iterator[None]:
    """Buffers outside the blocks as they were: statistics must not count the check's batches, nor those of a step
    that is begun anew."""
    buffers = [buffer for buffer in module.buffers() if buffer.device.type != "meta"]
    before = [buffer.clone() for buffer in buffers]
    done = False
    try:
        yield
        done = True
    finally:
        if not (done and only_after_errors):
            with torch.no_grad():
                for buffer, value in zip(buffers, before, strict=True):
                    if buffer.numel() and not torch.equal(buffer, value):
                        buffer.copy_(value)
