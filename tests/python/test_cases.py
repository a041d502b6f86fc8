"""Inputs that broke systems of this kind. Host backend, delays and poison on."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import textwrap
import warnings
from typing import Any

import families
import numpy as np
import pytest
import torch
import transformers
from families import FAMILIES, llama, text_batch
from resident import Resident, assert_close, trainer_groups
from torch import nn

import megatrain

LLAMA = FAMILIES[0]


def adversarial(**changes: Any) -> megatrain.HostBackend:
    return megatrain.HostBackend(**{"max_delay_us": 300, "seed": 11, "poison": True, **changes})


def stream(module: nn.Module, **changes: Any) -> megatrain.StreamedModel:
    settings: dict[str, Any] = dict(
        optimizer=megatrain.AdamW(lr=1e-4, weight_decay=0.1),
        max_grad_norm=1.0,
        dtype=torch.float32,
        device=adversarial(),
        keep_gradients=True,
    )
    return megatrain.StreamedModel(module, **{**settings, **changes})


def reference(module: nn.Module, **changes: Any) -> Resident:
    return Resident(module, **{**dict(max_grad_norm=1.0, lr=1e-4, weight_decay=0.1), **changes})


def assert_same_parameters(model: megatrain.StreamedModel, resident: Resident, tolerance: float = 1e-5) -> None:
    state = model.state_dict()
    for name, parameter in resident.module.named_parameters():
        assert_close(state[name], parameter, tolerance, name)


class Toy(nn.Module):
    """A stack of blocks with an unused layer outside and a parameter in each block that may be unused."""

    def __init__(self, blocks: int = 4, width: int = 16, skip_middle: bool = False) -> None:
        super().__init__()
        self.inlet = nn.Linear(width, width)
        self.layers = nn.ModuleList(ToyBlock(width, skip_middle) for _ in range(blocks))
        self.unused = nn.Linear(width, width)
        self.outlet = nn.Linear(width, 1)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> dict[str, torch.Tensor]:
        x = self.inlet(x)
        for layer in self.layers:
            x = layer(x)
        return {"loss": nn.functional.mse_loss(self.outlet(x), y)}


class ToyBlock(nn.Module):
    def __init__(self, width: int, skip_middle: bool) -> None:
        super().__init__()
        self.first = nn.Linear(width, width)
        self.middle = nn.Linear(width, width)
        self.last = nn.Linear(width, width)
        self.skip_middle = skip_middle

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = torch.tanh(self.first(x))
        if not self.skip_middle:
            y = torch.tanh(self.middle(y))
        return x + self.last(y)


def toy_batch(seed: int, rows: int = 6, width: int = 16) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return dict(x=torch.randn(rows, width, generator=generator), y=torch.randn(rows, 1, generator=generator))


class WithLoss(nn.Module):
    """Gives a dict output the attribute that the reference reads."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, **batch: torch.Tensor) -> Any:
        output = self.inner(**batch)
        return type("Output", (), {"loss": output["loss"]})()


def toy(**changes: Any) -> WithLoss:
    torch.manual_seed(3)
    return WithLoss(Toy(**changes))


# 1: nothing is built at run time


def test_runs_without_a_compiler() -> None:
    script = textwrap.dedent(
        """
        import torch, megatrain
        from torch import nn
        class M(nn.Module):
            def __init__(self):
                super().__init__()
                self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))
            def forward(self, x):
                for layer in self.layers:
                    x = layer(x)
                return x.square().mean()
        model = megatrain.StreamedModel(M(), device="cpu", dtype=torch.float32)
        print(model.step({"x": torch.ones(2, 4)}).loss)
        """
    )
    environment = {**os.environ, "PATH": "/nonexistent", "CC": "/nonexistent", "CXX": "/nonexistent"}
    done = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert float(done.stdout) > 0


def test_failed_constructor_raises_once() -> None:
    with pytest.raises(ValueError, match="slots is 0"):
        stream(families.build(LLAMA), slots=0)
    with pytest.raises(ValueError, match=r"dtype is torch\.float16"):
        stream(families.build(LLAMA), dtype=torch.float16)


# 2: instruction sets


def test_every_instruction_set_gives_the_same_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    results = []
    for isa in megatrain._native.isa_names():
        monkeypatch.setenv("MEGATRAIN_ISA", isa)
        model = stream(families.build(LLAMA), dtype=torch.bfloat16)
        assert model._parts.tiles.store.isa == isa
        for step in range(5):
            model.step(text_batch(step))
        results.append(model.state_dict())
    assert len(results) >= 1
    for other in results[1:]:
        for name, values in results[0].items():
            assert torch.equal(values, other[name]), name


def test_unknown_instruction_set_lists_the_names(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MEGATRAIN_ISA", "sse9")
    with pytest.raises(ValueError, match=r"sse9.*scalar.*avx2.*avx512"):
        stream(families.build(LLAMA))


# 5, 9, 31: pinning is capped


@pytest.mark.parametrize("staging_bytes", [64 << 10, 8 << 10])
def test_staging_ring_gives_the_same_losses(staging_bytes: int) -> None:
    plain = stream(families.build(LLAMA))
    with pytest.warns(UserWarning, match="could not be pinned"):
        capped = stream(
            families.build(LLAMA), device=adversarial(pin_limit=staging_bytes), staging_bytes=staging_bytes
        )
    assert max(unit.layout.nbytes for unit in capped._parts.units.units) > staging_bytes
    for step in range(4):
        batches = [text_batch(step), text_batch(step + 50)]
        assert capped.step(batches).loss == plain.step(batches).loss
    for name, values in plain.state_dict().items():
        assert torch.equal(values, capped.state_dict()[name]), name


# 6: memory is not rounded up


def test_resident_memory_is_what_the_tile_needs() -> None:
    script = textwrap.dedent(
        """
        import resource, os
        from megatrain import _native as n
        page = os.sysconf("SC_PAGE_SIZE")
        def resident():
            return int(open("/proc/self/statm").read().split()[1]) * page
        store = n.TileStore(n.HostBackend(), staging_bytes=1 << 20)
        before = resident()
        layout = n.TileLayout(n.TileFormat.bf16_split, [(int(1.1 * 2**30) // 14, True)])
        store.add(layout)
        print((resident() - before) / 2**30)
        """
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert 1.09 <= float(done.stdout) <= 1.15


# 8: limits


def test_plan_beyond_the_limit_is_refused_with_both_figures() -> None:
    with pytest.raises(MemoryError, match=r"(?s)host_memory") as refused:
        stream(families.build(LLAMA), host_memory="1MiB")
    assert "0.00 GiB" in str(refused.value) or "MiB" in str(refused.value) or str(1 << 20) in str(refused.value)


# 10, 12, 33: weights of micro-batches


def test_four_micro_batches_equal_one_batch() -> None:
    whole = text_batch(1, rows=8, length=12, left_padding=0)
    parts = [{k: v[i : i + 2] for k, v in whole.items()} for i in range(0, 8, 2)]
    one, four = stream(families.build(LLAMA)), stream(families.build(LLAMA))
    first, second = one.step(whole), four.step(parts)
    assert second.loss == pytest.approx(first.loss, rel=1e-6)
    assert second.grad_norm == pytest.approx(first.grad_norm, rel=1e-6)
    for (name, a), (_, b) in zip(one.named_parameters(), four.named_parameters(), strict=True):
        assert_close(b.grad, a.grad, 3e-6, name)


def test_micro_batches_weigh_by_their_targets() -> None:
    few, many = text_batch(1, rows=1, length=60, left_padding=0), text_batch(2, rows=9, length=60, left_padding=0)
    few["labels"][:, :-3] = -100
    few["labels"][:, -3:] = few["input_ids"][:, -3:]
    both = {k: torch.cat([few[k], many[k]]) for k in few}
    apart, together = stream(families.build(LLAMA)), stream(families.build(LLAMA))
    first, second = apart.step([few, many]), together.step(both)
    assert first.targets == second.targets > 400
    assert first.loss == pytest.approx(second.loss, rel=1e-6)
    for (name, a), (_, b) in zip(apart.named_parameters(), together.named_parameters(), strict=True):
        assert_close(a.grad, b.grad, 3e-6, name)


def test_no_targets_updates_nothing() -> None:
    model = stream(families.build(LLAMA))
    before = {name: values.clone() for name, values in model.state_dict().items()}
    batch = text_batch(1)
    batch["labels"] = torch.full_like(batch["labels"], -100)
    report = model.step([batch, batch])
    assert report.loss == 0.0 and report.skipped
    for name, values in model.state_dict().items():
        assert torch.equal(values, before[name]), name
    assert model.evaluate(batch).loss == 0.0
    mixed = model.step([batch, text_batch(2)])
    alone = stream(families.build(LLAMA)).step([text_batch(2)])
    assert mixed.loss == pytest.approx(alone.loss, rel=1e-6)


# 11, 34, 43: parameters without gradients


def test_unused_parameters_are_left_alone_and_named() -> None:
    module = toy(skip_middle=True)
    resident = reference(module)
    model = stream(module)
    before = model.state_dict()
    batches = [[toy_batch(10 * step), toy_batch(10 * step + 1)] for step in range(3)]
    with pytest.warns(UserWarning, match=r"no gradient: .*inner\.layers\.0\.middle\.bias"):
        for pair in batches:
            loss, norm, _ = resident.step(pair)
            report = model.step(pair)
            assert report.loss == pytest.approx(loss, rel=1e-6)
            assert report.grad_norm == pytest.approx(norm, rel=1e-6)
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


# 15: experts


class ListedExperts(nn.Module):
    """All rows go to the expert `chosen`."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.chosen = 0
        self.experts = nn.ModuleList(nn.Linear(width, width) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        chosen = torch.full((len(x),), self.chosen)
        y = torch.zeros_like(x)
        for index, expert in enumerate(self.experts):
            rows = chosen == index
            if rows.any():
                y[rows] = expert(x[rows])
        return x + y


class StackedExperts(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(3, width, width) / width**0.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + x @ self.weight[0]


@pytest.mark.parametrize("kind", [ListedExperts, StackedExperts])
def test_experts_without_tokens(kind: type[nn.Module]) -> None:
    torch.manual_seed(0)
    inner = Toy()
    inner.layers = nn.ModuleList(kind(16) for _ in range(3))
    module = WithLoss(inner)
    resident, model = reference(module), stream(module)
    before = model.state_dict()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for step in range(4):
            loss, _, _ = resident.step([toy_batch(step)])
            assert model.step([toy_batch(step)]).loss == pytest.approx(loss, rel=1e-6)
    assert_same_parameters(model, resident)
    if kind is ListedExperts:
        after = model.state_dict()
        idle = [name for name in before if ".experts.1." in name or ".experts.2." in name]
        assert len(idle) == 12
        for name in idle:
            assert torch.equal(before[name], after[name]), name
        states = model.optimizer.state_dict()["state"]
        assert len(states) == len([n for n, _ in model.named_parameters() if "unused" not in n and n not in idle])


@pytest.mark.parametrize("way", ["step", "backward"])
@pytest.mark.parametrize("resident_blocks", [0, 2])
def test_experts_that_get_tokens_now_and_then(way: str, resident_blocks: int) -> None:
    """Expert 1 in step 1 and again in step 4: in between its weights, moments and step count stand still, and the
    norm is that of the other gradients."""
    torch.manual_seed(0)
    inner = Toy()
    inner.layers = nn.ModuleList(ListedExperts(16) for _ in range(3))
    module = WithLoss(inner)
    resident = reference(module, max_grad_norm=0.1)
    model = stream(module, max_grad_norm=0.1, placement=megatrain.Placement.spread(3, resident=resident_blocks))
    faces = dict(model.named_parameters())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for step, chosen in enumerate([0, 1, 0, 0, 1, 2]):
            for owner in (inner, resident.module.inner):
                for layer in owner.layers:
                    layer.chosen = chosen
            batches = [toy_batch(2 * step), toy_batch(2 * step + 1)]
            loss, norm, _ = resident.step(batches)
            if way == "step":
                assert model.step(batches).loss == pytest.approx(loss, rel=1e-6)
            else:
                for batch in batches:
                    (model(**batch).loss / 2).backward()
                model.optimizer.step()
            assert model.last_grad_norm == pytest.approx(norm, rel=1e-5)
    assert_same_parameters(model, resident)
    counts = {0: 3.0, 1: 2.0, 2: 1.0}
    for name, parameter in resident.module.named_parameters():
        if ".experts." in name:
            ours, theirs = model.optimizer.state[faces[name]], resident.optimizer.state[parameter]
            assert float(ours["step"]) == float(theirs["step"]) == counts[int(name.split(".experts.")[1][0])]
            assert_close(ours["exp_avg"], theirs["exp_avg"], 2e-5, f"exp_avg of {name}")


# 17: resume


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_resume_to_the_last_bit(dtype: torch.dtype) -> None:
    straight = stream(families.build(LLAMA, dropout=True), dtype=dtype)
    losses = [straight.step(text_batch(step)).loss for step in range(10)]
    first = stream(families.build(LLAMA, dropout=True), dtype=dtype)
    again = [first.step(text_batch(step)).loss for step in range(5)]
    weights = {name: values.clone() for name, values in first.state_dict().items()}
    import copy

    moments = copy.deepcopy(first.optimizer.state_dict())
    torch.manual_seed(77)
    second = stream(LLAMA.make(attention_dropout=0.1), dtype=dtype)
    second.load_state_dict(weights)
    second.optimizer.load_state_dict(moments)
    second.steps = first.steps
    again += [second.step(text_batch(step)).loss for step in range(5, 10)]
    assert again == losses
    for name, values in straight.state_dict().items():
        assert torch.equal(values, second.state_dict()[name]), name


def test_optimizer_state_goes_to_torch_and_back() -> None:
    module = families.build(LLAMA)
    resident, model = reference(module, max_grad_norm=None), stream(module, max_grad_norm=None)
    for step in range(3):
        resident.step([text_batch(step)])
        model.step([text_batch(step)])
    order = [n for n, _ in model.named_parameters()]
    assert order == [n for n, _ in resident.module.named_parameters()]
    fresh = torch.optim.AdamW(trainer_groups(resident.module), lr=1e-4, weight_decay=0.1)
    fresh.load_state_dict(model.optimizer.state_dict())
    for parameter in resident.module.parameters():
        ours, theirs = fresh.state[parameter], resident.optimizer.state[parameter]
        assert float(ours["step"]) == float(theirs["step"]) == 3
        assert_close(ours["exp_avg"], theirs["exp_avg"], 1e-5, "exp_avg")
        assert_close(ours["exp_avg_sq"], theirs["exp_avg_sq"], 1e-5, "exp_avg_sq")
    model.optimizer.load_state_dict(resident.optimizer.state_dict())
    for step in range(3, 6):
        resident.step([text_batch(step)])
        model.step([text_batch(step)])
    assert_same_parameters(model, resident)


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


# 20: saving


def test_saving_needs_no_second_copy() -> None:
    script = textwrap.dedent(
        """
        import torch, megatrain, tempfile
        from torch import nn
        class M(nn.Module):
            def __init__(self):
                super().__init__()
                self.layers = nn.ModuleList(nn.Linear(2048, 2048) for _ in range(12))
            def forward(self, x):
                for layer in self.layers:
                    x = layer(x)
                return x.square().mean()
        def high_water():
            return next(int(l.split()[1]) for l in open("/proc/self/status") if l.startswith("VmHWM")) / 1024
        model = megatrain.StreamedModel(M(), device="cpu", dtype=torch.float32)
        weights = sum(p.numel() for p in model.parameters()) * 4 / 2**20
        with tempfile.TemporaryDirectory() as folder:
            model.save_pretrained(folder + "/first")  # imports
            open("/proc/self/clear_refs", "w").write("5")
            before = high_water()
            model.save_pretrained(folder + "/second")
            print(weights, high_water() - before)
        """
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    weights, growth = map(float, done.stdout.split())
    assert weights > 190 and growth < 40


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


# 22, 26: the optimizer's face


@pytest.mark.parametrize(
    "make",
    [
        lambda o: torch.optim.lr_scheduler.CosineAnnealingLR(o, T_max=10),
        lambda o: torch.optim.lr_scheduler.LambdaLR(o, lambda step: 1 / (1 + step)),
        lambda o: torch.optim.lr_scheduler.OneCycleLR(o, max_lr=[1e-4, 2e-4], total_steps=10),
        lambda o: transformers.get_cosine_schedule_with_warmup(o, num_warmup_steps=2, num_training_steps=8),
    ],
)
def test_schedulers(make: Any) -> None:
    module = families.build(LLAMA)
    for name, parameter in module.named_parameters():
        if name.startswith("model.layers.0."):
            parameter.requires_grad_(False)
    resident, model = reference(module), stream(module)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        theirs, ours = make(resident.optimizer), make(model.optimizer)
        for step in range(8):
            resident.step([text_batch(step)])
            model.step([text_batch(step)])
            theirs.step()
            ours.step()
            assert len(model.optimizer.param_groups) == 2
            for mine, torchs in zip(model.optimizer.param_groups, resident.optimizer.param_groups, strict=True):
                assert (mine["lr"], mine["betas"]) == (torchs["lr"], torchs["betas"])
    assert_same_parameters(model, resident)


def test_schedules_go_on_over_skipped_steps() -> None:
    """A step that is skipped takes its place in the schedule, and no place in the moments' bias correction."""
    module = toy()
    resident, model = reference(module, lr=1e-2), stream(module, optimizer=megatrain.AdamW(lr=1e-2, weight_decay=0.1))
    theirs = transformers.get_cosine_schedule_with_warmup(resident.optimizer, 2, 8)
    ours = transformers.get_cosine_schedule_with_warmup(model.optimizer, 2, 8)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for step in range(8):
            batch = toy_batch(step)
            if step in (2, 5):
                assert model.step(dict(batch, y=torch.full_like(batch["y"], float("nan")))).skipped
            else:
                resident.step([batch])
                model.step(batch)
            theirs.step()
            ours.step()
            assert ours.get_last_lr() == theirs.get_last_lr()
    assert_same_parameters(model, resident)
    assert model.steps == 8 and model.skipped_steps == 2


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
def test_biases_and_norms_do_not_decay(family: Any) -> None:
    module = families.build(family)
    expected = [
        {name for name, p in module.named_parameters() if any(p is member for member in group["params"])}
        for group in trainer_groups(module)
    ]
    assert len(expected) == 2
    model = stream(module, self_check=False)
    names = {id(face): name for name, face in model.named_parameters()}
    groups = model.optimizer.param_groups
    assert [{names[id(face)] for face in group["params"]} for group in groups] == expected
    assert [group["weight_decay"] for group in groups] == [0.1, 0.0]
    everything = megatrain.AdamW(weight_decay=0.1, decay_biases_and_norms=True)
    (group,) = stream(families.build(family), optimizer=everything, self_check=False).optimizer.param_groups
    assert len(group["params"]) == len(names)


def test_groups_are_edited_as_torchs_are() -> None:
    """Each knob of each group, between steps, also as torch's own code for warm-up does it."""
    module = families.build(LLAMA)
    resident, model = reference(module), stream(module)
    for step in range(6):
        for optimizer in (resident.optimizer, model.optimizer):
            for index, group in enumerate(optimizer.param_groups):
                group["lr"] = 2e-5 * (1 + step + index)
                group["betas"] = (0.8 + 0.02 * step, 0.9 + 0.01 * index)
                group["eps"] = 1e-6 * (1 + index)
                group["weight_decay"] = 0.1 * step
        resident.step([text_batch(step)])
        model.step([text_batch(step)])
    assert_same_parameters(model, resident)


def test_parameter_groups() -> None:
    module = families.build(LLAMA)

    def groups(owner: nn.Module) -> list[dict[str, Any]]:
        decayed = [p for p in owner.parameters() if p.dim() > 1]
        kept = [p for p in owner.parameters() if p.dim() <= 1]
        return [
            dict(params=decayed, weight_decay=0.2),
            dict(params=kept, weight_decay=0.0, lr=5e-4, betas=(0.8, 0.95), eps=1e-6),
        ]

    resident = reference(module)
    resident.optimizer = torch.optim.AdamW(groups(resident.module), lr=1e-4)
    model = stream(module, optimizer=megatrain.AdamW(lr=1e-4, params=groups(module)))
    for step in range(5):
        resident.step([text_batch(step)])
        model.step([text_batch(step)])
    assert_same_parameters(model, resident)
    with pytest.raises(ValueError, match=r"trainable parameters are in no group, the first model\.layers\.0"):
        fresh = families.build(LLAMA)
        stream(fresh, optimizer=megatrain.AdamW(params=[dict(params=["model.embed_tokens.weight"])]))


# 23, 32: order and re-entrancy


def test_fifty_steps_under_random_delays_equal_the_quiet_run() -> None:
    quiet = stream(families.build(LLAMA), device=megatrain.HostBackend())
    noisy = [
        stream(families.build(LLAMA), device=adversarial(max_delay_us=900, seed=seed), slots=slots, threads=threads)
        for seed, slots, threads in ((1, 2, 1), (2, 3, 2), (3, 4, 5))
    ]
    for step in range(50):
        batches = [text_batch(step), text_batch(step + 500, rows=1)]
        expected = quiet.step(batches).loss
        for model in noisy:
            assert model.step(batches).loss == expected
    for name, values in quiet.state_dict().items():
        for model in noisy:
            assert torch.equal(values, model.state_dict()[name]), name


def test_evaluation_and_generation_between_steps_change_nothing() -> None:
    plain, busy = stream(families.build(LLAMA, dropout=True)), stream(families.build(LLAMA, dropout=True))
    for step in range(4):
        assert plain.step(text_batch(step)).loss == busy.step(text_batch(step)).loss
        busy.evaluate([text_batch(step), text_batch(99)])
        with torch.no_grad():
            busy.eval()
            busy(input_ids=text_batch(5)["input_ids"]).logits.sum()
            busy.train()
    for name, values in plain.state_dict().items():
        assert torch.equal(values, busy.state_dict()[name]), name


def test_evaluation_between_forward_and_backward_changes_nothing() -> None:
    module = families.build(LLAMA)
    resident, model = reference(module), stream(module)
    for step in range(3):
        _, norm, _ = resident.step([text_batch(step)])
        loss = model(**text_batch(step)).loss
        model.evaluate(text_batch(99))
        loss.backward()
        with torch.no_grad():
            model(input_ids=text_batch(5)["input_ids"])
        model.optimizer.step()
        assert model.last_grad_norm == pytest.approx(norm, rel=1e-5)
    assert_same_parameters(model, resident)


# 28, 29: clipping and non-finite gradients


@pytest.mark.parametrize("clip", [None, 1.0])
def test_infinite_gradient_skips_the_step(clip: float | None) -> None:
    module = toy()
    resident, model = reference(module, max_grad_norm=clip), stream(module, max_grad_norm=clip)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for step in range(6):
            batch = toy_batch(step)
            if step == 3:
                bad = dict(batch, y=torch.full_like(batch["y"], float("inf")))
                before = {name: values.clone() for name, values in model.state_dict().items()}
                moments = model.optimizer.state_dict()["state"][0]["exp_avg"].clone()
                report = model.step(bad)
                assert report.skipped and model.skipped_steps == 1
                for name, values in model.state_dict().items():
                    assert torch.equal(values, before[name]), name
                assert torch.equal(moments, model.optimizer.state_dict()["state"][0]["exp_avg"])
                assert float(model.optimizer.state_dict()["state"][0]["step"]) == 3
            loss, _, _ = resident.step([batch])
            report = model.step(batch)
            assert not report.skipped
            assert report.loss == pytest.approx(loss, rel=1e-5)
    assert_same_parameters(model, resident)


def test_clipping_reaches_the_moments() -> None:
    module = families.build(LLAMA)
    resident, model = reference(module, max_grad_norm=1e-3), stream(module, max_grad_norm=1e-3)
    for step in range(6):
        batches = [text_batch(step, rows=1 + step)]
        resident.step(batches)
        model.step(batches)
    faces = dict(model.named_parameters())
    for name, parameter in resident.module.named_parameters():
        ours, theirs = model.optimizer.state[faces[name]], resident.optimizer.state[parameter]
        model.synchronize()
        assert_close(ours["exp_avg"], theirs["exp_avg"], 2e-5, f"exp_avg of {name}")
        assert_close(ours["exp_avg_sq"], theirs["exp_avg_sq"], 2e-5, f"exp_avg_sq of {name}")


class Narrow(nn.Module):
    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.down = nn.Linear(width, inner, bias=False)
        self.up = nn.Linear(inner, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.up(torch.tanh(self.down(x)))


def test_norm_of_blocks_of_unlike_sizes_at_like_offsets() -> None:
    """Sums of one block's gradients are made in the memory of another's, whose parameters ended elsewhere."""
    torch.manual_seed(2)
    inner = Toy()
    inner.layers = nn.ModuleList(Narrow(16, width) for width in (3, 4))
    module = WithLoss(inner)
    resident, model = reference(module), stream(module)
    units = [unit for unit in model._parts.units.units if unit.is_block]
    assert len({tuple(u.layout.element_offset(p.index) for p in u.parameters) for u in units}) == 1
    for step in range(2):
        batches = [toy_batch(10 * step + index) for index in range(3)]
        _, norm, _ = resident.step(batches)
        assert model.step(batches).grad_norm == pytest.approx(norm, rel=1e-5)


def test_infinite_gradient_skips_the_update_of_a_plain_backward() -> None:
    """Also where other backwards of the same update were finite."""
    module = toy()
    resident, model = reference(module), stream(module)
    for step in range(4):
        batch = toy_batch(step)
        if step == 2:
            before = model.state_dict()
            model(**batch).loss.backward()
            model(**dict(batch, y=torch.full_like(batch["y"], float("inf")))).loss.backward()
            model.optimizer.step()
            assert model.skipped_steps == 1
            assert all(torch.equal(before[name], values) for name, values in model.state_dict().items())
        resident.step([batch])
        model(**batch).loss.backward()
        model.optimizer.step()
    assert_same_parameters(model, resident)


# 30: starved threads


def test_updates_keep_their_threads() -> None:
    assert os.environ["OMP_NUM_THREADS"] == "1"
    model = stream(families.build(LLAMA), threads=3)
    assert model.update_bandwidth() == 0.0
    model.step(text_batch(1))
    assert model._parts.tiles.store.threads == 3
    assert model.update_bandwidth() > 0.0


# 35: interrupts


class Interrupting(nn.Module):
    """Passes its input through; its backward raises KeyboardInterrupt when armed."""

    armed = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if torch.is_grad_enabled() and x.requires_grad:
            x.register_hook(self._hook)
        return x

    @staticmethod
    def _hook(gradient: torch.Tensor) -> torch.Tensor:
        if Interrupting.armed:
            Interrupting.armed = False
            raise KeyboardInterrupt
        return gradient


@pytest.mark.parametrize("where", ["backward", "forward"])
def test_interrupt_in_a_step_leaves_the_state(where: str) -> None:
    def module() -> WithLoss:
        made = toy()
        made.inner.layers[1].last = nn.Sequential(made.inner.layers[1].last, Interrupting())
        return made

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        plain, hit = stream(module()), stream(module())
        assert plain.step(toy_batch(0)).loss == hit.step(toy_batch(0)).loss
        if where == "backward":
            Interrupting.armed = True
            with pytest.raises(KeyboardInterrupt):
                hit.step([toy_batch(1), toy_batch(2)])
        else:
            handle = hit.module.inner.outlet.register_forward_pre_hook(lambda *_: (_ for _ in ()).throw(KeyError("x")))
            with pytest.raises(KeyError):
                hit.step([toy_batch(1), toy_batch(2)])
            handle.remove()
        for step in range(3, 6):
            assert plain.step([toy_batch(step)]).loss == hit.step([toy_batch(step)]).loss
    for name, values in plain.state_dict().items():
        assert torch.equal(values, hit.state_dict()[name]), name


def test_sigterm_ends_the_process() -> None:
    script = textwrap.dedent(
        """
        import torch, megatrain, sys
        from torch import nn
        class M(nn.Module):
            def __init__(self):
                super().__init__()
                self.layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(4))
            def forward(self, x):
                for layer in self.layers:
                    x = layer(x)
                return x.square().mean()
        model = megatrain.StreamedModel(M(), device=megatrain.HostBackend(max_delay_us=500), dtype=torch.float32)
        print("ready", flush=True)
        while True:
            model.step({"x": torch.ones(2, 64)})
        """
    )
    process = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None and process.stdout.readline() == "ready\n"
    process.send_signal(signal.SIGTERM)
    assert process.wait(timeout=30) == -signal.SIGTERM


# 37, 41: small numbers


def test_updates_too_small_for_bf16_are_kept() -> None:
    module = families.build(LLAMA)
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            if name.endswith("norm.weight"):
                parameter.fill_(1.0)
    start = {n: p.detach().clone() for n, p in module.named_parameters()}
    model = stream(module, dtype=torch.bfloat16, optimizer=megatrain.AdamW(lr=1e-5, weight_decay=0.0))
    fed = {n: nn.Parameter(v.clone()) for n, v in start.items()}
    adamw = torch.optim.AdamW(fed.values(), lr=1e-5, weight_decay=0.0)
    for step in range(200):
        model.step(text_batch(step % 7))
        model.synchronize()
        for name, parameter in model.named_parameters():
            fed[name].grad = parameter.grad.float()
        torch.nn.utils.clip_grad_norm_(fed.values(), 1.0)
        adamw.step()
    state = model.state_dict()
    for name, parameter in fed.items():
        assert_close(state[name], parameter, 1e-6, name)
        if name.endswith("norm.weight"):
            # A step of 1e-5 never moves a bf16 weight of 1.0, whose neighbours are 4e-3 and 8e-3 away.
            assert float((state[name] != 1.0).float().mean()) > 0.9, name


# 42: forks


def test_a_forked_worker_does_not_hold_the_tiles() -> None:
    script = textwrap.dedent(
        """
        import os
        from megatrain import _native as n
        store = n.TileStore(n.HostBackend(), staging_bytes=1 << 20)
        store.add(n.TileLayout(n.TileFormat.bf16_split, [((256 << 20) // 14, True)]))
        def total():
            return int(open("/proc/self/statm").read().split()[0]) * os.sysconf("SC_PAGE_SIZE")
        parent = total()
        reader, writer = os.pipe()
        if os.fork() == 0:
            os.write(writer, str(total()).encode())
            os._exit(0)
        os.wait()
        print((parent - int(os.read(reader, 100))) / 2**20)
        """
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert float(done.stdout) >= 250


# 44: masks


def test_two_packed_documents_in_one_row() -> None:
    module = families.build(LLAMA)
    resident, model = reference(module), stream(module)
    batch = text_batch(1, rows=1, length=12, left_padding=0)
    del batch["attention_mask"]
    batch["position_ids"] = torch.cat([torch.arange(5), torch.arange(7)])[None]
    loss, _, gradients = resident.step([batch])
    plain = {k: v for k, v in batch.items() if k != "position_ids"}
    assert model.evaluate(plain).loss != pytest.approx(loss, rel=1e-4)
    assert model.step(batch).loss == pytest.approx(loss, rel=1e-6)
    for name, parameter in model.named_parameters():
        assert_close(parameter.grad, gradients[name], 3e-6, name)


# 46: autocast


@pytest.mark.parametrize("way", ["step", "backward"])
def test_inside_autocast(way: str) -> None:
    def run(model: megatrain.StreamedModel) -> float:
        if way == "step":
            return model.step(text_batch(1)).loss
        loss = model(**text_batch(1)).loss
        loss.backward()
        model.optimizer.step()
        return float(loss.detach())

    bare, wrapped = (stream(families.build(LLAMA), dtype=torch.bfloat16) for _ in range(2))
    expected = run(bare)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert run(wrapped) == expected
    for name, values in bare.state_dict().items():
        assert torch.equal(values, wrapped.state_dict()[name]), name
    with torch.autocast("cpu", dtype=torch.bfloat16), pytest.raises(ValueError, match="fp32 weights under"):
        run(stream(families.build(LLAMA)))


# 47: stale graphs


def test_backward_after_an_update_is_refused() -> None:
    model = stream(families.build(LLAMA))
    old = model(**text_batch(1)).loss
    model.step(text_batch(2))
    # Autograd notices the head's weights before the blocks are asked.
    with pytest.raises(RuntimeError, match=r"modified by an inplace operation"):
        old.backward()
    model.optimizer.zero_grad()
    fresh = stream(families.build(LLAMA))
    fresh.step(text_batch(2))
    assert model.step(text_batch(3)).loss == fresh.step(text_batch(3)).loss


def test_backward_through_blocks_after_an_update_is_refused() -> None:
    """Where nothing outside the blocks is trained, autograd has nothing to notice."""
    module = families.build(LLAMA)
    for name, parameter in module.named_parameters():
        parameter.requires_grad_(".layers." in name)
    model = stream(module)
    old = model(**text_batch(1)).loss
    model.step(text_batch(2))
    with pytest.raises(megatrain.StaleGraphError, match=r"model\.layers\.3"):
        old.backward()


def test_step_with_a_pending_backward_is_refused() -> None:
    model = stream(families.build(LLAMA))
    model(**text_batch(1)).loss.backward()
    with pytest.raises(RuntimeError, match=r"zero_grad"):
        model.step(text_batch(2))
    model.optimizer.zero_grad()
    assert model.step(text_batch(2)).loss == stream(families.build(LLAMA)).step(text_batch(2)).loss


def test_create_graph_is_refused() -> None:
    model = stream(families.build(LLAMA))
    with pytest.raises(RuntimeError, match="create_graph"):  # the loss in chunks
        model(**text_batch(1)).loss.backward(create_graph=True)
    with pytest.raises(megatrain.UnsupportedModelError, match=r"layers\.3: create_graph"):
        stream(Toy())(**toy_batch(1))["loss"].backward(create_graph=True)


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
    for name in biases:
        assert torch.equal(state[name], torch.tensor([0.3, -0.2, 0.1, 0.4]))


# refusals


def test_nothing_to_stream_is_refused() -> None:
    with pytest.raises(megatrain.UnsupportedModelError, match="ModuleList"):
        stream(nn.Linear(3, 3))


def test_foreign_dtype_is_refused_by_name() -> None:
    module = families.build(LLAMA)
    module.model.norm.weight.data = module.model.norm.weight.data.double()
    with pytest.raises(ValueError, match=r"model\.norm\.weight is torch\.float64"):
        stream(module)


def test_non_finite_weights_are_refused_by_name() -> None:
    module = families.build(LLAMA)
    with torch.no_grad():
        module.model.layers[2].mlp.up_proj.weight[0, 0] = float("nan")
    with pytest.raises(ValueError, match=r"model\.layers\.2\.mlp\.up_proj\.weight"):
        stream(module)


def test_meta_module_without_values_is_refused() -> None:
    with torch.device("meta"):
        module = llama()
    model = stream(module)
    with pytest.raises(RuntimeError, match=r"meta.*load_state_dict"):
        model.step(text_batch(1))


class CountingBlock(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls.add_(1)
        return x + self.linear(x)


def test_buffers_written_in_forward_are_refused_by_name() -> None:
    inner = Toy()
    inner.layers = nn.ModuleList(CountingBlock(16) for _ in range(2))
    with pytest.raises(megatrain.UnsupportedModelError, match=r"layers\.0 writes its buffer calls"):
        stream(inner).step(toy_batch(1))


class Skipping(ToyBlock):
    """Stochastic depth by a generator that is not torch's."""

    def __init__(self, draw: Any) -> None:
        super().__init__(16, False)
        self.draw = draw

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) if self.draw() < 0.9 else x


@pytest.mark.parametrize("draw", [random.random, np.random.rand, np.random.randn])
def test_blocks_that_draw_from_other_generators_are_refused_by_name(draw: Any) -> None:
    inner = Toy()
    inner.layers = nn.ModuleList(Skipping(draw) for _ in range(2))
    with pytest.raises(megatrain.UnsupportedModelError, match=r"layers\.0 draws from Python's or numpy's random"):
        stream(inner).step(toy_batch(1))


@pytest.mark.parametrize("way", ["step", "backward"])
def test_caches_in_training_are_refused_by_name(way: str) -> None:
    model = stream(families.build(LLAMA))
    with pytest.raises(megatrain.UnsupportedModelError, match=r"layers\.0 was given a DynamicCache.*use_cache=False"):
        if way == "step":
            model.step(dict(text_batch(1), use_cache=True))
        else:
            model(**text_batch(1), use_cache=True).loss.backward()


def test_recurrent_modules_are_refused_by_name() -> None:
    inner = Toy()
    inner.recurrent = nn.LSTM(4, 4)
    with pytest.raises(megatrain.UnsupportedModelError, match=r"recurrent \(LSTM\).*_flat_weights"):
        stream(inner)


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


# the trace


def test_updates_overlap_the_next_step(tmp_path: Any) -> None:
    module = families.build(LLAMA, num_hidden_layers=8, hidden_size=256, intermediate_size=1024)
    # One thread and the slowest kernel: the updates outlast what Python does before the next step's first block.
    model = stream(module, device=megatrain.HostBackend(), threads=1, isa="scalar")
    for step in range(6):
        model.step([text_batch(step, rows=8, length=48)] * 2)
    model.synchronize()
    spans = model._parts.engine.trace()
    updates = [span for span in spans if span.kind == "update"]
    compute = [span for span in spans if span.kind == "compute"]
    assert updates and compute
    overlapping = [
        (u, c)
        for u in updates
        for c in compute
        if c.step == u.step + 1 and u.begin_ns < c.end_ns and c.begin_ns < u.end_ns
    ]
    assert overlapping, "no update of a step runs inside a compute span of the next"
    path = tmp_path / "trace.json"
    model.export_trace(path)
    import json

    events = json.loads(path.read_text())["traceEvents"]
    assert {e["cat"] for e in events if e["ph"] == "X"} >= {"copy_up", "copy_down", "compute", "update"}
    assert np.isfinite([e["ts"] for e in events if e["ph"] == "X"]).all()
