"""Log-probabilities of given tokens, for losses of one's own: preference, policy and distillation losses."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch.nn import functional as F

from megatrain.host_mirror import mirror_labels
from megatrain.loss import IGNORED

if TYPE_CHECKING:
    from collections.abc import Mapping

    from megatrain.model import StreamedModel


def label_logprobs(model: StreamedModel, batch: Mapping[str, Any], temperature: float) -> torch.Tensor:
    """What `StreamedModel.logprobs` returns."""
    labels = batch.get("labels")
    if not isinstance(labels, torch.Tensor) or labels.ndim != 2 or labels.is_floating_point():
        raise ValueError('logprobs needs a batch with integer "labels" of shape (rows, length)')
    if not temperature > 0:
        raise ValueError(f"temperature is {temperature}; it must be above 0")
    inputs = {name: value for name, value in batch.items() if name not in ("labels", "weight")}
    decoder_inputs: Any = getattr(model.module, "prepare_decoder_input_ids_from_labels", None)
    if decoder_inputs is not None and "decoder_input_ids" not in inputs:
        inputs["decoder_input_ids"] = decoder_inputs(labels)
    logits = _logits_of(model._passes.forward((), inputs, lazy_logits=True))
    # Virtual tokens of a prompt that is learned stand in front and have no labels.
    virtual = logits.shape[1] - labels.shape[1]
    if virtual < 0:
        raise ValueError(f"labels are {tuple(labels.shape)}, but the logits have {logits.shape[1]} positions")
    shift = 1 if model._parts.shifted else 0
    logits = logits[:, virtual : logits.shape[1] - shift]
    if temperature != 1:
        logits = logits / temperature
    rows, length, vocabulary = logits.shape
    targets = labels.to(model.device)
    if labels.device.type == "cpu":
        targets = mirror_labels(targets, labels)
    losses = F.cross_entropy(
        logits.float().reshape(-1, vocabulary),
        targets[:, shift:].reshape(-1),
        ignore_index=IGNORED,
        reduction="none",
    )
    return F.pad(losses.neg().view(rows, length), (shift, 0))


def _logits_of(output: Any) -> Any:
    logits = output if isinstance(output, torch.Tensor) else getattr(output, "logits", None)
    if logits is None:
        raise ValueError(f"the module's output, a {type(output).__name__}, holds no logits")
    return logits
