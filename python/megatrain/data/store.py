"""Token ids and target marks of a whole data set, in a file that the operating system pages in and out."""

from __future__ import annotations

import os
import tempfile
import zlib
from pathlib import Path
from typing import IO

import numpy as np

from .encode import Encoded

_TARGET = np.uint32(1 << 31)
IGNORED = -100


class TokenStore:
    """tokens: uint32, bit 31 says that the token is a target. `digest` depends on all of them."""

    def __init__(self, tokens: np.ndarray, digest: int) -> None:
        self._tokens = tokens
        self.digest = digest

    def __len__(self) -> int:
        return len(self._tokens)

    def read(self, begin: int, length: int) -> tuple[np.ndarray, np.ndarray]:
        """(ids, labels) int64; labels are the ids of targets and -100 elsewhere."""
        packed = self._tokens[begin : begin + length]
        ids = (packed & ~_TARGET).astype(np.int64)
        return ids, np.where(packed & _TARGET, ids, IGNORED)


class TokenWriter:
    """Writes a store's file, which has no name and is gone with the process. 4 bytes a token."""

    def __init__(self, directory: Path) -> None:
        self._file: IO[bytes] = tempfile.TemporaryFile(dir=directory, buffering=1 << 20)
        self._count = 0
        self._digest = 0

    def __len__(self) -> int:
        return self._count

    def add(self, encoded: Encoded) -> int:
        """Where its first token stands."""
        packed = encoded.ids.astype(np.uint32)
        packed[encoded.targets] |= _TARGET
        data = packed.tobytes()
        self._digest = zlib.crc32(data, self._digest)
        self._file.write(data)
        begin = self._count
        self._count += len(packed)
        return begin

    def finish(self) -> TokenStore:
        self._file.flush()
        if not self._count:
            return TokenStore(np.empty(0, np.uint32), 0)
        # The mapping keeps the file alive.
        os.posix_fadvise(self._file.fileno(), 0, 0, os.POSIX_FADV_RANDOM)
        tokens = np.memmap(self._file, dtype=np.uint32, mode="r", shape=(self._count,))
        return TokenStore(tokens, self._digest)
