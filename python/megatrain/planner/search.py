"""The fastest placement of the family that fits: bounded from below in closed form, then timed from the most
promising on until no bound is left below the best time."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from megatrain.planner.bounds import Table, tables
from megatrain.planner.family import INPUTS, OTHERS, SHELVED, Choice, orders, outside_choices
from megatrain.planner.memory import memory, usable_device, usable_host

if TYPE_CHECKING:
    from megatrain.placement import Placement
    from megatrain.planner.timeline import Steps, Timeline

MOST_TIMED = 2000
ENOUGH = 1e-4
"""Of the best time: what is nearer to it is not looked for."""
AT_REST = 0.02
"""Of the best time, which a placement with all state on the device may take longer and is still preferred: nothing of
it waits for the link or for cores of the host, which Python and the user's own work need, too."""


@dataclass(frozen=True)
class Timed:
    choice: Choice
    placement: Placement
    timeline: Timeline


def search(steps: Steps, device_memory: int, host_memory: int) -> list[Timed]:
    """The fastest that fits (or one with all state on the device, see AT_REST), then the best of other kinds, by their
    time. Empty if nothing fits. The limits are those of the machine, before what is set aside."""
    found = list(tables(steps, usable_device(device_memory), usable_host(host_memory)))
    bounds = np.concatenate([table.bounds.ravel() for table in found]) if found else np.zeros(0)
    starts = np.cumsum([0, *(table.bounds.size for table in found)])
    finite = int(np.isfinite(bounds).sum())
    if finite == 0:
        return []
    most = min(finite, MOST_TIMED)
    nearest = np.argpartition(bounds, most - 1)[:most]
    nearest = nearest[np.lexsort((nearest, bounds[nearest]))]

    def choice_of(place: int) -> Choice:
        number = int(np.searchsorted(starts, place, side="right")) - 1
        return found[number].choice(place - int(starts[number]))

    best: Timed | None = None
    kinds: dict[tuple[object, ...], Timed] = {}

    def time(choice: Choice) -> Timed:
        placement = choice.placement(len(steps.shape.blocks))
        timed = Timed(choice, placement, steps.run(placement))
        kind = _kind(choice)
        if kind not in kinds or timed.timeline.seconds < kinds[kind].timeline.seconds:
            kinds[kind] = timed
        return timed

    for place in nearest:
        if best is not None and bounds[place] >= best.timeline.seconds * (1 - ENOUGH):
            break
        timed = time(choice_of(int(place)))
        if best is None or timed.timeline.seconds < best.timeline.seconds:
            best = timed
    # One of each other kind, the one with the least bound.
    for table in found:
        place = int(np.argmin(table.bounds))
        if np.isfinite(table.bounds.flat[place]):
            choice = table.choice(place)
            if _kind(choice) not in kinds:
                time(choice)
    at_rest = list(map(time, _at_rest(found, steps)))
    # Another kind may be faster by less than ENOUGH.
    ordered = sorted(kinds.values(), key=lambda timed: timed.timeline.seconds)
    slowest = ordered[0].timeline.seconds * (1 + AT_REST)
    blocks, micro_batches = len(steps.shape.blocks), steps.job.batch.micro_batches
    rest = min(
        (timed for timed in at_rest if timed.timeline.seconds <= slowest),
        # What the host is spared where blocks need not be parked is not in the times.
        key=lambda timed: (not timed.placement.rests(blocks, micro_batches), timed.timeline.seconds),
        default=None,
    )
    if rest is None:
        return ordered
    return [rest, *(timed for timed in ordered if timed.placement != rest.placement)]


def _at_rest(found: list[Table], steps: Steps) -> list[Choice]:
    """Of each table the most promising choice with all state on the device."""
    everything_outside = tuple(unit.name for unit in steps.shape.outside)
    choices = []
    for table in found:
        place = (len(steps.shape.blocks), int(np.argmin(table.bounds[-1])))
        if table.base.outside == everything_outside and np.isfinite(table.bounds[place]):
            choices.append(table.choice(int(np.ravel_multi_index(place, table.bounds.shape))))
    return choices


def _kind(choice: Choice) -> tuple[object, ...]:
    return (
        choice.order,
        bool(choice.outside),
        choice.inputs_on,
        choice.other_inputs_on,
        choice.others,
        choice.shelved_keep if choice.shelved else "",
    )


def exhaustive(steps: Steps, device_memory: int, host_memory: int) -> Timed | None:
    """The fastest of the family by timing all of it: what `search` is held against, for small models."""
    device, host = usable_device(device_memory), usable_host(host_memory)
    count = len(steps.shape.blocks)
    best: Timed | None = None
    for order, outside, others, (inputs_on, other_inputs_on), shelved_keep in itertools.product(
        orders(steps), outside_choices(steps), OTHERS, INPUTS, SHELVED
    ):
        for resident, everything, selected, shelved in itertools.product(range(count + 1), repeat=4):
            if everything + selected + shelved > count or (shelved == 0 and shelved_keep == "everything"):
                continue
            choice = Choice(
                order=order,
                resident=resident,
                everything=everything,
                selected=selected,
                shelved=shelved,
                shelved_keep=shelved_keep,
                inputs_on=inputs_on,
                other_inputs_on=other_inputs_on,
                others=others,
                outside=outside,
            )
            placement = choice.placement(count)
            taken = memory(steps.shape, steps.job, placement, steps.sizes)
            if taken.device_bytes > device or taken.host_bytes > host:
                continue
            timeline = steps.run(placement)
            if best is None or timeline.seconds < best.timeline.seconds:
                best = Timed(choice, placement, timeline)
    return best
