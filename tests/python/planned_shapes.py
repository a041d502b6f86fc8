"""Shapes of models for tests of the planner."""

from __future__ import annotations

from typing import Any

from megatrain._native import TileFormat
from megatrain.planner import PRESETS, Batch, Job, ModelShape
from megatrain.planner.shape import BlockShape, UnitShape

H200 = PRESETS["H200"]
SPLIT = TileFormat("bf16_split", "fp32")


def block(index: int, width: int = 3584, inner: int = 18944, heads: int = 3584, shared: int = 512) -> BlockShape:
    """A Llama-like one: attention, then three products."""
    attention = [width * heads, width * shared, width * shared, heads * width]
    products = [*attention, width * inner, width * inner, inner * width]
    return BlockShape(
        name=f"model.layers.{index}",
        parameters=tuple((elements, True) for elements in (*products, heads + 2 * shared, 2 * width)),
        flops=2.0 * sum(products),
        trained_flops=2.0 * sum(products),
        last_flops=2.0 * inner * width,
        attention_width=heads,
        window=0,
        inputs=width,
        everything=4 * width + 2 * heads + 2 * shared + 3 * inner,
        products=2 * heads + 2 * shared + width + 2 * inner,
    )


def model(blocks: int = 28, vocabulary: int = 152064, **sizes: int) -> ModelShape:
    """Of Qwen2.5-7B unless told otherwise."""
    width = sizes.get("width", 3584)
    embedding = UnitShape(name="model.embed_tokens", parameters=((vocabulary * width, True),))
    norm = UnitShape(name="model.norm", parameters=((width, True),))
    head = UnitShape(name="lm_head", parameters=((vocabulary * width, True),))
    return ModelShape(
        name=f"{blocks} blocks",
        blocks=tuple(block(index, **sizes) for index in range(blocks)),
        outside=(embedding, norm, head),
        head=(vocabulary, width),
        head_unit="lm_head",
    )


SEVEN = model()


def small(length: int = 1024, **changes: Any) -> tuple[ModelShape, Job]:
    shape = model(blocks=3, vocabulary=32000)
    return shape, Job(**dict(batch=Batch(micro_batches=2, rows=8, length=length)) | changes)
