"""Inputs that broke systems of this kind: what runs beside, between and after what, and in which surroundings."""

from __future__ import annotations

import threading
from typing import Any

import families
import numpy as np
import pytest
import torch
from case_models import LLAMA, adversarial, assert_same_parameters, reference, stream
from families import text_batch

import megatrain

# 23, 32: order and re-entrancy


def test_fifty_steps_under_random_delays_equal_the_quiet_run() -> None:
    quiet = stream(families.build(LLAMA), device=megatrain.HostBackend())
    noisy = [
        stream(families.build(LLAMA), device=adversarial(max_delay_us=900, seed=seed), slots=slots, threads=threads)
        for seed, slots, threads in ((1, 2, 1), (2, 3, 2), (3, 4, 5))
    ]
    for step in range(50):
        batches = [text_batch(step), text_batch(step + 500, rows=1)]
        expected = quiet.step(batches).loss
        for model in noisy:
            assert model.step(batches).loss == expected
    for name, values in quiet.state_dict().items():
        for model in noisy:
            assert torch.equal(values, model.state_dict()[name]), name


def test_evaluation_and_generation_between_steps_change_nothing() -> None:
    plain, busy = stream(families.build(LLAMA, dropout=True)), stream(families.build(LLAMA, dropout=True))
    for step in range(4):
        assert plain.step(text_batch(step)).loss == busy.step(text_batch(step)).loss
        busy.evaluate([text_batch(step), text_batch(99)])
        with torch.no_grad():
            busy.eval()
            busy(input_ids=text_batch(5)["input_ids"]).logits.sum()
            busy.train()
    for name, values in plain.state_dict().items():
        assert torch.equal(values, busy.state_dict()[name]), name


def test_as_many_forwards_of_an_evaluation_are_under_way_as_of_a_step() -> None:
    model = stream(families.build(LLAMA))
    batches = [text_batch(seed, rows=1 + seed % 2) for seed in range(12)]
    under_way: list[int] = []

    def count(*_: object) -> None:
        under_way.append(sum(thread.name == "megatrain-forward" for thread in threading.enumerate()))

    model.module.register_forward_pre_hook(count)
    most, losses = {}, {}
    for order in ("layer-major", "micro-batch-major"):
        model.place(megatrain.Placement(order=order))
        under_way.clear()
        losses[order] = model.evaluate(batches).loss
        assert len(under_way) == 12
        most[order] = max(under_way)
    assert most == {"layer-major": 12, "micro-batch-major": 1}
    assert losses["layer-major"] == losses["micro-batch-major"] == model.evaluate(batches).loss


def test_evaluation_between_forward_and_backward_changes_nothing() -> None:
    module = families.build(LLAMA)
    resident, model = reference(module), stream(module)
    for step in range(3):
        _, norm, _ = resident.step([text_batch(step)])
        loss = model(**text_batch(step)).loss
        model.evaluate(text_batch(99))
        loss.backward()
        with torch.no_grad():
            model(input_ids=text_batch(5)["input_ids"])
        model.optimizer.step()
        assert model.last_grad_norm == pytest.approx(norm, rel=1e-5)
    assert_same_parameters(model, resident)


# 46: autocast


@pytest.mark.parametrize("way", ["step", "backward"])
def test_inside_autocast(way: str) -> None:
    def run(model: megatrain.StreamedModel) -> float:
        if way == "step":
            return model.step(text_batch(1)).loss
        loss = model(**text_batch(1)).loss
        loss.backward()
        model.optimizer.step()
        return float(loss.detach())

    bare, wrapped = (stream(families.build(LLAMA), dtype=torch.bfloat16) for _ in range(2))
    expected = run(bare)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert run(wrapped) == expected
    for name, values in bare.state_dict().items():
        assert torch.equal(values, wrapped.state_dict()[name]), name
    with torch.autocast("cpu", dtype=torch.bfloat16), pytest.raises(ValueError, match="fp32 weights under"):
        run(stream(families.build(LLAMA)))


# 47: stale graphs


def test_backward_after_an_update_is_refused() -> None:
    model = stream(families.build(LLAMA))
    old = model(**text_batch(1)).loss
    model.step(text_batch(2))
    # Autograd notices the head's weights before the blocks are asked.
    with pytest.raises(RuntimeError, match=r"modified by an inplace operation"):
        old.backward()
    model.optimizer.zero_grad()
    fresh = stream(families.build(LLAMA))
    fresh.step(text_batch(2))
    assert model.step(text_batch(3)).loss == fresh.step(text_batch(3)).loss


def test_backward_through_blocks_after_an_update_is_refused() -> None:
    """Where nothing outside the blocks is trained, autograd has nothing to notice."""
    module = families.build(LLAMA)
    for name, parameter in module.named_parameters():
        parameter.requires_grad_(".layers." in name)
    model = stream(module)
    old = model(**text_batch(1)).loss
    model.step(text_batch(2))
    with pytest.raises(megatrain.StaleGraphError, match=r"model\.layers\.3"):
        old.backward()


def test_step_with_a_pending_backward_is_refused() -> None:
    model = stream(families.build(LLAMA))
    model(**text_batch(1)).loss.backward()
    with pytest.raises(RuntimeError, match=r"zero_grad"):
        model.step(text_batch(2))
    model.optimizer.zero_grad()
    assert model.step(text_batch(2)).loss == stream(families.build(LLAMA)).step(text_batch(2)).loss


# the trace


def test_updates_overlap_the_next_step(tmp_path: Any) -> None:
    module = families.build(LLAMA, num_hidden_layers=8, hidden_size=256, intermediate_size=1024)
    # One thread and the slowest kernel: the updates outlast what Python does before the next step's first block.
    model = stream(module, device=megatrain.HostBackend(), threads=1, isa="scalar")
    for step in range(6):
        model.step([text_batch(step, rows=8, length=48)] * 2)
    model.synchronize()
    spans = model._parts.engine.trace()
    updates = [span for span in spans if span.kind == "update"]
    compute = [span for span in spans if span.kind == "compute"]
    assert updates and compute
    overlapping = [
        (u, c)
        for u in updates
        for c in compute
        if c.step == u.step + 1 and u.begin_ns < c.end_ns and c.begin_ns < u.end_ns
    ]
    assert overlapping, "no update of a step runs inside a compute span of the next"
    path = tmp_path / "trace.json"
    model.export_trace(path)
    import json

    events = json.loads(path.read_text())["traceEvents"]
    assert {e["cat"] for e in events if e["ph"] == "X"} >= {"copy_up", "copy_down", "compute", "update"}
    assert np.isfinite([e["ts"] for e in events if e["ph"] == "X"]).all()
