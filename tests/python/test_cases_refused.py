"""What cannot be streamed exactly is refused by name."""

from __future__ import annotations

import random
from typing import Any

import families
import numpy as np
import pytest
import torch
from case_models import LLAMA, Toy, ToyBlock, stream, toy_batch
from families import llama, text_batch
from torch import nn

import megatrain


def test_create_graph_is_refused() -> None:
    model = stream(families.build(LLAMA))
    with pytest.raises(RuntimeError, match="create_graph"):  # the loss in chunks
        model(**text_batch(1)).loss.backward(create_graph=True)
    with pytest.raises(megatrain.UnsupportedModelError, match=r"layers\.3: create_graph"):
        stream(Toy())(**toy_batch(1))["loss"].backward(create_graph=True)


def test_nothing_to_stream_is_refused() -> None:
    with pytest.raises(megatrain.UnsupportedModelError, match="ModuleList"):
        stream(nn.Linear(3, 3))


def test_foreign_dtype_is_refused_by_name() -> None:
    module = families.build(LLAMA)
    module.model.norm.weight.data = module.model.norm.weight.data.double()
    with pytest.raises(ValueError, match=r"model\.norm\.weight is torch\.float64"):
        stream(module)


def test_non_finite_weights_are_refused_by_name() -> None:
    module = families.build(LLAMA)
    with torch.no_grad():
        module.model.layers[2].mlp.up_proj.weight[0, 0] = float("nan")
    with pytest.raises(ValueError, match=r"model\.layers\.2\.mlp\.up_proj\.weight"):
        stream(module)


def test_meta_module_without_values_is_refused() -> None:
    with torch.device("meta"):
        module = llama()
    model = stream(module)
    with pytest.raises(RuntimeError, match=r"meta.*load_state_dict"):
        model.step(text_batch(1))


class CountingBlock(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls.add_(1)
        return x + self.linear(x)


def test_buffers_written_in_forward_are_refused_by_name() -> None:
    inner = Toy()
    inner.layers = nn.ModuleList(CountingBlock(16) for _ in range(2))
    with pytest.raises(megatrain.UnsupportedModelError, match=r"layers\.0 writes its buffer calls"):
        stream(inner).step(toy_batch(1))


class RenormingBlock(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            self.linear.weight.clamp_(-0.1, 0.1)
        return x + self.linear(x)


@pytest.mark.parametrize("resident", [0, 2])
@pytest.mark.parametrize("everything", [0, 2])
def test_parameters_written_in_forward_are_refused_by_name(resident: int, everything: int) -> None:
    inner = Toy()
    inner.layers = nn.ModuleList(RenormingBlock(16) for _ in range(2))
    placement = megatrain.Placement.spread(2, resident=resident, everything=everything)
    model = stream(inner, self_check=False, placement=placement)
    with pytest.raises(megatrain.UnsupportedModelError, match=r"layers\.0 writes its parameter linear\.weight"):
        model.step(toy_batch(1))


class Skipping(ToyBlock):
    """Stochastic depth by a generator that is not torch's."""

    def __init__(self, draw: Any) -> None:
        super().__init__(16, False)
        self.draw = draw

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) if self.draw() < 0.9 else x


@pytest.mark.parametrize("draw", [random.random, np.random.rand, np.random.randn])
def test_blocks_that_draw_from_other_generators_are_refused_by_name(draw: Any) -> None:
    inner = Toy()
    inner.layers = nn.ModuleList(Skipping(draw) for _ in range(2))
    with pytest.raises(megatrain.UnsupportedModelError, match=r"layers\.0 draws from Python's or numpy's random"):
        stream(inner).step(toy_batch(1))


@pytest.mark.parametrize("way", ["step", "backward"])
def test_caches_in_training_are_refused_by_name(way: str) -> None:
    model = stream(families.build(LLAMA))
    with pytest.raises(megatrain.UnsupportedModelError, match=r"layers\.0 was given a DynamicCache.*use_cache=False"):
        if way == "step":
            model.step(dict(text_batch(1), use_cache=True))
        else:
            model(**text_batch(1), use_cache=True).loss.backward()


def test_recurrent_modules_are_refused_by_name() -> None:
    inner = Toy()
    inner.recurrent = nn.LSTM(4, 4)
    with pytest.raises(megatrain.UnsupportedModelError, match=r"recurrent \(LSTM\).*_flat_weights"):
        stream(inner)
