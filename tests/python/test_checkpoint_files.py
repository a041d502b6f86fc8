"""Damage to a checkpoint's files, and failures while they are written: what was there still is."""

from __future__ import annotations

import errno
import json
import os
import random
import resource
import shutil
import warnings
from pathlib import Path

import pytest
from checkpoint_models import INT8, bits, entries, small, train
from kill_while_saving import kill_many

from megatrain import CheckpointError
from megatrain.checkpoints import directory as on_disk

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
    assert "checkpoint-1" in entries(tmp_path)
    assert not any("partial" in name for name in entries(tmp_path))
    resumed = small()
    resumed.load_checkpoint(tmp_path / "checkpoint-1")
    assert bits(resumed) == expected
    assert model.save_checkpoint(tmp_path, keep=1).name == "checkpoint-2"
    assert entries(tmp_path) == ["checkpoint-2"]


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
    assert entries(tmp_path) == ["checkpoint-0"]


def test_the_last_ones_are_kept(tmp_path: Path) -> None:
    model = small()
    for step in range(4):
        train(model, step, 1)
        model.save_checkpoint(tmp_path, keep=2)
    assert entries(tmp_path) == ["checkpoint-3", "checkpoint-4"]
    # A damaged one does not count, nothing else is touched.
    (tmp_path / "checkpoint-4" / "state.json").unlink()
    (tmp_path / "notes").mkdir()
    train(model, 4, 1)
    model.save_checkpoint(tmp_path, keep=2)
    assert entries(tmp_path) == ["checkpoint-3", "checkpoint-5", "notes"]
    model.save_checkpoint(tmp_path, keep=1)
    assert entries(tmp_path) == ["checkpoint-5", "notes"]


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
    assert entries(tmp_path) == ["checkpoint-0"]
    assert model.load_checkpoint(tmp_path) == "second"
    # A kill between the two renames: the old one has its other name.
    (tmp_path / "checkpoint-0").rename(tmp_path / "checkpoint-0-before")
    assert model.load_checkpoint(tmp_path) == "second"
    model.save_checkpoint(tmp_path, extra="third")
    assert entries(tmp_path) == ["checkpoint-0"]
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
