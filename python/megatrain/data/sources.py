"""From the names in the settings to records: files, directories, patterns, datasets of the hub."""

from __future__ import annotations

import glob
import re
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from .lines import read_csv, read_json, read_jsonl
from .plain_text import read_stdlib, read_text_file
from .records import DataError, Read
from .tables import is_saved_dataset, read_arrow, read_dataset, read_parquet

PYTHON_STDLIB = "python-stdlib"

_READERS: dict[str, Callable[[Path], Read]] = {
    ".jsonl": read_jsonl,
    ".ndjson": read_jsonl,
    ".json": read_json,
    ".csv": read_csv,
    ".tsv": read_csv,
    ".parquet": read_parquet,
    ".arrow": read_arrow,
    ".feather": read_arrow,
    ".txt": read_text_file,
    ".text": read_text_file,
    ".md": read_text_file,
}
_COMPRESSED = (".jsonl", ".ndjson", ".json", ".csv", ".tsv")
_HUB_ID = re.compile(r"[\w][\w.-]*(/[\w][\w.-]*)?")


@dataclass(frozen=True)
class Source:
    """Can be read again and again, each time the same records in the same order."""

    names: tuple[str, ...]
    subset: str | None
    split: str

    def records(self) -> Read:
        for name in self.names:
            if name == PYTHON_STDLIB:
                yield from read_stdlib()
            elif Path(name).is_file():
                try:
                    yield from _reader(Path(name))(Path(name))
                except (OSError, EOFError, zlib.error) as error:
                    raise DataError(f"{name}: {getattr(error, 'strerror', None) or error}") from None
            else:
                yield from read_dataset(name, self.subset, self.split)


def open_source(path: str | Sequence[str], *, key: str, subset: str | None = None, split: str = "train") -> Source:
    """Find what `path` (or each of several) names; DataError, beginning with the setting's `key`, if it is not
    there. A directory stands for the data files in it (for the texts only if there
    is nothing else), a pattern (*, ?, **) for what it matches."""
    names: list[str] = []
    for entry in [path] if isinstance(path, str) else path:
        names += _expanded(entry, key)
    return Source(tuple(names), subset, split)


def _expanded(entry: str, key: str) -> list[str]:
    path = Path(entry)
    if entry == PYTHON_STDLIB or path.is_file():
        return [entry]
    if path.is_dir():
        if is_saved_dataset(path):
            return [entry]
        files = [file for file in sorted(path.rglob("*")) if file.is_file() and _known(file)]
        files = [file for file in files if not any(part.startswith(".") for part in file.relative_to(path).parts)]
        # Beside records, a text is a README or a licence.
        records = [file for file in files if _READERS.get(_kind(file)) is not read_text_file]
        if not files:
            raise DataError(f"{key} {entry}: is a directory without data files ({', '.join(_READERS)})")
        return [str(file) for file in records or files]
    if glob.has_magic(entry):
        found = sorted(name for name in glob.glob(entry, recursive=True) if Path(name).is_file())
        if not found:
            raise DataError(f"{key} {entry}: matches no file")
        return found
    if _known(path) or not _HUB_ID.fullmatch(entry):
        raise DataError(f"{key} {entry}: no such file")
    return [entry]


def _kind(path: Path) -> str:
    name = path.with_suffix("") if path.suffix == ".gz" else path
    return name.suffix.lower()


def _known(path: Path) -> bool:
    return _kind(path) in (_COMPRESSED if path.suffix == ".gz" else _READERS)


def _reader(path: Path) -> Callable[[Path], Read]:
    """By the name's ending; anything else is text."""
    if path.suffix == ".gz" and not _known(path):
        raise DataError(f"{path}: only {', '.join(_COMPRESSED)} may be compressed")
    return _READERS.get(_kind(path), read_text_file)
