"""Parquet, Arrow and Hugging Face datasets, read in batches of rows. Their libraries are optional."""

from __future__ import annotations

import importlib
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from .records import DataError, Read, Record

_ROWS = 256


def read_parquet(path: Path) -> Read:
    parquet = _library("pyarrow.parquet", f"{path}: Parquet")
    with _one_line(path), parquet.ParquetFile(path, memory_map=True) as file:
        yield from _rows(file.iter_batches(batch_size=_ROWS), str(path))


def read_arrow(path: Path) -> Read:
    """The IPC file format (also called Feather 2), or the stream format, which `datasets` writes."""
    arrow = _library("pyarrow", f"{path}: Arrow")
    with _one_line(path), arrow.memory_map(str(path)) as source:
        if source.read(6) == b"ARROW1":
            file = arrow.ipc.open_file(source)
            batches: Iterable[Any] = (file.get_batch(index) for index in range(file.num_record_batches))
        else:
            source.seek(0)
            batches = arrow.ipc.open_stream(source)
        yield from _rows(batches, str(path))


def is_saved_dataset(path: Path) -> bool:
    """A directory that `datasets` saved with save_to_disk()."""
    return (path / "dataset_dict.json").is_file() or (path / "state.json").is_file()


def read_dataset(name: str, subset: str | None, split: str) -> Read:
    """A saved dataset's directory, or an id of the hub."""
    datasets = _library("datasets", f"{name}: is no file here; a Hugging Face dataset")
    try:
        if Path(name).is_dir():
            loaded = datasets.load_from_disk(name)
            if hasattr(loaded, "keys"):
                if split not in loaded:
                    raise DataError(f"{name}: has no split '{split}', only {', '.join(loaded)}")
                loaded = loaded[split]
        else:
            loaded = datasets.load_dataset(name, subset, split=split)
    except DataError:
        raise
    except Exception as error:  # of many kinds: network, hub, formats
        raise DataError(f"{name}: could not be loaded: {error}") from error
    loaded = loaded.with_format(None)
    for number, row in enumerate(loaded, start=1):
        yield Record(f"{name}[{split}]: row {number}", dict(row))


def _rows(batches: Iterable[Any], name: str) -> Read:
    number = 0
    for batch in batches:
        for first in range(0, batch.num_rows, _ROWS):
            for row in batch.slice(first, _ROWS).to_pylist():
                number += 1
                yield Record(f"{name}: row {number}", row)


def _library(name: str, wanted_by: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError:
        package = name.split(".")[0]
        raise DataError(
            f'{wanted_by} needs {package}, which is not installed; run: pip install "megatrain[data]"'
        ) from None


class _one_line:
    """A library's error about a broken file becomes a DataError that names the file."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: object) -> None:
        if isinstance(error, OSError | ValueError) and not isinstance(error, DataError):
            raise DataError(f"{self._path}: {error}") from error
