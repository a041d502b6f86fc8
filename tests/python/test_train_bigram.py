"""The byte bigram against counting by hand, and bits per byte against sums by hand."""

import itertools
import math
from collections import Counter
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("pydantic")
from megatrain.train.bigram import ByteBigram
from megatrain.train.config import TokenizerSettings
from megatrain.train.evaluate import bits_per_byte
from megatrain.train.text import Document
from megatrain.train.tokenizer import train_tokenizer

TRAINING = [Document("a", "abracadabra\n"), Document("b", "naïve"), Document("c", "")]
HELD_OUT = [Document("d", "cab\n"), Document("e", "zoë")]


def _pairs(document: Document) -> list[tuple[int, int]]:
    symbols = [256, *document.text.encode(), 256]
    return list(itertools.pairwise(symbols))


def _probability(before: int, after: int) -> float:
    pairs = Counter(pair for document in TRAINING for pair in _pairs(document))
    total = sum(pairs.values())
    single = (sum(n for (_, b), n in pairs.items() if b == after) + 1) / (total + 257)
    of_before = {b: n for (a, b), n in pairs.items() if a == before}
    distinct = max(len(of_before), 1)
    return (of_before.get(after, 0) + distinct * single) / (sum(of_before.values()) + distinct)


def test_probabilities_equal_counting() -> None:
    probabilities = ByteBigram(TRAINING).probabilities
    for before in (256, ord("a"), ord("b"), 0xC3, 0):
        for after in (256, ord("a"), ord("r"), 0xAF, 7):
            assert probabilities[before, after] == pytest.approx(_probability(before, after), rel=1e-12)
    assert probabilities.sum(axis=1) == pytest.approx(1.0, rel=1e-12)


def test_bits_per_byte_of_the_bigram() -> None:
    bits = -sum(math.log2(_probability(*pair)) for document in HELD_OUT for pair in _pairs(document))
    assert ByteBigram(TRAINING).bits_per_byte(HELD_OUT) == pytest.approx(bits / 8, rel=1e-12)


def test_bits_of_two_letters_by_hand() -> None:
    # Trained on "aa": boundary-a, a-a, a-boundary. P(a) = 3/260, P(boundary) = 2/260, d(a) = 2,
    # d(boundary) = 1. For "a": P(a | boundary) = (1 + 3/260) / 2, P(boundary | a) = (1 + 4/260) / 4.
    model = ByteBigram([Document("a", "aa")])
    expected = -math.log2((1 + 3 / 260) / 2) - math.log2((1 + 4 / 260) / 4)
    assert model.bits_per_byte([Document("b", "a")]) == pytest.approx(expected, rel=1e-12)


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


@pytest.mark.parametrize("context", [0, 3])
@pytest.mark.parametrize("kind", ["bytes", "bpe"])
def test_bits_per_byte_counts_every_token_once(kind: str, context: int) -> None:
    documents = [Document("1", "größer als klein\n" * 3), Document("2", "x")]
    tokenizer = train_tokenizer(TokenizerSettings(type=kind, vocab_size=270), documents)  # type: ignore[arg-type]
    price = torch.rand(tokenizer.size, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    nats = sum(float(price[[*tokenizer.encode(d.text), tokenizer.end]].sum()) for d in documents)
    model: Any = _TableModel(price)
    measured = bits_per_byte(model, tokenizer, documents, sequence_length=8, context=context, micro_batch=3)
    size = sum(len(document.text.encode()) for document in documents)
    assert measured == pytest.approx(nats / math.log(2) / size, rel=1e-12)


def test_a_uniform_model_by_hand() -> None:
    tokenizer = train_tokenizer(TokenizerSettings(type="bytes"), TRAINING)
    model: Any = _TableModel(torch.full((257,), math.log(257), dtype=torch.float64))
    # "abc" and its end: four targets of log2(257) bits over three bytes.
    measured = bits_per_byte(
        model, tokenizer, [Document("1", "abc")], sequence_length=16, context=0, micro_batch=1
    )
    assert measured == pytest.approx(4 * math.log2(257) / 3, rel=1e-12)
