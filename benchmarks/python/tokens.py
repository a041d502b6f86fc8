"""What benchmarks train on: random tokens, the same in each step, or bytes of real text, other ones in each step."""

from __future__ import annotations

import sysconfig
from collections.abc import Iterator
from pathlib import Path

import torch


def random_steps(shape: tuple[int, int, int]) -> Iterator[torch.Tensor]:
    """Tokens of a step [micro-batches, rows, length], again and again: what is learned of them is which these are."""
    ids = torch.randint(0, 150000, shape, generator=torch.Generator().manual_seed(1))
    while True:
        yield ids


def text_steps(shape: tuple[int, int, int]) -> Iterator[torch.Tensor]:
    """The same of the sources of Python's standard library, a byte a token, one file after the other. A step's loss is
    one on text that has not been seen. ValueError where there is less of it."""
    count = shape[0] * shape[1] * shape[2]
    left = bytearray()
    for path in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")):
        left += path.read_bytes()
        while len(left) >= count:
            yield torch.frombuffer(left[:count], dtype=torch.uint8).long().view(shape)
            del left[:count]
    raise ValueError(f"there is no text for another step of {count} tokens")
