"""The placements that are searched: the first `resident` blocks are resident; of all, the last `everything` keep
everything and the `selected` before them selected outputs, on the device; the `shelved` before those keep one or the
other on the host; the rest keep their inputs. Inputs of blocks that keep more on the device may wait on the host."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from megatrain.placement import BlockPlacement, Keep, Order, Placement, Residence, Side

if TYPE_CHECKING:
    from megatrain.planner.timeline import Steps

INPUTS: tuple[tuple[Side, Side], ...] = (("device", "device"), ("host", "device"), ("host", "host"))
"""Where inputs wait: of blocks that keep nothing else, of those that keep more on the device."""
OTHERS: tuple[Residence, ...] = ("none", "weights")
SHELVED: tuple[Keep, ...] = ("selected", "everything")


@dataclass(frozen=True, kw_only=True)
class Choice:
    """A member of the family."""

    order: Order = "layer-major"
    resident: int = 0
    everything: int = 0
    selected: int = 0
    shelved: int = 0
    shelved_keep: Keep = "selected"
    inputs_on: Side = "device"
    """Of blocks that keep nothing else."""
    other_inputs_on: Side = "device"
    """Of blocks that keep more on the device."""
    others: Residence = "none"
    """What stays of the blocks that are not resident: "none" or "weights"."""
    outside: tuple[str, ...] = ()
    """Units outside the stacks that are resident."""

    def placement(self, blocks: int) -> Placement:
        places = []
        for index in range(blocks):
            from_end = blocks - index
            keep: Keep = "inputs"
            side: Side = self.inputs_on
            inputs: Side | None = None
            if from_end <= self.everything + self.selected:
                keep, side = "everything" if from_end <= self.everything else "selected", "device"
                inputs = "host" if self.other_inputs_on == "host" else None
            elif from_end <= self.everything + self.selected + self.shelved:
                keep, side = self.shelved_keep, "host"
            residence: Residence = "all" if index < self.resident else self.others
            places.append(BlockPlacement(keep=keep, kept_on=side, inputs_on=inputs, resident=residence))
        outside: dict[str, Residence] = dict.fromkeys(self.outside, "all")
        return Placement(order=self.order, blocks=tuple(places), outside=outside)


def outside_choices(steps: Steps) -> list[tuple[str, ...]]:
    """None resident; those needed before the blocks; all."""
    names = [unit.name for unit in steps.shape.outside]
    early = tuple(name for index, name in enumerate(names) if not steps.used_last(index))
    return list(dict.fromkeys([(), early, tuple(names)]))


def orders(steps: Steps) -> tuple[Order, ...]:
    """With one micro-batch both are the same."""
    return ("layer-major", "micro-batch-major") if steps.job.batch.micro_batches > 1 else ("layer-major",)
