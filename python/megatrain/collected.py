"""Outputs that transformers collects by hooks: those of modules inside of blocks leave without a graph.

A module of transformers names in `_can_record_outputs` whose outputs it gathers when `output_<name>` is
asked for (router logits for the auxiliary loss, attention weights). What blocks return themselves is
exact; the rest is refused here, since its loss would be right and its gradient missing."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from megatrain.blocks import Block, BlockProxy
from megatrain.errors import UnsupportedModelError

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from torch import nn


class CollectedInside:
    """What a module would collect from inside of its blocks, if asked to."""

    def __init__(self, module: nn.Module) -> None:
        self._asked_by: dict[tuple[str, int], tuple[str, Any, str]] = {}
        for owner in module.modules():
            if isinstance(owner, BlockProxy):
                continue
            recorders = getattr(owner, "_can_record_outputs", None) or {}
            for name, places in recorders.items():
                inner = next(_collected(owner, places if isinstance(places, list) else [places]), None)
                if inner is not None:
                    config = getattr(owner, "config", None)
                    self._asked_by.setdefault((name, id(config)), (f"output_{name}", config, inner))

    def refuse(self, arguments: Mapping[str, Any]) -> None:
        """UnsupportedModelError if these arguments, or the configuration, ask for some of it."""
        for flag, config, inner in self._asked_by.values():
            if arguments.get(flag, getattr(config, flag, False)):
                raise UnsupportedModelError(
                    f"{flag} collects what {inner} computes by hooks, past what the block returns, and its gradient "
                    f"would be lost; set {flag}=False"
                )


def _collected(owner: nn.Module, places: list[Any]) -> Iterator[str]:
    """Names of modules inside of blocks that one of these places means: a class, the end of a name, or a
    recorder with either."""
    for proxy in owner.modules():
        if not isinstance(proxy, BlockProxy):
            continue
        block: Block = proxy.__dict__["_block"]
        for key, inner in block.skeleton.named_modules():
            for place in places:
                wanted = place if isinstance(place, type) else getattr(place, "target_class", None)
                suffix = place if isinstance(place, str) else getattr(place, "class_name", None)
                name = f"{block.name}.{key}"
                meant = (wanted and isinstance(inner, wanted)) or (suffix and name.endswith(suffix))
                if key and meant:
                    yield name
