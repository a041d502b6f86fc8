"""Which parameters weight decay leaves alone: biases and norms, by Hugging Face's convention."""

from __future__ import annotations

import re

from torch import nn

# As transformers.Trainer.get_decay_parameter_names looks for them, in lower case.
_BIASES_AND_NORMS = re.compile(r"bias|layernorm|rmsnorm|(?:^|\.)norm(?:$|\.)|_norm(?:$|\.)")


def biases_and_norms(module: nn.Module) -> frozenset[str]:
    """First names of the parameters that transformers' Trainer does not decay: those in an nn.LayerNorm, and
    those whose name has "bias", "layernorm", "rmsnorm", or a part that is or ends in "norm"."""
    norms = {
        id(parameter)
        for owner in module.modules()
        if isinstance(owner, nn.LayerNorm)
        for parameter in owner.parameters(recurse=False)
    }
    return frozenset(
        name
        for name, parameter in module.named_parameters()
        if id(parameter) in norms or _BIASES_AND_NORMS.search(name.lower())
    )
