"""A tensor of a file as a part of a parameter: whole, or one of the tensors that a library made a parameter of.

transformers joins the experts of a layer into one parameter when it loads a model, and takes them apart again when it
saves one. What it would write is asked of its own code, with stand-ins in place of the values."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch.overrides import TorchFunctionMode

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from torch import nn


@dataclass(frozen=True)
class Part:
    """Elements of the parameter or buffer `name` from `first` on, in their order, as a tensor of `shape`; None: all of
    it, in its own shape."""

    name: str
    first: int = 0
    shape: tuple[int, ...] | None = None

    def to_plain(self) -> str | list[Any]:
        return self.name if self.shape is None else [self.name, self.first, list(self.shape)]

    @staticmethod
    def from_plain(value: str | list[Any]) -> Part:
        return Part(value) if isinstance(value, str) else Part(value[0], value[1], tuple(value[2]))


class CannotTakeApart(ValueError):
    """What transformers would write is no part of a parameter, or not all of them are in it."""


def original_parts(module: nn.Module, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, Part]:
    """{name in the files that transformers writes: part} of parameters and buffers with these shapes. CannotTakeApart
    where it joins tensors to write them, for instance."""
    try:
        from transformers import PreTrainedModel
        from transformers.core_model_loading import revert_weight_conversion
    except ImportError:
        return {name: Part(name) for name in shapes}
    if not isinstance(module, PreTrainedModel):
        return {name: Part(name) for name in shapes}
    stand_ins = {name: torch.empty(shape, device="meta") for name, shape in shapes.items()}
    by_storage = {_storage(value): name for name, value in stand_ins.items()}
    try:
        with _nothing_copied():
            written: dict[str, torch.Tensor] = revert_weight_conversion(module, dict(stand_ins))
    except Exception as error:  # whatever its operations raise
        raise CannotTakeApart(f"transformers does not take {type(module).__name__} apart: {error}") from error
    parts: dict[str, Part] = {}
    for name, value in written.items():
        own = by_storage.get(_storage(value))
        if own is None or not value.is_contiguous():
            raise CannotTakeApart(f"transformers joins or turns tensors to write {name}")
        whole = value.shape == shapes[own]
        parts[name] = Part(own) if whole else Part(own, int(value.storage_offset()), tuple(value.shape))
    _require_all(parts, shapes)
    return parts


def _require_all(parts: Mapping[str, Part], shapes: Mapping[str, tuple[int, ...]]) -> None:
    """Each element is in one part."""
    places: dict[str, list[tuple[int, int]]] = {name: [] for name in shapes}
    for part in parts.values():
        count = math.prod(shapes[part.name] if part.shape is None else part.shape)
        places[part.name].append((part.first, part.first + count))
    for name, ranges in places.items():
        ranges.sort()
        ends = [0, *(end for _, end in ranges)]
        if [begin for begin, _ in ranges] + [math.prod(shapes[name])] != ends:
            raise CannotTakeApart(f"transformers does not write all of {name}")


def _storage(tensor: torch.Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


class _nothing_copied(TorchFunctionMode):
    """Tensors stay views of what they were taken from."""

    COPIES = (torch.clone, torch.Tensor.clone, torch.Tensor.contiguous)

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        return args[0] if func in self.COPIES else func(*args, **(kwargs or {}))
