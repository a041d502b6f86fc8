"""Flattened arguments are those of pytree, opened UserDicts included."""

from __future__ import annotations

from collections import OrderedDict, UserDict, defaultdict
from typing import Any, NamedTuple

import pytest
import torch
from torch.utils import _pytree as pytree
from transformers.modeling_outputs import BaseModelOutput

from megatrain.trees import flatten, unflatten


class Pair(NamedTuple):
    first: Any
    second: Any


class Shared(UserDict):  # type: ignore[type-arg]
    pass


ONE, TWO, THREE = torch.zeros(1), torch.ones(2), torch.nn.Parameter(torch.ones(3))
TREES = {
    "a leaf": ONE,
    "nothing": (),
    "empty containers": ([], {}, (), [()]),
    "a call": ((ONE,), dict(mask=None, positions=(TWO, ONE), flag=True, scale=0.5, name="x")),
    "an order of keys": dict(b=ONE, a=[TWO, dict(c=THREE)]),
    "a named tuple": (Pair(ONE, [TWO, Pair(None, ())]), 3),
    "other mappings": [OrderedDict(b=ONE, a=(TWO,)), defaultdict(list, x=[THREE])],
    "an output": (BaseModelOutput(last_hidden_state=ONE, hidden_states=(TWO, THREE)),),
    "an object": (object(), torch.float32, torch.device("cpu"), slice(1, 2)),
}


@pytest.mark.parametrize("tree", TREES.values(), ids=TREES)
def test_leaves_are_those_of_pytree(tree: Any) -> None:
    leaves, spec = flatten(tree)
    expected, expected_spec = pytree.tree_flatten(tree)
    assert len(leaves) == len(expected)
    assert all(mine is other for mine, other in zip(leaves, expected, strict=True))
    assert pytree.tree_structure(unflatten(leaves, spec)) == expected_spec
    assert flatten(unflatten(leaves, spec))[1] == spec


def test_specs_differ_where_structures_do() -> None:
    trees = [*TREES.values(), dict(a=[TWO, dict(c=THREE)], b=ONE), [ONE], (ONE,), dict(a=ONE), dict(b=ONE), [[ONE]]]
    specs = [flatten(tree)[1] for tree in trees]
    for index, spec in enumerate(specs):
        assert all(spec != other for other in specs[:index])


def test_user_dicts_are_opened_wherever_they_are() -> None:
    inner = Shared(layer=(ONE, TWO))
    for tree in (inner, (1, inner), dict(a=[inner]), Pair(inner, None), OrderedDict(a=inner), Shared(x=inner)):
        leaves, spec = flatten(tree)
        assert any(leaf is ONE for leaf in leaves)
        assert not any(isinstance(leaf, UserDict) for leaf in leaves)
        again, spec_again = flatten(unflatten(leaves, spec))
        assert type(unflatten(leaves, spec)) is type(tree)
        assert spec_again == spec
        assert all(mine is other for mine, other in zip(again, leaves, strict=True))


def test_containers_are_put_together_anew() -> None:
    inner: list[Any] = [ONE]
    tree = dict(a=inner, b=Shared(c=inner))
    built = unflatten(*flatten(tree))
    built["a"].append(TWO)
    built["b"]["c"].append(TWO)
    built["b"]["d"] = TWO
    assert inner == [ONE]
    assert list(tree["b"]) == ["c"]
