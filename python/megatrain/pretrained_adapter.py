"""A new LoRA adapter around a module that has no weights yet."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import nn


def add_adapter(module: nn.Module, config: Any) -> tuple[nn.Module, dict[str, str]]:
    """(the module as PEFT wraps it, {name before: name after} of every parameter and buffer). config: a LoraConfig.
    ValueError for what cannot be initialised without the weights, and for targets that are not there."""
    from peft import LoraConfig, get_peft_model
    from peft.tuners.lora import LoraLayer

    if not isinstance(config, LoraConfig) or config.use_dora or config.init_lora_weights is not True:
        raise ValueError(
            "adapter: a LoraConfig without use_dora and with init_lora_weights=True is needed; other adapters are "
            "initialised from the weights: wrap the loaded module, and give it to StreamedModel"
        )
    before = _by_identity(module)
    wrapped: nn.Module = get_peft_model(module, config)
    for layer in wrapped.modules():
        if not isinstance(layer, LoraLayer):
            continue
        for name in layer.active_adapters:
            # PEFT puts them where the weights are: on the meta device.
            for part in (layer.lora_A, layer.lora_B):
                if name in part:
                    part[name].to_empty(device="cpu")
            layer.reset_lora_parameters(name, True)  # type: ignore[no-untyped-call]
    after = _by_identity(wrapped)
    return wrapped, {name: after[identity] for identity, name in before.items() if identity in after}


def _by_identity(module: nn.Module) -> dict[int, str]:
    return {id(tensor): name for name, tensor in [*module.named_parameters(), *module.named_buffers()]}
