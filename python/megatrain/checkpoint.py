"""Weights in and out of the tiles under the module's own names."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import nn

from megatrain._native import Section

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from megatrain.blocks import Block
    from megatrain.tiles import Tiles


def persistent_buffers(module: nn.Module, blocks: Sequence[Block]) -> Iterator[tuple[str, nn.Module, str]]:
    """(full name, owner, name in the owner) of every buffer that belongs into a checkpoint."""
    roots = [("", module), *((block.name, block.skeleton) for block in blocks)]
    for prefix, root in roots:
        for path, owner in root.named_modules():
            for name, buffer in owner._buffers.items():
                if buffer is not None and name not in owner._non_persistent_buffers_set:
                    yield ".".join(filter(None, (prefix, path, name))), owner, name


def state_dict(
    module: nn.Module, tiles: Tiles, blocks: Sequence[Block], dtype: torch.dtype | None
) -> dict[str, torch.Tensor]:
    """Every name of every parameter (ties share one tensor), then the persistent buffers."""
    state: dict[str, torch.Tensor] = {}
    made: dict[object, torch.Tensor] = {}
    for name, parameter in tiles.plan.names.items():
        if parameter not in made:
            weights = tiles.view(parameter, Section.weights)
            if dtype is not None and not parameter.stays_fp32:
                made[parameter] = weights.to(dtype)
            else:
                made[parameter] = tiles.master(parameter) if parameter.trainable else weights
        state[name] = made[parameter]
    for name, owner, inner in persistent_buffers(module, blocks):
        buffer = owner._buffers[inner]
        assert buffer is not None
        state[name] = buffer.detach().cpu()
    return state


def load_state_dict(
    module: nn.Module,
    tiles: Tiles,
    blocks: Sequence[Block],
    state: Mapping[str, torch.Tensor],
    strict: bool,
    device: torch.device,
) -> set[str]:
    """Write what `state` holds; returns the first names of the parameters written. Checks all names and
    shapes before anything is written."""
    names = tiles.plan.names
    buffers = {name: (owner, inner) for name, owner, inner in persistent_buffers(module, blocks)}
    unknown = [name for name in state if name not in names and name not in buffers]
    given = {names[name] for name in state if name in names}
    missing = [parameter.name for parameter in tiles.plan.parameters if parameter not in given]
    missing += [name for name in buffers if name not in state]
    problems = []
    if strict and missing:
        problems.append(f"{len(missing)} are missing, the first {missing[0]}")
    if strict and unknown:
        problems.append(f"{len(unknown)} are unknown, the first {unknown[0]}")
    for name, value in state.items():
        if name in names:
            expected = names[name].shape
        elif name in buffers:
            owner, inner = buffers[name]
            expected = owner._buffers[inner].shape  # type: ignore[union-attr]
        else:
            continue
        if name in names and (not value.is_floating_point() or value.element_size() < 2):
            problems.append(f"{name} is {value.dtype}; quantised weights are not trained")
        if value.shape != expected:
            problems.append(f"{name} has shape {tuple(value.shape)} in the state and {tuple(expected)} in the model")
    if problems:
        raise ValueError("the state does not fit the model: " + "; ".join(problems))
    for name, value in state.items():
        if name in names:
            tiles.require_finite(names[name], value)
    written = set()
    for name, value in state.items():
        if name in names and names[name].name not in written:
            tiles.write(names[name], value)
            written.add(names[name].name)
        elif name in buffers:
            owner, inner = buffers[name]
            before = owner._buffers[inner]
            assert before is not None
            owner._buffers[inner] = value.to(device, before.dtype, copy=True)
    return written
