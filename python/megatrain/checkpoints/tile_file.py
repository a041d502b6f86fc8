"""One tile as a safetensors file whose tensors are the tile's sections. Bytes go straight from the tile to the file
and back: nothing is staged."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import torch

from megatrain._native import Section
from megatrain.interop import section_dtype

if TYPE_CHECKING:
    from pathlib import Path

    from megatrain._native import TileStore

_DTYPES = {torch.float32: "F32", torch.bfloat16: "BF16", torch.int16: "I16", torch.uint8: "U8"}
_SAVED = (
    Section.weights,
    Section.master_low,
    Section.exp_avg,
    Section.exp_avg_sq,
    Section.exp_avg_exponents,
    Section.exp_avg_sq_exponents,
)


def sections(store: TileStore, tile: int) -> dict[str, memoryview]:
    """What outlives a step, by name: views of the tile. Gradients do not."""
    layout = store.layout(tile)
    return {s.name: store.view(tile, s).cast("B") for s in _SAVED if layout.section(s)[1] > 0}


def tile_bytes(store: TileStore, tile: int) -> list[memoryview]:
    """The parts of the tile's file, one behind the other: the header, then views of the tile."""
    views = sections(store, tile)
    tile_format = store.layout(tile).format
    header: dict[str, Any] = {}
    begin = 0
    for name, view in views.items():
        dtype = section_dtype(tile_format, Section.__members__[name])
        shape = [view.nbytes // dtype.itemsize]
        header[name] = {"dtype": _DTYPES[dtype], "shape": shape, "data_offsets": [begin, begin + view.nbytes]}
        begin += view.nbytes
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    return [memoryview(len(text).to_bytes(8, "little") + text), *views.values()]


def read_tile(path: Path, store: TileStore, tile: int) -> None:
    """Fill the tile from a file that `tile_bytes` of an equal layout made. OSError if it does not have its length."""
    header, *views = tile_bytes(store, tile)
    with path.open("rb", buffering=0) as file:
        file.seek(header.nbytes)
        for view in views:
            done = 0
            while done < view.nbytes:
                count = file.readinto(view[done:])
                if not count:
                    raise OSError(f"{path} became shorter while it was read")
                done += count
