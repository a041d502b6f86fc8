"""A run goes on from a checkpoint to the bit, and from no other model's."""

from __future__ import annotations

import copy
import random
from pathlib import Path
from typing import Any

import families
import numpy as np
import pytest
import torch
from checkpoint_models import INT8, LLAMA, PLACEMENTS, bits, small, train
from families import text_batch
from test_precision import MODES, assert_same_bits, every_mode, snapshot

import megatrain
from megatrain import CheckpointError, Placement
from megatrain.checkpoints import model_state

# resume


@every_mode
def test_a_run_goes_on_to_the_bit(mode: dict[str, Any], tmp_path: Path) -> None:
    """With dropout, a schedule, and a parameter that has had fewer updates than others."""
    model = small(mode)
    schedule = torch.optim.lr_scheduler.ExponentialLR(model.optimizer, 0.9)
    for step in range(3):
        dict(model.named_parameters())["model.norm.weight"].requires_grad_(step > 0)
        train(model, step, 1)
        schedule.step()
    path = model.save_checkpoint(tmp_path, extra={"schedule": schedule.state_dict(), "loss": 0.1})
    assert path == tmp_path / "checkpoint-3"
    expected = train(model, 3, 1)
    schedule.step()
    expected += train(model, 4, 2)

    resumed = small(mode, families.build(LLAMA, dropout=True, seed=99))
    schedule = torch.optim.lr_scheduler.ExponentialLR(resumed.optimizer, 0.9)
    train(resumed, 70, 2)
    extra = resumed.load_checkpoint(tmp_path)
    assert extra["loss"] == 0.1
    schedule.load_state_dict(extra["schedule"])
    assert (resumed.steps, resumed.optimizer.param_groups[0]["lr"]) == (3, pytest.approx(1e-3 * 0.9**3))
    found = train(resumed, 3, 1)
    schedule.step()
    assert found + train(resumed, 4, 2) == expected
    assert_same_bits(snapshot(resumed), snapshot(model))
    assert bits(resumed) == bits(model)
    steps = {name: resumed.optimizer.state[p]["step"].item() for name, p in resumed.named_parameters()}
    assert (steps["model.norm.weight"], steps["lm_head.weight"]) == (5, 6)


def test_checkpoints_of_before_weights_could_stay_fp32(tmp_path: Path) -> None:
    model = small()
    train(model, 0, 1)
    state = model_state.capture(model, None)
    for tile in state["model"]["tiles"]:
        for entry in tile["parameters"]:
            del entry["stays_fp32"]
    model_state.require_fit(state, model, tmp_path)
    state["model"]["tiles"][1]["parameters"][0]["stays_fp32"] = True
    with pytest.raises(CheckpointError, match=r"stays_fp32 of .* is True in the checkpoint and False"):
        model_state.require_fit(state, model, tmp_path)


def test_both_halves_and_the_moments_codes_are_in_the_files(tmp_path: Path) -> None:
    from safetensors.torch import load_file

    model = small(INT8)
    train(model, 0, 2)
    path = model.save_checkpoint(tmp_path)
    unit = model._parts.units.block_units["model.layers.1"]
    tensors = load_file(path / f"tile-{unit.tile:05d}.safetensors")
    assert {name: tensor.dtype for name, tensor in tensors.items()} == {
        "weights": torch.bfloat16,
        "master_low": torch.int16,
        "exp_avg": torch.uint8,
        "exp_avg_sq": torch.uint8,
        "exp_avg_exponents": torch.uint8,
        "exp_avg_sq_exponents": torch.uint8,
    }
    weights = model._parts.tiles.view(unit.parameters[0], megatrain._native.Section.weights)
    offset = unit.layout.element_offset(0)
    assert torch.equal(tensors["weights"][offset:][: weights.numel()], weights.reshape(-1))


@pytest.mark.parametrize("mode", [MODES[0], INT8, MODES[6]], ids=["bf16", "int8", "fp32"])
@pytest.mark.parametrize(("before", "after"), [("streamed", "resident"), ("resident", "micro-batches")])
def test_another_placement_goes_on_to_the_bit(mode: dict[str, Any], before: str, after: str, tmp_path: Path) -> None:
    model = small(mode, placement=PLACEMENTS[before])
    train(model, 0, 2)
    model.save_checkpoint(tmp_path)
    expected = train(model, 2, 2)
    resumed = small(mode, placement=PLACEMENTS[after])
    train(resumed, 60, 2)  # what is resident is ahead of the host's tiles
    resumed.load_checkpoint(tmp_path)
    assert train(resumed, 2, 2) == expected
    assert bits(resumed) == bits(model)


def test_random_states_come_back(tmp_path: Path) -> None:
    model = small()
    for generator in (torch.manual_seed, np.random.seed, random.seed):
        generator(5)
    np.random.standard_normal()  # leaves the second of a pair behind
    random.gauss(0, 1)
    model.save_checkpoint(tmp_path)

    def draw() -> list[float]:
        return [float(torch.rand(())), np.random.standard_normal(), random.gauss(0, 1), random.random()]

    expected = draw()
    draw()
    model.load_checkpoint(tmp_path)
    assert draw() == expected


def test_dropout_of_plain_pytorch_goes_on(tmp_path: Path) -> None:
    """`loss.backward()` draws from the global generator."""

    def steps(model: megatrain.StreamedModel, first: int) -> list[float]:
        found = []
        for step in (first, first + 1):
            loss = model(**text_batch(step)).loss
            loss.backward()
            model.optimizer.step()
            found.append(float(loss.detach()))
        return found

    model = small()
    steps(model, 0)
    model.save_checkpoint(tmp_path)
    expected = steps(model, 2)
    resumed = small(module=families.build(LLAMA, dropout=True, seed=3))
    resumed.load_checkpoint(tmp_path)
    assert steps(resumed, 2) == expected
    assert bits(resumed) == bits(model)


def test_edits_before_a_save_or_a_load(tmp_path: Path) -> None:
    model = small()
    train(model, 0, 1)
    with torch.no_grad():
        next(iter(model.parameters())).mul_(2)
    model.save_checkpoint(tmp_path)
    expected = train(model, 1, 2)
    with torch.no_grad():
        next(iter(model.parameters())).mul_(3)  # is overwritten by the load, and its low half must stay
    model.load_checkpoint(tmp_path)
    assert train(model, 1, 2) == expected


def test_buffers_of_blocks_are_saved(tmp_path: Path) -> None:
    def build(seed: int) -> torch.nn.Module:
        module = families.build(LLAMA, seed=seed)
        for index, layer in enumerate(module.model.layers):
            layer.mlp.register_buffer("bias", torch.full((3,), float(seed + index)))
        module.register_buffer("count", torch.tensor(seed))
        return module

    model = small(module=build(5))
    model.save_checkpoint(tmp_path)
    resumed = small(module=build(9))
    resumed.load_checkpoint(tmp_path)
    state = resumed.state_dict()
    assert state["model.layers.2.mlp.bias"].tolist() == [7.0] * 3
    assert int(state["count"]) == 5


def test_a_module_without_weights_takes_them_from_a_checkpoint(tmp_path: Path) -> None:
    model = small()
    train(model, 0, 2)
    model.save_checkpoint(tmp_path)
    with torch.device("meta"):
        empty = LLAMA.make(attention_dropout=0.1)
    for name, buffer in families.build(LLAMA).named_buffers():
        owner, _, inner = name.rpartition(".")
        empty.get_submodule(owner)._buffers[inner] = buffer
    resumed = small(module=empty)
    with pytest.raises(RuntimeError, match="have no values yet"):
        resumed.save_checkpoint(tmp_path / "other")
    resumed.load_checkpoint(tmp_path)
    assert train(resumed, 2, 2) == train(model, 2, 2)


@pytest.mark.parametrize("placement", PLACEMENTS.values(), ids=PLACEMENTS)
def test_moments_loaded_into_a_model_that_runs(placement: Placement) -> None:
    """Resident moments are on the device by then, and must come up again."""
    model = small(placement=placement)
    train(model, 0, 2)
    weights = {name: value.clone() for name, value in model.state_dict().items()}
    moments = copy.deepcopy(model.optimizer.state_dict())
    expected = train(model, 2, 2)
    other = small(placement=placement)
    train(other, 50, 2)
    other.load_state_dict(weights)
    other.evaluate(text_batch(3))
    other.optimizer.load_state_dict(moments)
    other.steps = 2
    assert train(other, 2, 2) == expected


# refusals


def _norm_frozen() -> torch.nn.Module:
    module = families.build(LLAMA)
    module.model.norm.weight.requires_grad_(False)
    return module


def _groups(*names: list[str]) -> megatrain.AdamW:
    return megatrain.AdamW(params=[{"params": group} for group in names])


_NAMES = [name for name, _ in families.build(LLAMA).named_parameters()]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: small(MODES[6]), "dtype is bfloat16 in the checkpoint and float32 in the model"),
        (lambda: small(MODES[3]), "master is split in the checkpoint and none in the model"),
        (lambda: small(MODES[2]), "moments is fp32 in the checkpoint and int8 in the model"),
        (lambda: small(seed=5), "seed is 4 in the checkpoint and 5 in the model"),
        (lambda: small(module=families.build(LLAMA, num_hidden_layers=5)), "lacks parameter model.layers.4."),
        (lambda: small(module=families.build(LLAMA, num_hidden_layers=3)), "the model lacks parameter model.layers.3."),
        (
            lambda: small(module=families.build(LLAMA, intermediate_size=56)),
            r"shape of model.layers.0.mlp.gate_proj.weight is \[48, 32\] in the checkpoint and \[56, 32\] in the model",
        ),
        (lambda: small(module=_norm_frozen()), "trainable of model.norm.weight is True in the checkpoint and False"),
        (lambda: small(module=families.build(LLAMA, tie_word_embeddings=True)), "the model lacks parameter lm_head"),
        (lambda: small(optimizer=_groups(_NAMES[:2], _NAMES[2:])), "it has 1 parameter groups, the optimizer 2"),
        (lambda: small(optimizer=_groups(_NAMES[::-1])), "parameter group 0 has model.embed_tokens.weight where"),
    ],
)
def test_a_checkpoint_of_another_model_changes_nothing(make: Any, message: str, tmp_path: Path) -> None:
    model = small()
    train(model, 0, 1)
    model.save_checkpoint(tmp_path)
    other = make()
    train(other, 4, 1)
    before = bits(other), other.steps, other.optimizer.progress(), torch.get_rng_state().tolist()
    with pytest.raises(CheckpointError, match=message) as error:
        other.load_checkpoint(tmp_path)
    assert str(error.value).startswith(f"{tmp_path / 'checkpoint-1'} is not of this model: ")
    assert (bits(other), other.steps, other.optimizer.progress(), torch.get_rng_state().tolist()) == before
    train(other, 5, 1)


def test_what_cannot_be_saved_is_refused(tmp_path: Path) -> None:
    model = small()
    with pytest.raises(ValueError, match="plain values"):
        model.save_checkpoint(tmp_path / "a", extra={"x": torch.zeros(1)})
    with pytest.raises(ValueError, match="keep is 0"):
        model.save_checkpoint(tmp_path / "a", keep=0)
    model(**text_batch(1)).loss.backward()
    with pytest.raises(RuntimeError, match=r"a backward\(\) is waiting"):
        model.save_checkpoint(tmp_path / "a")
    with pytest.raises(RuntimeError, match=r"a backward\(\) is waiting"):
        model.load_checkpoint(tmp_path / "a")
    model.optimizer.zero_grad()
    assert not (tmp_path / "a").exists()
    with pytest.raises(CheckpointError, match="has no whole checkpoint"):
        model.load_checkpoint(tmp_path / "a")
    with pytest.raises(CheckpointError, match="checkpoint-7 cannot be used: it does not exist"):
        model.load_checkpoint(tmp_path / "checkpoint-7")
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match="is a file"):
        model.save_checkpoint(tmp_path / "file")
