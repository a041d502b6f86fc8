"""What only a GPU can show."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import families
import pytest
import torch
from families import FAMILIES, text_batch
from family_zoo import causal

import megatrain
from megatrain import _native

pytestmark = pytest.mark.gpu


@pytest.fixture(autouse=True)
def gpu() -> None:
    if _native.cuda_device_count() == 0:
        pytest.skip(f"no GPU: {_native.cuda_unavailable_reason()}")


def test_our_cudart_beside_torchs() -> None:
    """Events of one copy of the CUDA runtime are waited on by streams of the other, both ways."""
    backend = _native.CudaBackend(0)
    ours = backend.create_stream("ours")
    event = backend.create_event("ours")
    theirs = torch.cuda.Stream()
    host = torch.arange(1 << 22, dtype=torch.int32).pin_memory()
    back = torch.empty_like(host).pin_memory()
    for _ in range(20):
        device = torch.zeros(1 << 22, dtype=torch.int32, device="cuda")
        torch.cuda.current_stream().synchronize()
        backend.copy(device.data_ptr(), host.data_ptr(), host.nbytes, True, ours.handle)
        backend.record(event, ours.handle)
        backend.wait(theirs.cuda_stream, event)  # torch's stream waits for our copy
        with torch.cuda.stream(theirs):
            torch.cuda._sleep(200_000)
            device.mul_(3)
        backend.record(event, theirs.cuda_stream)
        backend.wait(ours.handle, event)  # ours waits for torch's kernel
        backend.copy(back.data_ptr(), device.data_ptr(), host.nbytes, False, ours.handle)
        backend.record(event, ours.handle)
        event.synchronize()
        assert torch.equal(back, host * 3)
    torch_event = torch.cuda.Event()
    external = torch.cuda.ExternalStream(ours.handle)
    torch_event.record(external)
    torch_event.synchronize()
    assert torch_event.query()


def test_tiles_are_seen_as_pinned_by_torch() -> None:
    model = megatrain.StreamedModel(families.build(FAMILIES[0]), device="cuda", compile=False)
    report = model.memory_report()
    assert report.host_pinned == report.host_tiles
    unit = model._parts.units.units[0].parameters[0]
    assert model._parts.tiles.view(unit, _native.Section.weights).is_pinned()


def test_pinning_capped_gives_the_same_losses() -> None:
    plain = megatrain.StreamedModel(families.build(FAMILIES[0]), device="cuda", compile=False, dtype=torch.float32)
    with pytest.warns(UserWarning, match="could not be pinned"):
        capped = megatrain.StreamedModel(
            families.build(FAMILIES[0]),
            device=_native.CudaBackend(0, pin_limit=16 << 10),
            staging_bytes=16 << 10,
            compile=False,
            dtype=torch.float32,
        )
    for step in range(4):
        assert capped.step(text_batch(step)).loss == pytest.approx(plain.step(text_batch(step)).loss, rel=1e-6)


def test_deterministic_runs_are_equal_to_the_bit() -> None:
    def run(**changes: Any) -> tuple[list[float], dict[str, torch.Tensor]]:
        model = megatrain.StreamedModel(
            families.build(FAMILIES[1], dropout=True), device="cuda", compile=False, max_grad_norm=1.0, **changes
        )
        losses = [model.step([text_batch(step), text_batch(step + 9, rows=3)]).loss for step in range(10)]
        return losses, model.state_dict()

    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)
    try:
        first_losses, first = run()
        for changes in (dict(slots=3), dict(threads=1), dict(isa="scalar")):
            losses, state = run(**changes)
            assert losses == first_losses
            for name, values in first.items():
                assert torch.equal(values, state[name]), name
    finally:
        torch.use_deterministic_algorithms(before)


def test_updates_overlap_the_next_step(tmp_path: Path) -> None:
    module = families.build(FAMILIES[0], num_hidden_layers=8, hidden_size=2048, intermediate_size=8192, head_dim=512)
    model = megatrain.StreamedModel(module, device="cuda", compile=False, max_grad_norm=1.0)
    for step in range(4):
        model.step([text_batch(step, rows=32, length=64)] * 2)
    spans = model._parts.engine.trace()
    updates = [span for span in spans if span.kind == "update"]
    compute = [span for span in spans if span.kind == "compute"]
    assert any(
        c.step == u.step + 1 and u.begin_ns < c.end_ns and c.begin_ns < u.end_ns for u in updates for c in compute
    )
    for kind in ("copy_up", "copy_down"):
        assert any(
            s.begin_ns < c.end_ns and c.begin_ns < s.end_ns for s in spans if s.kind == kind for c in compute
        ), kind
    model.export_trace(tmp_path / "trace.json")


def test_autocast_from_outside_does_not_keep_casts() -> None:
    peaks = []
    for layers in (2, 12):
        module = families.build(FAMILIES[0], num_hidden_layers=layers, hidden_size=256, intermediate_size=1024)
        model = megatrain.StreamedModel(module, device="cuda", compile=False)
        with torch.autocast("cuda", dtype=torch.bfloat16):
            model.step(text_batch(1))
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
            base = torch.cuda.memory_allocated()
            model.step(text_batch(2))
        peaks.append(torch.cuda.max_memory_allocated() - base)
        del model
    assert peaks[1] <= peaks[0] * 1.1 + (1 << 20)


@pytest.mark.parametrize("way", ["step", "backward"])
def test_a_device_that_is_not_the_current_one(way: str) -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("one GPU")

    def run(device: str) -> list[float]:
        model = megatrain.StreamedModel(
            families.build(FAMILIES[2], dropout=True), device=device, compile=False, dtype=torch.float32
        )
        assert model.device == torch.device(device)
        losses = []
        for step in range(4):
            if way == "step":
                losses.append(model.step([text_batch(step), text_batch(step + 9)]).loss)
                continue
            torch.manual_seed(step)
            loss = model(**text_batch(step)).loss
            loss.backward()
            model.optimizer.step()
            losses.append(float(loss.detach()))
        return losses

    torch.cuda.set_device(0)
    assert run("cuda:1") == pytest.approx(run("cuda:0"), rel=1e-6)
    assert torch.cuda.current_device() == 0


def test_experts_come_when_they_are_chosen() -> None:
    """Those without tokens stay on the host, and losses are those of whole blocks."""
    losses, bytes_up = {}, {}
    for way in ("whole", "selected"):
        model = megatrain.StreamedModel(
            causal("qwen3_moe", "Qwen3Moe", num_experts=16).build(),
            device="cuda",
            compile=False,
            placement=megatrain.Placement(experts=way),  # type: ignore[arg-type]
        )
        losses[way] = [model.step([text_batch(step, rows=1, length=3, left_padding=0)]).loss for step in range(4)]
        bytes_up[way] = sum(span.nbytes for span in model._parts.engine.trace() if span.kind == "copy_up")
    assert losses["selected"] == pytest.approx(losses["whole"], rel=1e-2)
    assert bytes_up["selected"] < bytes_up["whole"]
