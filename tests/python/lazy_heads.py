"""Small models with lazy and with plain heads, and pairs of lazy and plain logits."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from torch.nn import functional as F

from megatrain.logits import LazyLogits, LogitsSettings, lazy_head, mirror_labels, strip_mirror

VOCABULARY = 61
SIZES = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
DECODER = {**SIZES, "num_key_value_heads": 2, "vocab_size": VOCABULARY, "max_position_embeddings": 64}


def assert_near(actual: Tensor, expected: Tensor, relative: float, floor: float = 0.0) -> None:
    """Every element within `relative` of the largest one, or within `floor`."""
    assert actual.shape == expected.shape
    assert bool(expected.isfinite().all())
    actual, expected = actual.detach().double(), expected.detach().double()
    bound = relative * float(expected.abs().max()) if expected.numel() else 0.0
    torch.testing.assert_close(actual, expected, rtol=0, atol=max(bound, floor))


def decoder(name: str, **changes: Any) -> nn.Module:
    config = getattr(transformers, f"{name}Config")(**{**DECODER, **changes})
    return getattr(transformers, f"{name}ForCausalLM")(config)  # type: ignore[no-any-return]


MODELS: dict[str, Callable[[], nn.Module]] = {
    "llama": lambda: decoder("Llama"),
    "llama tied": lambda: decoder("Llama", tie_word_embeddings=True),
    "qwen2": lambda: decoder("Qwen2"),
    "mistral": lambda: decoder("Mistral", sliding_window=4),
    "gemma2 soft cap": lambda: decoder("Gemma2", head_dim=8, final_logit_softcapping=2.0),
    "cohere scale": lambda: decoder("Cohere", logit_scale=0.0625, pad_token_id=0),
    "granite divisor": lambda: decoder("Granite", logits_scaling=8.0),
    "gpt2": lambda: transformers.GPT2LMHeadModel(
        transformers.GPT2Config(
            vocab_size=VOCABULARY,
            n_positions=64,
            n_embd=32,
            n_layer=2,
            n_head=4,
            bos_token_id=1,
            eos_token_id=2,
        )
    ),
    "gptj biased": lambda: transformers.GPTJForCausalLM(
        transformers.GPTJConfig(
            vocab_size=VOCABULARY, n_positions=64, n_embd=32, n_layer=2, n_head=4, rotary_dim=8, n_inner=48
        )
    ),
    "t5": lambda: transformers.T5ForConditionalGeneration(
        transformers.T5Config(
            vocab_size=VOCABULARY,
            d_model=32,
            d_kv=8,
            d_ff=48,
            num_layers=2,
            num_heads=4,
            decoder_start_token_id=0,
        )
    ),
    "bart added bias": lambda: transformers.BartForConditionalGeneration(
        transformers.BartConfig(
            vocab_size=VOCABULARY,
            max_position_embeddings=64,
            d_model=32,
            encoder_layers=2,
            decoder_layers=2,
            encoder_attention_heads=4,
            decoder_attention_heads=4,
            encoder_ffn_dim=48,
            decoder_ffn_dim=48,
        )
    ),
}


def build(name: str, dtype: torch.dtype = torch.float32) -> nn.Module:
    torch.manual_seed(11)
    model = MODELS[name]().to(dtype).eval()  # without dropout
    head = model.get_output_embeddings()  # type: ignore[operator]
    # Logits of some size, else a soft cap does nothing.
    with torch.no_grad():
        head.weight.mul_(8.0)
        if head.bias is not None:
            head.bias.normal_()
    return model


def batch_of(device: str = "cpu", *, mirrored: bool = False) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(3)
    tokens = torch.randint(3, VOCABULARY, (3, 11), generator=generator)
    mask = torch.ones_like(tokens)
    mask[0, :4] = 0
    labels = tokens.masked_fill(mask == 0, -100)
    labels[1, 8:] = -100
    on_device = labels.to(device)
    return {
        "input_ids": tokens.to(device),
        "attention_mask": mask.to(device),
        "labels": mirror_labels(on_device, labels) if mirrored else on_device,
    }


def loss_and_gradients(model: nn.Module, batch: dict[str, Any]) -> tuple[Tensor, dict[str, Tensor]]:
    model.zero_grad()
    loss = model(**batch).loss
    loss.backward()
    return loss.detach(), {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}


def compare(
    model: nn.Module, batch: dict[str, Any], loss_tolerance: float, tolerance: float, **options: Any
) -> None:
    plain = {k: strip_mirror(v) if isinstance(v, Tensor) else v for k, v in batch.items()}
    expected_loss, expected = loss_and_gradients(model, plain)
    full: list[str] = []
    with lazy_head(model.get_output_embeddings(), full.append, **options):  # type: ignore[operator]
        loss, gradients = loss_and_gradients(model, batch)
    assert full == []
    assert_near(loss, expected_loss, loss_tolerance)
    assert gradients.keys() == expected.keys()
    # Biases of attention keys have a gradient of exactly zero, up to rounding: softmax does not see them.
    floor = 1e-4 * tolerance * max(float(g.abs().max()) for g in expected.values())
    for name, gradient in gradients.items():
        assert_near(gradient, expected[name], tolerance, floor)


class Pair:
    """Lazy logits (2, 6, V) and plain ones of the same leaves."""

    def __init__(self, *, bias: bool = True, on_full: Callable[[str], None] | None = None) -> None:
        generator = torch.Generator().manual_seed(5)
        self.hidden = torch.randn(2, 6, 8, generator=generator, requires_grad=True)
        self.weight = torch.randn(VOCABULARY, 8, generator=generator, requires_grad=True)
        self.bias = torch.randn(VOCABULARY, generator=generator, requires_grad=True) if bias else None
        self.full: list[str] = []
        self.settings = LogitsSettings(on_full or self.full.append, chunk_rows=5)
        self.lazy = LazyLogits(self.hidden, self.weight, self.bias, self.settings)
        self.plain = F.linear(self.hidden, self.weight, self.bias)
        self.leaves = [x for x in (self.hidden, self.weight, self.bias) if x is not None]

    def gradients(self, result: Tensor) -> list[Tensor]:
        return list(torch.autograd.grad(result, self.leaves, retain_graph=True))
