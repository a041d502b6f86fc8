"""A step of which nothing leaves the device runs as one graph a micro-batch, and is like any other from outside."""

from __future__ import annotations

import copy
from contextlib import closing
from typing import Any

import families
import pytest
import torch
from case_models import assert_same_parameters, reference, stream
from families import FAMILIES
from resident import assert_close
from test_equality import batches_of
from test_placement import JOINED, STREAMED
from torch import nn
from torch.utils.checkpoint import checkpoint

from megatrain import BlockPlacement, Placement, UnsupportedModelError, joined

ONE_BY_ONE = Placement(order="micro-batch-major")


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(width, width), nn.Linear(width, width)
        self.kept: torch.Tensor | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = torch.tanh(self.first(x))
        self.kept = hidden
        return x + self.second(hidden)


class Tower(nn.Module):
    """Calls its first block twice."""

    def __init__(self, width: int = 8, calls: tuple[int, ...] = (0, 1, 0, 2)) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, width)
        self.layers = nn.ModuleList(Block(width) for _ in range(3))
        self.head = nn.Linear(width, 11, bias=False)
        self.calls = calls
        self.fails = False

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        hidden = self.embed(input_ids)
        for index in self.calls:
            hidden = self.layers[index](hidden)
            if self.fails:
                raise ValueError("the module's own")
        return dict(loss=nn.functional.cross_entropy(self.head(hidden).flatten(0, 1), labels.flatten()))


def batches(count: int = 3) -> list[dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(3)
    tokens = [torch.randint(11, (2, 5), generator=generator) for _ in range(count)]
    return [dict(input_ids=ids, labels=ids) for ids in tokens]


@pytest.fixture
def passes(monkeypatch: pytest.MonkeyPatch) -> list[joined.JoinedPass]:
    """Those that are run from now on."""
    found: list[joined.JoinedPass] = []
    real = joined.JoinedPass.backward

    def backward(self: joined.JoinedPass, loss: torch.Tensor) -> Any:
        found.append(self)
        return real(self, loss)

    monkeypatch.setattr(joined.JoinedPass, "backward", backward)
    return found


def weights_after(placement: Placement, module: nn.Module, **settings: Any) -> dict[str, torch.Tensor]:
    with closing(stream(module, placement=placement, **settings)) as model:
        for _ in range(3):
            model.step(batches())
        return {name: value.clone() for name, value in model.state_dict().items()}


def tower(**settings: Any) -> Tower:
    torch.manual_seed(0)
    return Tower(**settings)


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def test_a_block_that_is_called_twice(passes: list[joined.JoinedPass]) -> None:
    found = weights_after(JOINED, tower())
    assert len(passes) == 9
    assert same(found, weights_after(ONE_BY_ONE, tower()))
    assert len(passes) == 9


@pytest.mark.parametrize(
    "placement",
    [
        Placement(order="micro-batch-major", blocks=(BlockPlacement(keep="everything", resident="weights"),)),
        Placement(order="micro-batch-major", blocks=(BlockPlacement(keep="selected", resident="all"),)),
        Placement(
            order="micro-batch-major",
            blocks=(BlockPlacement(keep=("everything", "everything", "inputs"), resident="all"),),
        ),
        Placement(
            order="micro-batch-major", blocks=(BlockPlacement(keep="everything", kept_on="host", resident="all"),)
        ),
        Placement(
            order="micro-batch-major", blocks=(BlockPlacement(keep="everything", inputs_on="host", resident="all"),)
        ),
        Placement(blocks=(BlockPlacement(keep="everything", resident="all"),)),
    ],
    ids=["weights", "selected", "one micro-batch", "kept on host", "inputs on host", "layer-major"],
)
def test_what_leaves_the_device_is_parked(placement: Placement, passes: list[joined.JoinedPass]) -> None:
    with closing(stream(tower(), placement=placement)) as model:
        model.step(batches())
    assert not passes


def test_one_micro_batch_has_no_order(passes: list[joined.JoinedPass]) -> None:
    with closing(stream(tower(), placement=Placement(blocks=JOINED.blocks))) as model:
        model.step(batches(1))
    assert len(passes) == 1


def test_updates_as_gradients_land() -> None:
    settings: dict[str, Any] = dict(max_grad_norm=None, skip_nonfinite=False)
    found = weights_after(JOINED, tower(), **settings)
    assert same(found, weights_after(ONE_BY_ONE, tower(), **settings))


@pytest.mark.parametrize("frozen", ["embed", "layers.0", "layers.1.second"])
def test_frozen_parts(frozen: str) -> None:
    def module() -> Tower:
        made = tower()
        made.get_submodule(frozen).requires_grad_(False)
        return made

    assert same(weights_after(JOINED, module()), weights_after(ONE_BY_ONE, module()))


def test_the_trace_has_each_call_both_ways() -> None:
    with closing(stream(tower(), placement=JOINED)) as model:
        model.step(batches(2))
        model.step(batches(2))
        names = {unit.tile: unit.name for unit in model._parts.units.units}
        spans = [names[span.tile] for span in model._parts.engine.trace() if span.kind == "compute" and span.step == 1]
    there = ["layers.0", "layers.1", "layers.0", "layers.2"]
    assert spans == 2 * [*there, *there[::-1]]


def test_losses_of_what_hooks_see() -> None:
    """A penalty on what a sub-module of a block gives, from a forward hook."""

    class Penalized(Tower):
        def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
            seen.clear()
            output = super().forward(input_ids, labels)
            return dict(loss=output["loss"] + 0.1 * sum(value.square().mean() for value in seen))

    seen: list[torch.Tensor] = []

    def module() -> Penalized:
        torch.manual_seed(0)
        made = Penalized()
        made.layers[1].first.register_forward_hook(lambda module, args, output: seen.append(output))
        return made

    assert same(weights_after(JOINED, module()), weights_after(ONE_BY_ONE, module()))
    assert not same(weights_after(JOINED, module()), weights_after(JOINED, tower()))


def test_a_tensor_that_was_kept_is_no_way_into_the_sums() -> None:
    module = tower()
    kept: list[torch.Tensor] = []
    module.layers[0].second.register_forward_hook(lambda module, args, output: kept.append(output))
    with closing(stream(module, placement=JOINED)) as model:
        model.step(batches(1))
        with pytest.raises((UnsupportedModelError, RuntimeError)):
            kept[0].sum().backward()
        model.step(batches(1))
        assert not model._parts.sink.pending


def test_a_tensor_that_no_loss_was_taken_of_is_refused_afterwards() -> None:
    class Branching(Tower):
        def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
            branches.append(self.layers[2](self.embed(input_ids).detach()))
            return super().forward(input_ids, labels)

    branches: list[torch.Tensor] = []
    torch.manual_seed(0)
    with closing(stream(Branching(), placement=JOINED, self_check=False)) as model:
        model.step(batches(1))
        with pytest.raises(UnsupportedModelError, match=r"a gradient was asked of a tensor that left layers\.2"):
            branches[-1].sum().backward()
        assert not model._parts.sink.pending


def test_goes_on_after_an_error_of_the_module() -> None:
    module = tower()
    with closing(stream(module, placement=JOINED)) as model:
        model.step(batches())
        module.fails = True
        with pytest.raises(ValueError, match="the module's own"):
            model.step(batches())
        module.fails = False
        for _ in range(2):
            model.step(batches())
        found = {name: value.clone() for name, value in model.state_dict().items()}
    assert same(found, weights_after(ONE_BY_ONE, tower()))


def test_goes_on_after_an_error_on_the_way_back() -> None:
    class Failing(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
            if fails:
                raise ValueError("on the way back")
            return gradient

    class Block2(Block):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(Failing.apply(x))  # type: ignore[no-untyped-call]

    fails: list[int] = []
    module = tower()
    torch.manual_seed(0)
    module.layers[1] = Block2(8)
    with closing(stream(module, placement=JOINED)) as model:
        model.step(batches())
        fails.append(1)
        with pytest.raises(ValueError, match="on the way back"):
            model.step(batches())
        fails.clear()
        assert not model._parts.sink.pending
        model.step(batches())


def test_graph_caches_are_refused_as_elsewhere() -> None:
    class Cache:
        def update(self) -> None: ...

        def get_seq_length(self) -> int:
            return 0

    class Cached(Block):
        def forward(self, x: torch.Tensor, cache: object = None) -> torch.Tensor:
            return super().forward(x)

    class Caching(Tower):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(Cached(8) for _ in range(3))

        def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
            hidden = self.embed(input_ids)
            for layer in self.layers:
                hidden = layer(hidden, cache=Cache())
            return dict(loss=nn.functional.cross_entropy(self.head(hidden).flatten(0, 1), labels.flatten()))

    for placement in (JOINED, STREAMED):
        with closing(stream(Caching(), placement=placement, self_check=False)) as model:
            with pytest.raises(UnsupportedModelError, match="use_cache=False"):
                model.step(batches(1))


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_equals_a_resident_model(compiled: bool, passes: list[joined.JoinedPass]) -> None:
    family = next(family for family in FAMILIES if family.name == "qwen2")
    resident = reference(families.build(family))
    with closing(stream(families.build(family), placement=JOINED, compile=compiled)) as model:
        for step in range(3):
            loss, norm, _ = resident.step(batches_of(family, step))
            report = model.step(batches_of(family, step))
            assert (report.loss, report.grad_norm) == (pytest.approx(loss, rel=1e-5), pytest.approx(norm, rel=1e-4))
        assert_same_parameters(model, resident)
    assert passes


Gradients = dict[str, torch.Tensor]


def gradients(placement: Placement | None, module: nn.Module, count: int = 1, **settings: Any) -> Gradients:
    """Of a step; by plain PyTorch for no placement."""
    if placement is None:
        plain = copy.deepcopy(module)
        for batch in batches(count):
            (plain(**batch)["loss"] / count).backward()
        return {name: p.grad for name, p in plain.named_parameters() if p.grad is not None}
    with closing(stream(module, placement=placement, max_grad_norm=None, **settings)) as model:
        model.step(batches(count))
        return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def assert_plain(module: nn.Module, count: int = 1, **settings: Any) -> None:
    expected = gradients(None, module, count)
    found = gradients(JOINED, module, count, **settings)
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert_close(found[name], value, 1e-6, name)


@pytest.mark.parametrize("count", [1, 2, 3])
@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("every", [1, 2])
def test_checkpointing_of_the_modules_own(every: int, reentrant: bool, count: int) -> None:
    class Checkpointed(Tower):
        def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
            hidden = self.embed(input_ids)
            for number, layer in enumerate(self.layers):
                again = number % every == 0
                hidden = checkpoint(layer, hidden, use_reentrant=reentrant) if again else layer(hidden)
            return dict(loss=nn.functional.cross_entropy(self.head(hidden).flatten(0, 1), labels.flatten()))

    torch.manual_seed(0)
    assert_plain(Checkpointed(), count, self_check=False)


def test_what_a_block_passes_through_is_left_alone() -> None:
    class Passing(Block):
        def forward(self, x: torch.Tensor, table: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            return table, super().forward(x) + table

    class Latent(Tower):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(Passing(8) for _ in range(3))
            self.table = nn.Parameter(torch.randn(8))

        def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
            hidden, table = self.embed(input_ids), self.table
            for layer in self.layers:
                table, hidden = layer(hidden, table)
            return dict(loss=nn.functional.cross_entropy(self.head(hidden).flatten(0, 1), labels.flatten()))

    torch.manual_seed(0)
    module = Latent()
    assert_plain(copy.deepcopy(module), 2)
    with closing(stream(module, placement=JOINED)) as model:
        for _ in range(3):
            model.step(batches())
        assert not module.table._backward_hooks


def test_a_gradient_in_memory_that_is_used_again() -> None:
    buffer = torch.zeros(8)

    class Scaled(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
            ctx.save_for_backward(x, scale)
            return x * scale

        @staticmethod
        def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            x, scale = ctx.saved_tensors
            return gradient * scale, torch.sum(gradient * x, (0, 1), out=buffer)

    class ScaledBlock(Block):
        def __init__(self, width: int) -> None:
            super().__init__(width)
            self.scale = nn.Parameter(torch.randn(width))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(Scaled.apply(x, self.scale))  # type: ignore[no-untyped-call]

    torch.manual_seed(0)
    module = Tower(calls=(0, 1, 2))
    module.layers = nn.ModuleList(ScaledBlock(8) for _ in range(3))
    assert_plain(module)


@pytest.mark.parametrize("placement", [JOINED, STREAMED, ONE_BY_ONE], ids=["joined", "streamed", "one by one"])
def test_a_block_in_inference_mode_before_any_other_use(placement: Placement) -> None:
    class Teaching(Tower):
        def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
            hidden = self.embed(input_ids)
            with torch.inference_mode():
                taught = self.layers[2](hidden)
            for layer in self.layers:
                hidden = layer(hidden)
            own = nn.functional.cross_entropy(self.head(hidden).flatten(0, 1), labels.flatten())
            return dict(loss=own + 0.1 * (hidden - taught.clone()).square().mean())

    torch.manual_seed(0)
    module = Teaching()
    expected = gradients(None, module)
    found = gradients(placement, module, self_check=False)
    for name, value in expected.items():
        assert_close(found[name], value, 1e-6, name)


@pytest.mark.parametrize("placement", [JOINED, STREAMED], ids=["joined", "streamed"])
def test_an_evaluation_in_inference_mode_before_the_first_step(placement: Placement) -> None:
    found, expected = (closing(stream(tower(), placement=placement)) for _ in range(2))
    with found as one, expected as other:
        with torch.inference_mode():
            one.evaluate(batches())
        for _ in range(2):
            assert one.step(batches()).loss == other.step(batches()).loss


@pytest.mark.parametrize("self_check", [True, False])
@pytest.mark.parametrize("placement", [JOINED, STREAMED], ids=["joined", "streamed"])
def test_one_block_twice_in_its_stack(placement: Placement, self_check: bool) -> None:
    torch.manual_seed(0)
    module = Tower(calls=(0, 1, 2, 3))
    module.layers.append(module.layers[0])
    expected = gradients(None, module)
    found = gradients(placement, module, self_check=self_check)
    for name, value in expected.items():
        assert_close(found[name], value, 1e-6, name)
