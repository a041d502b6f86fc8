"""Where in a module the tensors of a directory's files belong."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch

from megatrain.export.parts import CannotTakeApart, Part, original_parts

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from torch import nn

Shape = tuple[int, ...]


@dataclass(frozen=True)
class Places:
    """of: for each tensor of the files the part of a parameter or buffer that it is, under first names; None for what
    the module has no place for. own_names: they are the module's own. whole: with them all of the module has values.
    lacking: names of the parts that are missing of parameters that others are there of."""

    of: dict[str, Part | None]
    own_names: bool
    whole: bool
    lacking: list[str]

    def renamed(self, names: Mapping[str, str]) -> Places:
        of = {key: part and replace(part, name=names[part.name]) for key, part in self.of.items()}
        return replace(self, of=of)


class Names:
    """Of a module's parameters and persistent buffers, before it is taken over."""

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self.shapes: dict[str, Shape] = {name: tuple(value.shape) for name, value in module.state_dict().items()}
        self._prefix = f"{module.base_model_prefix}." if hasattr(module, "base_model_prefix") else ""
        by_id: dict[int, list[str]] = {}
        for name, parameter in module.named_parameters(remove_duplicate=False):
            by_id.setdefault(id(parameter), []).append(name)
        self._tied = {name: group for group in by_id.values() for name in group if len(group) > 1}

    def places(self, keys: Iterable[str]) -> Places:
        """Of tensors with the module's names, or with those that transformers makes of them when it saves a model."""
        keys = list(keys)
        own = {name: Part(self.first(name)) for name in self.shapes}
        places = self._places(keys, own, True)
        if places.whole:
            return places
        first = {name: shape for name, shape in self.shapes.items() if self.first(name) == name}
        try:
            original = original_parts(self._module, first)
        except CannotTakeApart:
            return places
        return self._places(keys, {**own, **original}, False)

    def _places(self, keys: Iterable[str], parts: Mapping[str, Part], own_names: bool) -> Places:
        of = {key: next((parts[name] for name in self._spellings(key) if name in parts), None) for key in keys}
        filled = dict.fromkeys((self.first(name) for name in self.shapes), 0)
        given = {(part.name, part.first): part for part in of.values() if part is not None}
        for part in given.values():
            filled[part.name] += math.prod(self.shapes[part.name] if part.shape is None else part.shape)
        missing = {name for name, count in filled.items() if count < math.prod(self.shapes[name])}
        lacking = [
            name
            for name, part in parts.items()
            if part.name in missing and filled[part.name] and (part.name, part.first) not in given
        ]
        return Places(of, own_names, not missing, lacking)

    def _spellings(self, key: str) -> tuple[str, ...]:
        """A file may hold the base model alone, or with its name before."""
        return key, self._prefix + key, key.removeprefix(self._prefix)

    def first(self, name: str) -> str:
        """Of a tied parameter's names."""
        return self._tied.get(name, [name])[0]

    def require_fit(self, places: Places, shapes: Mapping[str, Shape], where: object) -> None:
        """ValueError for a tensor of another shape than its place."""
        for key, part in places.of.items():
            if part is not None:
                expected = self.shapes[part.name] if part.shape is None else part.shape
                if shapes[key] != expected:
                    raise ValueError(f"{key} has shape {shapes[key]} in {where} and {expected} in the model")


class Joined:
    """Collects the parts of a parameter until it is whole, then hands it on: `write` takes name and values."""

    def __init__(self, shapes: Mapping[str, Shape], write: Callable[[str, torch.Tensor], None]) -> None:
        self._shapes = shapes
        self._write = write
        self._values: dict[str, torch.Tensor] = {}
        self._filled: dict[str, dict[int, int]] = {}

    def add(self, part: Part, values: torch.Tensor) -> None:
        name, shape = part.name, self._shapes[part.name]
        if part.shape is None:
            self._write(name, values)
            return
        whole = self._values.get(name)
        if whole is None:
            whole = torch.empty(math.prod(shape), dtype=values.dtype)
        else:
            whole = whole.to(torch.promote_types(whole.dtype, values.dtype))
        whole[part.first : part.first + values.numel()] = values.reshape(-1)
        self._values[name] = whole
        filled = self._filled.setdefault(name, {})
        filled[part.first] = values.numel()
        if sum(filled.values()) == whole.numel():
            del self._values[name], self._filled[name]
            self._write(name, whole.view(shape))
