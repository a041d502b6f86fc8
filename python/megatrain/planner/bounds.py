"""Lower bounds of seconds, in closed form, of every placement of the family, and which of them fit.

At a given number of the others, as many blocks as fit keep selected outputs: more of them never take longer. What is
left is a table by resident blocks and blocks that keep everything, one for each other choice."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from megatrain.host_shelf import HostShelf
from megatrain.planner.family import INPUTS, OTHERS, SHELVED, Choice, orders, outside_choices
from megatrain.planner.memory import KEEPS, ROUNDING

if TYPE_CHECKING:
    from collections.abc import Iterator

    from numpy.typing import NDArray

    from megatrain.placement import Keep, Order, Residence
    from megatrain.planner.timeline import Steps

    Floats = NDArray[np.float64]
    Places = NDArray[np.int64]

SHELVED_STEPS = 8
"""Numbers of blocks on the host that are tried, evenly from none to all."""


@dataclass(frozen=True)
class Table:
    """Lower bounds of seconds, infinite where it does not fit, by resident and everything."""

    base: Choice
    bounds: Floats
    selected: NDArray[np.int64]

    def choice(self, place: int) -> Choice:
        resident, everything = np.unravel_index(place, self.bounds.shape)
        selected = int(self.selected[resident, everything])
        count = self.bounds.shape[0] - 1
        inputs_kept = everything + selected + self.base.shelved < count
        return replace(
            self.base,
            resident=int(resident),
            everything=int(everything),
            selected=selected,
            # One name for what is the same.
            inputs_on=self.base.inputs_on if inputs_kept else "device",
            other_inputs_on=self.base.other_inputs_on if everything + selected else "device",
            others=self.base.others if resident < count else "none",
        )


def _sums(values: list[float] | list[int]) -> Floats:
    """sums[n]: of the first n."""
    return np.concatenate([[0.0], np.cumsum(np.asarray(values, dtype=np.float64))])


class _Kept:
    """Bytes and seconds by what blocks keep: as sums over the first n blocks, in one order of work."""

    def __init__(self, steps: Steps, order: Order) -> None:
        batch, element, blocks = steps.job.batch, steps.job.element, steps.shape.blocks
        held = batch.micro_tokens * element * (1 if order == "micro-batch-major" else batch.micro_batches)
        self.alike = len({(block.selected, block.everything) for block in blocks}) == 1
        self.inputs = _sums([block.inputs * held for block in blocks])
        self.keeps: dict[Keep, Floats] = {
            "selected": _sums([block.selected * held for block in blocks]),
            "everything": _sums([block.everything * held for block in blocks]),
        }
        each = batch.micro_batches
        self.recompute = {
            keep: _sums([each * seconds for seconds in steps.work.recompute_list(keep)]) for keep in KEEPS
        }
        self.calls = batch.micro_batches if order == "layer-major" else 1
        self.back = {keep: _sums(self._back_over(steps, keep)) for keep in self.keeps}
        """By how much bringing it back from the host takes longer than the backward beside which it comes."""
        self.work = np.asarray(steps.sizes.workspace, dtype=np.float64)

    def _back_over(self, steps: Steps, keep: Keep) -> list[float]:
        over = []
        batch, work = steps.job.batch, steps.work
        for index, nbytes in enumerate(np.diff(self.keeps[keep])):
            seconds = work.backward[index] + work.sums[index] + work.recompute(index, "inputs")
            coming = float(nbytes) / steps.hardware.up_together
            # Two calls ahead, of this block or the one before.
            over.append(max(0.0, coming - (self.calls + 2) * seconds) * batch.micro_batches / self.calls)
        return over


def tables(steps: Steps, device: int, host: int) -> Iterator[Table]:
    """device, host: bytes that may be used."""
    count = len(steps.shape.blocks)
    numbers = sorted({round(count * i / SHELVED_STEPS) for i in range(1, SHELVED_STEPS + 1)} - {0})
    shelved = [(0, SHELVED[0]), *itertools.product(numbers, SHELVED)]
    for order in orders(steps):
        kept = _Kept(steps, order)
        fixed = {
            (outside, others): _fixed_bytes(steps, order, outside, others)
            for outside in outside_choices(steps)
            for others in OTHERS
        }
        for (inputs_on, other_inputs_on), (number, keep) in itertools.product(INPUTS, shelved):
            base = Choice(
                order=order,
                inputs_on=inputs_on,
                other_inputs_on=other_inputs_on,
                shelved=number,
                shelved_keep=keep,
            )
            least_hosted = kept.keeps[keep][number] - kept.inputs[1] if number else 0
            if steps.sizes.tiles + least_hosted > host and kept.alike:
                continue
            peaks = _peaks(steps, kept, base)
            least = float(peaks.min())
            for (outside, others), bytes_fixed in fixed.items():
                if least > device - bytes_fixed.min():
                    continue
                yield _table(
                    steps, kept, replace(base, outside=outside, others=others), peaks, device - bytes_fixed, host
                )


def _fixed_bytes(steps: Steps, order: Order, outside: tuple[str, ...], others: Residence) -> Floats:
    """By the number of resident blocks: all on the device that does not depend on what is kept."""
    sizes, job, count = steps.sizes, steps.job, len(steps.shape.blocks)
    found = np.full(count + 1, float(ROUNDING))
    tiles, weights = _sums([u.tile for u in sizes.blocks]), _sums([u.weights for u in sizes.blocks])
    found += tiles
    # What a suffix of blocks needs at most.
    after = range(count + 1)
    largest = np.array([max((u.weights for u in sizes.blocks[i:]), default=0) for i in after], dtype=np.float64)
    elements = np.array([max((u.trainable for u in sizes.blocks[i:]), default=0) for i in after])
    found += job.slots * largest if others == "none" else weights[-1] - weights
    outside_elements = 0
    for unit, shaped in zip(sizes.outside, steps.shape.outside, strict=True):
        found += unit.tile if shaped.name in outside else unit.weights
        if shaped.name not in outside:
            outside_elements = max(outside_elements, unit.trainable)
    found += [sizes.staging(int(max(outside_elements, most))) * job.element for most in elements]
    flows = 1 if order == "micro-batch-major" else job.batch.micro_batches
    found += sizes.micro_flow * flows + sizes.outside_sums(order) + sizes.block_sums(order)
    return found


def _segments(base: Choice, count: int) -> tuple[Places, Places, Places, NDArray[np.bool_]]:
    """Where selected begins, where everything begins, where the shelf begins, by [everything, selected]; and which of
    them are possible."""
    everything, selected = np.meshgrid(np.arange(count + 1), np.arange(count + 1), indexing="ij")
    from_everything = count - everything
    from_selected = from_everything - selected
    from_shelf = from_selected - base.shelved
    return from_selected, from_everything, from_shelf, from_shelf >= 0


def _peaks(steps: Steps, kept: _Kept, base: Choice) -> Floats:
    """Bytes by [everything, selected] that what is kept takes with the temporaries beside it, as `memory` counts
    them; rising with selected, infinite where it is not possible."""
    count = len(steps.shape.blocks)
    selected, everything, shelf, possible = _segments(base, count)
    clipped = np.maximum(shelf, 0)
    a, b = np.maximum(selected, 0), everything
    on_device = base.inputs_on == "device"
    first = kept.inputs[1]  # what the embedding hands over stays
    before = kept.inputs[clipped] if on_device else np.where(clipped > 0, first, 0)
    elsewhere = base.other_inputs_on == "host"
    before = np.where((clipped == 0) & ((a > 0) | elsewhere), first, before)
    away = kept.inputs if elsewhere else np.zeros_like(kept.inputs)
    held_selected, held_everything = kept.keeps["selected"] - away, kept.keeps["everything"] - away
    at_selected = before + held_selected[b] - held_selected[a]
    total = at_selected + held_everything[count] - held_everything[b]
    call = 1.0 / kept.calls
    work = kept.work

    def peak(running: Floats, own: Floats) -> Floats:
        """Up to the first n blocks, the most of what is held and the block's own."""
        return np.concatenate([[-np.inf], np.maximum.accumulate(running[1:] + own)])

    found = total + steps.sizes.loss_work(base.order)
    each_input = np.diff(kept.inputs) * call
    if on_device:
        found = np.maximum(found, peak(kept.inputs, work - each_input)[clipped])
    else:
        found = np.maximum(found, before + _running(work)[clipped])
    found = np.maximum(found, np.where(a > clipped, before + _running(work)[a], -np.inf))
    ends = np.full(b.shape, count)
    for held, begin, end, below in (
        (held_selected, a, b, before),
        (held_everything, b, ends, at_selected),
    ):
        upto = peak(held, work - np.diff(held) * call)
        found = np.maximum(found, np.where(end > begin, below - held[begin] + upto[end], -np.inf))
    hosted = _host_kept(kept, base, clipped, a)
    found = found + np.minimum(steps.sizes.shelf[base.shelved_keep if base.shelved else "inputs"], 2 * hosted)
    found = np.where(possible, found, np.inf)
    rising: Floats = np.maximum.accumulate(np.where(np.isfinite(found), found, 0), axis=1)
    return np.where(possible, rising, np.inf)


def _running(values: Floats) -> Floats:
    return np.concatenate([[-np.inf], np.maximum.accumulate(values)])


def _host_kept(kept: _Kept, base: Choice, shelf: Places, selected: Places) -> Floats:
    held = kept.keeps[base.shelved_keep]
    hosted: Floats = held[selected] - held[shelf]
    if base.inputs_on == "host":
        hosted = hosted + np.maximum(kept.inputs[shelf] - kept.inputs[1], 0)
    if base.other_inputs_on == "host":
        hosted = hosted + kept.inputs[-1] - kept.inputs[selected] - np.where(selected == 0, kept.inputs[1], 0)
    # The first block's input stays on the device wherever the block keeps the rest.
    return hosted - np.where((shelf == 0) & (selected > 0), kept.inputs[1], 0)


def _table(steps: Steps, kept: _Kept, base: Choice, peaks: Floats, left: Floats, host: int) -> Table:
    count = len(steps.shape.blocks)
    job, sizes, work, hardware = steps.job, steps.sizes, steps.work, steps.hardware
    batch = job.batch
    rounds = batch.micro_batches if base.order == "micro-batch-major" else 1
    # selected[resident, everything]: as many as fit.
    selected = np.stack([peaks[e].searchsorted(left, side="right") - 1 for e in range(count + 1)], axis=1)
    fits = selected >= 0
    selected = np.maximum(selected, 0)
    resident = np.arange(count + 1)[:, None]
    everything = np.arange(count + 1)[None, :]
    b = np.broadcast_to(count - everything, selected.shape)
    a = b - selected
    shelf = np.maximum(a - base.shelved, 0)
    hosted = _host_kept(kept, base, shelf, np.maximum(a, 0))
    fits &= sizes.tiles + hosted <= host
    a = np.maximum(a, 0)

    recompute = (
        kept.recompute["inputs"][shelf]
        + kept.recompute[base.shelved_keep][a]
        - kept.recompute[base.shelved_keep][shelf]
        + kept.recompute["selected"][b]
        - kept.recompute["selected"][a]
    )
    forward = batch.micro_batches * _sums(work.forward)
    updates_here = _sums(work.on_device_update)[resident]
    computed = batch.micro_batches * (sum(work.forward) + sum(work.backward) + sum(work.sums) + work.head)
    compute = recompute + computed + updates_here
    early = last = 0.0
    outside_down = early_up = last_up = 0.0
    for index, (unit, shaped) in enumerate(zip(sizes.outside, steps.shape.outside, strict=True)):
        if shaped.name in base.outside:
            compute = compute + work.outside_on_device_update[index]
            continue
        outside_down += unit.gradients
        if steps.used_last(index):
            last, last_up = last + unit.update, last_up + unit.weights
        else:
            early, early_up = early + unit.update, early_up + unit.weights

    update, weights = _sums([u.update for u in sizes.blocks]), _sums([u.weights for u in sizes.blocks])
    gradients = _sums([u.gradients for u in sizes.blocks])
    streamed = resident < count
    blocks_up = weights[count] - weights[resident]
    hosted_all = hosted * rounds
    fastest_up = max(hardware.up_together, hardware.up_beside_updates)
    if job.updates_wait:
        left_over = hardware.update - (rounds * blocks_up + hosted_all) / steps.forward_seconds
        speed = np.maximum(left_over, hardware.update_beside_copies)
    else:
        speed = np.full(selected.shape, hardware.update_beside_copies)

    # The device, with what it certainly waits for: a run of blocks on the shelf goes down no faster than the link,
    # but for what may be pending, and comes back no earlier than two calls before its turn.
    hosted_blocks = kept.keeps[base.shelved_keep]
    going = (hosted_blocks[a] - hosted_blocks[shelf]) / hardware.down_together
    slack = HostShelf.PENDING_BYTES / hardware.down_together
    first_forward = forward / rounds
    over = np.maximum(0, going - slack - (first_forward[a] - first_forward[shelf])) * rounds
    back = kept.back[base.shelved_keep]
    compute = compute + back[a] - back[shelf]

    passes = rounds * (2.0 if base.others == "none" else 0.0) or 1.0
    skipped = job.slots * max(u.weights for u in sizes.blocks) * rounds if base.others == "none" else 0
    up = np.maximum(blocks_up * passes - skipped, 0) / fastest_up + hosted_all / fastest_up
    down = (gradients[count] - gradients[resident] + outside_down + hosted_all) / hardware.down_together
    update_lane = (update[count] - update[resident] + early + last) / speed
    moved = np.maximum(blocks_up * passes - skipped, 0) + gradients[count] - gradients[resident] + 2 * hosted_all
    traffic = update_lane + (moved + outside_down + early_up + last_up) / hardware.update
    bound = np.maximum(np.maximum(np.maximum(up, down), traffic), compute + over)
    if job.updates_wait:
        # Between two steps: the embedding, then each block, is updated, goes up, and only then computes.
        begin = early / speed + early_up / hardware.up_beside_updates * streamed
        bound = np.maximum(bound, compute + over + begin)
        # While a block waits for its update, what is pending goes down: the two waits do not add up.
        each = (update[count] - update[resident]) / speed
        bound = np.maximum(bound, np.where(streamed, compute - first_forward[count - 1] + early / speed + each, 0))
        if last:
            bound = np.maximum(bound, compute - first_forward[count] + update_lane)
    return Table(base, np.where(fits, bound, np.inf), selected)
