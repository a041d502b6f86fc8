"""Inputs that broke systems of this kind: experts that get no tokens."""

from __future__ import annotations

import warnings

import pytest
import torch
from case_models import Toy, WithLoss, assert_same_parameters, reference, stream, toy_batch
from resident import assert_close
from torch import nn

import megatrain


class ListedExperts(nn.Module):
    """All rows go to the expert `chosen`."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.chosen = 0
        self.experts = nn.ModuleList(nn.Linear(width, width) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        chosen = torch.full((len(x),), self.chosen)
        y = torch.zeros_like(x)
        for index, expert in enumerate(self.experts):
            rows = chosen == index
            if rows.any():
                y[rows] = expert(x[rows])
        return x + y


class StackedExperts(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(3, width, width) / width**0.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + x @ self.weight[0]


@pytest.mark.parametrize("kind", [ListedExperts, StackedExperts])
def test_experts_without_tokens(kind: type[nn.Module]) -> None:
    torch.manual_seed(0)
    inner = Toy()
    inner.layers = nn.ModuleList(kind(16) for _ in range(3))
    module = WithLoss(inner)
    resident, model = reference(module), stream(module)
    before = model.state_dict()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for step in range(4):
            loss, _, _ = resident.step([toy_batch(step)])
            assert model.step([toy_batch(step)]).loss == pytest.approx(loss, rel=1e-6)
    assert_same_parameters(model, resident)
    if kind is ListedExperts:
        after = model.state_dict()
        idle = [name for name in before if ".experts.1." in name or ".experts.2." in name]
        assert len(idle) == 12
        for name in idle:
            assert torch.equal(before[name], after[name]), name
        states = model.optimizer.state_dict()["state"]
        assert len(states) == len([n for n, _ in model.named_parameters() if "unused" not in n and n not in idle])


@pytest.mark.parametrize("way", ["step", "backward"])
@pytest.mark.parametrize("resident_blocks", [0, 2])
def test_experts_that_get_tokens_now_and_then(way: str, resident_blocks: int) -> None:
    """Expert 1 in step 1 and again in step 4: in between its weights, moments and step count stand still, and the
    norm is that of the other gradients."""
    torch.manual_seed(0)
    inner = Toy()
    inner.layers = nn.ModuleList(ListedExperts(16) for _ in range(3))
    module = WithLoss(inner)
    resident = reference(module, max_grad_norm=0.1)
    model = stream(module, max_grad_norm=0.1, placement=megatrain.Placement.spread(3, resident=resident_blocks))
    faces = dict(model.named_parameters())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for step, chosen in enumerate([0, 1, 0, 0, 1, 2]):
            for owner in (inner, resident.module.inner):
                for layer in owner.layers:
                    layer.chosen = chosen
            batches = [toy_batch(2 * step), toy_batch(2 * step + 1)]
            loss, norm, _ = resident.step(batches)
            if way == "step":
                assert model.step(batches).loss == pytest.approx(loss, rel=1e-6)
            else:
                for batch in batches:
                    (model(**batch).loss / 2).backward()
                model.optimizer.step()
            assert model.last_grad_norm == pytest.approx(norm, rel=1e-5)
    assert_same_parameters(model, resident)
    counts = {0: 3.0, 1: 2.0, 2: 1.0}
    for name, parameter in resident.module.named_parameters():
        if ".experts." in name:
            ours, theirs = model.optimizer.state[faces[name]], resident.optimizer.state[parameter]
            assert float(ours["step"]) == float(theirs["step"]) == counts[int(name.split(".experts.")[1][0])]
            assert_close(ours["exp_avg"], theirs["exp_avg"], 2e-5, f"exp_avg of {name}")
