"""What the planner knows of a model: of each unit its parameters, of each block also the work of a token and what its
activations take. Read from names and shapes alone, so that a module on the meta device suffices."""

from __future__ import annotations

import re
import warnings
from collections import Counter
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import torch

from megatrain._native import Section, TileFormat, TileLayout
from megatrain.stacks import candidates
from megatrain.units import plan_units

if TYPE_CHECKING:
    from torch import nn

    from megatrain.units import TiledParameter, Unit, UnitPlan

Parameters = tuple[tuple[int, bool], ...]
"""(elements, trainable) of each."""


@dataclass(frozen=True)
class UnitBytes:
    """Of one tile in one format."""

    weights: int
    """What goes to the device."""
    tile: int
    """All sections."""
    update: int
    """What an update reads and writes."""
    gradients: int
    trainable: int
    """Elements, gaps included."""


@lru_cache(maxsize=4096)
def _unit_bytes(parameters: Parameters, tile_format: TileFormat) -> UnitBytes:
    layout = TileLayout(tile_format, list(parameters))
    streamed, gradients = layout.section(Section.weights)[1], layout.section(Section.gradients)[1]
    frozen = (layout.weight_elements - layout.trainable_elements) * (4 if tile_format.weights == "fp32" else 2)
    # All of it is read and written, but gradients are only read.
    update = 2 * (layout.nbytes - frozen) - gradients if layout.trainable_elements else 0
    return UnitBytes(streamed, layout.nbytes, update, gradients, layout.trainable_elements)


@dataclass(frozen=True, kw_only=True)
class UnitShape:
    name: str
    parameters: Parameters
    stays_fp32: bool = False
    """Among bf16 weights."""

    def bytes(self, tile_format: TileFormat) -> UnitBytes:
        if self.stays_fp32:
            tile_format = TileFormat("fp32", tile_format.moments, tile_format.rule)
        return _unit_bytes(self.parameters, tile_format)

    @property
    def numel(self) -> int:
        return sum(elements for elements, _ in self.parameters)


@dataclass(frozen=True, kw_only=True)
class BlockShape(UnitShape):
    """Work and activations are of one token; activations in elements."""

    flops: float
    """Forward, matrix products with weights."""
    trained_flops: float
    """Those of products whose weights are trained."""
    last_flops: float
    """Of the last product: nothing needs its output again, so a recompute leaves it out."""
    attention_width: int
    """Heads times their size; 0 where there is no attention."""
    window: int
    """Most tokens that one looks back at; 0 for all."""
    inputs: int
    everything: int
    products: int
    """Outputs of products and attention, the last product's left out."""

    @property
    def selected(self) -> int:
        """The compiler may keep half of what autograd would save beyond the input (`BlockCaller.BUDGETS`)."""
        return (self.everything + self.inputs) // 2

    @property
    def recomputed_when_selected(self) -> float:
        """Share of the products that is computed again: what of their outputs the half has no place for."""
        room = (self.everything - self.inputs) / 2
        return max(0.0, 1.0 - room / self.products) if self.products else 0.0

    def attention_flops(self, length: int) -> float:
        """Forward, of one token, causal: on the average it looks back at half of the row."""
        seen = length / 2 if self.window == 0 else min(self.window, length / 2)
        return 4.0 * self.attention_width * seen


@dataclass(frozen=True, kw_only=True)
class ModelShape:
    """blocks: in the module's order. outside: the other units. head: (vocabulary, width) of the product that makes
    logits, None where there is none; head_unit: the outside unit whose weights it uses."""

    name: str
    blocks: tuple[BlockShape, ...]
    outside: tuple[UnitShape, ...]
    head: tuple[int, int] | None
    head_unit: str = ""
    head_trained: bool = True
    head_tied: bool = False
    """Its weights are the embedding's: needed before the blocks."""

    @property
    def numel(self) -> int:
        return sum(unit.numel for unit in (*self.blocks, *self.outside))

    @property
    def trained(self) -> int:
        units = (*self.blocks, *self.outside)
        return sum(elements for unit in units for elements, trainable in unit.parameters if trainable)

    @staticmethod
    def from_module(module: nn.Module, name: str = "") -> ModelShape:
        """Of a module, on the meta device or not; its lists of blocks are taken for the stacks."""
        stacks = candidates(module)
        if not stacks:
            raise ValueError(f"{name or type(module).__name__} has no ModuleList of blocks to stream")
        plan = plan_units(module, stacks, TileFormat.bf16_split)
        head = None
        get: Any = getattr(module, "get_output_embeddings", None)
        if get is not None and (found := get()) is not None:
            head = found.weight if isinstance(found.weight, torch.Tensor) else None
        return ModelShape.from_plan(plan, config=getattr(module, "config", None), head=head, name=name)

    @staticmethod
    def from_plan(
        plan: UnitPlan, *, config: Any = None, head: torch.Tensor | None = None, name: str = ""
    ) -> ModelShape:
        """config: a transformers configuration, which tells the width, the experts a token goes to, windows.
        head: the parameter that makes logits."""
        text = config.get_text_config() if hasattr(config, "get_text_config") else config
        width = int(getattr(text, "hidden_size", 0) or 0) or _usual_width(plan)
        units = [unit for unit in plan.units if unit.is_block]
        blocks = tuple(_block(unit, width, text, index) for index, unit in enumerate(units))
        outside, head_unit, head_shape, head_trained, head_tied = [], "", None, True, False
        for unit in plan.units:
            if unit.is_block:
                continue
            stays_fp32 = any(parameter.stays_fp32 for parameter in unit.parameters)
            outside.append(UnitShape(name=unit.name, parameters=_parameters(unit), stays_fp32=stays_fp32))
            for parameter in unit.parameters:
                if head is not None and parameter.original is head:
                    head_unit, head_trained = unit.name, parameter.trainable
                    head_shape = (parameter.shape[0], parameter.shape[1])
                    head_tied = sum(other is parameter for other in plan.names.values()) > 1
        return ModelShape(
            name=name,
            blocks=blocks,
            outside=tuple(outside),
            head=head_shape,
            head_unit=head_unit,
            head_trained=head_trained,
            head_tied=head_tied,
        )

    @staticmethod
    def from_config(config: Any, name: str = "", adapter: Any = None) -> ModelShape:
        """Of a transformers configuration: its causal language model is built on the meta device. adapter: a
        PeftConfig, whose parameters are then the ones that are trained."""
        import transformers

        make: Any = transformers.AutoModelForCausalLM.from_config  # untyped
        with torch.device("meta"):
            module: nn.Module = make(config)
            if adapter is not None:
                from peft import get_peft_model

                with warnings.catch_warnings():
                    warnings.simplefilter("ignore")  # of a module that came from no directory
                    module = get_peft_model(module, adapter)
        return ModelShape.from_module(module, name)


def _parameters(unit: Unit) -> Parameters:
    return tuple((parameter.numel, parameter.trainable) for parameter in unit.parameters)


def _usual_width(plan: UnitPlan) -> int:
    """The dimension that the blocks' matrices share."""
    counts = Counter(
        side for unit in plan.units if unit.is_block for p in unit.parameters if len(p.shape) == 2 for side in p.shape
    )
    return counts.most_common(1)[0][0] if counts else 1


@dataclass(frozen=True)
class _Product:
    """A weight that tokens are multiplied by. uses: how often a token is, below 1 for an expert among many."""

    flops: float
    other: int
    """The dimension that is not the model's width."""
    uses: float
    trained: bool


def _product(parameter: TiledParameter, width: int, experts: tuple[int, int]) -> _Product | None:
    shape = parameter.shape
    if len(shape) < 2 or "lora_" in parameter.name:
        return None
    active, count = experts
    uses = 1.0
    if len(shape) == 3 or re.search(r"\bexperts\.\d+\.", parameter.name):
        total = shape[0] if len(shape) == 3 else count
        uses = min(active / total, 1.0) if active and total else 1.0
    sides = shape[-2:] if len(shape) <= 3 else (shape[0], shape[1:].numel())
    other = sides[0] if sides[1] == width else sides[1] if sides[0] == width else sides[0]
    repeats = shape[0] if len(shape) == 3 else 1
    return _Product(2.0 * parameter.numel * uses, int(other), uses * repeats, parameter.trainable)


def _block(unit: Unit, width: int, config: Any, index: int) -> BlockShape:
    experts = (_config(config, "num_experts_per_tok", "top_k_experts", "moe_topk"), _count_of_experts(config))
    groups: dict[str, list[_Product]] = {}
    for parameter in unit.parameters:
        product = _product(parameter, width, experts)
        if product is not None:
            path = parameter.name.removeprefix(f"{unit.name}.").split(".")
            groups.setdefault(path[0] if len(path) > 2 else "", []).append(product)
    products = [product for group in groups.values() for product in group]
    attention_width, everything, outputs = 0, 0.0, 0.0
    for place, (name, group) in enumerate(groups.items()):
        # What it reads, normed, and the sum that its output is added to; then each product's output, but the
        # last one's input. Elementwise passes between them are fused.
        *inner, last = group
        inner_outputs = sum(product.other * product.uses for product in inner)
        everything += 2 * width + inner_outputs + last.other * last.uses
        if last.uses > 1:  # rows gathered for experts, and what comes back from them
            everything += 2 * width * last.uses
        outputs += inner_outputs
        if "attn" in name or "attention" in name:
            attention_width = last.other
            outputs += attention_width
        if place + 1 < len(groups):
            outputs += width
    window = 0
    kinds = getattr(config, "layer_types", None) or []
    if index < len(kinds) and "sliding" in kinds[index]:
        window = int(getattr(config, "sliding_window", 0) or 0)
    return BlockShape(
        name=unit.name,
        parameters=_parameters(unit),
        flops=sum(product.flops for product in products),
        trained_flops=sum(product.flops for product in products if product.trained),
        last_flops=products[-1].flops if products else 0.0,
        attention_width=attention_width,
        window=window,
        inputs=width,
        everything=max(int(everything), width),
        products=int(outputs),
    )


def _config(config: Any, *names: str) -> int:
    for name in names:
        value = getattr(config, name, None)
        if isinstance(value, int):
            return value
    return 0


def _count_of_experts(config: Any) -> int:
    return _config(config, "num_local_experts", "num_experts", "n_routed_experts")

