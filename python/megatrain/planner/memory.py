"""What a placement takes on the device and on the host, item by item.

Where a buffer's size is in the source, the item says where. One figure is measured instead: the temporaries of a
block's backward, as a multiple of what autograd saves."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, get_args

import torch

from megatrain.gradients import HELD_GRADIENTS, GradientSink
from megatrain.head_rows import default_chunk_rows
from megatrain.placement import Keep
from megatrain.schedule import ForwardAndBack

if TYPE_CHECKING:
    from collections.abc import Mapping

    from megatrain.placement import BlockPlacement, Order, Placement, Side
    from megatrain.planner.hardware import Hardware
    from megatrain.planner.job import Job
    from megatrain.planner.shape import BlockShape, ModelShape

GIB = 1 << 30
TEMPORARIES = 0.83
"""Of a block's backward, beside what was saved, as a multiple of it (Qwen2.5-7B, compiled, H200)."""
ROUNDING = GIB // 2
"""What the allocator holds beyond what it gave out."""
CONTEXT = GIB
"""Of CUDA and its libraries, outside torch's allocator."""
SHARE = 0.95
KEEPS: tuple[Keep, ...] = get_args(Keep)
HOST_PROCESS = 4 * GIB
"""Python, torch, the CUDA driver's tables, the data."""


@dataclass(frozen=True)
class Memory:
    """Bytes by item, in the order in which they are shown; an item of 0 is left out."""

    device: Mapping[str, int]
    host: Mapping[str, int]

    @property
    def device_bytes(self) -> int:
        return sum(self.device.values())

    @property
    def host_bytes(self) -> int:
        return sum(self.host.values())


def usable_device(gpu_memory: int) -> int:
    """For torch's allocator, with 5 % left: the prediction's own error, so that it need not give back and ask again."""
    return max(0, int(SHARE * gpu_memory) - CONTEXT)


def usable_host(host_memory: int) -> int:
    return max(0, host_memory - HOST_PROCESS)


def fits(taken: Memory, hardware: Hardware) -> bool:
    devicefits = taken.device_bytes <= usable_device(hardware.gpu_memory)
    return devicefits and taken.host_bytes <= usable_host(hardware.host_memory)


def kept_elements(block: BlockShape, keep: Keep) -> int:
    """Of one token."""
    return {"inputs": block.inputs, "selected": block.selected, "everything": block.everything}[keep]


def waiting(block: BlockShape, placement: BlockPlacement, side: Side, micro_batch: int) -> int:
    """Elements of one token that the block keeps on that side."""
    kept = kept_elements(block, placement.keep_for(micro_batch))
    inputs = block.inputs if placement.inputs_side == side else 0
    return inputs + (kept - block.inputs if placement.kept_on == side else 0)


class Sizes:
    """What does not depend on the placement, for one model and job: the closed forms of the search use it too."""

    def __init__(self, shape: ModelShape, job: Job) -> None:
        batch, element = job.batch, job.element
        self.blocks = [block.bytes(job.tile_format) for block in shape.blocks]
        self.outside = [unit.bytes(job.tile_format) for unit in shape.outside]
        self.tiles = sum(unit.tile for unit in (*self.blocks, *self.outside))
        self.largest = max(self.blocks, key=lambda unit: unit.trainable)
        self.several = batch.micro_batches > 1
        self._few = batch.micro_batches <= HELD_GRADIENTS
        self._element = element
        micro = batch.micro_tokens
        width = max(block.inputs for block in shape.blocks)
        self.micro_flow = width * micro * element
        call = {keep: max(kept_elements(block, keep) for block in shape.blocks) * micro * element for keep in KEEPS}
        self.shelf = {keep: ForwardAndBack.FETCHED_AHEAD * call[keep] + call["inputs"] for keep in KEEPS}
        """Of what is between the device and the host, where blocks put away so much: on its way back before its turn,
        and no less than the newest inputs that go down while losses are taken."""
        vocabulary, head_width = shape.head or (0, width)
        rows = min(default_chunk_rows(vocabulary, torch.device("cuda")), micro) if vocabulary else 0
        logits = 2 * rows * vocabulary * element
        sum_of_head = 4 * vocabulary * head_width if shape.head_trained else 0
        self.head = sum_of_head + max(logits, sum_of_head * element // 4) + 3 * self.micro_flow
        """Of the loss of one micro-batch (`head_rows.py`)."""
        self._sums_of_outside = sum(unit.trainable for unit in self.outside) * (element if self._few else 4)
        self._tied = shape.head_tied
        units = zip(shape.outside, self.outside, strict=True)
        of_head = sum(unit.trainable for shaped, unit in units if shaped.name == shape.head_unit)
        self._held_of_head = of_head * element * batch.micro_batches
        self.workspace = [
            int((1 + TEMPORARIES) * block.everything * micro * element) + unit.trainable * element
            for block, unit in zip(shape.blocks, self.blocks, strict=True)
        ]
        """Of one call's backward where only inputs were kept: temporaries and the gradients of its weights."""

    def outside_sums(self, order: Order) -> int:
        """Of gradients outside the stacks, all the way back. A few layer-major micro-batches have no fp32 sums: there
        only the gradients of a head that is the embedding, too, are held so long."""
        if order == "layer-major" and self._few:
            return self._held_of_head if self._tied else 0
        return self._sums_of_outside

    def block_sums(self, order: Order) -> int:
        """Of gradients of blocks: layer-major of one at a time, else of all from the first micro-batch on, in fp32
        where more than one more will be added."""
        if not self.several:
            return 0
        if order == "layer-major":
            return 4 * self.largest.trainable
        return (self._element if self._few else 4) * sum(unit.trainable for unit in self.blocks)

    def loss_work(self, order: Order) -> int:
        """Of the loss, with gradients that go down before the way back."""
        early = order == "layer-major" and self._few and not self._tied
        return self.head + (self._held_of_head if early else 0)

    def staging(self, streamed_elements: int) -> int:
        """streamed_elements: the most of a streamed unit."""
        return GradientSink.STAGING_BUFFERS * min(streamed_elements, GradientSink.STAGING_ELEMENTS)


def memory(shape: ModelShape, job: Job, placement: Placement, sizes: Sizes | None = None) -> Memory:
    """The device's at its peak within a step."""
    sizes = sizes or Sizes(shape, job)
    batch, element = job.batch, job.element
    one_by_one = placement.order == "micro-batch-major"
    rounds = batch.micro_batches if one_by_one else 1
    slots = resident = outside = streamed = shelf = 0
    host_kept = 0
    kept: list[int] = []  # of one call, on the device
    on_device: list[int] = []
    for index, (block, unit) in enumerate(zip(shape.blocks, sizes.blocks, strict=True)):
        place = placement.block(index)
        if place.resident == "all":
            resident += unit.tile
        else:
            streamed = max(streamed, unit.trainable)
            if place.resident == "weights":
                resident += unit.weights
            else:
                slots = max(slots, job.slots * unit.weights)
        numbers = range(batch.micro_batches)
        there = [waiting(block, place, "device", number) * batch.micro_tokens * element for number in numbers]
        gone = sum(waiting(block, place, "host", number) for number in numbers) * batch.micro_tokens * element // rounds
        first = 0
        if gone:
            # What the embedding hands to the first block is no block's output and stays.
            if index == 0 and place.inputs_side == "host":
                first = block.inputs * batch.tokens * element // rounds
            host_kept += gone - first
            for number in numbers:
                shelf = max(shelf, sizes.shelf["inputs" if place.kept_on == "device" else place.keep_for(number)])
        kept.append(min(there))
        on_device.append(sum(there) // rounds + first)
    shelf = min(shelf, 2 * host_kept)
    for shaped, unit in zip(shape.outside, sizes.outside, strict=True):
        if placement.residence(shaped.name) == "all":
            resident += unit.tile
        else:
            outside += unit.weights
            streamed = max(streamed, unit.trainable)
    flow = sizes.micro_flow * (1 if one_by_one else batch.micro_batches)
    sums = sizes.outside_sums(placement.order)
    sums += sizes.block_sums(placement.order)
    # The peak is where the loss is taken, with all kept, or at a block on the way back, with what the blocks before it
    # kept and its own temporaries: what it did not keep is computed again.
    at_loss = sizes.loss_work(placement.order)
    best, work, held = sum(on_device) + at_loss, at_loss, sum(on_device)
    remaining = 0
    for index, unit_work in enumerate(sizes.workspace):
        remaining += on_device[index]
        own = unit_work - kept[index]
        if remaining + own > best:
            best, work, held = remaining + own, own, remaining
    device = {
        "slots": slots,
        "resident": resident,
        "outside the stacks": outside,
        "kept activations": held,
        "between blocks": flow,
        "copies of activations": shelf,
        "workspace, head and loss": work,
        "sums of gradients": sums,
        "staging of gradients": sizes.staging(streamed) * element,
        "rounding": ROUNDING,
    }
    host = {"tiles": sizes.tiles, "kept activations": host_kept}
    return Memory({k: v for k, v in device.items() if v}, {k: v for k, v in host.items() if v})
