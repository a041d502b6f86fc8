"""Parameters that transformers keeps in fp32 in bf16 models (routers, biases of time steps) are fp32 in their tiles."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import family_zoo
import pytest
import torch
import transformers
from case_models import adversarial, stream
from family_zoo import Row
from resident import Resident, assert_close

import megatrain
from megatrain import Placement
from megatrain.export.weights import CheckpointWeights
from megatrain.kept_fp32 import kept_in_fp32

NAMES = {"deepseek_v3": "mlp.gate.weight", "kimi_linear": "mlp.gate.weight|dt_bias", "deepseek_v2": "mlp.gate.weight"}
STREAMED, RESIDENT = Placement(), Placement.spread(3, resident=2, selected=1)
SETTINGS: dict[str, Any] = dict(lr=1e-3, weight_decay=0.1, eps=1e-6)


def row(name: str) -> Row:
    found = next(row for row in [*family_zoo.EXACT, *family_zoo.MORE] if row.name == name)
    if not found.exists:
        pytest.skip(f"transformers {transformers.__version__} has no {found.needs}")
    return found


def streamed(module: torch.nn.Module, **changes: Any) -> megatrain.StreamedModel:
    settings: dict[str, Any] = dict(dtype=torch.bfloat16, optimizer=megatrain.AdamW(**SETTINGS), self_check=False)
    return stream(module, **{**settings, **changes})


def kept(module: torch.nn.Module, part: str) -> list[str]:
    found = [name for name, _ in module.named_parameters() if re.search(part, name)]
    assert found
    return found


class InHalf(Resident):
    """bf16 but for the named parameters, as transformers loads a model with dtype=torch.bfloat16."""

    def __init__(self, module: torch.nn.Module, names: list[str], values: dict[str, torch.Tensor]) -> None:
        super().__init__(module, max_grad_norm=1.0, **SETTINGS)
        for name, parameter in self.module.named_parameters():
            parameter.data = values[name].to(torch.float32 if name in names else torch.bfloat16)


@pytest.mark.parametrize("way", ["step", "backward"])
@pytest.mark.parametrize("placement", [STREAMED, RESIDENT], ids=["streamed", "resident"])
@pytest.mark.parametrize("name", ["deepseek_v3", "kimi_linear"])
def test_computed_in_fp32_and_updated_as_by_torch(name: str, placement: Placement, way: str) -> None:
    found = row(name)
    module = found.build()
    names = kept(module, NAMES[name])
    model = streamed(module, placement=placement)
    reference = InHalf(found.build(), names, model.state_dict(dtype=torch.bfloat16))
    faces = dict(model.named_parameters())
    assert {n for n, face in faces.items() if face.dtype == torch.float32} == set(names)
    fed = {n: torch.nn.Parameter(value.clone()) for n, value in model.state_dict().items() if n in names}
    adamw = torch.optim.AdamW(
        [dict(params=[value], weight_decay=0.1 if value.dim() > 1 else 0.0) for value in fed.values()], **SETTINGS
    )
    for step in range(3):
        batches = found.batches(step)
        if step == 0:
            loss, gradients = reference.gradients(batches)
        if way == "step":
            own = model.step(batches).loss
        else:
            weights = [megatrain.loss.weight_of(batch, True) for batch in batches]
            own = 0.0
            for batch, weight in zip(batches, weights, strict=True):
                part = model(**batch).loss * (weight / sum(weights))
                part.backward()
                own += float(part.detach())
            model.optimizer.step()
        model.synchronize()
        if step == 0:
            assert own == pytest.approx(loss, rel=1e-2)
            for each in names:
                assert faces[each].grad.dtype == torch.float32
                assert_close(faces[each].grad, gradients[each], 3e-2, f"gradient of {each}")
        coefficient = min(1.0, 1.0 / (model.last_grad_norm + 1e-6))
        for each, value in fed.items():
            value.grad = faces[each].grad * coefficient
        adamw.step()
    state = model.state_dict()
    for each, value in fed.items():
        assert_close(state[each], value, 1e-6, each)
        assert not torch.equal(state[each], state[each].bfloat16().float())


def test_the_values_that_are_computed_with_are_not_rounded() -> None:
    """A change below bf16's resolution of a router's weight changes its scores."""
    found = row("deepseek_v2")
    module = found.build()
    (first, *_) = kept(module, NAMES["deepseek_v2"])
    model = streamed(module)
    batch = found.batches()[0]
    before = model.evaluate(batch).loss
    with model.edit_parameters() as values:
        values[first].mul_(1 + 2.0**-11)
    assert model.evaluate(batch).loss != before


def test_saved_and_loaded_in_fp32(tmp_path: Path) -> None:
    found = row("deepseek_v3")
    module = found.build()
    names = kept(module, NAMES["deepseek_v3"])
    model = streamed(module)
    model.step(found.batches())
    exact = {name: value for name, value in model.state_dict().items() if name in names}
    model.save_pretrained(tmp_path / "model")
    model.save_checkpoint(tmp_path / "checkpoints")
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "model", dtype=torch.bfloat16)
    again = megatrain.StreamedModel.from_pretrained(tmp_path / "model", device=adversarial(), dtype=torch.bfloat16)
    saved = CheckpointWeights(next((tmp_path / "checkpoints").iterdir()))
    for name, parameter in loaded.named_parameters():
        assert (parameter.dtype == torch.float32) == (name in names), name
        assert saved.dtype_of(name) == parameter.dtype, name
    for name, value in exact.items():
        assert torch.equal(loaded.get_parameter(name), value), name
        assert torch.equal(again.state_dict()[name], value), name
        assert torch.equal(torch.cat(list(saved.pieces(name, 0, value.numel()))).view(value.shape), value), name
        assert model.state_dict(dtype=torch.bfloat16)[name].dtype == torch.float32


@pytest.mark.parametrize("name", ["deepseek_v2", "deepseek_v3"])
def test_a_router_that_an_adapter_trains_stays_fp32(name: str, tmp_path: Path) -> None:
    """PEFT makes a copy of it to be trained, buffers included."""
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(r=2, target_modules=["o_proj"], modules_to_save=["gate"], task_type="CAUSAL_LM")
    module = peft.get_peft_model(row(name).build(), config)
    routers = [each for each, _ in module.named_parameters() if ".gate." in each]
    assert any(".modules_to_save." in each for each in routers)
    model = streamed(module)
    kept_ones = {p.name for p in model._parts.units.parameters if p.stays_fp32}
    assert kept_ones == {each for each in routers if "lora" not in each}
    before = {each: value.clone() for each, value in model.state_dict().items() if each in routers}
    model.step(row(name).batches())
    moved = {each for each, value in model.state_dict().items() if each in routers and not value.equal(before[each])}
    assert moved == {each for each in routers if ".modules_to_save." in each}
    model.save_pretrained(tmp_path)
    again = peft.PeftModel.from_pretrained(row(name).build(), tmp_path)
    for each, value in again.state_dict().items():
        if ".modules_to_save." in each:
            assert torch.equal(value.float(), model.state_dict()[each].float()), each


def test_units_outside_the_stacks_are_complete_before_the_blocks() -> None:
    """Blocks use the fp32 routers, which lie outside, but not the norm and the head."""
    model = streamed(row("deepseek_v3").build(), max_grad_norm=None, skip_nonfinite=False)
    model.step(row("deepseek_v3").batches())
    names: list[str] = []
    complete = model._parts.updates.complete
    model._parts.updates.complete = lambda unit: names.append(unit.name) or complete(unit)  # type: ignore[method-assign,func-returns-value]
    model.step(row("deepseek_v3").batches())
    first_block = next(index for index, name in enumerate(names) if name in model._parts.units.block_units)
    assert {"model.norm", "lm_head"} <= set(names[:first_block])


def test_places_are_given_by_the_module_that_owns_the_weights() -> None:
    found = row("deepseek_v2")
    module = found.build()
    owner = kept(module, NAMES["deepseek_v2"])[0].rpartition(".")[0]
    model = streamed(module, placement=Placement(outside={owner: "all"}))
    resident = {unit.name for unit in model.units if unit.tile in model._parts.weights.resident}
    assert resident == {f"{owner} (fp32)"}


def test_fp32_weights_have_one_format() -> None:
    """With fp32 weights nothing is set apart."""
    model = stream(row("deepseek_v2").build(), self_check=False)
    assert not any(parameter.stays_fp32 for parameter in model._parts.units.parameters)


@pytest.mark.parametrize("name", ["deepseek_v2", "deepseek_v4", "glm4_moe", "nemotron_h", "BailingHybrid", "HYV4"])
def test_families_are_those_of_transformers_in_bf16(name: str) -> None:
    """One batch: more are summed in fp32 here, and in bf16 there. HYV4 keeps its output embedding in fp32."""
    found = row(name)
    module = found.build()
    ids = kept_in_fp32(module)
    names = [name for name, parameter in module.named_parameters() if id(parameter) in ids]
    assert names
    model = streamed(module)
    reference = InHalf(found.build(), names, model.state_dict(dtype=torch.bfloat16))
    batch = found.batches()[0]
    loss, gradients = reference.gradients([batch])
    assert model.step(batch).loss == pytest.approx(loss, rel=1e-6)
    for each, face in model.named_parameters():
        if each in gradients:
            assert_close(face.grad, gradients[each], 3e-2, f"gradient of {each}")
