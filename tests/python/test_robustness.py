"""What users do to a model between and inside of steps."""

from __future__ import annotations

import copy
import gc
import os
import re
import signal
import threading
import time
import warnings
import weakref
from pathlib import Path
from typing import Any

import families
import pytest
import torch
from case_models import Toy, WithLoss, assert_same_parameters, reference, stream, toy, toy_batch
from families import FAMILIES, text_batch
from resident import assert_close
from torch import nn

import megatrain

LLAMA = FAMILIES[0]
pytestmark = pytest.mark.filterwarnings("ignore:after 3 steps")


def test_interrupts_at_any_moment_leave_a_working_model() -> None:
    plain, hit = stream(families.build(LLAMA)), stream(families.build(LLAMA))
    batches = [text_batch(1), text_batch(2, rows=3)]
    assert plain.step(batches).loss == hit.step(batches).loss
    generator = torch.Generator().manual_seed(5)
    done = interrupted = 0
    while interrupted < 25 and done < 200:
        delay = float(torch.rand((), generator=generator)) * 0.05
        timer = threading.Timer(delay, os.kill, (os.getpid(), signal.SIGINT))
        try:
            timer.start()
            report = hit.step(batches)
            timer.join()
            time.sleep(0.001)
        except KeyboardInterrupt:
            interrupted += 1
            if hit.steps == plain.steps + 1:  # it came when the update was queued already
                plain.step(batches)
            continue
        done += 1
        assert plain.step(batches).loss == report.loss
    assert interrupted > 5
    for _ in range(3):
        assert plain.step(batches).loss == hit.step(batches).loss
    for name, values in plain.state_dict().items():
        assert torch.equal(values, hit.state_dict()[name]), name


INSIDE = {
    "step()": lambda model: model.step(toy_batch(7)),
    "evaluate()": lambda model: model.evaluate(toy_batch(7)),
    "place()": lambda model: model.place(megatrain.Placement()),
    "a forward": lambda model: model(**toy_batch(7)),
}


@pytest.mark.parametrize("called", INSIDE)
@pytest.mark.parametrize("running", ["step()", "evaluate()", "a forward"])
@pytest.mark.parametrize("place", ["module", "block", "loss"])
def test_what_a_step_calls_of_the_model_is_refused(running: str, called: str, place: str) -> None:
    plain, hit = stream(toy()), stream(toy())
    module = hit.module
    batches = [toy_batch(1), toy_batch(2)]
    assert plain.step(batches).loss == hit.step(batches).loss

    def call(*_: object) -> None:
        INSIDE[called](hit)

    def run() -> float:
        if running == "a forward":
            return float(hit(**batches[0]).loss)
        return hit.step(batches).loss if running == "step()" else hit.evaluate(batches).loss

    owners = {"module": module, "block": hit._parts.blocks[1].skeleton.first, "loss": module.inner.outlet}
    handle = owners[place].register_forward_hook(call)
    with pytest.raises(RuntimeError, match=f"^{re.escape(called)} was called while {re.escape(running)} runs; call it"):
        run()
    handle.remove()
    for _ in range(2):
        assert plain.evaluate(batches).loss == hit.evaluate(batches).loss
        assert plain.step(batches).loss == hit.step(batches).loss
    hit.place(megatrain.Placement(order="micro-batch-major"))
    assert plain.step(batches).loss == pytest.approx(hit.step(batches).loss, rel=1e-6)


@pytest.mark.parametrize("way", ["step", "backward"])
def test_exceptions_anywhere_in_the_module_leave_a_working_model(way: str) -> None:
    plain, hit = stream(toy()), stream(toy())

    def run(model: megatrain.StreamedModel, seed: int) -> float:
        if way == "step":
            return model.step([toy_batch(seed), toy_batch(seed + 50)]).loss
        model.optimizer.zero_grad()
        loss = model(**toy_batch(seed)).loss
        loss.backward()
        model.optimizer.step()
        return float(loss.detach())

    inner = hit.module.inner
    assert run(plain, 0) == run(hit, 0)
    for number, place in enumerate([inner.inlet, inner.layers[2].first, inner.outlet]):
        fired = []

        def fail(*_: Any, fired: list[int] = fired) -> None:
            fired.append(1)
            raise KeyError("in the module")

        handle = place.register_forward_pre_hook(fail)
        with pytest.raises(KeyError, match="in the module"):
            run(hit, 7)
        handle.remove()
        assert fired
        assert run(plain, number + 1) == run(hit, number + 1)
    for name, values in plain.state_dict().items():
        assert torch.equal(values, hit.state_dict()[name]), name


def test_a_bad_learning_rate_is_refused_and_can_be_mended() -> None:
    plain, model = stream(families.build(LLAMA)), stream(families.build(LLAMA))
    before = model.state_dict()
    model.optimizer.param_groups[0]["lr"] = float("nan")
    with pytest.raises(ValueError, match="lr is nan"):
        model.step(text_batch(1))
    for name, values in model.state_dict().items():
        assert torch.equal(values, before[name]), name
    model.optimizer.param_groups[0]["lr"] = plain.optimizer.param_groups[0]["lr"]
    assert model.step(text_batch(1)).loss == plain.step(text_batch(1)).loss


def test_a_dropped_model_is_freed() -> None:
    module = families.build(LLAMA)
    model = stream(module)
    model.step(text_batch(1))
    model(**text_batch(2)).loss.backward()
    gone = weakref.ref(model), weakref.ref(model._parts.tiles.store)
    before = threading.active_count()
    del model, module
    gc.collect()
    assert gone[0]() is None and gone[1]() is None
    assert threading.active_count() <= before


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_any_loss_without_labels(dtype: torch.dtype) -> None:
    model, resident = stream(families.build(LLAMA), dtype=dtype), reference(families.build(LLAMA))
    ids = text_batch(1, left_padding=0)["input_ids"]
    loss = model(input_ids=ids).logits.float().square().mean()
    loss.backward()
    resident.module(input_ids=ids).logits.square().mean().backward()
    for name, parameter in resident.module.named_parameters():
        tolerance = 3e-6 if dtype == torch.float32 else 6e-2  # the reference is fp32
        assert_close(dict(model.named_parameters())[name].grad, parameter.grad, tolerance, name)


class ReturnsWeights(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)
        self.gain = nn.Parameter(torch.rand(width) + 0.5)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        return x + self.linear(x), self.gain, self.linear.weight[0]


class UsesReturned(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(ReturnsWeights(16) for _ in range(4))

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> dict[str, torch.Tensor]:
        for layer in self.layers:
            x, gain, row = layer(x)
            x = x * gain + row
        return {"loss": (x - y).square().mean()}


def test_blocks_that_return_their_weights() -> None:
    torch.manual_seed(0)
    module = WithLoss(UsesReturned())
    resident, model = reference(module), stream(module)
    for step in range(4):
        loss, _, _ = resident.step([toy_batch(step), toy_batch(step + 9)])
        assert model.evaluate([toy_batch(step), toy_batch(step + 9)]).loss == pytest.approx(loss, rel=1e-6)
        assert model.step([toy_batch(step), toy_batch(step + 9)]).loss == pytest.approx(loss, rel=1e-6)
    assert_same_parameters(model, resident)


def test_backward_through_overwritten_outside_weights_is_refused() -> None:
    module = toy()
    for parameter in module.inner.layers.parameters():
        parameter.requires_grad_(False)
    model = stream(module)
    old = model(**toy_batch(1)).loss
    model.step(toy_batch(2))
    model(**toy_batch(3))  # brings the new weights
    with pytest.raises(RuntimeError, match=r"modified by an inplace|updated or edited"):
        old.backward()


def test_an_edit_leaves_the_masters_of_others() -> None:
    model = stream(families.build(LLAMA), dtype=torch.bfloat16)
    model.step(text_batch(1))
    before = {name: values.clone() for name, values in model.state_dict().items()}
    edited = "model.layers.0.input_layernorm.weight"
    with torch.no_grad():
        dict(model.named_parameters())[edited].add_(1)
    model.evaluate(text_batch(1))
    for name, values in model.state_dict().items():
        assert torch.equal(values, before[name]) == (name != edited), name


class FrozenPart(Toy):
    """The first two blocks run under no_grad."""

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> dict[str, torch.Tensor]:
        x = self.inlet(x)
        for index, layer in enumerate(self.layers):
            with torch.set_grad_enabled(torch.is_grad_enabled() and index >= 2):
                x = layer(x)
        return {"loss": nn.functional.mse_loss(self.outlet(x), y)}


@pytest.mark.parametrize("way", ["step", "backward"])
def test_grad_mode_of_the_module_is_kept(way: str) -> None:
    torch.manual_seed(3)
    module = WithLoss(FrozenPart())
    resident, model = reference(module), stream(module)
    for step in range(3):
        resident.step([toy_batch(step)])
        if way == "step":
            model.step([toy_batch(step)])
        else:
            model(**toy_batch(step)).loss.backward()
            model.optimizer.step()
    assert_same_parameters(model, resident)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_step_has_gradients_whatever_surrounds_it(mode: Any) -> None:
    plain, inside = stream(families.build(LLAMA)), stream(families.build(LLAMA))
    for step in range(2):
        expected = plain.step(text_batch(step))
        with mode():
            report = inside.step(text_batch(step))
        assert (report.loss, report.grad_norm) == (expected.loss, expected.grad_norm)


def test_penalties_and_hooks_on_parameters_are_refused() -> None:
    model = stream(families.build(LLAMA))
    parameter = next(model.parameters())
    with pytest.raises(RuntimeError, match=r"weight_decay"):
        parameter.pow(2).sum()
    with pytest.raises(RuntimeError, match="hooks on streamed parameters"):
        parameter.register_hook(lambda gradient: gradient)
    with torch.no_grad():
        assert float(parameter.pow(2).sum()) > 0
    assert torch.equal(parameter.detach(), model.state_dict()["model.embed_tokens.weight"])


def test_reads_of_any_kind_see_pending_updates() -> None:
    for read in (
        lambda faces: torch._foreach_mul(faces, 1.0),
        lambda faces: [torch.stack([face, face])[0] for face in faces],
        lambda faces: [torch.add(input=face, other=0) for face in faces],
    ):
        model = stream(families.build(LLAMA), device=megatrain.HostBackend(max_delay_us=2000, seed=3))
        model.step(text_batch(1))
        with torch.no_grad():
            seen = [value.clone() for value in read(list(model.parameters()))]
        model.synchronize()
        for (name, face), value in zip(model.named_parameters(), seen, strict=True):
            assert torch.equal(face.detach(), value), name


def test_micro_batches_keep_their_numbers_beside_empty_ones() -> None:
    module = families.build(LLAMA, dropout=True)
    resident, model = reference(module), stream(module)
    empty = text_batch(1)
    empty["labels"] = torch.full_like(empty["labels"], -100)
    loss, _, _ = resident.step([empty, text_batch(2), empty, text_batch(3)])
    assert model.step([empty, text_batch(2), empty, text_batch(3)]).loss == pytest.approx(loss, rel=1e-6)


def test_evaluation_keeps_each_modules_mode() -> None:
    module = families.build(LLAMA, dropout=True)
    model = stream(module)
    module.model.layers[1].eval()
    module.model.norm.eval()
    modes = {name: block.skeleton.training for name, block in ((b.name, b) for b in model._parts.blocks)}
    model.evaluate(text_batch(1))
    assert not module.model.norm.training and module.training
    assert {b.name: b.skeleton.training for b in model._parts.blocks} == modes
    assert list(modes.values()).count(False) == 1


class WithStatistics(Toy):
    def __init__(self) -> None:
        super().__init__()
        self.statistics = nn.BatchNorm1d(16)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> dict[str, torch.Tensor]:
        return super().forward(self.statistics(x), y)


def test_the_self_check_leaves_statistics_and_random_numbers_alone() -> None:
    torch.manual_seed(3)
    module = WithLoss(WithStatistics())
    resident = reference(module)
    torch.manual_seed(9)
    expected = torch.get_rng_state()
    model = stream(module, example_batch=toy_batch(1))
    assert torch.equal(torch.get_rng_state(), expected)
    for step in range(3):
        resident.step([toy_batch(step)])
        model.step([toy_batch(step)])
    for name, buffer in resident.module.named_buffers():
        assert_close(model.state_dict()[name].double(), buffer.double(), 1e-6, name)


class AsksForType(Toy):
    def forward(self, x: torch.Tensor, y: torch.Tensor) -> dict[str, torch.Tensor]:
        return super().forward(x.to(next(self.parameters()).dtype), y.to(self.layers[0].dtype))


def test_modules_that_ask_for_the_type_of_their_weights() -> None:
    torch.manual_seed(3)
    model = stream(AsksForType(), dtype=torch.bfloat16)
    assert model.step(toy_batch(1)).loss > 0


def test_a_keyword_named_weight_reaches_the_module() -> None:
    class Weighted(Toy):
        def forward(self, x: torch.Tensor, y: torch.Tensor, weight: float = 1.0) -> dict[str, torch.Tensor]:
            return {"loss": super().forward(x, y)["loss"] * weight}

    torch.manual_seed(3)
    model = stream(Weighted())
    one, three = model(**toy_batch(1))["loss"], model(**toy_batch(1), weight=3.0)["loss"]
    assert float(three.detach()) == pytest.approx(3 * float(one.detach()))


def test_saving_leaves_other_files_alone(tmp_path: Path) -> None:
    model = stream(families.build(LLAMA))
    (tmp_path / "model_ema.safetensors").write_bytes(b"mine")
    model.save_pretrained(tmp_path)
    assert (tmp_path / "model_ema.safetensors").read_bytes() == b"mine"


def test_clipping_asked_for_once_ends_with_the_gradients() -> None:
    plain, model = stream(families.build(LLAMA)), stream(families.build(LLAMA))
    model(**text_batch(1)).loss.backward()
    model.clip_grad_norm_(1e-4)
    model.optimizer.zero_grad()
    assert model.step(text_batch(2)).loss == plain.step(text_batch(2)).loss
    for name, values in plain.state_dict().items():
        assert torch.equal(values, model.state_dict()[name]), name


def test_accumulation_of_many_backwards_in_bf16_is_fp32() -> None:
    model, whole = (stream(families.build(LLAMA), dtype=torch.bfloat16, max_grad_norm=None) for _ in range(2))
    batches = [text_batch(seed, rows=1, left_padding=0) for seed in range(12)]
    for batch in batches:
        (model(**batch).loss / 12).backward()
    whole.step([dict(batch, weight=1.0) for batch in batches])
    for (name, one), (_, other) in zip(model.named_parameters(), whole.named_parameters(), strict=True):
        assert_close(one.grad, other.grad, 2**-8, name)


def test_lists_of_lists_of_blocks() -> None:
    class Nested(Toy):
        def __init__(self) -> None:
            super().__init__()
            self.groups = nn.ModuleList(nn.ModuleList(nn.Linear(16, 16) for _ in range(2)) for _ in range(2))

        def forward(self, x: torch.Tensor, y: torch.Tensor) -> dict[str, torch.Tensor]:
            for group in self.groups:
                for layer in group:
                    x = torch.tanh(layer(x))
            return super().forward(x, y)

    torch.manual_seed(3)
    module = WithLoss(Nested())
    resident, model = reference(module), stream(module)
    for step in range(3):
        resident.step([toy_batch(step)])
        model.step([toy_batch(step)])
    assert_same_parameters(model, resident)


def test_sparse_embedding_gradients_are_taken_dense() -> None:
    class Sparse(Toy):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Embedding(10, 16, sparse=True)

        def forward(self, x: torch.Tensor, y: torch.Tensor) -> dict[str, torch.Tensor]:
            return super().forward(x + self.table(torch.arange(len(x))), y)

    torch.manual_seed(3)
    model = stream(Sparse())
    model.step(toy_batch(1))
    assert float(dict(model.named_parameters())["table.weight"].grad.abs().sum()) > 0


# refusals


def test_parameters_in_shared_memory_are_refused() -> None:
    module = Toy()
    memory = torch.randn(20)
    module.inlet.bias.data, module.outlet.bias.data = memory[:16], memory[15:16]
    with pytest.raises(megatrain.UnsupportedModelError, match=r"inlet\.bias and outlet\.bias share memory"):
        stream(module)


def test_autocast_around_blocks_is_refused_in_fp32() -> None:
    class Inner(Toy):
        def forward(self, x: torch.Tensor, y: torch.Tensor) -> dict[str, torch.Tensor]:
            with torch.autocast("cpu", dtype=torch.bfloat16):
                return super().forward(x, y)

    with pytest.raises(megatrain.UnsupportedModelError, match=r"layers\.0 has fp32 weights"):
        stream(Inner()).step(toy_batch(1))


def test_variants_of_the_optimizer_are_refused() -> None:
    model = stream(families.build(LLAMA))
    model.step(text_batch(1))
    state = copy.deepcopy(model.optimizer.state_dict())
    state["param_groups"][0]["amsgrad"] = True
    with pytest.raises(ValueError, match="amsgrad"):
        model.optimizer.load_state_dict(state)
    model.optimizer.param_groups[0]["maximize"] = True
    with pytest.raises(ValueError, match="maximize"):
        model.step(text_batch(1))


def test_the_modules_own_state_dict_is_refused() -> None:
    model = stream(families.build(LLAMA))
    with pytest.raises(RuntimeError, match=r"state_dict\(\) of the StreamedModel"):
        model.module.state_dict()


@pytest.mark.parametrize(
    ("batch", "words"),
    [([], "empty"), ([torch.ones(2)], "Tensor"), (dict(toy_batch(1), weight=float("inf")), "inf"), ("text", "str")],
)
def test_batches_that_are_none(batch: Any, words: str) -> None:
    model = stream(Toy())
    with pytest.raises(ValueError, match=words):
        model.step(batch)
    assert model.steps == 0


def test_settings_out_of_range() -> None:
    for changes, words in ((dict(seed=2**70), "seed"), (dict(threads=-1), "threads"), (dict(max_grad_norm=0), "norm")):
        with pytest.raises(ValueError, match=words), warnings.catch_warnings():
            stream(Toy(), **changes)


@pytest.mark.parametrize("how", ["state dict", "edit", "in place", "checkpoint"])
def test_weights_changed_behind_an_evaluation_are_used(how: str, tmp_path: Path) -> None:
    """The evaluation leaves weights outside the stacks on the device; the next step must fetch the new ones."""
    source, model = stream(families.build(FAMILIES[2])), stream(families.build(FAMILIES[2]))
    with torch.no_grad():
        for parameter in source.parameters():
            parameter.mul_(1.5)
    source.save_checkpoint(tmp_path)
    model.evaluate(text_batch(3))
    if how == "state dict":
        model.load_state_dict(source.state_dict())
    elif how == "edit":
        with model.edit_parameters() as values:
            for value in values.values():
                value.mul_(1.5)
    elif how == "in place":
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(1.5)
    else:
        model.load_checkpoint(tmp_path)
    for step in range(3):
        assert model.step(text_batch(step)).loss == source.step(text_batch(step)).loss
