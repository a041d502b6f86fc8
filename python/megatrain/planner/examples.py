"""Shapes of known models, for tables: transformer blocks of attention and a gated product."""

from __future__ import annotations

from megatrain.planner.shape import BlockShape, ModelShape, UnitShape


def llama_like(
    name: str,
    *,
    width: int,
    inner: int,
    blocks: int,
    heads: int,
    shared_heads: int,
    vocabulary: int,
    head_size: int = 0,
    bias: bool = False,
    tied: bool = False,
) -> ModelShape:
    """shared_heads: of keys and values. bias: of the attention's inputs, as Qwen2 has it."""
    attention = heads * (head_size or width // heads)
    shared = attention * shared_heads // heads
    products = [width * attention, width * shared, width * shared, attention * width, *(3 * [width * inner])]
    biases = attention + 2 * shared if bias else 0
    flops = 2.0 * sum(products)
    parameters = [*products, *([biases] if bias else []), width, width]
    stack = tuple(
        BlockShape(
            name=f"model.layers.{index}",
            parameters=tuple((elements, True) for elements in parameters),
            flops=flops,
            trained_flops=flops,
            last_flops=2.0 * width * inner,
            attention_width=attention,
            window=0,
            inputs=width,
            everything=4 * width + 2 * attention + 2 * shared + 3 * inner,
            products=2 * attention + 2 * shared + width + 2 * inner,
        )
        for index in range(blocks)
    )
    embedding = UnitShape(name="model.embed_tokens", parameters=((vocabulary * width, True),))
    norm = UnitShape(name="model.norm", parameters=((width, True),))
    head = UnitShape(name="lm_head", parameters=((vocabulary * width, True),))
    return ModelShape(
        name=name,
        blocks=stack,
        outside=(embedding, norm) if tied else (embedding, norm, head),
        head=(vocabulary, width),
        head_unit="model.embed_tokens" if tied else "lm_head",
        head_tied=tied,
    )


def _llama(
    name: str, width: int, inner: int, blocks: int, heads: int, shared_heads: int = 8, tied: bool = False
) -> ModelShape:
    return llama_like(
        name,
        width=width,
        inner=inner,
        blocks=blocks,
        heads=heads,
        shared_heads=shared_heads,
        vocabulary=128256,
        tied=tied,
    )


def _qwen(name: str, width: int, inner: int, blocks: int, heads: int, shared_heads: int) -> ModelShape:
    return llama_like(
        name,
        width=width,
        inner=inner,
        blocks=blocks,
        heads=heads,
        shared_heads=shared_heads,
        vocabulary=152064,
        bias=True,
    )


def examples() -> tuple[ModelShape, ...]:
    """By their published configurations, the smallest first."""
    return (
        _llama("Llama 3.2 1B", 2048, 8192, 16, 32, tied=True),
        _llama("Llama 3.2 3B", 3072, 8192, 28, 24, tied=True),
        _qwen("Qwen2.5 7B", 3584, 18944, 28, 28, 4),
        _llama("Llama 3.1 8B", 4096, 14336, 32, 32),
        _qwen("Qwen2.5 14B", 5120, 13824, 48, 40, 8),
        _qwen("Qwen2.5 32B", 5120, 27648, 64, 40, 8),
        _llama("Llama 3.1 70B", 8192, 28672, 80, 64),
        llama_like(
            "Mistral Large 123B",
            width=12288,
            inner=28672,
            blocks=88,
            heads=96,
            shared_heads=8,
            vocabulary=32768,
        ),
    )
