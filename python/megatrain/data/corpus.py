"""A source after a first look: every record checked and measured, and its role known."""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field

import numpy as np

from .division import HELD_OUT, TRAIN, Division, divide
from .encode import Encoder
from .pieces import PieceWriter
from .plain_text import FileText, Text, cut_text, text_blocks, text_bytes
from .records import BadRecord, BadValueError, DataError, Record
from .shapes import SHAPES, TextExample, example_bytes, recognise, renamed, strings_of, to_example
from .sources import Source
from .workers import encode_all

_LARGE_TEXT = 8 << 20
"""Bytes from which on a text is encoded in parts."""
_SHOWN = 10


@dataclass
class BadLines:
    """Counts records that cannot be used. policy: "error" or "skip"; `tell` hears of the first ones skipped."""

    policy: str
    tell: Callable[[str], None]
    count: int = 0
    first: BadRecord | None = None

    def add(self, bad: BadRecord) -> None:
        self.count += 1
        self.first = self.first or bad
        if self.policy == "skip" and self.count <= _SHOWN:
            self.tell(f"{bad} (left out)")
        elif self.policy == "skip" and self.count == _SHOWN + 1:
            self.tell("further bad lines are only counted")

    def check(self) -> None:
        """DataError with the first bad line, unless they are skipped."""
        if self.policy == "error" and self.first is not None:
            more = f" ({self.count} bad lines in all)" if self.count > 1 else ""
            raise DataError(f"{self.first}{more}; data.on_bad_line: skip would leave it out")


@dataclass
class Corpus:
    """`texts` and `encode` read the source again."""

    source: Source
    shape: str
    columns: Mapping[str, str]
    sizes: np.ndarray
    bad: BadLines
    division: Division = field(default_factory=lambda: Division(np.zeros(0, np.uint8)))
    halves: tuple[Text, Text] | None = None
    """Of the only document: what is trained on, and what is held out."""

    def divide(self, *, seed: int, held_out: float, max_bytes: int | None, max_held_out_bytes: int | None) -> None:
        sizes = self.sizes
        if self.shape != "text" and max_bytes is not None and len(sizes) and not (sizes <= max_bytes).any():
            raise DataError(f"{self.source.names[0]}: no example within {max_bytes} bytes")
        self.division = divide(
            sizes,
            seed=seed,
            held_out=held_out,
            max_bytes=max_bytes,
            max_held_out_bytes=max_held_out_bytes,
            can_cut=self.shape == "text",
        )
        used = np.flatnonzero(self.division.roles)
        if held_out > 0 and len(used) == 1:
            self._halve(int(used[0]), held_out, max_held_out_bytes)

    def hold_out_all(self, *, seed: int, max_bytes: int | None) -> None:
        """For a source of its own to evaluate on."""
        self.division = divide(
            self.sizes,
            seed=seed,
            held_out=0,
            max_bytes=max_bytes,
            max_held_out_bytes=None,
            can_cut=self.shape == "text",
        )
        self.division.roles[self.division.roles == TRAIN] = HELD_OUT

    def _halve(self, index: int, held_out: float, max_held_out_bytes: int | None) -> None:
        name = self.source.names[0]
        if self.shape != "text":
            raise DataError(f"{name}: one example only; nothing can be held out (data.held_out: 0 holds out nothing)")
        text = self._limited(index, next(example.text for number, example in self._examples() if number == index))
        begin, end = cut_text(text, int(text_bytes(text) * (1 - held_out)))
        if not text_bytes(begin) or not text_bytes(end):
            begin, end = _by_words(text, held_out)
        if not text_bytes(begin) or not text_bytes(end):
            raise DataError(f"{name}: too short to hold out a part of it (data.held_out: 0 holds out nothing)")
        if max_held_out_bytes is not None and text_bytes(end) > max_held_out_bytes:
            end = cut_text(end, max_held_out_bytes)[0]
        self.halves = begin, end

    def count(self, role: int) -> int:
        return 1 if self.halves else int((self.division.roles == role).sum())

    def nbytes(self, role: int) -> int:
        """UTF-8 bytes of the records in this role, as they are used."""
        if self.halves:
            return text_bytes(self.halves[0 if role == TRAIN else 1])
        if self.shape == "text" and self.division.limits:
            return sum(len(block.encode()) for text in self.texts(role) for block in text)
        return int(self.sizes[self.division.roles == role].sum())

    def texts(self, role: int) -> Iterator[Iterator[str]]:
        """Each record's text in blocks; of records that are no texts, their strings."""
        if self.halves:
            yield text_blocks(self.halves[0 if role == TRAIN else 1])
            return
        for number, example in self._examples():
            if self.division.roles[number] == role:
                if isinstance(example, TextExample):
                    yield text_blocks(self._limited(number, example.text))
                else:
                    yield iter(strings_of(example))

    def encode(self, encoder: Encoder, writers: Mapping[int, PieceWriter], *, workers: int) -> None:
        """Each record into the writer of its role. Records of none are not encoded."""
        if self.halves:
            for role, text in zip((TRAIN, HELD_OUT), self.halves, strict=True):
                if role in writers:
                    writers[role].add_parts(encoder.text_parts(text))
            return
        roles: deque[int] = deque()  # of the records on their way
        large: list[tuple[int, FileText]] = []

        def wanted() -> Iterator[Record]:
            for number, record in enumerate(self._records()):
                role = int(self.division.roles[number])
                if role not in writers:
                    continue
                value = renamed(record.value, self.columns)
                if self.shape == "text":
                    text = self._limited(number, value["text"])
                    if isinstance(text, FileText) and text_bytes(text) > _LARGE_TEXT:
                        large.append((role, text))
                        continue
                    record = Record(record.where, {"text": text})
                else:
                    record = Record(record.where, value)
                roles.append(role)
                yield record

        for record, result in encode_all(encoder, wanted(), workers=workers):
            role = roles.popleft()
            try:
                if isinstance(result, BadRecord):
                    raise BadValueError(result.why)
                writers[role].add(result)
            except BadValueError as error:
                self.bad.add(BadRecord(record.where, str(error)))
                self.bad.check()
        for role, text in large:
            writers[role].add_parts(encoder.text_parts(text))

    def _records(self) -> Iterator[Record]:
        """Those that `look` measured, again. DataError if they have become others meanwhile."""
        count = 0
        for record in self.source.records():
            if isinstance(record, Record):
                count += 1
                if count > len(self.sizes):
                    break
                yield record
        if count != len(self.sizes):
            raise DataError(f"{self.source.names[0]}: has changed while it was read")

    def _examples(self) -> Iterator[tuple[int, TextExample]]:
        """Those that have a role, with their numbers."""
        for number, record in enumerate(self._records()):
            if self.division.roles[number]:
                yield number, to_example(renamed(record.value, self.columns), self.shape, chat_template=True)  # type: ignore[misc]

    def _limited(self, number: int, text: Text) -> Text:
        limit = self.division.limits.get(number)
        if limit is None:
            return text
        head = cut_text(text, limit)[0]
        if not text_bytes(head):
            raise DataError(f"{self.source.names[0]}: no text left within {limit} bytes")
        return head


def look(
    source: Source, *, format: str, columns: Mapping[str, str], chat_template: bool, bad: BadLines, key: str
) -> Corpus:
    """Read everything once. `key`: the setting that named the source. format: a name of SHAPES, or "auto" to tell
    it from the first record. Raises DataError if nothing can be used, or for bad lines where they are fatal, then
    with the first and their count."""
    sizes = array("q")
    shape = None if format == "auto" else format
    assert shape is None or shape in SHAPES
    for record in source.records():
        if isinstance(record, BadRecord):
            bad.add(record)
            continue
        value = renamed(record.value, columns)
        size = 0
        try:
            shape = shape or recognise(value, record.where)
            size = example_bytes(to_example(value, shape, chat_template=chat_template))
        except BadValueError as error:
            bad.add(BadRecord(record.where, str(error)))
        sizes.append(size)
    bad.check()
    name = source.names[0] + (f" and {len(source.names) - 1} more" if len(source.names) > 1 else "")
    measured = np.array(sizes, dtype=np.int64)
    if not measured.any():
        what = "no text" if shape in (None, "text") else "no example"
        raise DataError(
            f"{key} {name}: holds {what}" + (f" that can be used; {bad.count} bad lines" if bad.count else "")
        )
    assert shape is not None
    return Corpus(source, shape, columns, measured, bad)


def _by_words(text: Text, held_out: float) -> tuple[Text, Text]:
    """For a text of one line: cut behind a space, else anywhere."""
    whole = "".join(text_blocks(text))
    at = int(len(whole) * (1 - held_out))
    cut = whole.rfind(" ", 0, at) + 1 or at
    return whole[:cut], whole[cut:]
