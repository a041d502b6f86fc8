"""Qwen2.5 shapes with random weights, for benchmarks."""

from __future__ import annotations

import functools
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import nn

VOCABULARY = 152064
SHAPES: dict[str, dict[str, int]] = {
    "0.5b": dict(hidden_size=896, intermediate_size=4864, num_hidden_layers=24, num_attention_heads=14),
    "1.5b": dict(hidden_size=1536, intermediate_size=8960, num_hidden_layers=28, num_attention_heads=12),
    "3b": dict(hidden_size=2048, intermediate_size=11008, num_hidden_layers=36, num_attention_heads=16),
    "7b": dict(hidden_size=3584, intermediate_size=18944, num_hidden_layers=28, num_attention_heads=28),
    "14b": dict(hidden_size=5120, intermediate_size=13824, num_hidden_layers=48, num_attention_heads=40),
    "32b": dict(hidden_size=5120, intermediate_size=27648, num_hidden_layers=64, num_attention_heads=40),
}
KEY_VALUE_HEADS = {"0.5b": 2, "1.5b": 2, "3b": 2, "7b": 4, "14b": 8, "32b": 8}


def attention() -> AbstractContextManager[None]:
    """The kernels that megatrain prefers."""
    from megatrain.attention import preferred_attention

    return preferred_attention(torch.device("cuda"))


def qwen_config(name: str, layers: int | None = None) -> Any:
    from transformers import Qwen2Config

    changes: dict[str, Any] = dict(SHAPES[name], num_key_value_heads=KEY_VALUE_HEADS[name])
    if layers is not None:
        changes["num_hidden_layers"] = layers
    config = Qwen2Config(
        vocab_size=VOCABULARY, max_position_embeddings=32768, tie_word_embeddings=False, use_cache=False, **changes
    )
    config._attn_implementation = "sdpa"
    return config


def meta_model(name: str, layers: int | None = None) -> nn.Module:
    """The module without weights; its buffers are real."""
    from transformers import Qwen2ForCausalLM

    from megatrain.pretrained import large_on_meta

    with large_on_meta():
        return Qwen2ForCausalLM(qwen_config(name, layers)).train()


def resident_layer(name: str, layers: int | None = None) -> tuple[Any, nn.Module, nn.Module]:
    """(configuration, one layer in bf16, rotary embedding), on the GPU."""
    from transformers.models.qwen2.modeling_qwen2 import Qwen2DecoderLayer, Qwen2RotaryEmbedding

    config = qwen_config(name, layers)
    torch.manual_seed(0)
    with torch.device("cuda"):
        return config, Qwen2DecoderLayer(config, 0).to(torch.bfloat16), Qwen2RotaryEmbedding(config)


def random_weights(name: str, parameter: torch.Tensor) -> torch.Tensor:
    """fp32, on the host: normal of deviation 0.02, the same few values again and again; ones for norms, zeros for
    biases."""
    if name.endswith("norm.weight"):
        return torch.ones(parameter.shape)
    if name.endswith("bias"):
        return torch.zeros(parameter.shape)
    block = _random_block()
    repeats = -(-parameter.numel() // block.numel())
    return block.repeat(repeats)[: parameter.numel()].view(parameter.shape)


@functools.cache
def _random_block() -> torch.Tensor:
    return torch.randn(1 << 22, generator=torch.Generator().manual_seed(0)).mul_(0.02)


def fill_random(model: Any) -> None:
    for name, parameter in list(model.named_parameters()):
        model.load_state_dict({name: random_weights(name, parameter)}, strict=False)
