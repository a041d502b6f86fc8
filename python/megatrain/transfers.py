"""How copies and updates are scheduled."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

UpdateOrder = Literal["next-use", "landed"]
Burst = Literal["tile", "parameter"]


@dataclass(frozen=True, kw_only=True)
class Transfers:
    """The defaults are the fastest known; the others are there to measure what each is worth. None of them
    changes results.

    update_order: "next-use", the block needed first is updated first; "landed", first come, first served.
    overlap_updates: updates run while the next step begins; False waits for them at the end of each step.
    burst: a block's weights go up in one copy a "tile", or in one a "parameter"."""

    update_order: UpdateOrder = "next-use"
    overlap_updates: bool = True
    burst: Burst = "tile"

    def __post_init__(self) -> None:
        if self.update_order not in get_args(UpdateOrder):
            raise ValueError(f'update_order is "{self.update_order}"; it must be "next-use" or "landed"')
        if self.burst not in get_args(Burst):
            raise ValueError(f'burst is "{self.burst}"; it must be "tile" or "parameter"')
