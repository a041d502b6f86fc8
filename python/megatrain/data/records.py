"""What a data file is read as: records with the place they stand at, and places where nothing could be read."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any


class DataError(ValueError):
    """The data cannot be used as asked for; one line that says where and why."""


class BadValueError(ValueError):
    """A record that cannot be used, told without its place, which the caller knows."""


@dataclass(frozen=True, slots=True)
class Record:
    where: str
    """File and line, or file and row: "chats.jsonl:7"."""
    value: dict[str, Any]


@dataclass(frozen=True, slots=True)
class BadRecord:
    where: str
    why: str

    def __str__(self) -> str:
        return f"{self.where}: {self.why}"


Read = Iterator[Record | BadRecord]
