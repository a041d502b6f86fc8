"""Runs calls of blocks: the forward, and its gradients.

Gradients come from the graph of the forward where it was kept, else from a recompute of the forward from its inputs;
where the block's call is a part of its caller's graph, from that."""

from __future__ import annotations

from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

import torch
from torch.autograd.graph import get_gradient_edge

from megatrain.blocks import BlockResult, refuse_opaque
from megatrain.calls import BlockOutput, CallRecord, is_handed_over
from megatrain.chosen_experts import BlockWeights, EnteredWeights, experts_in
from megatrain.errors import UnsupportedModelError
from megatrain.host_mirror import strip_mirror
from megatrain.kept import BlockMemory, Keeper, KeptGraph, SelectedOutputs, enter, entered_edges
from megatrain.rng import RngState
from megatrain.strays import nothing_saved
from megatrain.trees import flatten, unflatten

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from torch.autograd.graph import GradientEdge

    from megatrain.blocks import Block, BlockCaller
    from megatrain.calls import BlockCall, Keeping
    from megatrain.trees import Flat
    from megatrain.units import TiledParameter


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
        return BlockResult(*unflatten(*_owned(result, weights)))

    def run_joined(
        self,
        block: Block,
        weights: Mapping[str, torch.Tensor],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        take: Callable[[Sequence[TiledParameter], Sequence[torch.Tensor | None]], None],
    ) -> tuple[BlockResult, torch.Tensor | None]:
        """The forward as a part of its caller's graph, whose backward calls `take` with the gradients of trainable
        parameters. The weights stay where they are until then. With a tensor of those with gradients that the block
        has made and not only passed on, if there is one."""
        given, given_spec = flatten((args, kwargs))
        refuse_opaque(block, given)
        stripped = [strip_mirror(leaf) if isinstance(leaf, torch.Tensor) else leaf for leaf in given]
        own_args, own_kwargs = unflatten(stripped, given_spec)
        trained, tensors = self._apart(block, weights)
        entered = enter([tensors[id(p)] for p in trained], lambda gradients: take(trained, gradients))
        tensors.update(zip(map(id, trained), entered, strict=True))
        parameters = {name: tensors[id(parameter)] for name, parameter in block.parameters}
        versions = [tensor._version for tensor in parameters.values()]
        hooked = block.relays.hooked(block.modules())
        result = self._caller(block, parameters, own_args, own_kwargs, hooked=hooked)
        _require_unwritten(block, parameters, versions)
        leaves, spec = _owned(result, weights)
        passed = {id(leaf) for leaf in stripped}
        made = (leaf for leaf in leaves if isinstance(leaf, torch.Tensor) and id(leaf) not in passed)
        return BlockResult(*unflatten(leaves, spec)), next((leaf for leaf in made if leaf.grad_fn is not None), None)

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
        pairs = zip(*entered_edges(call.block.name, entering), strict=True)
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
        entered, edges = entered_edges(block.name, [tensors[id(p)] for p in trained])
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


def _owned(result: BlockResult, weights: Mapping[str, torch.Tensor]) -> Flat:
    """Flattened; no tensor in it is a view of weights."""
    leaves, spec = flatten(tuple(result))
    return [own_memory(leaf, weights) if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves], spec


def own_memory(value: torch.Tensor, weights: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """The tensor itself, or a copy where it is a view of weights: their memory will hold others."""
    storage = value.untyped_storage().data_ptr()
    if storage != 0 and any(weight.untyped_storage().data_ptr() == storage for weight in weights.values()):
        return value.clone()
    return value
