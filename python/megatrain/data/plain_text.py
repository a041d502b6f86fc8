"""Text of any size: a string, or a stretch of a UTF-8 file that is read block by block."""

from __future__ import annotations

import codecs
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from .records import BadRecord, DataError, Read, Record

BLOCK_BYTES = 1 << 20

# Installed packages are not the standard library. Tests and the machine-made tables of encodings
# repeat each other across files, so a held-out one would say little.
_STDLIB_LEFT_OUT = {"site-packages", "dist-packages", "test", "tests", "idle_test", "encodings", "__pycache__"}


@dataclass(frozen=True)
class FileText:
    """Bytes begin to end of a file; both are ends of lines or of characters. Small to copy and to send."""

    path: Path
    begin: int
    end: int

    def blocks(self) -> Iterator[str]:
        """The text in order, in strings of about a MiB that end with a line where there is one."""
        with self.path.open("rb") as file:
            file.seek(self.begin)
            rest = b""
            left = self.end - self.begin
            while left or rest:
                data = rest + file.read(min(BLOCK_BYTES, left))
                left -= len(data) - len(rest)
                if left and len(data) == len(rest):
                    raise DataError(f"{self.path}: became shorter while it was read")
                cut = _last_break(data) if left else len(data)
                yield data[:cut].decode("utf-8")
                rest = data[cut:]


Text = str | FileText


def text_bytes(text: Text) -> int:
    """Its length in UTF-8."""
    return len(text.encode("utf-8")) if isinstance(text, str) else text.end - text.begin


def text_blocks(text: Text) -> Iterator[str]:
    if isinstance(text, FileText):
        yield from text.blocks()
    elif text:
        yield text


def cut_text(text: Text, at: int) -> tuple[Text, Text]:
    """What stands before the last line end at or before byte `at`, and the rest. Without a line end there, it is
    cut between characters."""
    if isinstance(text, str):
        data = text.encode("utf-8")
        cut = _last_break(data[:at])
        return data[:cut].decode("utf-8"), data[cut:].decode("utf-8")
    with text.path.open("rb") as file:
        # Back block by block, so that a line end far away is found without reading the whole.
        high = min(text.begin + at, text.end)
        stop = high
        while high > text.begin:
            low = max(text.begin, high - BLOCK_BYTES)
            file.seek(low)
            found = file.read(high - low).rfind(b"\n")
            if found >= 0:
                cut = low + found + 1
                return FileText(text.path, text.begin, cut), FileText(text.path, cut, text.end)
            high = low
        low = max(text.begin, stop - 4)
        file.seek(low)
        cut = low + _whole_characters(file.read(stop - low))
    return FileText(text.path, text.begin, cut), FileText(text.path, cut, text.end)


def read_text_file(path: Path) -> Read:
    """The whole file as one record, without holding it; first looked through for what is not UTF-8. A byte
    order mark is no text."""
    decoder = codecs.getincrementaldecoder("utf-8")()
    begin = before = lines = 0
    with path.open("rb") as file:
        while True:
            data = file.read(BLOCK_BYTES)
            held = len(decoder.getstate()[0])
            try:
                decoder.decode(data, final=not data)
            except UnicodeDecodeError as error:
                at = error.start - held  # in this block; negative where the character began in the one before
                line = lines + data.count(b"\n", 0, max(at, 0)) + 1
                yield BadRecord(f"{path}:{line}", f"not UTF-8 text (byte {before + at})")
                return
            if not data:
                break
            if not before and data.startswith(codecs.BOM_UTF8):
                begin = len(codecs.BOM_UTF8)
            before += len(data)
            lines += data.count(b"\n")
    yield Record(path.name, {"text": FileText(path, begin, before)})


def read_stdlib() -> Read:
    """The sources of the running Python's standard library, a record each."""
    root = Path(sysconfig.get_path("stdlib"))
    for path in sorted(root.rglob("*.py")):
        name = path.relative_to(root)
        if _STDLIB_LEFT_OUT.isdisjoint(name.parts) and not name.name.startswith("_sysconfigdata"):
            try:
                yield Record(name.as_posix(), {"text": path.read_bytes().decode("utf-8")})
            except (UnicodeDecodeError, OSError):
                continue  # a few sources declare another encoding


def _last_break(data: bytes) -> int:
    """Behind the last line end, else behind the last whole character."""
    return data.rfind(b"\n") + 1 or _whole_characters(data)


def _whole_characters(data: bytes) -> int:
    decoder = codecs.getincrementaldecoder("utf-8")("ignore")
    decoder.decode(data)
    return len(data) - len(decoder.getstate()[0])
