"""Streamed generation equals the resident module's, token for token, and leaves training alone."""

from __future__ import annotations

from typing import Any

import families
import pytest
import torch
import transformers
from case_models import stream
from families import FAMILIES, VOCABULARY, text_batch, translation_batch
from resident import Resident

import megatrain

GREEDY = dict(max_new_tokens=7, do_sample=False)
SAMPLED = dict(max_new_tokens=7, do_sample=True, temperature=1.3, top_k=20)
BEAMS = dict(max_new_tokens=5, do_sample=False, num_beams=3)


def prompts(name: str) -> dict[str, torch.Tensor]:
    batch = translation_batch(4, rows=3) if name == "t5" else text_batch(4, rows=3)
    return {key: value for key, value in batch.items() if key != "labels"}


def tokens(owner: Any, name: str, how: dict[str, Any]) -> torch.Tensor:
    torch.manual_seed(17)
    return owner.generate(**prompts(name), **how, pad_token_id=0)


@pytest.mark.parametrize("how", [GREEDY, SAMPLED, BEAMS], ids=["greedy", "sampled", "beams"])
@pytest.mark.parametrize("family", [f for f in FAMILIES if f.name != "vit"], ids=lambda f: f.name)
def test_equals_the_resident_module(family: Any, how: dict[str, Any]) -> None:
    module = families.build(family, dropout=True)
    resident, model = Resident(module, max_grad_norm=None), stream(module, compile=True)
    expected = tokens(resident.module.eval(), family.name, how)
    found = tokens(model, family.name, how)
    assert torch.equal(found, expected)
    assert len(expected.unique()) >= 3 or (family.name, how) == ("t5", GREEDY)
    assert model.module.training, "modes are as they were"
    model.close()


@pytest.mark.parametrize("residence", ["weights", "all"])
def test_under_another_placement(residence: Any) -> None:
    """Blocks that stay on the device, updated there, and activations kept for a backward that waits meanwhile."""
    block = megatrain.BlockPlacement(resident=residence, keep="everything")
    placement = megatrain.Placement(blocks=(block, megatrain.BlockPlacement(keep="selected")))
    plain, placed = stream(families.build(FAMILIES[0])), stream(families.build(FAMILIES[0]), placement=placement)
    for step in range(2):
        found = []
        for model in (plain, placed):
            policy = model.logprobs(text_batch(step))
            found.append(tokens(model, "llama", SAMPLED))
            policy.sum().backward()
            model.optimizer.step()
            found.append(policy.detach())
        assert torch.equal(found[0], found[2]) and torch.equal(found[1], found[3])
    for name, values in plain.state_dict().items():
        assert torch.equal(values, placed.state_dict()[name]), name


def test_the_cache_is_used_and_weights_go_up_once_a_token() -> None:
    model = stream(families.build(FAMILIES[0]), device=megatrain.HostBackend())
    lengths: list[int] = []


    def note(_: Any, args: Any, kwargs: Any) -> None:
        lengths.append((args[0] if args else kwargs["hidden_states"]).shape[1])

    handle = model.module.model.layers[0].register_forward_pre_hook(note, with_kwargs=True)
    model._parts.engine.clear_trace()
    model.generate(**prompts("llama"), **GREEDY, pad_token_id=0, eos_token_id=None)
    handle.remove()
    assert lengths == [9] + [1] * 6
    blocks = {unit.tile for unit in model._parts.units.units if unit.is_block}
    copies = [span for span in model._parts.engine.trace() if span.kind == "copy_up" and span.tile in blocks]
    # At most the next pass's first blocks are fetched ahead and not used.
    assert 7 * len(blocks) - 2 <= len(copies) <= 7 * len(blocks) + 2


@pytest.mark.parametrize("way", ["step", "backward"])
def test_training_does_not_notice(way: str) -> None:
    """Evaluation, generation and log-probabilities between steps, and between a backward and its update."""
    plain, busy = (stream(families.build(FAMILIES[0], dropout=True)) for _ in range(2))

    def look(step: int) -> None:
        state = torch.get_rng_state()
        tokens(busy, "llama", SAMPLED)
        busy.evaluate(text_batch(step + 40))
        with torch.no_grad():
            busy.logprobs(text_batch(step + 50))
        torch.set_rng_state(state)

    for step in range(3):
        look(step)
        if way == "step":
            assert plain.step(text_batch(step)).loss == busy.step(text_batch(step)).loss
            continue
        losses = []
        for model in (plain, busy):
            torch.manual_seed(step)
            for index in range(2):
                loss = model(**text_batch(10 * step + index)).loss
                if model is busy:
                    look(index)
                loss.backward()
                if model is busy:
                    look(index)
                losses.append(loss.item())
            model.optimizer.step()
        assert losses[:2] == losses[2:]
    expected, found = plain.state_dict(), busy.state_dict()
    for name, values in expected.items():
        assert torch.equal(values, found[name]), name


def test_samples_follow_the_weights() -> None:
    """Between steps the next generation sees the updates, and edits."""
    module = families.build(FAMILIES[0])
    resident = Resident(module, max_grad_norm=1.0, lr=1e-2)
    model = stream(module, optimizer=megatrain.AdamW(lr=1e-2))
    seen = set()
    for step in range(3):
        expected = tokens(resident.module.eval(), "llama", GREEDY)
        assert torch.equal(tokens(model, "llama", GREEDY), expected)
        seen.add(tuple(expected.flatten().tolist()))
        resident.module.train()
        resident.step([text_batch(step)])
        model.step(text_batch(step))
    assert len(seen) == 3
    with torch.no_grad():
        dict(model.named_parameters())["lm_head.weight"].zero_()
    changed = model.generate(**prompts("llama"), **GREEDY, pad_token_id=0, eos_token_id=None)
    assert bool((changed[:, 9:] == 0).all())


def test_a_failure_inside_leaves_a_working_model() -> None:
    model = stream(families.build(FAMILIES[0]))

    class Failing(transformers.LogitsProcessor):
        def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
            if input_ids.shape[1] > 11:
                raise ArithmeticError("on purpose")
            return scores

    expected = tokens(model, "llama", GREEDY)
    with pytest.raises(ArithmeticError, match="on purpose"):
        model.generate(**prompts("llama"), **GREEDY, logits_processor=transformers.LogitsProcessorList([Failing()]))
    assert torch.equal(tokens(model, "llama", GREEDY), expected)
    assert expected.max() < VOCABULARY
    with pytest.raises(ValueError, match="ViTForImageClassification has no generate"):
        stream(families.build(FAMILIES[-1])).generate()
