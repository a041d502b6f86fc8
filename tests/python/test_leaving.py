"""Whatever leaves a block (what it returns, what hooks see, what it writes into containers) has its gradient, or is
refused by name: against the resident module, in every way of keeping activations, compiled too."""

from __future__ import annotations

from collections import OrderedDict, UserDict
from collections.abc import Callable
from contextvars import ContextVar
from typing import Any

import pytest
import torch
from resident import assert_close
from torch import nn

import megatrain
from megatrain import BlockPlacement, Placement

WIDTH = 8
COLLECTED: ContextVar[list[torch.Tensor]] = ContextVar("collected")
"""Of one forward; several run side by side."""


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(WIDTH, 3)
        self.inner = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))
        self.aside: torch.Tensor | None = None

    def forward(self, x: torch.Tensor, **given: Any) -> torch.Tensor:
        y = x
        for share, inner in zip(torch.softmax(self.gate(x), -1).unbind(-1), self.inner, strict=False):
            y = y + share[..., None] * torch.tanh(inner(x))
        return y


class Stack(nn.Module):
    """What leaves the blocks is collected, and is part of the loss."""

    def __init__(self, block: type[nn.Module] = Block) -> None:
        super().__init__()
        self.inlet = nn.Linear(WIDTH, WIDTH)
        self.layers = nn.ModuleList(block() for _ in range(3))

    def arguments(self, x: torch.Tensor) -> dict[str, Any]:
        return {}

    def gathered(self, given: dict[str, Any]) -> list[torch.Tensor]:
        return []

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        collected: list[torch.Tensor] = []
        COLLECTED.set(collected)
        x = self.inlet(x)
        given = self.arguments(x)
        for layer in self.layers:
            x = layer(x, **given)
        collected += self.gathered(given)
        assert collected
        return (x - y).square().mean() + 0.3 * sum(entry.square().sin().mean() for entry in collected)


def batch(seed: int, rows: int = 4) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return dict(x=torch.randn(rows, WIDTH, generator=generator), y=torch.randn(rows, WIDTH, generator=generator))


BATCHES = [batch(1), batch(2, rows=3)]


def stream(module: nn.Module, keep: Any = "inputs", **changes: Any) -> megatrain.StreamedModel:
    settings: dict[str, Any] = dict(
        dtype=torch.float32,
        device=megatrain.HostBackend(max_delay_us=50, seed=3, poison=True),
        compile=False,
        keep_gradients=True,
        placement=Placement(blocks=(BlockPlacement(keep=keep, kept_on="host"),)),
        self_check=False,
    )
    return megatrain.StreamedModel(module, **{**settings, **changes})


def assert_exact(make: Callable[[], Stack], way: str, keep: str = "inputs", **changes: Any) -> None:
    torch.manual_seed(1)
    resident = make()
    expected_loss = 0.0
    rows = sum(len(entry["x"]) for entry in BATCHES)
    for entry in BATCHES:
        loss = resident(**entry) * (len(entry["x"]) / rows)
        loss.backward()
        expected_loss += float(loss.detach())
    torch.manual_seed(1)
    model = stream(make(), keep, **changes)
    if way == "step":
        loss = model.step(BATCHES).loss
    else:
        loss = 0.0
        for entry in BATCHES:
            one = model(**entry) * (len(entry["x"]) / rows)
            one.backward()
            loss += float(one.detach())
    assert loss == pytest.approx(expected_loss, rel=1e-6)
    for (name, parameter), (_, expected) in zip(model.named_parameters(), resident.named_parameters(), strict=True):
        assert_close(parameter.grad, expected.grad, 3e-6, name)
    with torch.no_grad():
        assert model.evaluate(BATCHES[0]).loss == pytest.approx(float(model.module(**BATCHES[0])), rel=1e-6)
    model.close()


# hooks on sub-modules


def keeps_outputs(stack: Stack) -> None:
    for layer in stack.layers:
        layer.gate.register_forward_hook(lambda module, args, output: COLLECTED.get().append(output))


def keeps_inputs(stack: Stack) -> None:
    for layer in stack.layers:
        layer.inner[1].register_forward_hook(lambda module, args, output: COLLECTED.get().append(args[0]))


def takes_a_loss(stack: Stack) -> None:
    def hook(module: nn.Module, args: Any, kwargs: Any, output: torch.Tensor) -> None:
        COLLECTED.get().append(torch.softmax(output, -1).square().sum() * output.mean())

    for layer in stack.layers:
        layer.gate.register_forward_hook(hook, with_kwargs=True)


def hooked(install: Callable[[Stack], None]) -> Callable[[], Stack]:
    def make() -> Stack:
        stack = Stack()
        install(stack)
        return stack

    return make


@pytest.mark.parametrize("keep", ["inputs", "selected", "everything"])
@pytest.mark.parametrize("way", ["step", "backward"])
@pytest.mark.parametrize("install", [keeps_outputs, keeps_inputs, takes_a_loss])
def test_what_hooks_see_has_its_gradient(install: Callable[[Stack], None], way: str, keep: str) -> None:
    assert_exact(hooked(install), way, keep)


def test_hooks_of_streamed_blocks_come_and_go() -> None:
    model = stream(hooked(keeps_outputs)())
    seen: list[torch.Tensor] = []
    gate = model.module.layers[1].gate
    handle = gate.register_forward_hook(lambda module, args, output: seen.append(output))
    loss = model(**BATCHES[0])
    handle.remove()  # what the recompute has to give is what the forward gave
    (loss + seen[0].sum()).backward()
    assert len(seen) == 1
    model.optimizer.zero_grad()
    model(**BATCHES[0]).backward()
    assert len(seen) == 1


@pytest.mark.parametrize("way", ["step", "backward"])
@pytest.mark.parametrize("change", ["returned", "in place"])
def test_hooks_that_change_the_computation_are_refused(change: str, way: str) -> None:
    def hook(module: nn.Module, args: Any, output: torch.Tensor) -> torch.Tensor | None:
        if change == "returned":
            return output * 2
        output.detach().mul_(2)
        return None

    stack = hooked(keeps_outputs)()
    stack.layers[1].gate.register_forward_hook(hook)
    model = stream(stack)
    with pytest.raises(megatrain.UnsupportedModelError, match=r"hook .* on layers\.1\.gate changes what"):
        if way == "step":
            model.step(BATCHES)
        else:
            model(**BATCHES[0]).backward()


# containers


class WritingBlock(Block):
    def forward(self, x: torch.Tensor, **given: Any) -> torch.Tensor:
        last = given["shared"].get("last")
        y = super().forward(x if last is None else x + 0.5 * last[1])
        given["shared"]["last"] = (y.tanh(), self.inner[0](y))
        given["shared"].pop("first", None)
        given["listed"].append(y.cos())
        given["nested"]["deep"][0][str(len(given["nested"]["deep"][0]))] = y.sin()
        return y


class WritingStack(Stack):
    mapping: type = dict

    def __init__(self) -> None:
        super().__init__(WritingBlock)

    def arguments(self, x: torch.Tensor) -> dict[str, Any]:
        return dict(
            shared=self.mapping({"first": x, "other": x.square()}),
            listed=[x],
            nested={"deep": ({}, 1)},
            untouched={"x": x},
        )

    def gathered(self, given: dict[str, Any]) -> list[torch.Tensor]:
        assert set(given["shared"]) == {"last", "other"} and type(given["shared"]) is self.mapping
        assert len(given["listed"]) == 4 and len(given["nested"]["deep"][0]) == 3
        shared, nested = given["shared"], given["nested"]["deep"][0]
        return [*shared["last"], shared["other"], *given["listed"], *nested.values(), given["untouched"]["x"]]


class UserWritingStack(WritingStack):
    mapping = UserDict


@pytest.mark.parametrize("keep", ["inputs", "selected", "everything"])
@pytest.mark.parametrize("way", ["step", "backward"])
@pytest.mark.parametrize("make", [WritingStack, UserWritingStack])
def test_what_blocks_write_into_containers_has_its_gradient(make: type[Stack], way: str, keep: str) -> None:
    assert_exact(make, way, keep)


class Odd(OrderedDict[str, Any]):
    pass


@pytest.mark.parametrize(
    "given, words",
    [
        (lambda: dict(shared=Odd()), r"layers\.0 writes into a Odd that it was given"),
        (lambda: dict(shared=(one := {}), also=one), r"layers\.0 writes into a dict that it was given twice"),
    ],
    ids=["type", "twice"],
)
def test_containers_that_cannot_be_written_from_outside_are_refused(
    given: Callable[[], dict[str, Any]], words: str
) -> None:
    class Writes(Block):
        def forward(self, x: torch.Tensor, **given: Any) -> torch.Tensor:
            given["shared"]["x"] = x
            return super().forward(x)

    stack = Stack(Writes)
    stack.arguments = lambda x: given()  # type: ignore[method-assign]
    with pytest.raises(megatrain.UnsupportedModelError, match=words):
        stream(stack).step(BATCHES)


# other ways


class AsideBlock(Block):
    def forward(self, x: torch.Tensor, **given: Any) -> torch.Tensor:
        self.aside = self.gate(x)
        return super().forward(x)


class AsideStack(Stack):
    def __init__(self) -> None:
        super().__init__(AsideBlock)
        self.inlet.requires_grad_(False)  # with it no saved weight is missed on the way to the gate's gradient

    def gathered(self, given: dict[str, Any]) -> list[torch.Tensor]:
        return [self.layers[0].aside]


@pytest.mark.parametrize("keep", ["inputs", "selected", "everything"])
@pytest.mark.parametrize("way", ["step", "backward"])
def test_gradients_of_tensors_that_leave_as_attributes_are_refused(way: str, keep: str) -> None:
    model = stream(AsideStack(), keep)
    with pytest.raises(megatrain.UnsupportedModelError, match="other than by its return value"):
        if way == "step":
            model.step(BATCHES)
        else:
            model(**BATCHES[0]).backward()


class SharedStack(Stack):
    """Keeps what its hooks see in itself, where another micro-batch's forward finds it."""

    def __init__(self) -> None:
        super().__init__()
        self.kept: list[torch.Tensor] = []
        for layer in self.layers:
            layer.gate.register_forward_hook(lambda module, args, output: self.kept.append(output))

    def arguments(self, x: torch.Tensor) -> dict[str, Any]:
        self.kept.clear()
        return {}

    def gathered(self, given: dict[str, Any]) -> list[torch.Tensor]:
        return list(self.kept)


def test_what_forwards_leave_in_the_module_is_refused_where_they_run_side_by_side() -> None:
    model = stream(SharedStack(), self_check=True)
    with pytest.raises(megatrain.UnsupportedModelError, match=r"self-check.* must not share"):
        model.step(BATCHES)
    for way in ("step", "backward"):
        placement = Placement(order="micro-batch-major")
        assert_exact(SharedStack, way, placement=placement, self_check=True)


# compiled


@pytest.mark.parametrize("make", [hooked(keeps_outputs), UserWritingStack], ids=["hooks", "containers"])
def test_compiled(make: Callable[[], Stack], monkeypatch: pytest.MonkeyPatch) -> None:
    torch._dynamo.reset()
    compile = torch.compile
    monkeypatch.setattr(torch, "compile", lambda function, options: compile(function, backend="aot_eager"))
    assert_exact(make, "step", compile=True)
