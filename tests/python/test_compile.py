"""Compiled blocks: equal to eager ones, one graph a structure, and a recompile limit that is an error."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import families
import pytest
import torch
from families import FAMILIES
from resident import assert_close

import megatrain
from megatrain.blocks import BlockCaller

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


CASES = [
    Case("llama", shapes=2),
    Case("smollm3"),  # two structures
    Case("gpt2", model=dict(n_layer=2), dropout=True),  # each layer has its own scale
]


def run(case: Case, device: object, *, compile: bool) -> tuple[list[float], dict[str, torch.Tensor]]:
    family = BY_NAME[case.family]
    model = megatrain.StreamedModel(
        families.build(family, dropout=case.dropout, **case.model),
        optimizer=megatrain.AdamW(lr=1e-4, eps=1e-6),
        max_grad_norm=1.0,
        dtype=torch.float32,
        device=device,
        keep_gradients=True,
        compile=compile,
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


def test_one_graph_for_all_layers_of_a_structure(monkeypatch: pytest.MonkeyPatch) -> None:
    torch._dynamo.reset()
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    original = torch.compile
    monkeypatch.setattr(torch, "compile", lambda function, **_: original(function, backend=counter))
    model = megatrain.StreamedModel(families.build(BY_NAME["llama"]), device="cpu", dtype=torch.float32, compile=True)
    batch = BY_NAME["llama"].batch(1)
    model.step([batch, batch])
    graphs = counter.frame_count
    assert graphs == 2  # no-grad forward, recompute with gradients; four layers each
    model.step([batch])
    assert counter.frame_count == graphs


def test_hitting_the_recompile_limit_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(BlockCaller, "RECOMPILE_LIMIT", 1)
    model = megatrain.StreamedModel(families.build(BY_NAME["smollm3"]), device="cpu", dtype=torch.float32, compile=True)
    with pytest.raises(Exception, match=r"(?i)recompile"):
        model.step(BY_NAME["smollm3"].batch(1))
