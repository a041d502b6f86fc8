"""Which parameters share a tile: one unit a block, one a module outside the stacks that owns parameters.

Pure planning: nothing is allocated or moved here."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from torch import nn

from megatrain._native import TileFormat, TileLayout
from megatrain.kept_fp32 import kept_in_fp32

if TYPE_CHECKING:
    from collections.abc import Sequence

    from megatrain.stacks import Stack

SUPPORTED_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@dataclass(frozen=True, eq=False)
class TiledParameter:
    """One parameter of the module and its place."""

    name: str
    """The first of its names; tied parameters have several."""
    shape: torch.Size
    trainable: bool
    """Has gradients, moments and a master; fixed when the model is made."""
    tile: int
    index: int
    """In the tile's layout."""
    original: nn.Parameter
    """The module's own object, whose storage becomes a view of the tile."""
    stays_fp32: bool = False
    """Among bf16 weights."""

    @property
    def numel(self) -> int:
        return self.shape.numel()


@dataclass(frozen=True, eq=False)
class Unit:
    """The parameters of one tile."""

    name: str
    owner: str
    """Name of the block or module that they belong to."""
    tile: int
    is_block: bool
    parameters: tuple[TiledParameter, ...]
    layout: TileLayout


@dataclass(frozen=True)
class UnitPlan:
    """Every unit, and where each use of a parameter in the module leads."""

    units: tuple[Unit, ...]
    names: dict[str, TiledParameter]
    """Every name of every parameter, ties included, in the module's order."""
    block_units: dict[str, Unit] = field(default_factory=dict)
    """By the block's full name."""

    @property
    def nbytes(self) -> int:
        return sum(unit.layout.nbytes for unit in self.units)

    @property
    def parameters(self) -> list[TiledParameter]:
        """Each parameter once, in the module's order."""
        return list(dict.fromkeys(self.names.values()))


def plan_units(module: nn.Module, stacks: Sequence[Stack], tile_format: TileFormat) -> UnitPlan:
    """Assign every parameter of the module to a unit. A parameter that several blocks, or a block and
    the rest of the module, use is outside the stacks, and so is one that stays fp32 among bf16 weights."""
    names: dict[str, nn.Parameter] = dict(module.named_parameters(remove_duplicate=False))
    for name, parameter in names.items():
        if parameter.dtype not in SUPPORTED_DTYPES:
            raise ValueError(
                f"parameter {name} is {parameter.dtype}; parameters must be float32, bfloat16 or float16"
            )
    blocks = [(name, block) for stack in stacks for name, block in stack.entries()]
    users: dict[int, set[str]] = {}
    inside: set[str] = set()
    for block_name, block in blocks:
        for key, parameter in block.named_parameters(remove_duplicate=False):
            users.setdefault(id(parameter), set()).add(block_name)
            inside.add(f"{block_name}.{key}")
    for name, parameter in names.items():
        if name not in inside:
            users.setdefault(id(parameter), set()).add("")

    kept = kept_in_fp32(module) if tile_format.weights != "fp32" else set()
    kept_format = TileFormat("fp32", tile_format.moments, tile_format.rule)
    tiled: dict[int, TiledParameter] = {}
    units: list[Unit] = []
    block_units: dict[str, Unit] = {}

    def add_unit(
        unit_name: str,
        owner: str,
        members: list[tuple[str, nn.Parameter]],
        *,
        is_block: bool,
        stays_fp32: bool = False,
    ) -> Unit:
        layout = TileLayout(
            kept_format if stays_fp32 else tile_format,
            [(parameter.numel(), parameter.requires_grad) for _, parameter in members],
        )
        parameters = []
        for index, (name, parameter) in enumerate(members):
            entry = TiledParameter(
                name, parameter.shape, parameter.requires_grad, len(units), index, parameter, stays_fp32
            )
            tiled[id(parameter)] = entry
            parameters.append(entry)
        unit = Unit(unit_name, owner, len(units), is_block, tuple(parameters), layout)
        units.append(unit)
        return unit

    block_names = {name for name, _ in blocks}
    for module_name, owner in module.named_modules(remove_duplicate=False):
        prefix = f"{module_name}." if module_name else ""
        if module_name in block_names:
            members = [
                (prefix + key, parameter)
                for key, parameter in owner.named_parameters()
                if users[id(parameter)] == {module_name} and id(parameter) not in kept
            ]
            block_units[module_name] = add_unit(module_name, module_name, members, is_block=True)
        outside = {
            id(parameter): (prefix + key, parameter)
            for key, parameter in owner.named_parameters(recurse=False)
            if id(parameter) not in tiled
            and ("" in users[id(parameter)] or len(users[id(parameter)]) > 1 or id(parameter) in kept)
        }
        # A block may itself own parameters that others use.
        unit_name = f"{module_name} (shared)" if module_name in block_names else module_name or "(root)"
        for stays_fp32 in (False, True):
            chosen = [member for key, member in outside.items() if (key in kept) == stays_fp32]
            if chosen:
                name = f"{unit_name} (fp32)" if stays_fp32 else unit_name
                add_unit(name, module_name, chosen, is_block=False, stays_fp32=stays_fp32)
    resolved = {name: tiled[id(parameter)] for name, parameter in names.items()}
    return UnitPlan(tuple(units), resolved, block_units)
