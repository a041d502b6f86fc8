"""Experts that can go to the device one by one: which modules hold them, and when all of them go up ahead.

Of a block that has an experts module of transformers' form, tensors of (experts, ...) that are called with the
indices the router has chosen, what is outside those tensors goes up ahead like any block. The experts themselves go
up when their module is called, once it is known which of them got tokens (`chosen_experts.py`)."""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from megatrain.errors import UnsupportedModelError

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from torch import nn

    from megatrain.chosen_experts import ExpertsUse
    from megatrain.placement import ExpertsWay
    from megatrain.stacks import Stack
    from megatrain.units import TiledParameter, Unit, UnitPlan

SHARED_FORWARDS = "transformers.integrations.moe"
"""Where the forward comes from that calls the implementation of experts which the configuration names, and where
transformers' own implementations are."""
IMPLEMENTATIONS = ("grouped_mm", "batched_mm")
"""Those that read no weight of an expert without tokens; so does each class of transformers' own, "eager"."""
DOMINANT_SHARE = 0.5
"""Of a block's weights: with less in its experts, "auto" streams the block whole."""
TOP_K_NAMES = ("num_experts_per_tok", "num_experts_per_token", "top_k_experts", "moe_topk", "moe_k")
"""What configurations call the number of a token's experts."""
SKIP_ALIGNMENT = 8
"""Elements at which an update on the device may begin; with 8-bit moments, a whole block of 128."""
ALL_FROM = 0.8
"""From this share of the experts that even routing would use on, "auto" sends all of them up ahead. Where few tokens
are computed the copies are the time of a pass, and leaving experts out pays for not having started before the router;
nearer to all of them there is nothing left to gain."""


@dataclass(frozen=True)
class ExpertsForm:
    """What is read from an experts module."""

    count: int
    tensors: tuple[str, ...]
    """Names of its parameters of shape (count, ...)."""
    index: str
    """Name of the argument with the chosen experts, the second one."""


def form_of(module: Any) -> ExpertsForm | str | None:
    """Of a module that can be streamed expert by expert; else why not, or None if it does not hold experts."""
    name = type(module).__name__
    own = home_of(type(module).forward) != SHARED_FORWARDS
    if own or "forward" in vars(module) or getattr(module, "_is_expert_parallel", False):
        if not any(kind.__name__.endswith("Experts") for kind in type(module).__mro__):
            return None
        return f"{name} is not called with the router's choice in the form that transformers' implementations share"
    if not leaves_idle_alone(module):
        return f"{name} runs as {module.config._experts_implementation}, which may read experts without tokens"
    count = module.num_experts
    tensors = tuple(
        key
        for key, parameter in module.named_parameters(recurse=False)
        if parameter.dim() >= 2 and parameter.shape[0] == count
    )
    arguments = list(inspect.signature(type(module).forward).parameters)
    if count < 2 or not tensors or len(arguments) < 3:
        return f"{name} holds no tensors of {count} experts"
    return ExpertsForm(count, tensors, arguments[2])


def leaves_idle_alone(module: Any) -> bool:
    """Its implementation now reads no weight of an expert without tokens."""
    forward = type(module).forward
    if home_of(forward) != SHARED_FORWARDS:  # given to the class meanwhile
        return False
    implementation = getattr(module.config, "_experts_implementation", None)
    registry = inspect.getclosurevars(forward).nonlocals.get("experts_interface")
    if registry is None:
        return False
    registered = registry.get(implementation, None)  # anybody can register one under any name, "eager" included
    if registered is None:  # the class's own forward
        return implementation in (None, "eager") and type(module).__module__.startswith("transformers.models.")
    return implementation in IMPLEMENTATIONS and home_of(registered) == SHARED_FORWARDS


def home_of(function: object) -> str | None:
    """The module whose code it is, whatever a decorator says."""
    return getattr(function, "__globals__", {}).get("__name__")


class Gate:
    """Stands in for the forward of one experts module while its weights may be incomplete."""

    def __init__(self, module: nn.Module, form: ExpertsForm, first_part: int) -> None:
        self.module = module
        self.form = form
        self.first_part = first_part
        config: Any = module.config
        named = (getattr(config, name, None) for name in TOP_K_NAMES)
        self.top_k = next((value for value in named if isinstance(value, int)), 1)
        """Experts of a token, as the router chose last; before, what the configuration says."""
        self.use: ExpertsUse | None = None
        # One object for ever: compiled graphs are found by it.
        self.forward = partial(_forward_through, self)

    def replaced(self) -> bool:
        """The module was given a forward of somebody else's meanwhile, which may read any expert."""
        return vars(self.module).get("forward", self.forward) is not self.forward

    def listen(self, use: ExpertsUse | None) -> None:
        """Calls of the module tell `use`, or nobody, what was chosen. A replaced forward stays as it is."""
        self.use = None if self.replaced() else use
        if self.use is not None:
            vars(self.module)["forward"] = self.forward
        elif not self.replaced():
            vars(self.module).pop("forward", None)

    @property
    def parts(self) -> range:
        return range(self.first_part, self.first_part + self.form.count)


def _forward_through(gate: Gate, *args: Any, **kwargs: Any) -> Any:
    _choose(gate, args, kwargs)
    return type(gate.module).forward(gate.module, *args, **kwargs)


@torch.compiler.disable  # type: ignore[untyped-decorator]
def _choose(gate: Gate, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
    if gate.use is not None:
        gate.use.choose(gate, args[1] if len(args) > 1 else kwargs[gate.form.index])


class BlockExperts:
    """All experts of one block, numbered through: the parts of its tile's weights."""

    def __init__(self, unit: Unit, gates: Sequence[Gate], tensors: Mapping[TiledParameter, Gate]) -> None:
        self.unit = unit
        self.gates = tuple(gates)
        self.tensors = dict(tensors)
        """Each tensor of experts and whose it is."""
        self.count = sum(gate.form.count for gate in gates)
        elements = sum(parameter.numel for parameter in tensors)
        self.dominate = elements >= DOMINANT_SHARE * unit.layout.weight_elements
        self.whole = False
        """The coming use takes all parts, ahead."""
        self._way: ExpertsWay = "auto"
        self._whole_next = False

    def elements(self, parameter: TiledParameter) -> int:
        """Of one expert."""
        return parameter.numel // self.tensors[parameter].form.count

    def parts(self) -> list[list[tuple[int, int]]]:
        """By part: its ranges of elements in the tile."""
        found: list[list[tuple[int, int]]] = [[] for _ in range(self.count)]
        for parameter, gate in self.tensors.items():
            begin, size = self.unit.layout.element_offset(parameter.index), self.elements(parameter)
            for expert, part in enumerate(gate.parts):
                found[part].append((begin + expert * size, begin + (expert + 1) * size))
        return found

    def replaced(self) -> list[Gate]:
        return [gate for gate in self.gates if gate.replaced()]

    def follow(self, way: ExpertsWay) -> list[int]:
        """From now on; the parts that are wanted ahead."""
        self._way = way
        self.whole = self._whole_next = self.whole_for(0)
        return self._ahead()

    def whole_for(self, rows: int) -> bool:
        """So many tokens are better served by all experts."""
        if self._way == "auto":
            return not self.dominate or self.expected_share(rows) >= ALL_FROM
        return self._way == "whole"

    def after(self, use: ExpertsUse) -> list[int]:
        """The use is over; the parts that the next one wants ahead. A backward takes what its forward took."""
        if not use.back:
            if use.rows:
                self._whole_next = self.whole_for(use.rows)
            if use.for_backward:
                return list(range(self.count)) if self.whole else sorted(use.for_backward)
        self.whole = self._whole_next
        return self._ahead()

    def _ahead(self) -> list[int]:
        return list(range(self.count)) if self.whole else []

    def expected_share(self, rows: int) -> float:
        """Of the experts that get tokens, if `rows` tokens choose evenly."""
        used = 0.0
        for gate in self.gates:
            count = gate.form.count
            used += count * (1 - (1 - min(gate.top_k, count) / count) ** rows)
        return used / self.count


def find_experts(block: nn.Module, unit: Unit, parameters: Mapping[str, TiledParameter]) -> BlockExperts | None:
    """Those of a block whose tensors are all its own; None without. parameters: by name in the block."""
    gates: list[Gate] = []
    tensors: dict[TiledParameter, Gate] = {}
    first = 0
    for name, module in block.named_modules():
        form = form_of(module)
        if not isinstance(form, ExpertsForm):
            continue
        own = [parameters[f"{name}.{key}" if name else key] for key in form.tensors]
        if any(parameter.tile != unit.tile or parameter in tensors for parameter in own):
            continue
        gate = Gate(module, form, first)
        gates.append(gate)
        tensors.update(dict.fromkeys(own, gate))
        first += form.count
    return BlockExperts(unit, gates, tensors) if gates else None


def experts_of(stacks: Iterable[Stack], units: UnitPlan) -> dict[int, BlockExperts]:
    """By tile: those of every block that has some."""
    found = {}
    for name, block in (entry for stack in stacks for entry in stack.entries()):
        inner = [key for key, _ in block.named_parameters(remove_duplicate=False)]
        unit = units.block_units[name]
        experts = find_experts(block, unit, {key: units.names[f"{name}.{key}"] for key in inner})
        if experts is not None:
            found[unit.tile] = experts
    return found


def require_skippable(module: nn.Module, experts: Iterable[BlockExperts], moments: str) -> None:
    """UnsupportedModelError where idle experts cannot be told from others, or not be left out of an update. experts:
    those found in the module's blocks."""
    found = list(experts)
    _require_all_found(module, {id(gate.module) for block in found for gate in block.gates})
    if not found:
        raise UnsupportedModelError(
            "skip_idle_experts=True, but no block has experts that can be streamed by the router's choice; "
            "docs/models.md says which families have"
        )
    unit = 128 if moments == "int8" else SKIP_ALIGNMENT
    for block in found:
        for parameter in block.tensors:
            elements = block.elements(parameter)
            if parameter.trainable and elements % unit:
                raise UnsupportedModelError(
                    f"skip_idle_experts=True, but an expert of {parameter.name} has {elements} elements; with "
                    f"moments={moments!r} they must be a multiple of {unit}"
                )


def _require_all_found(module: nn.Module, found: set[int]) -> None:
    """found: ids of the experts modules that say which experts get tokens."""
    for name, inner in module.named_modules():
        form = form_of(inner)
        if form is None or id(inner) in found or not any(p.requires_grad for p in inner.parameters(recurse=False)):
            continue
        reason = form if isinstance(form, str) else f"the tensors of {type(inner).__name__} are not one block's alone"
        raise UnsupportedModelError(
            f"skip_idle_experts=True, but which experts of {name or 'the module'} get tokens is not known: {reason}; "
            "freeze them or train without the option"
        )


def ways_of(module: nn.Module) -> list[str]:
    """For each kind of experts in a module before it is streamed: "by choice", or why its blocks go up whole."""
    found = [form_of(inner) for inner in module.modules()]
    return list(dict.fromkeys("by choice" if isinstance(way, ExpertsForm) else way for way in found if way is not None))
