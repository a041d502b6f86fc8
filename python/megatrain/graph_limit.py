"""How many graphs the compiler may make of one function."""

from __future__ import annotations

from typing import Any

import torch

MOST_GRAPHS = 64
"""torch's default of 8 is used up by ordinary variation: types, grad mode, several models in one process."""


def many_graphs() -> Any:
    """A context for calls of a compiled function, to be entered again and again: after MOST_GRAPHS there is an error,
    not a fall to eager without a word."""
    return torch._dynamo.config.patch(recompile_limit=MOST_GRAPHS, fail_on_recompile_limit_hit=True)
