"""PEFT's switches of a module whose blocks are streamed: they look for adapters below the module, where proxies
stand. While one is turned, proxies show what is below them, and what it froze or unfroze is told to the parameters
that count."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from torch import nn

from megatrain.errors import UnsupportedModelError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from megatrain.blocks import Block
    from megatrain.parameters import TileParameter
    from megatrain.takeover import Router

_SWITCHES = ("enable_adapter_layers", "disable_adapter_layers", "set_adapter")


def refuse_adapters_of_parameters(module: nn.Module) -> None:
    """UnsupportedModelError for LoRA on bare parameters (`target_parameters`, PEFT's way for tensors of experts): PEFT
    puts sums of weights and adapters in their place at each forward, where weights are streamed to."""
    for name, inner in module.named_modules():
        if type(inner).__name__ == "ParamWrapper" and type(inner).__module__.startswith("peft."):
            raise UnsupportedModelError(
                f"{name} has a LoRA adapter on a bare parameter (target_parameters=), which is not streamed; adapt "
                "modules (target_modules=), or train the tensor itself"
            )


def reach_adapters(
    module: nn.Module, blocks: Sequence[Block], router: Router, faces: Mapping[str, TileParameter]
) -> None:
    """Make `disable_adapter()`, `set_adapter()` and `save_pretrained(state_dict=)` of a PEFT model work; nothing for
    other modules."""
    if not hasattr(module, "peft_config") or not hasattr(module, "get_base_model"):
        return
    tuner: Any = module.base_model
    for owner, names in ((module, ("get_model_status", "get_layer_status", "save_pretrained")), (tuner, _SWITCHES)):
        for name in names:
            if hasattr(type(owner), name):
                setattr(owner, name, _with_blocks_shown(getattr(owner, name), blocks, router, faces))


def _with_blocks_shown(
    switch: Callable[..., Any], blocks: Sequence[Block], router: Router, faces: Mapping[str, TileParameter]
) -> Callable[..., Any]:
    def turn(*args: Any, **kwargs: Any) -> Any:
        before = [parameter.requires_grad for _, parameter in _parameters(blocks)]
        with _shown(router):
            result = switch(*args, **kwargs)
        for (name, parameter), was in zip(_parameters(blocks), before, strict=True):
            if parameter.requires_grad != was:
                faces[name].requires_grad_(parameter.requires_grad)
        return result

    return turn


def _parameters(blocks: Sequence[Block]) -> Iterator[tuple[str, nn.Parameter]]:
    """(its name in the tiles, the one on the meta device that PEFT sees) of each parameter."""
    for block in blocks:
        inside = dict(block.skeleton.named_parameters(remove_duplicate=False))
        for name, tiled in block.parameters:
            yield tiled.name, inside[name]


@contextmanager
def _shown(router: Router) -> Iterator[None]:
    router.blocks_shown = True
    try:
        yield
    finally:
        router.blocks_shown = False
