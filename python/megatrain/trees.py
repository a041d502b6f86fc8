"""Nested arguments and results as flat lists, by pytree's rules.

Tuples, lists, dicts and what is surely a leaf are walked here, which takes a fraction of pytree's time: each call of
a block flattens its arguments several times. pytree is asked for the rest. What is inside of UserDicts is found."""

from __future__ import annotations

import copy
from collections import UserDict
from itertools import islice
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

Spec = tuple[Any, ...] | pytree.TreeSpec | None
"""How leaves are put together again; specs of equal structures are equal. None is a leaf."""
Flat = tuple[list[Any], Spec]

_LEAVES = frozenset((torch.Tensor, nn.Parameter, type(None), bool, int, float, str, torch.dtype, torch.device))


def flatten(tree: Any) -> Flat:
    leaves: list[Any] = []
    return leaves, _walk(tree, leaves)


def unflatten(leaves: Sequence[Any], spec: Spec) -> Any:
    """With containers of its own."""
    return _build(iter(leaves), spec)


def _walk(tree: Any, leaves: list[Any]) -> Spec:
    kind = type(tree)
    if kind in _LEAVES:
        leaves.append(tree)
        return None
    if kind is tuple or kind is list:
        return kind, tuple([_walk(entry, leaves) for entry in tree])
    if kind is dict:
        return kind, tuple([_walk(entry, leaves) for entry in tree.values()]), tuple(tree)
    found, spec = pytree.tree_flatten(tree)
    if any(isinstance(leaf, UserDict) for leaf in found):
        found, spec = pytree.tree_flatten(_open_mappings(tree))
    leaves += found
    return spec


def _build(leaves: Iterator[Any], spec: Spec) -> Any:
    if spec is None:
        return next(leaves)
    if isinstance(spec, pytree.TreeSpec):
        return pytree.tree_unflatten(islice(leaves, spec.num_leaves), spec)
    kind, entries, *keys = spec
    built = [_build(leaves, entry) for entry in entries]
    return dict(zip(keys[0], built, strict=True)) if kind is dict else kind(built)


class _Opened:
    """A UserDict, which pytree takes for one leaf, as a node. It is a UserDict again when the tree is put
    together."""

    def __init__(self, mapping: UserDict[Any, Any]) -> None:
        self.shell = copy.copy(mapping)
        self.shell.data = {}
        self.content = {key: _open_mappings(value) for key, value in mapping.data.items()}

    @staticmethod
    def flatten(opened: _Opened) -> tuple[list[Any], tuple[Any, ...]]:
        return list(opened.content.values()), (type(opened.shell), opened.shell, tuple(opened.content))

    @staticmethod
    def unflatten(values: Any, context: Any) -> UserDict[Any, Any]:
        _, shell, keys = context
        mapping: UserDict[Any, Any] = copy.copy(shell)
        mapping.data = dict(zip(keys, values, strict=True))
        return mapping


pytree.register_pytree_node(_Opened, _Opened.flatten, _Opened.unflatten)


def _open_mappings(tree: Any) -> Any:
    return pytree.tree_map(lambda leaf: _Opened(leaf) if isinstance(leaf, UserDict) else leaf, tree)
