"""A streamed model equals the resident one: loss, every gradient, parameters after ten steps."""

from __future__ import annotations

from typing import Any

import families
import pytest
import torch
from families import FAMILIES, Family
from resident import Resident, assert_close
from transformers import Trainer

import megatrain

DECAY, CLIP = 0.1, 0.5
# eps lies above the rounding noise of gradients that are zero in exact arithmetic (biases of keys): Adam would
# turn that noise into steps of the size of the learning rate.
HYPERPARAMETERS = dict(lr=1e-4, weight_decay=DECAY, eps=1e-6)
FAMILY_IDS = [family.name for family in FAMILIES]


def streamed(module: torch.nn.Module, device: object, **changes: Any) -> megatrain.StreamedModel:
    settings = dict(
        optimizer=megatrain.AdamW(**HYPERPARAMETERS),
        max_grad_norm=CLIP,
        dtype=torch.float32,
        device=device,
        compile=False,
        keep_gradients=True,
    )
    return megatrain.StreamedModel(module, **{**settings, **changes})


def batches_of(family: Family, step: int) -> list[dict[str, torch.Tensor]]:
    """Three micro-batches of unequal length and unequal numbers of targets."""
    return [
        family.batch(100 * step + 1),
        family.batch(100 * step + 2, rows=3, length=12, left_padding=5),
        family.batch(100 * step + 3, rows=1, length=5, left_padding=1),
    ]


def assert_gradients(model: megatrain.StreamedModel, expected: dict[str, torch.Tensor], tolerance: float) -> None:
    found = {name: parameter.grad for name, parameter in model.named_parameters()}
    assert {name for name, gradient in found.items() if gradient is not None} == set(expected)
    for name, gradient in expected.items():
        assert_close(found[name], gradient, tolerance, f"gradient of {name}")


def distance(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float((found.cpu().double() - expected.cpu().double()).abs().max() / expected.abs().max())


@pytest.mark.parametrize("slots", [2, 3])
@pytest.mark.parametrize("dropout", [False, True], ids=["plain", "dropout"])
@pytest.mark.parametrize("family", FAMILIES, ids=FAMILY_IDS)
def test_step_fp32(family: Family, dropout: bool, slots: int, device: object, torch_device: str) -> None:
    module = families.build(family, dropout=dropout)
    reference = Resident(module, device=torch_device, max_grad_norm=CLIP, seed=5, **HYPERPARAMETERS)
    model = streamed(module, device, slots=slots, seed=5)
    gradient_tolerance = 3e-6 if torch_device == "cpu" else 1e-4
    for step in range(10):
        batches = batches_of(family, step)
        loss, norm, gradients = reference.step(batches)
        report = model.step(batches)
        assert report.loss == pytest.approx(loss, rel=1e-6 if step == 0 else 1e-5)
        assert report.grad_norm == pytest.approx(norm, rel=1e-5)
        if step == 0:
            assert_gradients(model, gradients, gradient_tolerance)
    state = model.state_dict()
    for name, parameter in reference.module.named_parameters():
        assert_close(state[name], parameter, 1e-5 if torch_device == "cpu" else 1e-3, name)
    model.close()


@pytest.mark.parametrize("family", FAMILIES, ids=FAMILY_IDS)
def test_plain_backward_fp32(family: Family, device: object, torch_device: str) -> None:
    module = families.build(family, dropout=True)
    reference = Resident(module, device=torch_device, max_grad_norm=CLIP, **HYPERPARAMETERS)
    model = streamed(module, device)
    for step in range(10):
        batches = batches_of(family, step)[:2]
        weights = [megatrain.loss.weight_of(batch, reference.shifted) for batch in batches]
        loss, norm, gradients = reference.step(batches)
        model.optimizer.zero_grad()
        total = 0.0
        for index, (batch, weight) in enumerate(zip(batches, weights, strict=True)):
            torch.manual_seed(megatrain.rng.seed_for(0, step, index))
            own = model(**batch).loss
            (own * (weight / sum(weights))).backward()
            total += float(own.detach()) * weight / sum(weights)
        if step == 0:
            assert_gradients(model, gradients, 3e-6 if torch_device == "cpu" else 1e-4)
        model.optimizer.step()
        assert total == pytest.approx(loss, rel=1e-5)
        assert model.last_grad_norm == pytest.approx(norm, rel=1e-5)
    state = model.state_dict()
    for name, parameter in reference.module.named_parameters():
        assert_close(state[name], parameter, 1e-5 if torch_device == "cpu" else 1e-3, name)
    model.close()


@pytest.mark.parametrize("way", ["step", "backward"])
@pytest.mark.parametrize("family", FAMILIES, ids=FAMILY_IDS)
def test_bf16(family: Family, way: str, device: object, torch_device: str) -> None:
    module = families.build(family)
    model = streamed(module, device, dtype=torch.bfloat16)
    masters = {n: v.clone() for n, v in model.state_dict().items() if n in dict(model.named_parameters())}
    for name, parameter in masters.items():
        assert torch.equal(parameter, dict(families.build(family).named_parameters())[name].float())
    plain = families.build(family)
    reference = Resident(plain, device=torch_device, dtype=torch.bfloat16, max_grad_norm=CLIP)
    exact = Resident(plain, device=torch_device, max_grad_norm=CLIP)
    ours = plainly = 0.0
    fed = {n: torch.nn.Parameter(v.clone()) for n, v in masters.items()}
    decayed = set(Trainer.get_decay_parameter_names(None, plain))  # type: ignore[arg-type]
    kept = [fed[name] for name in fed if name not in decayed]
    groups = [dict(params=[fed[name] for name in fed if name in decayed]), dict(params=kept, weight_decay=0.0)]
    adamw = torch.optim.AdamW(groups, **HYPERPARAMETERS)
    for step in range(10):
        batches = batches_of(family, step)[:2]
        compared = step == 0 or family.far_in_bf16
        if compared:
            split = model.state_dict(dtype=torch.bfloat16)
            with torch.no_grad():
                for name, parameter in [*reference.module.named_parameters(), *exact.module.named_parameters()]:
                    parameter.copy_(split[name])
        if way == "step":
            report = model.step(batches)
            loss = report.loss
        else:
            weights = [megatrain.loss.weight_of(batch, reference.shifted) for batch in batches]
            loss = 0.0
            for batch, weight in zip(batches, weights, strict=True):
                own = model(**batch).loss * (weight / sum(weights))
                own.backward()
                loss += float(own.detach())
            model.optimizer.step()
        if compared:
            expected_loss, gradients = reference.gradients(batches)
            if family.far_in_bf16:
                expected_loss, truth = exact.gradients(batches)
                ours += sum(distance(parameter.grad, truth[name]) for name, parameter in model.named_parameters())
                plainly += sum(distance(gradients[name], value) for name, value in truth.items())
            else:
                assert_gradients(model, gradients, 3e-2)
            assert loss == pytest.approx(expected_loss, rel=1e-2)
        model.synchronize()
        for name, parameter in model.named_parameters():
            fed[name].grad = None if parameter.grad is None else parameter.grad.float()
        norm = float(torch.nn.utils.clip_grad_norm_(fed.values(), CLIP))
        assert model.last_grad_norm == pytest.approx(norm, rel=1e-5)
        adamw.step()
    assert ours <= 1.1 * plainly  # but for chance no farther from fp32
    state = model.state_dict()
    for name, parameter in fed.items():
        assert_close(state[name], parameter, 1e-6, f"master of {name}")
    model.close()


@pytest.mark.parametrize("way", ["step", "backward"])
@pytest.mark.parametrize("family", FAMILIES, ids=FAMILY_IDS)
def test_frozen_embedding(family: Family, way: str, device: object, torch_device: str) -> None:
    module = families.build(family)
    module.get_parameter(family.embedding).requires_grad_(False)
    reference = Resident(module, device=torch_device, max_grad_norm=CLIP, **HYPERPARAMETERS)
    model = streamed(module, device)
    for step in range(10):
        batches = batches_of(family, step)[:2]
        loss, _, gradients = reference.step(batches)
        if way == "step":
            assert model.step(batches).loss == pytest.approx(loss, rel=1e-5)
        else:
            weights = [megatrain.loss.weight_of(batch, reference.shifted) for batch in batches]
            for batch, weight in zip(batches, weights, strict=True):
                (model(**batch).loss * (weight / sum(weights))).backward()
            model.optimizer.step()
        if step == 0:
            assert_gradients(model, gradients, 3e-6 if torch_device == "cpu" else 1e-4)
    state = model.state_dict()
    for name, parameter in reference.module.named_parameters():
        assert_close(state[name], parameter, 1e-5 if torch_device == "cpu" else 1e-3, name)
    model.close()


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
@pytest.mark.parametrize("family", FAMILIES[:6], ids=FAMILY_IDS[:6])
def test_tied_and_untied(family: Family, tied: bool, device: object, torch_device: str) -> None:
    module = families.build(family, tie_word_embeddings=tied)
    reference = Resident(module, device=torch_device, max_grad_norm=CLIP, **HYPERPARAMETERS)
    model = streamed(module, device)
    for step in range(20):
        batches = batches_of(family, step)[:1]
        loss, _, _ = reference.step(batches)
        assert model.step(batches).loss == pytest.approx(loss, rel=1e-5)
    state = model.state_dict()
    for name, parameter in reference.module.named_parameters():
        assert_close(state[name], parameter, 1e-5 if torch_device == "cpu" else 1e-3, name)
    assert len(model.optimizer.state_dict()["state"]) == len(list(reference.module.parameters()))
    model.close()
