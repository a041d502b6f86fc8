"""The parameter face: what `model.parameters()` hands out."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

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
        if func not in _METADATA:
            faces = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, TileParameter)]
            if func in _HOOKS:
                raise RuntimeError("hooks on streamed parameters never run: their gradients bypass autograd")
            for face in faces:
                face._drain()
        with torch._C.DisableTorchFunctionSubclass():
            result = func(*args, **(kwargs or {}))
        if isinstance(result, torch.Tensor) and result.grad_fn is not None:
            raise RuntimeError(
                f"{getattr(func, '__name__', func)} of a streamed parameter would need its gradient, which autograd "
                "cannot bring to the tile; look at it under torch.no_grad(), penalise it by weight_decay"
            )
        return result

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

_HOOKS = {torch.Tensor.register_hook, torch.Tensor.register_post_accumulate_grad_hook}

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
