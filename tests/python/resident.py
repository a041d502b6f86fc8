"""The reference: plain PyTorch, the whole module resident."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn
from transformers import Trainer

from megatrain.loss import shifts_labels, weight_of
from megatrain.rng import seed_for


def trainer_groups(module: nn.Module) -> list[dict[str, Any]]:
    """Parameter groups as Hugging Face's Trainer makes them: biases and norms do not decay."""
    decayed = set(Trainer.get_decay_parameter_names(None, module))  # type: ignore[arg-type]
    named = [(name, parameter) for name, parameter in module.named_parameters() if parameter.requires_grad]
    groups: list[dict[str, Any]] = [
        dict(params=[parameter for name, parameter in named if name in decayed]),
        dict(params=[parameter for name, parameter in named if name not in decayed], weight_decay=0.0),
    ]
    return [group for group in groups if group["params"]]


class Resident:
    """A copy of a module trained with torch.optim.AdamW, micro-batches weighted as `step()` documents."""

    def __init__(
        self, module: nn.Module, *, device: str = "cpu", dtype: torch.dtype | None = None, max_grad_norm: float | None,
        seed: int = 0, **hyperparameters: Any,
    ) -> None:
        self.module = copy.deepcopy(module).to(device)
        if dtype is not None:
            for parameter in self.module.parameters():
                parameter.data = parameter.data.to(dtype)
        if getattr(self.module, "config", None) is not None:
            self.module.config.use_cache = False
        self.device = device
        self.seed = seed
        self.max_grad_norm = max_grad_norm
        self.shifted = shifts_labels(module)
        self.steps = 0
        self.optimizer = torch.optim.AdamW(trainer_groups(self.module), **hyperparameters)

    def gradients(self, batches: Sequence[Mapping[str, torch.Tensor]]) -> tuple[float, dict[str, torch.Tensor]]:
        """(loss, gradients by name) of one step's micro-batches, nothing updated."""
        self.optimizer.zero_grad()
        weights = [weight_of(batch, self.shifted) for batch in batches]
        loss_sum = 0.0
        for index, (batch, weight) in enumerate(zip(batches, weights, strict=True)):
            if weight == 0:
                continue
            torch.manual_seed(seed_for(self.seed, self.steps, index))
            moved = {key: value.to(self.device) for key, value in batch.items() if key != "weight"}
            loss = self.module(**moved).loss
            (loss * (weight / sum(weights))).backward()
            loss_sum += float(loss.detach().double()) * weight / sum(weights)
        found = {n: p.grad.clone() for n, p in self.module.named_parameters() if p.grad is not None}
        return loss_sum, found

    def step(self, batches: Sequence[Mapping[str, torch.Tensor]]) -> tuple[float, float, dict[str, torch.Tensor]]:
        """(loss, norm before clipping, gradients by name)."""
        loss, found = self.gradients(batches)
        parameters = [p for p in self.module.parameters() if p.grad is not None]
        limit = self.max_grad_norm if self.max_grad_norm is not None else float("inf")
        norm = float(torch.nn.utils.clip_grad_norm_(parameters, limit))
        self.optimizer.step()
        self.steps += 1
        return loss, norm, found


def assert_close(
    found: torch.Tensor, expected: torch.Tensor, tolerance: float, what: str, floor: float = 1e-12
) -> None:
    """Elementwise, relative to the largest element of the expected tensor, and up to `floor`."""
    assert found.shape == expected.shape, f"{what}: {tuple(found.shape)} against {tuple(expected.shape)}"
    if expected.numel() == 0:
        return
    found, expected = found.detach().double().cpu(), expected.detach().double().cpu()
    assert bool(torch.isfinite(found).all()), f"{what} is not finite"
    difference = float((found - expected).abs().max())
    largest = float(expected.abs().max())
    assert difference <= tolerance * largest + floor, f"{what}: off by {difference:.3g}, largest {largest:.3g}"
