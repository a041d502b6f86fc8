"""One call of a block: run without a graph, its gradients by a recompute.

What the module sees as the block's outputs are fresh leaves; what it gave as inputs is kept, since a
recompute from them gives every gradient. Places where kept activations will hook in: `BlockRunner.run`
(forward in grad mode under saved-tensor hooks instead of no_grad) and `BlockRunner.gradients`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch.utils import _pytree as pytree

from megatrain.blocks import refuse_opaque
from megatrain.host_mirror import strip_mirror

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from megatrain.blocks import Block, BlockCaller
    from megatrain.rng import RngState
    from megatrain.units import TiledParameter


@dataclass(eq=False)
class BlockCall:
    """A block's arguments, flattened, and the state of the generators when it was called."""

    block: Block
    leaves: list[Any]
    spec: pytree.TreeSpec
    rng: RngState
    versions: tuple[int, ...]

    @staticmethod
    def capture(block: Block, args: tuple[Any, ...], kwargs: dict[str, Any], rng: RngState) -> BlockCall:
        leaves, spec = pytree.tree_flatten((args, kwargs))
        # What derives from the labels carries its host twin no further than to the block.
        leaves = [strip_mirror(leaf) if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]
        refuse_opaque(block, leaves)
        versions = tuple(leaf._version for leaf in leaves if isinstance(leaf, torch.Tensor))
        return BlockCall(block, leaves, spec, rng, versions)

    def tensors(self) -> list[torch.Tensor]:
        return [leaf for leaf in self.leaves if isinstance(leaf, torch.Tensor)]

    def differentiable(self) -> list[torch.Tensor]:
        return [leaf for leaf in self.tensors() if leaf.requires_grad]

    def arguments(self, tensors: Sequence[torch.Tensor]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """(args, kwargs) with these in place of the call's tensors."""
        following = iter(tensors)
        leaves = [next(following) if isinstance(leaf, torch.Tensor) else leaf for leaf in self.leaves]
        args, kwargs = pytree.tree_unflatten(leaves, self.spec)
        return args, kwargs

    def check_unchanged(self) -> None:
        for tensor, version in zip(self.tensors(), self.versions, strict=True):
            if tensor._version != version:
                raise RuntimeError(
                    f"an input of {self.block.name} was modified in place after the block used it; "
                    "its recompute would not repeat the forward"
                )


@dataclass(eq=False)
class BlockOutput:
    """What the module gets back: the tree, and those of its tensors that are fresh leaves."""

    tree: Any
    leaves: list[torch.Tensor | None]
    """Position by position of the flattened output; None where an input was passed through or the
    output is not a tensor."""


class BlockRunner:
    """Runs calls under weights that are already on the device."""

    def __init__(
        self,
        caller: BlockCaller,
        device: torch.device,
        is_trainable: Callable[[TiledParameter], bool],
    ) -> None:
        self._caller = caller
        self._device = device
        self._is_trainable = is_trainable

    def has_gradients(self, call: BlockCall) -> bool:
        """Something that needs a gradient goes into the call."""
        return bool(call.differentiable()) or any(self._is_trainable(p) for _, p in call.block.parameters)

    def call_plainly(
        self, block: Block, weights: dict[str, torch.Tensor], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """The forward where nothing is differentiated: the block gets its arguments as they are, caches
        included."""
        output = self._caller(block, {name: weight.detach() for name, weight in weights.items()}, args, kwargs)
        return pytree.tree_map_only(torch.Tensor, lambda value: own_memory(value, weights), output)

    def run(self, call: BlockCall, weights: dict[str, torch.Tensor]) -> BlockOutput:
        """The forward without a graph. Outputs require a gradient if something that went in does."""
        inputs = [tensor.detach() for tensor in call.tensors()]
        args, kwargs = call.arguments(inputs)
        with torch.no_grad():
            output = self._caller(call.block, {n: w.detach() for n, w in weights.items()}, args, kwargs)
        originals = {id(mine): given for mine, given in zip(inputs, call.tensors(), strict=True)}
        flat, spec = pytree.tree_flatten(output)
        needs_grad = torch.is_grad_enabled() and self.has_gradients(call)
        leaves: list[torch.Tensor | None] = []
        for position, value in enumerate(flat):
            leaf = None
            if isinstance(value, torch.Tensor):
                if id(value) in originals:  # passed through: the graph between the blocks carries it on
                    flat[position] = originals[id(value)]
                else:
                    leaf = own_memory(value, weights).detach()
                    leaf.requires_grad_(needs_grad and leaf.is_floating_point())
                    flat[position] = leaf
            leaves.append(leaf)
        return BlockOutput(pytree.tree_unflatten(flat, spec), leaves)

    def gradients(
        self,
        call: BlockCall,
        weights: dict[str, torch.Tensor],
        output_gradients: Sequence[torch.Tensor | None],
    ) -> tuple[list[torch.Tensor | None], list[tuple[TiledParameter, torch.Tensor | None]]]:
        """Recompute from the inputs, then the gradients of `call.tensors()` (None where none is needed)
        and of the block's trainable parameters. `output_gradients` follow the flattened output."""
        call.check_unchanged()
        given = call.tensors()
        inputs = [tensor.detach().requires_grad_(tensor.requires_grad) for tensor in given]
        parameters: dict[str, torch.Tensor] = {}
        wanted: list[tuple[TiledParameter, torch.Tensor]] = []
        by_tensor: dict[int, torch.Tensor] = {}
        for name, parameter in call.block.parameters:
            if id(parameter) not in by_tensor:  # names tied inside the block share one leaf
                leaf = weights[name].detach()
                if self._is_trainable(parameter):
                    leaf.requires_grad_()
                    wanted.append((parameter, leaf))
                by_tensor[id(parameter)] = leaf
            parameters[name] = by_tensor[id(parameter)]
        call.rng.restore(self._device)
        args, kwargs = call.arguments(inputs)
        with torch.enable_grad():
            flat, _ = pytree.tree_flatten(self._caller(call.block, parameters, args, kwargs))
        pairs = [
            (value, gradient)
            for value, gradient in zip(flat, output_gradients, strict=True)
            if gradient is not None and isinstance(value, torch.Tensor) and value.requires_grad
        ]
        sources = [tensor for tensor in inputs if tensor.requires_grad] + [leaf for _, leaf in wanted]
        if not pairs or not sources:
            return [None] * len(given), [(parameter, None) for parameter, _ in wanted]
        found = iter(
            torch.autograd.grad(
                [value for value, _ in pairs], sources, [gradient for _, gradient in pairs], allow_unused=True
            )
        )
        input_gradients = [next(found) if tensor.requires_grad else None for tensor in inputs]
        return input_gradients, [(parameter, next(found)) for parameter, _ in wanted]


def own_memory(value: torch.Tensor, weights: dict[str, torch.Tensor]) -> torch.Tensor:
    """The tensor itself, or a copy where it is a view of weights: their memory will hold others."""
    storage = value.untyped_storage().data_ptr()
    if storage != 0 and any(weight.untyped_storage().data_ptr() == storage for weight in weights.values()):
        return value.clone()
    return value
