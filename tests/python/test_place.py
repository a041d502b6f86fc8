"""Placements that are refused, and what place() leaves where it fails: a model that goes on as it was."""

from __future__ import annotations

import gc
import os
import signal
import weakref
from typing import Any

import families
import pytest
import torch
from families import FAMILIES
from test_equality import CLIP, batches_of
from test_placement import STREAMED, assert_same, run

import megatrain
from megatrain import BlockPlacement, Placement


def test_spread_names_what_is_out_of_range() -> None:
    with pytest.raises(ValueError, match="resident is 5; it must be between 0 and the number of blocks, 4"):
        Placement.spread(4, resident=5)
    with pytest.raises(ValueError, match=r"everything \+ selected is 5"):
        Placement.spread(4, everything=2, selected=3)
    with pytest.raises(ValueError, match='keep is "some"; it must be one of everything, selected, inputs'):
        BlockPlacement(keep="some")  # type: ignore[arg-type]
    placement = Placement.spread(5, resident=2, everything=1, selected=2, outside="all")
    assert [block.resident for block in placement.blocks] == ["all", "all", "none", "none", "none"]
    assert [block.keep for block in placement.blocks] == ["inputs", "inputs", "selected", "selected", "everything"]
    assert placement.residence("anything") == "all"


def test_places_for_what_is_not_there_are_refused() -> None:
    with pytest.raises(ValueError, match=r'names "model.norms", which owns no weights.*did you mean "model.norm"'):
        run(FAMILIES[0], megatrain.HostBackend(), Placement(outside={"model.norms": "all"}))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (dict(blocks=BlockPlacement()), "blocks is a BlockPlacement; it must be a tuple of BlockPlacement"),
        (dict(blocks=("all",)), "blocks holds a str, 'all'; it must be a BlockPlacement"),
        (dict(outside="all"), "outside is 'all'; it must map names of modules"),
        (dict(outside={"lm_head": "weights"}), 'outside."lm_head". is "weights"; it must be one of none, all'),
    ],
)
def test_placements_are_checked_when_made(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Placement(**changes)


def streamed(placement: Placement, device: object, **changes: Any) -> megatrain.StreamedModel:
    settings: dict[str, Any] = dict(compile=False, dtype=torch.float32, max_grad_norm=CLIP, placement=placement)
    module = families.build(FAMILIES[1], tie_word_embeddings=False)
    return megatrain.StreamedModel(module, device=device, **{**settings, **changes})


RESIDENT = Placement(blocks=(BlockPlacement(resident="all"),), outside={"": "all"})


@pytest.mark.parametrize(
    "wrong",
    [
        dict(placement=Placement(outside={"model.embed": "all"})),
        dict(placement=Placement.spread(40, everything=4)),
        dict(placement=STREAMED, transfers="landed"),
        dict(placement=STREAMED, slots=1.5),
        dict(placement=STREAMED, slots=0),
    ],
    ids=lambda wrong: ", ".join(wrong),
)
def test_a_place_that_is_refused_changes_nothing(wrong: dict[str, Any], device: object, torch_device: str) -> None:
    def train(refused: bool) -> tuple[list[float], dict[str, torch.Tensor]]:
        model = streamed(RESIDENT, device)
        losses = []
        for step in range(3):
            if refused and step == 1:
                with pytest.raises(ValueError):
                    model.place(**wrong)
                assert model.placement is RESIDENT
            losses.append(model.step(batches_of(FAMILIES[1], step)).loss)
        state = {name: value.clone() for name, value in model.state_dict().items()}
        model.close()
        return losses, state

    assert_same(train(True), train(False), torch_device == "cpu")


def test_a_place_that_runs_out_of_memory_goes_back(device: object, monkeypatch: pytest.MonkeyPatch) -> None:
    from megatrain import device_weights

    real, left = device_weights.ResidentTile, [1 << 30]

    class Tight(real):  # type: ignore[misc, valid-type]
        def __init__(self, *arguments: Any) -> None:
            left[0] -= 1
            if left[0] < 0:
                raise torch.OutOfMemoryError("CUDA out of memory")
            super().__init__(*arguments)

    monkeypatch.setattr(device_weights, "ResidentTile", Tight)
    expected = streamed(STREAMED, device)
    model = streamed(STREAMED, device)
    losses = [model.step(batches_of(FAMILIES[1], 0)).loss]
    left[0] = 2
    with pytest.raises(torch.OutOfMemoryError):
        model.place(RESIDENT)
    assert model.placement is STREAMED
    left[0] = 1 << 30
    losses.append(model.step(batches_of(FAMILIES[1], 1)).loss)
    assert losses == pytest.approx([expected.step(batches_of(FAMILIES[1], step)).loss for step in range(2)], rel=1e-6)

    model.place(RESIDENT)
    left[0] = 0  # not even the placement before has room again
    monkeypatch.setattr(
        type(model._parts.weights), "_add_slot", lambda *_: (_ for _ in ()).throw(torch.OutOfMemoryError("no more"))
    )
    with pytest.raises(torch.OutOfMemoryError):
        model.place(STREAMED)
    with pytest.raises(RuntimeError, match=r"the last place\(\) ran out of memory"):
        model.step(batches_of(FAMILIES[1], 2))
    monkeypatch.undo()
    assert len(model.state_dict()) > 0
    model.place(STREAMED)
    assert model.step(batches_of(FAMILIES[1], 2)).loss == pytest.approx(
        expected.step(batches_of(FAMILIES[1], 2)).loss, rel=1e-6
    )
    model.close()
    expected.close()


def test_memory_outside_the_stacks_is_given_back_before_other_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    from megatrain import device_weights

    model = streamed(STREAMED, megatrain.HostBackend())
    model.step(batches_of(FAMILIES[1], 0))
    old = [weakref.ref(leaf) for outside in model._parts.weights.outside.values() for _, leaf in outside.leaves()]
    alive: list[int] = []
    real = device_weights.ResidentTile

    def watching(*arguments: Any) -> Any:
        gc.collect()
        alive.append(sum(leaf() is not None for leaf in old))
        return real(*arguments)

    monkeypatch.setattr(device_weights, "ResidentTile", watching)
    model.place(RESIDENT)
    assert old and alive and not any(alive)
    model.close()


def test_a_constructor_that_refuses_a_placement_leaves_the_module_as_it_was() -> None:
    module = families.build(FAMILIES[1])
    before = {name: value.clone() for name, value in module.state_dict().items()}
    with pytest.raises(ValueError, match="which owns no weights outside the stacks"):
        megatrain.StreamedModel(module, placement=Placement(outside={"nope": "all"}), device="cpu")
    for name, value in module.state_dict().items():
        assert value.dtype == before[name].dtype and torch.equal(value, before[name]), name


def test_sums_of_a_longer_step_do_not_stay_beside_what_a_shorter_one_holds() -> None:
    model = streamed(Placement(order="micro-batch-major"), megatrain.HostBackend())
    model.step(batches_of(FAMILIES[1], 0))  # three micro-batches: fp32 sums of all
    model.step(batches_of(FAMILIES[1], 1)[:2])
    assert not any(model._parts.sink._spare.values())
    model.close()


def test_an_interrupt_waits_for_the_end_of_a_step_that_updates(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without clipping some of its updates are under way: it is whole, or not begun."""
    model = streamed(STREAMED, megatrain.HostBackend(), max_grad_norm=None, skip_nonfinite=False)
    expected = streamed(STREAMED, megatrain.HostBackend(), max_grad_norm=None, skip_nonfinite=False)
    updates, calls = model._parts.updates, []
    complete = updates.complete

    def interrupting(unit: Any) -> None:
        complete(unit)
        calls.append(unit)
        if len(calls) == 2:
            os.kill(os.getpid(), signal.SIGINT)

    monkeypatch.setattr(updates, "complete", interrupting)
    with pytest.raises(KeyboardInterrupt):
        model.step(batches_of(FAMILIES[1], 0))
    assert model.steps == 1
    expected.step(batches_of(FAMILIES[1], 0))
    for name, value in expected.state_dict().items():
        assert torch.equal(model.state_dict()[name], value), name
    model.close()
    expected.close()
