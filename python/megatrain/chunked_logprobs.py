"""Log-probabilities of targets over chunks of rows: all logits are never held at once.

Unlike a mean of losses, each row has an upstream gradient of its own, known in backward only. So the forward keeps no
gradients, and backward makes each chunk's logits again: four products a chunk in all.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from megatrain.head_gradients import HeadGradients
from megatrain.head_rows import HeadRows
from megatrain.logit_transforms import Transform


def chunked_logprobs(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    targets: Tensor,
    *,
    transforms: tuple[Transform, ...] = (),
    ignore_index: int = -100,
    kept_rows: Tensor | None = None,
    chunk_rows: int | None = None,
    compile: bool = False,
) -> Tensor:
    """log softmax(transforms(F.linear(hidden, weight, bias)))[targets]: (N,) in fp32 (fp64 for fp64), 0 where the
    target is `ignore_index`; such rows cost no product and get a gradient of zero.

    Arguments, and errors, are those of `chunked_cross_entropy`, whose losses of single rows these are, negated.
    Backward without `create_graph`, as often as wanted.
    """
    chunked = HeadRows.of(
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
    found: Tensor = _ChunkedLogprobs.apply(hidden, weight, bias, chunked)  # type: ignore[no-untyped-call]
    return found


class _ChunkedLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, chunked: HeadRows) -> Tensor:
        ctx.save_for_backward(hidden, weight, bias)
        ctx.chunked = chunked
        wide = torch.promote_types(hidden.dtype, torch.float32)
        found = torch.zeros(hidden.shape[0], dtype=wide, device=hidden.device)
        one = torch.ones((), dtype=wide, device=hidden.device)
        with torch.autocast(hidden.device.type, enabled=False):
            for rows, _ in chunked.chunks():
                losses, _ = chunked.losses_and_gradient(hidden[rows], weight, bias, rows, one, False)
                found[rows] = -losses
        return found

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor) -> tuple[Tensor | None, ...]:
        if torch.is_grad_enabled():
            raise RuntimeError("chunked log-probabilities have no second derivative: create_graph must be False")
        hidden, weight, bias = ctx.saved_tensors
        chunked: HeadRows = ctx.chunked
        factors = upstream[0].neg().unsqueeze(1)
        gradients = HeadGradients(hidden, weight, bias, chunked.rows, ctx.needs_input_grad[:3])
        with torch.autocast(hidden.device.type, enabled=False):
            for rows, span in chunked.chunks():
                inputs = hidden[rows]
                _, d_logits = chunked.losses_and_gradient(inputs, weight, bias, rows, factors[rows], True)
                assert d_logits is not None
                gradients.add(d_logits, inputs, span)
                del d_logits  # before the next chunk's
        return (*gradients.values(), None)
