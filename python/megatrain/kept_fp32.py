"""Which parameters stay fp32 where weights are streamed in bf16: what transformers keeps so, routers above all."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import nn

_WRAPPED = re.compile(r"\.(original_module|base_layer|modules_to_save\.[^.]+)(?=\.)")
"""What PEFT puts between a module's name and its parameters'."""

def kept_in_fp32(module: nn.Module) -> set[int]:
    """Ids of the parameters that a model's class names in `_keep_in_fp32_modules_strict`, as parts of their names. The
    list without "strict" is for fp16."""
    kept: set[int] = set()
    for owner in module.modules():
        named = getattr(owner, "_keep_in_fp32_modules_strict", None)
        if not named:
            continue
        pattern = re.compile("|".join(f"(?:{part.replace('*', '.*')})" for part in named))
        kept.update(id(p) for name, p in owner.named_parameters() if pattern.search(_WRAPPED.sub("", name)))
    return kept
