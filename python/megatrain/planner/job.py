"""What is asked of a step: the batch, the precision, and whether updates wait for the norm."""

from __future__ import annotations

from dataclasses import dataclass, field

from megatrain._native import TileFormat


@dataclass(frozen=True, kw_only=True)
class Batch:
    """micro_batches of `rows` rows of `length` tokens."""

    micro_batches: int = 1
    rows: int = 8
    length: int = 1024

    def __post_init__(self) -> None:
        for name in ("micro_batches", "rows", "length"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be at least 1")

    @property
    def micro_tokens(self) -> int:
        return self.rows * self.length

    @property
    def tokens(self) -> int:
        return self.micro_batches * self.micro_tokens

    def splits(self) -> tuple[Batch, ...]:
        """The same rows in micro-batches of every size that divides them, the largest first."""
        rows = self.micro_batches * self.rows
        return tuple(
            Batch(micro_batches=rows // each, rows=each, length=self.length)
            for each in range(rows, 0, -1)
            if rows % each == 0
        )


def _split_fp32() -> TileFormat:
    return TileFormat("bf16_split", "fp32")


@dataclass(frozen=True, kw_only=True)
class Job:
    """updates_wait: for the norm of all gradients, as they do with clipping or with skip_nonfinite (the default)."""

    batch: Batch = field(default_factory=Batch)
    tile_format: TileFormat = field(default_factory=_split_fp32)
    updates_wait: bool = True
    slots: int = 2

    def __post_init__(self) -> None:
        if self.slots < 1:
            raise ValueError(f"slots is {self.slots}; the ring needs at least 1")

    @property
    def element(self) -> int:
        """Bytes of an activation."""
        return 4 if self.tile_format.weights == "fp32" else 2
