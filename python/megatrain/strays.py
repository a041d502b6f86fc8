"""Tensors that leave a block in a way that is not followed, as an attribute for instance.

The graph behind them is that of the block's forward, whose ends are not the parameters themselves: a gradient would
be lost there without a word. It is refused instead."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch.autograd.graph import saved_tensors_hooks

from megatrain.errors import UnsupportedModelError

if TYPE_CHECKING:
    import torch


def stray(block: str) -> UnsupportedModelError:
    return UnsupportedModelError(
        f"a gradient was asked of a tensor that left {block} other than by its return value, forward hooks or "
        "containers that it was given (as an attribute, for instance)"
    )


def nothing_saved(block: str) -> saved_tensors_hooks:
    """For the forward of a block whose graph will not be used."""

    def refuse(packed: None) -> torch.Tensor:
        raise stray(block)

    return saved_tensors_hooks(lambda tensor: None, refuse)
