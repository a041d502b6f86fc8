"""Output embedding and cross-entropy over chunks of rows: all logits are never held at once.

Gradients are taken in the forward pass, while a chunk's logits are there: three products a chunk (logits,
gradient of the hidden states, gradient of the weight) and one elementwise pass between them. Recomputing the
logits in backward would be a fourth product.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor
from torch.nn import functional as F

from megatrain.logit_transforms import Cast, Divide, Scale, Tanh, Transform

__all__ = ["Cast", "Divide", "Scale", "Tanh", "Transform", "chunked_cross_entropy", "default_chunk_rows"]

Reduction: TypeAlias = Literal["mean", "sum"]

# fp32 logits of one chunk. A product needs some thousand rows to run at full speed on a GPU: 2,048 at a
# vocabulary of 152,064. A CPU wants less memory and is content with a hundred.
_CUDA_CHUNK_BYTES = 1 << 30
_CPU_CHUNK_BYTES = 1 << 26
# Chunks of equal size are rounded up to this, so that the tiles of the products stay full.
_ROW_ALIGNMENT = 64


def chunked_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    targets: Tensor,
    *,
    transforms: tuple[Transform, ...] = (),
    ignore_index: int = -100,
    reduction: Reduction = "mean",
    kept_rows: Tensor | None = None,
    chunk_rows: int | None = None,
    compile: bool = False,
) -> Tensor:
    """Cross-entropy of `transforms(F.linear(hidden, weight, bias))`: a scalar in fp32 (fp64 for fp64).

    hidden (N, D), weight (V, D), bias (V,), targets (N,) int64, all on one device. Rows whose target is
    `ignore_index` are dropped before the product and get a gradient of zero. "mean" divides by the number of
    kept rows: NaN if there are none, as in torch; "sum" is then 0.

    kept_rows: ascending int64 indices on the host of the rows whose target is not `ignore_index`, from labels
    the host knows; they are moved without waiting. None: taken from `targets`, which waits for the GPU.
    chunk_rows: most rows whose logits are held at once; by default `default_chunk_rows`.
    compile: fuse the elementwise pass with torch.compile on CUDA (no effect elsewhere).

    Backward once only, without `create_graph`. Raises ValueError on shapes, dtypes or rows that do not fit.
    """
    if reduction not in ("mean", "sum"):
        raise ValueError(f"reduction is {reduction!r}, one of 'mean' and 'sum' is needed")
    require_fit(hidden, weight, bias, targets)
    if kept_rows is None:
        kept_rows = (targets != ignore_index).nonzero().squeeze(1)
    else:
        _check_kept_rows(kept_rows, targets)
    if chunk_rows is None:
        chunk_rows = default_chunk_rows(weight.shape[0], hidden.device)
    elif chunk_rows < 1:
        raise ValueError(f"chunk_rows is {chunk_rows}, at least 1 is needed")
    job = _Job(
        targets=targets,
        kept=kept_rows.shape[0],
        rows=None if kept_rows.shape[0] == hidden.shape[0] else to_device(kept_rows, hidden.device),
        transforms=tuple(transforms),
        mean=reduction == "mean",
        chunk_rows=chunk_rows,
        compile=compile and hidden.is_cuda,
    )
    inputs = (hidden, weight, bias)
    if torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in inputs):
        loss: Tensor = _ChunkedCrossEntropy.apply(hidden, weight, bias, job)  # type: ignore[no-untyped-call]
        return loss
    with torch.no_grad():
        return _run(job, hidden, weight, bias, (False, False, False))[0]


def default_chunk_rows(vocabulary: int, device: torch.device) -> int:
    """Rows of about 1 GiB of fp32 logits on CUDA, 64 MiB elsewhere, to the nearest power of two."""
    budget = _CUDA_CHUNK_BYTES if device.type == "cuda" else _CPU_CHUNK_BYTES
    rows = max(budget // (4 * max(vocabulary, 1)), 1)
    power = 1 << (rows.bit_length() - 1)
    return power if rows * rows < 2 * power * power else 2 * power


@dataclass(frozen=True)
class _Job:
    """What one loss is taken over. rows: the kept rows on the device, None for all of them."""

    targets: Tensor
    kept: int
    rows: Tensor | None
    transforms: tuple[Transform, ...]
    mean: bool
    chunk_rows: int
    compile: bool


class _ChunkedCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, job: _Job) -> Tensor:
        loss, *gradients = _run(job, hidden, weight, bias, ctx.needs_input_grad[:3])
        ctx.save_for_backward(*gradients)
        ctx.dtypes = (hidden.dtype, weight.dtype, None if bias is None else bias.dtype)
        return loss

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor) -> tuple[Tensor | None, ...]:
        if torch.is_grad_enabled():
            raise RuntimeError(
                "the chunked cross-entropy has no second derivative: create_graph must be False"
            )
        gradients = zip(ctx.saved_tensors, ctx.dtypes, strict=True)
        factor = upstream[0]
        return (*(None if g is None else _scaled(g, factor, dtype) for g, dtype in gradients), None)


def _scaled(gradient: Tensor, factor: Tensor, dtype: torch.dtype) -> Tensor:
    # Scaled and rounded in one pass: on the way to bf16 no second fp32 tensor of the weight's size is made.
    # Not in place, since backward may be asked for again with retain_graph. One dimension, since a factor
    # without any would be rounded to bf16 first, and 1 / tokens with it.
    return torch.mul(gradient, factor.reshape(1), out=torch.empty_like(gradient, dtype=dtype))


def _run(
    job: _Job, hidden: Tensor, weight: Tensor, bias: Tensor | None, wanted: tuple[bool, bool, bool]
) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor | None]:
    """Loss and the wanted gradients of hidden, weight and bias. Waits for nothing."""
    wide = torch.promote_types(hidden.dtype, torch.float32)
    scale = torch.full((), 1.0 / max(job.kept, 1) if job.mean else 1.0, dtype=wide, device=hidden.device)
    losses = torch.empty(job.kept, dtype=wide, device=hidden.device)
    gradients = ChunkedGradients(hidden, weight, bias, job.rows, wanted)
    elementwise = compiled_loss_and_gradient() if job.compile else loss_and_gradient

    def one_chunk(rows: slice | Tensor, span: slice) -> None:
        # A function, so that a chunk's buffers are gone before the next ones are asked for.
        inputs = hidden[rows]
        logits = F.linear(inputs, weight, bias)
        targets = job.targets[rows]
        call = elementwise
        if job.compile:
            if span.stop - span.start == 1:
                call = loss_and_gradient  # the compiler would make a graph of its own for a size of 1
            else:
                torch._dynamo.mark_dynamic(logits, 0)
                torch._dynamo.mark_dynamic(targets, 0)
        losses[span], d_logits = call(logits, targets, scale, job.transforms, any(wanted))
        del logits
        if d_logits is not None:
            gradients.add(d_logits, inputs, span)

    with torch.autocast(hidden.device.type, enabled=False):
        for rows, span in chunks(job.kept, job.chunk_rows, job.rows):
            one_chunk(rows, span)
        loss = losses.sum()
        if job.mean:
            loss = loss / job.kept  # 0 / 0 is NaN, as in torch
    return (loss, *gradients.values())


def loss_and_gradient(
    logits: Tensor, targets: Tensor, scale: Tensor, transforms: tuple[Transform, ...], want_gradient: bool
) -> tuple[Tensor, Tensor | None]:
    """Each row's loss, and scale times its gradient with respect to `logits`, in the dtype of `logits`.

    Compiled, it reads the chunk two or three times and writes it once, 2 bytes an element in bf16. The
    target's entry is reached by a comparison there, since a scatter would end the fusion and write the chunk
    in fp32; eager, the scatter is the cheaper one.
    """
    values = logits
    outputs: list[Tensor | None] = []
    for transform in transforms:
        values = transform.apply(values)
        outputs.append(values if transform.needs_output else None)
    values = values.to(scale.dtype)
    column = targets.unsqueeze(1)
    peak = values.amax(1, keepdim=True)
    picked = values.gather(1, column) - peak
    exponentials = (values - peak).exp_()
    del values
    total = exponentials.sum(1, keepdim=True)
    losses = (total.log() - picked).squeeze(1)
    if not want_gradient:
        return losses, None
    if torch.compiler.is_compiling():
        hit = torch.arange(logits.shape[1], device=logits.device) == column
        gradient = exponentials * (scale / total) - torch.where(hit, scale, 0.0)
    else:
        gradient = exponentials.mul_(scale / total)
        gradient.scatter_(1, column, gradient.gather(1, column) - scale)
    for transform, output in zip(reversed(transforms), reversed(outputs), strict=True):
        gradient = transform.pull_back(gradient, output)
    return losses, gradient.to(logits.dtype)


@functools.cache
def compiled_loss_and_gradient(backend: str = "inductor") -> Callable[..., tuple[Tensor, Tensor | None]]:
    """`loss_and_gradient` with one graph for training and one for evaluation, for any number of rows ≥ 2."""
    # dynamic=False keeps the vocabulary a constant; the rows are marked as dynamic by the caller.
    return torch.compile(loss_and_gradient, dynamic=False, fullgraph=True, backend=backend)


class ChunkedGradients:
    """The wanted gradients of hidden, weight and bias, summed over chunks of the kept `rows` (None for all)."""

    def __init__(
        self,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        rows: Tensor | None,
        wanted: tuple[bool, bool, bool],
    ) -> None:
        self._weight_itself = weight
        wide = torch.promote_types(hidden.dtype, torch.float32)
        self._hidden = _HiddenGradient(hidden, rows) if wanted[0] else None
        self._weight = _WeightGradient(weight, wide) if wanted[1] else None
        self._bias = torch.zeros_like(bias, dtype=wide) if wanted[2] and bias is not None else None

    def add(self, d_logits: Tensor, inputs: Tensor, span: slice) -> None:
        """Of the kept rows `span`, whose hidden states are `inputs`."""
        if self._hidden is not None:
            self._hidden.add(d_logits, self._weight_itself, span.start, span.stop)
        if self._weight is not None:
            self._weight.add(d_logits, inputs)
        if self._bias is not None:
            self._bias.add_(d_logits.sum(0, dtype=self._bias.dtype))

    def values(self) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        """Those of weight and bias in fp32 (fp64 for fp64)."""
        hidden = None if self._hidden is None else self._hidden.value
        return hidden, None if self._weight is None else self._weight.value(), self._bias


class _HiddenGradient:
    """Gradient of the hidden states; dropped rows stay zero."""

    def __init__(self, hidden: Tensor, rows: Tensor | None) -> None:
        self._rows = rows
        make = torch.empty if rows is None else torch.zeros
        self.value = make(hidden.shape, dtype=hidden.dtype, device=hidden.device)

    def add(self, d_logits: Tensor, weight: Tensor, begin: int, end: int) -> None:
        if self._rows is None:
            torch.mm(d_logits, weight, out=self.value[begin:end])
        else:
            self.value.index_copy_(0, self._rows[begin:end], torch.mm(d_logits, weight))


class _WeightGradient:
    """Gradient of the weight, summed over chunks in fp32 whatever the dtype of the products' inputs."""

    def __init__(self, weight: Tensor, dtype: torch.dtype) -> None:
        self._sum: Tensor | None = None
        self._like = weight
        self._dtype = dtype

    def add(self, d_logits: Tensor, inputs: Tensor) -> None:
        transposed = d_logits.t()
        if d_logits.dtype == self._dtype:
            if self._sum is None:
                self._sum = torch.mm(transposed, inputs)
            else:
                self._sum.addmm_(transposed, inputs)
        elif fp32_output_products(d_logits.device, d_logits.dtype):
            # The product leaves its fp32 accumulators unrounded, and adds in its own epilogue.
            if self._sum is None:
                self._sum = torch.mm(transposed, inputs, out_dtype=self._dtype)
            else:
                torch.addmm(self._sum, transposed, inputs, out_dtype=self._dtype, out=self._sum)
        elif self._sum is None:
            self._sum = torch.mm(transposed, inputs).to(self._dtype)
        else:
            self._sum.add_(torch.mm(transposed, inputs))

    def value(self) -> Tensor:
        if self._sum is None:
            return torch.zeros_like(self._like, dtype=self._dtype)
        return self._sum


@functools.cache
def fp32_output_products(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether products of `dtype` on this device can write fp32 and add to it in place.

    Found by trying once: versions of torch differ in which of the overloads take an fp32 summand, and CPUs
    have none. The one wait for the device is here.
    """
    ones = torch.ones(16, 16, dtype=dtype, device=device)
    # 257 = 1 + 256 is no bf16 number, so a result that was rounded on its way is found out.
    total = torch.full((16, 16), 241.0, device=device)
    try:
        first = torch.mm(ones, ones, out_dtype=torch.float32)
        torch.addmm(total, ones, ones, out_dtype=torch.float32, out=total)
    except (RuntimeError, TypeError):
        return False
    return bool((first == 16).all()) and bool((total == 257).all())


def chunks(kept: int, most: int, rows: Tensor | None) -> Iterator[tuple[slice | Tensor, slice]]:
    """(index into all rows, range of the kept ones) of each chunk of at most `most` rows."""
    chunk = _even_chunk(kept, most)
    for begin in range(0, kept, chunk):
        span = slice(begin, min(begin + chunk, kept))
        yield (span if rows is None else rows[span]), span


def _even_chunk(kept: int, most: int) -> int:
    """Rows a chunk: as few chunks as `most` allows, of about the same size."""
    chunks = max(-(-kept // most), 1)
    even = max(-(-kept // chunks), 1)
    return min(-(-even // _ROW_ALIGNMENT) * _ROW_ALIGNMENT, most)


def to_device(rows: Tensor, device: torch.device) -> Tensor:
    if device.type == "cuda" and rows.device.type == "cpu":
        return rows.pin_memory().to(device, non_blocking=True)
    return rows.to(device)


def require_fit(hidden: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor) -> None:
    """ValueError on shapes and dtypes that do not go together."""
    if hidden.ndim != 2 or weight.ndim != 2 or hidden.shape[1] != weight.shape[1]:
        raise ValueError(
            f"hidden {tuple(hidden.shape)} and weight {tuple(weight.shape)} are not (N, D) and (V, D)"
        )
    if targets.shape != hidden.shape[:1] or targets.dtype != torch.int64:
        raise ValueError(
            f"targets are {tuple(targets.shape)} of {targets.dtype}, "
            f"({hidden.shape[0]},) of torch.int64 are needed"
        )
    if bias is not None and bias.shape != weight.shape[:1]:
        raise ValueError(f"bias is {tuple(bias.shape)}, ({weight.shape[0]},) is needed")
    for name, x in (("weight", weight), ("bias", bias)):
        if x is not None and x.dtype != hidden.dtype:
            raise ValueError(f"{name} is {x.dtype}, hidden {hidden.dtype}")
    if not hidden.is_floating_point():
        raise ValueError(f"hidden is {hidden.dtype}, a floating dtype is needed")


def _check_kept_rows(kept_rows: Tensor, targets: Tensor) -> None:
    if kept_rows.device.type != "cpu" or kept_rows.dtype != torch.int64 or kept_rows.ndim != 1:
        raise ValueError("kept_rows must be one-dimensional int64 indices on the host")
    if kept_rows.numel() == 0:
        return
    if kept_rows[0] < 0 or kept_rows[-1] >= targets.shape[0] or bool((kept_rows.diff() <= 0).any()):
        raise ValueError(f"kept_rows must ascend and lie in [0, {targets.shape[0]})")
