"""Records encoded in chunks, by this process or by worker processes.

Workers are spawned, never forked: they share no memory with this process, so that no pinned tile is ever copied
to them, and they inherit no thread or lock of the engine in an unknown state. They end with the iteration."""

from __future__ import annotations

import multiprocessing
import os
import signal
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from itertools import islice

from .encode import Encoded, Encoder
from .records import BadRecord, Record


class WorkerError(RuntimeError):
    """A worker process ended before its work was done."""


CHUNK = 64
"""Records that go to a worker at once."""

_encoder: Encoder | None = None  # of a worker process


def encode_all(
    encoder: Encoder, records: Iterator[Record], *, workers: int = 0
) -> Iterator[tuple[Record, Encoded | BadRecord]]:
    """Each record with what became of it, in order. 0 workers encode in this process. Holds few chunks at a time,
    however many records there are. A worker that dies is a WorkerError."""
    chunks = iter(lambda: list(islice(records, CHUNK)), [])
    if workers == 0:
        for chunk in chunks:
            yield from zip(chunk, encoder.encode_records(chunk), strict=True)
        return
    context = multiprocessing.get_context("spawn")
    pool = ProcessPoolExecutor(workers, mp_context=context, initializer=_begin, initargs=(encoder,))
    waiting: deque[tuple[list[Record], Future[list[Encoded | BadRecord]]]] = deque()
    try:
        for chunk in chunks:
            waiting.append((chunk, pool.submit(_encode, chunk)))
            if len(waiting) >= 2 * workers:
                done, future = waiting.popleft()
                yield from zip(done, future.result(), strict=True)
        while waiting:
            done, future = waiting.popleft()
            yield from zip(done, future.result(), strict=True)
    except BrokenProcessPool:
        raise WorkerError(f"one of {workers} data workers ended unexpectedly, killed for its memory perhaps") from None
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


def _begin(encoder: Encoder) -> None:
    global _encoder
    _encoder = encoder
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's to handle
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # one process a core already


def _encode(chunk: list[Record]) -> list[Encoded | BadRecord]:
    assert _encoder is not None
    return _encoder.encode_records(chunk)
