"""What the planner reads from a module or a configuration."""

from __future__ import annotations

import pytest
from planned_shapes import H200, SEVEN, SPLIT, block

from megatrain._native import TileFormat
from megatrain.planner import Job, ModelShape
from megatrain.planner.timeline import Steps


def test_a_configuration_gives_the_shape() -> None:
    from transformers import Qwen2Config

    config = Qwen2Config(
        vocab_size=1000,
        hidden_size=64,
        intermediate_size=160,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        tie_word_embeddings=False,
    )
    found = ModelShape.from_config(config)
    assert len(found.blocks) == 3
    assert [unit.name for unit in found.outside] == ["model.embed_tokens", "model.norm", "lm_head"]
    assert (found.head, found.head_unit) == ((1000, 64), "lm_head")
    mine = block(0, width=64, inner=160, heads=64, shared=32)
    first = found.blocks[0]
    assert first.numel == mine.numel
    for name in ("flops", "trained_flops", "last_flops", "attention_width", "inputs", "everything", "products"):
        assert getattr(first, name) == getattr(mine, name), name


def test_a_token_goes_to_few_experts() -> None:
    from transformers import Qwen3MoeConfig

    few, many = (
        ModelShape.from_config(
            Qwen3MoeConfig(
                vocab_size=500,
                hidden_size=64,
                num_hidden_layers=2,
                num_attention_heads=4,
                num_key_value_heads=2,
                head_dim=16,
                moe_intermediate_size=32,
                num_experts=count,
                num_experts_per_tok=2,
            )
        ).blocks[0]
        for count in (4, 16)
    )
    assert many.numel > 2.5 * few.numel
    router = 2.0 * 64 * (16 - 4)
    assert many.flops == pytest.approx(few.flops + router)
    experts = 2 * 3 * 2.0 * 64 * 32
    attention = 4 * 2.0 * 64 * 64 - 2 * 2.0 * 64 * 32
    assert few.flops == pytest.approx(experts + attention + 2.0 * 64 * 4)


def test_windows_and_tied_heads() -> None:
    from transformers import Gemma3TextConfig

    config = Gemma3TextConfig(
        vocab_size=500,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=6,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        sliding_window=32,
    )
    found = ModelShape.from_config(config)
    assert {one.window for one in found.blocks} == {0, 32}
    assert found.blocks[0].attention_flops(1024) == 4.0 * 64 * 32
    assert found.head_unit == found.outside[0].name == "model.embed_tokens"
    assert not Steps(found, Job(), H200).used_last(0)


def test_frozen_parameters_are_neither_updated_nor_differentiated() -> None:
    import torch
    from torch import nn

    module = nn.Module()
    module.layers = nn.ModuleList(nn.Sequential(nn.Linear(32, 64), nn.Linear(64, 32)) for _ in range(2))
    module.layers[0].requires_grad_(False)
    with torch.device("meta"):
        found = ModelShape.from_module(module)
    frozen, trained = found.blocks
    assert (frozen.trained_flops, trained.trained_flops) == (0, trained.flops)
    assert frozen.bytes(SPLIT).update == frozen.bytes(SPLIT).gradients == 0
    assert frozen.bytes(SPLIT).weights > 0


@pytest.mark.parametrize(
    ("weights", "moments", "moved"),
    [("bf16_split", "fp32", 26), ("bf16", "fp32", 22), ("bf16_split", "bf16", 18), ("bf16", "int8", 10.03)],
)
def test_bytes_an_update_moves(weights: str, moments: str, moved: float) -> None:
    one = SEVEN.blocks[0]
    assert one.bytes(TileFormat(weights, moments)).update / one.numel == pytest.approx(moved, rel=1e-3)
