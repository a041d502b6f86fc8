"""Whatever traits blocks have, and wherever what they need is: three steps equal those of plain PyTorch."""

from __future__ import annotations

import warnings
from dataclasses import replace

import pytest
import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from random_stacks import BlockSpec, RandomStacks, StackSpec, random_batch
from resident import Resident, assert_close

import megatrain
from megatrain import BlockPlacement, Placement
from megatrain.loss import weight_of

HYPERPARAMETERS = dict(lr=1e-3, weight_decay=0.1, eps=1e-4)
STEPS = 3

rarely = st.integers(0, 3).map(lambda value: value == 0)
blocks = st.builds(
    BlockSpec,
    inner=st.integers(1, 9),
    bias=st.booleans(),
    scale=st.sampled_from([0.5, 1.0]),
    buffer=rarely,
    experts=st.sampled_from([0, 0, 0, 2, 4]),
    idle=rarely,
    sometimes=rarely,
    shares=rarely,
    writes=rarely,
    twice=rarely,
    dropout=st.sampled_from([0.0, 0.0, 0.0, 0.2]),
)
stacks = st.builds(
    StackSpec,
    width=st.integers(2, 7),
    stacks=st.lists(st.lists(blocks, min_size=2, max_size=4).map(tuple), min_size=1, max_size=2).map(tuple),
    tied=st.booleans(),
    hooked=rarely,
    frozen=st.lists(st.integers(0, 60), max_size=12).map(tuple),
)
placements = st.builds(
    Placement,
    order=st.sampled_from(["layer-major", "micro-batch-major"]),
    blocks=st.lists(
        st.builds(
            BlockPlacement,
            keep=st.sampled_from(["inputs", "selected", "everything"]),
            kept_on=st.sampled_from(["device", "host"]),
            resident=st.sampled_from(["none", "none", "weights", "all"]),
        ),
        min_size=1,
        max_size=3,
    ).map(tuple),
    outside=st.sampled_from([{}, {"": "all"}]),
)


# Failing examples are small: shrinking them would take minutes.
@settings(
    max_examples=25,
    derandomize=True,
    deadline=None,
    phases=[Phase.generate],
    suppress_health_check=list(HealthCheck),
)
@given(
    spec=stacks,
    placement=placements,
    rows=st.lists(st.integers(1, 5), min_size=1, max_size=3),
    way=st.sampled_from(["step", "backward"]),
    slots=st.integers(1, 3),
    clip=st.sampled_from([None, 0.5]),
)
def test_streamed_equals_resident(
    spec: StackSpec, placement: Placement, rows: list[int], way: str, slots: int, clip: float | None
) -> None:
    torch.manual_seed(1)
    module = RandomStacks(spec)
    if not any(parameter.requires_grad for parameter in module.parameters()):
        return
    resident = Resident(module, max_grad_norm=clip, **HYPERPARAMETERS)
    placement = replace(placement, blocks=placement.blocks[: sum(map(len, spec.stacks))])
    model = megatrain.StreamedModel(
        module,
        optimizer=megatrain.AdamW(**HYPERPARAMETERS),
        max_grad_norm=clip,
        dtype=torch.float32,
        device=megatrain.HostBackend(max_delay_us=30, seed=5, poison=True),
        compile=False,
        keep_gradients=True,
        placement=placement,
        slots=slots,
        blocks=[f"stacks.{name}" for name in module.stacks],
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # parameters without gradients are named
        for step in range(STEPS):
            batches = [random_batch(10 * step + i, count, spec.width) for i, count in enumerate(rows)]
            expected, norm, gradients = resident.step(batches)
            if way == "step":
                loss = model.step(batches).loss
            else:
                loss = 0.0
                for index, batch in enumerate(batches):
                    torch.manual_seed(megatrain.rng.seed_for(0, step, index))
                    one = model(**batch).loss * (weight_of(batch, False) / sum(rows))
                    one.backward()
                    loss += float(one.detach())
                model.optimizer.step()
            assert loss == pytest.approx(expected, rel=3e-6)
            assert model.last_grad_norm == pytest.approx(norm, rel=1e-5)
            found = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
            assert set(found) == set(gradients)
            largest = max(float(gradient.abs().max()) for gradient in gradients.values())
            for name, gradient in gradients.items():
                assert_close(found[name], gradient, 1e-5, f"gradient of {name}", floor=1e-6 * largest)
    state, faces = model.state_dict(), dict(model.named_parameters())
    for name, parameter in resident.module.named_parameters():
        assert_close(state[name], parameter, 1e-5, name)
        theirs = resident.optimizer.state.get(parameter)
        if theirs is None:
            assert faces[name] not in model.optimizer.state, name
        else:
            ours = model.optimizer.state[faces[name]]
            assert float(ours["step"]) == float(theirs["step"]), name
            assert_close(ours["exp_avg"], theirs["exp_avg"], 2e-5, f"exp_avg of {name}", floor=1e-7)
    model.close()
