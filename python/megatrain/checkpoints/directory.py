"""Directories `checkpoint-<step>` that are there whole or not at all, however the process ends.

A checkpoint is filled in a hidden directory beside its place. Every file is flushed to the disk, the list of files
with their checksums last; then the directory is renamed. Readers trust the list only. One process at a time writes
into a directory of checkpoints."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import re
import shutil
import warnings
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatrain.errors import CheckpointError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

MANIFEST = "manifest.json"
VERSION = 1
_FORMAT = "megatrain checkpoint"
_CHUNK_BYTES = 16 << 20
_NAME = re.compile(r"checkpoint-(\d+)(-before)?")
_HIDDEN = ".checkpoint-"


class PartialCheckpoint:
    """A checkpoint being written; what `finish` has not put in its place is removed at the end of the `with`."""

    def __init__(self, parent: Path, step: int) -> None:
        self._parent = parent
        self._step = step
        self._path = parent / f"{_HIDDEN}{step}-partial-{os.getpid()}"
        self._files: dict[str, dict[str, Any]] = {}
        self._hashing = ThreadPoolExecutor(1, "checksum")

    def __enter__(self) -> PartialCheckpoint:
        if self._parent.exists() and not self._parent.is_dir():
            raise ValueError(f"{self._parent} is a file; a checkpoint needs a directory")
        self._parent.mkdir(parents=True, exist_ok=True)
        _remove_leftovers(self._parent)
        self._path.mkdir()
        return self

    def __exit__(self, *_: object) -> None:
        self._hashing.shutdown()
        shutil.rmtree(self._path, ignore_errors=True)

    def write(self, name: str, parts: Iterable[memoryview], was_read: Callable[[], None] | None = None) -> None:
        """A file of these bytes, on the disk when this returns; `was_read` is called earlier, once the bytes may
        change. OSError names the file."""
        path = self._path / name
        checksum = hashlib.blake2b(digest_size=16)
        size = 0
        try:
            with path.open("xb", buffering=0) as file:
                for part in parts:
                    for begin in range(0, part.nbytes, _CHUNK_BYTES):
                        chunk = part[begin : begin + _CHUNK_BYTES]
                        hashed = self._hashing.submit(checksum.update, chunk)
                        try:
                            written = 0
                            while written < chunk.nbytes:
                                written += file.write(chunk[written:])
                        finally:
                            hashed.result()
                    size += part.nbytes
                if was_read is not None:
                    was_read()
                os.fsync(file.fileno())
        except OSError as error:
            raise OSError(error.errno, error.strerror or str(error), str(path)) from error
        self._files[name] = {"bytes": size, "blake2b": checksum.hexdigest()}

    def finish(self) -> Path:
        """List the files, and put the directory in its place, over a checkpoint of the same step."""
        content = {"format": _FORMAT, "version": VERSION, "step": self._step, "files": self._files}
        text = json.dumps({**content, "blake2b": _seal(content)}, indent=1).encode()
        self.write(MANIFEST, [memoryview(text)])
        _sync(self._path)
        final = self._parent / f"checkpoint-{self._step}"
        before = self._parent / f"checkpoint-{self._step}-before"
        if final.exists():
            # Until the new one has its name, the old one must be found: under the other name.
            if damage(final, contents=False) is None:
                _discard(before)
                final.rename(before)
            else:
                _discard(final)
        self._path.rename(final)
        _sync(self._parent)
        _discard(before)
        return final


def find(directory: Path) -> Path:
    """`directory` if it is a checkpoint, else the newest whole one in it. Every byte is checked. One warning names
    those that are damaged and newer; CheckpointError if none is left."""
    if is_checkpoint(directory):
        reason = damage(directory) if directory.is_dir() else "it does not exist"
        if reason is not None:
            raise CheckpointError(f"{directory} cannot be used: {reason}")
        return directory
    return first_whole(_candidates(directory), damage, directory)


def first_whole(candidates: Iterable[Path], damage_of: Callable[[Path], str | None], directory: Path) -> Path:
    """The first of `directory` that has no damage. One warning names those before it; CheckpointError where there is
    none."""
    passed: list[str] = []
    for path in candidates:
        reason = damage_of(path)
        if reason is None:
            if passed:
                warnings.warn(f"{'; '.join(passed)}; using {path}", stacklevel=3)
            return path
        passed.append(f"{path} is damaged: {reason}")
    raise CheckpointError("; ".join([f"{directory} has no whole checkpoint", *passed]))


def is_checkpoint(directory: Path) -> bool:
    """By its name or its list of files; whether it is whole, `find` tells."""
    return _NAME.fullmatch(directory.name) is not None or (directory / MANIFEST).exists()


def has_any(directory: Path) -> bool:
    """Something in it calls itself a checkpoint; whether it is whole, `find` tells."""
    return any(True for _ in _candidates(directory))


def keep_last(newest: Path, keep: int) -> None:
    """Remove all but `keep` whole checkpoints beside `newest`, which is one of them: those of the lowest steps."""
    others = [path for path in _candidates(newest.parent) if path != newest]
    kept = [path for path in others if damage(path, contents=False) is None][: keep - 1]
    oldest = min(_step(path) for path in [newest, *kept])
    for path in others:
        if path not in kept and (len(kept) == keep - 1 or _step(path) < oldest):
            _discard(path)


def damage(path: Path, *, contents: bool = True) -> str | None:
    """What is wrong with a checkpoint, naming the file; None for a whole one. Without `contents` the files' sizes
    are looked at, and not their bytes."""
    try:
        files = _manifest(path)
        for name, expected in files.items():
            found = (path / name).stat().st_size
            if found != expected["bytes"]:
                return f"{name} has {found} bytes in place of {expected['bytes']}"
        for name, expected in files.items() if contents else ():
            if _checksum(path / name) != expected["blake2b"]:
                return f"the bytes of {name} do not have their checksum"
    except FileNotFoundError as error:
        return f"{Path(error.filename).name} is missing"
    except OSError as error:
        return f"{Path(error.filename or path).name} cannot be read ({error.strerror})"
    except CheckpointError as error:
        return str(error)
    return None


def _manifest(path: Path) -> dict[str, dict[str, Any]]:
    text = (path / MANIFEST).read_bytes()
    try:
        content = json.loads(text)
        seal = content.pop("blake2b")
        if content["format"] != _FORMAT or seal != _seal(content):
            raise ValueError
        files: dict[str, dict[str, Any]] = content["files"]
    except (ValueError, KeyError, TypeError, AttributeError):
        raise CheckpointError(f"the bytes of {MANIFEST} do not have their checksum") from None
    if content["version"] != VERSION:
        raise CheckpointError(f"its format is version {content['version']}, and this megatrain reads {VERSION}")
    return files


def _seal(content: dict[str, Any]) -> str:
    return hashlib.blake2b(json.dumps(content, sort_keys=True).encode(), digest_size=16).hexdigest()


def _checksum(path: Path) -> str:
    checksum = hashlib.blake2b(digest_size=16)
    chunk = memoryview(bytearray(min(_CHUNK_BYTES, max(path.stat().st_size, 1))))
    with path.open("rb", buffering=0) as file:
        while count := file.readinto(chunk):
            checksum.update(chunk[:count])
    return checksum.hexdigest()


def _candidates(directory: Path) -> Iterator[Path]:
    """Of the highest step first; one that was being replaced behind the one in its place."""
    if directory.is_dir():
        found = [path for path in directory.iterdir() if _NAME.fullmatch(path.name) and path.is_dir()]
        yield from sorted(found, key=lambda path: (-_step(path), len(path.name)))


def _step(path: Path) -> int:
    match = _NAME.fullmatch(path.name)
    assert match is not None
    return int(match[1])


def _remove_leftovers(directory: Path) -> None:
    """Of processes that were killed."""
    for path in directory.iterdir():
        if path.name.startswith(_HIDDEN):
            shutil.rmtree(path, ignore_errors=True)


def _discard(path: Path) -> None:
    """Hidden first: one that is half removed must not look damaged."""
    if path.exists():
        hidden = path.with_name(f"{_HIDDEN}{path.name}-discarded-{os.getpid()}")
        path.rename(hidden)
        shutil.rmtree(hidden, ignore_errors=True)


def _sync(directory: Path) -> None:
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno != errno.EINVAL:  # file systems that cannot flush a directory
            raise
    finally:
        os.close(descriptor)
