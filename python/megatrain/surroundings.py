"""What surrounds every forward: inputs on the device, no autocast, no caches, head and loss in chunks."""

from __future__ import annotations

from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from megatrain.attention import preferred_attention
from megatrain.host_shelf import is_dense
from megatrain.logits import WarnOnFullLogits, lazy_head, mirror_labels

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence


PINNED_BYTES = 16 << 20
"""Of a larger input the copy to pinned memory, which torch keeps, would cost more than the wait."""


class Surroundings:
    """Of one module. `weights_version` changes when logits taken before can no longer be differentiated."""

    def __init__(
        self, module: nn.Module, device: torch.device, compiled: bool, weights_version: Callable[[], int]
    ) -> None:
        self._device = device
        self._compiled = compiled
        self._weights_version = weights_version
        self._head = output_embeddings(module)
        self._configs = _caching_configs(module)
        self._warn_full_logits = WarnOnFullLogits()

    @contextmanager
    def around(
        self, batches: Sequence[Mapping[str, Any]], *, caches: bool = False, masked: bool
    ) -> Iterator[None]:
        """For the forwards of these batches. `caches` leaves caching to the module's configuration. masked: see
        `masks_tokens`."""
        with self.own_arithmetic(caches=caches, masked=masked):
            # Without labels somebody wants the logits themselves.
            with self.lazily() if any("labels" in batch for batch in batches) else nullcontext():
                yield

    @contextmanager
    def lazily(self) -> Iterator[None]:
        """Logits are made when something other than their loss asks for them, though no batch has labels."""
        if self._head is None:
            yield
            return
        with lazy_head(
            self._head, self._warn_full_logits, compile=self._compiled, weights_version=self._weights_version
        ):
            yield

    @contextmanager
    def own_arithmetic(self, *, caches: bool = False, masked: bool) -> Iterator[None]:
        """No autocast: bf16 weights need none, and its casts would outlive a slot. The compute device is the
        current one, which the native side makes it in any thread that calls it. masked: see `masks_tokens`."""
        used = [(config, config.use_cache) for config in self._configs if config.use_cache and not caches]
        current = torch.cuda.device(self._device) if self._device.type == "cuda" else nullcontext()
        attention = preferred_attention(self._device, masked=masked)
        with current, attention, torch.autocast(self._device.type, enabled=False):
            try:
                for config, _ in used:
                    config.use_cache = False
                yield
            finally:
                for config, value in used:
                    config.use_cache = value

    def to_device(self, batch: Mapping[str, Any]) -> dict[str, Any]:
        """The batch with its tensors, also nested ones, on the device. Labels that come from the host stay
        known there, so that ignored ones can be dropped without waiting for the device."""
        moved: dict[str, Any] = pytree.tree_map_only(torch.Tensor, self._moved, dict(batch))
        labels = batch.get("labels")
        if isinstance(labels, torch.Tensor) and labels.device.type == "cpu" and not labels.is_floating_point():
            moved["labels"] = mirror_labels(moved["labels"], labels)
        return moved

    def arguments_to_device(
        self, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The same for a call's arguments."""
        moved: tuple[Any, ...] = pytree.tree_map_only(torch.Tensor, self._moved, args)
        return moved, self.to_device(kwargs)

    def _moved(self, value: torch.Tensor) -> torch.Tensor:
        if self._device.type == "cuda" and worth_pinning(value):
            # The driver may wait for all work on the stream before it copies from memory that is not pinned.
            value = value.pin_memory()
        moved = value.to(self._device, non_blocking=True)
        # Tensors made under inference_mode cannot be saved for a backward.
        return moved.clone() if moved.is_inference() and not torch.is_inference_mode_enabled() else moved


def worth_pinning(value: torch.Tensor) -> bool:
    """It is on the host, small, and of a layout that `pin_memory` copies: an expanded tensor it refuses."""
    return value.device.type == "cpu" and is_dense(value) and value.nbytes <= PINNED_BYTES


def output_embeddings(module: nn.Module) -> nn.Linear | None:
    """The product that makes logits, where it is a plain one."""
    get = getattr(module, "get_output_embeddings", None)
    try:
        head = get() if get is not None else None
    except (AttributeError, NotImplementedError):
        return None
    if not isinstance(head, nn.Linear) or type(head).forward is not nn.Linear.forward or "forward" in vars(head):
        return None
    return head


def _caching_configs(module: nn.Module) -> list[Any]:
    """Every configuration in the module that decides about caches: encoders and decoders have their own."""
    found: dict[int, Any] = {}
    for owner in module.modules():
        config = getattr(owner, "config", None)
        for candidate in (config, getattr(config, "text_config", None)):
            if hasattr(candidate, "use_cache"):
                found[id(candidate)] = candidate
    return list(found.values())
