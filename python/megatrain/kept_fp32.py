"""Which parameters stay fp32 where weights are streamed in bf16: what transformers keeps so, routers above all."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import nn


def kept_in_fp32(module: nn.Module) -> set[int]:
    """Ids of the parameters that a model's class names in `_keep_in_fp32_modules_strict`, as parts of their names. The
    list without "strict" is for fp16."""
    kept: set[int] = set()
    for owner in module.modules():
        named = getattr(owner, "_keep_in_fp32_modules_strict", None)
        if not named:
            continue
        pattern = re.compile("|".join(f"(?:{part.replace('*', '.*')})" for part in named))
        kept.update(id(parameter) for name, parameter in owner.named_parameters() if pattern.search(name))
    return kept
