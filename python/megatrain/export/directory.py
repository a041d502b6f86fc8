"""An exported directory: every file is written beside its place first, then all are renamed into it."""

from __future__ import annotations

import json
import tempfile
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatrain.export.safetensors_file import tensor_bytes, write_file
from megatrain.export.shards import SHARD_NAME, divide

if TYPE_CHECKING:
    import os

    from megatrain.export.contents import Contents
    from megatrain.export.parts import Part
    from megatrain.export.weights import Weights

INDEX = "model.safetensors.index.json"


def write_directory(
    directory: str | os.PathLike[str], contents: Contents, weights: Weights, max_shard_size: str | None = None
) -> dict[str, int]:
    """Returns {file of weights: bytes of its tensors}. Files of an earlier export are replaced, its other shards
    removed. ValueError if `directory` is a file, OSError if it cannot be written: what was there still is. The note of
    `contents` becomes a warning."""
    target = Path(directory)
    if target.exists() and not target.is_dir():
        raise ValueError(f"{target} is a file; save_pretrained needs a directory")
    sizes = {name: tensor_bytes(weights, part) for name, part in contents.tensors.items()}
    file_of = divide(contents, sizes, max_shard_size)
    files: dict[str, dict[str, Part]] = {}
    for name, part in contents.tensors.items():
        files.setdefault(file_of[name], {})[name] = part
    target.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target, prefix=".partial-") as partial:
        staging = Path(partial)
        for name, text in contents.texts.items():
            (staging / name).write_text(_with_dtype(name, text, weights), encoding="utf-8")
        for file, tensors in files.items():
            write_file(staging / file, tensors, weights)
        if len(files) > 1:
            index = {"metadata": {"total_size": sum(sizes.values())}, "weight_map": file_of}
            (staging / INDEX).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")
        for path in staging.iterdir():
            path.replace(target / path.name)
    if contents.note is not None:
        warnings.warn(contents.note, stacklevel=3)
    if len(files) == 1:
        (target / INDEX).unlink(missing_ok=True)
    for path in target.iterdir():
        if SHARD_NAME.fullmatch(path.name) and path.name not in files:
            path.unlink()
    return {file: sum(sizes[name] for name in tensors) for file, tensors in files.items()}


def _with_dtype(name: str, text: str, weights: Weights) -> str:
    """config.json says the type of the weights, for each part of the model that says one."""
    if name != "config.json":
        return text
    config: dict[str, Any] = json.loads(text)
    word = str(weights.dtype).removeprefix("torch.")
    for part in [config, *(value for value in config.values() if isinstance(value, dict) and "dtype" in value)]:
        part["dtype"] = word
    return json.dumps(config, indent=2, sort_keys=True) + "\n"
