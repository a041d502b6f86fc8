"""Logits that are not there: what the output embedding returns while a model trains.

`LazyLogits` holds the head's input and weight. It follows the reshapes, slices, casts, scales and soft caps
that models apply on the way to their loss, and `F.cross_entropy` consumes it in chunks. Anything else gets
the full logits, exact and with their graph, and `on_full` is told which operation asked for them.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from megatrain.chunked_logprobs import chunked_logprobs
from megatrain.chunked_loss import Reduction, chunked_cross_entropy
from megatrain.full_logits import FullOnDemand, lazy, version_of, without_lazy
from megatrain.host_mirror import HostMirrored, host_twin, mirror_labels, strip_mirror
from megatrain.logit_transforms import Cast, Divide, Scale, Tanh, Transform, output_dtype

__all__ = [
    "HostMirrored",
    "LazyLogits",
    "LogitsSettings",
    "WarnOnFullLogits",
    "host_twin",
    "lazy_head",
    "mirror_labels",
    "strip_mirror",
]


@dataclass(frozen=True)
class LogitsSettings:
    """on_full: called with the operation's name each time that logits are made in full.
    chunk_rows, compile: as in `chunked_cross_entropy`.
    weights_version: counts edits of the weights that torch does not see, such as copies made by DMA."""

    on_full: Callable[[str], None]
    chunk_rows: int | None = None
    compile: bool = False
    weights_version: Callable[[], int] = lambda: 0


class WarnOnFullLogits:
    """An `on_full` that warns the first time, naming the operation: one for each model."""

    def __init__(self) -> None:
        self.warned = False

    def __call__(self, operation: str) -> None:
        if not self.warned:
            self.warned = True
            warnings.warn(
                f"{operation} asked for the full logits, which are now held in memory; "
                "cross_entropy of the logits, soft-capped or scaled, is taken in chunks without them",
                stacklevel=5,
            )


class LazyLogits(FullOnDemand):
    """transforms(hidden @ weight.T + bias), of shape (..., V), computed only when it must be.

    Not a Tensor: nothing may take it for one and read memory that is not there. Functions of torch reach it
    by `__torch_function__`, methods and attributes of tensors by name.
    """

    __array_priority__ = 1000  # numpy's scalars leave products to us

    def __init__(
        self,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        settings: LogitsSettings,
        *,
        transforms: tuple[Transform, ...] = (),
        with_grad: bool | None = None,
        aliases: list[tuple[Tensor, int]] | None = None,
    ) -> None:
        self._hidden = hidden
        self._weight = weight
        self._bias = bias
        self._settings = settings
        self._transforms = transforms
        self._with_grad = torch.is_grad_enabled() if with_grad is None else with_grad
        super().__init__(aliases)

    # what is known without computing

    @property
    def shape(self) -> torch.Size:
        return torch.Size((*self._hidden.shape[:-1], self._weight.shape[0]))

    @property
    def dtype(self) -> torch.dtype:
        return output_dtype(self._weight.dtype, self._transforms)

    @property
    def device(self) -> torch.device:
        return self._hidden.device

    @property
    def ndim(self) -> int:
        return self._hidden.ndim

    @property
    def requires_grad(self) -> bool:
        parts = (self._hidden, self._weight, self._bias)
        return self._with_grad and any(x is not None and x.requires_grad for x in parts)

    @property
    def is_cuda(self) -> bool:
        return self._hidden.is_cuda

    def size(self, dim: int | None = None) -> torch.Size | int:
        return self.shape if dim is None else self.shape[dim]

    def dim(self) -> int:
        return self.ndim

    def numel(self) -> int:
        return self.shape.numel()

    def is_floating_point(self) -> bool:
        return True

    def is_contiguous(self) -> bool:
        return True

    def __len__(self) -> int:
        return self.shape[0]

    # what stays lazy

    @lazy
    def view(self, *shape: Any) -> Any:
        return self._reshaped("view", shape)

    @lazy
    def reshape(self, *shape: Any) -> Any:
        return self._reshaped("reshape", shape)

    @lazy
    def flatten(self, start_dim: int = 0, end_dim: int = -1) -> Any:
        start, end = start_dim % self.ndim, end_dim % self.ndim
        if start == end:
            return self
        if start > end or end == self.ndim - 1:
            return self._in_full("flatten", start_dim, end_dim)
        leading = math.prod(self.shape[start : end + 1])
        return self._reshaped("flatten", (*self.shape[:start], leading, *self.shape[end + 1 :]))

    def _reshaped(self, name: str, shape: tuple[Any, ...]) -> Any:
        sizes = tuple(shape[0]) if len(shape) == 1 and isinstance(shape[0], (tuple, list)) else shape
        vocabulary = self.shape[-1]
        if not sizes or not all(isinstance(n, int) for n in sizes):
            return self._in_full(name, *shape)
        if sizes[-1] == -1 and math.prod(sizes[:-1]) * vocabulary == self.numel() != 0:
            sizes = (*sizes[:-1], vocabulary)
        if sizes[-1] != vocabulary:
            return self._in_full(name, *shape)
        return self._view(self._hidden.reshape(*sizes[:-1], self._hidden.shape[-1]))

    @lazy
    def __getitem__(self, index: Any) -> Any:
        leading = _leading_index(index, self.shape)
        if leading is None:
            return self._in_full("__getitem__", index)
        hidden = self._hidden[leading]
        # An index by tensors or masks copies; integers and slices give a view.
        copied = any(not (i is None or isinstance(i, (int, slice))) for i in leading)
        return self._derived(hidden) if copied else self._view(hidden)

    def __iter__(self) -> Iterator[LazyLogits | Tensor]:
        return (self[i] for i in range(len(self)))

    @lazy
    def contiguous(self, memory_format: torch.memory_format = torch.contiguous_format) -> Any:
        return self

    @lazy
    def clone(self, *, memory_format: torch.memory_format = torch.preserve_format) -> Any:
        return self._derived(self._hidden)

    @lazy
    def to(self, *args: Any, **kwargs: Any) -> Any:
        values = [*args, *kwargs.values()]
        like = [x for x in values if isinstance(x, (Tensor, LazyLogits))]
        dtypes = [x for x in values if isinstance(x, torch.dtype)] + [x.dtype for x in like]
        places = [x for x in values if isinstance(x, (torch.device, str)) or type(x) is int]
        devices = [torch.device(x) for x in places] + [x.device for x in like]
        if any(d.type != self.device.type or d.index not in (None, self.device.index) for d in devices):
            return self._in_full("to", *args, **kwargs)
        if dtypes and dtypes[-1] != self.dtype:
            return self._cast(dtypes[-1])
        return self.clone() if kwargs.get("copy") else self

    @lazy
    def float(self) -> Any:
        return self._cast(torch.float32)

    @lazy
    def double(self) -> Any:
        return self._cast(torch.float64)

    @lazy
    def bfloat16(self) -> Any:
        return self._cast(torch.bfloat16)

    @lazy
    def half(self) -> Any:
        return self._cast(torch.float16)

    def _cast(self, dtype: torch.dtype) -> Any:
        if dtype == self.dtype:
            return self
        return self._transformed(Cast(dtype)) if dtype.is_floating_point else self._in_full("to", dtype)

    @lazy
    def tanh(self) -> Any:
        return self._transformed(Tanh())

    @lazy
    def __mul__(self, other: Any) -> Any:
        return self._transformed(Scale(other)) if _is_number(other) else self._in_full("__mul__", other)

    __rmul__ = multiply = mul = __mul__

    @lazy
    def __truediv__(self, other: Any) -> Any:
        return self._transformed(Divide(other)) if _is_number(other) else self._in_full("__truediv__", other)

    def div(self, other: Any, *, rounding_mode: str | None = None) -> Any:
        return (
            self / other
            if rounding_mode is None
            else self._in_full("div", other, rounding_mode=rounding_mode)
        )

    divide = div

    @lazy
    def __add__(self, other: Any) -> Any:
        if not self._is_bias(other):
            return self._in_full("__add__", other)
        row = other.reshape(-1)
        return self._derived(self._hidden, bias=row if self._bias is None else self._bias + row)

    __radd__ = __add__

    def _is_bias(self, other: Any) -> bool:
        """Whether `other` is a row to be added to the logits as they leave the head, as BART adds one."""
        return (
            isinstance(other, Tensor)
            and not self._transforms
            and other.ndim <= self.ndim
            and other.shape[-1:] == self.shape[-1:]
            and other.numel() == self.shape[-1]
            and other.dtype == self.dtype
            and other.device == self.device
        )

    def _transformed(self, transform: Transform) -> LazyLogits:
        return self._derived(self._hidden, transforms=(*self._transforms, transform))

    def _view(self, hidden: Tensor) -> LazyLogits:
        return self._derived(hidden, aliases=self._aliases)

    def _current_versions(self) -> tuple[int, ...]:
        parts = (self._hidden, self._weight, self._bias)
        return (self._settings.weights_version(), *(version_of(x) for x in parts if x is not None))

    def _compute(self, operation: str) -> Tensor:
        self._settings.on_full(operation)
        with torch.set_grad_enabled(self._with_grad), torch.autocast(self.device.type, enabled=False):
            logits = F.linear(self._hidden, self._weight, self._bias)
            for transform in self._transforms:
                logits = transform.apply(logits)
        return logits

    def _derived(
        self,
        hidden: Tensor,
        *,
        bias: Tensor | None = None,
        transforms: tuple[Transform, ...] | None = None,
        aliases: list[tuple[Tensor, int]] | None = None,
    ) -> LazyLogits:
        self._require_fresh()
        return LazyLogits(
            hidden,
            self._weight,
            self._bias if bias is None else bias,
            self._settings,
            transforms=self._transforms if transforms is None else transforms,
            with_grad=self._with_grad and torch.is_grad_enabled(),
            aliases=aliases,
        )

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: tuple[type, ...],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if func is F.cross_entropy:
            loss = _cross_entropy(*args, **kwargs)
            if loss is not None:
                return loss
        method = _FUNCTIONS.get(func)
        if method is not None and args and isinstance(args[0], LazyLogits) and "out" not in kwargs:
            return getattr(args[0], method)(*args[1:], **kwargs)
        args, kwargs = without_lazy((args, kwargs), getattr(func, "__name__", str(func)))
        return func(*args, **kwargs)


_FUNCTIONS: dict[Any, str] = {
    torch.tanh: "tanh",
    torch.mul: "mul",
    torch.multiply: "mul",
    torch.div: "div",
    torch.divide: "div",
    torch.true_divide: "__truediv__",
    torch.reshape: "reshape",
    torch.flatten: "flatten",
    torch.clone: "clone",
}


def _cross_entropy(
    input: Any,
    target: Any,
    weight: Tensor | None = None,
    size_average: bool | None = None,
    ignore_index: int = -100,
    reduce: bool | None = None,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> Tensor | None:
    """F.cross_entropy in chunks, in fp32 whatever the dtype of the logits; None where it is another loss."""
    if not isinstance(input, LazyLogits) or not isinstance(target, Tensor) or input._was_edited():
        return None
    if weight is not None or size_average is not None or reduce is not None or label_smoothing != 0.0:
        return None
    if reduction not in ("mean", "sum", "none") or target.dtype != torch.int64 or target.device != input.device:
        return None
    if input.ndim != 2 or target.shape != input.shape[:1]:
        return None
    input._require_fresh()
    twin = host_twin(target)
    parts = (input._hidden, input._weight, input._bias, strip_mirror(target))
    settings: dict[str, Any] = dict(
        transforms=input._transforms,
        ignore_index=ignore_index,
        kept_rows=None if twin is None else (twin != ignore_index).nonzero().squeeze(1),
        chunk_rows=input._settings.chunk_rows,
        compile=input._settings.compile,
    )
    with torch.set_grad_enabled(input._with_grad and torch.is_grad_enabled()):
        if reduction == "none":
            return -chunked_logprobs(*parts, **settings)
        return chunked_cross_entropy(*parts, reduction=cast(Reduction, reduction), **settings)


@contextmanager
def lazy_head(
    module: nn.Module,
    on_full: Callable[[str], None],
    *,
    chunk_rows: int | None = None,
    compile: bool = False,
    weights_version: Callable[[], int] = lambda: 0,
) -> Iterator[None]:
    """Within it, `module` (an nn.Linear, the output embedding) returns `LazyLogits`.

    Weight and bias are read as attributes of the module at each call. Entered once around all micro-batches
    of a step, not once by each. TypeError where the module's forward is not nn.Linear's, since another one
    would be skipped.
    """
    if type(module).forward is not nn.Linear.forward or "forward" in vars(module):
        raise TypeError(
            f"{type(module).__name__} has a forward of its own; only nn.Linear's can be made lazy"
        )
    settings = LogitsSettings(on_full, chunk_rows, compile, weights_version)

    def forward(input: Tensor) -> LazyLogits:
        weight, bias = cast(Tensor, module.weight), cast("Tensor | None", module.bias)
        if torch.is_autocast_enabled(input.device.type):
            dtype = torch.get_autocast_dtype(input.device.type)
            input, weight = input.to(dtype), weight.to(dtype)
            bias = None if bias is None else bias.to(dtype)
        if input.shape[-1:] != weight.shape[1:] or input.dtype != weight.dtype:
            raise RuntimeError(
                f"the head takes (..., {weight.shape[1]}) of {weight.dtype}, "
                f"not {tuple(input.shape)} of {input.dtype}"
            )
        return LazyLogits(input, weight, bias, settings)

    module.forward = forward
    try:
        yield
    finally:
        del module.forward


def _leading_index(index: Any, shape: torch.Size) -> tuple[Any, ...] | None:
    """`index` without its last dimension, of which it must take everything; None where it does not."""
    items = list(index) if isinstance(index, tuple) else [index]
    used = 0
    for item in items:
        if isinstance(item, (list, bool)) or (isinstance(item, Tensor) and item.ndim == 0):
            return None
        if isinstance(item, Tensor):
            used += item.ndim if item.dtype in (torch.bool, torch.uint8) else 1
        elif item is not None and item is not Ellipsis:
            used += 1
    dots = [position for position, item in enumerate(items) if item is Ellipsis]
    if len(dots) > 1 or used > len(shape):
        return None
    where = dots[0] if dots else len(items)
    items[where : where + len(dots)] = [slice(None)] * (len(shape) - used)
    last = items.pop()
    if not isinstance(last, slice) or last.indices(shape[-1]) != (0, shape[-1], 1):
        return None
    return tuple(items)


def _is_number(x: Any) -> bool:
    return isinstance(x, (int, float)) and not isinstance(x, bool)
