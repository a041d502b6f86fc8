"""Output embedding and cross-entropy over chunks of rows: all logits are never held at once.

Gradients are taken in the forward pass, while a chunk's logits are there: three products a chunk (logits,
gradient of the hidden states, gradient of the weight) and one elementwise pass between them. Recomputing the
logits in backward would be a fourth product.
"""

from __future__ import annotations

from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor

from megatrain.head_gradients import HeadGradients
from megatrain.head_rows import HeadRows
from megatrain.logit_transforms import Transform

Reduction: TypeAlias = Literal["mean", "sum"]


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
    rows = HeadRows.of(
        hidden,
        weight,
        bias,
        targets,
        transforms=transforms,
        ignore_index=ignore_index,
        kept_rows=kept_rows,
        chunk_rows=chunk_rows,
        compile=compile,
    )
    mean = reduction == "mean"
    inputs = (hidden, weight, bias)
    if torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in inputs):
        loss: Tensor = _ChunkedCrossEntropy.apply(hidden, weight, bias, rows, mean)  # type: ignore[no-untyped-call]
        return loss
    with torch.no_grad():
        return _run(rows, mean, hidden, weight, bias, (False, False, False))[0]


class _ChunkedCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, rows: HeadRows, mean: bool
    ) -> Tensor:
        loss, *gradients = _run(rows, mean, hidden, weight, bias, ctx.needs_input_grad[:3])
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
        return (*(None if g is None else _scaled(g, factor, dtype) for g, dtype in gradients), None, None)


def _scaled(gradient: Tensor, factor: Tensor, dtype: torch.dtype) -> Tensor:
    # Scaled and rounded in one pass: on the way to bf16 no second fp32 tensor of the weight's size is made.
    # Not in place, since backward may be asked for again with retain_graph. One dimension, since a factor
    # without any would be rounded to bf16 first, and 1 / tokens with it.
    return torch.mul(gradient, factor.reshape(1), out=torch.empty_like(gradient, dtype=dtype))


def _run(
    rows: HeadRows, mean: bool, hidden: Tensor, weight: Tensor, bias: Tensor | None, wanted: tuple[bool, bool, bool]
) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor | None]:
    """Loss and the wanted gradients of hidden, weight and bias. Waits for nothing."""
    wide = torch.promote_types(hidden.dtype, torch.float32)
    scale = torch.full((), 1.0 / max(rows.kept, 1) if mean else 1.0, dtype=wide, device=hidden.device)
    losses = torch.empty(rows.kept, dtype=wide, device=hidden.device)
    gradients = HeadGradients(hidden, weight, bias, rows.rows, wanted)

    def one_chunk(chunk: slice | Tensor, span: slice) -> None:
        # A function, so that a chunk's buffers are gone before the next ones are asked for.
        inputs = hidden[chunk]
        losses[span], d_logits = rows.losses_and_gradient(inputs, weight, bias, chunk, scale, any(wanted))
        if d_logits is not None:
            gradients.add(d_logits, inputs, span)

    with torch.autocast(hidden.device.type, enabled=False):
        for chunk, span in rows.chunks():
            one_chunk(chunk, span)
        loss = losses.sum()
        if mean:
            loss = loss / rows.kept  # 0 / 0 is NaN, as in torch
    return (loss, *gradients.values())
