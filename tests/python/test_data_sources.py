"""Reading every kind of file: as it should be, empty, large, and broken."""

from __future__ import annotations

import gzip
import json
import subprocess
import sys
import sysconfig
import tracemalloc
from pathlib import Path
from typing import Any

import pytest

from megatrain.data import BadRecord, DataError, Record, open_source, plain_text
from megatrain.data import lines as lines_module
from megatrain.data.plain_text import FileText, cut_text, read_text_file, text_blocks, text_bytes

ROWS = [{"prompt": f"question {i}\n,\"'", "completion": f"größer {i} 🙂"} for i in range(700)]


def read(path: Path | str, **keys: Any) -> list[Record | BadRecord]:
    return list(open_source(str(path), key="data.path", **keys).records())


def values(path: Path | str, **keys: Any) -> list[dict[str, Any]]:
    found = read(path, **keys)
    assert not [record for record in found if isinstance(record, BadRecord)]
    return [record.value for record in found]  # type: ignore[union-attr]


def write(path: Path, data: bytes | str) -> Path:
    path.write_bytes(data.encode() if isinstance(data, str) else data)
    return path


def csv_text(delimiter: str) -> str:
    import csv
    import io

    text = io.StringIO()
    writer = csv.DictWriter(text, ROWS[0], delimiter=delimiter)
    writer.writeheader()
    writer.writerows(ROWS)
    return text.getvalue()


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("a.jsonl", "\n\n".join(json.dumps(row) for row in ROWS)),
        ("a.ndjson", "\n".join(json.dumps(row, ensure_ascii=False) for row in ROWS) + "\n"),
        ("a.json", json.dumps(ROWS, indent=2)),
        ("b.json", json.dumps(ROWS, ensure_ascii=False)),
        ("c.json", "\n".join(json.dumps(row) for row in ROWS)),
        ("a.csv", csv_text(",")),
        ("a.tsv", csv_text("\t")),
        ("bom.csv", "\ufeff" + csv_text(",")),
        ("bom.jsonl", "\ufeff" + "\n".join(json.dumps(row) for row in ROWS)),
        ("bom.json", "\ufeff" + json.dumps(ROWS)),
    ],
)
def test_lines_of_every_kind(tmp_path: Path, name: str, text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert values(write(tmp_path / name, text)) == ROWS
    packed = tmp_path / f"{name}.gz"
    packed.write_bytes(gzip.compress(text.encode()))
    assert values(packed) == ROWS
    monkeypatch.setattr(lines_module, "_CHUNK", 7)  # every place of an entry falls on a window's end
    assert values(tmp_path / name) == ROWS


def test_tables(tmp_path: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    parquet, feather = pytest.importorskip("pyarrow.parquet"), pytest.importorskip("pyarrow.feather")

    table = pyarrow.Table.from_pylist(ROWS)
    parquet.write_table(table, tmp_path / "a.parquet", row_group_size=100)
    feather.write_feather(table, str(tmp_path / "a.feather"), chunksize=100)
    with pyarrow.ipc.new_stream(str(tmp_path / "a.arrow"), table.schema) as stream:
        stream.write_table(table)
    for name in ("a.parquet", "a.feather", "a.arrow"):
        assert values(tmp_path / name) == ROWS
    assert read(tmp_path / "a.parquet")[699].where == f"{tmp_path / 'a.parquet'}: row 700"
    empty = pyarrow.Table.from_pylist([], schema=table.schema)
    parquet.write_table(empty, tmp_path / "empty.parquet")
    assert read(tmp_path / "empty.parquet") == []
    for name in ("a.parquet", "a.arrow", "a.feather"):
        broken = write(tmp_path / f"broken-{name}", (tmp_path / name).read_bytes()[:300])
        with pytest.raises(DataError, match=f"broken-{name}: "):
            read(broken)


def test_saved_datasets(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    made = datasets.Dataset.from_list(ROWS)
    made.save_to_disk(str(tmp_path / "one"))
    datasets.DatasetDict({"train": made, "test": made.select(range(3))}).save_to_disk(str(tmp_path / "two"))
    assert values(tmp_path / "one") == ROWS
    assert values(tmp_path / "two") == ROWS
    assert values(tmp_path / "two", split="test") == ROWS[:3]
    assert read(tmp_path / "two")[4].where == f"{tmp_path / 'two'}[train]: row 5"
    with pytest.raises(DataError, match="has no split 'validation', only train, test"):
        read(tmp_path / "two", split="validation")


def test_an_id_of_the_hub(monkeypatch: pytest.MonkeyPatch) -> None:
    datasets = pytest.importorskip("datasets")
    asked: list[Any] = []

    def load_dataset(name: str, subset: str | None, split: str) -> Any:
        asked.append((name, subset, split))
        if name == "someone/absent":
            raise FileNotFoundError("no such dataset")
        return datasets.Dataset.from_list(ROWS)

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    assert values("someone/chats", subset="en", split="test") == ROWS
    assert asked == [("someone/chats", "en", "test")]
    assert read("someone/chats")[0].where == "someone/chats[train]: row 1"
    with pytest.raises(DataError, match="someone/absent: could not be loaded: no such dataset"):
        read("someone/absent")


@pytest.mark.parametrize(
    ("line", "why"),
    [
        (b'{"text": "a"', "not JSON: "),
        (b"[" * 100_000, "not JSON: "),
        (b'["text"]', "should be an object, got list"),
        (b'{"text": "\xe9"}', "not UTF-8 text"),
    ],
)
def test_a_bad_line_is_named_and_the_next_one_read(tmp_path: Path, line: bytes, why: str) -> None:
    path = write(tmp_path / "a.jsonl", b'{"text": "fine"}\n\n' + line + b'\n{"text": "too"}')
    first, bad, last = read(path)
    assert isinstance(bad, BadRecord)
    assert (bad.where, bad.why[: len(why)]) == (f"{path}:3", why)
    assert (first, last) == (Record(f"{path}:1", {"text": "fine"}), Record(f"{path}:4", {"text": "too"}))


def test_a_bad_row_of_csv_is_named(tmp_path: Path) -> None:
    text = b'text,id\n"two\nlines",1\nshort\ncaf\xe9,3\n"quo"te,4\nlast,5\n'
    path = write(tmp_path / "a.csv", text)
    assert [str(record) if isinstance(record, BadRecord) else record.value["id"] for record in read(path)] == [
        "1",
        f"{path}:4: 1 fields, but the header has 2",
        f"{path}:5: not UTF-8 text",
        f"{path}:6: not CSV: ',' expected after '\"'",
        "5",
    ]
    path = write(tmp_path / "open.csv", 'text\n"never closed\n')
    assert [str(record) for record in read(path)] == [f"{path}:2: not CSV: unexpected end of data"]
    with pytest.raises(DataError, match=r"a.csv:1: a column name stands twice in a, a"):
        read(write(tmp_path / "a.csv", "a,a\n"))
    long = write(tmp_path / "long.csv", "text\n" + "x" * 1_000_000 + "\n")
    assert len(values(long)[0]["text"]) == 1_000_000


@pytest.mark.parametrize(
    ("text", "line", "why"),
    [
        ('[\n{"a": 1},\n{"a": }\n]', 3, "not JSON: "),
        ('[\n{"a": 1},\n{"a": 2}', 3, "not JSON: expected ',', got the end of the file"),
        ('[{"a": 1} {"a": 2}]', 1, "not JSON: expected ',', got '{'"),
        ('[{"a": 1},]', 1, "not JSON: "),
        ('[{"a": 1}]\n{}', 2, "not JSON: something stands behind the array"),
        ('{\n"data": []}', 1, "should hold an array of objects, or an object a line"),
        ('"text"', 1, "should hold an array of objects, or an object a line"),
        (b'[{"a": 1},\n{"a": "\xe9"}]', 1, "not UTF-8 text"),
    ],
)
def test_what_is_wrong_in_an_array(tmp_path: Path, text: str | bytes, line: int, why: str) -> None:
    path = write(tmp_path / "a.json", text)
    bad = read(path)[-1]
    assert isinstance(bad, BadRecord)
    assert (bad.where, bad.why[: len(why)]) == (f"{path}:{line}", why)


def test_an_entry_of_another_type_is_one_bad_entry(tmp_path: Path) -> None:
    path = write(tmp_path / "a.json", '[{"a": 1}, 12,\n{"a": 2}]')
    assert read(path)[1] == BadRecord(f"{path}:1", "should be an object, got int")
    assert len(read(path)) == 3


@pytest.mark.parametrize("name", ["a.jsonl", "a.json", "a.csv"])
def test_an_empty_file_holds_nothing(tmp_path: Path, name: str) -> None:
    assert read(write(tmp_path / name, "")) == []
    assert read(write(tmp_path / "array.json", " [ ] ")) == []


def test_a_text_file_is_one_document_as_it_stands(tmp_path: Path) -> None:
    text = "line\r\nnaïve 🙂\n\n"
    for name in ("a.txt", "a.md", "a.py", "without"):
        (record,) = values(write(tmp_path / name, text))
        assert "".join(text_blocks(record["text"])) == text
        assert text_bytes(record["text"]) == len(text.encode())
    (record,) = values(write(tmp_path / "empty.txt", ""))
    assert list(text_blocks(record["text"])) == []


@pytest.mark.parametrize("block", [4, 5, 8, 1 << 20])
def test_blocks_join_to_the_text(tmp_path: Path, block: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plain_text, "BLOCK_BYTES", block)
    text = "ab🙂c\n\nlonger than a block\nö" * 9 + "🙂" * 30
    path = write(tmp_path / "a.txt", text)
    whole = values(path)[0]["text"]
    assert "".join(whole.blocks()) == text
    for at in range(0, len(text.encode()) + 3, 7):
        for made in (whole, text):
            before, after = cut_text(made, at)
            joined = "".join(text_blocks(before)), "".join(text_blocks(after))
            assert "".join(joined) == text
            assert len(joined[0].encode()) <= at
            assert joined[0].endswith("\n") or "\n" not in joined[0]
    bad = write(tmp_path / "bad.txt", "a\n" * 50 + "ö\n")
    bad.write_bytes(bad.read_bytes()[:-2] + b"\n")
    assert read(bad) == [BadRecord(f"{bad}:51", "not UTF-8 text (byte 100)")]
    assert read(write(tmp_path / "cut.txt", b"ok\nab\xf0\x9f"))[0] == BadRecord(
        f"{tmp_path / 'cut.txt'}:2", "not UTF-8 text (byte 5)"
    )


def test_files_directories_and_patterns(tmp_path: Path) -> None:
    (tmp_path / "deep").mkdir()
    for name in ("b.jsonl", "a.jsonl", "deep/c.jsonl", "notes.log"):
        write(tmp_path / name, json.dumps({"text": name}) + "\n")
    assert [value["text"] for value in values(tmp_path)] == ["a.jsonl", "b.jsonl", "deep/c.jsonl"]
    assert [value["text"] for value in values(f"{tmp_path}/**/*.jsonl")] == ["a.jsonl", "b.jsonl", "deep/c.jsonl"]
    several = open_source([str(tmp_path / "b.jsonl"), str(tmp_path / "a.jsonl")], key="data.path")
    assert [record.value["text"] for record in several.records()] == ["b.jsonl", "a.jsonl"]  # type: ignore[union-attr]
    write(tmp_path / "README.md", "about the records")
    (tmp_path / ".cache").mkdir()
    write(tmp_path / ".cache" / "old.jsonl", "{}")
    assert len(values(tmp_path)) == 3
    (tmp_path / "texts").mkdir()
    write(tmp_path / "texts" / "one.md", "one")
    assert len(values(tmp_path / "texts")) == 1
    (tmp_path / "bare").mkdir()
    for path, message in (
        (tmp_path / "absent.txt", "absent.txt: no such file"),
        (tmp_path / "absent.jsonl.gz", "no such file"),
        (tmp_path / "bare", "is a directory without data files"),
        (f"{tmp_path}/*.csv", "matches no file"),
    ):
        with pytest.raises(DataError, match=f"^data.path .*{message}"):
            read(path)
    cut = gzip.compress(b'{"text": "a"}\n' * 999)[:40]
    with pytest.raises(DataError, match=r"cut.jsonl.gz: Compressed file ended"):
        read(write(tmp_path / "cut.jsonl.gz", cut))
    with pytest.raises(DataError, match=r"no.jsonl.gz: Not a gzipped file"):
        read(write(tmp_path / "no.jsonl.gz", "{}"))
    with pytest.raises(DataError, match=r"only .jsonl, .ndjson, .json, .csv, .tsv may be compressed"):
        read(write(tmp_path / "a.txt.gz", gzip.compress(b"a")))


def test_the_standard_library() -> None:
    records = read("python-stdlib")
    names = [record.where for record in records]
    assert names == sorted(names, key=lambda name: Path(name).parts)
    assert "argparse.py" in names
    assert not any(part in name.split("/") for name in names for part in ("test", "site-packages", "encodings"))
    root = Path(sysconfig.get_path("stdlib"))
    assert records[0].value["text"] == (root / names[0]).read_bytes().decode()  # type: ignore[union-attr]


def test_files_are_streamed(tmp_path: Path) -> None:
    """A file of 24 MB is read in a few: what is held does not grow with the file."""
    row = json.dumps({"text": "x" * 1000})
    write(tmp_path / "a.jsonl", (row + "\n") * 24_000)
    write(tmp_path / "a.json", "[" + ",\n".join([row] * 24_000) + "]")
    write(tmp_path / "a.csv", "text\n" + ("x" * 1000 + "\n") * 24_000)
    write(tmp_path / "a.txt", ("x" * 1000 + "\n") * 24_000)
    for name in ("a.jsonl", "a.json", "a.csv", "a.txt"):
        tracemalloc.start()
        count = 0
        for record in open_source(str(tmp_path / name), key="data.path").records():
            count += sum(len(block) for block in text_blocks(record.value["text"]))  # type: ignore[union-attr]
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert count >= 24_000_000
        assert peak < 8_000_000, name


def test_tables_are_streamed(tmp_path: Path) -> None:
    """Of tables of 12 MB what Python and Arrow hold does not grow with them."""
    pyarrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    feather, datasets = pytest.importorskip("pyarrow.feather"), pytest.importorskip("datasets")
    rows = 12_000

    def make() -> None:
        table = pyarrow.table({"text": [f"{i:06d}" + "x" * 1000 for i in range(rows)]})
        parquet.write_table(table, tmp_path / "a.parquet", row_group_size=rows // 8, compression="none")
        feather.write_feather(table, str(tmp_path / "a.feather"), chunksize=rows // 8, compression="uncompressed")
        datasets.Dataset(table).save_to_disk(str(tmp_path / "saved"))

    make()
    for name, allowed in (("a.parquet", 6_000_000), ("a.feather", 2_000_000), ("saved", 2_000_000)):
        before = pyarrow.total_allocated_bytes()
        tracemalloc.start()
        count = most = 0
        for record in open_source(str(tmp_path / name), key="data.path").records():
            count += len(record.value["text"])  # type: ignore[index]
            most = max(most, pyarrow.total_allocated_bytes() - before)
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert count == rows * 1006
        assert peak < 4_000_000, name
        assert most < allowed, (name, most)


def test_a_file_text_is_small_to_send(tmp_path: Path) -> None:
    import pickle

    text = FileText(write(tmp_path / "a.txt", "x" * 100_000), 0, 100_000)
    assert len(pickle.dumps(text)) < 1000


@pytest.mark.parametrize(
    ("name", "library"), [("a.parquet", "pyarrow"), ("a.arrow", "pyarrow"), ("someone/chats", "datasets")]
)
def test_a_missing_library_is_one_clear_error(tmp_path: Path, name: str, library: str) -> None:
    (tmp_path / "a.parquet").touch()
    (tmp_path / "a.arrow").touch()
    code = (
        "import sys; sys.modules['pyarrow'] = sys.modules['datasets'] = None\n"
        "from megatrain.data import open_source, DataError\n"
        f"try: list(open_source({name!r}, key='data.path').records())\n"
        "except DataError as error: print(error)"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=True)
    assert f'needs {library}, which is not installed; run: pip install "megatrain[data]"' in done.stdout


def test_a_byte_order_mark_is_no_text(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_text("one\n\ufefftwo\n", encoding="utf-8-sig")
    (record,) = read_text_file(path)
    assert isinstance(record, Record)
    text = record.value["text"]
    assert "".join(text_blocks(text)) == "one\n\ufefftwo\n"
    assert text_bytes(text) == len("one\n\ufefftwo\n".encode())
