"""Rows cover the text; steps draw them by seed."""

import itertools

import pytest
import torch

pytest.importorskip("pydantic")
from megatrain.train.config import BatchSettings
from megatrain.train.data import Rows, in_order, training_steps
from megatrain.train.tokenizer import TokenStream


def _stream(tokens: int, unlabelled: tuple[int, ...] = ()) -> TokenStream:
    ids = torch.arange(1000, 1000 + tokens)
    labels = ids.clone()
    labels[[0, *unlabelled]] = -100
    return TokenStream(ids, labels)


@pytest.mark.parametrize("context", [0, 1, 2, 6])
@pytest.mark.parametrize("tokens", [2, 6, 7, 8, 13, 14, 15, 50])
def test_every_target_is_one_target_of_one_row(tokens: int, context: int) -> None:
    unlabelled = tuple(i for i in (3, 9) if i < tokens)
    rows = Rows(_stream(tokens, unlabelled), length=7, context=context)
    seen = []
    for index in range(len(rows)):
        row = rows.row(index)
        assert len(row["input_ids"]) == len(row["labels"]) == min(7, tokens)
        targets = row["labels"][1:]
        assert row["labels"][0] == -100
        assert torch.equal(targets[targets != -100], row["input_ids"][1:][targets != -100])
        seen += targets[targets != -100].tolist()
        if index:
            assert int((row["labels"] == -100).sum()) >= max(1, context)
    expected = set(range(1001, 1000 + tokens)) - {1000 + i for i in unlabelled}
    assert sorted(seen) == sorted(expected)


def test_limits_of_rows() -> None:
    with pytest.raises(ValueError, match="rows of 7"):
        Rows(_stream(1), length=7)
    with pytest.raises(ValueError, match="context 7"):
        Rows(_stream(20), length=7, context=7)


def test_in_order_yields_every_row_once() -> None:
    rows = Rows(_stream(50), length=7)
    batches = list(in_order(rows, 4))
    assert [len(batch["input_ids"]) for batch in batches] == [4, 4, 1]
    assert torch.equal(
        torch.cat([batch["labels"] for batch in batches]), rows.batch(list(range(9)))["labels"]
    )


def test_steps_take_every_row_once_a_pass() -> None:
    rows = Rows(_stream(50), length=7)  # 9 rows
    steps = list(training_steps(rows, BatchSettings(micro_batch=3, accumulate=2), 3, seed=5))
    assert [len(step) for step in steps] == [2, 2, 2]
    starts = torch.cat([batch["input_ids"][:, 0] for step in steps for batch in step]).tolist()
    every = sorted(int(rows.row(index)["input_ids"][0]) for index in range(9))
    assert sorted(starts[:9]) == sorted(starts[9:]) == every
    assert starts[:9] != starts[9:]


def test_the_order_depends_on_the_seed_alone() -> None:
    rows = Rows(_stream(200), length=7)

    def first(seed: int) -> list[int]:
        steps = training_steps(rows, BatchSettings(micro_batch=8), 3, seed)
        return list(itertools.chain.from_iterable(step[0]["input_ids"][:, 0].tolist() for step in steps))

    assert first(1) == first(1)
    assert first(1) != first(2)


def test_a_text_shorter_than_a_batch_is_repeated() -> None:
    rows = Rows(_stream(7), length=7)
    (step,) = training_steps(rows, BatchSettings(micro_batch=4), 1, seed=0)
    assert step[0]["input_ids"].shape == (4, 7)
