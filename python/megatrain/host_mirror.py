"""Integer tensors on the device with a twin on the host, so that labels can be read without a GPU wait.

Models shift, pad, flatten and mask their labels before the loss sees them. A `HostMirrored` tensor repeats
each of these on its twin, so that the loss still knows on the host which targets are ignored. Where the twin
cannot follow (another device tensor takes part, or floats do), the result is a plain tensor.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

# The twin would draw other numbers than the device did.
_RANDOM = ("rand", "bernoulli", "multinomial", "random_", "geometric")
_MOVES = (Tensor.cuda, Tensor.cpu, Tensor.pin_memory)
# Answered by the twin, without a wait.
_VALUES = ("item", "tolist", "__bool__", "__int__", "__index__", "__float__")
_CANNOT = object()


@dataclass
class _Aliases:
    """Shared by tensors over one storage. version: torch's count of edits, which the twins have followed."""

    version: int


class HostMirrored(Tensor):
    """Behaves as the device tensor it shares storage with. Made by `mirror_labels` only."""

    _twin: Tensor
    _aliases: _Aliases

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if not all(issubclass(t, Tensor) for t in types):
            return NotImplemented
        with torch._C.DisableTorchFunctionSubclass():
            if getattr(func, "__name__", "") in _VALUES and host_twin(args[0]) is not None:
                return func(host_twin(args[0]), *args[1:], **kwargs)
            edited = _edited(func, args, kwargs)
            if edited is not None:
                host = _host_call(func, args, kwargs, edited)
                result = func(*args, **kwargs)
                if host is not None and host() is not _CANNOT:
                    edited._aliases.version = _version(edited)
                return result
            result = func(*args, **kwargs)
            items = tuple(result) if type(result) in (tuple, list) else (result,)
            if not any(isinstance(x, Tensor) for x in items):
                return result
            host = _host_call(func, args, kwargs, None)
            if host is None:
                return result
            twins = host()
            sources = [x for x in tree_leaves((args, kwargs)) if isinstance(x, HostMirrored)]
            if type(result) in (tuple, list) and type(twins) is type(result):
                return type(result)(_paired(x, twin, sources) for x, twin in zip(result, twins, strict=True))
            return _paired(result, twins, sources)


def mirror_labels(device_tensor: Tensor, host_tensor: Tensor) -> Tensor:
    """`device_tensor` (shared, not copied) with `host_tensor`'s values known on the host.

    The two must be equal; the caller knows, since one was copied from the other. The host tensor is copied,
    so that edits of the labels do not reach the caller's batch. Raises ValueError where shape, dtype or
    device do not fit.
    """
    if host_tensor.device.type != "cpu":
        raise ValueError(f"the host tensor is on {host_tensor.device}")
    if device_tensor.shape != host_tensor.shape or device_tensor.dtype != host_tensor.dtype:
        raise ValueError(
            f"device tensor {tuple(device_tensor.shape)} of {device_tensor.dtype} and host tensor "
            f"{tuple(host_tensor.shape)} of {host_tensor.dtype} differ"
        )
    if not _is_integral(device_tensor):
        raise ValueError(f"only integers are mirrored, not {device_tensor.dtype}")
    plain = strip_mirror(device_tensor)
    # The strides of the device tensor, so that what is a view there is a view here.
    twin = torch.empty_strided(plain.size(), plain.stride(), dtype=plain.dtype)
    return _wrap(plain, twin.copy_(strip_mirror(host_tensor)), _Aliases(_version(plain)))


def host_twin(tensor: Tensor) -> Tensor | None:
    """The values of `tensor` on the host, if they are known there. Not to be written to."""
    # An edit that the twin did not follow (by a mask known on the device only, through another alias of the
    # same memory) has moved torch's version counter.
    if isinstance(tensor, HostMirrored) and tensor._aliases.version == _version(tensor):
        return tensor._twin
    return None


def strip_mirror(tensor: Tensor) -> Tensor:
    """The same tensor without its twin."""
    if not isinstance(tensor, HostMirrored):
        return tensor
    with torch._C.DisableTorchFunctionSubclass():
        return tensor.as_subclass(Tensor)


def _wrap(plain: Tensor, twin: Tensor, aliases: _Aliases) -> HostMirrored:
    mirrored = plain.as_subclass(HostMirrored)
    mirrored._twin = twin
    mirrored._aliases = aliases
    return mirrored


def _is_integral(tensor: Tensor) -> bool:
    return not (tensor.is_floating_point() or tensor.is_complex())


def _version(tensor: Tensor) -> int:
    with torch._C.DisableTorchFunctionSubclass():
        return 0 if tensor.is_inference() else tensor._version


def _address(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _edited(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The argument that `func` writes to, if it writes to any."""
    if kwargs.get("out") is not None:
        return kwargs["out"]
    name = getattr(func, "__name__", "")
    in_place = name == "__setitem__" or (
        name.startswith("__i") and name.endswith("__") and name not in ("__invert__", "__index__", "__int__")
    )
    if in_place or name == "__set__" or (name.endswith("_") and not name.endswith("__")):
        return args[0] if args else None
    return None


def _host_call(
    func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], edited: Any
) -> Callable[[], Any] | None:
    """`func` on the twins, to be called after `func` on the device; None where they cannot follow."""
    name = getattr(func, "__name__", "")
    if name == "__set__" or name.startswith(_RANDOM) or kwargs.get("out") is not None:
        return None
    if edited is not None and not isinstance(edited, HostMirrored):
        return None  # a plain tensor on the host would be edited a second time
    for x in tree_leaves((args, kwargs)):
        if isinstance(x, Tensor):
            # Labels are integers; floats mean that work has begun which is not to be done twice.
            plain_on_host = not isinstance(x, HostMirrored) and x.device.type == "cpu"
            if not _is_integral(x) or (host_twin(x) is None and not plain_on_host):
                return None
    if func in _MOVES:
        return lambda: args[0]._twin

    def to_host(x: Any) -> Any:
        if isinstance(x, HostMirrored):
            return x._twin
        return torch.device("cpu") if isinstance(x, torch.device) else x

    host_args, host_kwargs = tree_map(to_host, (args, kwargs))
    if "device" in host_kwargs:
        host_kwargs["device"] = "cpu"
    if func is Tensor.to:
        host_args = tuple("cpu" if type(x) in (str, int) else x for x in host_args)

    def call() -> Any:
        try:
            return func(*host_args, **host_kwargs)
        except (RuntimeError, TypeError, ValueError):
            return _CANNOT  # the device's result stands; the host has no such operation

    return call


def _paired(result: Any, twin: Any, sources: list[HostMirrored]) -> Any:
    if isinstance(result, HostMirrored) or not isinstance(result, Tensor) or not isinstance(twin, Tensor):
        return result
    if not _is_integral(result) or result.shape != twin.shape or result.dtype != twin.dtype:
        return result
    if _address(twin) == _address(result):
        return result  # a view of a plain host tensor: an edit would be made twice
    for x in sources:
        if _address(twin) == _address(x._twin):
            if _address(result) == _address(x):
                return _wrap(result, twin, x._aliases)
            twin = twin.clone()  # copied on the device, by a move to another one
    return _wrap(result, twin, _Aliases(_version(result)))
