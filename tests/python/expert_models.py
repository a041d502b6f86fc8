"""Small mixtures of experts, and which experts of a resident one got tokens."""

from __future__ import annotations

from typing import Any

import torch
from families import text_batch
from family_zoo import LATENT, Batch, causal
from torch import nn
from transformers.models.mixtral.modeling_mixtral import MixtralExperts, MixtralTopKRouter

import megatrain
from megatrain import Placement

EXPERTS = dict(num_experts=8, num_local_experts=8, n_routed_experts=8, num_experts_per_tok=2)
ROWS = {
    row.name: row
    for row in (
        causal("mixtral", "Mixtral", **EXPERTS),
        causal("qwen3_moe", "Qwen3Moe", **EXPERTS),
        causal("deepseek_v3", "DeepseekV3", **{**EXPERTS, **LATENT}),  # with shared experts and router biases
    )
}
HYPERPARAMETERS = dict(lr=1e-3, weight_decay=0.1, eps=1e-4)
SELECTED = Placement(experts="selected")


def stream(module: nn.Module, **settings: Any) -> megatrain.StreamedModel:
    return megatrain.StreamedModel(
        module,
        **{
            **dict(
                dtype=torch.float32,
                device=megatrain.HostBackend(max_delay_us=100, seed=3, poison=True),
                compile=False,
                keep_gradients=True,
                self_check=False,
                placement=SELECTED,
                optimizer=megatrain.AdamW(**HYPERPARAMETERS),
            ),
            **settings,
        },
    )


def few_tokens(seed: int) -> list[Batch]:
    """Two micro-batches whose tokens are too few for all experts."""
    return [text_batch(seed, rows=1, length=3, left_padding=0), text_batch(seed + 1, rows=1, length=4, left_padding=1)]


class Watch:
    """Which experts got tokens in a resident module, by block and in the order of the calls."""

    def __init__(self, module: nn.Module) -> None:
        self.calls: list[tuple[int, frozenset[int]]] = []
        for index, layer in enumerate(module.model.layers):
            for inner in layer.modules():
                if hasattr(inner, "gate_up_proj") and inner.gate_up_proj.dim() == 3:
                    inner.register_forward_pre_hook(
                        lambda _, args, index=index: self.calls.append((index, frozenset(args[1].unique().tolist())))
                    )

    def take(self) -> dict[int, frozenset[int]]:
        """The union of each block's calls, forgotten here."""
        used: dict[int, frozenset[int]] = {}
        for index, experts in self.calls:
            used[index] = used.get(index, frozenset()) | experts
        self.calls.clear()
        return used


class ForcedRouter(MixtralTopKRouter):
    """All tokens go to the expert `chosen`, those of a micro-batch of three rows of seven to the one after it."""

    chosen = 0

    def forward(self, hidden_states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        logits = nn.functional.linear(hidden_states.reshape(-1, hidden_states.shape[-1]), self.weight)
        index = torch.full((logits.shape[0], 1), (self.chosen + (logits.shape[0] == 21)) % self.weight.shape[0])
        return logits, logits.softmax(-1).gather(1, index), index


def forced(**changes: Any) -> nn.Module:
    module = causal("mixtral", "Mixtral", num_local_experts=4, num_experts_per_tok=1, **changes).build()
    for layer in module.model.layers:
        layer.mlp.gate.__class__ = ForcedRouter
    return module


def choose(layers: Any, experts: list[int]) -> None:
    for layer, expert in zip(layers, experts, strict=True):
        layer.mlp.gate.chosen = expert


def read_all(layers: Any) -> None:
    """Give the experts modules of the layers forwards that read every expert."""
    for layer in layers:
        experts = layer.mlp.experts
        experts.forward = lambda *given, own=experts.forward, it=experts: own(*given) + it.down_proj.square().sum()


class OwnForward(MixtralExperts):
    def forward(self, hidden_states: torch.Tensor, *_: Any) -> torch.Tensor:
        return hidden_states @ self.down_proj.sum(0).T
