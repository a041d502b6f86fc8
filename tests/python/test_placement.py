"""Orders, kept activations and residence change time and memory, never losses, gradients or weights."""

from __future__ import annotations

import gc
import weakref
from itertools import product
from typing import Any

import families
import pytest
import torch
from families import FAMILIES
from resident import assert_close
from test_equality import CLIP, HYPERPARAMETERS, batches_of

import megatrain
from megatrain import BlockPlacement, Placement

FAMILY_IDS = [family.name for family in FAMILIES]
STREAMED = Placement()
JOINED = Placement(
    order="micro-batch-major", blocks=(BlockPlacement(keep="everything", resident="all"),), outside={"": "all"}
)
KEEPS = ["inputs", "selected", "everything"]
ORDERS = ["layer-major", "micro-batch-major"]


@pytest.fixture(autouse=True)
def every_tensor_goes_to_the_shelf(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("megatrain.kept.SHELF_LEAST_BYTES", 1)


def run(
    family: Any, device: object, placement: Placement, *, steps: int = 4, way: str = "step", **changes: Any
) -> tuple[list[float], dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """(losses, gradients of the first step, exact weights after the last)."""
    settings: dict[str, Any] = dict(
        optimizer=megatrain.AdamW(**HYPERPARAMETERS),
        max_grad_norm=CLIP,
        dtype=torch.float32,
        compile=False,
        keep_gradients=True,
        seed=7,
    )
    build = {key: changes.pop(key) for key in ("dropout", "tie_word_embeddings") if key in changes}
    model = megatrain.StreamedModel(
        families.build(family, **build), device=device, placement=placement, **{**settings, **changes}
    )
    losses, gradients = [], {}
    for step in range(steps):
        batches = batches_of(family, step)
        if way == "step":
            losses.append(model.step(batches).loss)
        else:
            for index, batch in enumerate(batches):
                torch.manual_seed(index)
                loss = model(**batch).loss
                loss.backward()
                losses.append(float(loss.detach()))
            model.optimizer.step()
        if step == 0:
            gradients = {
                n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None
            }
    state = {name: value.clone() for name, value in model.state_dict().items()}
    moments = model.optimizer.state_dict()["state"]
    state |= {f"{index}.{key}": v.clone() for index, e in moments.items() for key, v in e.items()}
    model.close()
    return losses, gradients, state


def assert_same(found: Any, expected: Any, exact: bool) -> None:
    """Bit for bit; elsewhere (a GPU without deterministic algorithms, another order of sums) within rounding."""
    for mine, theirs in zip(found[1:], expected[1:], strict=True):
        assert set(mine) == set(theirs)
        for name, value in theirs.items():
            if exact:
                assert torch.equal(mine[name], value), name
            else:
                assert_close(mine[name], value, 2e-2 if name[0].isdigit() else 1e-3, name)
    assert found[0] == (expected[0] if exact else pytest.approx(expected[0], rel=1e-3))


PLACEMENTS = {
    f"{order}, {keep} on the {side}, {residence}": Placement(
        order=order,
        blocks=(BlockPlacement(keep=keep, kept_on=side, resident=residence), BlockPlacement(keep=keep, kept_on=side)),
        outside={"": "all" if residence == "all" else "none"},
    )
    for order, keep, side, residence in product(ORDERS, KEEPS, ("device", "host"), ("none", "weights", "all"))
} | {
    f"{order}, selected on the {side}, inputs on the {other}": Placement(
        order=order, blocks=(BlockPlacement(keep="selected", kept_on=side, inputs_on=other),)
    )
    for order, (side, other) in product(ORDERS, (("device", "host"), ("host", "device")))
} | {"nothing leaves the device": JOINED}


@pytest.mark.parametrize("dropout", [False, True], ids=["plain", "dropout"])
def test_every_placement_of_one_family(dropout: bool, device: object, torch_device: str) -> None:
    exact = torch_device == "cpu"
    # Tied, head and embedding would be summed in another order in micro-batch-major order.
    settings: dict[str, Any] = dict(dropout=dropout, tie_word_embeddings=False)
    expected = run(FAMILIES[1], device, STREAMED, **settings)
    for name, placement in PLACEMENTS.items():
        try:
            assert_same(run(FAMILIES[1], device, placement, **settings), expected, exact)
        except AssertionError as error:
            raise AssertionError(f"placement {name}") from error


@pytest.mark.parametrize("way", ["step", "backward"])
@pytest.mark.parametrize("family", FAMILIES, ids=FAMILY_IDS)
def test_placements_of_every_family(family: Any, way: str, device: object, torch_device: str) -> None:
    exact = torch_device == "cpu"
    expected = run(family, device, STREAMED, steps=3, way=way)
    for placement in (
        Placement(blocks=(BlockPlacement(keep="everything", resident="all"), BlockPlacement(keep="selected"))),
        Placement(
            order="micro-batch-major",
            blocks=(
                BlockPlacement(keep="everything", kept_on="host"),
                BlockPlacement(keep=("selected", "everything", "inputs"), kept_on="host", resident="weights"),
            ),
            outside={"": "all"},
        ),
        JOINED,
    ):
        same_sums = placement.order == "layer-major" or way == "backward"
        assert_same(run(family, device, placement, steps=3, way=way), expected, exact and same_sums)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_losses_are_equal_over_twenty_steps(dtype: torch.dtype, device: object, torch_device: str) -> None:
    exact = torch_device == "cpu"
    settings: dict[str, Any] = dict(steps=20, dtype=dtype, tie_word_embeddings=False)
    expected = run(FAMILIES[0], device, STREAMED, **settings)
    for name in (
        "layer-major, everything on the host, none",
        "layer-major, selected on the device, all",
        "micro-batch-major, everything on the device, all",
        "micro-batch-major, inputs on the host, weights",
    ):
        assert_same(run(FAMILIES[0], device, PLACEMENTS[name], **settings), expected, exact)


@pytest.mark.parametrize("moments", ["fp32", "bf16", "int8"])
@pytest.mark.parametrize("master", ["split", "none"])
def test_updates_on_the_device_write_the_bits_of_the_host(
    master: str, moments: str, device: object, torch_device: str
) -> None:
    settings: dict[str, Any] = dict(dtype=torch.bfloat16, master=master, moments=moments, steps=5)
    resident = Placement(blocks=(BlockPlacement(resident="all"),), outside={"": "all"})
    exact = torch_device == "cpu"
    assert_same(run(FAMILIES[1], device, resident, **settings), run(FAMILIES[1], device, STREAMED, **settings), exact)


def test_updates_begin_while_gradients_land_where_nothing_waits_for_the_norm(
    device: object, torch_device: str
) -> None:
    settings: dict[str, Any] = dict(max_grad_norm=None, skip_nonfinite=False, tie_word_embeddings=False)
    exact = torch_device == "cpu"
    expected = run(FAMILIES[1], device, STREAMED, max_grad_norm=None, tie_word_embeddings=False)
    assert_same(run(FAMILIES[1], device, STREAMED, **settings), expected, exact)
    for name in ("micro-batch-major, everything on the device, all", "layer-major, selected on the host, weights"):
        assert_same(run(FAMILIES[1], device, PLACEMENTS[name], **settings), expected, exact)


@pytest.mark.parametrize(
    "transfers",
    [
        megatrain.Transfers(update_order="landed"),
        megatrain.Transfers(overlap_updates=False),
        megatrain.Transfers(burst="parameter"),
    ],
    ids=["landed", "not overlapped", "by parameter"],
)
def test_transfers_change_nothing(transfers: megatrain.Transfers, device: object, torch_device: str) -> None:
    exact = torch_device == "cpu"
    expected = run(FAMILIES[1], device, STREAMED)
    assert_same(run(FAMILIES[1], device, STREAMED, transfers=transfers), expected, exact)
    assert_same(run(FAMILIES[1], device, STREAMED, transfers=transfers, slots=1), expected, exact)


def test_edits_and_loading_reach_resident_weights(device: object) -> None:
    placements = (STREAMED, Placement(blocks=(BlockPlacement(resident="all"),), outside={"": "all"}))
    results = []
    for placement in placements:
        model = megatrain.StreamedModel(
            families.build(FAMILIES[1]), device=device, placement=placement, compile=False, dtype=torch.float32
        )
        model.step(batches_of(FAMILIES[1], 0))
        with model.edit_parameters() as values:
            for value in values.values():
                value.mul_(0.5)
        model.step(batches_of(FAMILIES[1], 1))
        saved = {name: value.clone() for name, value in model.state_dict().items()}
        model.step(batches_of(FAMILIES[1], 2))
        model.load_state_dict(saved)
        optimizer = model.optimizer.state_dict()
        model.optimizer.load_state_dict(optimizer)
        with torch.no_grad():
            next(iter(model.parameters())).add_(0.01)
        model.step(batches_of(FAMILIES[1], 3))
        results.append({name: value.clone() for name, value in model.state_dict().items()})
        model.close()
    for name, value in results[0].items():
        assert_close(results[1][name], value, 0 if value.device.type == "cpu" else 1e-3, name)


def test_another_placement_between_steps_changes_nothing(device: object, torch_device: str) -> None:
    def train(placements: list[Placement]) -> dict[str, torch.Tensor]:
        model = megatrain.StreamedModel(
            families.build(FAMILIES[1], tie_word_embeddings=False),
            device=device,
            compile=False,
            dtype=torch.float32,
            max_grad_norm=CLIP,
        )
        for step, placement in enumerate(placements):
            model.place(placement, slots=1 + step % 3)
            assert model.placement is placement
            model.step(batches_of(FAMILIES[1], step))
        state = {name: value.clone() for name, value in model.state_dict().items()}
        model.close()
        return state

    expected = train([Placement()] * 6)
    found = train(
        [
            PLACEMENTS["layer-major, everything on the host, all"],
            PLACEMENTS["micro-batch-major, inputs on the device, none"],
            PLACEMENTS["layer-major, selected on the device, weights"],
            PLACEMENTS["micro-batch-major, everything on the device, all"],
            Placement(),
            PLACEMENTS["layer-major, inputs on the host, all"],
        ]
    )
    for name, value in expected.items():
        assert_close(found[name], value, 0 if torch_device == "cpu" else 1e-3, name)


@pytest.mark.parametrize("keep", KEEPS)
@pytest.mark.parametrize("side", ["device", "host"])
def test_two_backwards_of_one_forward(keep: Any, side: Any, device: object, torch_device: str) -> None:
    def gradients(placement: Placement, halves: int) -> dict[str, torch.Tensor]:
        model = megatrain.StreamedModel(
            families.build(FAMILIES[1], dropout=True),
            device=device,
            placement=placement,
            compile=False,
            dtype=torch.float32,
            keep_gradients=True,
        )
        torch.manual_seed(3)
        loss = model(**batches_of(FAMILIES[1], 0)[0]).loss / halves
        for half in range(halves):
            loss.backward(retain_graph=half + 1 < halves)
        found = {name: parameter.grad.clone() for name, parameter in model.named_parameters()}
        model.close()
        return found

    expected = gradients(STREAMED, 1)
    for name, value in gradients(Placement(blocks=(BlockPlacement(keep=keep, kept_on=side),)), 2).items():
        assert_close(value, expected[name], 3e-6 if torch_device == "cpu" else 1e-3, name)


def test_what_is_kept_on_the_host_counts_towards_host_memory() -> None:
    def model(host_memory: int) -> megatrain.StreamedModel:
        return megatrain.StreamedModel(
            families.build(FAMILIES[1]),
            device="cpu",
            placement=Placement(blocks=(BlockPlacement(keep="everything", kept_on="host"),)),
            host_memory=host_memory,
            staging_bytes=1 << 20,
        )

    plenty = model(1 << 30)
    tiles = plenty.memory_report().host_tiles
    plenty.step(batches_of(FAMILIES[1], 0))
    assert plenty.memory_report().host_kept > 0
    plenty.close()
    tight = model(tiles + (1 << 20) + 8192)
    before = {name: value.clone() for name, value in tight.state_dict().items()}
    with pytest.raises(MemoryError, match="8192 may be: let blocks keep less, or on the device"):
        tight.step(batches_of(FAMILIES[1], 0))
    for name, value in tight.state_dict().items():
        assert torch.equal(value, before[name]), name
    tight.place(Placement())
    tight.step(batches_of(FAMILIES[1], 0))
    tight.close()


class TwoStacks(torch.nn.Module):
    """A vision stack that only some batches use, and a text stack."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.text = torch.nn.ModuleList(torch.nn.Linear(width, width) for _ in range(2))
        self.vision = torch.nn.ModuleList(torch.nn.Linear(width, width) for _ in range(2))

    def forward(self, x: torch.Tensor, image: torch.Tensor | None = None) -> torch.Tensor:
        if image is not None:
            for block in self.vision:
                image = torch.tanh(block(image))
            x = x + image
        for block in self.text:
            x = torch.tanh(block(x))
        return x.square().mean()


def test_blocks_that_the_last_micro_batch_does_not_use(device: object, torch_device: str) -> None:
    def train(order: Any) -> tuple[float | None, dict[str, torch.Tensor]]:
        torch.manual_seed(0)
        model = megatrain.StreamedModel(
            TwoStacks(),
            device=device,
            placement=Placement(order=order, blocks=(BlockPlacement(keep="everything"),)),
            compile=False,
            dtype=torch.float32,
            blocks=["text", "vision"],
        )
        with_image = dict(x=torch.randn(3, 16), image=torch.randn(3, 16))
        norm = model.step([with_image, dict(x=torch.randn(3, 16))]).grad_norm
        state = {name: value.clone() for name, value in model.state_dict().items()}
        model.close()
        return norm, state

    norm, expected = train("layer-major")
    other_norm, found = train("micro-batch-major")
    assert other_norm == pytest.approx(norm, rel=1e-5)
    for name, value in expected.items():
        assert_close(found[name], value, 1e-5, name)


class EditsInPlace(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = torch.nn.Linear(16, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.inner(x)
        hidden += x
        return torch.tanh(hidden)


@pytest.mark.parametrize("side", ["device", "host"])
def test_selected_outputs_that_a_block_edits_in_place(side: Any, device: object, torch_device: str) -> None:
    class Module(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = torch.nn.ModuleList(EditsInPlace() for _ in range(3))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for block in self.blocks:
                x = block(x)
            return x.square().mean()

    def gradients(keep: Any) -> dict[str, torch.Tensor]:
        torch.manual_seed(0)
        model = megatrain.StreamedModel(
            Module(),
            device=device,
            placement=Placement(blocks=(BlockPlacement(keep=keep, kept_on=side),)),
            compile=False,
            dtype=torch.float32,
            keep_gradients=True,
        )
        model.step(dict(x=torch.randn(4, 16)))
        found = {name: parameter.grad.clone() for name, parameter in model.named_parameters()}
        model.close()
        return found

    expected = gradients("inputs")
    for name, value in gradients("selected").items():
        assert_close(value, expected[name], 3e-6 if torch_device == "cpu" else 1e-3, name)


@pytest.mark.parametrize("keep", KEEPS)
def test_kept_graphs_die_with_their_step(keep: Any) -> None:
    import weakref

    from megatrain.kept import Keeper

    alive: list[weakref.ref[Keeper]] = []
    made = Keeper.__init__

    def counted(self: Keeper, *arguments: Any) -> None:
        made(self, *arguments)
        alive.append(weakref.ref(self))

    model = megatrain.StreamedModel(
        families.build(FAMILIES[1]),
        device="cpu",
        placement=Placement(blocks=(BlockPlacement(keep=keep, kept_on="host"),)),
    )
    model.step(batches_of(FAMILIES[1], 0))
    gc.collect()
    gc.disable()
    try:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Keeper, "__init__", counted)
            model.step(batches_of(FAMILIES[1], 1))
            loss = model(**batches_of(FAMILIES[1], 2)[0]).loss
            del loss
        assert len(alive) > 8
        assert sum(reference() is not None for reference in alive) == 0
        taken = model.memory_report().host_kept
        model.step(batches_of(FAMILIES[1], 3))
        assert model.memory_report().host_kept == taken
    finally:
        gc.enable()
    model.close()


def test_gradients_of_resident_units_survive_edits_and_looks(device: object, torch_device: str) -> None:
    resident = Placement(blocks=(BlockPlacement(resident="all"),), outside={"": "all"})

    def train(placement: Placement) -> tuple[float | None, dict[str, torch.Tensor]]:
        model = megatrain.StreamedModel(
            families.build(FAMILIES[1]), device=device, placement=placement, compile=False, dtype=torch.float32
        )
        first, second, third = (batches_of(FAMILIES[1], step)[0] for step in range(3))
        model.step(first)
        model.state_dict()
        model(**second).loss.backward()
        with model.edit_parameters() as values:
            for value in values.values():
                value.mul_(0.9)
        model(**third).loss.backward()
        with torch.no_grad():
            next(iter(model.parameters())).mul_(1.5)
        model.optimizer.step()
        norm = model.last_grad_norm
        model.step(second)
        state = {name: value.clone() for name, value in model.state_dict().items()}
        model.close()
        return norm, state

    norm, expected = train(STREAMED)
    other_norm, found = train(resident)
    assert other_norm == pytest.approx(norm, rel=1e-5)
    for name, value in expected.items():
        assert_close(found[name], value, 1e-5 if torch_device == "cpu" else 1e-3, name)


def test_one_block_placement_means_one_block(device: object) -> None:
    """Whatever the order in which stacks are called: `vision` comes after `text` in the module."""
    model = megatrain.StreamedModel(
        TwoStacks(),
        device=device,
        placement=Placement(blocks=(BlockPlacement(keep="everything", resident="all"), BlockPlacement())),
        compile=False,
        dtype=torch.float32,
        example_batch=dict(x=torch.randn(3, 16), image=torch.randn(3, 16)),
    )
    names = {block.unit.tile: block.name for block in model._parts.blocks}
    assert {names[tile] for tile in model._parts.weights.resident} == {"text.0"}
    keeping = model._parts.steps.keeping
    assert {block.name for block in model._parts.blocks if keeping(block, 0).keep == "everything"} == {"text.0"}
    model.close()
