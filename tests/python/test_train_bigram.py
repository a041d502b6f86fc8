"""The byte bigram against counting by hand, and bits per byte against sums by hand."""

import itertools
import json
import math
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("pydantic")
from megatrain.train.bigram import ByteBigram
from megatrain.train.config import TokenizerSettings
from megatrain.train.config_file import check
from megatrain.train.evaluate import evaluate
from megatrain.train.prepare import prepare

TRAINING = ["abracadabra\n", "naïve", ""]
HELD_OUT = ["cab\n", "zoë"]


def _blocks(documents: list[str]) -> list[list[str]]:
    """Cut anywhere: a document comes in blocks."""
    return [[document[:2], document[2:]] for document in documents]


def _pairs(document: str) -> list[tuple[int, int]]:
    symbols = [256, *document.encode(), 256]
    return list(itertools.pairwise(symbols))


def _probability(before: int, after: int) -> float:
    pairs = Counter(pair for document in TRAINING for pair in _pairs(document))
    total = sum(pairs.values())
    single = (sum(n for (_, b), n in pairs.items() if b == after) + 1) / (total + 257)
    of_before = {b: n for (a, b), n in pairs.items() if a == before}
    distinct = max(len(of_before), 1)
    return (of_before.get(after, 0) + distinct * single) / (sum(of_before.values()) + distinct)


def test_probabilities_equal_counting() -> None:
    probabilities = ByteBigram(_blocks(TRAINING)).probabilities
    for before in (256, ord("a"), ord("b"), 0xC3, 0):
        for after in (256, ord("a"), ord("r"), 0xAF, 7):
            assert probabilities[before, after] == pytest.approx(_probability(before, after), rel=1e-12)
    assert probabilities.sum(axis=1) == pytest.approx(1.0, rel=1e-12)


def test_bits_per_byte_of_the_bigram() -> None:
    bits = -sum(math.log2(_probability(*pair)) for document in HELD_OUT for pair in _pairs(document))
    assert ByteBigram(_blocks(TRAINING)).bits_per_byte(_blocks(HELD_OUT)) == pytest.approx(bits / 8, rel=1e-12)


def test_bits_of_two_letters_by_hand() -> None:
    # Trained on "aa": boundary-a, a-a, a-boundary. P(a) = 3/260, P(boundary) = 2/260, d(a) = 2,
    # d(boundary) = 1. For "a": P(a | boundary) = (1 + 3/260) / 2, P(boundary | a) = (1 + 4/260) / 4.
    model = ByteBigram([["aa"]])
    expected = -math.log2((1 + 3 / 260) / 2) - math.log2((1 + 4 / 260) / 4)
    assert model.bits_per_byte([["a"]]) == pytest.approx(expected, rel=1e-12)


class _TableModel:
    """Charges each target token a price of its own, in nats."""

    def __init__(self, price: torch.Tensor) -> None:
        self.price = price

    def eval(self) -> None:
        pass

    def evaluate(self, batch: dict[str, torch.Tensor]) -> Any:
        targets = batch["labels"][:, 1:]
        counted = targets[targets != -100]
        return SimpleNamespace(loss=float(self.price[counted].mean()), targets=float(len(counted)))


def _held_out(path: Path, lines: list[str], settings: TokenizerSettings, context: int, length: int) -> Any:
    """(tokenizer, what is evaluated on) of a file whose only use is evaluation."""
    (path / "apart.jsonl").write_text("\n".join(json.dumps({"text": text}) for text in lines))
    (path / "text.txt").write_text("something to train on\n" * 9)
    prepared = prepare(
        check(
            {
                "model": {"type": "qwen3", "max_position_embeddings": 64},
                "data": {"path": str(path / "text.txt"), "validation": str(path / "apart.jsonl")},
                "tokenizer": settings.model_dump(),
                "sequence_length": length,
                "eval": {"context": context},
                "output": {"directory": str(path / "run")},
                "steps": 1,
            },
            "test",
        )
    )
    return prepared.tokenizer, prepared.held_out


@pytest.mark.parametrize("context", [0, 3])
@pytest.mark.parametrize("kind", ["bytes", "bpe"])
def test_bits_per_byte_counts_every_token_once(kind: str, context: int, tmp_path: Path) -> None:
    texts = ["größer als klein\n" * 3, "x"]
    settings = TokenizerSettings(type=kind, vocab_size=270)  # type: ignore[arg-type]
    tokenizer, held_out = _held_out(tmp_path, texts, settings, context, 8)
    price = torch.rand(tokenizer.size, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    nats = sum(float(price[[*tokenizer.encode(text), tokenizer.end]].sum()) for text in texts)
    tokens = sum(len(tokenizer.encode(text)) + 1 for text in texts)
    model: Any = _TableModel(price)
    found = evaluate(model, held_out, 3)
    size = sum(len(text.encode()) for text in texts)
    assert found["bits_per_byte"] == pytest.approx(nats / math.log(2) / size, rel=1e-12)
    assert found["eval_loss"] == pytest.approx(nats / tokens, rel=1e-12)
    assert found["eval_targets"] == tokens
    assert found["perplexity"] == pytest.approx(math.exp(nats / tokens), rel=1e-12)


def test_a_uniform_model_by_hand(tmp_path: Path) -> None:
    _, held_out = _held_out(tmp_path, ["abc"], TokenizerSettings(type="bytes"), 0, 16)
    model: Any = _TableModel(torch.full((257,), math.log(257), dtype=torch.float64))
    # "abc" and its end: four targets of log2(257) bits over three bytes.
    assert evaluate(model, held_out, 1)["bits_per_byte"] == pytest.approx(4 * math.log2(257) / 3, rel=1e-12)
