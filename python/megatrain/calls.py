"""One call of a block: its arguments, what leaves it, and what it leaves behind for its gradients.

What the module sees as the block's outputs are fresh leaves without a graph behind them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch.autograd.graph import get_gradient_edge

from megatrain.blocks import refuse_opaque
from megatrain.host_mirror import strip_mirror
from megatrain.kept import KeptTensor
from megatrain.trees import flatten, unflatten

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import nn
    from torch.autograd.graph import GradientEdge

    from megatrain.blocks import Block, BlockResult
    from megatrain.chosen_experts import ExpertsChoice
    from megatrain.host_shelf import HostShelf, ShelvedTensor
    from megatrain.kept import Keeper, KeptGraph, SelectedOutputs
    from megatrain.placement import Keep
    from megatrain.rng import RngState
    from megatrain.trees import Spec


def mark_handed_over(tensor: torch.Tensor) -> None:
    """It is a block's output, and so goes away once the next block has used it."""
    tensor._megatrain_handed_over = True  # type: ignore[attr-defined]


def is_handed_over(tensor: torch.Tensor) -> bool:
    return getattr(tensor, "_megatrain_handed_over", False)


@dataclass(frozen=True)
class Keeping:
    """What one call leaves, and where: on a shelf, or (None) on the device."""

    keep: Keep = "inputs"
    shelf: HostShelf | None = None
    inputs_shelf: HostShelf | None = None
    """For what the block before handed over."""


class OutputSlot:
    """An output of a block that other code takes: collects its gradient, whoever brings it, without holding
    the tensor."""

    def __init__(self, leaf: torch.Tensor) -> None:
        self.gradient: torch.Tensor | None = None
        mark_handed_over(leaf)
        leaf._megatrain_slot = self  # type: ignore[attr-defined]
        leaf.register_post_accumulate_grad_hook(self._take)  # type: ignore[no-untyped-call]

    @staticmethod
    def of(tensor: torch.Tensor) -> OutputSlot | None:
        """The slot of a tensor that is a block's output itself."""
        return getattr(tensor, "_megatrain_slot", None)

    def _take(self, leaf: torch.Tensor) -> None:
        gradient, leaf.grad = leaf.grad, None
        self.add(gradient)

    def add(self, gradient: torch.Tensor | None) -> None:
        if gradient is not None:
            self.gradient = gradient if self.gradient is None else self.gradient + gradient


@dataclass(eq=False)
class CallInput:
    """One tensor among a call's arguments."""

    requires_grad: bool
    tensor: torch.Tensor | None
    """Until the call has run."""
    version: int
    """Of the tensor, before the block saw it."""
    slot: OutputSlot | None = None
    edge: GradientEdge | None = None
    """Where its gradient goes on, if it is not a block's output itself."""
    kept: KeptTensor | ShelvedTensor | None = None


@dataclass(eq=False)
class BlockCall:
    """A block's arguments, flattened, and the state of the generators when it was called."""

    block: Block
    leaves: list[Any]
    """Arguments that are not tensors, None where one is."""
    inputs: list[CallInput]
    spec: Spec
    rng: RngState
    modes: tuple[bool, ...]
    """Of the block and its sub-modules: training, or not."""
    hooked: tuple[nn.Module, ...]
    """Sub-modules whose hooks see what leaves the block for them."""
    _positions: list[int] = field(default_factory=list)

    @staticmethod
    def capture(block: Block, args: tuple[Any, ...], kwargs: dict[str, Any], rng: RngState) -> BlockCall:
        leaves, spec = flatten((args, kwargs))
        refuse_opaque(block, leaves)
        modules = block.modules()
        modes = tuple([module.training for module in modules])
        call = BlockCall(block, leaves, [], spec, rng, modes, block.relays.hooked(modules))
        for position, leaf in enumerate(leaves):
            if not isinstance(leaf, torch.Tensor):
                continue
            # What derives from the labels carries its host twin no further than to the block.
            tensor = strip_mirror(leaf)
            slot = OutputSlot.of(tensor)
            edge = get_gradient_edge(tensor) if tensor.requires_grad and slot is None else None
            call.inputs.append(CallInput(tensor.requires_grad, tensor, tensor._version, slot, edge))
            call._positions.append(position)
            leaves[position] = None
        return call

    def tensors(self) -> list[torch.Tensor]:
        """Before the call has run."""
        return [given.tensor for given in self.inputs if given.tensor is not None]

    def arguments(self, tensors: Sequence[torch.Tensor]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """(args, kwargs) with these in place of the call's tensors, in containers of their own."""
        leaves = list(self.leaves)
        for position, tensor in zip(self._positions, tensors, strict=True):
            leaves[position] = tensor
        args, kwargs = unflatten(leaves, self.spec)
        return args, kwargs

    def check_unchanged(self) -> None:
        for given in self.inputs:
            if given.tensor is not None and given.tensor._version != given.version:
                raise RuntimeError(
                    f"{self.block.name} modified one of its inputs in place; its backward needs the value before"
                )

    def leave_inputs(self, keeper: Keeper | None) -> None:
        """The call has run. Its tensors wait with the keeper for a recompute, or are not needed any more."""
        for given in self.inputs:
            assert given.tensor is not None
            if keeper is not None:
                # Only what blocks hand to blocks goes away: masks and tables are needed all the time.
                leaves = is_handed_over(given.tensor)
                given.kept = keeper.keep(given.tensor) if leaves else KeptTensor(given.tensor)
            given.tensor = None

    def put_back(self) -> None:
        """Inputs that wait for another backward need no device memory meanwhile."""
        for given in self.inputs:
            if given.kept is not None:
                given.kept.put_back()

    def kept_inputs(self) -> list[torch.Tensor]:
        return [given.kept.take() for given in self.inputs if given.kept is not None]


@dataclass(eq=False)
class BlockOutput:
    """What leaves the block, and those of its tensors that are fresh leaves."""

    tree: BlockResult
    leaves: list[torch.Tensor | None]
    """Position by position of the flattened output; None where an input was passed through or the
    output is not a tensor."""
    record: CallRecord


@dataclass(eq=False)
class CallRecord:
    """What the backward of a call needs besides weights."""

    call: BlockCall
    graph: KeptGraph | None = None
    selected: SelectedOutputs | None = None
    inputs: Keeper | None = None
    experts: ExpertsChoice | None = None

    def fetch(self) -> None:
        """Start bringing back what waits on the host."""
        for waiting in (self.graph, self.selected, self.inputs):
            if waiting is not None:
                waiting.fetch()
