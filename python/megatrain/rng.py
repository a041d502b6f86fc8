"""Randomness keyed by (seed, step, micro-batch), and its capture and replay.

Every micro-batch draws from its own sequence, so that dropout does not depend on the order in which
blocks run. A plain-torch reference that calls `torch.manual_seed(seed_for(seed, step, i))` before the
forward of micro-batch i draws the same masks."""

from __future__ import annotations

import hashlib
import random
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch

if TYPE_CHECKING:
    from collections.abc import Iterator


def seed_for(seed: int, step: int, micro_batch: int) -> int:
    """The generator seed of one micro-batch: 63 bits of a hash of the three. Steps count from 0."""
    key = b"".join(value.to_bytes(8, "little", signed=True) for value in (seed, step, micro_batch))
    return int.from_bytes(hashlib.blake2b(key, digest_size=8).digest(), "little") >> 1


def rounding_seed(seed: int, name: str) -> int:
    """The seed of one parameter's stochastic rounding, whose key is (this, the parameter's step, the
    element's index in the parameter): 64 bits of a hash of the model's seed and the parameter's name."""
    key = seed.to_bytes(8, "little", signed=True) + name.encode()
    return int.from_bytes(hashlib.blake2b(key, digest_size=8).digest(), "little")


@dataclass(frozen=True, eq=False)
class RngState:
    """The default generators' states: the host's, and the compute device's where it has its own."""

    host: torch.Tensor
    device: torch.Tensor | None

    @staticmethod
    def capture(device: torch.device) -> RngState:
        on_device = _generator(device).get_state() if device.type == "cuda" else None
        return RngState(torch.default_generator.get_state(), on_device)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, RngState) or (self.device is None) != (other.device is None):
            return NotImplemented
        same_device = self.device is None or other.device is None or torch.equal(self.device, other.device)
        return same_device and torch.equal(self.host, other.host)

    def restore(self, device: torch.device) -> None:
        torch.default_generator.set_state(self.host)
        if self.device is not None:
            _generator(device).set_state(self.device)


def _generator(device: torch.device) -> torch.Generator:
    """A CUDA device's default one. torch's functions by the device's name copy states and take several times as long,
    twice for each call of a block."""
    torch.cuda.init()  # type: ignore[no-untyped-call]
    return torch.cuda.default_generators[device.index]


def seed_generators(seed: int, device: torch.device) -> None:
    """Seed the default generators of the host and of the compute device."""
    torch.default_generator.manual_seed(seed)
    if device.type == "cuda":
        with torch.cuda.device(device):
            torch.cuda.manual_seed(seed)


def states_of_others() -> tuple[object, ...]:
    """Of Python's and numpy's generators, to be compared: what is drawn there is not drawn again by a recompute."""
    _, key, position, *_ = np.random.get_state(legacy=True)
    return random.getstate(), bytes(key), position  # type: ignore[arg-type]


@contextmanager
def preserved(device: torch.device) -> Iterator[None]:
    """Leaves the generators as they were found."""
    state = RngState.capture(device)
    try:
        yield
    finally:
        state.restore(device)
