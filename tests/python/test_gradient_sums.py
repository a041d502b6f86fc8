"""What gradients take of the device's memory until they go down: as they came, or in sums."""

from __future__ import annotations

from typing import Any

import families
import pytest
from families import FAMILIES, text_batch

import megatrain
from megatrain.gradients import _Accumulator

LAYERS = 4


@pytest.fixture
def summed(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """One entry for each addition to a unit: there is an fp32 sum after it."""
    found: list[bool] = []
    add = _Accumulator.add

    def watched(accumulator: _Accumulator, gradients: Any) -> None:
        add(accumulator, gradients)
        found.append(accumulator._sums is not None)

    monkeypatch.setattr(_Accumulator, "add", watched)
    return found


def model_of(order: Any, device: object) -> megatrain.StreamedModel:
    module = families.build(FAMILIES[0], num_hidden_layers=LAYERS)
    placement = megatrain.Placement(order=order)
    return megatrain.StreamedModel(module, device=device, compile=False, self_check=False, placement=placement)


def batches(count: int) -> list[Any]:
    return [text_batch(seed, left_padding=0) for seed in range(count)]


@pytest.mark.parametrize("order", ["layer-major", "micro-batch-major"])
def test_two_gradients_are_held_as_they_came(order: Any, device: object, summed: list[bool]) -> None:
    model = model_of(order, device)
    model.step(batches(2))
    model.close()
    assert len(summed) >= 2 * LAYERS and not any(summed)


def test_many_far_apart_are_summed_from_the_first_on(device: object, summed: list[bool]) -> None:
    model = model_of("micro-batch-major", device)
    model.step(batches(3))
    assert len(summed) >= 3 * LAYERS and all(summed)
    # What was expected of that step holds for no other backward.
    summed.clear()
    model(**batches(1)[0]).loss.backward()
    model.close()
    assert len(summed) >= LAYERS and not any(summed)


def test_many_after_each_other_are_summed_from_the_third_on(device: object, summed: list[bool]) -> None:
    model = model_of("layer-major", device)
    model.step(batches(3))
    model.close()
    assert summed.count(True) >= LAYERS
    assert summed.count(False) == 2 * summed.count(True)
