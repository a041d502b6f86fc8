"""A safetensors file written a piece at a time: no tensor has to be in memory whole."""

from __future__ import annotations

import json
import math
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from pathlib import Path

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


def tensor_bytes(weights: Weights, name: str) -> int:
    return math.prod(weights.shape(name)) * weights.dtype_of(name).itemsize


def write_file(path: Path, tensors: dict[str, str], weights: Weights) -> None:
    """`tensors`: for each name in the file the name in `weights`. ValueError for a type without a name in the
    format, OSError if it cannot be written."""
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    begin = 0
    for name, own in tensors.items():
        dtype = weights.dtype_of(own)
        if dtype not in _DTYPES:
            raise ValueError(f"{own} is {dtype}, which is not written to safetensors")
        end = begin + tensor_bytes(weights, own)
        header[name] = {"dtype": _DTYPES[dtype], "shape": weights.shape(own), "data_offsets": [begin, end]}
        begin = end
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with path.open("xb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for own in tensors.values():
            for piece in weights.pieces(own):
                file.write(piece.contiguous().view(torch.uint8).numpy().data)
