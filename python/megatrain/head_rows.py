"""An output embedding's rows by chunks: which there are, and each chunk's losses and gradient of its logits."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from megatrain.graph_limit import many_graphs
from megatrain.logit_transforms import Transform

# fp32 logits of one chunk. A product needs some thousand rows to run at full speed on a GPU: 2,048 at a
# vocabulary of 152,064. A CPU wants less memory and is content with a hundred.
_CUDA_CHUNK_BYTES = 1 << 30
_CPU_CHUNK_BYTES = 1 << 26
# Chunks of equal size are rounded up to this, so that the tiles of the products stay full.
_ROW_ALIGNMENT = 64


@dataclass(frozen=True)
class HeadRows:
    """The rows that an output embedding is multiplied with, some at a time, and what is made of their logits.

    rows: the kept ones on the device, None for all of them."""

    targets: Tensor
    kept: int
    rows: Tensor | None
    transforms: tuple[Transform, ...]
    chunk_rows: int
    compile: bool

    @classmethod
    def of(
        cls,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        targets: Tensor,
        *,
        transforms: tuple[Transform, ...],
        ignore_index: int,
        kept_rows: Tensor | None,
        chunk_rows: int | None,
        compile: bool,
    ) -> HeadRows:
        """Arguments and errors are those of `chunked_cross_entropy`."""
        _require_fit(hidden, weight, bias, targets)
        if kept_rows is None:
            kept_rows = (targets != ignore_index).nonzero().squeeze(1)
        else:
            _check_kept_rows(kept_rows, targets)
        if chunk_rows is None:
            chunk_rows = default_chunk_rows(weight.shape[0], hidden.device)
        elif chunk_rows < 1:
            raise ValueError(f"chunk_rows is {chunk_rows}, at least 1 is needed")
        return cls(
            targets=targets,
            kept=kept_rows.shape[0],
            rows=None if kept_rows.shape[0] == hidden.shape[0] else _to_device(kept_rows, hidden.device),
            transforms=tuple(transforms),
            chunk_rows=chunk_rows,
            compile=compile and hidden.is_cuda,
        )

    def chunks(self) -> Iterator[tuple[slice | Tensor, slice]]:
        """(index into all rows, range of the kept ones) of each chunk."""
        chunk = even_chunk(self.kept, self.chunk_rows)
        for begin in range(0, self.kept, chunk):
            span = slice(begin, min(begin + chunk, self.kept))
            yield (span if self.rows is None else self.rows[span]), span

    def losses_and_gradient(
        self, inputs: Tensor, weight: Tensor, bias: Tensor | None, rows: slice | Tensor, scale: Tensor, wanted: bool
    ) -> tuple[Tensor, Tensor | None]:
        """Of one chunk, whose logits are gone when this returns. `scale` is a factor, or one for each row."""
        logits, targets = F.linear(inputs, weight, bias), self.targets[rows]
        call = loss_and_gradient
        if self.compile and inputs.shape[0] > 1:  # the compiler would make a graph of its own for a size of 1
            call = compiled_loss_and_gradient()
            for tensor in (logits, targets, scale) if scale.ndim else (logits, targets):
                torch._dynamo.mark_dynamic(tensor, 0)
        return call(logits, targets, scale, self.transforms, wanted)


def default_chunk_rows(vocabulary: int, device: torch.device) -> int:
    """Rows of about 1 GiB of fp32 logits on CUDA, 64 MiB elsewhere, to the nearest power of two."""
    budget = _CUDA_CHUNK_BYTES if device.type == "cuda" else _CPU_CHUNK_BYTES
    rows = max(budget // (4 * max(vocabulary, 1)), 1)
    power = 1 << (rows.bit_length() - 1)
    return power if rows * rows < 2 * power * power else 2 * power


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
    compiled = torch.compile(loss_and_gradient, dynamic=False, fullgraph=True, backend=backend)
    limit = many_graphs()

    def call(*arguments: Any) -> tuple[Tensor, Tensor | None]:
        with limit:
            return compiled(*arguments)

    return call


def even_chunk(kept: int, most: int) -> int:
    """Rows a chunk: as few chunks as `most` allows, of about the same size."""
    chunks = max(-(-kept // most), 1)
    even = max(-(-kept // chunks), 1)
    return min(-(-even // _ROW_ALIGNMENT) * _ROW_ALIGNMENT, most)


def _to_device(rows: Tensor, device: torch.device) -> Tensor:
    if device.type == "cuda" and rows.device.type == "cpu":
        return rows.pin_memory().to(device, non_blocking=True)
    return rows.to(device)


def _require_fit(hidden: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor) -> None:
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
