"""Experts go up by the router's choice, and nothing else changes."""

from __future__ import annotations

import math
from collections import Counter
from functools import cache, wraps
from typing import Any

import pytest
import torch
import transformers
from families import text_batch
from family_zoo import LATENT, Batch, causal
from resident import Resident, assert_close
from test_family_zoo import NOISE, plain_backward
from torch import nn
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS, grouped_mm_experts_forward
from transformers.models.mixtral.modeling_mixtral import MixtralExperts, MixtralSparseMoeBlock, MixtralTopKRouter

import megatrain
from megatrain import BlockPlacement, Placement
from megatrain.chosen_experts import ExpertsUse
from megatrain.experts import BlockExperts, form_of, ways_of

EXPERTS = dict(num_experts=8, num_local_experts=8, n_routed_experts=8, num_experts_per_tok=2)
ROWS = {
    row.name: row
    for row in (
        causal("mixtral", "Mixtral", **EXPERTS),
        causal("qwen3_moe", "Qwen3Moe", **EXPERTS),
        causal("deepseek_v3", "DeepseekV3", **{**EXPERTS, **LATENT}),  # with shared experts and router biases
    )
}
HYPERPARAMETERS = dict(lr=1e-3, weight_decay=0.1, eps=1e-4)
SELECTED = Placement(experts="selected")


def stream(module: nn.Module, **settings: Any) -> megatrain.StreamedModel:
    return megatrain.StreamedModel(
        module,
        **{
            **dict(
                dtype=torch.float32,
                device=megatrain.HostBackend(max_delay_us=100, seed=3, poison=True),
                compile=False,
                keep_gradients=True,
                self_check=False,
                placement=SELECTED,
                optimizer=megatrain.AdamW(**HYPERPARAMETERS),
            ),
            **settings,
        },
    )


def few_tokens(seed: int) -> list[Batch]:
    """Two micro-batches whose tokens are too few for all experts."""
    return [text_batch(seed, rows=1, length=3, left_padding=0), text_batch(seed + 1, rows=1, length=4, left_padding=1)]


class Watch:
    """Which experts got tokens in a resident module, by block and in the order of the calls."""

    def __init__(self, module: nn.Module) -> None:
        self.calls: list[tuple[int, frozenset[int]]] = []
        for index, layer in enumerate(module.model.layers):
            for inner in layer.modules():
                if hasattr(inner, "gate_up_proj") and inner.gate_up_proj.dim() == 3:
                    inner.register_forward_pre_hook(
                        lambda _, args, index=index: self.calls.append((index, frozenset(args[1].unique().tolist())))
                    )

    def take(self) -> dict[int, frozenset[int]]:
        """The union of each block's calls, forgotten here."""
        used: dict[int, frozenset[int]] = {}
        for index, experts in self.calls:
            used[index] = used.get(index, frozenset()) | experts
        self.calls.clear()
        return used


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


class ForcedRouter(MixtralTopKRouter):
    """All tokens go to the expert `chosen`, those of a micro-batch of three rows of seven to the one after it."""

    chosen = 0

    def forward(self, hidden_states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        logits = nn.functional.linear(hidden_states.reshape(-1, hidden_states.shape[-1]), self.weight)
        index = torch.full((logits.shape[0], 1), (self.chosen + (logits.shape[0] == 21)) % self.weight.shape[0])
        return logits, logits.softmax(-1).gather(1, index), index


def forced(**changes: Any) -> nn.Module:
    module = causal("mixtral", "Mixtral", num_local_experts=4, num_experts_per_tok=1, **changes).build()
    for layer in module.model.layers:
        layer.mlp.gate.__class__ = ForcedRouter
    return module


def choose(layers: Any, experts: list[int]) -> None:
    for layer, expert in zip(layers, experts, strict=True):
        layer.mlp.gate.chosen = expert


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


def read_all(layers: Any) -> None:
    """Give the experts modules of the layers forwards that read every expert."""
    for layer in layers:
        experts = layer.mlp.experts
        experts.forward = lambda *given, own=experts.forward, it=experts: own(*given) + it.down_proj.square().sum()


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


# which modules


def test_implementations_that_may_read_idle_experts_go_up_whole() -> None:
    module = ROWS["mixtral"].build()
    assert ways_of(module) == ["by choice"]
    for implementation in ("eager", "batched_mm", "grouped_mm"):
        module.set_experts_implementation(implementation)
        assert ways_of(module) == ["by choice"]
    module.config._experts_implementation_internal = "sonicmoe"
    assert ways_of(module) == ["MixtralExperts runs as sonicmoe, which may read experts without tokens"]
    model = stream(module)
    assert not model._parts.weights.experts
    model.close()


@pytest.mark.parametrize("implementation", ["eager", "batched_mm"])
def test_other_implementations_leave_idle_experts_alone(implementation: str) -> None:
    module = ROWS["qwen3_moe"].build()
    module.set_experts_implementation(implementation)
    resident = Resident(module, max_grad_norm=None)
    expected, gradients = resident.gradients(few_tokens(4))
    model = stream(module)
    assert model.step(few_tokens(4)).loss == pytest.approx(expected, rel=3e-6)
    for name, parameter in model.named_parameters():
        if name in gradients:
            assert_close(parameter.grad, gradients[name], 3e-6, name, floor=1e-8)
    model.close()


def test_an_implementation_that_changes_later_reads_all() -> None:
    module = ROWS["mixtral"].build()
    model = stream(module)
    module.config._experts_implementation_internal = "deepgemm"
    choice: list[int] = []
    experts = next(iter(model._parts.weights.experts.values()))
    use = ExpertsUse(experts, choice.extend)
    use.begin([])
    use.choose(experts.gates[0], torch.tensor([[0, 1]]))
    assert choice == list(range(8))
    model.close()


def dense(module: Any, hidden_states: torch.Tensor, index: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """An implementation that multiplies by every expert."""
    shares = torch.zeros(len(hidden_states), module.num_experts, dtype=weights.dtype).scatter_add(1, index, weights)
    inside = module._apply_gate(torch.einsum("th,eih->tei", hidden_states, module.gate_up_proj))
    return torch.einsum("tei,ehi,te->th", inside, module.down_proj, shares)


@pytest.mark.parametrize("name", ["grouped_mm", "eager"])
def test_an_implementation_registered_under_a_known_name_reads_all(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    module = ROWS["mixtral"].build()
    module.set_experts_implementation(name)
    expected = float(module(**few_tokens(0)[0]).loss.detach())
    late = stream(ROWS["mixtral"].build())
    late.module.set_experts_implementation(name)
    monkeypatch.setitem(ALL_EXPERTS_FUNCTIONS._global_mapping, name, wraps(grouped_mm_experts_forward)(dense))
    assert ways_of(module) == [f"MixtralExperts runs as {name}, which may read experts without tokens"]
    for model in (late, stream(module)):
        assert model.evaluate(few_tokens(0)[:1]).loss == pytest.approx(expected, rel=3e-6)
        model.close()


def test_compiled_blocks_are_cut_at_their_experts(monkeypatch: pytest.MonkeyPatch) -> None:
    """One set of graphs for all layers, and one graph where all experts go up ahead."""
    torch._dynamo.reset()
    graphs: list[object] = []

    def counting(graph: Any, inputs: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    compile_with = torch.compile
    monkeypatch.setattr(torch, "compile", lambda function, **_: compile_with(function, backend=counting))
    batch = text_batch(3, rows=1, length=4, left_padding=0)
    losses, counts = [], []
    for way, compiled in (("whole", False), ("whole", True), ("selected", True)):
        model = stream(
            ROWS["mixtral"].build(),
            compile=compiled,
            placement=Placement(experts=way),  # type: ignore[arg-type]
        )
        losses.append([model.step([batch]).loss for _ in range(2)])
        counts.append(len(graphs))
        graphs.clear()
        model.close()
    torch._dynamo.reset()
    assert losses[1] == losses[2] == pytest.approx(losses[0], rel=1e-6)
    assert counts[:2] == [0, 1] and 1 < counts[2] < 8  # of 3 layers


class TwoExperts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(2, 4, 4))


class OwnForward(MixtralExperts):
    def forward(self, hidden_states: torch.Tensor, *_: Any) -> torch.Tensor:
        return hidden_states @ self.down_proj.sum(0).T


class OwnExperts(MixtralExperts):
    """Its eager forward is not one of those that are known."""


def test_other_modules_of_experts_say_why() -> None:
    config = ROWS["mixtral"].make().config
    reason = form_of(TwoExperts())
    assert isinstance(reason, str) and reason.startswith("TwoExperts is not called with the router's choice")
    assert form_of(nn.Linear(2, 2)) is None
    reason = form_of(OwnForward(config))
    assert isinstance(reason, str) and reason.startswith("OwnForward is not called with the router's choice")
    assert not isinstance(form_of(MixtralExperts(config)), str)
    assert not isinstance(form_of(OwnExperts(config)), str)
    config._experts_implementation_internal = "eager"
    assert not isinstance(form_of(MixtralExperts(config)), str)
    assert form_of(OwnExperts(config)) == "OwnExperts runs as eager, which may read experts without tokens"
    llama4 = transformers.AutoModelForCausalLM.from_config(
        causal("llama4", "Llama4Text").make().config  # a product over all experts
    )
    assert "by choice" not in ways_of(llama4)


# skip_idle_experts


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
