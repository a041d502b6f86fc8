"""The parameter face: what `model.parameters()` hands out."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import nn

if TYPE_CHECKING:
    from collections.abc import Callable

    from megatrain.units import TiledParameter


class TileParameter(nn.Parameter):
    """A parameter whose memory is the weights section of a tile. Reads see all updates queued before.
    In-place edits under no_grad are taken over at the next step: the fp32 master becomes the edited
    value. Edits through `.data` are not seen."""

    _drain: Callable[[], None]
    _gradient: Callable[[], torch.Tensor | None]

    @staticmethod
    def make(
        view: torch.Tensor,
        tiled: TiledParameter,
        drain: Callable[[], None],
        gradient: Callable[[], torch.Tensor | None],
    ) -> TileParameter:
        parameter: TileParameter = torch.Tensor._make_subclass(TileParameter, view, tiled.trainable)
        parameter._drain = drain
        parameter._gradient = gradient
        return parameter

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        for argument in args:
            if isinstance(argument, TileParameter) and func not in _METADATA:
                argument._drain()
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))

    @property
    def grad(self) -> torch.Tensor | None:
        """The gradient of the last backward, in the tile: only where the model keeps gradients."""
        return self._gradient()

    @grad.setter
    def grad(self, value: torch.Tensor | None) -> None:
        if value is not None:
            raise RuntimeError("gradients of a streamed parameter come from backward(); they cannot be assigned")

    def __reduce_ex__(self, protocol: Any) -> Any:
        # Copies and pickles are plain parameters: they leave the tile.
        with torch._C.DisableTorchFunctionSubclass():
            self._drain()
            plain = nn.Parameter(self.detach().clone(), self.requires_grad)
        return plain.__reduce_ex__(protocol)  # type: ignore[no-untyped-call]

    def __deepcopy__(self, memo: dict[int, Any]) -> nn.Parameter:
        self._drain()
        with torch._C.DisableTorchFunctionSubclass():
            copy = nn.Parameter(self.detach().clone(), self.requires_grad)
        memo[id(self)] = copy
        return copy


# torch's stubs give the attributes' values; on the class they are descriptors.
_Tensor: Any = torch.Tensor

# Looking at these does not read the weights.
_METADATA = {
    _Tensor.requires_grad.__get__,
    _Tensor.shape.__get__,
    _Tensor.dtype.__get__,
    _Tensor.device.__get__,
    _Tensor.is_leaf.__get__,
    _Tensor._version.__get__,
    _Tensor.ndim.__get__,
    _Tensor.numel,
    _Tensor.size,
    _Tensor.dim,
    _Tensor.requires_grad_,
}
