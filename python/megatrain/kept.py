"""What a block's forward leaves for its backward.

`KeptGraph`: the forward's own graph, whose saved tensors were packed. Weights are packed as places in the
block's memory, so that they may leave the device and come back elsewhere; the rest stays or goes to the host.
`SelectedOutputs`: the outputs of matrix products and attention, which a recompute takes instead of computing
them again."""

from __future__ import annotations

import weakref
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch.autograd.graph import GradientEdge, get_gradient_edge, saved_tensors_hooks
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from megatrain.host_shelf import is_dense
from megatrain.strays import stray

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from megatrain.host_shelf import HostShelf, ShelvedTensor
    from megatrain.units import TiledParameter

    Take = Callable[[Sequence[torch.Tensor | None]], None]

SHELF_LEAST_BYTES = 1 << 20
"""Smaller tensors stay on the device: a copy of them costs more than it frees."""


class KeptTensor:
    """A tensor that stays on the device; it must not be modified in place meanwhile."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self._tensor = tensor.detach()
        self._version = tensor._version

    def put_back(self) -> None:
        pass

    def take(self) -> torch.Tensor:
        if self._tensor._version != self._version:
            raise RuntimeError(
                f"a tensor of shape {tuple(self._tensor.shape)} that a block's backward needs was modified in place "
                "after the block used it"
            )
        return self._tensor


class Keeper:
    """Puts one call's tensors where they wait: `inputs`, and what shares their memory, on one shelf, the rest on
    another. Those that are put twice wait once."""

    def __init__(
        self, tile: int, shelf: HostShelf | None, inputs_shelf: HostShelf | None, inputs: Sequence[torch.Tensor]
    ) -> None:
        self._tile = tile
        self._shelf = shelf
        self._inputs_shelf = inputs_shelf
        shelves = shelf is not inputs_shelf
        self._inputs = {tensor.untyped_storage().data_ptr() for tensor in inputs} if shelves else set()
        # With the tensor: while it lives, no other has its address.
        self._known: dict[tuple[Any, ...], tuple[torch.Tensor, ShelvedTensor]] = {}
        self._shelved: list[weakref.ref[ShelvedTensor]] = []

    def keep(self, tensor: torch.Tensor) -> KeptTensor | ShelvedTensor:
        small = tensor.numel() * tensor.element_size() < SHELF_LEAST_BYTES
        # Kernels may want the strides that a view of larger memory has: such a one stays.
        shelf = self._shelf
        if shelf is not self._inputs_shelf and tensor.layout == torch.strided:
            if tensor.untyped_storage().data_ptr() in self._inputs:
                shelf = self._inputs_shelf
        if shelf is None or small or tensor.device != shelf.device or not is_dense(tensor):
            return KeptTensor(tensor)
        key = (tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype, tensor._version)
        if key not in self._known:
            shelved = shelf.put(tensor, self._tile)
            self._shelved.append(weakref.ref(shelved))
            self._known[key] = (tensor.detach(), shelved)
        return self._known[key][1]

    def close(self) -> None:
        """The call is over: nothing of it will be put a second time."""
        self._known.clear()
        self._inputs.clear()

    def check_unmodified(self) -> None:
        """At the end of the forward; what stays on the device says so itself when it is taken."""
        if any(tensor._version != key[-1] for key, (tensor, _) in self._known.items()):
            raise RuntimeError("a block modified a tensor in place that its backward needs")

    def fetch(self) -> None:
        for reference in self._shelved:
            shelved = reference()
            if shelved is not None:
                shelved.fetch()


@dataclass(frozen=True)
class _Place:
    """A view of a parameter's memory."""

    parameter: str
    dtype: torch.dtype
    offset: int
    size: torch.Size
    stride: tuple[int, ...]


class BlockMemory:
    """Where a call's weights are, now: `weights` by their names in the block."""

    def __init__(self, weights: Mapping[str, torch.Tensor]) -> None:
        self._weights = weights
        self._names: dict[int, str] = {}
        for name, weight in weights.items():
            self._names.setdefault(weight.untyped_storage().data_ptr(), name)

    def place_of(self, tensor: torch.Tensor) -> _Place | None:
        """None for what is not a view of weights."""
        storage = tensor.untyped_storage().data_ptr() if tensor.layout == torch.strided else 0
        if storage == 0 or storage not in self._names:
            return None
        return _Place(self._names[storage], tensor.dtype, int(tensor.storage_offset()), tensor.shape, tensor.stride())

    def moved_to(self, weights: Mapping[str, torch.Tensor]) -> None:
        self._weights = weights

    def leave(self) -> None:
        """The weights may be overwritten from now on."""
        self._weights = {}

    def view(self, place: _Place) -> torch.Tensor:
        if not self._weights:
            raise stray("a block")
        storage = self._weights[place.parameter].untyped_storage()
        empty = torch.empty(0, dtype=place.dtype, device=storage.device)
        return empty.set_(storage, place.offset, place.size, place.stride)


class _Entry(torch.autograd.Function):
    """Gives tensors places in the graph without being them: leaves would be held by it, and so their memory. `take`
    gets the gradients that arrive there, all at once."""

    @staticmethod
    def forward(ctx: Any, gate: torch.Tensor, take: Take, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.take = take
        ctx.set_materialize_grads(False)
        return tuple([tensor.detach() for tensor in tensors])

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> tuple[None, ...]:
        ctx.take(gradients)
        return (None, None, *[None for _ in gradients])


def enter(tensors: Sequence[torch.Tensor], take: Take) -> Sequence[torch.Tensor]:
    """Tensors of the same memory that require gradients; a backward calls `take` with these, where any has one."""
    if not tensors:
        return ()
    with torch.enable_grad():
        gate = torch.zeros((), requires_grad=True)
        entered: tuple[torch.Tensor, ...] = _Entry.apply(gate, take, *tensors)  # type: ignore[no-untyped-call]
    return entered


def entered_edges(
    block: str, tensors: Sequence[torch.Tensor]
) -> tuple[Sequence[torch.Tensor], list[GradientEdge]]:
    """(tensors of the same memory that require gradients, where to ask for them). A gradient that arrives without being
    asked for comes from outside of the block."""

    def refuse(gradients: Sequence[torch.Tensor | None]) -> None:
        raise stray(block)

    entered = enter(tensors, refuse)
    if not entered:
        return (), []
    first = get_gradient_edge(entered[0])
    return entered, [first._replace(output_nr=number) for number in range(len(entered))]


@dataclass(eq=False)
class KeptGraph:
    """A call's graph, without the tensors at its ends."""

    memory: BlockMemory
    keeper: Keeper
    inputs: list[GradientEdge | None] = field(default_factory=list)
    """By the call's tensors; None where no gradient is needed."""
    outputs: list[GradientEdge | None] = field(default_factory=list)
    """By the flattened output; None where nothing is differentiable."""
    parameters: list[tuple[TiledParameter, GradientEdge]] = field(default_factory=list)
    """Where the gradients of trainable parameters are asked for."""

    @contextmanager
    def saving(self, *, in_place: bool) -> Iterator[None]:
        """What autograd saves inside of the `with` is packed. in_place: weights stay where they are, and all else
        stays on the device, so that autograd itself may keep it, with the checks of its own."""
        if in_place:
            yield
            return

        # Not `self`: the hooks live in the graph, which it holds, where Python's collector does not see them.
        memory, keep = self.memory, self.keeper.keep

        def pack(tensor: torch.Tensor) -> Any:
            return memory.place_of(tensor) or keep(tensor)

        def unpack(packed: Any) -> torch.Tensor:
            return memory.view(packed) if isinstance(packed, _Place) else packed.take()

        with saved_tensors_hooks(pack, unpack):
            yield
        self.keeper.check_unmodified()
        self.memory.leave()

    def fetch(self) -> None:
        self.keeper.fetch()

    def gradients(
        self, weights: Mapping[str, torch.Tensor], output_gradients: Sequence[torch.Tensor | None]
    ) -> tuple[list[torch.Tensor | None], list[tuple[TiledParameter, torch.Tensor | None]]]:
        """Of the call's tensors and of the trainable parameters, with the weights where they are now. Once."""
        pairs = [
            (edge, gradient)
            for edge, gradient in zip(self.outputs, output_gradients, strict=True)
            if edge is not None and gradient is not None
        ]
        sources = [edge for edge in self.inputs if edge is not None] + [edge for _, edge in self.parameters]
        if not pairs or not sources:
            return [None] * len(self.inputs), [(parameter, None) for parameter, _ in self.parameters]
        self.memory.moved_to(weights)
        found = iter(
            torch.autograd.grad(
                [edge for edge, _ in pairs],
                sources,
                [gradient for _, gradient in pairs],
                allow_unused=True,
            )
        )
        self.memory.leave()
        input_gradients = [None if edge is None else next(found) for edge in self.inputs]
        return input_gradients, [(parameter, next(found)) for parameter, _ in self.parameters]


def _selected_operators() -> frozenset[Any]:
    names = (
        "mm addmm bmm baddbmm _grouped_mm convolution _scaled_dot_product_flash_attention "
        "_scaled_dot_product_efficient_attention _scaled_dot_product_cudnn_attention "
        "_scaled_dot_product_flash_attention_for_cpu _scaled_dot_product_fused_attention_overrideable"
    )
    found = (getattr(torch.ops.aten, name, None) for name in names.split())
    return frozenset(packet.default for packet in found if packet is not None and "default" in packet.overloads())


SELECTED_OPERATORS = _selected_operators()


class SelectedOutputs:
    """The selected outputs of one eager call, in the order in which they were computed."""

    def __init__(self, keeper: Keeper) -> None:
        self._keeper = keeper
        self._outputs: list[tuple[Any, Any]] = []
        self._watched: list[tuple[torch.Tensor, int]] = []

    def is_whole(self) -> bool:
        """The forward has ended, and modified none of the outputs in place: a recompute would do so again."""
        watched, self._watched = self._watched, []
        return all(tensor._version == version for tensor, version in watched)

    def record(self) -> TorchDispatchMode:
        return _Dispatch(self._record)

    def replay(self) -> TorchDispatchMode:
        """Once."""
        outputs = iter(self._outputs)
        self._outputs = []

        def answer(function: Any, args: Any, kwargs: Any) -> Any:
            if function not in SELECTED_OPERATORS:
                return function(*args, **kwargs)
            recorded, packed = next(outputs, (None, None))
            if recorded is not function:
                raise RuntimeError(f"a recompute ran {function}, where the forward had run {recorded}")
            return pytree.tree_map(lambda entry: entry.take() if hasattr(entry, "take") else entry, packed)

        return _Dispatch(answer)

    def fetch(self) -> None:
        self._keeper.fetch()

    def _record(self, function: Any, args: Any, kwargs: Any) -> Any:
        output = function(*args, **kwargs)
        if function in SELECTED_OPERATORS:
            self._outputs.append((function, pytree.tree_map_only(torch.Tensor, self._keep, output)))
        return output

    def _keep(self, tensor: torch.Tensor) -> KeptTensor | ShelvedTensor:
        # Below autograd an alias would have a version counter of its own.
        with torch._C._SetExcludeDispatchKeyGuard(torch._C.DispatchKey.ADInplaceOrView, False):
            alias = tensor.detach()
            self._watched.append((alias, alias._version))
            return self._keeper.keep(alias)


class _Dispatch(TorchDispatchMode):  # type: ignore[no-untyped-call]
    def __init__(self, answer: Callable[[Any, Any, Any], Any]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._answer = answer

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return self._answer(func, args, kwargs or {})
