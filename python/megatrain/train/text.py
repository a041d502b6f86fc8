"""Find and read the text; set documents aside that are never trained on."""

import hashlib
import json
import sysconfig
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from .config import PYTHON_STDLIB, DataSettings
from .errors import UserError

# Installed packages are not the standard library. Tests and the machine-made tables of encodings
# repeat each other across files, so a held-out one would say little.
_STDLIB_LEFT_OUT = {
    "site-packages",
    "dist-packages",
    "test",
    "tests",
    "idle_test",
    "encodings",
    "__pycache__",
}


@dataclass(frozen=True)
class Document:
    name: str
    text: str

    @property
    def nbytes(self) -> int:
        return len(self.text.encode("utf-8"))


def read_documents(settings: DataSettings, seed: int) -> list[Document]:
    """All documents that are not empty, cut to about settings.max_bytes."""
    if settings.path == PYTHON_STDLIB:
        documents = _read_stdlib(Path(sysconfig.get_path("stdlib")))
    else:
        path = Path(settings.path)
        if path.is_dir():
            raise UserError(f"data.path {path}: is a directory; give a text or a .jsonl file")
        if not path.is_file():
            raise UserError(f"data.path {path}: no such file")
        documents = _read_jsonl(path) if path.suffix in (".jsonl", ".ndjson") else [_read_text(path)]
    documents = [document for document in documents if document.text]
    if not documents:
        raise UserError(f"data.path {settings.path}: holds no text")
    return cut(shuffled(documents, seed), settings.max_bytes) if settings.max_bytes else documents


def shuffled(documents: Sequence[Document], seed: int) -> list[Document]:
    """An order that depends on the seed and the names only."""
    return sorted(documents, key=lambda d: hashlib.sha256(f"{seed}/{d.name}".encode()).digest())


def cut(documents: Sequence[Document], max_bytes: int) -> list[Document]:
    """The first documents of at most max_bytes together; the first is shortened if it must be."""
    if documents[0].nbytes > max_bytes:
        head = documents[0].text.encode("utf-8")[:max_bytes].decode("utf-8", errors="ignore")
        line_end = head.rfind("\n") + 1
        head = head[:line_end] if line_end else head
        if not head:
            raise UserError(f"{documents[0].name}: no text left within {max_bytes} bytes")
        return [Document(documents[0].name, head)]
    kept, total = [], 0
    for document in documents:
        if total + document.nbytes <= max_bytes:
            kept.append(document)
            total += document.nbytes
    return kept


def split(documents: Sequence[Document], held_out: float, seed: int) -> tuple[list[Document], list[Document]]:
    """(training, held-out) documents; both hold some text."""
    if len(documents) == 1:
        return _split_one(documents[0], held_out)
    wanted = held_out * sum(document.nbytes for document in documents)
    order = shuffled(documents, seed)
    count, total = 0, 0
    while count < len(order) - 1 and (count == 0 or total + order[count].nbytes <= wanted):
        total += order[count].nbytes
        count += 1
    return order[count:], order[:count]


def _split_one(document: Document, held_out: float) -> tuple[list[Document], list[Document]]:
    at = round(len(document.text) * (1 - held_out))
    line_end = document.text.rfind("\n", 0, at) + 1
    at = min(max(line_end or at, 1), len(document.text) - 1)
    if at < 1:
        raise UserError(f"{document.name}: too short to hold some of it out")
    return [Document(document.name, document.text[:at])], [
        Document(f"{document.name} (end)", document.text[at:])
    ]


def _read_stdlib(root: Path) -> list[Document]:
    documents = []
    for path in sorted(root.rglob("*.py")):
        name = path.relative_to(root)
        if _STDLIB_LEFT_OUT.isdisjoint(name.parts) and not name.name.startswith("_sysconfigdata"):
            try:
                documents.append(Document(name.as_posix(), path.read_bytes().decode("utf-8")))
            except (UnicodeDecodeError, OSError):
                continue  # a few sources declare another encoding
    return documents


def _read_text(path: Path) -> Document:
    data = _read_bytes(path)
    try:
        return Document(path.name, data.decode("utf-8"))
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise UserError(f"{path}:{line}: not UTF-8 text (byte {error.start})") from None


def _read_jsonl(path: Path) -> list[Document]:
    documents = []
    for number, line in enumerate(_read_bytes(path).split(b"\n"), start=1):
        if line.strip():
            documents.append(Document(f"{path.name}:{number}", _text_of_line(line, f"{path}:{number}")))
    return documents


def _text_of_line(line: bytes, where: str) -> str:
    try:
        value = json.loads(line.decode("utf-8"))
    except UnicodeDecodeError:
        raise UserError(f"{where}: not UTF-8 text") from None
    except (json.JSONDecodeError, RecursionError) as error:
        raise UserError(f"{where}: not JSON: {error}") from None
    if not isinstance(value, dict) or "text" not in value:
        raise UserError(f'{where}: should be an object with a "text" key')
    text = value["text"]
    if not isinstance(text, str):
        raise UserError(f'{where}: "text" should be a string, got {type(text).__name__}')
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        raise UserError(f'{where}: "text" holds half of a surrogate pair') from None
    return text


def _read_bytes(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise UserError(f"{path}: {error.strerror or error}") from None
