"""A safetensors file written a piece at a time: no tensor has to be in memory whole."""

from __future__ import annotations

import json
import math
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from pathlib import Path

    from megatrain.export.parts import Part
    from megatrain.export.weights import Weights

_DTYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}


def tensor_bytes(weights: Weights, part: Part) -> int:
    return math.prod(_shape(weights, part)) * weights.dtype_of(part.name).itemsize


def _shape(weights: Weights, part: Part) -> list[int]:
    return weights.shape(part.name) if part.shape is None else list(part.shape)


def write_file(path: Path, tensors: dict[str, Part], weights: Weights) -> None:
    """`tensors`: for each name in the file what of `weights` it is. ValueError for a type without a name in the
    format, OSError if it cannot be written."""
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    begin = 0
    for name, part in tensors.items():
        dtype = weights.dtype_of(part.name)
        if dtype not in _DTYPES:
            raise ValueError(f"{part.name} is {dtype}, which is not written to safetensors")
        end = begin + tensor_bytes(weights, part)
        header[name] = {"dtype": _DTYPES[dtype], "shape": _shape(weights, part), "data_offsets": [begin, end]}
        begin = end
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with path.open("xb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for part in tensors.values():
            for piece in weights.pieces(part.name, part.first, math.prod(_shape(weights, part))):
                file.write(piece.contiguous().view(torch.uint8).numpy().data)
