"""The module itself as a stand-in for its streamed model: calling it is calling the streamed model, so that loops which
know only modules train it."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

from megatrain.generation import generate_by

if TYPE_CHECKING:
    from megatrain.model import StreamedModel


def call_through(streamed: StreamedModel) -> None:
    """From now on `streamed.module(...)` does what `streamed(...)` does. Whatever else replaced the module's forward
    before stays in its place, inside. The signature, which loops read, stays the same."""
    module, router = streamed.module, streamed._parts.router
    inner = module.forward
    running = False

    @functools.wraps(inner)
    def forward(*args: Any, **kwargs: Any) -> Any:
        nonlocal running
        # The streamed model's own calls: of a step, of the self-check, of itself.
        if running or router.handled_here or router.override is not None:
            return inner(*args, **kwargs)
        running = True
        try:
            return streamed._passes.forward(args, kwargs, call=inner)
        finally:
            running = False

    module.forward = forward


def generate_through(streamed: StreamedModel) -> None:
    """From now on `streamed.module.generate(...)` does what `streamed.generate(...)` does, but in the mode that the
    module is in."""
    module: Any = streamed.module
    inner = module.generate

    @functools.wraps(inner)
    def generate(*args: Any, **kwargs: Any) -> Any:
        return generate_by(streamed, inner, args, kwargs)

    module.generate = generate
