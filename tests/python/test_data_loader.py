"""The order of steps, whole passes, and an exact position to go on from."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from megatrain.data import DataError, Loader, PaddedRows, PieceWriter, TokenWriter, in_order, pack
from megatrain.data.encode import Encoded
from megatrain.data.loader import Rows


def rows_of(count: int, tmp_path: Path, *, packed: bool, length: int = 8) -> Rows:
    """Documents of 2 to 8 tokens, each of its own number."""
    writer = PieceWriter(TokenWriter(tmp_path), length)
    for number in range(count):
        size = 2 + number % 7
        ids = np.full(size, number + 1, dtype=np.int32)
        writer.add(Encoded(ids, np.arange(size) > 0))
    pieces = writer.finish()
    return pack(pieces, length=length, pad=0, seed=0) if packed else PaddedRows(pieces, length, 0)


def documents(steps: list[list[dict[str, torch.Tensor]]]) -> list[list[int]]:
    """The numbers of the documents of each step, in order."""
    found = []
    for step in steps:
        numbers = []
        for batch in step:
            for row in batch["labels"]:
                learned = row[row != -100].tolist()
                numbers += list(dict.fromkeys(learned))
        found.append(numbers)
    return found


@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize("count", [1, 2, 5, 23])
def test_a_pass_has_every_document_once(packed: bool, count: int, tmp_path: Path) -> None:
    rows = rows_of(count, tmp_path, packed=packed)
    loader = Loader(rows, micro_batch=2, accumulate=2, passes=1)
    steps = list(loader)
    assert len(steps) == loader.steps
    assert sorted(number for step in documents(steps) for number in step) == list(range(1, count + 1))
    assert all(len(step) == 2 for step in steps[:-1])
    assert loader.passes_done == 1
    assert list(loader) == []


@pytest.mark.parametrize("packed", [True, False])
def test_passes_differ_and_seeds_repeat(packed: bool, tmp_path: Path) -> None:
    rows = rows_of(40, tmp_path, packed=packed)
    one, two = (documents(list(Loader(rows, micro_batch=1, passes=2, seed=3))) for _ in range(2))
    assert one == two
    half = len(one) // 2
    assert sorted(map(tuple, one[:half])) == sorted(map(tuple, one[half:])) or not packed
    assert one[:half] != one[half:]
    assert documents(list(Loader(rows, micro_batch=1, passes=2, seed=4))) != one
    assert len(list(Loader(rows, micro_batch=1, passes=0.5))) == round(half / 2)


def test_packed_micro_batches_are_full_across_passes(tmp_path: Path) -> None:
    rows = rows_of(15, tmp_path, packed=True)
    loader = Loader(rows, micro_batch=2)
    for _ in range(20):
        (batch,) = next(loader)
        assert batch["input_ids"].shape == (2, 8)
        assert loader.last_tokens == int((batch["input_ids"] != 0).sum())


def test_padded_micro_batches_hold_about_one_length(tmp_path: Path) -> None:
    rows = rows_of(700, tmp_path, packed=False)
    batches = [batch for step in Loader(rows, micro_batch=10, passes=1) for batch in step]
    padding = sum(int((batch["attention_mask"] == 0).sum()) for batch in batches)
    sizes = [batch["attention_mask"].sum(1) for batch in batches]
    assert sum(int(size.max() - size.min()) > 1 for size in sizes) <= 2  # at a group's end
    assert padding > 0
    lengths = [int(size.max()) for size in sizes]
    assert lengths != sorted(lengths)


@pytest.mark.parametrize("packed", [True, False])
def test_a_position_goes_on_exactly(packed: bool, tmp_path: Path) -> None:
    rows = rows_of(23, tmp_path, packed=packed)
    keys: dict[str, Any] = dict(micro_batch=2, accumulate=2, seed=1)
    whole = Loader(rows, **keys)
    expected = documents([next(whole) for _ in range(30)])
    for stop in (0, 1, 7, 29):
        before = Loader(rows, **keys)
        for _ in range(stop):
            next(before)
        state = json.loads(json.dumps(before.state_dict()))  # plain values
        after = Loader(rows_of(23, tmp_path, packed=packed), **keys)  # as a new process makes it
        after.load_state_dict(state)
        assert documents([next(after) for _ in range(30 - stop)]) == expected[stop:]


def test_a_position_of_other_data_is_refused(tmp_path: Path) -> None:
    state = Loader(rows_of(23, tmp_path, packed=True), micro_batch=2).state_dict()
    for other in (
        Loader(rows_of(24, tmp_path, packed=True), micro_batch=2),
        Loader(rows_of(23, tmp_path, packed=False), micro_batch=2),
        Loader(rows_of(23, tmp_path, packed=True), micro_batch=2, seed=1),
        Loader(rows_of(23, tmp_path, packed=True, length=9), micro_batch=2),
    ):
        with pytest.raises(DataError, match=f"the saved position \\({state['fingerprint']}\\) is of other data"):
            other.load_state_dict(state)
    same = Loader(rows_of(23, tmp_path, packed=True), micro_batch=4, accumulate=3)  # rows are counted
    same.load_state_dict(state)
    with pytest.raises(DataError, match="the saved position is -1"):
        same.load_state_dict({**state, "position": -1})


def test_no_rows_are_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="no row to train on"):
        Loader(rows_of(0, tmp_path, packed=True), micro_batch=1)


@pytest.mark.parametrize("packed", [True, False])
def test_in_order_has_each_row_once(packed: bool, tmp_path: Path) -> None:
    rows = rows_of(23, tmp_path, packed=packed)
    batches = list(in_order(rows, 4))
    assert sum(len(batch["input_ids"]) for batch in batches) == len(rows)
    assert sorted(number for step in documents([batches]) for number in step) == list(range(1, 24))
