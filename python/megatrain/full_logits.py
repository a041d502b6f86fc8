"""The half of `LazyLogits` that gives up being lazy: full values on demand, for every name a tensor has.

The values are made once. Two things would make them silently wrong, and are looked for: weights that were
updated between the forward and the demand, and edits in place of values that something else computes anew.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from functools import partial, wraps
from typing import Any, TypeVar, cast

from torch import Tensor
from torch.utils._pytree import tree_map

from megatrain.errors import StaleGraphError

Method = TypeVar("Method", bound=Callable[..., Any])


def lazy(method: Method) -> Method:
    """Marks a method that computes nothing, unless the values were made and then edited in place."""

    @wraps(method)
    def run(self: FullOnDemand, *args: Any, **kwargs: Any) -> Any:
        if self._was_edited():
            return self._in_full(method.__name__, *args, **kwargs)
        return method(self, *args, **kwargs)

    return cast(Method, run)


class FullOnDemand(ABC):
    """Methods, attributes and operators of tensors, answered by the full values."""

    __array_priority__ = 1000  # numpy's scalars leave products to us

    def __init__(self, aliases: list[tuple[Tensor, int]] | None) -> None:
        self._aliases = [] if aliases is None else aliases
        """Full values, with torch's count of edits, that were made of this and of what shares its memory."""
        self._full_values: Tensor | None = None
        self._versions = self._current_versions()

    @abstractmethod
    def _compute(self, operation: str) -> Tensor:
        """The full values, with the graph they would have had if made at once."""

    @abstractmethod
    def _current_versions(self) -> tuple[int, ...]:
        """Counts of edits of all that the values are computed from."""

    def _full(self, operation: str) -> Tensor:
        if self._full_values is None:
            self._was_edited()
            self._require_fresh()
            self._full_values = self._compute(operation)
            self._aliases.append((self._full_values, version_of(self._full_values)))
        return self._full_values

    def _in_full(self, name: str, *args: Any, **kwargs: Any) -> Any:
        full = self._full(name)
        args, kwargs = without_lazy((args, kwargs), name)
        return getattr(full, name)(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_") or not hasattr(Tensor, name):
            raise AttributeError(f"{type(self).__name__} has no attribute {name!r}")
        if callable(getattr(Tensor, name)):
            return partial(self._in_full, name)  # only once it is called: libraries probe with hasattr
        return getattr(self._full(name), name)

    def _was_edited(self) -> bool:
        edited = [full for full, version in self._aliases if version_of(full) != version]
        if any(full is not self._full_values for full in edited):
            raise RuntimeError("logits were edited in place through a view; edit them before taking views")
        return bool(edited)

    def _require_fresh(self) -> None:
        if self._current_versions() != self._versions:
            raise StaleGraphError(
                "logits were asked for after the weights or the hidden states they come from had changed; "
                "read them before the update"
            )


def version_of(tensor: Tensor) -> int:
    """Torch's count of edits in place; inference tensors have none."""
    return 0 if tensor.is_inference() else tensor._version


def without_lazy(tree: Any, operation: str) -> Any:
    """`tree` with the full values in place of lazy ones."""
    return tree_map(lambda x: x._full(operation) if isinstance(x, FullOnDemand) else x, tree)


def _operator(name: str) -> Callable[..., Any]:
    def run(self: FullOnDemand, *args: Any, **kwargs: Any) -> Any:
        return self._in_full(name, *args, **kwargs)

    run.__name__ = name
    return run


# Python looks these up on the type, past __getattr__. Operators in place are left out: Python then rebinds to
# the result of the plain operator, which stays lazy where it can.
for _name in (
    "sub rsub rtruediv matmul rmatmul pow rpow floordiv rfloordiv mod neg pos abs invert and or xor "
    "eq ne lt le gt ge bool int float complex index contains setitem array repr format reduce_ex deepcopy"
).split():
    setattr(FullOnDemand, f"__{_name}__", _operator(f"__{_name}__"))
