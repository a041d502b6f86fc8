"""JSON lines, JSON arrays and CSV, read record by record with their line numbers, in memory of one record."""

from __future__ import annotations

import csv
import gzip
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

from .records import BadRecord, DataError, Read, Record

LARGEST_ENTRY = 64 << 20
"""Characters of one entry of a JSON array: where none ends, the search for its end stops."""
_CHUNK = 1 << 20
_SPACE = re.compile(r"\s*")


def open_bytes(path: Path) -> IO[bytes]:
    return gzip.open(path, "rb") if path.suffix == ".gz" else path.open("rb")  # type: ignore[return-value]


def read_jsonl(path: Path) -> Read:
    """An object a line; empty lines are nothing."""
    with open_bytes(path) as file:
        for number, line in enumerate(file, start=1):
            if line.strip():
                where = f"{path}:{number}"
                try:
                    yield _object(json.loads(line.decode("utf-8-sig" if number == 1 else "utf-8")), where)
                except UnicodeDecodeError:
                    yield BadRecord(where, "not UTF-8 text")
                except (json.JSONDecodeError, RecursionError) as error:
                    yield BadRecord(where, f"not JSON: {_first_line(error)}")


def read_json(path: Path) -> Read:
    """An array of objects, or the same as JSON lines, which many files of this name hold."""
    first = _first_text_line(path)
    if first.startswith(b"["):
        yield from _read_array(path)
    elif not first or (first.startswith(b"{") and _is_json(first)):
        yield from read_jsonl(path)
    else:
        yield BadRecord(f"{path}:1", "should hold an array of objects, or an object a line")


def read_csv(path: Path) -> Read:
    """Rows under a header; tab-separated where the name ends in .tsv. Fields may span lines."""
    csv.field_size_limit(LARGEST_ENTRY)  # of the process; 128 KiB, the default, is short for a document
    delimiter = "\t" if ".tsv" in path.suffixes else ","
    with open_bytes(path) as file:
        reader = csv.reader(_decoded(file), delimiter=delimiter, strict=True)
        header: list[str] | None = None
        while True:
            where = f"{path}:{reader.line_num + 1}"
            try:
                row = next(reader)
            except StopIteration:
                return
            except csv.Error as error:
                yield BadRecord(where, f"not CSV: {error}")
                continue
            if not row:
                continue
            if any("\udc80" <= character <= "\udcff" for field in row for character in field):
                yield BadRecord(where, "not UTF-8 text")
            elif header is None:
                if len(set(row)) < len(row):
                    raise DataError(f"{where}: a column name stands twice in {', '.join(row)}")
                header = row
            elif len(row) != len(header):
                yield BadRecord(where, f"{len(row)} fields, but the header has {len(header)}")
            else:
                yield Record(where, dict(zip(header, row, strict=True)))


def _read_array(path: Path) -> Read:
    """Entry by entry. What is not JSON ends the file, since nobody knows where the next entry begins."""
    decoder = json.JSONDecoder()
    entries = _Buffer(path)
    try:
        entries.skip("[")
        first = True
        while True:
            entries.skip_space()
            if entries.peek() == "]" and first:
                break
            where = entries.where()
            yield _object(entries.take(decoder), where)
            first = False
            entries.skip_space()
            if entries.peek() == "]":
                break
            entries.skip(",")
        entries.skip("]")
        entries.skip_space()
        if entries.peek():
            yield BadRecord(entries.where(), "not JSON: something stands behind the array")
    except UnicodeDecodeError:
        yield BadRecord(entries.where(), "not UTF-8 text")
    except (json.JSONDecodeError, RecursionError) as error:
        yield BadRecord(entries.where(), f"not JSON: {_first_line(error)}; what follows was not read")


class _Buffer:
    """A window of a JSON file that grows until it holds the next entry."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._blocks = self._read()
        self._text = ""
        self._at = 0
        self._line = 1

    def _read(self) -> Iterator[str]:
        import codecs

        with open_bytes(self._path) as file:
            yield from codecs.iterdecode(iter(lambda: file.read(_CHUNK), b""), "utf-8-sig")

    def where(self) -> str:
        return f"{self._path}:{self._line}"

    def _more(self, least: int = 1) -> bool:
        """At least that many characters more, if there are any."""
        got = []
        for block in self._blocks:
            got.append(block)
            least -= len(block)
            if least <= 0:
                break
        self._text = self._text[self._at :] + "".join(got)
        self._at = 0
        return bool(got)

    def _advance(self, to: int) -> None:
        self._line += self._text.count("\n", self._at, to)
        self._at = to

    def skip_space(self) -> None:
        while True:
            self._advance(_SPACE.match(self._text, self._at).end())  # type: ignore[union-attr]
            if self._at < len(self._text) or not self._more():
                return

    def peek(self) -> str:
        """ "" at the end."""
        return self._text[self._at : self._at + 1]

    def skip(self, character: str) -> None:
        self.skip_space()
        if self.peek() != character:
            found = repr(self.peek()) if self.peek() else "the end of the file"
            raise json.JSONDecodeError(f"expected {character!r}, got {found}", "", 0)
        self._advance(self._at + 1)

    def take(self, decoder: json.JSONDecoder) -> Any:
        while True:
            try:
                value, end = decoder.raw_decode(self._text, self._at)
            except json.JSONDecodeError:
                held = len(self._text) - self._at
                if held > LARGEST_ENTRY or not self._more(held):
                    raise
                continue
            # A number at the very end of the window might go on in the next.
            if end == len(self._text) and self._more():
                continue
            self._advance(end)
            return value


def _decoded(file: IO[bytes]) -> Iterator[str]:
    """Lines; bytes that are no UTF-8 become lone surrogates, so that only their record is lost."""
    for number, line in enumerate(file):
        yield line.decode("utf-8-sig" if number == 0 else "utf-8", errors="surrogateescape")


def _object(value: Any, where: str) -> Record | BadRecord:
    if isinstance(value, dict):
        return Record(where, value)
    return BadRecord(where, f"should be an object, got {type(value).__name__}")


def _first_text_line(path: Path) -> bytes:
    """Of a file that begins with an array, its beginning only: an array may be one line."""
    with open_bytes(path) as file:
        while data := file.readline(_CHUNK):
            data = data.removeprefix(b"\xef\xbb\xbf").lstrip()
            if data:
                whole = data.startswith(b"[") or data.endswith(b"\n")
                return data if whole else data + file.readline(LARGEST_ENTRY)
    return b""


def _is_json(text: bytes) -> bool:
    try:
        json.loads(text)
    except (ValueError, RecursionError):
        return False
    return True


def _first_line(error: Exception) -> str:
    return str(error).split("\n", 1)[0]
