"""Seconds of computation of each part of a step, from the shape and the hardware's figures."""

from __future__ import annotations

from typing import TYPE_CHECKING

from megatrain.gradients import HELD_GRADIENTS

if TYPE_CHECKING:
    from megatrain.placement import BlockPlacement, Keep, Side
    from megatrain.planner.hardware import Hardware
    from megatrain.planner.job import Job
    from megatrain.planner.shape import BlockShape, ModelShape

BACKWARD_PRODUCTS = 0.85
"""Speed of a backward's products over a forward's (Qwen2.5-7B layers, compiled, H200)."""
FORWARD_PASSES = 2.0
BACKWARD_PASSES = 4.0
"""Over what autograd saves, by the elementwise kernels: they write it and read it again, back twice as often."""
LOGITS_PASSES = 6.0
"""Over the logits, by the loss (`loss_and_gradient`) and the products around it."""
ATTENTION_BACKWARD = 2.5
"""Products of attention's backward over its forward's: 5 for 2 (Dao et al., arXiv 2205.14135)."""
CALL_SECONDS = 0.5e-3
"""Least time of a block's forward for one micro-batch, twice that of its backward: what the host needs to hand over
and to launch it. Assumed, not measured; it decides for small models only."""
SUM_BYTES = 10
"""A parameter and micro-batch, to add a bf16 gradient to an fp32 sum and to round the sum."""
PAIR_BYTES = 3
"""The same where there are but two, which are added as they are rounded."""
STORE_BYTES = 4
"""A parameter, to move a gradient that came alone to where it goes down from."""


class Work:
    """Of one micro-batch, by block. Lists follow the model's blocks."""

    def __init__(self, shape: ModelShape, job: Job, hardware: Hardware) -> None:
        batch, element = job.batch, job.element
        tokens = batch.micro_tokens
        products = hardware.fp32_flops if element == 4 else hardware.bf16_flops
        attending = hardware.fp32_flops if element == 4 else hardware.attention_flops
        bandwidth = hardware.gpu_bandwidth

        def forward(block: BlockShape, share: float = 1.0) -> float:
            computed = block.flops / products + block.attention_flops(batch.length) / attending
            elementwise = FORWARD_PASSES * (block.everything * element) / bandwidth
            return tokens * (computed + elementwise) * share

        def backward(block: BlockShape) -> float:
            computed = (block.flops + block.trained_flops) / products
            computed += ATTENTION_BACKWARD * block.attention_flops(batch.length) / attending
            elementwise = BACKWARD_PASSES * (block.everything * element) / bandwidth
            return tokens * (computed / BACKWARD_PRODUCTS + elementwise)

        blocks = shape.blocks
        units = [block.bytes(job.tile_format) for block in blocks]
        outside = [unit.bytes(job.tile_format) for unit in shape.outside]
        self.forward = [max(forward(block), CALL_SECONDS) for block in blocks]
        self.backward = [max(backward(block), 2 * CALL_SECONDS) for block in blocks]
        pair = PAIR_BYTES if batch.micro_batches == HELD_GRADIENTS else SUM_BYTES
        each = pair if batch.micro_batches > 1 else STORE_BYTES
        self.sums = [each * unit.trainable / bandwidth for unit in units]
        self._recompute: dict[Keep, list[float]] = {
            "everything": [0.0] * len(blocks),
            "selected": [forward(b, b.recomputed_when_selected) for b in blocks],
            "inputs": [
                # The elementwise passes of a recompute fuse with the backward's own.
                tokens * ((b.flops - b.last_flops) / products + b.attention_flops(batch.length) / attending)
                for b in blocks
            ],
        }
        self.head = 0.0
        if shape.head is not None:
            vocabulary, width = shape.head
            once = 2.0 * vocabulary * width * tokens / products
            trained = 1 if shape.head_trained else 0
            self.head = once * (1 + (1 + trained) / BACKWARD_PRODUCTS)
            self.head += LOGITS_PASSES * vocabulary * tokens * element / bandwidth
            # The fp32 sum of the head's gradient is read and written for each chunk of rows of the loss.
            chunks = max(1.0, 4.0 * vocabulary * tokens / (1 << 30))
            self.head += trained * chunks * 8.0 * vocabulary * width / bandwidth
        self.head += each * sum(unit.trainable for unit in outside) / bandwidth
        self.on_device_update = [unit.update / bandwidth for unit in units]
        self.outside_on_device_update = [unit.update / bandwidth for unit in outside]

    def recompute(self, block: int, keep: Keep) -> float:
        return self._recompute[keep][block]

    def recompute_list(self, keep: Keep) -> list[float]:
        return self._recompute[keep]


def kept_side(place: BlockPlacement) -> Side:
    """Where what the block keeps waits, but for the inputs of one that keeps more."""
    return place.inputs_side if place.keep_for(0) == "inputs" else place.kept_on
