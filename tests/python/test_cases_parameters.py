"""Inputs that broke systems of this kind: unused, tied and frozen parameters, buffers, edits from outside."""

from __future__ import annotations

import copy
from typing import Any

import families
import pytest
import torch
import transformers
from case_models import LLAMA, Toy, ToyBlock, assert_same_parameters, reference, stream, toy, toy_batch
from families import FAMILIES, text_batch
from resident import assert_close
from torch import nn

import megatrain

# 11, 34, 43: parameters without gradients


@pytest.mark.parametrize("way", ["step", "backward"])
def test_unused_parameters_are_left_alone_and_named(way: str) -> None:
    module = toy(skip_middle=True)
    resident = reference(module)
    model = stream(module)
    before = model.state_dict()
    batches = [[toy_batch(10 * step), toy_batch(10 * step + 1)] for step in range(3)]
    with pytest.warns(UserWarning, match=r"no gradient: .*inner\.layers\.0\.middle\.bias"):
        for pair in batches:
            loss, norm, _ = resident.step(pair)
            if way == "step":
                found = model.step(pair).loss
            else:
                losses = [model(**batch).loss / len(pair) for batch in pair]
                for part in losses:
                    part.backward()
                found = sum(float(part.detach()) for part in losses)
                model.optimizer.step()
            assert found == pytest.approx(loss, rel=1e-6)
            assert model.last_grad_norm == pytest.approx(norm, rel=1e-6)
    assert_same_parameters(model, resident)
    after = model.state_dict()
    for name in before:
        moved = not torch.equal(before[name], after[name])
        assert moved != ("unused" in name or "middle" in name), name


# 14: ties


def test_saved_file_keeps_the_tie(tmp_path: Any) -> None:
    model = stream(families.build(FAMILIES[2]))
    model.step(text_batch(1))
    model.save_pretrained(tmp_path)
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    assert loaded.lm_head.weight is loaded.model.embed_tokens.weight
    from safetensors import safe_open

    with safe_open(tmp_path / "model.safetensors", framework="pt") as file:
        assert "lm_head.weight" not in file.keys()
    state = model.state_dict()
    for name, parameter in loaded.named_parameters():
        assert torch.equal(parameter, state[name]), name


# 17: resume


def test_state_that_does_not_fit_changes_nothing() -> None:
    model = stream(families.build(LLAMA))
    model.step(text_batch(1))
    before = {name: values.clone() for name, values in model.state_dict().items()}
    state = dict(before)
    state["model.norm.weight"] = torch.zeros(7)
    state.pop("lm_head.weight")
    state["extra"] = torch.zeros(1)
    with pytest.raises(ValueError, match=r"missing.*lm_head\.weight.*unknown.*extra.*\(7,\)"):
        model.load_state_dict(state)
    for name, values in model.state_dict().items():
        assert torch.equal(values, before[name]), name


# 21: frozen tensors


def test_half_of_the_tensors_frozen(tmp_path: Any) -> None:
    module = families.build(LLAMA)
    for index, parameter in enumerate(module.parameters()):
        parameter.requires_grad_(index % 2 == 0)
    names = {n: p.requires_grad for n, p in module.named_parameters()}
    # eps lies above the noise of gradients that are zero in exact arithmetic.
    settings = dict(lr=1e-4, weight_decay=0.1, eps=1e-6)
    resident, model = reference(module, **settings), stream(module, optimizer=megatrain.AdamW(**settings))
    before = model.state_dict()
    for step in range(4):
        resident.step([text_batch(step)])
        model.step([text_batch(step)])
    assert_same_parameters(model, resident)
    model.save_pretrained(tmp_path)
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    for name, parameter in loaded.named_parameters():
        assert torch.equal(parameter, before[name]) != names[name], name


# the parameter face


def test_requires_grad_toggled_between_steps() -> None:
    module = families.build(LLAMA)
    resident, model = reference(module), stream(module)
    name = "model.layers.1.mlp.up_proj.weight"
    for step in range(6):
        on = step % 2 == 0
        dict(model.named_parameters())[name].requires_grad_(on)
        resident.module.get_parameter(name).requires_grad_(on)
        resident.step([text_batch(step)])
        model.step([text_batch(step)])
    assert_same_parameters(model, resident)


# 49: buffers in blocks


def test_router_bias_buffer(tmp_path: Any) -> None:
    config = transformers.DeepseekV3Config(
        hidden_size=32, intermediate_size=48, moe_intermediate_size=16, num_hidden_layers=3, num_attention_heads=4,
        num_key_value_heads=4, vocab_size=67, n_routed_experts=4, num_experts_per_tok=2, n_group=1, topk_group=1,
        n_shared_experts=1, first_k_dense_replace=1, q_lora_rank=16, kv_lora_rank=16, qk_rope_head_dim=8,
        qk_nope_head_dim=8, v_head_dim=8, max_position_embeddings=64, pad_token_id=0,
    )
    torch.manual_seed(0)
    module = transformers.DeepseekV3ForCausalLM(config).train()
    biases = [name for name, _ in module.named_buffers() if "e_score_correction_bias" in name]
    assert len(biases) == 2
    for name in biases:
        module.get_buffer(name).copy_(torch.tensor([0.3, -0.2, 0.1, 0.4]))
    resident, model = reference(module), stream(module)
    for step in range(4):
        loss, _, _ = resident.step([text_batch(step)])
        assert model.step(text_batch(step)).loss == pytest.approx(loss, rel=1e-6)
    assert_same_parameters(model, resident)
    state = model.state_dict()
    model.save_pretrained(tmp_path)
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    for name in biases:
        assert torch.equal(state[name], torch.tensor([0.3, -0.2, 0.1, 0.4]))
        assert torch.equal(loaded.get_buffer(name), state[name])


# the parameter face


def test_parameter_face() -> None:
    model = stream(families.build(LLAMA), keep_gradients=False)
    first, second = list(model.parameters()), list(model.parameters())
    assert all(a is b for a, b in zip(first, second, strict=True))
    model.step(text_batch(1))
    with pytest.raises(RuntimeError, match=r"clip_grad_norm_"):
        _ = first[0].grad
    assert torch.equal(first[0].detach().clone(), model.state_dict(dtype=torch.float32)["model.embed_tokens.weight"])


def test_edits_in_place_and_whole() -> None:
    module = families.build(LLAMA)
    resident, model = reference(module), stream(module, dtype=torch.float32)
    for step in range(6):
        if step == 2:
            with torch.no_grad():
                dict(model.named_parameters())["model.layers.1.mlp.up_proj.weight"].mul_(0.5)
                resident.module.model.layers[1].mlp.up_proj.weight.mul_(0.5)
        if step == 4:
            with model.edit_parameters() as values:
                values["model.norm.weight"].add_(0.25)
            with torch.no_grad():
                resident.module.model.norm.weight.add_(0.25)
        resident.step([text_batch(step)])
        model.step([text_batch(step)])
    assert_same_parameters(model, resident)


def test_edits_reach_the_bf16_master() -> None:
    model = stream(families.build(LLAMA), dtype=torch.bfloat16)
    parameter = dict(model.named_parameters())["model.norm.weight"]
    with torch.no_grad():
        parameter.fill_(1.5)
    model.evaluate(text_batch(1))
    assert bool((model.state_dict()["model.norm.weight"] == 1.5).all())


class HookingBlock(ToyBlock):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        def double(gradient: torch.Tensor) -> torch.Tensor:
            handle.remove()
            return 2 * gradient

        if self.first.weight.requires_grad:
            handle = self.first.weight.register_hook(double)
        return super().forward(x)


@pytest.mark.parametrize("resident", [0, 2])
@pytest.mark.parametrize("keep", ["inputs", "everything", ("inputs", "everything")])
def test_hooks_on_parameters_of_a_forward_are_of_its_own_gradients(keep: Any, resident: int) -> None:
    inner = Toy()
    inner.layers = nn.ModuleList(HookingBlock(16, False) for _ in range(2))
    residence: Any = "all" if resident else "none"
    placement = megatrain.Placement(blocks=(megatrain.BlockPlacement(keep=keep, resident=residence),))
    model = stream(copy.deepcopy(inner), placement=placement, max_grad_norm=None, self_check=False)
    batches = [toy_batch(seed) for seed in range(3)]
    model.step(batches)
    for batch in batches:
        (inner(**batch)["loss"] / 3).backward()
    for name, parameter in model.named_parameters():
        expected = inner.get_parameter(name).grad
        if expected is not None:
            assert_close(parameter.grad, expected, 1e-5, name)
    model.close()
