"""Preference, policy and distillation losses through plain backward(), against the resident module doing the same."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import families
import pytest
import torch
from case_models import adversarial, assert_same_parameters, stream
from families import FAMILIES, text_batch
from resident import Resident, assert_close
from test_logprobs import resident_logprobs
from torch import nn
from torch.nn import functional as F

import megatrain

LLAMA = FAMILIES[0]
Logprobs = Callable[[dict[str, Any]], torch.Tensor]


def pair(seed: int) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """The answer that is preferred and another, of unequal lengths."""
    return text_batch(seed), text_batch(seed + 500, rows=2, length=12, left_padding=5)


def preference_loss(policy: Logprobs, reference: Logprobs, step: int, beta: float = 0.3) -> torch.Tensor:
    """DPO (Rafailov et al., 2023): two forwards with gradients, two without."""
    chosen, rejected = pair(step)
    with torch.no_grad():
        margins = reference(chosen).sum(-1) - reference(rejected).sum(-1)
    return -F.logsigmoid(beta * (policy(chosen).sum(-1) - policy(rejected).sum(-1) - margins)).mean()


def update(resident: Resident, loss: torch.Tensor) -> None:
    resident.optimizer.zero_grad()
    loss.backward()
    parameters = [p for p in resident.module.parameters() if p.grad is not None]
    nn.utils.clip_grad_norm_(parameters, resident.max_grad_norm)
    resident.optimizer.step()


def adapted(dora: bool = False, **settings: Any) -> nn.Module:
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(
        r=4, use_dora=dora, target_modules=["q_proj", "down_proj"], init_lora_weights=False, task_type="CAUSAL_LM",
        **settings,
    )  # fmt: skip
    torch.manual_seed(5)
    return peft.get_peft_model(families.build(LLAMA), config).train()


def test_preference_loss_with_a_reference_model() -> None:
    module = families.build(LLAMA)
    resident, model = Resident(module, max_grad_norm=1.0, lr=1e-4, weight_decay=0.1), stream(module)
    frozen = copy.deepcopy(resident.module)

    def reference(batch: dict[str, Any]) -> torch.Tensor:
        return resident_logprobs(frozen, batch)

    losses = []
    for step in range(4):
        expected = preference_loss(lambda batch: resident_logprobs(resident.module, batch), reference, step)
        update(resident, expected)
        loss = preference_loss(model.logprobs, reference, step)
        loss.backward()
        model.optimizer.step()
        assert loss.item() == pytest.approx(expected.item(), rel=1e-5)
        losses.append(loss.item())
    assert losses[0] == pytest.approx(0.6931, abs=1e-3)
    assert_same_parameters(model, resident)


@pytest.mark.parametrize("dora", [False, True], ids=["lora", "dora"])
def test_the_frozen_base_is_the_reference(dora: bool) -> None:
    """One copy of the base on the host: PEFT's disable_adapter() makes it the reference."""
    module = adapted(dora)
    resident, model = Resident(module, max_grad_norm=1.0, lr=1e-3), stream(module, optimizer=megatrain.AdamW(lr=1e-3))
    base = families.build(LLAMA)

    def without(owner: Any, logprobs: Logprobs) -> Logprobs:
        def reference(batch: dict[str, Any]) -> torch.Tensor:
            with owner.disable_adapter():
                return logprobs(batch)

        return reference

    def plain(batch: dict[str, Any]) -> torch.Tensor:
        return resident_logprobs(resident.module, batch)

    with torch.no_grad():
        batch = text_batch(77)
        alone = without(model.module, model.logprobs)(batch)
        assert_close(alone, resident_logprobs(base, batch), 2e-6, "the base alone")
        assert not torch.allclose(alone, model.logprobs(batch), atol=1e-3)
    for step in range(4):
        expected = preference_loss(plain, without(resident.module, plain), step)
        update(resident, expected)
        loss = preference_loss(model.logprobs, without(model.module, model.logprobs), step)
        loss.backward()
        model.optimizer.step()
        assert loss.item() == pytest.approx(expected.item(), rel=1e-5)
    assert_same_parameters(model, resident)


def test_policy_loss_with_samples_of_the_policy() -> None:
    """GRPO-style: groups of samples of the current weights, rewards relative to the group, a clipped ratio over
    two updates a group, and a penalty on what leaves the reference."""
    module = families.build(LLAMA)
    resident = Resident(module, max_grad_norm=1.0, lr=2e-4, weight_decay=0.1, eps=1e-6)
    model = stream(module, optimizer=megatrain.AdamW(lr=2e-4, weight_decay=0.1, eps=1e-6))
    frozen = copy.deepcopy(resident.module)
    prompt = text_batch(1, rows=1, length=5, left_padding=2)
    repeated = {key: value.repeat(4, 1) for key, value in prompt.items() if key != "labels"}

    def group(owner: Any, seed: int) -> dict[str, torch.Tensor]:
        torch.manual_seed(seed)
        ids = owner.generate(**repeated, do_sample=True, max_new_tokens=6, pad_token_id=0, eos_token_id=3)
        answer = torch.zeros_like(ids, dtype=torch.bool)
        answer[:, 5:] = ids[:, 5:] != 0
        mask = answer.clone()
        mask[:, :5] = repeated["attention_mask"].bool()
        return dict(input_ids=ids, attention_mask=mask.long(), labels=ids.masked_fill(~answer, -100))

    def loss_of(policy: Logprobs, batch: dict[str, torch.Tensor], old: torch.Tensor) -> torch.Tensor:
        reward = (batch["labels"] % 7 == 1).sum(-1).float()
        advantage = ((reward - reward.mean()) / (reward.std() + 1e-4)).unsqueeze(-1)
        mask = (batch["labels"] != -100).float()
        now = policy(batch)
        with torch.no_grad():
            apart = resident_logprobs(frozen, batch) - now
        ratio = (now - old).exp()
        gained = torch.min(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage)
        penalty = (apart + now.detach() - now).exp() - (apart + now.detach() - now) - 1
        return ((-gained + 0.1 * penalty) * mask).sum() / mask.sum()

    def plain(batch: dict[str, Any]) -> torch.Tensor:
        return resident_logprobs(resident.module, batch)

    moved = False
    for step in range(3):
        resident.module.eval()
        batch = group(resident.module, step)
        resident.module.train()
        mine = group(model, step)
        assert torch.equal(mine["input_ids"], batch["input_ids"])
        with torch.no_grad():
            expected_old, old = plain(batch), model.logprobs(mine)
        for _ in range(2):
            expected = loss_of(plain, batch, expected_old)
            update(resident, expected)
            loss = loss_of(model.logprobs, mine, old)
            loss.backward()
            model.optimizer.step()
            assert loss.item() == pytest.approx(expected.item(), rel=1e-4, abs=1e-6)
            moved |= bool(model.last_grad_norm)
    assert moved
    assert_same_parameters(model, resident)


def test_distillation_from_a_streamed_teacher() -> None:
    """Student and teacher both streamed, over full distributions, which take full logits and say so."""
    module, teacher = families.build(LLAMA), families.build(FAMILIES[2])
    plain_teacher = copy.deepcopy(teacher).eval()
    resident, model = Resident(module, max_grad_norm=1.0, lr=1e-4, weight_decay=0.1), stream(module)
    master = stream(teacher, device=adversarial(seed=3)).eval()

    def loss_of(student: Any, from_teacher: Any, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        inputs = {key: value for key, value in batch.items() if key != "labels"}
        with torch.no_grad():
            target = from_teacher(**inputs).logits.log_softmax(-1)
        found = (student(**inputs).logits / 2.0).log_softmax(-1)
        kept = batch["attention_mask"].bool()
        return F.kl_div(found[kept], target[kept], log_target=True, reduction="batchmean")

    for step in range(3):
        first, second = text_batch(step), text_batch(step + 30, rows=3)
        expected = loss_of(resident.module, plain_teacher, first)
        expected = expected + 0.5 * loss_of(resident.module, plain_teacher, second)
        update(resident, expected)
        loss = loss_of(model, master, first) + 0.5 * loss_of(model, master, second)
        loss.backward()
        model.optimizer.step()
        assert loss.item() == pytest.approx(expected.item(), rel=1e-5)
    assert_same_parameters(model, resident)


def test_another_adapter_becomes_the_active_one() -> None:
    """What PEFT freezes and unfreezes by its switches is frozen and unfrozen in the tiles."""
    peft = pytest.importorskip("peft")
    module = adapted()
    module.add_adapter("second", peft.LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=False))
    for name, parameter in module.named_parameters():
        parameter.requires_grad_("lora_" in name)  # both have room for gradients
    resident, model = Resident(module, max_grad_norm=1.0, lr=1e-3), stream(module, optimizer=megatrain.AdamW(lr=1e-3))
    before = {name: value.clone() for name, value in model.state_dict().items()}
    for step, active in enumerate(("default", "second", "default")):
        resident.module.set_adapter(active)
        model.module.set_adapter(active)
        assert {n for n, p in model.named_parameters() if p.requires_grad} == {
            n for n, p in resident.module.named_parameters() if p.requires_grad
        }
        resident.optimizer.zero_grad()
        loss, _, _ = resident.step([text_batch(step)])
        assert model.step(text_batch(step)).loss == pytest.approx(loss, rel=1e-5)
        if step == 0:
            after = model.state_dict()
            assert all(torch.equal(after[name], before[name]) for name in after if ".second." in name)
    assert_same_parameters(model, resident)
