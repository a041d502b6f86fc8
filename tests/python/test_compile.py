"""Compiled blocks: equal to eager ones, one graph a structure, and a recompile limit that is an error."""

from __future__ import annotations

from typing import Any

import families
import pytest
import torch
from families import FAMILIES, Family
from resident import assert_close

import megatrain
from megatrain.blocks import BlockCaller

BY_NAME = {family.name: family for family in FAMILIES}


@pytest.fixture(autouse=True)
def private_cache(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "inductor"))
    torch._dynamo.reset()


def run(family: Family, device: object, **changes: Any) -> tuple[list[float], dict[str, torch.Tensor]]:
    model = megatrain.StreamedModel(
        families.build(family, dropout=changes.pop("dropout", False)),
        optimizer=megatrain.AdamW(lr=1e-4, eps=1e-6),
        max_grad_norm=1.0,
        dtype=torch.float32,
        device=device,
        keep_gradients=True,
        **changes,
    )
    losses = []
    for step in range(3):
        losses.append(model.step([family.batch(step), family.batch(step + 9, rows=3, length=11)]).loss)
    model.synchronize()
    gradients = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
    model.close()
    return losses, gradients


@pytest.mark.parametrize("name", ["llama", "smollm3", "gpt2"])
def test_inductor_equals_eager(name: str, device: object) -> None:
    eager_losses, eager = run(BY_NAME[name], device, compile=False)
    losses, compiled = run(BY_NAME[name], device, compile=True)
    assert losses == pytest.approx(eager_losses, rel=1e-5)
    for parameter, gradient in eager.items():
        assert_close(compiled[parameter], gradient, 1e-4, parameter)


def test_inductor_draws_the_same_dropout(device: object) -> None:
    eager_losses, _ = run(BY_NAME["gpt2"], device, compile=False, dropout=True)
    losses, _ = run(BY_NAME["gpt2"], device, compile=True, dropout=True)
    assert losses == pytest.approx(eager_losses, rel=1e-5)


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
