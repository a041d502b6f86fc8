"""What stays where and in which order a step works: given by hand, checked when made.

Nothing here changes losses or gradients; it decides time and memory. (But for the last bit where a head's weights are
the embedding's: the two orders add up the parts of that gradient in different orders.)"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, get_args

Keep = Literal["everything", "selected", "inputs"]
Order = Literal["layer-major", "micro-batch-major"]
Residence = Literal["none", "weights", "all"]
Side = Literal["device", "host"]
ExpertsWay = Literal["auto", "selected", "whole"]


def _check(name: str, value: object, known: tuple[str, ...]) -> None:
    if value not in known:
        raise ValueError(f'{name} is "{value}"; it must be one of {", ".join(known)}')


@dataclass(frozen=True, kw_only=True)
class BlockPlacement:
    """One block's weights and activations.

    keep: what its forward leaves for its backward: "everything" that autograd saves; "selected", the outputs
        of matrix products and attention, from which the rest is recomputed; "inputs" alone. One value, or
        one for each micro-batch of the step, the last of which stands for all that follow, and the first for a plain
        forward. A block that draws random numbers (dropout) keeps its inputs where "selected" is asked for. Of a
        compiled block, "selected" is what torch's compiler chooses to keep in half of the memory of everything.
    kept_on: where that waits: in device memory, or in pinned host memory, to and from which it is copied
        while other blocks compute.
    inputs_on: where the tensors that the block before handed over wait; None for where `kept_on` says.
    resident: "weights" keeps the block's weights in device memory (2 bytes a parameter in bf16), to which they go up
        once after each update; "all" keeps its optimizer state there as well and updates it there (14 bytes with fp32
        moments)."""

    keep: Keep | tuple[Keep, ...] = "inputs"
    kept_on: Side = "device"
    inputs_on: Side | None = None
    resident: Residence = "none"

    def __post_init__(self) -> None:
        values = self.keep if isinstance(self.keep, tuple) else (self.keep,)
        if not values:
            raise ValueError("keep is an empty tuple; it needs a value for the first micro-batch")
        for value in values:
            _check("keep", value, get_args(Keep))
        _check("kept_on", self.kept_on, get_args(Side))
        if self.inputs_on is not None:
            _check("inputs_on", self.inputs_on, get_args(Side))
        _check("resident", self.resident, get_args(Residence))

    @property
    def inputs_side(self) -> Side:
        return self.inputs_on or self.kept_on

    def keep_for(self, micro_batch: int) -> Keep:
        if isinstance(self.keep, tuple):
            return self.keep[min(micro_batch, len(self.keep) - 1)]
        return self.keep


@dataclass(frozen=True, kw_only=True)
class Placement:
    """Of a whole model.

    order: "layer-major" runs every micro-batch through a block before the next block, so that weights go up
        twice a step; "micro-batch-major" runs each micro-batch to its end, so that only one micro-batch's
        activations are kept, with all gradients on the device: of two as they came (2 bytes a parameter in bf16), of
        more as fp32 sums (4 bytes).
    blocks: by block, in the module's order; the last one stands for all that follow.
    outside: where parameters outside the stacks (embedding, final norm, head) live, by the name of the module
        that owns them, "" for those not named: "all", or "none" for weights fetched once after each update.
    experts: "selected" brings only the experts that got tokens, when the router has chosen; "whole" brings all of
        them ahead, with the rest of their block; "auto" the former in blocks of which experts are the larger part,
        for as long as the tokens are too few for nearly all experts. Blocks that cannot be split go up whole."""

    order: Order = "layer-major"
    blocks: tuple[BlockPlacement, ...] = (BlockPlacement(),)
    outside: Mapping[str, Residence] = field(default_factory=dict)
    experts: ExpertsWay = "auto"

    def __post_init__(self) -> None:
        _check("order", self.order, get_args(Order))
        _check("experts", self.experts, get_args(ExpertsWay))
        if not isinstance(self.blocks, tuple | list):
            raise ValueError(f"blocks is a {type(self.blocks).__name__}; it must be a tuple of BlockPlacement")
        object.__setattr__(self, "blocks", tuple(self.blocks))
        if not self.blocks:
            raise ValueError("blocks is empty; give at least one BlockPlacement, which then stands for all blocks")
        for block in self.blocks:
            if not isinstance(block, BlockPlacement):
                raise ValueError(f"blocks holds a {type(block).__name__}, {block!r}; it must be a BlockPlacement")
        if not isinstance(self.outside, Mapping):
            raise ValueError(f'outside is {self.outside!r}; it must map names of modules to "all" or "none"')
        for name, value in self.outside.items():
            _check(f'outside["{name}"]', value, ("none", "all"))

    @staticmethod
    def spread(
        blocks: int,
        *,
        order: Order = "layer-major",
        resident: int = 0,
        everything: int = 0,
        selected: int = 0,
        kept_on: Side = "device",
        inputs_on: Side = "device",
        outside: Mapping[str, Residence] | Residence = "none",
        experts: ExpertsWay = "auto",
    ) -> Placement:
        """The first `resident` of `blocks` blocks are resident. The last `everything` keep everything and the
        `selected` ones before them selected outputs, on `kept_on`; all keep their inputs on `inputs_on`."""
        if not isinstance(blocks, int) or blocks < 1:
            raise ValueError(f"blocks is {blocks}; it must be the model's number of blocks")
        counts = dict(resident=resident, everything=everything, selected=selected)
        for name, count in (counts | {"everything + selected": everything + selected}).items():
            if not isinstance(count, int) or not 0 <= count <= blocks:
                raise ValueError(f"{name} is {count}; it must be between 0 and the number of blocks, {blocks}")
        found = []
        for index in range(blocks):
            from_end = blocks - index
            keep: Keep = "inputs"
            if from_end <= everything:
                keep = "everything"
            elif from_end <= everything + selected:
                keep = "selected"
            residence: Residence = "all" if index < resident else "none"
            found.append(BlockPlacement(keep=keep, kept_on=kept_on, inputs_on=inputs_on, resident=residence))
        named = {"": outside} if isinstance(outside, str) else outside
        return Placement(order=order, blocks=tuple(found), outside=named, experts=experts)

    def block(self, index: int) -> BlockPlacement:
        return self.blocks[min(index, len(self.blocks) - 1)]

    def rests(self, blocks: int, micro_batches: int) -> bool:
        """Nothing of a step leaves the device: micro-batches run to their ends one by one, and of each of so many
        blocks weights, optimizer state and all that autograd saves stay."""
        return (self.order == "micro-batch-major" or micro_batches == 1) and all(
            place.resident == "all"
            and place.kept_on == place.inputs_side == "device"
            and all(place.keep_for(number) == "everything" for number in range(micro_batches))
            for place in map(self.block, range(blocks))
        )

    def residence(self, outside: str) -> Residence:
        """Of the module with this name outside the stacks."""
        return self.outside.get(outside, self.outside.get("", "none"))

