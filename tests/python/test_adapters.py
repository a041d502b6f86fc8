"""Adapters and frozen parameters: what they cost, what moves for them, and that they learn what torch's learn."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import families
import pytest
import torch
import transformers
from case_models import assert_same_parameters, stream
from families import FAMILIES, VOCABULARY, text_batch
from resident import Resident
from torch import nn

import megatrain
from megatrain._native import Section

peft = pytest.importorskip("peft")
LLAMA, GPT2 = FAMILIES[0], FAMILIES[5]
SETTINGS = dict(lr=1e-3, weight_decay=0.1, eps=1e-6)


def lora(family: Any = LLAMA, **changes: Any) -> nn.Module:
    targets = ["c_attn", "c_proj"] if family is GPT2 else ["q_proj", "down_proj"]
    settings: dict[str, Any] = dict(r=4, target_modules=targets, init_lora_weights=False, lora_dropout=0.1)
    config = peft.LoraConfig(**{**settings, **changes}, task_type="CAUSAL_LM", fan_in_fan_out=family is GPT2)
    torch.manual_seed(5)
    return peft.get_peft_model(families.build(family), config).train()


def prompt(**_: Any) -> nn.Module:
    config = peft.PromptTuningConfig(num_virtual_tokens=3, task_type="CAUSAL_LM")
    torch.manual_seed(5)
    return peft.get_peft_model(families.build(LLAMA), config).train()


def p_tuning(**_: Any) -> nn.Module:
    config = peft.PromptEncoderConfig(num_virtual_tokens=3, encoder_hidden_size=8, task_type="CAUSAL_LM")
    torch.manual_seed(5)
    return peft.get_peft_model(families.build(LLAMA), config).train()


WAYS: dict[str, Callable[[], nn.Module]] = {
    "lora": lora,
    "dora": lambda: lora(use_dora=True),
    "lora of gpt2": lambda: lora(GPT2),
    "lora with biases": lambda: lora(GPT2, bias="lora_only"),
    "lora with a trained head": lambda: lora(modules_to_save=["lm_head"]),
    "lora of embedding and head": lambda: lora(target_modules=["q_proj", "embed_tokens", "lm_head"], lora_dropout=0.0),
    "rank-stabilised, of all products": lambda: lora(target_modules="all-linear", use_rslora=True, lora_dropout=0.0),
    "prompt tuning": prompt,
    "p-tuning": p_tuning,
}


@pytest.mark.parametrize(
    ("name", "way"), [(n, "step") for n in WAYS] + [(n, "backward") for n in ("lora", "dora", "prompt tuning")]
)
def test_five_steps(name: str, way: str) -> None:
    module = WAYS[name]()
    resident = Resident(module, max_grad_norm=1.0, **SETTINGS)
    model = stream(module, optimizer=megatrain.AdamW(**SETTINGS))
    before = {key: value.clone() for key, value in model.state_dict().items()}
    for step in range(5):
        batches = [text_batch(step), text_batch(step + 60, rows=3, length=7)]
        loss, norm, _ = resident.step(batches)
        if way == "step":
            report = model.step(batches)
            assert report.loss == pytest.approx(loss, rel=1e-5)
        else:
            weights = [megatrain.loss.weight_of(batch, resident.shifted) for batch in batches]
            for index, (batch, weight) in enumerate(zip(batches, weights, strict=True)):
                torch.manual_seed(megatrain.rng.seed_for(0, step, index))
                (model(**batch).loss * (weight / sum(weights))).backward()
            model.optimizer.step()
        assert model.last_grad_norm == pytest.approx(norm, rel=1e-5)
    assert_same_parameters(model, resident, 2e-5)
    after = model.state_dict()
    trainable = {key for key, parameter in resident.module.named_parameters() if parameter.requires_grad}
    for key in before:
        if key in trainable:
            assert not torch.equal(after[key], before[key]), f"{key} has not moved"
        elif key in dict(model.named_parameters()):
            assert torch.equal(after[key], before[key]), f"{key} is frozen"
    model.close()


@pytest.mark.parametrize("dora", [False, True], ids=["lora", "dora"])
def test_a_frozen_base_takes_two_bytes_and_sends_nothing_down(dora: bool) -> None:
    module = lora(use_dora=dora, lora_dropout=0.0)
    model = stream(module, dtype=torch.bfloat16, device=megatrain.HostBackend(), keep_gradients=False)
    for step in range(2):
        model.step([text_batch(step)])
    held = model.memory_report().host_tiles
    for unit in model._parts.units.units:
        of_all = sum(p.numel for p in unit.parameters)
        of_trained = sum(p.numel for p in unit.parameters if p.trainable)
        gaps = 128 * len(unit.parameters)  # a parameter begins at 256 bytes of weights
        sections = {s: unit.layout.section(s)[1] for s in Section.__members__.values() if s.name != "accumulator"}
        assert 2 * of_all <= sections[Section.weights] <= 2 * (of_all + gaps)
        others = sum(nbytes for section, nbytes in sections.items() if section.name != "weights")
        assert 12 * of_trained <= others <= 12 * (of_trained + gaps * bool(of_trained))
        held -= sum(-(-nbytes // 4096) * 4096 for nbytes in sections.values())  # each begins on a page
    assert held == 0
    spans = model._parts.engine.trace()
    down = {span.tile: span.nbytes for span in spans if span.kind == "copy_down"}
    assert down, "adapters have gradients"
    for unit in model._parts.units.units:
        own = [p for p in unit.parameters if p.trainable]
        assert (unit.tile in down) == bool(own), unit.name
        assert down.get(unit.tile, 0) == unit.layout.section(Section.gradients)[1]
        assert down.get(unit.tile, 0) <= 2 * sum(p.numel + 128 for p in own)
    up = [span.nbytes for span in spans if span.kind == "copy_up" and span.tile == model._parts.units.units[1].tile]
    assert set(up) == {model._parts.units.units[1].layout.section(Section.weights)[1]}
    updates = {span.tile for span in spans if span.kind == "update"}
    assert updates == set(down)


def test_requires_grad_is_honoured_between_steps() -> None:
    """Whole blocks, parts of blocks and what is outside are frozen and thawed; moments and step counts wait."""
    module = families.build(LLAMA)
    resident = Resident(module, max_grad_norm=1.0, **SETTINGS)
    model = stream(module, optimizer=megatrain.AdamW(**SETTINGS))
    plan: list[Callable[[str], bool]] = [
        lambda name: True,
        lambda name: not name.startswith("model.layers.1."),
        lambda name: name.startswith("model.layers.3.") or name == "lm_head.weight",
        lambda name: name == "model.embed_tokens.weight",
        lambda name: "norm" in name,
        lambda name: True,
    ]
    faces = dict(model.named_parameters())
    for step, chosen in enumerate(plan):
        for name, parameter in resident.module.named_parameters():
            parameter.requires_grad_(chosen(name))
            faces[name].requires_grad_(chosen(name))
        loss, _, gradients = resident.step([text_batch(step)])
        if step % 2:
            assert model.step(text_batch(step)).loss == pytest.approx(loss, rel=1e-5)
        else:
            model(**text_batch(step)).loss.backward()
            model.optimizer.step()
        assert {name for name, face in faces.items() if face.grad is not None} == set(gradients)
    assert_same_parameters(model, resident)
    for name, parameter in resident.module.named_parameters():
        assert model.optimizer.state[faces[name]]["step"] == resident.optimizer.state[parameter]["step"], name


def test_what_was_frozen_at_the_beginning_has_no_room() -> None:
    module = families.build(LLAMA)
    module.lm_head.weight.requires_grad_(False)
    model = stream(module)
    dict(model.named_parameters())["lm_head.weight"].requires_grad_(True)
    with pytest.raises(ValueError, match=r"lm_head\.weight was frozen when the model was made"):
        model.step(text_batch(1))


def test_prompts_are_learned_beside_other_calls() -> None:
    """A prompt's virtual tokens stand before the row: evaluation, log-probabilities and generation know."""
    module = prompt()
    resident, model = Resident(module, max_grad_norm=1.0, **SETTINGS), stream(module)
    batch = text_batch(3)
    with torch.no_grad():
        inputs = {key: value for key, value in batch.items() if key != "labels"}
        logits = resident.module(**inputs).logits[:, 3:-1].log_softmax(-1)
        kept = batch["labels"][:, 1:] != -100
        expected = logits.gather(-1, batch["labels"][:, 1:].clamp(min=0).unsqueeze(-1)).squeeze(-1) * kept
        found = model.logprobs(batch)
        assert torch.allclose(found[:, 1:], expected, rtol=1e-5, atol=1e-6) and bool((found[:, 0] == 0).all())
        theirs = resident.module.eval().generate(**inputs, max_new_tokens=5, do_sample=False, pad_token_id=0)
        assert torch.equal(model.generate(**inputs, max_new_tokens=5, do_sample=False, pad_token_id=0), theirs)
        assert theirs.max() < VOCABULARY


def test_an_adapter_of_a_bare_parameter_is_refused() -> None:
    config = transformers.MixtralConfig(
        vocab_size=VOCABULARY, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, num_local_experts=4,
    )
    adapter = peft.LoraConfig(r=2, target_modules=["q_proj"], target_parameters=["mlp.experts.gate_up_proj"])
    module = peft.get_peft_model(transformers.MixtralForCausalLM(config), adapter)
    with pytest.raises(megatrain.UnsupportedModelError, match=r"experts has a LoRA adapter on a bare parameter"):
        stream(module)


def test_modules_switch_what_is_below_them() -> None:
    """requires_grad_() of the module, of a block, of a layer in one and of what lies outside of blocks."""
    model = stream(families.build(LLAMA))
    module: Any = model.module
    batch = text_batch(1)

    def moved() -> set[str]:
        before = {name: value.clone() for name, value in model.state_dict().items()}
        model.step(batch)
        return {name for name, value in model.state_dict().items() if not value.equal(before[name])}

    everything = set(dict(model.named_parameters()))
    assert moved() == everything
    module.requires_grad_(False)
    assert not any(parameter.requires_grad for parameter in model.parameters())
    module.model.layers[1].requires_grad_()
    module.model.layers[2].self_attn.requires_grad_()
    module.lm_head.requires_grad_()
    on = {n for n in everything if "layers.1." in n or "layers.2.self_attn" in n or n == "lm_head.weight"}
    assert moved() == on
    module.lm_head.weight.requires_grad_(False)
    with pytest.warns(UserWarning, match=r"the first lm_head.weight, and those of blocks"):
        assert moved() == on - {"lm_head.weight"}
    module.requires_grad_()
    assert moved() == everything
