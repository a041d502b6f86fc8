"""Inputs that broke systems of this kind: compilers, instruction sets, memory, threads, processes and signals."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import warnings

import families
import pytest
import torch
from case_models import LLAMA, WithLoss, adversarial, stream, toy, toy_batch
from families import text_batch
from torch import nn

import megatrain

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


# 20, saving without a second copy: test_memory.py


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
