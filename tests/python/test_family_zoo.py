"""Every family of the table is exact, or refused by name: on a host backend with delays and poison."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import family_zoo
import pytest
import torch
import transformers
from family_zoo import EXACT, MORE, Row, causal
from resident import Resident, assert_close

import megatrain
from megatrain.experts import ways_of
from megatrain.loss import weight_of
from megatrain.rng import seed_for

NOISE = 3e-8
"""Of the largest gradient of all: half a rounding of it. Some gradients are zero in exact arithmetic (biases
of keys), some small sums of large terms."""


@contextmanager
def streamed(module: torch.nn.Module, **changes: Any) -> Iterator[megatrain.StreamedModel]:
    model = megatrain.StreamedModel(
        module,
        dtype=torch.float32,
        device=megatrain.HostBackend(max_delay_us=50, seed=7, poison=True),
        compile=False,
        keep_gradients=True,
        **changes,
    )
    try:
        yield model
    finally:
        model.close()


STEPS = 5
HYPERPARAMETERS = dict(lr=1e-3, weight_decay=0.1, eps=1e-4)
"""eps lies above the rounding noise of gradients that are zero in exact arithmetic: an update would make a step of
lr out of any."""
SAME = 3e-3
"""Of a tensor's largest movement over all steps: as far as weights may be apart after them. Elements whose gradients
are small beside others of the tensor's have that share of noise in their steps."""
SAME_WHERE_KINKED = 5e-2


def plain_backward(model: megatrain.StreamedModel, batches: list[family_zoo.Batch], shifted: bool) -> float:
    weights = [weight_of(batch, shifted) for batch in batches]
    total = 0.0
    for index, (batch, weight) in enumerate(zip(batches, weights, strict=True)):
        torch.manual_seed(seed_for(0, model.steps, index))
        loss = model(**batch).loss
        (loss * (weight / sum(weights))).backward()
        total += float(loss.detach()) * weight / sum(weights)
    return total


def assert_exact(
    module: torch.nn.Module, batches: list[list[family_zoo.Batch]], way: str, same: float = SAME, **changes: Any
) -> None:
    """The loss of every step, gradients of the first one, and by how much the weights have moved after the last."""
    resident = Resident(module, max_grad_norm=1.0, **HYPERPARAMETERS)
    start = {name: parameter.detach().clone() for name, parameter in resident.module.named_parameters()}
    largest = 0.0
    with streamed(module, optimizer=megatrain.AdamW(**HYPERPARAMETERS), max_grad_norm=1.0, **changes) as model:
        for step, micro_batches in enumerate(batches):
            expected_loss, norm, gradients = resident.step(micro_batches)
            if way == "step":
                loss = model.step(micro_batches).loss
            else:
                loss = plain_backward(model, micro_batches, resident.shifted)
                model.optimizer.step()
            assert loss == pytest.approx(expected_loss, rel=1e-5 if step else 1e-6)
            if step == 0:
                assert_same_gradients(model, gradients)
            largest = max(largest, *(float(each.abs().max()) * min(1.0, 1.0 / norm) for each in gradients.values()))
        state = model.state_dict()
    for name, parameter in resident.module.named_parameters():
        # What noise of a gradient moves, and the rounding of weights.
        noise = HYPERPARAMETERS["lr"] * NOISE * largest / HYPERPARAMETERS["eps"]
        rounding = 2.0**-24 * float(start[name].abs().max()) if parameter.numel() else 0.0
        moved, expected = state[name] - start[name], parameter.detach() - start[name]
        assert_close(moved, expected, same, f"movement of {name}", floor=len(batches) * (noise + rounding))


def assert_same_gradients(model: megatrain.StreamedModel, expected: dict[str, torch.Tensor]) -> None:
    largest = max(float(gradient.abs().max()) for gradient in expected.values())
    assert largest > 0 and all(bool(torch.isfinite(gradient).all()) for gradient in expected.values())
    found = {name: parameter.grad for name, parameter in model.named_parameters()}
    assert {name for name, gradient in found.items() if gradient is not None} == set(expected)
    for name, gradient in expected.items():
        assert_close(found[name], gradient, 3e-6, f"gradient of {name}", floor=NOISE * largest)


def skip_absent(row: Row) -> None:
    if not row.exists:
        pytest.skip(f"transformers {transformers.__version__} has no {row.needs}")


@pytest.mark.parametrize("way", ["step", "backward"])
@pytest.mark.parametrize("row", EXACT, ids=[row.name for row in EXACT])
def test_exact(row: Row, way: str) -> None:
    skip_absent(row)
    assert_exact(row.build(), [row.batches(step) for step in range(STEPS)], way)


@pytest.mark.parametrize("row", MORE, ids=[row.name for row in MORE])
def test_further_families(row: Row, request: pytest.FixtureRequest) -> None:
    if not request.config.getoption("--every-family") and request.config.getoption("--models-page") is None:
        pytest.skip("further families are run with --every-family")
    skip_absent(row)
    for way in ("step", "backward"):
        same = SAME_WHERE_KINKED if row.kinked else SAME
        assert_exact(row.build(), [row.batches(step) for step in range(STEPS)], way, same)


@pytest.mark.parametrize("row", [*EXACT, *MORE], ids=[row.name for row in (*EXACT, *MORE)])
def test_experts_by_choice(row: Row, request: pytest.FixtureRequest) -> None:
    """With too few tokens for all experts, and the others' memory not a number."""
    if not request.config.getoption("--every-family") and request.config.getoption("--models-page") is None:
        pytest.skip("experts of every family are run with --every-family")
    skip_absent(row)
    module = row.build()
    if "by choice" not in ways_of(module):
        pytest.skip("no experts that can go up by choice")
    batches = [[row.batch(1, rows=1, length=3, left_padding=0)]]
    placement = megatrain.Placement(experts="selected")
    for way in ("step", "backward"):
        assert_exact(module, batches, way, placement=placement)
        module = row.build()


@pytest.mark.parametrize(
    "row, length, refusal",
    [
        (causal("big_bird", "BigBird", block_size=4, num_random_blocks=1, is_decoder=True), 56, "draws from Python's"),
        (causal("xlm", "XLM", use_cache=False), 9, r"attentions\.0 was given a EncoderDecoderCache"),
    ],
    ids=lambda value: getattr(value, "name", ""),
)
def test_families_that_are_refused_by_name(row: Row, length: int, refusal: str) -> None:
    """Block-sparse attention draws its blocks from numpy's generator; XLM makes a cache in every forward."""
    skip_absent(row)
    with streamed(row.build()) as model, pytest.raises(megatrain.UnsupportedModelError, match=refusal):
        model.step(row.batch(1, length=length))


def test_attention_weights_have_their_gradient() -> None:
    """Collected when a call asks for them, from inside of blocks that are streamed already."""
    row = next(row for row in EXACT if row.name == "llama")
    module = row.build()
    module.set_attn_implementation("eager")
    resident = copy.deepcopy(module)
    batch = row.batch(1)
    with streamed(module) as model:
        for owner in (resident, model):
            output = owner(**batch, output_attentions=True)
            assert len(output.attentions) == len(module.model.layers)
            (output.loss + sum(weights.square().sum() for weights in output.attentions)).backward()
        for (name, parameter), expected in zip(model.named_parameters(), resident.parameters(), strict=True):
            assert_close(parameter.grad, expected.grad, 3e-6, f"gradient of {name}")


@pytest.mark.parametrize("way", ["step", "backward"])
def test_hidden_states_collected_from_blocks(way: str) -> None:
    """Hooks that transformers has put on the blocks before they were streamed go on seeing what blocks return."""
    row = next(row for row in EXACT if row.name == "llava")
    module, batches = row.build(), row.batches()
    with torch.no_grad():
        module(**batches[0])
    assert_exact(module, [batches], way, example_batch=batches[0])


@pytest.mark.parametrize("learns", ["projector", "projector and language", "vision"])
@pytest.mark.parametrize("name, projector", [("llava", "multi_modal_projector"), ("qwen2_5_vl", "visual.merger")])
def test_images_change_the_loss_and_the_projector_learns(name: str, projector: str, learns: str) -> None:
    row = next(row for row in EXACT if row.name == name)
    skip_absent(row)
    module = row.build()
    for parameter_name, parameter in module.named_parameters():
        part = "language"
        if projector in parameter_name:
            part = "projector"
        elif "vis" in parameter_name:
            part = "vision"
        parameter.requires_grad_(part in learns)
    resident = Resident(module, max_grad_norm=1.0, **HYPERPARAMETERS)
    before = {name: parameter.detach().clone() for name, parameter in resident.module.named_parameters()}
    with streamed(module, optimizer=megatrain.AdamW(**HYPERPARAMETERS), max_grad_norm=1.0) as model:
        batches = row.batches()
        blank = [{**batch, "pixel_values": torch.zeros_like(batch["pixel_values"])} for batch in batches]
        assert abs(model.evaluate(batches).loss - model.evaluate(blank).loss) > 1e-3
        for _ in range(STEPS):
            expected, _, gradients = resident.step(batches)
            assert model.step(batches).loss == pytest.approx(expected, rel=3e-6)
        state = model.state_dict()
        for parameter_name, parameter in resident.module.named_parameters():
            assert_close(state[parameter_name], parameter, 1e-5, parameter_name)
            moved = not torch.equal(state[parameter_name], before[parameter_name])
            assert moved == (parameter_name in gradients), parameter_name
        assert gradients and all(resident.module.get_parameter(name).requires_grad for name in gradients)


@pytest.mark.parametrize("before", [True, False], ids=["before", "after"])
def test_a_hook_on_a_block_sees_each_call_once(before: bool) -> None:
    row = next(row for row in EXACT if row.name == "llama")
    module, batch = row.build(), row.batches()[0]
    seen: list[torch.Tensor] = []

    def hook(_: torch.nn.Module, args: Any, output: torch.Tensor) -> None:
        seen.append(output)

    handle = module.model.layers[1].register_forward_hook(hook) if before else None
    with streamed(module, self_check=False) as model:
        handle = handle or module.model.layers[1].register_forward_hook(hook)
        model(**batch).loss.backward()
        assert len(seen) == 1 and seen[0].requires_grad
        handle.remove()
        model.optimizer.zero_grad()
        model(**batch).loss.backward()
        assert len(seen) == 1


@pytest.mark.parametrize("before", [True, False], ids=["before", "after"])
def test_checkpointing_is_left_to_the_schedule(before: bool) -> None:
    row = next(row for row in EXACT if row.name == "llama")
    module, batches = row.build(), row.batches()
    expected_loss, expected = Resident(module, max_grad_norm=None).gradients(batches)
    if before:
        module.gradient_checkpointing_enable()
    with streamed(module) as model:
        if not before:
            module.gradient_checkpointing_enable()
        assert model.step(batches).loss == pytest.approx(expected_loss, rel=1e-6)
        for name, parameter in model.named_parameters():
            assert_close(parameter.grad, expected[name], 3e-6, f"gradient of {name}")


@pytest.mark.parametrize("way", ["step", "backward"])
@pytest.mark.parametrize("dora", [False, True], ids=["lora", "dora"])
def test_adapters(dora: bool, way: str) -> None:
    peft = pytest.importorskip("peft")
    row = next(row for row in EXACT if row.name == "llama")
    config = peft.LoraConfig(
        r=4, lora_dropout=0.1, use_dora=dora, target_modules=["q_proj", "down_proj"], init_lora_weights=False,
        task_type="CAUSAL_LM",
    )  # fmt: skip
    torch.manual_seed(5)
    assert_exact(peft.get_peft_model(row.build(), config).train(), [row.batches(step) for step in range(STEPS)], way)
