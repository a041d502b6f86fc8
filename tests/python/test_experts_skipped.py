"""`skip_idle_experts`: experts without tokens are left out of the update."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from expert_models import HYPERPARAMETERS, OwnForward, Watch, choose, forced, read_all, stream
from families import text_batch
from family_zoo import Batch, causal
from resident import Resident, assert_close
from test_family_zoo import plain_backward
from torch import nn
from transformers.models.mixtral.modeling_mixtral import MixtralExperts

import megatrain
from megatrain import BlockPlacement, Placement


class ByExpert:
    """The reference of `skip_idle_experts`: plain torch, in which each expert's slice is a parameter of its own that
    has a gradient only in steps in which the expert got tokens."""

    def __init__(self, module: nn.Module, max_grad_norm: float, **hyperparameters: Any) -> None:
        self.resident = Resident(module, max_grad_norm=max_grad_norm, **hyperparameters)
        self.module = self.resident.module
        self.watch = Watch(self.module)
        self.max_grad_norm = max_grad_norm
        self.slices: dict[str, list[nn.Parameter]] = {}
        decay, others = [], []
        for name, parameter in self.module.named_parameters():
            if ".experts." in name:
                self.slices[name] = [nn.Parameter(entry.detach().clone()) for entry in parameter]
                decay += self.slices[name]
            else:
                (decay if parameter.dim() > 1 else others).append(parameter)
        groups = [dict(params=decay), dict(params=others, weight_decay=0.0)]
        self.optimizer = torch.optim.AdamW(groups, **hyperparameters)

    def step(self, batches: list[Batch]) -> tuple[float, float]:
        loss, gradients = self.resident.gradients(batches)
        used = self.watch.take()
        norm = float(torch.stack([gradient.norm() for gradient in gradients.values()]).norm())
        scale = min(1.0, self.max_grad_norm / (norm + 1e-6))
        for name, parameter in self.module.named_parameters():
            gradient = gradients[name] * scale
            if name not in self.slices:
                parameter.grad = gradient
                continue
            hit = used.get(int(name.split("layers.")[1].split(".")[0]), frozenset())
            for expert, entry in enumerate(self.slices[name]):
                entry.grad = gradient[expert] if expert in hit else None
        self.optimizer.step()
        self.resident.steps += 1
        with torch.no_grad():
            for name, parameter in self.module.named_parameters():
                for expert, entry in enumerate(self.slices.get(name, ())):
                    parameter[expert] = entry
        return loss, norm

    def steps(self, name: str) -> list[float]:
        return [float(self.optimizer.state[entry].get("step", 0.0)) for entry in self.slices[name]]


def forced_batches(seed: int) -> list[Batch]:
    return [text_batch(2 * seed), text_batch(2 * seed + 1, rows=3, length=7)]


CHOSEN = [[0, 0, 1], [3, 1, 1], [0, 1, 2], [0, 0, 2], [3, 1, 1]]


@pytest.mark.parametrize("way", ["step", "backward"])
@pytest.mark.parametrize(
    "placement",
    [
        Placement(experts="selected"),
        Placement(experts="whole"),
        Placement(experts="selected", order="micro-batch-major", blocks=(BlockPlacement(keep="everything"),)),
        Placement(experts="selected", blocks=(BlockPlacement(resident="all"), BlockPlacement())),
    ],
    ids=["selected", "whole", "kept", "resident"],
)
def test_idle_experts_are_skipped(placement: Placement, way: str) -> None:
    """As if each expert were a parameter of its own that has no gradient in steps without tokens."""
    module = forced()
    reference = ByExpert(module, 0.5, **HYPERPARAMETERS)
    before = {name: parameter.detach().clone() for name, parameter in module.named_parameters()}
    model = stream(module, max_grad_norm=0.5, placement=placement, skip_idle_experts=True)
    for step, chosen in enumerate(CHOSEN):
        choose(module.model.layers, chosen)
        choose(reference.module.model.layers, chosen)
        expected, norm = reference.step(forced_batches(step))
        if way == "step":
            loss = model.step(forced_batches(step)).loss
        else:
            loss = plain_backward(model, forced_batches(step), True)
            model.optimizer.step()
        assert loss == pytest.approx(expected, rel=3e-6)
        assert model.last_grad_norm == pytest.approx(norm, rel=1e-5)
    state = model.state_dict()
    faces = dict(model.named_parameters())
    for name, parameter in reference.module.named_parameters():
        assert_close(state[name], parameter, 1e-5, name)
        if name not in reference.slices:
            continue
        found = model.optimizer.state[faces[name]]
        assert found["step"].tolist() == reference.steps(name)
        for expert, steps in enumerate(reference.steps(name)):
            if steps == 0:
                assert torch.equal(state[name][expert], before[name][expert])
                assert not found["exp_avg"][expert].any() and not found["exp_avg_sq"][expert].any()
    assert reference.steps("model.layers.1.mlp.experts.down_proj") == [2.0, 5.0, 3.0, 0.0]
    model.close()


def test_idle_experts_are_skipped_where_updates_do_not_wait_for_the_norm() -> None:
    module = forced()
    reference = ByExpert(module, math.inf, **HYPERPARAMETERS)
    model = stream(module, skip_nonfinite=False, skip_idle_experts=True)
    for step, chosen in enumerate(CHOSEN):
        choose(module.model.layers, chosen)
        choose(reference.module.model.layers, chosen)
        reference.step(forced_batches(step))
        model.step(forced_batches(step))
    state = model.state_dict()
    for name, parameter in reference.module.named_parameters():
        assert_close(state[name], parameter, 1e-5, name)
    model.close()


def test_without_the_option_idle_experts_follow_torch() -> None:
    """A gradient of zeros: moments fade, weights decay, the tensor has one step count."""
    module = forced()
    resident = Resident(module, max_grad_norm=0.5, **HYPERPARAMETERS)
    model = stream(module, max_grad_norm=0.5)
    for step, chosen in enumerate(CHOSEN[:3]):
        choose(module.model.layers, chosen)
        choose(resident.module.model.layers, chosen)
        resident.step(forced_batches(step))
        model.step(forced_batches(step))
    name = "model.layers.0.mlp.experts.down_proj"
    face, theirs = dict(model.named_parameters())[name], dict(resident.module.named_parameters())[name]
    state = model.state_dict()
    ours, expected = model.optimizer.state[face], resident.optimizer.state[theirs]
    assert float(ours["step"]) == float(expected["step"]) == 3
    assert_close(ours["exp_avg"], expected["exp_avg"], 2e-5, name)
    assert_close(state[name], theirs, 1e-5, name)
    model.close()


@pytest.mark.parametrize("moments", ["fp32", "int8"])
def test_resume_with_skipped_experts(tmp_path: Any, moments: str) -> None:
    """Five steps are three, a checkpoint, and two, to the bit, in the modes whose rounding counts steps."""
    settings = dict(skip_idle_experts=True, dtype=torch.bfloat16, master="none", moments=moments)

    def run(model: megatrain.StreamedModel, steps: range) -> list[float]:
        losses = []
        for step in steps:
            choose([block.skeleton for block in model._parts.blocks], CHOSEN[step])
            losses.append(model.step(forced_batches(step)).loss)
        return losses

    sizes = dict(hidden_size=32, intermediate_size=64)
    straight = stream(forced(**sizes), **settings)
    run(straight, range(3))
    straight.save_checkpoint(tmp_path)
    losses = run(straight, range(3, 5))
    resumed = stream(forced(**sizes), **settings)
    resumed.load_checkpoint(tmp_path)
    assert run(resumed, range(3, 5)) == losses
    state = resumed.state_dict()
    for name, values in straight.state_dict().items():
        assert torch.equal(values, state[name]), name
    assert resumed.optimizer.progress() == straight.optimizer.progress()
    assert any(isinstance(steps, list) for steps in straight.optimizer.progress()["steps"].values())

    loaded = stream(forced(**sizes), **settings)
    loaded.optimizer.load_state_dict(straight.optimizer.state_dict())
    assert loaded.optimizer.progress() == straight.optimizer.progress()

    plain = stream(forced(**sizes), **{**settings, "skip_idle_experts": False})
    with pytest.raises(megatrain.CheckpointError, match="step counts of their own; use skip_idle_experts=True"):
        plain.load_checkpoint(tmp_path)
    with pytest.raises(ValueError, match="step counts of their own; use skip_idle_experts=True"):
        plain.optimizer.load_state_dict(straight.optimizer.state_dict())
    run(plain, range(1))
    loaded.optimizer.load_state_dict(plain.optimizer.state_dict())  # one count for all is one for each
    assert loaded.optimizer.progress()["steps"]["model.layers.0.mlp.experts.down_proj"] == [1] * 4
    for model in (straight, resumed, loaded, plain):
        model.close()


def test_skipping_is_refused_where_it_cannot_be() -> None:
    with pytest.raises(megatrain.UnsupportedModelError, match="no block has experts that can be streamed"):
        stream(causal("llama", "Llama").build(), skip_idle_experts=True)
    with pytest.raises(megatrain.UnsupportedModelError, match=r"has 3072 elements; .* a multiple of 1000"):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("megatrain.experts.SKIP_ALIGNMENT", 1000)
            stream(forced(), skip_idle_experts=True)
    with pytest.raises(megatrain.UnsupportedModelError, match="with moments='int8' they must be a multiple of 128"):
        stream(forced(hidden_size=20, intermediate_size=20), skip_idle_experts=True, moments="int8")


def refusal_to_skip(module: nn.Module) -> str:
    with pytest.raises(megatrain.UnsupportedModelError, match="True, but which experts of ") as caught:
        stream(module, skip_idle_experts=True)
    return str(caught.value)


def test_skipping_is_refused_where_some_experts_do_not_say_who_got_tokens() -> None:
    """Even in one block, unless its experts are frozen."""
    module = forced()
    experts = module.model.layers[1].mlp.experts
    experts.__class__ = OwnForward
    message = refusal_to_skip(module)
    assert "model.layers.1.mlp.experts get tokens is not known: OwnForward is not called with the router" in message
    experts.requires_grad_(False)
    stream(module, skip_idle_experts=True).close()

    module = forced()
    read_all(module.model.layers[2:])
    assert "model.layers.2.mlp.experts get tokens is not known: MixtralExperts is not called" in refusal_to_skip(module)

    module = forced()
    module.model.layers[2].mlp.experts.down_proj = module.model.layers[1].mlp.experts.down_proj
    assert "the tensors of MixtralExperts are not one block's alone" in refusal_to_skip(module)

    module = forced()
    module.model.apart = MixtralExperts(module.config)
    assert "experts of model.apart get tokens" in refusal_to_skip(module)
