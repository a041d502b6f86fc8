"""A checkpoint that is written beside the next steps: tiles are held as they are until their bytes have been read, and
only updates of those that are still held wait."""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from megatrain._native import Engine


class HeldTiles:
    """Held from here on; what `release` has not released is at the end of the `with`."""

    def __init__(self, engine: Engine, tiles: Sequence[int]) -> None:
        self._engine = engine
        self._held = set(tiles)
        self._before_ns = engine.held_up_ns()
        engine.hold(tiles)

    def __enter__(self) -> HeldTiles:
        return self

    def __exit__(self, *_: object) -> None:
        for tile in list(self._held):
            self.release(tile)

    def release(self, tile: int) -> None:
        self._held.remove(tile)
        self._engine.release_hold(tile)

    def held_up_seconds(self) -> float:
        """In which at least one update had to wait for a release."""
        return (self._engine.held_up_ns() - self._before_ns) / 1e9


class PendingCheckpoint:
    """What `StreamedModel.begin_checkpoint` returns. The process waits for it before it ends."""

    def __init__(self, write: Callable[[], Path], held: HeldTiles, began: float) -> None:
        self._write = write
        self._held = held
        self._began = began
        self._path: Path | None = None
        self._failure: BaseException | None = None
        self.failure_seen = False
        self._stall = self._seconds = 0.0
        self._thread = threading.Thread(target=self._run, name="mt-checkpoint")
        self._blocked = time.perf_counter() - began
        self._thread.start()

    @property
    def done(self) -> bool:
        """`wait` returns, or raises, at once."""
        return not self._thread.is_alive()

    def wait(self) -> Path:
        """The checkpoint's directory. OSError if it could not be written: what was there still is."""
        self._thread.join()
        if self._failure is not None:
            self.failure_seen = True
            raise self._failure
        assert self._path is not None
        return self._path

    @property
    def seconds(self) -> float:
        """From the call of begin_checkpoint to the last flush; once `done`."""
        return self._seconds

    @property
    def stall_seconds(self) -> float:
        """Of them, those in which begin_checkpoint had not returned, or an update waited for tiles not yet written;
        once `done`."""
        return self._stall

    def _run(self) -> None:
        try:
            self._path = self._write()
        except BaseException as error:
            self._failure = error
        self._stall = self._blocked + self._held.held_up_seconds()
        self._seconds = time.perf_counter() - self._began
