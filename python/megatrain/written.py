"""Containers among a block's arguments that the block writes into: what it writes is an output.

A block gets copies of the containers, never the module's own, so that a recompute finds them as they were. What has
changed in a copy after the call is handed over with the block's outputs and written into the module's own container
in the module's forward. Keys and values that some layers share with later ones travel so (Gemma 3n and 4)."""

from __future__ import annotations

import operator
from collections import OrderedDict, UserDict, defaultdict
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

from megatrain.errors import UnsupportedModelError
from megatrain.trees import flatten, unflatten

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from megatrain.trees import Flat

    Path = tuple[Any, ...]
    """Keys and indices from (args, kwargs) to a container."""


class Written(NamedTuple):
    """A container's change."""

    path: Path
    length: int | None
    """Of a list; what is beyond goes away."""
    removed: tuple[Any, ...]
    """Keys."""
    entries: dict[Any, Any]
    """New ones, and those that were replaced, by key or index."""


class Arguments:
    """Of one call, as they were before it."""

    def __init__(self, args: Any, kwargs: Any) -> None:
        self._leaves, self._spec = flatten((args, kwargs))
        self._opaque = [(leaf, flatten(dict(leaf))) for leaf in self._leaves if isinstance(leaf, Mapping)]

    def written(self, block_name: str, args: Any, kwargs: Any) -> tuple[Written, ...]:
        """What the call wrote into containers in its arguments. UnsupportedModelError where these are of a type
        that cannot be written from here."""
        after = flatten((args, kwargs))
        found: tuple[Written, ...] = ()
        if not _identical(after, (self._leaves, self._spec)):
            before = unflatten(self._leaves, self._spec)
            found = tuple(_changes(before, (args, kwargs), ()))
            write(block_name, found, before)
            if not _identical(after, flatten(before)):
                raise UnsupportedModelError(f"{block_name} writes into an object that it was given; {_MAY}")
        for mapping, content in self._opaque:
            if not _identical(flatten(dict(mapping)), content):
                raise UnsupportedModelError(
                    f"{block_name} writes into a {type(mapping).__name__} that it was given; {_MAY}"
                )
        return found


_MAY = "blocks must return what they compute, or write it into a dict, a list or a UserDict"


def _identical(one: Flat, other: Flat) -> bool:
    same = len(one[0]) == len(other[0]) and all(map(operator.is_, one[0], other[0]))
    return same and one[1] == other[1]


def _items(tree: Any) -> Iterator[tuple[Any, Any]] | None:
    """(key or index, entry) of a container whose entries can be found again by them."""
    if type(tree) in (dict, OrderedDict, defaultdict) or isinstance(tree, UserDict):
        items: Iterator[tuple[Any, Any]] = iter(tree.items())
        return items
    if type(tree) in (list, tuple):
        return enumerate(tree)
    return None


def _changes(before: Any, after: Any, path: Path) -> Iterator[Written]:
    items_before, items_after = _items(before), _items(after)
    if items_before is None or items_after is None:
        return
    old, new = dict(items_before), dict(items_after)
    replaced = {key: value for key, value in new.items() if key not in old or not _goes_on(old[key], value)}
    removed = tuple(key for key in old if key not in new)
    if replaced or removed:
        listed = isinstance(after, list)
        yield Written(path, len(after) if listed else None, () if listed else removed, replaced)
    for key in old:
        if key in new and key not in replaced:
            yield from _changes(old[key], new[key], (*path, key))


def _goes_on(before: Any, after: Any) -> bool:
    """It is what it was, or a container that may have changed inside."""
    if isinstance(before, tuple) and isinstance(after, tuple):
        return len(before) == len(after) and all(map(_goes_on, before, after))
    return before is after or (type(before) is type(after) and _items(before) is not None)


def write(block_name: str, written: Sequence[Written], arguments: tuple[Any, Any]) -> None:
    """Into the containers of (args, kwargs)."""
    for path, length, removed, entries in written:
        target: Any = arguments
        for key in path:
            target = target[key]
        if sum(container is target for container in _containers(arguments)) > 1:
            raise UnsupportedModelError(f"{block_name} writes into a {type(target).__name__} that it was given twice")
        if length is not None:
            del target[length:]
        for key in removed:
            del target[key]
        for key, value in entries.items():
            if length is not None and key == len(target):
                target.append(value)
            else:
                target[key] = value


def _containers(tree: Any) -> Iterator[Any]:
    items = _items(tree)
    if items is not None:
        yield tree
        for _, entry in items:
            yield from _containers(entry)
