"""Checkpoints that are written beside the next steps."""

from __future__ import annotations

import errno
import os
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoint_models import PLACEMENTS, bits, entries, small, train

from megatrain import Placement
from megatrain.checkpoints import directory as on_disk
from megatrain.checkpoints.tile_file import sections


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
    assert entries(tmp_path) == ["checkpoint-0"]
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
