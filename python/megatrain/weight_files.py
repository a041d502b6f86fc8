"""The weight files of a Hugging Face directory: safetensors, or torch's .bin of which only tensors are read. Files are
mapped, so that a tensor is in memory only while it goes into its tile."""

from __future__ import annotations

import json
import pickle
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Protocol

import torch

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

_KINDS = (
    ("model.safetensors.index.json", "*.safetensors"),
    ("pytorch_model.bin.index.json", "pytorch_model*.bin"),
)


class Shard(Protocol):
    """An open file of tensors."""

    def names(self) -> list[str]: ...

    def shape(self, name: str) -> tuple[int, ...]: ...

    def tensor(self, name: str) -> torch.Tensor: ...


def weight_files(directory: Path) -> list[Path]:
    """Those that the index names, else all there are: safetensors before .bin. ValueError for none, or a missing
    one."""
    for index_name, pattern in _KINDS:
        index = directory / index_name
        if index.is_file():
            wanted = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
            missing = [name for name in wanted if not (directory / name).is_file()]
            if missing:
                raise ValueError(f"{directory} lacks {missing[0]}, which its index names")
            return [directory / name for name in wanted]
        files = sorted(directory.glob(pattern))
        if files:
            return files
    raise ValueError(f"{directory} has no *.safetensors and no pytorch_model*.bin; other weight files are not read")


@contextmanager
def open_shard(file: Path) -> Iterator[Shard]:
    """ValueError, and nothing in the file is run, if it is a .bin that holds more than tensors."""
    if file.suffix != ".bin":
        from safetensors import safe_open

        with safe_open(file, framework="pt") as opened:
            yield _Safetensors(opened)
    else:
        yield _Pickled(_tensors_only(file))


class _Safetensors:
    def __init__(self, file: Any) -> None:
        self._file = file

    def names(self) -> list[str]:
        return list(self._file.keys())

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._file.get_slice(name).get_shape())

    def tensor(self, name: str) -> torch.Tensor:
        tensor: torch.Tensor = self._file.get_tensor(name)
        return tensor


class _Pickled:
    def __init__(self, tensors: dict[str, torch.Tensor]) -> None:
        self._tensors = tensors

    def names(self) -> list[str]:
        return list(self._tensors)

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._tensors[name].shape)

    def tensor(self, name: str) -> torch.Tensor:
        return self._tensors[name]


def _tensors_only(file: Path) -> dict[str, torch.Tensor]:
    # torch maps only the zip format that it writes since 1.6.
    with file.open("rb") as opened:
        mapped = opened.read(4) == b"PK\x03\x04"
    try:
        tensors = torch.load(file, map_location="cpu", weights_only=True, mmap=mapped)
    except pickle.UnpicklingError as error:
        raise ValueError(f"{file} holds more than tensors and was not loaded: {_reason(error)}") from None
    if not isinstance(tensors, dict) or not all(isinstance(value, torch.Tensor) for value in tensors.values()):
        raise ValueError(f"{file} is not a dictionary of tensors")
    return tensors


def _reason(error: Exception) -> str:
    """The line of torch's advice that names what was in the file."""
    lines = [line.strip() for line in str(error).splitlines()]
    return next((line for line in lines if "Unsupported" in line or "GLOBAL" in line), lines[0] if lines else "")
