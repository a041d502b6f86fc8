"""Packed rows: full, and equal to separate rows in loss and in every gradient."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import families
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from resident import assert_close

import megatrain
from megatrain.data import PackedRows, PaddedRows, PieceWriter, TokenWriter, pack
from megatrain.data.encode import Encoded
from megatrain.data.isolation import leaks_between_documents
from megatrain.data.pieces import Pieces

PAD = 0


def pieces_of(lengths: list[int], tmp_path: Path, length: int = 16, **keys: Any) -> Pieces:
    """Random documents, a third of whose tokens are no targets."""
    generator = np.random.default_rng(5)
    writer = PieceWriter(TokenWriter(tmp_path), length, **keys)
    for size in lengths:
        targets = generator.random(size) > 0.3
        targets[0], targets[-1] = False, True
        writer.add(Encoded(generator.integers(1, families.VOCABULARY, size).astype(np.int32), targets))
    return writer.finish()


@settings(max_examples=60, deadline=None)
@given(lengths=st.lists(st.integers(2, 16), min_size=1, max_size=60), seed=st.one_of(st.none(), st.integers(0, 9)))
def test_each_piece_is_in_one_row_as_it_is(lengths: list[int], seed: int | None) -> None:
    pieces = pieces_of(lengths, Path("/tmp"))
    rows = pack(pieces, length=16, pad=PAD, seed=seed)
    assert sorted(rows.order.tolist()) == list(range(len(lengths)))
    batch = rows.batch(list(range(len(rows))))
    assert all(tensor.shape == (len(rows), 16) and tensor.dtype == torch.int64 for tensor in batch.values())
    for row in range(len(rows)):
        at = 0
        for piece in rows.order[rows.bounds[row] : rows.bounds[row + 1]]:
            ids, labels = pieces.read(int(piece))
            end = at + len(ids)
            assert batch["input_ids"][row, at:end].tolist() == ids.tolist()
            assert batch["labels"][row, at:end].tolist() == labels.tolist()
            assert labels[0] == -100
            assert batch["position_ids"][row, at:end].tolist() == list(range(len(ids)))
            at = end
        assert at <= 16
        assert (batch["labels"][row, at:] == -100).all()
        assert batch["position_ids"][row, at:].tolist() == list(range(16 - at))
    assert rows.tokens(list(range(len(rows)))) == sum(lengths)


def test_rows_are_filled(tmp_path: Path) -> None:
    generator = np.random.default_rng(0)
    lengths = np.clip(generator.lognormal(3.5, 1, 20_000).astype(int), 2, 256)
    pieces = Pieces(TokenWriter(tmp_path).finish(), np.zeros_like(lengths), lengths, np.ones_like(lengths))
    rows = pack(pieces, length=256, pad=PAD, seed=0)
    assert lengths.sum() / (256 * len(rows)) > 0.995
    again, other = pack(pieces, length=256, pad=PAD, seed=0), pack(pieces, length=256, pad=PAD, seed=1)
    assert (rows.order == again.order).all()
    assert (rows.order != other.order).any()


def test_no_pieces_are_no_rows(tmp_path: Path) -> None:
    assert len(pack(pieces_of([], tmp_path), length=16, pad=PAD, seed=0)) == 0


@pytest.mark.parametrize("context", [0, 1, 2, 6])
@pytest.mark.parametrize("size", [2, 6, 7, 8, 13, 14, 15, 50])
def test_every_target_of_a_long_document_is_one_target_of_one_piece(size: int, context: int, tmp_path: Path) -> None:
    for parts in (1, 3):
        writer = PieceWriter(TokenWriter(tmp_path), 7, "split", context)
        ids = np.arange(100, 100 + size, dtype=np.int32)
        targets = np.ones(size, dtype=bool)
        targets[0] = False
        if parts == 1:
            writer.add(Encoded(ids, targets))
        else:
            writer.add_parts(
                Encoded(*part) for part in zip(np.array_split(ids, 3), np.array_split(targets, 3), strict=True)
            )
        pieces = writer.finish()
        seen: list[int] = []
        for index in range(len(pieces)):
            piece_ids, labels = pieces.read(index)
            assert len(piece_ids) <= 7
            learned = labels != -100
            assert (labels[learned] == piece_ids[learned]).all()
            assert index == 0 or not learned[: max(1, context)].any()
            seen += labels[learned].tolist()
        assert seen == list(range(101, 100 + size))


def test_long_documents_by_choice(tmp_path: Path) -> None:
    def add(too_long: str, targets: list[int], size: int = 9) -> PieceWriter:
        writer = PieceWriter(TokenWriter(tmp_path), 7, too_long)
        marks = np.zeros(size, dtype=bool)
        marks[targets] = True
        writer.add(Encoded(np.arange(size, dtype=np.int32), marks))
        return writer

    made = add("truncate", [3, 8])
    assert (made.truncated, made.skipped, made.finish().lengths.tolist()) == (1, 0, [7])
    made = add("truncate", [8])  # nothing to learn is left
    assert (made.truncated, made.skipped, len(made.finish())) == (0, 1, 0)
    made = add("skip", [3])
    assert (made.truncated, made.skipped, len(made.finish())) == (0, 1, 0)
    assert add("skip", [3], size=7).finish().lengths.tolist() == [7]
    assert add("split", [8]).finish().begins.tolist() == [6]  # the first piece has nothing to learn
    with pytest.raises(ValueError, match="9 tokens, but sequence_length is 7"):
        add("error", [3])
    with pytest.raises(ValueError, match="no token to learn from"):
        add("split", [])
    writer = PieceWriter(TokenWriter(tmp_path), 7, "truncate")
    writer.add_parts(Encoded(np.arange(4, dtype=np.int32), np.arange(4) > 0) for _ in range(1000))
    assert (writer.truncated, len(writer.writer)) == (1, 7)


LENGTHS = [5, 3, 16, 2, 7, 9, 4, 11, 2]
FAMILIES = [family for family in families.FAMILIES if family.name not in ("t5", "vit")]


def separate(module: torch.nn.Module, rows: PaddedRows, device: str = "cpu") -> tuple[float, dict[str, torch.Tensor]]:
    """Mean loss over all targets and its gradients, each document in a forward of its own."""
    module.zero_grad()
    total, targets = torch.zeros((), dtype=torch.float64), 0
    for index in range(len(rows)):
        ids, labels = (torch.from_numpy(values)[None].to(device) for values in rows.pieces.read(index))
        logits = module(input_ids=ids, use_cache=False).logits[:, :-1]
        loss = torch.nn.functional.cross_entropy(
            logits.flatten(0, 1).float(), labels[:, 1:].flatten(), reduction="sum", ignore_index=-100
        )
        loss.backward()
        total += loss.detach().double().cpu()
        targets += int((labels[:, 1:] != -100).sum())
    found = {name: p.grad / targets for name, p in module.named_parameters() if p.grad is not None}
    return float(total) / targets, found


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
def test_packed_rows_equal_separate_rows(family: families.Family, tmp_path: Path) -> None:
    """In transformers itself, with eager attention, too."""
    pieces = pieces_of(LENGTHS, tmp_path)
    rows = pack(pieces, length=16, pad=PAD, seed=0)
    assert len(rows) < len(LENGTHS)
    batch = rows.batch(list(range(len(rows))))
    for attention in ("sdpa", "eager"):
        module = families.build(family)
        module.config._attn_implementation = attention
        loss, expected = separate(module, PaddedRows(pieces, 16, PAD))
        module.zero_grad()
        found = module(**batch, use_cache=False).loss
        found.backward()
        assert float(found.detach()) == pytest.approx(loss, rel=1e-6)
        for name, parameter in module.named_parameters():
            assert parameter.grad is not None
            assert_close(parameter.grad, expected[name], 1e-5, f"{attention} {name}")


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
@pytest.mark.parametrize("packed", [True, False], ids=["packed", "padded"])
def test_a_streamed_model_learns_the_same(
    family: families.Family, packed: bool, device: object, torch_device: str, tmp_path: Path
) -> None:
    """Two micro-batches of rows against every document alone in the resident model."""
    pieces = pieces_of(LENGTHS, tmp_path)
    rows = pack(pieces, length=16, pad=PAD, seed=0) if packed else PaddedRows(pieces, 16, PAD)
    half = len(rows) // 2
    micro_batches = [rows.batch(list(range(half))), rows.batch(list(range(half, len(rows))))]
    loss, expected = separate(families.build(family).to(torch_device), PaddedRows(pieces, 16, PAD), torch_device)
    model = megatrain.StreamedModel(
        families.build(family), device=device, dtype=torch.float32, keep_gradients=True, compile=False
    )
    report = model.step(micro_batches)
    assert report.loss == pytest.approx(loss, rel=1e-5)
    names = {name for name, _ in model.named_parameters()}
    assert names == set(expected)
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None
        assert_close(parameter.grad, expected[name], 1e-5, name)
    evaluated = megatrain.StreamedModel(families.build(family), device=device, dtype=torch.float32, compile=False)
    assert evaluated.evaluate(micro_batches).loss == pytest.approx(loss, rel=1e-5)
    model.close()
    evaluated.close()


def _loss(module: torch.nn.Module, **changes: Any) -> Any:
    """Of a batch, without what `changes` sets to None and with what else it sets."""

    def loss(batch: dict[str, torch.Tensor]) -> float:
        arguments = {key: value for key, value in {**batch, **changes}.items() if value is not None}
        with torch.no_grad():
            return float(module.eval()(**arguments).loss)

    return loss


def leaks(loss: Any, rows: int = 3, length: int = 30) -> str | None:
    return leaks_between_documents(loss, families.VOCABULARY, torch.float32, rows=rows, length=length)


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
def test_models_that_keep_documents_apart_pass(family: families.Family) -> None:
    module = families.build(family)
    assert leaks(_loss(module, use_cache=False)) is None
    assert leaks(_loss(module, use_cache=False), rows=1, length=4) is None
    model = megatrain.StreamedModel(families.build(family), device="cpu", compile=False)
    found = leaks_between_documents(
        lambda batch: model.evaluate(batch).loss, families.VOCABULARY, torch.bfloat16, rows=2, length=24
    )
    assert found is None
    model.close()


def test_models_that_do_not_are_found() -> None:
    module = families.build(FAMILIES[1])
    assert "changes with the text" in str(leaks(_loss(module, position_ids=None, use_cache=False)))
    # With a cache, transformers takes the positions for those of continued text.
    assert "changes with the text" in str(leaks(_loss(module, use_cache=True)))
    gpt2 = families.build(FAMILIES[-1])
    apart = torch.ones(30, 30, dtype=torch.bool).tril()
    apart[12:, :12] = False
    mask = apart.expand(3, 1, 30, 30)
    # Apart, but positions go on.
    found = leaks(_loss(gpt2, position_ids=None, attention_mask=mask, use_cache=False))
    assert "another loss than at the beginning" in str(found)


def test_a_recurrent_model_is_found() -> None:
    """Mamba's state goes over the boundary, whatever the positions say."""
    import transformers

    torch.manual_seed(0)
    config = transformers.MambaConfig(
        hidden_size=32, num_hidden_layers=2, vocab_size=67, state_size=4, pad_token_id=0, use_cache=False
    )
    assert leaks(_loss(transformers.MambaForCausalLM(config), position_ids=None)) is not None


def test_padded_rows(tmp_path: Path) -> None:
    pieces = pieces_of([5, 3, 16, 2], tmp_path)
    rows = PaddedRows(pieces, 16, PAD)
    batch = rows.batch([0, 1])
    assert batch["input_ids"].shape == (2, 8)
    assert batch["attention_mask"].sum(1).tolist() == [5, 3]
    assert (batch["labels"][1, 3:] == -100).all()
    assert rows.batch([2])["input_ids"].shape == (1, 16)
    assert rows.tokens([0, 2]) == 21
    assert isinstance(pack(pieces, length=16, pad=PAD, seed=0), PackedRows)
