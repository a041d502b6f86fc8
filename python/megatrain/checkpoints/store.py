"""Save and load. Between steps: what is saved is what all updates queued before have made."""

from __future__ import annotations

import json
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatrain.checkpoints import model_state, random_states
from megatrain.checkpoints.directory import PartialCheckpoint, find, keep_last
from megatrain.checkpoints.pending import HeldTiles, PendingCheckpoint
from megatrain.checkpoints.tile_file import read_tile, tile_bytes

if TYPE_CHECKING:
    import os
    from collections.abc import Callable, Iterable

    from megatrain._native import TileStore
    from megatrain.model import StreamedModel

STATE = "state.json"
BUFFERS = "buffers.safetensors"


def tile_name(tile: int) -> str:
    return f"tile-{tile:05d}.safetensors"


def save(model: StreamedModel, directory: str | os.PathLike[str], extra: Any, keep: int | None) -> Path:
    """`StreamedModel.save_checkpoint`."""
    beside = _capture(model, extra, keep)
    store = model._parts.tiles.store
    return _write(Path(directory), beside, keep, ((tile, _nothing) for tile in range(len(store))), store)


def begin(model: StreamedModel, directory: str | os.PathLike[str], extra: Any, keep: int | None) -> PendingCheckpoint:
    """`StreamedModel.begin_checkpoint`."""
    began = time.perf_counter()
    beside = _capture(model, extra, keep)
    engine, store = model._parts.engine, model._parts.tiles.store
    # The next forward needs the first of them first, and those it needs updated.
    order = list(dict.fromkeys([*model._parts.updates.next_uses, *range(len(store))]))
    held = HeldTiles(engine, order)

    def write() -> Path:
        with held:
            tiles = ((tile, lambda tile=tile: held.release(tile)) for tile in order)
            return _write(Path(directory), beside, keep, tiles, store)

    return PendingCheckpoint(write, held, began)


@dataclass(frozen=True)
class _Beside:
    """What a checkpoint holds besides tiles, as of the end of a step."""

    step: int
    state: bytes
    buffers: bytes


def _capture(model: StreamedModel, extra: Any, keep: int | None) -> _Beside:
    from safetensors.torch import save as safetensors_bytes

    if keep is not None and keep < 1:
        raise ValueError(f"keep is {keep}; at least the checkpoint that is saved must be kept")
    if model._parts.sink.pending:
        raise RuntimeError("a backward() is waiting for optimizer.step() or optimizer.zero_grad()")
    model._parts.require_loaded()
    model._wait_saved()
    model._parts.drain()
    model._parts.face.take_over_edits()
    state = model_state.capture(model, extra)
    try:
        text = json.dumps(state).encode()
    except (TypeError, ValueError) as error:
        raise ValueError(f"a checkpoint holds plain values besides the model: {error}") from None
    return _Beside(model.steps, text, safetensors_bytes(model_state.buffers(model)))


def _write(
    directory: Path,
    beside: _Beside,
    keep: int | None,
    tiles: Iterable[tuple[int, Callable[[], None]]],
    store: TileStore,
) -> Path:
    """`tiles`: each with what is called once its bytes have been read."""
    with PartialCheckpoint(directory, beside.step) as partial:
        for tile, was_read in tiles:
            partial.write(tile_name(tile), tile_bytes(store, tile), was_read)
        partial.write(BUFFERS, [memoryview(beside.buffers)])
        partial.write(STATE, [memoryview(beside.state)])
        path = partial.finish()
    if keep is not None:
        keep_last(path, keep)
    return path


def _nothing() -> None:
    pass


def load(model: StreamedModel, directory: str | os.PathLike[str]) -> Any:
    """`StreamedModel.load_checkpoint`."""
    from safetensors.torch import load as safetensors_tensors

    if model._parts.sink.pending:
        raise RuntimeError("a backward() is waiting for optimizer.step() or optimizer.zero_grad()")
    model._wait_saved()  # it may be the one
    path = find(Path(directory))
    state = json.loads((path / STATE).read_bytes())
    model_state.require_fit(state, model, path)
    buffers = safetensors_tensors((path / BUFFERS).read_bytes())
    model._parts.drain()
    model._parts.face.take_over_edits()  # else they would be taken over after the load
    for unit in model._parts.units.units:
        read_tile(path / tile_name(unit.tile), model._parts.tiles.store, unit.tile)
        model._parts.weights.mark_edited(unit.tile)
    model._parts.unloaded.clear()
    model_state.set_buffers(model, buffers)
    model.optimizer.restore_progress(state["optimizer"])
    model._parts.updates.restore(state["steps"], state["skipped_steps"], state["optimizer"]["steps"])
    random_states.restore(state["random"], model.device)
    return state["extra"]
