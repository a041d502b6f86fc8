"""Finding, reading and splitting the text."""

import json
import sysconfig
from pathlib import Path

import pytest

pytest.importorskip("pydantic")
from megatrain.train.config import PYTHON_STDLIB, DataSettings
from megatrain.train.errors import UserError
from megatrain.train.text import Document, cut, read_documents, split


def _read(path: Path, data: bytes, **keys: object) -> list[Document]:
    path.write_bytes(data)
    return read_documents(DataSettings(path=str(path), **keys), seed=0)  # type: ignore[arg-type]


def test_a_text_file_is_one_document_as_it_stands(tmp_path: Path) -> None:
    text = "line\r\nnaïve 🙂\n\n"
    assert _read(tmp_path / "a.txt", text.encode()) == [Document("a.txt", text)]


def test_jsonl_is_a_document_a_line(tmp_path: Path) -> None:
    lines = [json.dumps({"text": text, "id": 3}) for text in ("one\ntwo", "", "größer")]
    documents = _read(tmp_path / "a.jsonl", "\n\n".join(lines).encode())
    assert documents == [Document("a.jsonl:1", "one\ntwo"), Document("a.jsonl:5", "größer")]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (b'{"text": "a"', "a.jsonl:2: not JSON: "),
        (b"[" * 100_000, "a.jsonl:2: not JSON: "),
        (b'["text"]', 'a.jsonl:2: should be an object with a "text" key'),
        (b'{"Text": "a"}', 'a.jsonl:2: should be an object with a "text" key'),
        (b'{"text": 5}', 'a.jsonl:2: "text" should be a string, got int'),
        (b'{"text": "\\ud800"}', 'a.jsonl:2: "text" holds half of a surrogate pair'),
        (b'{"text": "\xe9"}', "a.jsonl:2: not UTF-8 text"),
    ],
)
def test_a_bad_line_is_named(tmp_path: Path, line: bytes, message: str) -> None:
    with pytest.raises(UserError) as raised:
        _read(tmp_path / "a.jsonl", b'{"text": "fine"}\n' + line + b"\n")
    assert message in str(raised.value)


def test_a_file_that_cannot_be_used(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no such file"):
        read_documents(DataSettings(path=str(tmp_path / "absent.txt")), seed=0)
    with pytest.raises(UserError, match="is a directory"):
        read_documents(DataSettings(path=str(tmp_path)), seed=0)
    for name, data in (("a.txt", b""), ("a.jsonl", b"\n \n"), ("b.jsonl", b'{"text": ""}')):
        with pytest.raises(UserError, match="holds no text"):
            _read(tmp_path / name, data)
    with pytest.raises(UserError, match=r"a.txt:2: not UTF-8 text \(byte 4\)"):
        _read(tmp_path / "a.txt", b"ab\nc\xff\n")


def test_the_standard_library() -> None:
    documents = read_documents(DataSettings(path=PYTHON_STDLIB), seed=0)
    names = [document.name for document in documents]
    assert names == sorted(names, key=lambda name: Path(name).parts)
    assert "argparse.py" in names
    assert not any(
        part in name.split("/") for name in names for part in ("test", "site-packages", "encodings")
    )
    root = Path(sysconfig.get_path("stdlib"))
    assert documents[0].text == (root / names[0]).read_bytes().decode()
    capped = read_documents(DataSettings(path=PYTHON_STDLIB, max_bytes=300_000), seed=0)
    assert 200_000 < sum(document.nbytes for document in capped) <= 300_000
    assert len({document.name[0] for document in capped}) > 3  # not only the first of the alphabet


def test_cut_keeps_whole_documents_and_shortens_only_the_first() -> None:
    documents = [Document("a", "xx\n"), Document("b", "y" * 9), Document("c", "é")]
    assert [d.name for d in cut(documents, 5)] == ["a", "c"]
    assert cut(documents, 100) == documents
    assert cut([Document("a", "ab\ncd\nef")], 7) == [Document("a", "ab\ncd\n")]
    assert cut([Document("a", "aéé")], 4) == [Document("a", "aé")]
    with pytest.raises(UserError, match="no text left within 1 bytes"):
        cut([Document("a", "é")], 1)


def test_split_parts_documents_by_seed() -> None:
    documents = [Document(str(i), f"{i:04d}" * 25) for i in range(40)]
    training, held_out = split(documents, 0.1, seed=3)
    assert len(held_out) == 4
    assert sorted(training + held_out, key=lambda d: int(d.name)) == documents
    assert split(documents, 0.1, seed=3) == (training, held_out)
    assert split(documents, 0.1, seed=4)[1] != held_out


def test_split_leaves_something_on_both_sides() -> None:
    documents = [Document("a", "x"), Document("b", "y" * 1000)]
    for share in (1e-6, 0.999999):
        training, held_out = split(documents, share, seed=0)
        assert len(training) == len(held_out) == 1


def test_split_of_one_document_cuts_at_a_line() -> None:
    text = "".join(f"line {i}\n" for i in range(100))
    training, held_out = split([Document("a", text)], 0.25, seed=0)
    assert training[0].text + held_out[0].text == text
    assert training[0].text.endswith("\n")
    assert abs(len(held_out[0].text) - 0.25 * len(text)) < 10
    training, held_out = split([Document("a", "no line end here")], 0.25, seed=0)
    assert (training[0].text, held_out[0].text) == ("no line end ", "here")
    with pytest.raises(UserError, match="too short"):
        split([Document("a", "x")], 0.5, seed=0)
