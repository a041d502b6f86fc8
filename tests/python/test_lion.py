"""Lion: bit for bit its formula in torch, in every format of tiles, through states and checkpoints."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import families
import pytest
import torch
from families import FAMILIES, text_batch
from test_precision import IDS, MODES, assert_same_bits, snapshot, streamed, train

import megatrain
from megatrain.planner.shape import UnitShape

LION = megatrain.Lion(lr=1e-3, betas=(0.8, 0.97), weight_decay=0.1)


def lion_step(
    master: torch.Tensor, moment: torch.Tensor, gradient: torch.Tensor, group: dict[str, Any], scale: float
) -> None:
    """Algorithm 2 of Chen et al. (2023), in place, in fp32."""
    beta1, beta2 = group["betas"]
    gradient = gradient.float() * torch.tensor(scale, dtype=torch.float32)
    direction = torch.sign(moment * beta1 + gradient * (1 - beta1))
    master.copy_(master * (1 - group["lr"] * group["weight_decay"]) - direction * group["lr"])
    moment.copy_(moment * beta2 + gradient * (1 - beta2))
    moment[moment.abs() < torch.finfo(torch.float32).tiny] = 0.0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_equals_the_formula_to_the_bit(dtype: torch.dtype) -> None:
    model = streamed(dict(dtype=dtype), optimizer=LION, keep_gradients=True, max_grad_norm=0.5)
    schedule = torch.optim.lr_scheduler.LinearLR(model.optimizer, 1.0, 0.5, total_iters=6)
    names = {name for name, _ in model.named_parameters()}
    masters = {name: value.clone() for name, value in model.state_dict().items() if name in names}
    moments = {name: torch.zeros_like(value) for name, value in masters.items()}
    for step in range(6):
        norm = model.step([text_batch(step), text_batch(step + 50, rows=1)]).grad_norm
        assert norm is not None
        scale = min(1.0, 0.5 / (norm + 1e-6))
        groups = {id(face): group for group in model.optimizer.param_groups for face in group["params"]}
        for name, face in model.named_parameters():
            assert face.grad is not None
            lion_step(masters[name], moments[name], face.grad, groups[id(face)], scale)
        schedule.step()
    assert {group["weight_decay"] for group in groups.values()} == {0.1, 0.0}
    state = model.state_dict()
    for name, face in model.named_parameters():
        assert torch.equal(state[name], masters[name]), name
        entry = model.optimizer.state[face]
        assert set(entry) == {"step", "exp_avg"}
        assert torch.equal(entry["exp_avg"], moments[name]), name
    model.close()


@pytest.mark.parametrize("mode", MODES, ids=IDS)
def test_every_format_trains_and_resumes_to_the_bit(mode: dict[str, Any], tmp_path: Path) -> None:
    model = streamed(mode, optimizer=LION)
    train(model, 0, 3)
    model.save_checkpoint(tmp_path)
    weights = {name: value.clone() for name, value in model.state_dict().items()}
    optimizer = copy.deepcopy(model.optimizer.state_dict())
    losses = [model.step(text_batch(7)).loss for _ in range(6)]
    assert losses[-1] < losses[0]
    expected = snapshot(model)
    saved = streamed(mode, optimizer=LION, threads=3)
    saved.load_checkpoint(tmp_path)
    assert [saved.step(text_batch(7)).loss for _ in range(6)] == losses
    assert_same_bits(snapshot(saved), expected)
    again = streamed(mode, optimizer=LION)
    again.steps = 3
    again.load_state_dict(weights)
    again.optimizer.load_state_dict(optimizer)
    assert [again.step(text_batch(7)).loss for _ in range(6)] == losses
    assert_same_bits(snapshot(again), expected)
    for made in (model, saved, again):
        made.close()


def test_one_moment_less_is_held() -> None:
    adamw, lion = (streamed(MODES[0], optimizer=settings) for settings in (megatrain.AdamW(), LION))
    saved = adamw.memory_report().host_tiles - lion.memory_report().host_tiles
    numel = sum(parameter.numel() for parameter in lion.parameters())
    assert 4 * numel <= saved < 4 * numel + 4096 * 8
    planned = UnitShape(name="a block", parameters=((4096, True), (512, False)))
    two, one = (planned.bytes(model.settings.tile_format) for model in (adamw, lion))
    assert (two.tile - one.tile, two.update - one.update) == (4 * 4096, 8 * 4096), "the planner counts as the tiles do"
    first = next(lion.parameters())
    with pytest.raises(ValueError, match="no second moments"):
        store = lion._parts.tiles.store
        store.get_moments(0, 0, megatrain._native.Section.exp_avg_sq, torch.zeros(first.numel()).numpy())


def test_states_of_another_optimizer_are_refused(tmp_path: Path) -> None:
    adamw, lion = (streamed(MODES[0], optimizer=settings) for settings in (megatrain.AdamW(weight_decay=0.1), LION))
    train(lion, 0, 1)
    lion.save_checkpoint(tmp_path)
    with pytest.raises(ValueError, match="has no exp_avg_sq; it is of another optimizer"):
        adamw.optimizer.load_state_dict(lion.optimizer.state_dict())
    with pytest.raises(megatrain.CheckpointError, match="rule is lion in the checkpoint and adamw in the model"):
        adamw.load_checkpoint(tmp_path)


def test_resident_blocks(device: object, torch_device: str) -> None:
    """Updated on the device. Signs of gradients are not those of another run there (atomic sums): losses alone are
    compared, and the kernel's bits by the C++ suite."""
    resident = megatrain.Placement.spread(4, resident=2)
    models = [
        megatrain.StreamedModel(
            families.build(FAMILIES[0]), device=device, optimizer=LION, placement=placement, compile=False
        )
        for placement in (resident, megatrain.Placement())
    ]
    for step in range(3):
        first, second = (model.step(text_batch(step)).loss for model in models)
        assert first == (second if torch_device == "cpu" else pytest.approx(second, rel=1e-2))
    if torch_device == "cpu":
        assert_same_bits(snapshot(models[0]), snapshot(models[1]))
    for model in models:
        model.close()


@pytest.mark.parametrize(
    ("wrong", "message"),
    [(dict(lr=-1.0), "lr is -1.0"), (dict(betas=(0.9, 1.0)), r"betas\[1\] is 1.0"), (dict(weight_decay=-1), "decay")],
)
def test_settings_out_of_range(wrong: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        megatrain.Lion(**wrong)
