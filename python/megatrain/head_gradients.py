"""Gradients of an output embedding and its inputs, summed over chunks of rows."""

from __future__ import annotations

import functools

import torch
from torch import Tensor


class HeadGradients:
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
