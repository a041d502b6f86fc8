"""What a micro-batch's loss is and how much it weighs."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

IGNORED = -100


def shifts_labels(module: nn.Module) -> bool:
    """The module compares each position with the next one's label, as causal language models do."""
    config = getattr(module, "config", None)
    if config is None or getattr(config, "is_encoder_decoder", False):
        return False
    inner = module.get_base_model() if _is_peft(module) else module  # type: ignore[operator]
    name = type(inner).__name__
    return any(mark in name for mark in ("CausalLM", "LMHead", "ForConditionalGeneration"))


def _is_peft(module: nn.Module) -> bool:
    return hasattr(module, "peft_config") and hasattr(module, "get_base_model")


def targets_of(batch: Mapping[str, Any], shifted: bool) -> float | None:
    """Targets other than -100 in a batch (after the shift where the module shifts); None without labels.
    Labels on the device make this wait for it."""
    labels = batch.get("shift_labels")
    if labels is None:
        labels = batch.get("labels")
        if labels is None or labels.is_floating_point():
            return None
        if shifted and labels.dim() >= 1:
            labels = labels[..., 1:]
    return float((labels != IGNORED).sum())


def weight_of(batch: Mapping[str, Any], shifted: bool) -> float:
    """The weight of a micro-batch in its step: `weight` if given, else its targets, else its rows."""
    if "weight" in batch:
        weight = float(batch["weight"])
        if not (weight >= 0 and math.isfinite(weight)):
            raise ValueError(f"the weight of a batch is {weight}; it must be finite and at least 0")
        return weight
    targets = targets_of(batch, shifted)
    if targets is not None:
        return targets
    for value in batch.values():
        if isinstance(value, torch.Tensor) and value.dim() > 0:
            return float(value.shape[0])
    raise ValueError("a batch needs at least one tensor with rows")


def tokens_of(batch: Mapping[str, Any]) -> int:
    """Tokens that are not padding; rows where a batch has no token ids."""
    mask = batch.get("attention_mask")
    ids = batch.get("input_ids")
    if isinstance(ids, torch.Tensor) and isinstance(mask, torch.Tensor) and mask.shape == ids.shape:
        return int(mask.sum())
    if isinstance(ids, torch.Tensor):
        return ids.numel()
    return int(next((v.shape[0] for v in batch.values() if isinstance(v, torch.Tensor) and v.dim() > 0), 0))


def loss_in(output: Any) -> torch.Tensor:
    """The scalar loss of a module's output: itself, its `loss`, or the first of a tuple."""
    if isinstance(output, torch.Tensor):
        loss = output
    elif isinstance(output, Mapping) and "loss" in output:
        loss = output["loss"]
    elif getattr(output, "loss", None) is not None:
        loss = output.loss
    elif isinstance(output, tuple | list) and output and isinstance(output[0], torch.Tensor):
        loss = output[0]
    else:
        raise ValueError(
            f"the module's output, a {type(output).__name__}, holds no loss; give labels, or return the loss"
        )
    if not isinstance(loss, torch.Tensor) or loss.numel() != 1:
        raise ValueError(f"the module's loss has shape {tuple(loss.shape)}; step() needs a scalar")
    return loss.reshape(())
