"""What forward hooks on sub-modules of a block see leaves the block, too.

While a block runs, its sub-modules' own forward hooks wait: a relay in their place notes what each of them would
have been called with. These tensors are outputs of the block like those that it returns, and the hooks are called
with them in the module's own forward. So what a hook keeps, or computes a loss of, has its gradient (router logits
of mixtures of experts, attention weights), and a hook sees each call once, also where the block is recomputed."""

from __future__ import annotations

from collections import OrderedDict
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch.utils import _pytree as pytree

from megatrain.errors import UnsupportedModelError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from torch import nn


class Observation(NamedTuple):
    """One call of a sub-module that has forward hooks."""

    module: nn.Module
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    output: Any


class HookRelays:
    """Of one block: take the places of its sub-modules' forward hooks while it runs."""

    def __init__(self, block: nn.Module) -> None:
        self._block = block
        self._seen: list[tuple[int, tuple[Any, ...], dict[str, Any], Any]] = []
        # The same objects at each call: compiled graphs are found by them.
        self._relays: dict[nn.Module, tuple[int, OrderedDict[int, Any], OrderedDict[int, bool]]] = {}

    def hooked(self, modules: Sequence[nn.Module]) -> tuple[nn.Module, ...]:
        """Those of the block's modules that have forward hooks now. The block's own are with its proxy."""
        return tuple([module for module in modules if module._forward_hooks and module is not self._block])

    @contextmanager
    def instead_of_hooks(self, modules: Sequence[nn.Module]) -> Iterator[Callable[[], tuple[Observation, ...]]]:
        """For one call of the block; gives what was seen, to be asked for once, inside of the `with`."""
        if not modules:
            yield tuple
            return
        before = [(module, module._forward_hooks, module._forward_hooks_with_kwargs) for module in modules]
        for module in modules:
            _, module._forward_hooks, module._forward_hooks_with_kwargs = self._relay(module)
        self._seen.clear()
        try:
            yield self._take
        finally:
            self._seen.clear()
            for module, hooks, with_kwargs in before:
                module._forward_hooks, module._forward_hooks_with_kwargs = hooks, with_kwargs

    def _relay(self, module: nn.Module) -> tuple[int, OrderedDict[int, Any], OrderedDict[int, bool]]:
        if module not in self._relays:
            number, seen = len(self._relays), self._seen

            def relay(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
                seen.append((number, args, kwargs, output))

            self._relays[module] = (number, OrderedDict({0: relay}), OrderedDict({0: True}))
        return self._relays[module]

    def _take(self) -> tuple[Observation, ...]:
        modules = list(self._relays)
        return tuple(Observation(modules[number], *call) for number, *call in self._seen)


def call_hooks(block_name: str, block: nn.Module, observations: Sequence[Observation]) -> None:
    """In the module's own forward. UnsupportedModelError for hooks that change what the block computes: it has
    been computed."""
    for module, args, kwargs, output in observations:
        tensors = [leaf for leaf in pytree.tree_leaves((args, kwargs, output)) if isinstance(leaf, torch.Tensor)]
        versions = [tensor._version for tensor in tensors]
        for number, hook in list(module._forward_hooks.items()):
            if number in module._forward_hooks_with_kwargs:
                answer = hook(module, args, kwargs, output)
            else:
                answer = hook(module, args, output)
            if answer is not None or versions != [tensor._version for tensor in tensors]:
                name = next(name for name, inner in block.named_modules() if inner is module)
                raise UnsupportedModelError(
                    f"the forward hook {getattr(hook, '__qualname__', hook)} on {block_name}.{name} changes what the "
                    "module computes; hooks inside of blocks may look at tensors, keep them, and take losses of them"
                )
