"""Small models of each family, with random weights, and batches for them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import transformers
from torch import nn

VOCABULARY = 67
SMALL = dict(hidden_size=32, intermediate_size=48, num_hidden_layers=4, num_attention_heads=4, vocab_size=VOCABULARY)
GROUPED = dict(**SMALL, num_key_value_heads=2, max_position_embeddings=64, pad_token_id=0)


def _causal(config: Any) -> nn.Module:
    config._attn_implementation = "sdpa"
    return transformers.AutoModelForCausalLM.from_config(config)


def llama(**changes: Any) -> nn.Module:
    return _causal(transformers.LlamaConfig(**{**GROUPED, "tie_word_embeddings": False, **changes}))


def qwen2(**changes: Any) -> nn.Module:
    return _causal(transformers.Qwen2Config(**{**GROUPED, "tie_word_embeddings": True, **changes}))


def qwen3(**changes: Any) -> nn.Module:
    return _causal(transformers.Qwen3Config(**{**GROUPED, "head_dim": 8, "tie_word_embeddings": True, **changes}))


def mistral(**changes: Any) -> nn.Module:
    return _causal(transformers.MistralConfig(**{**GROUPED, "sliding_window": 4, **changes}))


def smollm3(**changes: Any) -> nn.Module:
    return _causal(
        transformers.SmolLM3Config(**{**GROUPED, "no_rope_layer_interval": 2, "tie_word_embeddings": True, **changes})
    )


def gpt2(**changes: Any) -> nn.Module:
    settings = dict(
        n_embd=32, n_layer=4, n_head=4, vocab_size=VOCABULARY, n_positions=64, scale_attn_by_inverse_layer_idx=True
    )
    return _causal(transformers.GPT2Config(**{**settings, **changes}))


def t5(**changes: Any) -> nn.Module:
    # No ReLU: after some steps rounding, which differs between processors, decides which of its units are on.
    settings = dict(
        d_model=32, d_kv=8, d_ff=48, num_layers=3, num_heads=4, vocab_size=VOCABULARY, decoder_start_token_id=0,
        tie_word_embeddings=True, feed_forward_proj="gated-gelu",
    )
    return transformers.T5ForConditionalGeneration(transformers.T5Config(**{**settings, **changes}))


def vit(**changes: Any) -> nn.Module:
    settings = dict(
        hidden_size=32, intermediate_size=48, num_hidden_layers=4, num_attention_heads=4, image_size=16, patch_size=4,
        num_labels=5,
    )
    return transformers.ViTForImageClassification(transformers.ViTConfig(**{**settings, **changes}))


def text_batch(seed: int, rows: int = 2, length: int = 9, left_padding: int = 3) -> dict[str, torch.Tensor]:
    """Token rows; the first is padded on the left. Labels: padding and some tokens ignored."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(1, VOCABULARY, (rows, length), generator=generator)
    mask = torch.ones_like(ids)
    if left_padding:
        ids[0, :left_padding] = 0
        mask[0, :left_padding] = 0
    labels = ids.masked_fill(mask == 0, -100)
    labels[-1, -2] = -100
    return dict(input_ids=ids, attention_mask=mask, labels=labels)


def translation_batch(seed: int, **sizes: Any) -> dict[str, torch.Tensor]:
    source = text_batch(seed, **sizes)
    target = text_batch(seed + 1000, rows=source["input_ids"].shape[0], length=6, left_padding=0)
    return dict(input_ids=source["input_ids"], attention_mask=source["attention_mask"], labels=target["labels"])


def image_batch(seed: int, rows: int = 2, **_: Any) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return dict(
        pixel_values=torch.randn(rows, 3, 16, 16, generator=generator),
        labels=torch.randint(0, 5, (rows,), generator=generator),
    )


@dataclass(frozen=True)
class Family:
    name: str
    make: Callable[..., nn.Module]
    batch: Callable[..., dict[str, torch.Tensor]]
    dropout: dict[str, float]
    embedding: str
    """The parameter that a frozen-embedding run freezes."""
    far_in_bf16: bool = False
    """Plain bf16 is itself far from fp32."""


FAMILIES = [
    Family("llama", llama, text_batch, dict(attention_dropout=0.1), "model.embed_tokens.weight"),
    Family("qwen2", qwen2, text_batch, dict(attention_dropout=0.1), "model.embed_tokens.weight"),
    Family("qwen3", qwen3, text_batch, dict(attention_dropout=0.1), "model.embed_tokens.weight"),
    Family("mistral", mistral, text_batch, dict(attention_dropout=0.1), "model.embed_tokens.weight"),
    Family("smollm3", smollm3, text_batch, dict(attention_dropout=0.1), "model.embed_tokens.weight"),
    Family(
        "gpt2", gpt2, text_batch, dict(resid_pdrop=0.1, embd_pdrop=0.1, attn_pdrop=0.1), "transformer.wte.weight"
    ),
    Family("t5", t5, translation_batch, dict(dropout_rate=0.1), "shared.weight", far_in_bf16=True),
    Family("vit", vit, image_batch, dict(hidden_dropout_prob=0.1), "vit.embeddings.cls_token"),
]


def build(family: Family, *, dropout: bool = False, **changes: Any) -> nn.Module:
    """The family's model, the same weights at every call; dropout off unless asked for."""
    off = {name: 0.0 for name in family.dropout}
    torch.manual_seed(1234)
    model = family.make(**{**(family.dropout if dropout else off), **changes})
    with torch.no_grad():  # norms and biases off their special values, so that a mistake shows
        generator = torch.Generator().manual_seed(99)
        for parameter in model.parameters():
            if parameter.dim() <= 1:
                parameter.add_(0.1 * torch.randn(parameter.shape, generator=generator))
            else:
                parameter.add_(0.02 * torch.randn(parameter.shape, generator=generator))
    return model.train()
