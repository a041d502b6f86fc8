"""Save and load. Between steps: what is saved is what all updates queued before have made."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatrain.checkpoints import model_state, random_states
from megatrain.checkpoints.directory import PartialCheckpoint, find, keep_last
from megatrain.checkpoints.tile_file import read_tile, tile_bytes

if TYPE_CHECKING:
    import os

    from megatrain.model import StreamedModel

STATE = "state.json"
BUFFERS = "buffers.safetensors"


def tile_name(tile: int) -> str:
    return f"tile-{tile:05d}.safetensors"


def save(model: StreamedModel, directory: str | os.PathLike[str], extra: Any, keep: int | None) -> Path:
    """`StreamedModel.save_checkpoint`."""
    from safetensors.torch import save as safetensors_bytes

    if keep is not None and keep < 1:
        raise ValueError(f"keep is {keep}; at least the checkpoint that is saved must be kept")
    if model._sink.pending:
        raise RuntimeError("a backward() is waiting for optimizer.step() or optimizer.zero_grad()")
    model._require_loaded()
    model._drain()
    model._face.take_over_edits()
    state = model_state.capture(model, extra)
    try:
        text = json.dumps(state).encode()
    except (TypeError, ValueError) as error:
        raise ValueError(f"a checkpoint holds plain values besides the model: {error}") from None
    store = model._tiles.store
    with PartialCheckpoint(Path(directory), model.steps) as partial:
        for unit in model._plan.units:
            partial.write(tile_name(unit.tile), tile_bytes(store, unit.tile))
        partial.write(BUFFERS, [memoryview(safetensors_bytes(model_state.buffers(model)))])
        partial.write(STATE, [memoryview(text)])
        path = partial.finish()
    if keep is not None:
        keep_last(path, keep)
    return path


def load(model: StreamedModel, directory: str | os.PathLike[str]) -> Any:
    """`StreamedModel.load_checkpoint`."""
    from safetensors.torch import load as safetensors_tensors

    if model._sink.pending:
        raise RuntimeError("a backward() is waiting for optimizer.step() or optimizer.zero_grad()")
    path = find(Path(directory))
    state = json.loads((path / STATE).read_bytes())
    model_state.require_fit(state, model, path)
    buffers = safetensors_tensors((path / BUFFERS).read_bytes())
    model._drain()
    model._face.take_over_edits()  # else they would be taken over after the load
    for unit in model._plan.units:
        read_tile(path / tile_name(unit.tile), model._tiles.store, unit.tile)
        model._weights.mark_edited(unit.tile)
    model._unloaded.clear()
    model_state.set_buffers(model, buffers)
    model.optimizer.restore_progress(state["optimizer"])
    model._updates.restore(state["steps"], state["skipped_steps"], state["optimizer"]["steps"])
    random_states.restore(state["random"], model.device)
    return state["extra"]
