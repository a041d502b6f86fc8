"""Compiled blocks: equal to eager ones, one graph a structure, and a recompile limit that is an error."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import families
import pytest
import torch
from families import FAMILIES
from resident import assert_close
from torch._dynamo.testing import CompileCounterWithBackend

import megatrain
from megatrain import BlockPlacement, Placement, graph_limit
from megatrain.blocks import BlockCaller
from megatrain.kept import Keeper

BY_NAME = {family.name: family for family in FAMILIES}


@pytest.fixture(autouse=True)
def private_cache(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "inductor"))
    torch._dynamo.reset()


@dataclass(frozen=True)
class Case:
    """Each graph costs seconds of compiling: what the three differ in is left out of the other two."""

    family: str
    shapes: int = 1
    """Of micro-batches: with two, sizes become symbols."""
    model: dict[str, int] = field(default_factory=dict)
    dropout: bool = False


STREAMED = Placement()
CASES = [
    Case("llama", shapes=2),
    Case("smollm3"),  # two structures
    Case("gpt2", model=dict(n_layer=2), dropout=True),  # each layer has its own scale
]


def run(
    case: Case, device: object, *, compile: bool, placement: Placement = STREAMED
) -> tuple[list[float], dict[str, torch.Tensor]]:
    family = BY_NAME[case.family]
    model = megatrain.StreamedModel(
        families.build(family, dropout=case.dropout, **case.model),
        optimizer=megatrain.AdamW(lr=1e-4, eps=1e-6),
        max_grad_norm=1.0,
        dtype=torch.float32,
        device=device,
        keep_gradients=True,
        compile=compile,
        placement=placement,
    )
    second = dict(rows=3, length=11) if case.shapes == 2 else {}
    losses = []
    for step in range(3):
        losses.append(model.step([family.batch(step), family.batch(step + 9, **second)]).loss)
    model.synchronize()
    gradients = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
    model.close()
    return losses, gradients


@pytest.mark.parametrize("case", CASES, ids=[case.family for case in CASES])
def test_inductor_equals_eager(case: Case, device: object) -> None:
    eager_losses, eager = run(case, device, compile=False)
    losses, compiled = run(case, device, compile=True)
    assert losses == pytest.approx(eager_losses, rel=1e-5)
    assert set(compiled) == set(eager)
    for parameter, gradient in eager.items():
        assert_close(compiled[parameter], gradient, 1e-4, parameter)


def count_blocks(monkeypatch: pytest.MonkeyPatch) -> CompileCounterWithBackend:
    """Blocks are traced, and counted; what else is compiled on a GPU (losses) is compiled."""
    counter = CompileCounterWithBackend("aot_eager")
    original = torch.compile

    def compiled(function: Any, **settings: Any) -> Any:
        is_block = function.__module__ == BlockCaller.__module__
        return original(function, backend=counter) if is_block else original(function, **settings)

    monkeypatch.setattr(torch, "compile", compiled)
    return counter


@pytest.mark.parametrize("name", ["qwen2", "qwen3", "mistral", "vit"])
def test_traced_blocks_equal_eager_ones(name: str, device: object, monkeypatch: pytest.MonkeyPatch) -> None:
    """Families that would cost too much to compile: their graphs, forward and backward, run operator by operator."""
    eager_losses, eager = run(Case(name), device, compile=False)
    counter = count_blocks(monkeypatch)
    losses, traced = run(Case(name), device, compile=True)
    assert counter.frame_count == 1
    assert losses == pytest.approx(eager_losses, rel=1e-5)
    assert set(traced) == set(eager)
    for parameter, gradient in eager.items():
        assert_close(traced[parameter], gradient, 1e-4, parameter)


def test_inductor_keeps_what_the_placement_says(device: object, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("megatrain.kept.SHELF_LEAST_BYTES", 1)
    kept = [0]
    keep_one = Keeper.keep

    def counted(keeper: Keeper, tensor: torch.Tensor) -> Any:
        kept[0] += tensor.numel() * tensor.element_size()
        return keep_one(keeper, tensor)

    monkeypatch.setattr(Keeper, "keep", counted)
    case = Case("llama", model=dict(num_hidden_layers=2))
    eager_losses, eager = run(case, device, compile=False)
    sizes = []
    for keep, side, order in (
        ("inputs", "host", "layer-major"),
        ("selected", "device", "micro-batch-major"),
        ("everything", "host", "layer-major"),
    ):
        kept[0] = 0
        placement = Placement(order=order, blocks=(BlockPlacement(keep=keep, kept_on=side),))
        losses, compiled = run(case, device, compile=True, placement=placement)
        sizes.append(kept[0])
        assert losses == pytest.approx(eager_losses, rel=1e-5)
        for parameter, gradient in eager.items():
            assert_close(compiled[parameter], gradient, 1e-4, parameter)
    assert sizes[0] < sizes[1] < sizes[2]


def test_one_graph_for_all_layers_of_a_structure(monkeypatch: pytest.MonkeyPatch) -> None:
    torch._dynamo.reset()
    counter = count_blocks(monkeypatch)
    model = megatrain.StreamedModel(families.build(BY_NAME["llama"]), device="cpu", dtype=torch.float32, compile=True)
    batch = BY_NAME["llama"].batch(1)
    model.step([batch, batch])
    graphs = counter.frame_count
    assert graphs == 1  # the forward with gradients; four layers
    model.step([batch])
    assert counter.frame_count == graphs


def test_hitting_the_recompile_limit_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(graph_limit, "MOST_GRAPHS", 1)
    model = megatrain.StreamedModel(families.build(BY_NAME["smollm3"]), device="cpu", dtype=torch.float32, compile=True)
    with pytest.raises(Exception, match=r"(?i)recompile"):
        model.step(BY_NAME["smollm3"].batch(1))
