"""`requires_grad_()` of a module whose parameters live in tiles, and of every module in it."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from torch import nn

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from megatrain.blocks import Block
    from megatrain.parameters import TileParameter
    from megatrain.units import TiledParameter


def reach_parameters(
    module: nn.Module,
    blocks: Sequence[Block],
    names: Mapping[str, TiledParameter],
    faces: Mapping[str, TileParameter],
) -> None:
    """Make `requires_grad_()` of the module, and of each below it, reach the parameters that count. names: every name
    of every parameter."""
    below: dict[str, dict[str, TileParameter]] = {}
    for name, tiled in names.items():
        owner = name
        while owner:
            owner = owner.rpartition(".")[0]
            below.setdefault(owner, {})[tiled.name] = faces[tiled.name]
    for name, inner in _all_modules(module, blocks):
        inner.__dict__["requires_grad_"] = partial(_requires_grad_, inner, list(below.get(name, {}).values()))


def _all_modules(module: nn.Module, blocks: Sequence[Block]) -> Iterator[tuple[str, nn.Module]]:
    yield from module.named_modules()
    for block in blocks:
        for name, inner in block.skeleton.named_modules():
            yield f"{block.name}.{name}" if name else block.name, inner


def _requires_grad_(module: nn.Module, parameters: Sequence[TileParameter], requires_grad: bool = True) -> nn.Module:
    for parameter in parameters:
        parameter.requires_grad_(requires_grad)
    return nn.Module.requires_grad_(module, requires_grad)
