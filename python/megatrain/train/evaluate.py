"""Bits per byte of a text that was not trained on."""

import math
from collections.abc import Sequence

import megatrain

from .data import Rows, in_order
from .text import Document
from .tokenizer import TextTokenizer


def bits_per_byte(
    model: megatrain.StreamedModel,
    tokenizer: TextTokenizer,
    documents: Sequence[Document],
    *,
    sequence_length: int,
    context: int,
    micro_batch: int,
) -> float:
    """All nats of the documents' tokens and boundaries, over their UTF-8 bytes, in bits. Comparable
    between tokenizers, since every byte is paid for once."""
    rows = Rows(tokenizer.stream(documents), sequence_length, context)
    model.eval()
    nats = 0.0
    for batch in in_order(rows, micro_batch):
        report = model.evaluate(batch)
        nats += report.loss * report.targets
    return nats / math.log(2) / sum(document.nbytes for document in documents)
