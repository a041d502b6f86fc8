"""Which modules of experts are streamed by choice, and how their blocks are compiled."""

from __future__ import annotations

from functools import wraps
from typing import Any

import pytest
import torch
import transformers
from expert_models import ROWS, OwnForward, few_tokens, stream
from families import text_batch
from family_zoo import causal
from resident import Resident, assert_close
from torch import nn
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS, grouped_mm_experts_forward
from transformers.models.mixtral.modeling_mixtral import MixtralExperts

from megatrain import Placement
from megatrain.chosen_experts import ExpertsUse
from megatrain.experts import form_of, ways_of


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
