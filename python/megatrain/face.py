"""All parameters as users see them, and what they did to them."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch

from megatrain._native import Section
from megatrain.parameters import TileParameter

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from megatrain._native import Engine
    from megatrain.tiles import Tiles
    from megatrain.units import TiledParameter


class ParameterFace:
    """`by_name`: the objects that `model.parameters()` hands out, by first name, of stable identity."""

    def __init__(
        self,
        tiles: Tiles,
        engine: Engine,
        mark_edited: Callable[[int], None],
        gradient: Callable[[TiledParameter], torch.Tensor | None],
    ) -> None:
        self._tiles = tiles
        self._engine = engine
        self._mark_edited = mark_edited
        self.by_name: dict[str, TileParameter] = {}
        for tiled in tiles.plan.parameters:

            def gradient_of(tiled: TiledParameter = tiled) -> torch.Tensor | None:
                return gradient(tiled)

            view = tiles.view(tiled, Section.weights)
            self.by_name[tiled.name] = TileParameter.make(view, tiled, engine.wait_updates, gradient_of)
        self._versions = {name: face._version for name, face in self.by_name.items()}

    def is_trainable(self, parameter: TiledParameter) -> bool:
        """It has room for a gradient, and its `requires_grad` is on now."""
        with torch._C.DisableTorchFunctionSubclass():  # asked for each parameter of each call
            wanted = self.by_name[parameter.name].requires_grad
        if wanted and not parameter.trainable:
            raise ValueError(f"{parameter.name} was frozen when the model was made and has no room for a gradient")
        return wanted

    def take_over_edits(self) -> None:
        """Weights that were edited in place since the last look become the master."""
        with torch._C.DisableTorchFunctionSubclass():
            versions = {name: face._version for name, face in self.by_name.items()}
        if versions == self._versions:
            return
        for parameter in self._tiles.plan.parameters:
            version = versions[parameter.name]
            if version != self._versions[parameter.name]:
                self._tiles.forget_low_half(parameter)
                self._mark_edited(parameter.tile)
                self._versions[parameter.name] = version

    @contextmanager
    def edit(self) -> Iterator[dict[str, torch.Tensor]]:
        """Exact fp32 copies by name, written back at the end of the `with`, unless it raised."""
        self._engine.wait_updates()
        self.take_over_edits()
        values = {parameter.name: self._tiles.master(parameter) for parameter in self._tiles.plan.parameters}
        yield values
        for parameter in self._tiles.plan.parameters:
            self._tiles.require_finite(parameter, values[parameter.name])
        self._engine.wait_updates()
        for parameter in self._tiles.plan.parameters:
            self._tiles.write(parameter, values[parameter.name])
        for unit in self._tiles.plan.units:
            self._mark_edited(unit.tile)
