"""Finding the stacks of blocks of a module.

A stack is a top-most ModuleList (not inside another) of at least two entries whose entries are called.
Without a batch to run, the structure alone decides, and the first use checks it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence


@dataclass(frozen=True)
class Stack:
    """A container of blocks and the name it has in the module."""

    name: str
    container: nn.Module

    def entries(self) -> Iterator[tuple[str, nn.Module]]:
        """(full name, block) in order."""
        for key, block in self.container.named_children():
            yield f"{self.name}.{key}", block


def candidates(module: nn.Module) -> list[Stack]:
    """Every top-most ModuleList with at least two entries, in registration order."""
    found: list[Stack] = []

    def visit(parent: nn.Module, prefix: str) -> None:
        for key, child in parent.named_children():
            name = f"{prefix}{key}"
            # A list of lists is not called itself: its entries are the stacks.
            nested = any(isinstance(entry, nn.ModuleList | nn.ModuleDict) for entry in child.children())
            if isinstance(child, nn.ModuleList) and len(child) >= 2 and not nested:
                found.append(Stack(name, child))
            else:
                visit(child, f"{name}.")

    visit(module, "")
    return found


def named(module: nn.Module, names: Sequence[str]) -> list[Stack]:
    """The containers that `blocks=` names."""
    stacks = []
    for name in names:
        try:
            container = module.get_submodule(name)
        except AttributeError as error:
            known = ", ".join(stack.name for stack in candidates(module)) or "none"
            raise ValueError(f'blocks names "{name}", which the module does not have; its lists: {known}') from error
        if not list(container.children()):
            raise ValueError(f'blocks names "{name}", a {type(container).__name__} without entries')
        stacks.append(Stack(name, container))
    return stacks


def called(module: nn.Module, stacks: Sequence[Stack], run: Callable[[], Any]) -> list[Stack]:
    """Those of `stacks` with an entry that is called while `run` runs, in order of the first call."""
    order: dict[str, None] = {}
    handles = []
    for stack in stacks:
        for _, block in stack.entries():

            def note(*_: Any, name: str = stack.name) -> None:
                order.setdefault(name)

            handles.append(block.register_forward_pre_hook(note))
    try:
        with torch.no_grad():
            run()
    finally:
        for handle in handles:
            handle.remove()
    by_name = {stack.name: stack for stack in stacks}
    return [by_name[name] for name in order]
