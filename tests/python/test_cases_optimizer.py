"""Inputs that broke systems of this kind: the optimizer's state, groups and schedules, clipping, small numbers."""

from __future__ import annotations

import copy
import warnings
from typing import Any

import families
import pytest
import torch
import transformers
from case_models import LLAMA, Toy, WithLoss, assert_same_parameters, reference, stream, toy, toy_batch
from families import FAMILIES, text_batch
from resident import assert_close, trainer_groups
from torch import nn

import megatrain

# 17: resume


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_resume_to_the_last_bit(dtype: torch.dtype) -> None:
    straight = stream(families.build(LLAMA, dropout=True), dtype=dtype)
    losses = [straight.step(text_batch(step)).loss for step in range(10)]
    first = stream(families.build(LLAMA, dropout=True), dtype=dtype)
    again = [first.step(text_batch(step)).loss for step in range(5)]
    weights = {name: values.clone() for name, values in first.state_dict().items()}
    import copy

    moments = copy.deepcopy(first.optimizer.state_dict())
    torch.manual_seed(77)
    second = stream(LLAMA.make(attention_dropout=0.1), dtype=dtype)
    second.load_state_dict(weights)
    second.optimizer.load_state_dict(moments)
    second.steps = first.steps
    again += [second.step(text_batch(step)).loss for step in range(5, 10)]
    assert again == losses
    for name, values in straight.state_dict().items():
        assert torch.equal(values, second.state_dict()[name]), name


def test_optimizer_state_goes_to_torch_and_back() -> None:
    module = families.build(LLAMA)
    resident, model = reference(module, max_grad_norm=None), stream(module, max_grad_norm=None)
    for step in range(3):
        resident.step([text_batch(step)])
        model.step([text_batch(step)])
    order = [n for n, _ in model.named_parameters()]
    assert order == [n for n, _ in resident.module.named_parameters()]
    fresh = torch.optim.AdamW(trainer_groups(resident.module), lr=1e-4, weight_decay=0.1)
    fresh.load_state_dict(model.optimizer.state_dict())
    for parameter in resident.module.parameters():
        ours, theirs = fresh.state[parameter], resident.optimizer.state[parameter]
        assert float(ours["step"]) == float(theirs["step"]) == 3
        assert_close(ours["exp_avg"], theirs["exp_avg"], 1e-5, "exp_avg")
        assert_close(ours["exp_avg_sq"], theirs["exp_avg_sq"], 1e-5, "exp_avg_sq")
    model.optimizer.load_state_dict(resident.optimizer.state_dict())
    for step in range(3, 6):
        resident.step([text_batch(step)])
        model.step([text_batch(step)])
    assert_same_parameters(model, resident)


# 22, 26: the optimizer's face


@pytest.mark.parametrize(
    "make",
    [
        lambda o: torch.optim.lr_scheduler.CosineAnnealingLR(o, T_max=10),
        lambda o: torch.optim.lr_scheduler.LambdaLR(o, lambda step: 1 / (1 + step)),
        lambda o: torch.optim.lr_scheduler.OneCycleLR(o, max_lr=[1e-4, 2e-4], total_steps=10),
        lambda o: transformers.get_cosine_schedule_with_warmup(o, num_warmup_steps=2, num_training_steps=8),
    ],
)
def test_schedulers(make: Any) -> None:
    module = families.build(LLAMA)
    for name, parameter in module.named_parameters():
        if name.startswith("model.layers.0."):
            parameter.requires_grad_(False)
    resident, model = reference(module), stream(module)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        theirs, ours = make(resident.optimizer), make(model.optimizer)
        for step in range(8):
            resident.step([text_batch(step)])
            model.step([text_batch(step)])
            theirs.step()
            ours.step()
            assert len(model.optimizer.param_groups) == 2
            for mine, torchs in zip(model.optimizer.param_groups, resident.optimizer.param_groups, strict=True):
                assert (mine["lr"], mine["betas"]) == (torchs["lr"], torchs["betas"])
    assert_same_parameters(model, resident)


def test_schedules_go_on_over_skipped_steps() -> None:
    """A step that is skipped takes its place in the schedule, and no place in the moments' bias correction."""
    module = toy()
    resident, model = reference(module, lr=1e-2), stream(module, optimizer=megatrain.AdamW(lr=1e-2, weight_decay=0.1))
    theirs = transformers.get_cosine_schedule_with_warmup(resident.optimizer, 2, 8)
    ours = transformers.get_cosine_schedule_with_warmup(model.optimizer, 2, 8)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for step in range(8):
            batch = toy_batch(step)
            if step in (2, 5):
                assert model.step(dict(batch, y=torch.full_like(batch["y"], float("nan")))).skipped
            else:
                resident.step([batch])
                model.step(batch)
            theirs.step()
            ours.step()
            assert ours.get_last_lr() == theirs.get_last_lr()
    assert_same_parameters(model, resident)
    assert model.steps == 8 and model.skipped_steps == 2


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
def test_biases_and_norms_do_not_decay(family: Any) -> None:
    module = families.build(family)
    expected = [
        {name for name, p in module.named_parameters() if any(p is member for member in group["params"])}
        for group in trainer_groups(module)
    ]
    assert len(expected) == 2
    model = stream(module, self_check=False)
    names = {id(face): name for name, face in model.named_parameters()}
    groups = model.optimizer.param_groups
    assert [{names[id(face)] for face in group["params"]} for group in groups] == expected
    assert [group["weight_decay"] for group in groups] == [0.1, 0.0]
    everything = megatrain.AdamW(weight_decay=0.1, decay_biases_and_norms=True)
    (group,) = stream(families.build(family), optimizer=everything, self_check=False).optimizer.param_groups
    assert len(group["params"]) == len(names)


def test_groups_are_edited_as_torchs_are() -> None:
    """Each knob of each group, between steps, also as torch's own code for warm-up does it."""
    module = families.build(LLAMA)
    resident, model = reference(module), stream(module)
    for step in range(6):
        for optimizer in (resident.optimizer, model.optimizer):
            for index, group in enumerate(optimizer.param_groups):
                group["lr"] = 2e-5 * (1 + step + index)
                group["betas"] = (0.8 + 0.02 * step, 0.9 + 0.01 * index)
                group["eps"] = 1e-6 * (1 + index)
                group["weight_decay"] = 0.1 * step
        resident.step([text_batch(step)])
        model.step([text_batch(step)])
    assert_same_parameters(model, resident)


def test_parameter_groups() -> None:
    module = families.build(LLAMA)

    def groups(owner: nn.Module) -> list[dict[str, Any]]:
        decayed = [p for p in owner.parameters() if p.dim() > 1]
        kept = [p for p in owner.parameters() if p.dim() <= 1]
        return [
            dict(params=decayed, weight_decay=0.2),
            dict(params=kept, weight_decay=0.0, lr=5e-4, betas=(0.8, 0.95), eps=1e-6),
        ]

    resident = reference(module)
    resident.optimizer = torch.optim.AdamW(groups(resident.module), lr=1e-4)
    model = stream(module, optimizer=megatrain.AdamW(lr=1e-4, params=groups(module)))
    for step in range(5):
        resident.step([text_batch(step)])
        model.step([text_batch(step)])
    assert_same_parameters(model, resident)
    with pytest.raises(ValueError, match=r"trainable parameters are in no group, the first model\.layers\.0"):
        fresh = families.build(LLAMA)
        stream(fresh, optimizer=megatrain.AdamW(params=[dict(params=["model.embed_tokens.weight"])]))


# 28, 29: clipping and non-finite gradients


@pytest.mark.parametrize("clip", [None, 1.0])
def test_infinite_gradient_skips_the_step(clip: float | None) -> None:
    module = toy()
    resident, model = reference(module, max_grad_norm=clip), stream(module, max_grad_norm=clip)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for step in range(6):
            batch = toy_batch(step)
            if step == 3:
                bad = dict(batch, y=torch.full_like(batch["y"], float("inf")))
                before = {name: values.clone() for name, values in model.state_dict().items()}
                moments = model.optimizer.state_dict()["state"][0]["exp_avg"].clone()
                report = model.step(bad)
                assert report.skipped and model.skipped_steps == 1
                for name, values in model.state_dict().items():
                    assert torch.equal(values, before[name]), name
                assert torch.equal(moments, model.optimizer.state_dict()["state"][0]["exp_avg"])
                assert float(model.optimizer.state_dict()["state"][0]["step"]) == 3
            loss, _, _ = resident.step([batch])
            report = model.step(batch)
            assert not report.skipped
            assert report.loss == pytest.approx(loss, rel=1e-5)
    assert_same_parameters(model, resident)


def test_infinite_gradient_skips_the_update_of_a_plain_backward() -> None:
    """Also where other backwards of the same update were finite."""
    module = toy()
    resident, model = reference(module), stream(module)
    for step in range(4):
        batch = toy_batch(step)
        if step == 2:
            before = model.state_dict()
            model(**batch).loss.backward()
            model(**dict(batch, y=torch.full_like(batch["y"], float("inf")))).loss.backward()
            model.optimizer.step()
            assert model.skipped_steps == 1
            assert all(torch.equal(before[name], values) for name, values in model.state_dict().items())
        resident.step([batch])
        model(**batch).loss.backward()
        model.optimizer.step()
    assert_same_parameters(model, resident)


def test_clipping_reaches_the_moments() -> None:
    module = families.build(LLAMA)
    resident, model = reference(module, max_grad_norm=1e-3), stream(module, max_grad_norm=1e-3)
    for step in range(6):
        batches = [text_batch(step, rows=1 + step)]
        resident.step(batches)
        model.step(batches)
    faces = dict(model.named_parameters())
    for name, parameter in resident.module.named_parameters():
        ours, theirs = model.optimizer.state[faces[name]], resident.optimizer.state[parameter]
        model.synchronize()
        assert_close(ours["exp_avg"], theirs["exp_avg"], 2e-5, f"exp_avg of {name}")
        assert_close(ours["exp_avg_sq"], theirs["exp_avg_sq"], 2e-5, f"exp_avg_sq of {name}")


class Narrow(nn.Module):
    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.down = nn.Linear(width, inner, bias=False)
        self.up = nn.Linear(inner, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.up(torch.tanh(self.down(x)))


def test_norm_of_blocks_of_unlike_sizes_at_like_offsets() -> None:
    """Sums of one block's gradients are made in the memory of another's, whose parameters ended elsewhere."""
    torch.manual_seed(2)
    inner = Toy()
    inner.layers = nn.ModuleList(Narrow(16, width) for width in (3, 4))
    module = WithLoss(inner)
    resident, model = reference(module), stream(module)
    units = [unit for unit in model._parts.units.units if unit.is_block]
    assert len({tuple(u.layout.element_offset(p.index) for p in u.parameters) for u in units}) == 1
    for step in range(2):
        batches = [toy_batch(10 * step + index) for index in range(3)]
        _, norm, _ = resident.step(batches)
        assert model.step(batches).grad_norm == pytest.approx(norm, rel=1e-5)


# 37, 41: small numbers


def test_updates_too_small_for_bf16_are_kept() -> None:
    module = families.build(LLAMA)
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            if name.endswith("norm.weight"):
                parameter.fill_(1.0)
    start = {n: p.detach().clone() for n, p in module.named_parameters()}
    model = stream(module, dtype=torch.bfloat16, optimizer=megatrain.AdamW(lr=1e-5, weight_decay=0.0))
    fed = {n: nn.Parameter(v.clone()) for n, v in start.items()}
    adamw = torch.optim.AdamW(fed.values(), lr=1e-5, weight_decay=0.0)
    for step in range(200):
        model.step(text_batch(step % 7))
        model.synchronize()
        for name, parameter in model.named_parameters():
            fed[name].grad = parameter.grad.float()
        torch.nn.utils.clip_grad_norm_(fed.values(), 1.0)
        adamw.step()
    state = model.state_dict()
    for name, parameter in fed.items():
        assert_close(state[name], parameter, 1e-6, name)
        if name.endswith("norm.weight"):
            # A step of 1e-5 never moves a bf16 weight of 1.0, whose neighbours are 4e-3 and 8e-3 away.
            assert float((state[name] != 1.0).float().mean()) > 0.9, name


def test_parameters_without_groups_are_one_group() -> None:
    module = families.build(FAMILIES[0])
    optimizer = megatrain.AdamW(lr=2e-4, params=list(module.parameters()))  # type: ignore[arg-type]
    (group,) = stream(module, optimizer=optimizer, self_check=False).optimizer.param_groups
    assert (len(group["params"]), group["lr"]) == (len(list(families.build(FAMILIES[0]).parameters())), 2e-4)


def test_groups_are_checked_when_they_are_given() -> None:
    with pytest.raises(ValueError, match=r"lr is -1.0"):
        megatrain.AdamW(params=[{"params": ["lm_head.weight"], "lr": -1.0}])
    with pytest.raises(ValueError, match=r'parameter group 1 is a dict, not a mapping with "params"'):
        megatrain.Lion(params=[{"params": []}, {"lr": 1e-3}])


@pytest.mark.parametrize(
    ("rule", "settings", "message"),
    [
        ("AdamW", dict(betas=(0.9,)), r"betas is \(0\.9,\); it must be a pair of numbers"),
        ("Lion", dict(betas=0.9), r"betas is 0\.9; it must be a pair of numbers"),
        ("AdamW", dict(betas=(0.9, "x")), r"betas\[1\] is 'x'; it must be a number"),
        ("AdamW", dict(betas=(0.9, 1.0)), r"betas\[1\] is 1\.0; it must be at least 0 and below 1"),
        ("AdamW", dict(lr=1e39), r"lr is 1e\+39; it must be at least 0 and at most 3\.4e\+38"),
        ("AdamW", dict(lr=None), r"lr is None; it must be a number"),
        ("Lion", dict(lr=True), r"lr is True; it must be a number"),
        ("AdamW", dict(lr=torch.ones(2)), r"lr is tensor\(\[1\., 1\.\]\); it must be a number"),
        ("Lion", dict(weight_decay=float("nan")), r"weight_decay is nan; it must be at least 0"),
        ("AdamW", dict(eps=0.0), r"eps is 0\.0; it must be at least 1e-16"),
        ("AdamW", dict(eps=-1e-8), r"eps is -1e-08; it must be at least 1e-16"),
        ("AdamW", dict(eps=float("inf")), r"eps is inf; .* at most 3\.4e\+38"),
    ],
)
def test_numbers_that_mean_nothing_are_refused(rule: str, settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        getattr(megatrain, rule)(**settings)
    if not isinstance(settings.get("lr"), torch.Tensor):
        with pytest.raises(ValueError, match=message):
            getattr(megatrain, rule)(params=[{"params": [], **settings}])


def test_a_state_with_second_moments_that_are_no_squares_changes_nothing() -> None:
    model = stream(families.build(FAMILIES[0]), self_check=False)
    model.step(text_batch(0))
    before = copy.deepcopy(model.optimizer.state_dict())
    for bad in (-1.0, float("nan")):
        state = copy.deepcopy(before)
        last = max(state["state"])
        state["state"][last]["exp_avg_sq"].view(-1)[-1] = bad
        state["state"][0]["exp_avg"].add_(1.0)
        with pytest.raises(ValueError, match=r"exp_avg_sq of \S+ goes down to (-1\.0|nan); it must be at least 0"):
            model.optimizer.load_state_dict(state)
    for index, entry in model.optimizer.state_dict()["state"].items():
        assert torch.equal(entry["exp_avg"], before["state"][index]["exp_avg"])
