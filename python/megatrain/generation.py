"""Generation by the module's own `generate()`, its blocks streamed: one pass over all weights a token."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch

from megatrain.takeover import evaluation_mode

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from torch import nn

    from megatrain.device_weights import DeviceWeights
    from megatrain.model import StreamedModel


def generate(model: StreamedModel, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """What `StreamedModel.generate` returns."""
    module = model.module
    own: Any = getattr(module, "generate", None)
    if own is None:
        raise ValueError(f"{type(module).__name__} has no generate()")
    with evaluation_mode(module, model._parts.blocks):
        return generate_by(model, own, args, kwargs)


def generate_by(
    model: StreamedModel, own: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """By the module's method `own`, in whatever mode the module is."""
    model._passes.refuse_inside("generate()")
    model._passes.before_forward()
    moved_args, moved_kwargs = model._parts.surroundings.arguments_to_device(args, kwargs)
    with (
        torch.no_grad(),
        model._parts.surroundings.own_arithmetic(caches=True, masked=True),
        model._parts.runner.eagerly(),
        _weights_expected(model.module, model._parts.weights, model._parts.updates.next_uses),
    ):
        try:
            return own(*moved_args, **moved_kwargs)
        except BaseException:
            model._parts.steps.recover()
            raise


@contextmanager
def _weights_expected(module: nn.Module, weights: DeviceWeights, uses: list[int]) -> Iterator[None]:
    """Each forward fetches ahead what the one before it used: with a cache, an encoder's blocks run once only."""
    of_peft: Any = getattr(module, "get_base_model", None)
    generating = module if of_peft is None else of_peft()

    def begin(*_: Any) -> None:
        weights.begin_pass(weights.uses or uses)

    weights.uses = []
    handle = generating.register_forward_pre_hook(begin)
    try:
        yield
    finally:
        handle.remove()
        weights.begin_pass(uses)
