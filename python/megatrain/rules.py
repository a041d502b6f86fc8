"""The optimizers: one frozen class of settings each, checked when made."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, TypeAlias

import torch

LARGEST = float(torch.finfo(torch.float32).max)
"""The updates' arithmetic is fp32."""
SMALLEST_EPS = 1e-16
"""Of AdamW: `kLeastEps` in csrc/optim/update.h says why."""

ParameterGroups = Sequence[Mapping[str, Any]]


@dataclass(frozen=True, kw_only=True)
class _Settings:
    """What every rule's settings have."""

    rule: ClassVar[str]
    moments: ClassVar[tuple[str, ...]]
    hyperparameters: ClassVar[tuple[str, ...]]

    params: ParameterGroups | None = None
    decay_biases_and_norms: bool = False

    def __post_init__(self) -> None:
        check_hyperparameters(self.defaults)
        if self.params is not None:
            object.__setattr__(self, "params", _groups(self.params))
            for group in self.params:
                check_hyperparameters(self.defaults | {n: group[n] for n in self.hyperparameters if n in group})

    @property
    def defaults(self) -> dict[str, Any]:
        """What a group has that says nothing else."""
        return {name: getattr(self, name) for name in self.hyperparameters}


@dataclass(frozen=True, kw_only=True)
class AdamW(_Settings):
    """AdamW with decoupled weight decay, as torch.optim.AdamW (Loshchilov and Hutter, 2017).

    `params`: parameter groups as torch takes them, each a mapping with "params" (parameters of the
    module as it was before it was streamed, or their names) and any of lr, betas, eps, weight_decay;
    or parameters, which are one group.
    With None, weights are in one group and biases and norms, which do not decay, in a second one, as
    in Hugging Face's Trainer (see `megatrain.decay`).
    `decay_biases_and_norms`: one group of every trainable parameter instead, as torch.optim.AdamW makes of
    `module.parameters()`.
    `eps` is at least 1e-16: second moments below 1.2e-38 count as 0, and beside a smaller eps it would show."""

    rule: ClassVar[str] = "adamw"
    moments: ClassVar[tuple[str, ...]] = ("exp_avg", "exp_avg_sq")
    hyperparameters: ClassVar[tuple[str, ...]] = ("lr", "betas", "eps", "weight_decay")

    lr: float = 1e-3
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    weight_decay: float = 0.01


@dataclass(frozen=True, kw_only=True)
class Lion(_Settings):
    """Lion with decoupled weight decay (Chen et al., 2023, arXiv 2302.06675): every weight moves by lr, in the
    direction of the sign of an average of gradients. One moment: 4 bytes a parameter less than AdamW with
    fp32 moments. Learning rates are 3 to 10 times smaller than AdamW's, weight decay as much larger.

    `params`, `decay_biases_and_norms`: as in `AdamW`; groups have lr, betas and weight_decay."""

    rule: ClassVar[str] = "lion"
    moments: ClassVar[tuple[str, ...]] = ("exp_avg",)
    hyperparameters: ClassVar[tuple[str, ...]] = ("lr", "betas", "weight_decay")

    lr: float = 1e-4
    betas: tuple[float, float] = (0.9, 0.99)
    weight_decay: float = 0.0


Optimizer: TypeAlias = AdamW | Lion


def _groups(params: Iterable[Any]) -> tuple[dict[str, Any], ...]:
    """As torch takes them: groups, or parameters, which are one; the members of a group may be one alone."""
    entries = list(params)
    if not any(isinstance(entry, Mapping) for entry in entries):
        entries = [{"params": entries}]
    groups = []
    for number, entry in enumerate(entries):
        if not isinstance(entry, Mapping) or "params" not in entry:
            raise ValueError(f'parameter group {number} is a {type(entry).__name__}, not a mapping with "params"')
        members = entry["params"]
        groups.append({**entry, "params": [members] if isinstance(members, torch.Tensor | str) else list(members)})
    return tuple(groups)


def check_hyperparameters(group: Mapping[str, Any]) -> None:
    """ValueError with the name, the value and the limit of the first that is out of range."""
    for name in ("lr", "weight_decay"):
        if name in group and not 0 <= _number(name, group[name]) <= LARGEST:
            raise ValueError(f"{name} is {group[name]}; it must be at least 0 and at most {LARGEST:.3g}")
    if "eps" in group and not SMALLEST_EPS <= _number("eps", group["eps"]) <= LARGEST:
        raise ValueError(
            f"eps is {group['eps']}; it must be at least {SMALLEST_EPS}, beside which second moments too small for a "
            f"normal float do not count, and at most {LARGEST:.3g}"
        )
    for name in ("amsgrad", "maximize"):
        if group.get(name):
            raise ValueError(f"{name} is {group[name]}; the streamed AdamW does not have it")
    betas = group["betas"]
    if not isinstance(betas, tuple | list) or len(betas) != 2:
        raise ValueError(f"betas is {betas!r}; it must be a pair of numbers")
    for index, beta in enumerate(betas):
        if not 0 <= _number(f"betas[{index}]", beta) < 1:
            raise ValueError(f"betas[{index}] is {beta}; it must be at least 0 and below 1")


def _number(name: str, value: Any) -> float:
    """A tensor of one element is one."""
    if isinstance(value, str | bool) or (isinstance(value, torch.Tensor) and value.numel() != 1):
        raise ValueError(f"{name} is {value!r}; it must be a number")
    try:
        return float(value)
    except (TypeError, ValueError, OverflowError, RuntimeError):
        raise ValueError(f"{name} is {value!r}; it must be a number") from None
