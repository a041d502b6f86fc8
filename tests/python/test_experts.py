"""Experts go up by the router's choice, and nothing else changes."""

from __future__ import annotations

import math
from collections import Counter
from functools import cache
from typing import Any

import pytest
import torch
from expert_models import HYPERPARAMETERS, ROWS, Watch, choose, few_tokens, forced, read_all, stream
from families import text_batch
from family_zoo import causal
from resident import Resident, assert_close
from test_family_zoo import NOISE, plain_backward
from torch import nn
from transformers.models.mixtral.modeling_mixtral import MixtralSparseMoeBlock

import megatrain
from megatrain import BlockPlacement, Placement
from megatrain.chosen_experts import ExpertsUse
from megatrain.experts import BlockExperts


@pytest.mark.parametrize("way", ["step", "backward"])
@pytest.mark.parametrize("name", list(ROWS))
def test_equal_to_the_resident_module(name: str, way: str) -> None:
    """Loss, all gradients, and the weights after five steps with clipping. What was not brought is NaN."""
    module = ROWS[name].build()
    resident = Resident(module, max_grad_norm=1.0, **HYPERPARAMETERS)
    watch = Watch(resident.module)
    model = stream(module, max_grad_norm=1.0, self_check=True)
    idle = 0
    for step in range(5):
        batches = few_tokens(10 * step)
        expected, norm, gradients = resident.step(batches)
        idle += sum(8 - len(experts) for experts in watch.take().values())
        if way == "step":
            loss = model.step(batches).loss
        else:
            loss = plain_backward(model, batches, resident.shifted)
            model.optimizer.step()
        assert loss == pytest.approx(expected, rel=3e-6)
        assert model.last_grad_norm == pytest.approx(norm, rel=1e-5)
        if step == 0:
            largest = max(float(gradient.abs().max()) for gradient in gradients.values())
            for inner, parameter in model.named_parameters():
                if inner in gradients:
                    assert_close(parameter.grad, gradients[inner], 3e-6, inner, floor=NOISE * largest)
    state = model.state_dict()
    for inner, parameter in resident.module.named_parameters():
        assert_close(state[inner], parameter, 1e-5, inner)
    assert idle > 5
    model.close()


def bits_after(placement: Placement, **settings: Any) -> tuple[list[float], dict[str, torch.Tensor]]:
    model = stream(ROWS["qwen3_moe"].build(), placement=placement, max_grad_norm=1.0, **settings)
    losses = [model.step(few_tokens(step)).loss for step in range(2)]
    state = model.state_dict()
    model.close()
    return losses, state


@cache
def bits_of_whole_blocks(order: Any) -> tuple[list[float], dict[str, torch.Tensor]]:
    return bits_after(Placement(experts="whole", order=order))


@pytest.mark.parametrize(
    ("selected", "settings"),
    [
        (Placement(experts="selected"), {}),
        (Placement(experts="selected"), dict(slots=1)),
        (Placement(experts="selected"), dict(slots=3, transfers=megatrain.Transfers(burst="parameter"))),
        (Placement(experts="selected", order="micro-batch-major"), {}),
        (Placement(experts="selected", blocks=(BlockPlacement(keep="everything"),)), {}),
        (Placement(experts="selected", blocks=(BlockPlacement(keep="selected", kept_on="host"),)), {}),
        (Placement(experts="selected", blocks=tuple(BlockPlacement(resident=r) for r in ("all", "weights"))), {}),
    ],
)
def test_every_placement_gives_the_bits_of_whole_blocks(selected: Placement, settings: dict[str, Any]) -> None:
    losses, state = bits_of_whole_blocks(selected.order)
    again, other = bits_after(selected, **settings)
    assert again == losses
    for name, values in state.items():
        assert torch.equal(values, other[name]), name


@pytest.mark.parametrize("keep", ["inputs", "everything"])
def test_each_backward_has_the_experts_of_its_forward(keep: Any) -> None:
    """Two forwards before it, and an evaluation with other tokens."""
    gradients = []
    for way in ("whole", "selected"):
        placement = Placement(experts=way, blocks=(BlockPlacement(keep=keep),))  # type: ignore[arg-type]
        model = stream(ROWS["qwen3_moe"].build(), placement=placement)
        losses = [model(**batch).loss for batch in few_tokens(0)]
        with torch.no_grad():
            model(**few_tokens(7)[0])
        sum(losses).backward()
        gradients.append({name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None})
        model.close()
    for name, gradient in gradients[0].items():
        assert torch.equal(gradient, gradients[1][name]), name


class TwoInOneBlock(nn.Module):
    def __init__(self, config: Any) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(config.hidden_size)
        self.first, self.second = MixtralSparseMoeBlock(config), MixtralSparseMoeBlock(config)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        hidden = hidden + self.first(self.norm(hidden))
        return hidden + self.second(hidden)


class CalledAgain(nn.Module):
    """Blocks of two experts modules, all of which are called `rounds` times."""

    def __init__(self, rounds: int) -> None:
        super().__init__()
        config = ROWS["mixtral"].make().config
        self.embedding = nn.Embedding(64, config.hidden_size)
        self.layers = nn.ModuleList(TwoInOneBlock(config) for _ in range(2))
        self.head = nn.Linear(config.hidden_size, 64)
        self.rounds = rounds
        for seed, parameter in enumerate(self.parameters()):
            nn.init.normal_(parameter, std=0.2, generator=torch.Generator().manual_seed(seed))

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        hidden = self.embedding(input_ids)
        for _ in range(self.rounds):
            for layer in self.layers:
                hidden = layer(hidden)
        return dict(loss=nn.functional.cross_entropy(self.head(hidden).flatten(0, 1), labels.flatten()))


@pytest.mark.parametrize(
    ("rounds", "keep", "order"),
    [(1, "inputs", "layer-major"), (2, "everything", "layer-major"), (2, "selected", "micro-batch-major")],
)
def test_two_experts_modules_in_blocks_called_again(rounds: int, keep: Any, order: Any) -> None:
    """Gradients are the resident module's; two steps with skipped experts have the bits of whole blocks."""

    def batches(seed: int) -> list[dict[str, Any]]:
        generator = torch.Generator().manual_seed(seed)
        tokens = [torch.randint(0, 64, (1, length), generator=generator) for length in (2, 1)]
        return [dict(input_ids=ids, labels=ids, weight=float(ids.numel())) for ids in tokens]

    resident = CalledAgain(rounds)
    for batch in batches(0):
        (resident(batch["input_ids"], batch["labels"])["loss"] * batch["weight"] / 3).backward()
    results = []
    for way in ("whole", "selected", "auto"):
        placement = Placement(experts=way, order=order, blocks=(BlockPlacement(keep=keep),))  # type: ignore[arg-type]
        model = stream(CalledAgain(rounds), placement=placement, skip_idle_experts=True)
        assert [found.count for found in block_experts(model)] == [16] * 2
        losses = [model.step(batches(0)).loss]
        for name, parameter in resident.named_parameters():
            assert_close(dict(model.named_parameters())[name].grad, parameter.grad, 3e-5, name, floor=1e-6)
        losses.append(model.step(batches(1)).loss)
        results.append((losses, model.optimizer.progress(), model.state_dict()))
        model.close()
    for losses, progress, state in results[1:]:
        assert (losses, progress) == results[0][:2]
        for name, values in results[0][2].items():
            assert torch.equal(state[name], values), name


def copied_up(model: megatrain.StreamedModel) -> Counter[int]:
    """Bytes of weights that went up, by tile."""
    bytes_up: Counter[int] = Counter()
    for span in model._parts.engine.trace():
        if span.kind == "copy_up":
            bytes_up[span.tile] += span.nbytes
    model._parts.engine.clear_trace()
    return bytes_up


def block_experts(model: megatrain.StreamedModel) -> list[BlockExperts]:
    return list(model._parts.weights.experts.values())


def bytes_of(experts: BlockExperts) -> tuple[int, int]:
    """(of all the block's experts, of the rest), in fp32."""
    inside = 4 * sum(end - begin for part in experts.parts() for begin, end in part)
    return inside, 4 * experts.unit.layout.weight_elements - inside


def test_eight_of_64_experts_are_an_eighth_of_the_bytes() -> None:
    row = causal("qwen3_moe", "Qwen3Moe", num_experts=64, num_experts_per_tok=2)
    module = row.build()
    resident = Resident(module, max_grad_norm=None)
    watch = Watch(resident.module)
    model = stream(module)
    batch = text_batch(3, rows=1, length=4, left_padding=0)
    resident.step([batch])
    used = watch.take()
    assert all(1 < len(experts) <= 8 for experts in used.values())
    model(**batch).loss.backward()
    bytes_up = copied_up(model)
    for index, experts in enumerate(block_experts(model)):
        inside, outside = bytes_of(experts)
        chosen = inside * len(used[index]) // 64
        assert chosen <= inside * 8 // 64
        # Forward and backward; the last block, and with two slots the one before, are still there at the turn.
        passes = 2 if index == 0 else 1
        assert bytes_up[experts.unit.tile] == passes * (outside + chosen), index
    model.optimizer.step()
    model.step([batch])
    bytes_up = copied_up(model)
    for experts in block_experts(model):
        inside, outside = bytes_of(experts)
        # The bases of the coming forward are on their way when updates are done, before and after this step.
        assert bytes_up[experts.unit.tile] <= 4 * outside + 2 * inside * 8 // 64
    model.close()


def test_micro_batches_bring_what_is_not_there_yet() -> None:
    module = ROWS["mixtral"].build()
    resident = Resident(module, max_grad_norm=None)
    watch = Watch(resident.module)
    model = stream(module, slots=3)  # nothing leaves the device before the update
    batches = [text_batch(seed, rows=1, length=2, left_padding=0) for seed in range(3)]
    resident.step(batches)
    used = watch.take()
    assert any(2 < len(experts) < 8 for experts in used.values())
    with torch.no_grad():
        model.evaluate(batches)
    bytes_up = copied_up(model)
    for index, experts in enumerate(block_experts(model)):
        inside, outside = bytes_of(experts)
        assert bytes_up[experts.unit.tile] == outside + inside * len(used[index]) // 8
    model.close()


def test_router_forced_to_one_expert() -> None:
    module = forced()
    resident = Resident(module, max_grad_norm=0.5, **HYPERPARAMETERS)
    model = stream(module, max_grad_norm=0.5)
    for step, chosen in enumerate([[0, 0, 0], [3, 1, 0], [1, 1, 2]]):
        choose(module.model.layers, chosen)
        choose(resident.module.model.layers, chosen)
        loss, _, _ = resident.step([text_batch(step)])
        assert model.step([text_batch(step)]).loss == pytest.approx(loss, rel=3e-6)
    state = model.state_dict()
    for name, parameter in resident.module.named_parameters():
        assert_close(state[name], parameter, 1e-5, name)
    bytes_up = copied_up(model)
    for experts in block_experts(model):
        inside, outside = bytes_of(experts)
        assert bytes_up[experts.unit.tile] <= 6 * (outside + inside // 4) + inside // 2
    model.close()


def test_what_is_not_chosen_is_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where it is read all the same, the loss is not a number."""
    model = stream(forced())
    weights, block = model._parts.weights, model._parts.blocks[1]
    with weights.on_device(block) as tensors:
        held = tensors["mlp.experts.down_proj"]
        assert bool(held.isnan().all())
        assert tensors.experts is not None
        tensors.experts.begin([])
        tensors.experts.choose(weights.experts[block.unit.tile].gates[0], torch.tensor([[2], [2]]))
        assert held.isnan().flatten(1).all(1).tolist() == [True, True, False, True]
        assert torch.equal(held[2], model.state_dict()[f"{block.name}.mlp.experts.down_proj"][2])
    monkeypatch.setattr(ExpertsUse, "choose", lambda self, gate, index: None)
    assert math.isnan(model.evaluate([text_batch(0)]).loss)
    model.close()


@pytest.mark.parametrize("way", ["selected", "whole", "auto"])
def test_a_forward_put_on_experts_stays_and_has_all_of_them(way: Any) -> None:
    module = forced()
    resident = Resident(module, max_grad_norm=None, **HYPERPARAMETERS)
    model = stream(module, placement=Placement(experts=way), skip_idle_experts=True)
    skeletons = [block.skeleton for block in model._parts.blocks]
    before = model.evaluate([text_batch(0)]).loss
    read_all(skeletons)
    read_all(resident.module.model.layers)
    put = [block.mlp.experts.forward for block in skeletons]
    for step in range(2):  # every expert counts as one that got tokens, so it is torch's update
        expected = resident.step([text_batch(step)])[0]
        assert model.step([text_batch(step)]).loss == pytest.approx(expected, rel=3e-6) != pytest.approx(before)
    assert [vars(block.mlp.experts).get("forward") for block in skeletons] == put
    state = model.state_dict()
    for name, parameter in resident.module.named_parameters():
        assert_close(state[name], parameter, 1e-5, name)
    for block in skeletons:
        del block.mlp.experts.forward
    with torch.no_grad():
        model.evaluate([text_batch(0)])
    assert not any("forward" in vars(block.mlp.experts) for block in skeletons)
    model.close()


def test_a_forward_put_on_experts_before_the_backward_has_all_of_them() -> None:
    model = stream(forced(), slots=1)
    loss = model(**text_batch(0)).loss
    read_all(block.skeleton for block in model._parts.blocks)
    loss.backward()
    assert all(bool(p.grad.isfinite().all()) for p in model.parameters() if p.grad is not None)
    model.close()


# the choice between the two


def test_auto_follows_the_number_of_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nearly all of four experts are used by 16 tokens, one of them by one."""
    model = stream(causal("mixtral", "Mixtral", num_local_experts=4, num_experts_per_tok=1).build(), placement="auto")
    experts = list(model._parts.weights.experts.values())
    assert len(experts) == 3 and all(found.dominate and not found.whole for found in experts)
    with monkeypatch.context() as patch:
        patch.delattr(ExpertsUse, "choose")  # nobody asks the router
        model.step([text_batch(0)])
    assert all(found.whole for found in experts)
    copied_up(model)
    model.step([text_batch(1)])
    bytes_up = copied_up(model)
    for found in experts:
        assert bytes_up[found.unit.tile] > 0
        assert bytes_up[found.unit.tile] % sum(bytes_of(found)) == 0
    with torch.no_grad():
        for _ in range(2):
            model(input_ids=torch.tensor([[5]]))
    assert not any(found.whole for found in experts)
    copied_up(model)
    model._parts.weights.mark_edited(experts[0].unit.tile)
    with torch.no_grad():
        model(input_ids=torch.tensor([[5]]))
    inside, outside = bytes_of(experts[0])
    assert copied_up(model)[experts[0].unit.tile] == outside + inside // 4
    model.close()


def test_generation_brings_few_experts() -> None:
    module = ROWS["qwen3_moe"].build().eval()
    prompt = torch.tensor([[5, 9, 33]])
    expected = module.generate(prompt, max_new_tokens=4, do_sample=False)
    model = stream(module, placement="auto")
    assert torch.equal(model.generate(prompt, max_new_tokens=4, do_sample=False), expected)
    bytes_up = copied_up(model)
    for experts in block_experts(model):
        assert not experts.whole
        inside, outside = bytes_of(experts)
        # Three tokens, then one at a time; a base may be on its way already for a forward that does not come.
        assert bytes_up[experts.unit.tile] <= 5 * outside + inside * (6 + 3 * 2) // 8
    model.close()


def test_blocks_of_which_experts_are_a_small_part_go_up_whole() -> None:
    module = causal("mixtral", "Mixtral", num_local_experts=2, intermediate_size=8, num_experts_per_tok=1).build()
    model = stream(module, placement="auto")
    assert all(found.whole and not found.dominate for found in model._parts.weights.experts.values())
    model.step([text_batch(0, rows=1, length=2, left_padding=0)])
    assert all(found.whole for found in model._parts.weights.experts.values())
    model.close()


def test_a_placement_names_what_it_knows() -> None:
    with pytest.raises(ValueError, match='experts is "some"; it must be one of auto, selected, whole'):
        Placement(experts="some")  # type: ignore[arg-type]
