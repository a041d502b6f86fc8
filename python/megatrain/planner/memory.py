"""What a placement takes on the device and on the host, item by item.

Where a buffer's size is in the source, the item says where. Two figures are measured instead: the temporaries of a
block's backward, as a multiple of what autograd saves, and what copies of activations to the host hold."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from megatrain.chunked_loss import default_chunk_rows
from megatrain.gradients import GradientSink
from megatrain.host_shelf import HostShelf
from megatrain.planner.work import kept_side

if TYPE_CHECKING:
    from collections.abc import Mapping

    from megatrain.placement import BlockPlacement, Keep, Placement
    from megatrain.planner.hardware import Hardware
    from megatrain.planner.job import Job
    from megatrain.planner.shape import BlockShape, ModelShape

GIB = 1 << 30
TEMPORARIES = 0.83
"""Of a block's backward, beside what was saved, as a multiple of it (Qwen2.5-7B, compiled, H200)."""
SHELF_EXTRA = int(1.5 * GIB)
"""Beside HostShelf.PENDING_BYTES; from the one run with activations on the host that was recorded."""
ROUNDING = GIB // 2
"""What the allocator holds beyond what it gave out."""
CONTEXT = GIB
"""Of CUDA and its libraries, outside torch's allocator."""
SHARE = 0.95
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


def kept_bytes(block: BlockShape, placement: BlockPlacement, job: Job) -> int:
    """Of one block, all micro-batches."""
    batch = job.batch
    each = (kept_elements(block, placement.keep_for(index)) for index in range(batch.micro_batches))
    return sum(each) * batch.micro_tokens * job.element


class Sizes:
    """What does not depend on the placement, for one model and job: the closed forms of the search use it too."""

    def __init__(self, shape: ModelShape, job: Job) -> None:
        batch, element = job.batch, job.element
        self.blocks = [block.bytes(job.tile_format) for block in shape.blocks]
        self.outside = [unit.bytes(job.tile_format) for unit in shape.outside]
        self.tiles = sum(unit.tile for unit in (*self.blocks, *self.outside))
        self.largest = max(self.blocks, key=lambda unit: unit.trainable)
        self.several = batch.micro_batches > 1
        micro = batch.micro_tokens
        width = max(block.inputs for block in shape.blocks)
        self.micro_flow = width * micro * element
        vocabulary, head_width = shape.head or (0, width)
        rows = min(default_chunk_rows(vocabulary, torch.device("cuda")), micro) if vocabulary else 0
        logits = 2 * rows * vocabulary * element
        sum_of_head = 4 * vocabulary * head_width if shape.head_trained else 0
        self.head = sum_of_head + max(logits, sum_of_head * element // 4) + 3 * self.micro_flow
        """Of the loss of one micro-batch (`chunked_loss.py`)."""
        of_outside = sum(unit.trainable for unit in self.outside)
        self.outside_sums = of_outside * (4 if self.several else element)
        self.workspace = [
            int((1 + TEMPORARIES) * block.everything * micro * element) + unit.trainable * element
            for block, unit in zip(shape.blocks, self.blocks, strict=True)
        ]
        """Of one call's backward where only inputs were kept: temporaries and the gradients of its weights."""

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
        all_kept = kept_bytes(block, place, job) // rounds
        first_input = block.inputs * batch.tokens * element // rounds if index == 0 else 0
        if kept_side(place) == "host":
            # What the embedding hands to the first block is no block's output and stays.
            host_kept += max(0, all_kept - first_input)
            shelf = HostShelf.PENDING_BYTES + SHELF_EXTRA
        stays = all_kept if kept_side(place) == "device" else min(first_input, all_kept)
        each = min(kept_elements(block, place.keep_for(number)) for number in range(batch.micro_batches))
        kept.append(each * batch.micro_tokens * element if kept_side(place) == "device" else 0)
        on_device.append(stays)
    shelf = min(shelf, 2 * host_kept)
    for shaped, unit in zip(shape.outside, sizes.outside, strict=True):
        if placement.residence(shaped.name) == "all":
            resident += unit.tile
        else:
            outside += unit.weights
            streamed = max(streamed, unit.trainable)
    flow = sizes.micro_flow * (1 if one_by_one else batch.micro_batches)
    sums = sizes.outside_sums
    if sizes.several:
        sums += 4 * (sum(unit.trainable for unit in sizes.blocks) if one_by_one else sizes.largest.trainable)
    # The peak is where the loss is taken, with all kept, or at a block on the way back, with what the blocks before it
    # kept and its own temporaries: what it did not keep is computed again.
    loss_peak = sum(on_device) + sizes.head
    best, work, held = loss_peak, sizes.head, sum(on_device)
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
