"""Checkpoints: exact resume, other placements, refusals, damage, a full disk, what is kept."""

from __future__ import annotations

import copy
import errno
import json
import os
import random
import resource
import shutil
import threading
import time
import warnings
from pathlib import Path
from typing import Any

import families
import numpy as np
import pytest
import torch
from families import FAMILIES, text_batch
from kill_while_saving import kill_many
from test_precision import MODES, assert_same_bits, every_mode, snapshot, streamed

import megatrain
from megatrain import CheckpointError, Placement
from megatrain.checkpoints import directory as on_disk
from megatrain.checkpoints import model_state
from megatrain.checkpoints.tile_file import sections

LLAMA = FAMILIES[0]
INT8 = MODES[2]


def train(model: megatrain.StreamedModel, first: int, steps: int) -> list[float]:
    """Two micro-batches a step, dropout on."""
    return [model.step([text_batch(s), text_batch(s + 50)]).loss for s in range(first, first + steps)]


def small(mode: dict[str, Any] | None = None, module: Any = None, **changes: Any) -> megatrain.StreamedModel:
    return streamed(mode or MODES[0], module or families.build(LLAMA, dropout=True), **changes)


def bits(model: megatrain.StreamedModel) -> dict[str, bytes]:
    """Of every section that outlives a step."""
    model._parts.drain()
    store = model._parts.tiles.store
    return {f"{tile}.{n}": bytes(view) for tile in range(len(store)) for n, view in sections(store, tile).items()}


# resume


@every_mode
def test_a_run_goes_on_to_the_bit(mode: dict[str, Any], tmp_path: Path) -> None:
    """With dropout, a schedule, and a parameter that has had fewer updates than others."""
    model = small(mode)
    schedule = torch.optim.lr_scheduler.ExponentialLR(model.optimizer, 0.9)
    for step in range(3):
        dict(model.named_parameters())["model.norm.weight"].requires_grad_(step > 0)
        train(model, step, 1)
        schedule.step()
    path = model.save_checkpoint(tmp_path, extra={"schedule": schedule.state_dict(), "loss": 0.1})
    assert path == tmp_path / "checkpoint-3"
    expected = train(model, 3, 1)
    schedule.step()
    expected += train(model, 4, 2)

    resumed = small(mode, families.build(LLAMA, dropout=True, seed=99))
    schedule = torch.optim.lr_scheduler.ExponentialLR(resumed.optimizer, 0.9)
    train(resumed, 70, 2)
    extra = resumed.load_checkpoint(tmp_path)
    assert extra["loss"] == 0.1
    schedule.load_state_dict(extra["schedule"])
    assert (resumed.steps, resumed.optimizer.param_groups[0]["lr"]) == (3, pytest.approx(1e-3 * 0.9**3))
    found = train(resumed, 3, 1)
    schedule.step()
    assert found + train(resumed, 4, 2) == expected
    assert_same_bits(snapshot(resumed), snapshot(model))
    assert bits(resumed) == bits(model)
    steps = {name: resumed.optimizer.state[p]["step"].item() for name, p in resumed.named_parameters()}
    assert (steps["model.norm.weight"], steps["lm_head.weight"]) == (5, 6)


def test_checkpoints_of_before_weights_could_stay_fp32(tmp_path: Path) -> None:
    model = small()
    train(model, 0, 1)
    state = model_state.capture(model, None)
    for tile in state["model"]["tiles"]:
        for entry in tile["parameters"]:
            del entry["stays_fp32"]
    model_state.require_fit(state, model, tmp_path)
    state["model"]["tiles"][1]["parameters"][0]["stays_fp32"] = True
    with pytest.raises(CheckpointError, match=r"stays_fp32 of .* is True in the checkpoint and False"):
        model_state.require_fit(state, model, tmp_path)


def test_both_halves_and_the_moments_codes_are_in_the_files(tmp_path: Path) -> None:
    from safetensors.torch import load_file

    model = small(INT8)
    train(model, 0, 2)
    path = model.save_checkpoint(tmp_path)
    unit = model._parts.units.block_units["model.layers.1"]
    tensors = load_file(path / f"tile-{unit.tile:05d}.safetensors")
    assert {name: tensor.dtype for name, tensor in tensors.items()} == {
        "weights": torch.bfloat16,
        "master_low": torch.int16,
        "exp_avg": torch.uint8,
        "exp_avg_sq": torch.uint8,
        "exp_avg_exponents": torch.uint8,
        "exp_avg_sq_exponents": torch.uint8,
    }
    weights = model._parts.tiles.view(unit.parameters[0], megatrain._native.Section.weights)
    offset = unit.layout.element_offset(0)
    assert torch.equal(tensors["weights"][offset:][: weights.numel()], weights.reshape(-1))


PLACEMENTS = {
    "streamed": Placement(),
    "resident": Placement.spread(4, resident=2, everything=1, outside="all"),
    "micro-batches": Placement.spread(4, order="micro-batch-major", resident=1, selected=2, kept_on="host"),
}


@pytest.mark.parametrize("mode", [MODES[0], INT8, MODES[6]], ids=["bf16", "int8", "fp32"])
@pytest.mark.parametrize(("before", "after"), [("streamed", "resident"), ("resident", "micro-batches")])
def test_another_placement_goes_on_to_the_bit(mode: dict[str, Any], before: str, after: str, tmp_path: Path) -> None:
    model = small(mode, placement=PLACEMENTS[before])
    train(model, 0, 2)
    model.save_checkpoint(tmp_path)
    expected = train(model, 2, 2)
    resumed = small(mode, placement=PLACEMENTS[after])
    train(resumed, 60, 2)  # what is resident is ahead of the host's tiles
    resumed.load_checkpoint(tmp_path)
    assert train(resumed, 2, 2) == expected
    assert bits(resumed) == bits(model)


def test_random_states_come_back(tmp_path: Path) -> None:
    model = small()
    for generator in (torch.manual_seed, np.random.seed, random.seed):
        generator(5)
    np.random.standard_normal()  # leaves the second of a pair behind
    random.gauss(0, 1)
    model.save_checkpoint(tmp_path)

    def draw() -> list[float]:
        return [float(torch.rand(())), np.random.standard_normal(), random.gauss(0, 1), random.random()]

    expected = draw()
    draw()
    model.load_checkpoint(tmp_path)
    assert draw() == expected


def test_dropout_of_plain_pytorch_goes_on(tmp_path: Path) -> None:
    """`loss.backward()` draws from the global generator."""

    def steps(model: megatrain.StreamedModel, first: int) -> list[float]:
        found = []
        for step in (first, first + 1):
            loss = model(**text_batch(step)).loss
            loss.backward()
            model.optimizer.step()
            found.append(float(loss.detach()))
        return found

    model = small()
    steps(model, 0)
    model.save_checkpoint(tmp_path)
    expected = steps(model, 2)
    resumed = small(module=families.build(LLAMA, dropout=True, seed=3))
    resumed.load_checkpoint(tmp_path)
    assert steps(resumed, 2) == expected
    assert bits(resumed) == bits(model)


def test_edits_before_a_save_or_a_load(tmp_path: Path) -> None:
    model = small()
    train(model, 0, 1)
    with torch.no_grad():
        next(iter(model.parameters())).mul_(2)
    model.save_checkpoint(tmp_path)
    expected = train(model, 1, 2)
    with torch.no_grad():
        next(iter(model.parameters())).mul_(3)  # is overwritten by the load, and its low half must stay
    model.load_checkpoint(tmp_path)
    assert train(model, 1, 2) == expected


def test_buffers_of_blocks_are_saved(tmp_path: Path) -> None:
    def build(seed: int) -> torch.nn.Module:
        module = families.build(LLAMA, seed=seed)
        for index, layer in enumerate(module.model.layers):
            layer.mlp.register_buffer("bias", torch.full((3,), float(seed + index)))
        module.register_buffer("count", torch.tensor(seed))
        return module

    model = small(module=build(5))
    model.save_checkpoint(tmp_path)
    resumed = small(module=build(9))
    resumed.load_checkpoint(tmp_path)
    state = resumed.state_dict()
    assert state["model.layers.2.mlp.bias"].tolist() == [7.0] * 3
    assert int(state["count"]) == 5


def test_a_module_without_weights_takes_them_from_a_checkpoint(tmp_path: Path) -> None:
    model = small()
    train(model, 0, 2)
    model.save_checkpoint(tmp_path)
    with torch.device("meta"):
        empty = LLAMA.make(attention_dropout=0.1)
    for name, buffer in families.build(LLAMA).named_buffers():
        owner, _, inner = name.rpartition(".")
        empty.get_submodule(owner)._buffers[inner] = buffer
    resumed = small(module=empty)
    with pytest.raises(RuntimeError, match="have no values yet"):
        resumed.save_checkpoint(tmp_path / "other")
    resumed.load_checkpoint(tmp_path)
    assert train(resumed, 2, 2) == train(model, 2, 2)


# beside the next steps


def _slow_writes(monkeypatch: pytest.MonkeyPatch, before_each: Any) -> None:
    write = on_disk.PartialCheckpoint.write

    def late(self: Any, name: str, parts: Any, was_read: Any = None) -> None:
        before_each()
        write(self, name, parts, was_read)

    monkeypatch.setattr(on_disk.PartialCheckpoint, "write", late)


@pytest.mark.parametrize("placement", PLACEMENTS.values(), ids=PLACEMENTS)
def test_what_is_saved_beside_steps_is_the_state_before_them(
    placement: Placement, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three steps are begun while no tile has been read yet; each tile is read late."""
    model = small(placement=placement)
    train(model, 0, 2)
    before = bits(model)
    straight = small(placement=placement)
    expected = train(straight, 0, 5)[2:]
    _slow_writes(monkeypatch, lambda: time.sleep(0.05))
    pending = model.begin_checkpoint(tmp_path, extra=1)
    assert not pending.done
    assert train(model, 2, 3) == expected
    assert pending.wait() == tmp_path / "checkpoint-2"
    assert pending.done
    assert pending.seconds > pending.stall_seconds > 0
    assert bits(model) == bits(straight)
    resumed = small()
    assert resumed.load_checkpoint(tmp_path) == 1
    assert bits(resumed) == before


def test_the_first_tile_written_is_the_first_that_is_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its update runs while the others are not written yet."""
    model = small()
    train(model, 0, 1)
    first = model._parts.updates.next_uses[0]
    version_before = bits(model)[f"{first}.weights"]
    go_on, calls = threading.Event(), []

    def second_waits() -> None:
        calls.append(1)
        if len(calls) == 2:
            go_on.wait()

    _slow_writes(monkeypatch, second_waits)
    pending = model.begin_checkpoint(tmp_path)
    stepper = threading.Thread(target=lambda: train(model, 1, 1))
    stepper.start()
    store = model._parts.tiles.store
    while bytes(sections(store, first)["weights"]) == version_before:
        time.sleep(0.001)
    assert not pending.done
    go_on.set()
    stepper.join()
    pending.wait()


def test_who_changes_weights_waits_for_the_save(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = small()
    train(model, 0, 1)
    before = bits(model)
    reading = threading.Event()
    _slow_writes(monkeypatch, reading.wait)
    pending = model.begin_checkpoint(tmp_path)
    edits = []

    def edit() -> None:
        with torch.no_grad():
            next(iter(model.parameters())).mul_(2)
        edits.append(reading.is_set())

    editor = threading.Thread(target=edit)
    editor.start()
    editor.join(0.05)
    reading.set()
    editor.join()
    assert edits == [True]
    pending.wait()
    resumed = small()
    resumed.load_checkpoint(tmp_path)
    assert bits(resumed) == before


@pytest.mark.parametrize("told_by_wait", [True, False])
def test_a_save_that_fails_beside_steps_is_told_once(
    told_by_wait: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = small()
    model.save_checkpoint(tmp_path)
    flush = os.fsync

    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    train(model, 0, 1)
    pending = model.begin_checkpoint(tmp_path)
    train(model, 1, 1)
    model.synchronize()  # no tile stays held
    pending._thread.join()
    monkeypatch.setattr(os, "fsync", flush)
    with pytest.raises(OSError, match="No space left"):
        pending.wait() if told_by_wait else model.begin_checkpoint(tmp_path)
    assert _entries(tmp_path) == ["checkpoint-0"]
    assert model.begin_checkpoint(tmp_path).wait().name == "checkpoint-2"


def test_a_model_that_ends_before_its_save(tmp_path: Path) -> None:
    model = small()
    train(model, 0, 1)
    before = bits(model)
    pending = model.begin_checkpoint(tmp_path)
    train(model, 1, 1)
    model.close()
    pending.wait()
    resumed = small()
    resumed.load_checkpoint(tmp_path)
    assert bits(resumed) == before


# refusals


def _norm_frozen() -> torch.nn.Module:
    module = families.build(LLAMA)
    module.model.norm.weight.requires_grad_(False)
    return module


def _groups(*names: list[str]) -> megatrain.AdamW:
    return megatrain.AdamW(params=[{"params": group} for group in names])


_NAMES = [name for name, _ in families.build(LLAMA).named_parameters()]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: small(MODES[6]), "dtype is bfloat16 in the checkpoint and float32 in the model"),
        (lambda: small(MODES[3]), "master is split in the checkpoint and none in the model"),
        (lambda: small(MODES[2]), "moments is fp32 in the checkpoint and int8 in the model"),
        (lambda: small(seed=5), "seed is 4 in the checkpoint and 5 in the model"),
        (lambda: small(module=families.build(LLAMA, num_hidden_layers=5)), "lacks parameter model.layers.4."),
        (lambda: small(module=families.build(LLAMA, num_hidden_layers=3)), "the model lacks parameter model.layers.3."),
        (
            lambda: small(module=families.build(LLAMA, intermediate_size=56)),
            r"shape of model.layers.0.mlp.gate_proj.weight is \[48, 32\] in the checkpoint and \[56, 32\] in the model",
        ),
        (lambda: small(module=_norm_frozen()), "trainable of model.norm.weight is True in the checkpoint and False"),
        (lambda: small(module=families.build(LLAMA, tie_word_embeddings=True)), "the model lacks parameter lm_head"),
        (lambda: small(optimizer=_groups(_NAMES[:2], _NAMES[2:])), "it has 1 parameter groups, the optimizer 2"),
        (lambda: small(optimizer=_groups(_NAMES[::-1])), "parameter group 0 has model.embed_tokens.weight where"),
    ],
)
def test_a_checkpoint_of_another_model_changes_nothing(make: Any, message: str, tmp_path: Path) -> None:
    model = small()
    train(model, 0, 1)
    model.save_checkpoint(tmp_path)
    other = make()
    train(other, 4, 1)
    before = bits(other), other.steps, other.optimizer.progress(), torch.get_rng_state().tolist()
    with pytest.raises(CheckpointError, match=message) as error:
        other.load_checkpoint(tmp_path)
    assert str(error.value).startswith(f"{tmp_path / 'checkpoint-1'} is not of this model: ")
    assert (bits(other), other.steps, other.optimizer.progress(), torch.get_rng_state().tolist()) == before
    train(other, 5, 1)


def test_what_cannot_be_saved_is_refused(tmp_path: Path) -> None:
    model = small()
    with pytest.raises(ValueError, match="plain values"):
        model.save_checkpoint(tmp_path / "a", extra={"x": torch.zeros(1)})
    with pytest.raises(ValueError, match="keep is 0"):
        model.save_checkpoint(tmp_path / "a", keep=0)
    model(**text_batch(1)).loss.backward()
    with pytest.raises(RuntimeError, match=r"a backward\(\) is waiting"):
        model.save_checkpoint(tmp_path / "a")
    with pytest.raises(RuntimeError, match=r"a backward\(\) is waiting"):
        model.load_checkpoint(tmp_path / "a")
    model.optimizer.zero_grad()
    assert not (tmp_path / "a").exists()
    with pytest.raises(CheckpointError, match="has no whole checkpoint"):
        model.load_checkpoint(tmp_path / "a")
    with pytest.raises(CheckpointError, match="checkpoint-7 cannot be used: it does not exist"):
        model.load_checkpoint(tmp_path / "checkpoint-7")
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match="is a file"):
        model.save_checkpoint(tmp_path / "file")


# damage


@pytest.fixture(scope="module")
def two_saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("saved")
    model = small(INT8)
    for step in (0, 1):
        train(model, step, 1)
        model.save_checkpoint(directory)
    return directory


def _files(directory: Path) -> list[str]:
    return sorted(path.name for path in (directory / "checkpoint-2").iterdir())


def test_every_file_is_needed_whole(two_saved: Path, tmp_path: Path) -> None:
    """Each file missing, cut, longer, with a flipped bit at several places: named, and the one before is used."""
    model = small(INT8)
    names = _files(two_saved)
    assert {"manifest.json", "state.json", "buffers.safetensors", "tile-00000.safetensors"} <= set(names)
    generator = random.Random(3)

    def remove(path: Path) -> None:
        path.unlink()

    def cut(path: Path) -> None:
        os.truncate(path, generator.randrange(path.stat().st_size))

    def lengthen(path: Path) -> None:
        with path.open("ab") as file:
            file.write(b"\0")

    def flip(path: Path) -> None:
        content = bytearray(path.read_bytes())
        content[generator.randrange(len(content))] ^= 1 << generator.randrange(8)
        path.write_bytes(content)

    for name in names:
        for harm in (remove, cut, lengthen, flip, flip):
            spoilt = tmp_path / "copy"
            shutil.rmtree(spoilt, ignore_errors=True)
            shutil.copytree(two_saved, spoilt)
            harm(spoilt / "checkpoint-2" / name)
            with pytest.warns(UserWarning) as noted:
                model.load_checkpoint(spoilt)
            assert len(noted) == 1
            message = str(noted[0].message)
            assert message.startswith(f"{spoilt / 'checkpoint-2'} is damaged: "), message
            assert name in message
            assert message.endswith(f"; using {spoilt / 'checkpoint-1'}")
            assert model.steps == 1
            with pytest.raises(CheckpointError, match="cannot be used"):
                model.load_checkpoint(spoilt / "checkpoint-2")


def test_no_whole_checkpoint_names_each(two_saved: Path, tmp_path: Path) -> None:
    spoilt = tmp_path / "copy"
    shutil.copytree(two_saved, spoilt)
    (spoilt / "checkpoint-1" / "state.json").unlink()
    (spoilt / "checkpoint-2" / "tile-00001.safetensors").unlink()
    model = small(INT8)
    before = bits(model)
    with pytest.raises(CheckpointError, match="has no whole checkpoint") as error:
        model.load_checkpoint(spoilt)
    assert "tile-00001.safetensors is missing" in str(error.value)
    assert "state.json is missing" in str(error.value)
    assert bits(model) == before


def test_a_later_format_is_named(two_saved: Path, tmp_path: Path) -> None:
    shutil.copytree(two_saved, tmp_path / "copy")
    manifest = tmp_path / "copy" / "checkpoint-2" / "manifest.json"
    content = json.loads(manifest.read_text())
    del content["blake2b"]
    content["version"] = 2
    manifest.write_text(json.dumps({**content, "blake2b": on_disk._seal(content)}))
    with pytest.raises(CheckpointError, match="its format is version 2, and this megatrain reads 1"):
        small(INT8).load_checkpoint(manifest.parent)


# writing


def _entries(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir())


@pytest.mark.parametrize("call", range(1, 12))
def test_a_full_disk_leaves_what_was_there(call: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The n-th flush, of a file or a directory, finds no space."""
    model = small()
    train(model, 0, 1)
    model.save_checkpoint(tmp_path)
    expected = bits(model)
    train(model, 1, 1)
    flush, calls = os.fsync, 0

    def full(descriptor: int) -> None:
        nonlocal calls
        calls += 1
        if calls == call:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        flush(descriptor)

    monkeypatch.setattr(os, "fsync", full)
    # Behind the last one, the directory's, the checkpoint has its name already.
    with pytest.raises(OSError, match="No space left"):
        model.save_checkpoint(tmp_path, keep=1)
    monkeypatch.setattr(os, "fsync", flush)
    assert "checkpoint-1" in _entries(tmp_path)
    assert not any("partial" in name for name in _entries(tmp_path))
    resumed = small()
    resumed.load_checkpoint(tmp_path / "checkpoint-1")
    assert bits(resumed) == expected
    assert model.save_checkpoint(tmp_path, keep=1).name == "checkpoint-2"
    assert _entries(tmp_path) == ["checkpoint-2"]


def test_a_file_that_cannot_grow_is_named(tmp_path: Path) -> None:
    """A limit of the kernel's in the middle of a write."""
    model = small()
    model.save_checkpoint(tmp_path)
    train(model, 0, 1)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, hard))
    try:
        with pytest.raises(OSError, match=r"File too large.*tile-00000\.safetensors"):
            model.save_checkpoint(tmp_path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert _entries(tmp_path) == ["checkpoint-0"]


def test_the_last_ones_are_kept(tmp_path: Path) -> None:
    model = small()
    for step in range(4):
        train(model, step, 1)
        model.save_checkpoint(tmp_path, keep=2)
    assert _entries(tmp_path) == ["checkpoint-3", "checkpoint-4"]
    # A damaged one does not count, nothing else is touched.
    (tmp_path / "checkpoint-4" / "state.json").unlink()
    (tmp_path / "notes").mkdir()
    train(model, 4, 1)
    model.save_checkpoint(tmp_path, keep=2)
    assert _entries(tmp_path) == ["checkpoint-3", "checkpoint-5", "notes"]
    model.save_checkpoint(tmp_path, keep=1)
    assert _entries(tmp_path) == ["checkpoint-5", "notes"]


def test_older_ones_go_only_when_the_new_one_is_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = small()
    model.save_checkpoint(tmp_path)
    train(model, 0, 1)
    discard, seen = on_disk._discard, []

    def watch(path: Path) -> None:
        if path.exists():
            seen.append(path.name)
            assert on_disk.damage(tmp_path / "checkpoint-1") is None
        discard(path)

    monkeypatch.setattr(on_disk, "_discard", watch)
    model.save_checkpoint(tmp_path, keep=1)
    assert seen == ["checkpoint-0"]


def test_the_same_step_again(tmp_path: Path) -> None:
    model = small()
    model.save_checkpoint(tmp_path, extra="first")
    model.save_checkpoint(tmp_path, extra="second")
    assert _entries(tmp_path) == ["checkpoint-0"]
    assert model.load_checkpoint(tmp_path) == "second"
    # A kill between the two renames: the old one has its other name.
    (tmp_path / "checkpoint-0").rename(tmp_path / "checkpoint-0-before")
    assert model.load_checkpoint(tmp_path) == "second"
    model.save_checkpoint(tmp_path, extra="third")
    assert _entries(tmp_path) == ["checkpoint-0"]
    # One that is damaged is replaced.
    (tmp_path / "checkpoint-0" / "state.json").unlink()
    model.save_checkpoint(tmp_path, extra="fourth")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert model.load_checkpoint(tmp_path) == "fourth"


@pytest.mark.timeout(900)
def test_kills_while_saving_lose_nothing(tmp_path: Path) -> None:
    """Six; `python tests/python/kill_while_saving.py 200` for more."""
    told = kill_many(tmp_path, 6, seed=1)
    assert told["inside a save"] >= 1
    assert told["steps"] >= 4


@pytest.mark.parametrize("placement", PLACEMENTS.values(), ids=PLACEMENTS)
def test_moments_loaded_into_a_model_that_runs(placement: Placement) -> None:
    """Resident moments are on the device by then, and must come up again."""
    model = small(placement=placement)
    train(model, 0, 2)
    weights = {name: value.clone() for name, value in model.state_dict().items()}
    moments = copy.deepcopy(model.optimizer.state_dict())
    expected = train(model, 2, 2)
    other = small(placement=placement)
    train(other, 50, 2)
    other.load_state_dict(weights)
    other.evaluate(text_batch(3))
    other.optimizer.load_state_dict(moments)
    other.steps = 2
    assert train(other, 2, 2) == expected
