"""What the tests of checkpoints train."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import families
from families import FAMILIES, text_batch
from test_precision import MODES, streamed

import megatrain
from megatrain import Placement
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


PLACEMENTS = {
    "streamed": Placement(),
    "resident": Placement.spread(4, resident=2, everything=1, outside="all"),
    "micro-batches": Placement.spread(4, order="micro-batch-major", resident=1, selected=2, kept_on="host"),
}


def entries(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir())
