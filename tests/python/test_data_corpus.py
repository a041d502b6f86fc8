"""A source as a whole: checked, measured, divided and encoded, by this process or by workers."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
import tracemalloc
from pathlib import Path
from typing import Any

import chat_templates as templates
import numpy as np
import pytest

import megatrain
from megatrain.data import (
    BadLines,
    Corpus,
    DataError,
    Encoder,
    Pieces,
    PieceWriter,
    TextTokenizer,
    TokenWriter,
    WorkerError,
    look,
    open_source,
)
from megatrain.data import (
    corpus as corpus_module,
)
from megatrain.data.division import ASIDE, HELD_OUT, TRAIN, divide
from megatrain.data.encode import Encoded
from megatrain.data.records import Record
from megatrain.data.workers import encode_all

TOKENIZER = TextTokenizer(templates.byte_level(), begin=None, end=0)
EVERYTHING: dict[str, Any] = dict(seed=0, held_out=0, max_bytes=None, max_held_out_bytes=None)


def jsonl(path: Path, rows: list[Any]) -> Path:
    path.write_text("\n".join(row if isinstance(row, str) else json.dumps(row) for row in rows) + "\n")
    return path


def corpus_of(path: Path, policy: str = "error", told: list[str] | None = None, format: str = "auto") -> Corpus:
    bad = BadLines(policy, (told if told is not None else []).append)
    source = open_source(str(path), key="data.path")
    return look(source, format=format, columns={}, chat_template=True, bad=bad, key="data.path")


def encoded(corpus: Corpus, tmp_path: Path, workers: int = 0, length: int = 64) -> dict[int, Pieces]:
    encoder = Encoder(TOKENIZER, corpus.shape)
    writers = {role: PieceWriter(TokenWriter(tmp_path), length) for role in (TRAIN, HELD_OUT)}
    corpus.encode(encoder, writers, workers=workers)
    return {role: writer.finish() for role, writer in writers.items()}


def texts(pieces: Pieces) -> list[str]:
    return [TOKENIZER.decode(pieces.read(index)[0].tolist()[1:-1]) for index in range(len(pieces))]


# division


def test_records_are_divided_by_seed() -> None:
    sizes = np.full(40, 100)
    division = divide(sizes, seed=3, held_out=0.1, max_bytes=None, max_held_out_bytes=None)
    assert np.bincount(division.roles).tolist() == [0, 36, 4]
    assert (division.roles == divide(sizes, seed=3, held_out=0.1, max_bytes=None, max_held_out_bytes=None).roles).all()
    assert (division.roles != divide(sizes, seed=4, held_out=0.1, max_bytes=None, max_held_out_bytes=None).roles).any()


def test_something_is_left_on_both_sides() -> None:
    for share in (1e-6, 0.999999):
        division = divide(np.array([1, 1000]), seed=0, held_out=share, max_bytes=None, max_held_out_bytes=None)
        assert sorted(division.roles) == [TRAIN, HELD_OUT]
    assert divide(np.array([0, 5]), **EVERYTHING).roles.tolist() == [ASIDE, TRAIN]
    assert divide(np.array([], dtype=np.int64), **EVERYTHING).roles.tolist() == []


def test_bytes_are_limited_in_whole_records() -> None:
    sizes = np.array([10, 7, 3, 50, 9, 1])
    for limit in (1, 9, 25, 1000):
        division = divide(sizes, seed=1, held_out=0, max_bytes=limit, max_held_out_bytes=None)
        used = division.roles == TRAIN
        assert used.any()
        assert sizes[used].sum() <= limit or division.limits
    for seed in range(9):  # a chat cannot be cut: the others are used, if there are any that fit
        roles = divide(
            np.array([100, 100, 7]), seed=seed, held_out=0, max_bytes=9, max_held_out_bytes=None, can_cut=False
        ).roles
        assert roles.tolist() == [ASIDE, ASIDE, TRAIN]
    division = divide(np.full(100, 10), seed=1, held_out=0.5, max_bytes=None, max_held_out_bytes=35)
    assert np.bincount(division.roles).tolist() == [47, 50, 3]  # what is too much to evaluate is not trained on


# looking


def test_the_first_record_tells_the_shape(tmp_path: Path) -> None:
    corpus = corpus_of(jsonl(tmp_path / "a.jsonl", [{"text": "one"}, {"text": ""}, {"text": "größer"}]))
    assert (corpus.shape, corpus.sizes.tolist()) == ("text", [3, 0, 8])
    corpus.divide(**EVERYTHING)
    assert (corpus.count(TRAIN), corpus.nbytes(TRAIN)) == (2, 11)
    assert texts(encoded(corpus, tmp_path)[TRAIN]) == ["one", "größer"]
    with pytest.raises(DataError, match=r"a.jsonl:1: no known shape has the keys Text"):
        corpus_of(jsonl(tmp_path / "a.jsonl", [{"Text": "one"}]))


BAD = [
    {"text": "fine"},
    '{"text": ',
    {"text": 5},
    {"other": "a"},
    "[1]",
    {"text": "fine, too"},
]


def test_bad_lines_are_fatal_with_their_count(tmp_path: Path) -> None:
    path = jsonl(tmp_path / "a.jsonl", BAD)
    with pytest.raises(DataError) as raised:
        corpus_of(path)
    assert f"{path}:2: not JSON" in str(raised.value)
    assert "(4 bad lines in all); data.on_bad_line: skip would leave it out" in str(raised.value)
    path = jsonl(tmp_path / "b.jsonl", BAD[:2])
    with pytest.raises(DataError, match=r"b.jsonl:2: not JSON") as raised:
        corpus_of(path)
    assert "bad lines in all" not in str(raised.value)


def test_bad_lines_are_skipped_reported_and_counted(tmp_path: Path) -> None:
    path = jsonl(tmp_path / "a.jsonl", BAD)
    told: list[str] = []
    corpus = corpus_of(path, "skip", told)
    assert corpus.bad.count == len(told) == 4
    assert [message.split(": ", 1)[0] for message in told] == [f"{path}:{line}" for line in (2, 3, 4, 5)]
    assert told[1] == f'{path}:3: "text" should be a string, got int (left out)'
    corpus.divide(**EVERYTHING)
    assert texts(encoded(corpus, tmp_path)[TRAIN]) == ["fine", "fine, too"]
    told.clear()
    many = corpus_of(jsonl(tmp_path / "a.jsonl", [{"text": "fine"}, *["["] * 100]), "skip", told)
    assert (many.bad.count, len(told), told[-1]) == (100, 11, "further bad lines are only counted")


def test_a_file_that_changes_between_the_looks_is_told(tmp_path: Path) -> None:
    for rows in (1, 3):
        corpus = corpus_of(jsonl(tmp_path / "a.jsonl", [{"text": "a"}] * 2))
        corpus.divide(**EVERYTHING)
        jsonl(tmp_path / "a.jsonl", [{"text": "a"}] * rows)
        with pytest.raises(DataError, match=r"a.jsonl: has changed while it was read"):
            encoded(corpus, tmp_path)


def test_nothing_to_use_is_an_error(tmp_path: Path) -> None:
    for name, text in (("a.txt", ""), ("a.jsonl", "\n \n"), ("b.jsonl", '{"text": ""}')):
        (tmp_path / name).write_text(text)
        with pytest.raises(DataError, match=f"data.path .*{name}: holds no text$"):
            corpus_of(tmp_path / name)
    with pytest.raises(DataError, match="holds no text that can be used; 2 bad lines"):
        corpus_of(jsonl(tmp_path / "a.jsonl", ["[", "["]), "skip")


def test_a_record_that_cannot_be_encoded_is_a_bad_line(tmp_path: Path) -> None:
    chats = [{"messages": [{"role": "user", "content": f"a{i}"}, *answer]} for i, answer in enumerate([
        [{"role": "assistant", "content": "b"}], [], [{"role": "assistant", "content": "c"}],
    ])]  # fmt: skip
    path = jsonl(tmp_path / "a.jsonl", chats)
    tokenizer = templates.with_template(templates.byte_level(), templates.CHATML)
    for policy in ("skip", "error"):
        told: list[str] = []
        corpus = corpus_of(path, policy, told)
        corpus.divide(**EVERYTHING)
        writer = PieceWriter(TokenWriter(tmp_path), 64)
        if policy == "error":
            with pytest.raises(DataError, match=r"a.jsonl:2: no message of the assistant to learn from; data.on_bad"):
                corpus.encode(Encoder(tokenizer, "messages"), {TRAIN: writer}, workers=0)
        else:
            corpus.encode(Encoder(tokenizer, "messages"), {TRAIN: writer}, workers=0)
            assert told == [f"{path}:2: no message of the assistant to learn from (left out)"]
            assert (corpus.bad.count, len(writer.finish())) == (1, 2)


# one document


def test_one_document_is_cut_at_a_line(tmp_path: Path) -> None:
    text = "".join(f"line {i}\n" for i in range(100))
    path = tmp_path / "a.txt"

    def halves(held_out: float, text: str, limit: int | None = None) -> tuple[str, str]:
        path.write_text(text)
        corpus = corpus_of(path)
        corpus.divide(seed=0, held_out=held_out, max_bytes=None, max_held_out_bytes=limit)
        first, second = ("".join(next(corpus.texts(role))) for role in (TRAIN, HELD_OUT))
        assert corpus.nbytes(TRAIN) == len(first.encode())
        return first, second

    first, second = halves(0.25, text)
    assert first + second == text
    assert first.endswith("\n")
    assert abs(len(second) - 0.25 * len(text)) < 10
    assert len(halves(0.25, text, 50)[1]) <= 50
    assert halves(0.25, "no line end here") == ("no line end ", "here")
    with pytest.raises(DataError, match="too short to hold out"):
        halves(0.5, "x")
    chats = corpus_of(jsonl(tmp_path / "b.jsonl", [{"prompt": "a", "completion": "b"}]))
    with pytest.raises(DataError, match="one example only; nothing can be held out"):
        chats.divide(seed=0, held_out=0.2, max_bytes=None, max_held_out_bytes=None)


def test_a_document_larger_than_the_limit_is_shortened(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_text("ab\ncd\nef")
    corpus = corpus_of(path)
    corpus.divide(**{**EVERYTHING, "max_bytes": 7})
    assert texts(encoded(corpus, tmp_path)[TRAIN]) == ["ab\ncd\n"]
    assert corpus.nbytes(TRAIN) == 6
    path.write_text("é")
    corpus = corpus_of(path)
    corpus.divide(**{**EVERYTHING, "max_bytes": 1})
    with pytest.raises(DataError, match="no text left within 1 bytes"):
        encoded(corpus, tmp_path)


def test_a_large_text_is_encoded_in_parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = "".join(f"line {i} of a longer text\n" for i in range(300))
    jsonl(tmp_path / "b.jsonl", [{"text": "short"}])
    (tmp_path / "a.txt").write_text(text)
    source = open_source([str(tmp_path / "a.txt"), str(tmp_path / "b.jsonl")], key="data.path")
    found = []
    for large in (1 << 30, 100):
        monkeypatch.setattr(corpus_module, "_LARGE_TEXT", large)
        bad = BadLines("error", print)
        corpus = look(source, format="auto", columns={}, chat_template=False, bad=bad, key="data.path")
        corpus.divide(**EVERYTHING)
        found.append(encoded(corpus, tmp_path)[TRAIN])
    whole, parts = found
    assert sorted(whole.lengths.tolist()) == sorted(parts.lengths.tolist())
    joined = [pieces.read(0)[0].tolist() for pieces in found]
    assert joined[0] in [parts.read(index)[0].tolist() for index in range(len(parts))]


# workers


def test_workers_give_the_same_in_the_same_order(tmp_path: Path) -> None:
    rows = [{"text": f"document {i} " * (i % 5 + 1)} for i in range(400)]
    rows[200:200] = [{"text": 5}]
    corpus = corpus_of(jsonl(tmp_path / "a.jsonl", rows), "skip")
    corpus.divide(seed=0, held_out=0.1, max_bytes=None, max_held_out_bytes=None)
    alone = encoded(corpus, tmp_path)
    together = encoded(corpus, tmp_path, workers=2)
    for role in (TRAIN, HELD_OUT):
        assert alone[role].store.digest == together[role].store.digest
        assert (alone[role].begins == together[role].begins).all()


class _Dies(Encoder):
    def encode_records(self, records: Any) -> Any:
        os._exit(9)


def test_a_worker_that_dies_or_fails_is_told() -> None:
    records = [Record(f"a:{i}", {"text": "a"}) for i in range(300)]
    with pytest.raises(WorkerError, match="one of 1 data workers ended unexpectedly"):
        list(encode_all(_Dies(TOKENIZER, "text"), iter(records), workers=1))
    chats = [Record("a:1", {"messages": [{"role": "assistant", "content": "b"}]})]
    with pytest.raises(DataError, match="no chat template"):
        list(encode_all(Encoder(TOKENIZER, "messages"), iter(chats), workers=1))


def test_few_records_are_held(tmp_path: Path) -> None:
    """A file of 20 MB in a fraction of it."""
    line = json.dumps({"text": "a " * 500})
    (tmp_path / "a.jsonl").write_text((line + "\n") * 20_000)
    corpus = corpus_of(tmp_path / "a.jsonl")
    corpus.divide(**EVERYTHING)

    class Cheap(Encoder):
        def encode_records(self, records: Any) -> Any:
            return [Encoded(np.zeros(100, np.int32), np.arange(100) > 0) for _ in records]

    writer = PieceWriter(TokenWriter(tmp_path), 64)
    tracemalloc.start()
    corpus.encode(Cheap(TOKENIZER, "text"), {TRAIN: writer}, workers=0)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert len(writer.finish()) == 40_000
    assert peak < 4_000_000


def test_workers_do_not_hold_the_tiles(tmp_path: Path) -> None:
    """Case 42: beside tiles of 512 MiB, all in memory, a worker has its interpreter and libraries only."""
    script = textwrap.dedent(
        """
        import os, sys
        sys.path.insert(0, sys.argv[1])
        import chat_templates as templates
        from megatrain import _native as n
        from megatrain.data import Encoder, Record, TextTokenizer
        from megatrain.data.workers import encode_all

        class Measuring(Encoder):
            def encode_records(self, records):
                import numpy as np
                from megatrain.data.encode import Encoded
                fields = dict(line.split(":") for line in open("/proc/self/smaps_rollup").read().splitlines()[1:])
                own = sum(int(fields[name].split()[0]) for name in ("Private_Dirty", "Shared_Dirty"))
                return [Encoded(np.array([0, own], np.int32), np.array([False, True])) for _ in records]

        if __name__ == "__main__":
            tokenizer = TextTokenizer(templates.byte_level(), begin=None, end=0)
            store = n.TileStore(n.HostBackend(), staging_bytes=1 << 20)
            store.add(n.TileLayout(n.TileFormat.bf16_split, [((512 << 20) // 14, True)]))
            rollup = open("/proc/self/smaps_rollup").read().splitlines()[1:]
            own = int(dict(line.split(":") for line in rollup)["Rss"].split()[0])
            records = [Record(str(i), {"text": "a"}) for i in range(100)]
            kib = [int(r.ids[1]) for _, r in encode_all(Measuring(tokenizer, "text"), iter(records), workers=1)]
            print(own // 1024, max(kib) // 1024)
        """
    )
    (tmp_path / "measure.py").write_text(script)
    done = subprocess.run(
        [sys.executable, str(tmp_path / "measure.py"), str(Path(__file__).parent)],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    whole, worker = (int(value) for value in done.stdout.split())
    assert whole >= 512  # MiB: the tiles are there
    assert worker <= 256


def test_a_store_keeps_ids_and_targets(tmp_path: Path) -> None:
    writer = TokenWriter(tmp_path)
    assert writer.add(Encoded(np.array([5, 2**31 - 1, 0], np.int32), np.array([False, True, True]))) == 0
    assert writer.add(Encoded(np.array([7], np.int32), np.array([True]))) == 3
    store = writer.finish()
    ids, labels = store.read(1, 3)
    assert (ids.tolist(), labels.tolist()) == ([2**31 - 1, 0, 7], [2**31 - 1, 0, 7])
    assert store.read(0, 1)[1].tolist() == [-100]
    assert list(tmp_path.iterdir()) == []  # the file has no name
    assert len(TokenWriter(tmp_path).finish()) == 0


def test_importing_the_data_package_needs_no_extra() -> None:
    code = (
        "import sys\n"
        "for name in ('pydantic', 'yaml', 'rich', 'datasets', 'pyarrow', 'pandas'): sys.modules[name] = None\n"
        "import megatrain.data"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
    assert megatrain.data is not None
