"""Log-probabilities of targets over chunks of rows: all logits are never held at once.

Unlike a mean of losses, each row has an upstream gradient of its own, known in backward only. So the forward keeps no
gradients, and backward makes each chunk's logits again: four products a chunk in all.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from megatrain.chunked_loss import (
    ChunkedGradients,
    Transform,
    chunks,
    compiled_loss_and_gradient,
    default_chunk_rows,
    loss_and_gradient,
    require_fit,
    to_device,
)


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
    require_fit(hidden, weight, bias, targets)
    if kept_rows is None:
        kept_rows = (targets != ignore_index).nonzero().squeeze(1)
    job = _Job(
        targets=targets,
        kept=kept_rows.shape[0],
        rows=None if kept_rows.shape[0] == hidden.shape[0] else to_device(kept_rows, hidden.device),
        transforms=tuple(transforms),
        chunk_rows=chunk_rows or default_chunk_rows(weight.shape[0], hidden.device),
        compile=compile and hidden.is_cuda,
    )
    found: Tensor = _ChunkedLogprobs.apply(hidden, weight, bias, job)  # type: ignore[no-untyped-call]
    return found


@dataclass(frozen=True)
class _Job:
    """rows: the kept ones on the device, None for all."""

    targets: Tensor
    kept: int
    rows: Tensor | None
    transforms: tuple[Transform, ...]
    chunk_rows: int
    compile: bool

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


class _ChunkedLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, job: _Job) -> Tensor:
        ctx.save_for_backward(hidden, weight, bias)
        ctx.job = job
        wide = torch.promote_types(hidden.dtype, torch.float32)
        found = torch.zeros(hidden.shape[0], dtype=wide, device=hidden.device)
        one = torch.ones((), dtype=wide, device=hidden.device)
        with torch.autocast(hidden.device.type, enabled=False):
            for rows, _ in chunks(job.kept, job.chunk_rows, job.rows):
                losses, _ = job.losses_and_gradient(hidden[rows], weight, bias, rows, one, False)
                found[rows] = -losses
        return found

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor) -> tuple[Tensor | None, ...]:
        if torch.is_grad_enabled():
            raise RuntimeError("chunked log-probabilities have no second derivative: create_graph must be False")
        hidden, weight, bias = ctx.saved_tensors
        job: _Job = ctx.job
        factors = upstream[0].neg().unsqueeze(1)
        gradients = ChunkedGradients(hidden, weight, bias, job.rows, ctx.needs_input_grad[:3])
        with torch.autocast(hidden.device.type, enabled=False):
            for rows, span in chunks(job.kept, job.chunk_rows, job.rows):
                inputs = hidden[rows]
                _, d_logits = job.losses_and_gradient(inputs, weight, bias, rows, factors[rows], True)
                assert d_logits is not None
                gradients.add(d_logits, inputs, span)
                del d_logits  # before the next chunk's
        return (*gradients.values(), None)
