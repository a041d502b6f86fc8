"""What the tests of cases share: models that are streamed on an adversarial host backend, beside plain PyTorch."""

from __future__ import annotations

from typing import Any

import torch
from families import FAMILIES
from resident import Resident, assert_close
from torch import nn

import megatrain

LLAMA = FAMILIES[0]


def adversarial(**changes: Any) -> megatrain.HostBackend:
    return megatrain.HostBackend(**{"max_delay_us": 300, "seed": 11, "poison": True, **changes})


def stream(module: nn.Module, **changes: Any) -> megatrain.StreamedModel:
    settings: dict[str, Any] = dict(
        optimizer=megatrain.AdamW(lr=1e-4, weight_decay=0.1),
        max_grad_norm=1.0,
        dtype=torch.float32,
        device=adversarial(),
        keep_gradients=True,
    )
    return megatrain.StreamedModel(module, **{**settings, **changes})


def reference(module: nn.Module, **changes: Any) -> Resident:
    return Resident(module, **{**dict(max_grad_norm=1.0, lr=1e-4, weight_decay=0.1), **changes})


def assert_same_parameters(model: megatrain.StreamedModel, resident: Resident, tolerance: float = 1e-5) -> None:
    state = model.state_dict()
    for name, parameter in resident.module.named_parameters():
        assert_close(state[name], parameter, tolerance, name)


class Toy(nn.Module):
    """A stack of blocks with an unused layer outside and a parameter in each block that may be unused."""

    def __init__(self, blocks: int = 4, width: int = 16, skip_middle: bool = False) -> None:
        super().__init__()
        self.inlet = nn.Linear(width, width)
        self.layers = nn.ModuleList(ToyBlock(width, skip_middle) for _ in range(blocks))
        self.unused = nn.Linear(width, width)
        self.outlet = nn.Linear(width, 1)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> dict[str, torch.Tensor]:
        x = self.inlet(x)
        for layer in self.layers:
            x = layer(x)
        return {"loss": nn.functional.mse_loss(self.outlet(x), y)}


class ToyBlock(nn.Module):
    def __init__(self, width: int, skip_middle: bool) -> None:
        super().__init__()
        self.first = nn.Linear(width, width)
        self.middle = nn.Linear(width, width)
        self.last = nn.Linear(width, width)
        self.skip_middle = skip_middle

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = torch.tanh(self.first(x))
        if not self.skip_middle:
            y = torch.tanh(self.middle(y))
        return x + self.last(y)


def toy_batch(seed: int, rows: int = 6, width: int = 16) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return dict(x=torch.randn(rows, width, generator=generator), y=torch.randn(rows, 1, generator=generator))


class WithLoss(nn.Module):
    """Gives a dict output the attribute that the reference reads."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, **batch: torch.Tensor) -> Any:
        output = self.inner(**batch)
        return type("Output", (), {"loss": output["loss"]})()


def toy(**changes: Any) -> WithLoss:
    torch.manual_seed(3)
    return WithLoss(Toy(**changes))
