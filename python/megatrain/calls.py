"""One call of a block: its forward, what that leaves behind, and its gradients.

What the module sees as the block's outputs are fresh leaves without a graph behind them. Gradients come from
the graph of the forward where it was kept, else from a recompute of the forward from its inputs."""

from __future__ import annotations

from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch.autograd.graph import get_gradient_edge

from megatrain.blocks import BlockResult, refuse_opaque
from megatrain.chosen_experts import BlockWeights, EnteredWeights, experts_in
from megatrain.errors import UnsupportedModelError
from megatrain.host_mirror import strip_mirror
from megatrain.kept import BlockMemory, Keeper, KeptGraph, KeptTensor, SelectedOutputs, enter, enter_joined
from megatrain.rng import RngState
from megatrain.strays import nothing_saved
from megatrain.trees import flatten, unflatten

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from torch import nn
    from torch.autograd.graph import GradientEdge

    from megatrain.blocks import Block, BlockCaller
    from megatrain.chosen_experts import ExpertsChoice
    from megatrain.host_shelf import HostShelf, ShelvedTensor
    from megatrain.placement import Keep
    from megatrain.trees import Spec
    from megatrain.units import TiledParameter


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

    @contextmanager
    def eagerly(self) -> Iterator[None]:
        """Nothing is compiled inside: rows that grow by a token at a time would be compiled again and again."""
        compiled, self._caller.compiled = self._caller.compiled, False
        try:
            yield
        finally:
            self._caller.compiled = compiled

    def has_gradients(self, call: BlockCall) -> bool:
        """Something that needs a gradient goes into the call."""
        return any(given.requires_grad for given in call.inputs) or any(
            self._is_trainable(p) for _, p in call.block.parameters
        )

    def call_plainly(
        self, block: Block, weights: dict[str, torch.Tensor], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> BlockResult:
        """The forward where nothing is differentiated: the block gets its arguments as they are, caches
        included; only plain containers are its own."""
        given, given_spec = flatten((args, kwargs))
        own_args, own_kwargs = unflatten(given, given_spec)
        detached = {name: weight.detach() for name, weight in weights.items()}
        experts = experts_in(weights)
        if experts is not None:
            experts.begin([leaf for leaf in given if isinstance(leaf, torch.Tensor)])
        hooked = block.relays.hooked(block.modules())
        result = self._caller(block, detached, own_args, own_kwargs, hooked=hooked)
        if experts is not None:
            experts.end(differentiable=False)
        return _with_own_memory(result, weights)

    def run_joined(
        self,
        block: Block,
        weights: Mapping[str, torch.Tensor],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        take: Callable[[Sequence[TiledParameter], Sequence[torch.Tensor | None]], None],
    ) -> BlockResult:
        """The forward as a part of its caller's graph, whose backward calls `take` with the gradients of trainable
        parameters. The weights stay where they are until then."""
        given, given_spec = flatten((args, kwargs))
        refuse_opaque(block, given)
        stripped = [strip_mirror(leaf) if isinstance(leaf, torch.Tensor) else leaf for leaf in given]
        own_args, own_kwargs = unflatten(stripped, given_spec)
        trained, tensors = self._apart(block, weights)
        entered = enter_joined([tensors[id(p)] for p in trained], lambda gradients: take(trained, gradients))
        tensors.update(zip(map(id, trained), entered, strict=True))
        parameters = {name: tensors[id(parameter)] for name, parameter in block.parameters}
        versions = [tensor._version for tensor in parameters.values()]
        hooked = block.relays.hooked(block.modules())
        result = self._caller(block, parameters, own_args, own_kwargs, hooked=hooked)
        _require_unwritten(block, parameters, versions)
        return _with_own_memory(result, weights)

    def run(
        self,
        call: BlockCall,
        weights: dict[str, torch.Tensor],
        keeping: Keeping,
        *,
        differentiable: bool,
        more_than_once: bool = False,
    ) -> BlockOutput:
        """The forward. `differentiable`: its gradients will be asked for; outputs then require one if something
        that went in does. `more_than_once`: they may be asked for again, which then takes a recompute."""
        given = call.tensors()
        differentiable = differentiable and self.has_gradients(call)
        handed_over = [tensor for tensor in given if is_handed_over(tensor)]
        keeper = Keeper(call.block.unit.tile, keeping.shelf, keeping.inputs_shelf, handed_over)
        record = CallRecord(call, inputs=keeper)
        experts = experts_in(weights)
        if experts is not None:
            experts.begin(given)
        if not differentiable:
            inputs = [tensor.detach() for tensor in given]
            args, kwargs = call.arguments(inputs)
            with torch.no_grad():
                detached = {name: weight.detach() for name, weight in weights.items()}
                output = self._caller(call.block, detached, args, kwargs, hooked=call.hooked)
        elif keeping.keep == "everything" or self._caller.compiled:
            output, inputs = self._with_graph(record, weights, keeping, keeper)
        else:
            output, inputs = self._for_recompute(record, weights, keeping, keeper)
        if experts is not None:
            record.experts = experts.end(differentiable=differentiable)
        keep_inputs = differentiable and (more_than_once or record.graph is None)
        return self._handed_over(record, output, inputs, weights, differentiable, keeper if keep_inputs else None)

    def _with_graph(
        self, record: CallRecord, weights: dict[str, torch.Tensor], keeping: Keeping, keeper: Keeper
    ) -> tuple[BlockResult, list[torch.Tensor]]:
        call = record.call
        graph = KeptGraph(BlockMemory(weights), keeper)
        inputs, graph.inputs, (parameters, graph.parameters) = self._entered(call, weights)
        versions = [weight._version for weight in parameters.values()]
        args, kwargs = call.arguments(inputs)
        stay = isinstance(weights, BlockWeights) and weights.stay
        in_place = stay and keeping.shelf is None and keeping.inputs_shelf is None
        with torch.enable_grad(), graph.saving(in_place=in_place):
            output = self._caller(call.block, parameters, args, kwargs, keep=keeping.keep, hooked=call.hooked)
        _require_unwritten(call.block, parameters, versions)
        _keep_hooks_apart(weights, parameters)
        # What the compiler recomputes would draw other numbers than the forward did.
        if keeping.keep == "everything" or call.rng == RngState.capture(self._device):
            record.graph = graph
        return output, inputs

    def _for_recompute(
        self, record: CallRecord, weights: dict[str, torch.Tensor], keeping: Keeping, keeper: Keeper
    ) -> tuple[BlockResult, list[torch.Tensor]]:
        call = record.call
        selected = SelectedOutputs(keeper) if keeping.keep == "selected" else None
        # With gradients on, as in the recompute: attention may choose another operator without.
        inputs, _, (parameters, _) = self._entered(call, weights)
        versions = [weight._version for weight in parameters.values()]
        args, kwargs = call.arguments(inputs)
        recording = nullcontext() if selected is None else selected.record()
        with torch.enable_grad(), nothing_saved(call.block.name), recording:
            output = self._caller(call.block, parameters, args, kwargs, hooked=call.hooked)
        _require_unwritten(call.block, parameters, versions)
        _keep_hooks_apart(weights, parameters)
        # An operator that is not run again would not draw again, and all after it would draw other numbers.
        if selected is not None and selected.is_whole() and call.rng == RngState.capture(self._device):
            record.selected = selected
        return output, inputs

    def _handed_over(
        self,
        record: CallRecord,
        output: BlockResult,
        inputs: list[torch.Tensor],
        weights: dict[str, torch.Tensor],
        differentiable: bool,
        keeper: Keeper | None,
    ) -> BlockOutput:
        originals = {id(mine): given for mine, given in zip(inputs, record.call.tensors(), strict=True)}
        flat, spec = flatten(tuple(output))
        if record.graph is not None:
            record.graph.outputs = [
                get_gradient_edge(value) if isinstance(value, torch.Tensor) and value.requires_grad else None
                for value in flat
            ]
        leaves: list[torch.Tensor | None] = []
        for position, value in enumerate(flat):
            leaf = None
            if isinstance(value, torch.Tensor):
                if id(value) in originals:  # passed through: the graph between the blocks carries it on
                    flat[position] = originals[id(value)]
                else:
                    leaf = own_memory(value.detach(), weights)
                    leaf.requires_grad_(differentiable and leaf.is_floating_point())
                    flat[position] = leaf
            leaves.append(leaf)
        if differentiable:
            record.call.check_unchanged()
        record.call.leave_inputs(keeper)
        if record.inputs is not None:
            record.inputs.close()
        return BlockOutput(BlockResult(*unflatten(flat, spec)), leaves, record)

    def _entered(
        self, call: BlockCall, weights: Mapping[str, torch.Tensor]
    ) -> tuple[list[torch.Tensor], list[GradientEdge | None], EnteredWeights]:
        """(the call's tensors, where to ask for their gradients, weights), for a forward."""
        given = call.tensors()
        # Detached: the graph would hold a leaf itself, and so its memory.
        entering = [tensor.detach() for tensor in given if tensor.requires_grad]
        pairs = zip(*enter(call.block.name, entering), strict=True)
        inputs: list[torch.Tensor] = []
        edges: list[GradientEdge | None] = []
        for tensor in given:
            mine, edge = next(pairs) if tensor.requires_grad else (tensor.detach(), None)
            inputs.append(mine)
            edges.append(edge)
        return inputs, edges, self._entered_weights(call.block, weights)

    def _entered_weights(self, block: Block, weights: Mapping[str, torch.Tensor]) -> EnteredWeights:
        """Names tied inside the block share one tensor. Calls in one stay of the weights share all of them."""
        if isinstance(weights, BlockWeights) and weights.entered is not None:
            return weights.entered
        trained, tensors = self._apart(block, weights)
        entered, edges = enter(block.name, [tensors[id(p)] for p in trained])
        tensors.update(zip(map(id, trained), entered, strict=True))
        by_name = {name: tensors[id(parameter)] for name, parameter in block.parameters}
        made = EnteredWeights(by_name, list(zip(trained, edges, strict=True)))
        if isinstance(weights, BlockWeights):
            weights.entered = made
        return made

    def _apart(
        self, block: Block, weights: Mapping[str, torch.Tensor]
    ) -> tuple[list[TiledParameter], dict[int, torch.Tensor]]:
        """(the trainable parameters, tensors of a block's weights by the parameters' id), each once."""
        tensors = {id(parameter): weights[name].detach() for name, parameter in block.parameters}
        trained = {id(p): p for _, p in block.parameters if self._is_trainable(p)}
        return list(trained.values()), tensors

    def _parameter_leaves(
        self, call: BlockCall, weights: Mapping[str, torch.Tensor]
    ) -> tuple[dict[str, torch.Tensor], list[tuple[TiledParameter, torch.Tensor]]]:
        """(by name in the block, the trainable ones), for a recompute. Names tied inside the block share one leaf."""
        parameters: dict[str, torch.Tensor] = {}
        wanted: list[tuple[TiledParameter, torch.Tensor]] = []
        by_parameter: dict[int, torch.Tensor] = {}
        for name, parameter in call.block.parameters:
            if id(parameter) not in by_parameter:
                leaf = weights[name].detach()
                if self._is_trainable(parameter):
                    leaf.requires_grad_()
                    wanted.append((parameter, leaf))
                by_parameter[id(parameter)] = leaf
            parameters[name] = by_parameter[id(parameter)]
        return parameters, wanted

    def gradients(
        self,
        record: CallRecord,
        weights: dict[str, torch.Tensor],
        output_gradients: Sequence[torch.Tensor | None],
    ) -> tuple[list[torch.Tensor | None], list[tuple[TiledParameter, torch.Tensor | None]]]:
        """Of the call's tensors (None where none is needed) and of the block's trainable parameters.
        `output_gradients` follow the flattened output."""
        experts = experts_in(weights)
        if experts is not None and record.experts is not None:
            experts.again(record.experts)
        if record.graph is not None:
            graph, record.graph = record.graph, None  # it can be walked once
            of_graph = graph.gradients(weights, output_gradients)
            record.call.put_back()
            return of_graph
        call = record.call
        kept = call.kept_inputs()
        inputs = [
            tensor.detach().requires_grad_(given.requires_grad) for tensor, given in zip(kept, call.inputs, strict=True)
        ]
        parameters, wanted = self._parameter_leaves(call, weights)
        call.rng.restore(self._device)
        args, kwargs = call.arguments(inputs)
        selected, record.selected = record.selected, None
        replay = nullcontext() if selected is None else selected.replay()
        with torch.enable_grad(), _in_modes(call.block, call.modes), replay:
            output = self._caller(call.block, parameters, args, kwargs, hooked=call.hooked)
        flat, _ = flatten(tuple(output))
        pairs = [
            (value, gradient)
            for value, gradient in zip(flat, output_gradients, strict=True)
            if gradient is not None and isinstance(value, torch.Tensor) and value.requires_grad
        ]
        sources = [tensor for tensor in inputs if tensor.requires_grad] + [leaf for _, leaf in wanted]
        if not pairs or not sources:
            return [None] * len(inputs), [(parameter, None) for parameter, _ in wanted]
        call.put_back()
        found = iter(
            torch.autograd.grad(
                [value for value, _ in pairs], sources, [gradient for _, gradient in pairs], allow_unused=True
            )
        )
        input_gradients = [next(found) if tensor.requires_grad else None for tensor in inputs]
        return input_gradients, [(parameter, next(found)) for parameter, _ in wanted]


@contextmanager
def _in_modes(block: Block, modes: tuple[bool, ...]) -> Iterator[None]:
    """The block as it was, training or not, in its forward."""
    modules = block.modules()
    now = tuple([module.training for module in modules])
    if now == modes:
        yield
        return
    for module, mode in zip(modules, modes, strict=True):
        module.training = mode
    try:
        yield
    finally:
        for module, mode in zip(modules, now, strict=True):
            module.training = mode


def _require_unwritten(block: Block, weights: Mapping[str, torch.Tensor], versions: Sequence[int]) -> None:
    for (name, weight), version in zip(weights.items(), versions, strict=True):
        if weight._version != version:
            raise UnsupportedModelError(f"{block.name} writes its parameter {name} in forward")


def _keep_hooks_apart(weights: Mapping[str, torch.Tensor], entered: Mapping[str, torch.Tensor]) -> None:
    """Hooks that a forward has put on its parameters are for its own gradients: the next call gets other tensors."""
    if isinstance(weights, BlockWeights) and any(weight._backward_hooks for weight in entered.values()):
        weights.entered = None


def _with_own_memory(result: BlockResult, weights: Mapping[str, torch.Tensor]) -> BlockResult:
    leaves, spec = flatten(tuple(result))
    owned = [own_memory(leaf, weights) if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]
    return BlockResult(*unflatten(owned, spec))


def own_memory(value: torch.Tensor, weights: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """The tensor itself, or a copy where it is a view of weights: their memory will hold others."""
    storage = value.untyped_storage().data_ptr()
    if storage != 0 and any(weight.untyped_storage().data_ptr() == storage for weight in weights.values()):
        return value.clone()
    return value
