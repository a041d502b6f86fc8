"""Adapters of PEFT: which parameters they are, and under which names PEFT looks for them."""

from __future__ import annotations

import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from torch import nn

    from megatrain.units import UnitPlan


@dataclass(frozen=True)
class Adapter:
    """tensors: {name in PEFT's file: parameter}; config: a PeftConfig. With `refused`, why it cannot be exported."""

    tensors: dict[str, str]
    config: Any = None
    refused: str | None = None

    def config_text(self) -> str:
        """Of adapter_config.json."""
        before, self.config.inference_mode = self.config.inference_mode, True
        try:
            with tempfile.TemporaryDirectory() as directory:
                self.config.save_pretrained(directory)
                return (Path(directory) / "adapter_config.json").read_text(encoding="utf-8")
        finally:
            self.config.inference_mode = before

    def require_whole(self, plan: UnitPlan) -> None:
        """ValueError if what was trained has no place in it."""
        if self.refused is not None:
            raise ValueError(self.refused)
        held = set(self.tensors.values())
        for parameter in plan.parameters:
            if parameter.trainable and parameter.name not in held:
                raise ValueError(f"{parameter.name} is trained, but is no part of the adapter; freeze it")


def adapter_of(module: nn.Module) -> Adapter | None:
    """Of a module made by PEFT, before its blocks are taken: PEFT finds its layers by walking it. None for others."""
    configs: dict[str, Any] | None = getattr(module, "peft_config", None)
    if configs is None or not hasattr(module, "get_base_model"):
        return None
    if len(configs) != 1:
        return Adapter(
            {}, refused=f"the module has {len(configs)} adapters ({', '.join(configs)}); one can be exported"
        )
    ((name, config),) = configs.items()
    if config.is_prompt_learning:
        return Adapter(
            {}, refused=f"the adapter is {config.peft_type.value}; those that learn prompts are not exported"
        )
    return Adapter(_names_for_peft(module, name), config)


def _names_for_peft(module: nn.Module, adapter: str) -> dict[str, str]:
    """PEFT's own renaming, asked with stand-ins in place of the values."""
    from peft import get_peft_model_state_dict

    values = dict(module.named_parameters())
    tied = dict(module.named_parameters(remove_duplicate=False))
    values |= {name: buffer for name, buffer in module.state_dict(keep_vars=True).items() if name not in tied}
    tensors = {name: value for name, value in values.items() if isinstance(value, torch.Tensor)}
    stand_ins = {name: torch.empty(value.shape, device="meta") for name, value in tensors.items()}
    by_identity = {id(value): name for name, value in stand_ins.items()}
    saved = get_peft_model_state_dict(module, stand_ins, adapter_name=adapter, save_embedding_layers=False)
    return {name: by_identity[id(value)] for name, value in saved.items()}
