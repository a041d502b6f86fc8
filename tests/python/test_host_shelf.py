"""What activations on their way to the host hold of the device's memory."""

from __future__ import annotations

from typing import Any

import families
import pytest
import torch
from families import FAMILIES, text_batch
from torch.multiprocessing.reductions import StorageWeakRef

import megatrain
from megatrain.host_shelf import HostShelf, ShelvedTensor, pending_limit

INPUTS_ON_HOST = megatrain.Placement(blocks=(megatrain.BlockPlacement(inputs_on="host"),))


@pytest.fixture(autouse=True)
def every_tensor_goes_to_the_shelf(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("megatrain.kept.SHELF_LEAST_BYTES", 1)


def model_of(layers: int, device: object, **sizes: Any) -> megatrain.StreamedModel:
    module = families.build(FAMILIES[0], num_hidden_layers=layers, **sizes)
    return megatrain.StreamedModel(module, device=device, compile=False, placement=INPUTS_ON_HOST)


def test_no_more_than_the_limit_is_on_its_way(device: object, torch_device: str) -> None:
    model = model_of(2, device)
    shelf = HostShelf(model._parts.engine, torch.device(torch_device))
    tensors = [torch.full((size,), float(size), device=torch_device) for size in (8, 64, 64, 8, 64, 64, 64, 64, 16)]
    put, largest = [], 0
    for tensor in tensors:
        put.append(shelf.put(tensor, 0))
        largest = max(largest, tensor.nbytes)
        assert shelf._pending_bytes == sum(pending.nbytes for _, pending in shelf._pending) <= pending_limit(largest)
    assert len(shelf._pending) > HostShelf.SETTLED_TENSORS
    shelf.settle()
    assert len(shelf._pending) == HostShelf.SETTLED_TENSORS
    shelf.collect()
    assert not shelf._pending and shelf._pending_bytes == 0
    # A step that follows takes what it would have taken alone.
    again = [shelf.put(tensors[0], 0) for _ in range(HostShelf.PENDING_TENSORS + 1)]
    assert len(shelf._pending) == HostShelf.PENDING_TENSORS < len(again)
    shelf.collect()
    for tensor, shelved in zip(tensors, put, strict=True):
        assert torch.equal(shelved.take(), tensor)
    model.close()


def test_waits_for_what_goes_down_are_counted() -> None:
    model = model_of(2, megatrain.HostBackend(max_delay_us=3000, seed=1))
    engine = model._parts.engine
    shelf = HostShelf(engine, torch.device("cpu"))
    for _ in range(8):
        shelf.put(torch.ones(64), 0)
    shelf.collect()
    down_ns = engine.wait_totals()[2]
    assert down_ns == sum(span.end_ns - span.begin_ns for span in engine.trace() if span.kind == "wait_down") > 0
    model.close()


def test_a_deep_model_has_no_more_on_its_way(device: object, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of four layers as of sixteen, at every point of a step; nothing while the way back goes on."""
    most: list[int] = []
    pending: list[int] = []

    def watched(shelf: HostShelf, tensor: torch.Tensor, tile: int) -> Any:
        shelved = put(shelf, tensor, tile)
        pending.append(len(shelf._pending))
        return shelved

    put = HostShelf.put
    monkeypatch.setattr(HostShelf, "put", watched)
    for layers in (4, 16):
        pending.clear()
        model = model_of(layers, device)
        model.step([text_batch(1, left_padding=0)] * 2)
        most.append(max(pending))
        assert not model._parts.steps._shelf._pending
        model.close()
    assert most == [HostShelf.PENDING_TENSORS] * 2


@pytest.mark.parametrize("compile", [False, True], ids=["eager", "traced"])
@pytest.mark.parametrize("keep", ["inputs", "selected", "everything"])
def test_what_was_let_go_of_is_gone(
    keep: Any, compile: bool, device: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    """When the way back begins nothing holds the memory of what is on the host."""
    torch._dynamo.reset()
    original = torch.compile
    monkeypatch.setattr(torch, "compile", lambda function, **_: original(function, backend="aot_eager"))
    put, collect = HostShelf.put, HostShelf.collect
    storages: list[StorageWeakRef] = []
    held: list[int] = []

    def watched_put(shelf: HostShelf, tensor: torch.Tensor, tile: int) -> Any:
        storages.append(StorageWeakRef(tensor.untyped_storage()))
        return put(shelf, tensor, tile)

    def watched_collect(shelf: HostShelf) -> None:
        collect(shelf)
        held.append(sum(not storage.expired() for storage in storages))

    monkeypatch.setattr(HostShelf, "put", watched_put)
    monkeypatch.setattr(HostShelf, "collect", watched_collect)
    model = megatrain.StreamedModel(
        families.build(FAMILIES[0], num_hidden_layers=6),
        device=device,
        compile=compile,
        self_check=False,
        placement=megatrain.Placement(blocks=(megatrain.BlockPlacement(keep=keep, kept_on="host"),)),
    )
    model.step([text_batch(1, left_padding=0)] * 2)
    model.close()
    assert len(storages) >= 10
    # At the step's beginning nothing was put; at the beginning of the way back the embedding's output of each
    # micro-batch is held by the graph around the blocks; at the end nothing is.
    assert held[0] == 0 and held[1] <= 2 and held[2] == 0


def test_nothing_is_on_its_way_down_while_a_plain_backward_goes_back(
    device: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    pending: list[int] = []
    fetch = ShelvedTensor.fetch

    def watched(shelved: ShelvedTensor) -> None:
        fetch(shelved)
        pending.append(len(shelved._shelf._pending))

    monkeypatch.setattr(ShelvedTensor, "fetch", watched)
    model = model_of(4, device)
    loss = model(**text_batch(1, left_padding=0)).loss
    assert model._parts.steps._shelf._pending
    loss.backward()
    model.close()
    assert pending and not any(pending)


@pytest.mark.gpu
def test_device_memory_does_not_grow_with_depth() -> None:
    if megatrain._native.cuda_device_count() == 0:
        pytest.skip("no GPU")
    peaks = []
    for layers in (4, 16):
        model = model_of(layers, "cuda", hidden_size=512, intermediate_size=1024, head_dim=128)
        batches = [text_batch(1, rows=16, length=64)] * 2
        model.step(batches)
        torch.cuda.synchronize()
        base = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        model.step(batches)
        model.synchronize()
        peaks.append(torch.cuda.max_memory_allocated() - base)
        model.close()
        del model
    assert peaks[1] == pytest.approx(peaks[0], rel=0.01)
