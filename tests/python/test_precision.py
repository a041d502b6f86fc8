"""Precision modes of the streamed model: what they hold, that they train, that nothing but the key of the
rounding decides a bit, and that a saved state resumes to the bit."""

from __future__ import annotations

import warnings
from typing import Any

import families
import numpy as np
import pytest
import torch
from case_models import Toy, toy_batch
from families import FAMILIES

import megatrain
from megatrain._native import HostBackend, Section, TileFormat, TileLayout, TileStore, isa_names

MODES = [
    dict(dtype=torch.bfloat16, master=master, moments=moments)
    for master in ("split", "none")
    for moments in ("fp32", "bf16", "int8")
] + [dict(dtype=torch.float32, moments=moments) for moments in ("fp32", "bf16", "int8")]
IDS = ["-".join(str(value).removeprefix("torch.") for value in mode.values()) for mode in MODES]
every_mode = pytest.mark.parametrize("mode", MODES, ids=IDS)


def streamed(mode: dict[str, Any], module: torch.nn.Module | None = None, **changes: Any) -> megatrain.StreamedModel:
    settings: dict[str, Any] = dict(
        optimizer=megatrain.AdamW(lr=1e-3, weight_decay=0.1, decay_biases_and_norms=True),
        max_grad_norm=1.0,
        device=HostBackend(max_delay_us=100, seed=3, poison=True),
        compile=False,
        self_check=False,
        seed=4,
    )
    return megatrain.StreamedModel(module or families.build(FAMILIES[0]), **{**settings, **mode, **changes})


def train(model: megatrain.StreamedModel, first: int, steps: int) -> list[float]:
    return [model.step(FAMILIES[0].batch(step)).loss for step in range(first, first + steps)]


def snapshot(model: megatrain.StreamedModel) -> dict[str, torch.Tensor]:
    """Masters and moments, copied."""
    found = {name: value.clone() for name, value in model.state_dict().items()}
    for index, entry in model.optimizer.state_dict()["state"].items():
        found |= {f"{index}.{name}": value.clone() for name, value in entry.items()}
    return found


def assert_same_bits(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert found[name].dtype == value.dtype, name
        assert torch.equal(found[name].view(-1).view(torch.uint8), value.view(-1).view(torch.uint8)), name


@every_mode
def test_threads_and_variants_do_not_change_a_bit(mode: dict[str, Any]) -> None:
    results = []
    for threads, isa in [(1, "scalar"), (3, ""), *((2, isa) for isa in isa_names()[1:])]:
        model = streamed(mode, threads=threads, isa=isa)
        losses = train(model, 0, 4)
        results.append((losses, snapshot(model)))
        model.close()
    for losses, state in results[1:]:
        assert losses == results[0][0]
        assert_same_bits(state, results[0][1])


@every_mode
def test_a_saved_state_resumes_to_the_bit(mode: dict[str, Any]) -> None:
    model = streamed(mode)
    train(model, 0, 3)
    weights = {name: value.clone() for name, value in model.state_dict().items()}
    saved = model.optimizer.state_dict()
    optimizer = {
        "param_groups": saved["param_groups"],
        "state": {i: {k: v.clone() for k, v in entry.items()} for i, entry in saved["state"].items()},
    }
    expected_losses = train(model, 3, 3)
    expected = snapshot(model)
    model.close()

    resumed = streamed(mode, families.build(FAMILIES[0], seed=99))
    resumed.load_state_dict(weights)
    resumed.optimizer.load_state_dict(optimizer)
    assert train(resumed, 3, 3) == expected_losses
    assert_same_bits(snapshot(resumed), expected)
    resumed.close()


@every_mode
def test_states_go_to_torch_and_back(mode: dict[str, Any]) -> None:
    model = streamed(mode)
    train(model, 0, 3)
    expected = snapshot(model)
    plain = [torch.nn.Parameter(value.detach().float()) for value in model.parameters()]
    adamw = torch.optim.AdamW(plain, lr=1e-3)
    adamw.load_state_dict(model.optimizer.state_dict())
    for parameter, index in zip(plain, range(len(plain)), strict=True):
        state = adamw.state[parameter]
        assert float(state["step"]) == 3
        for name in ("exp_avg", "exp_avg_sq"):
            assert torch.equal(state[name], expected[f"{index}.{name}"].float())
    # torch goes on; what it holds then is rounded to the nearest on its way back.
    for parameter in plain:
        parameter.grad = torch.randn_like(parameter, generator=torch.Generator().manual_seed(1)) * 1e-3
    adamw.step()
    model.optimizer.load_state_dict(adamw.state_dict())
    relative = {"fp32": (0, 0), "bf16": (2**-8, 2**-8), "int8": (2**-4, 2**-5)}[mode["moments"]]
    smallest = 1.125 * 2**-15 if mode["moments"] == "int8" else 0.0  # of a block's largest
    back = model.optimizer.state_dict()["state"]
    for parameter, index in zip(plain, range(len(plain)), strict=True):
        assert float(back[index]["step"]) == 4
        for name, rel in zip(("exp_avg", "exp_avg_sq"), relative, strict=True):
            theirs, ours = adamw.state[parameter][name], back[index][name].float()
            allowed = rel * theirs.abs() + smallest * theirs.abs().max()
            assert bool(((ours - theirs).abs() <= allowed).all()), name
    model.close()


@every_mode
def test_zero_gradients_without_decay_move_nothing(mode: dict[str, Any]) -> None:
    """Zero is a value of every format: nothing is rounded away from it."""
    model = streamed(mode, Toy(blocks=2), optimizer=megatrain.AdamW(lr=1e-2, weight_decay=0.0))
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of the layer without a use
        for step in range(100):
            batch = {name: value.to(mode["dtype"]) for name, value in toy_batch(step).items()}
            (0.0 * model(**batch)["loss"]).backward()
            model.optimizer.step()
            assert model.last_grad_norm == 0.0
    assert float(next(iter(model.optimizer.state_dict()["state"].values()))["step"]) == 100
    assert_same_bits(model.state_dict(), before)
    model.close()


@every_mode
def test_trains_as_the_exact_mode_does(mode: dict[str, Any]) -> None:
    batch = FAMILIES[0].batch(7)
    losses = []
    for tried in (dict(dtype=mode["dtype"], moments="fp32"), mode):
        model = streamed(tried)
        losses.append([model.step(batch).loss for _ in range(40)])
        model.close()
    exact, found = losses
    assert found[-1] < 0.8 * found[0]
    assert found[-1] == pytest.approx(exact[-1], rel=0.05)


@pytest.mark.parametrize("changed", [dict(seed=5), dict(master="split")])
def test_the_seed_keys_the_rounding(changed: dict[str, Any]) -> None:
    module = dict(dtype=torch.bfloat16, master="none", moments="bf16")
    states = []
    for changes in ({}, {}, changed):
        model = streamed(module, **changes)
        train(model, 0, 2)
        states.append(model.state_dict(dtype=torch.bfloat16))
        model.close()
    assert all(torch.equal(states[0][name], states[1][name]) for name in states[0])
    assert any(not torch.equal(states[0][name], states[2][name]) for name in states[0])


def test_parameters_of_one_shape_round_differently() -> None:
    seeds = {megatrain.rng.rounding_seed(0, f"layers.{i}.weight") for i in range(100)}
    assert len(seeds) == 100
    assert megatrain.rng.rounding_seed(1, "a") != megatrain.rng.rounding_seed(0, "a")


@every_mode
def test_memory_is_that_of_the_design(mode: dict[str, Any]) -> None:
    weights = {"split": 6.0, "none": 4.0}[mode.get("master", "split")]
    if mode["dtype"] == torch.float32:
        weights = 8.0
    moments = {"fp32": 8.0, "bf16": 4.0, "int8": 2 + 2 / 128}[mode["moments"]]
    format = megatrain.settings.Settings(**mode).tile_format
    assert TileLayout(format, [(1 << 22, True)]).nbytes / (1 << 22) == weights + moments
    model = streamed(mode, families.build(FAMILIES[0], hidden_size=256, intermediate_size=1024))
    report = model.memory_report()
    # Pages and alignment of small parameters add little.
    assert weights + moments <= report.host_bytes_per_parameter <= 1.05 * (weights + moments)
    model.close()


@every_mode
def test_edits_become_the_weights(mode: dict[str, Any]) -> None:
    model = streamed(mode)
    train(model, 0, 1)
    name, parameter = next(iter(model.named_parameters()))
    with model.edit_parameters() as values:
        values[name].fill_(0.375)
    assert bool((model.state_dict()[name] == 0.375).all())
    with torch.no_grad():
        parameter.fill_(0.25)
    train(model, 1, 1)
    assert float((model.state_dict()[name] - 0.25).abs().max()) < 0.01
    model.close()


@pytest.mark.parametrize(
    "wrong, message",
    [
        (dict(master="half"), 'master is "half"'),
        (dict(moments="int4"), 'moments is "int4"'),
        (dict(dtype=torch.float32, master="none"), "their own master"),
    ],
)
def test_settings_without_meaning_are_refused(wrong: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        streamed(wrong)


def test_formats_are_values() -> None:
    assert TileFormat("bf16_split") == TileFormat.bf16_split
    assert TileFormat("fp32", "fp32") == TileFormat.fp32
    assert TileFormat("bf16", "int8") != TileFormat("bf16", "bf16")
    assert len({TileFormat(w, m) for w in ("bf16_split", "bf16", "fp32") for m in ("fp32", "bf16", "int8")}) == 9
    assert (TileFormat("bf16", "int8").weights, TileFormat("bf16", "int8").moments) == ("bf16", "int8")
    with pytest.raises(ValueError, match=r'weights "fp16"; known: bf16_split, bf16, fp32'):
        TileFormat("fp16")
    with pytest.raises(ValueError, match=r'moments "fp16"; known: fp32, bf16, int8'):
        TileFormat("bf16", "fp16")


def test_moments_of_a_tile_through_the_bindings() -> None:
    store = TileStore(HostBackend(), threads=2)
    store.add(TileLayout(TileFormat("bf16", "int8"), [(300, True), (5, False)]))
    values = np.linspace(-2, 2, 300, dtype=np.float32)
    store.set_moments(0, 0, Section.exp_avg, values)
    read = np.empty_like(values)
    store.get_moments(0, 0, Section.exp_avg, read)
    np.testing.assert_allclose(read, values, rtol=2**-4, atol=2**-13)
    assert len(store.view(0, Section.exp_avg)) == 384 and len(store.view(0, Section.exp_avg_exponents)) == 3
    with pytest.raises(ValueError, match="holds no moments"):
        store.get_moments(0, 0, Section.weights, read)
    with pytest.raises(ValueError, match="frozen"):
        store.set_moments(0, 1, Section.exp_avg, np.zeros(5, np.float32))
    for bad, shown in ((-1e-3, "-0.001"), (np.nan, "-?nan")):
        squares = np.full(300, 0.5, np.float32)
        store.set_moments(0, 0, Section.exp_avg_sq, squares)
        squares[:] = 0.25
        squares[299] = bad
        with pytest.raises(ValueError, match=f"second moment 299 of parameter 0 of tile 0 is {shown}.*at least 0"):
            store.set_moments(0, 0, Section.exp_avg_sq, squares)
        store.get_moments(0, 0, Section.exp_avg_sq, read)
        np.testing.assert_allclose(read, 0.5, rtol=2**-4)  # as it was
    with pytest.raises(ValueError, match="300 floats are needed"):
        store.set_moments(0, 0, Section.exp_avg_sq, np.zeros(5, np.float32))
