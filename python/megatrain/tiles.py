"""The module's parameters moved into tiles, and every way to look at them from the host."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from megatrain._native import Section
from megatrain.interop import parameter_tensor

if TYPE_CHECKING:
    from megatrain._native import TileStore
    from megatrain.units import TiledParameter, UnitPlan

_CHECKED_ELEMENTS = 1 << 20
LARGEST_IN_BF16 = float.fromhex("0x1.fefffep+127")
"""The largest fp32 number that is not rounded to infinity."""


class Tiles:
    """Owns the store's torch views. Tile numbers are those of the plan."""

    def __init__(self, store: TileStore, plan: UnitPlan) -> None:
        self.store = store
        self.plan = plan
        self._views: dict[tuple[TiledParameter, int], torch.Tensor] = {}
        for parameter in plan.parameters:
            if parameter.original.device.type != "meta":
                self.require_finite(parameter, parameter.original.detach())
        for unit in plan.units:
            tile = store.add(unit.layout)
            assert tile == unit.tile
            for parameter in unit.parameters:
                if parameter.original.device.type != "meta":
                    self.write(parameter, parameter.original.detach())
                # Frees the module's own storage now, so that loading never holds two copies of a block.
                if parameter.original.device.type == "cpu":
                    parameter.original.data = self.view(parameter, Section.weights)
                elif parameter.original.device.type != "meta":
                    parameter.original.data = parameter.original.data.new_empty(0)

    def view(self, parameter: TiledParameter, section: Section) -> torch.Tensor:
        """The parameter's part of a section, in its shape; shares the tile's memory."""
        key = (parameter, section.value)
        if key not in self._views:
            flat = parameter_tensor(self.store, parameter.tile, parameter.index, section, parameter.numel)
            self._views[key] = flat.view(parameter.shape)
        return self._views[key]

    def write(self, parameter: TiledParameter, values: torch.Tensor) -> None:
        """Set weights and master. Raises for values that are not finite, naming the parameter."""
        if values.shape != parameter.shape:
            raise ValueError(
                f"{parameter.name} has shape {tuple(parameter.shape)}, but was given {tuple(values.shape)}"
            )
        finite = self.store.set_master(parameter.tile, parameter.index, _host_floats(values))
        if not finite:
            raise ValueError(f"{parameter.name} holds values that are not finite in the type of its weights")

    def require_finite(self, parameter: TiledParameter, values: torch.Tensor) -> None:
        """For callers that write several parameters or none."""
        in_bf16 = self.plan.units[parameter.tile].layout.format.weights != "fp32"
        # Narrower values fit, if they are finite.
        rounded = in_bf16 and values.dtype in (torch.float32, torch.float64)
        for piece in torch.split(values.reshape(-1), _CHECKED_ELEMENTS):  # the check needs memory of its own
            finite = piece.abs() <= LARGEST_IN_BF16 if rounded else torch.isfinite(piece)
            if not bool(finite.all()):
                limit = f" in bf16, which ends at {LARGEST_IN_BF16:.6g}" if rounded else ""
                raise ValueError(f"{parameter.name} holds values that are not finite{limit}")

    def master(self, parameter: TiledParameter) -> torch.Tensor:
        """The exact fp32 values, a new tensor. Frozen parameters have only what is streamed."""
        values = torch.empty(parameter.shape, dtype=torch.float32)
        self.store.get_master(parameter.tile, parameter.index, values.view(-1).numpy())
        return values

    def forget_low_half(self, parameter: TiledParameter) -> None:
        """The weights were edited in place: they are the master now."""
        if parameter.trainable and self.store.layout(parameter.tile).format.weights == "bf16_split":
            self.view(parameter, Section.master_low).zero_()

    def moments(self, parameter: TiledParameter, section: Section) -> torch.Tensor:
        """Exact values of section exp_avg or exp_avg_sq: a view of the tile, or a new fp32 tensor where the
        tile holds 8-bit codes."""
        if self.store.layout(parameter.tile).format.moments != "int8":
            return self.view(parameter, section)
        values = torch.empty(parameter.shape, dtype=torch.float32)
        self.store.get_moments(parameter.tile, parameter.index, section, values.view(-1).numpy())
        return values

    def write_moments(self, parameter: TiledParameter, section: Section, values: torch.Tensor) -> None:
        """Rounded to the nearest that the tile holds; what `moments` gave comes back unchanged."""
        self.store.set_moments(parameter.tile, parameter.index, section, _host_floats(values))


def _host_floats(values: torch.Tensor) -> object:
    return values.detach().to("cpu", torch.float32).contiguous().view(-1).numpy()
