"""Elementwise functions between the output embedding and the loss, with their derivatives by hand.

They are recorded by `logits.py` and applied to one chunk of logits at a time by `head_rows.py`.
Forward, each runs in the dtype that torch would use on the full logits, so that a bf16 soft cap rounds as
torch's does; backward, the gradient stays in the dtype of the loss (fp32) up to the last step.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, TypeAlias

import torch
from torch import Tensor


@dataclass(frozen=True)
class Scale:
    """x * factor"""

    factor: float
    needs_output: ClassVar[bool] = False

    def apply(self, x: Tensor) -> Tensor:
        return x * self.factor

    def pull_back(self, gradient: Tensor, output: Tensor | None) -> Tensor:
        return gradient * self.factor


@dataclass(frozen=True)
class Divide:
    """x / divisor; not Scale(1 / divisor), which would round differently."""

    divisor: float
    needs_output: ClassVar[bool] = False

    def apply(self, x: Tensor) -> Tensor:
        return x / self.divisor

    def pull_back(self, gradient: Tensor, output: Tensor | None) -> Tensor:
        return gradient / self.divisor


@dataclass(frozen=True)
class Tanh:
    """tanh(x)"""

    needs_output: ClassVar[bool] = True

    def apply(self, x: Tensor) -> Tensor:
        return torch.tanh(x)

    def pull_back(self, gradient: Tensor, output: Tensor | None) -> Tensor:
        assert output is not None
        y = output.to(gradient.dtype)
        return gradient * (1 - y * y)


@dataclass(frozen=True)
class Cast:
    """x in another floating dtype"""

    dtype: torch.dtype
    needs_output: ClassVar[bool] = False

    def apply(self, x: Tensor) -> Tensor:
        return x.to(self.dtype)

    def pull_back(self, gradient: Tensor, output: Tensor | None) -> Tensor:
        return gradient


Transform: TypeAlias = Scale | Divide | Tanh | Cast


def output_dtype(dtype: torch.dtype, transforms: tuple[Transform, ...]) -> torch.dtype:
    """The dtype of logits of `dtype` after `transforms`."""
    for transform in transforms:
        if isinstance(transform, Cast):
            dtype = transform.dtype
    return dtype
