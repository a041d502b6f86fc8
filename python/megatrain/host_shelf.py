"""Device tensors that wait on the host, in the native runtime's pinned memory, until they are needed."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

import torch

from megatrain.interop import stream_handle

if TYPE_CHECKING:
    from megatrain._native import Engine


class HostShelf:
    """Puts tensors away. Device memory of what is on its way down is held here until it has landed.

    What is let go of when depends on what was put, not on how fast copies are: so a step takes the same memory each
    time, and a deep model no more than a shallow one."""

    PENDING_BYTES = 2 << 30
    PENDING_TENSORS = 4
    """Device memory of copies down is held up to so many bytes, and times the largest of the tensors since the last
    `collect`: with more, the caller waits for the oldest. Waiting for what was put a few calls ago, it still queues
    work ahead of the device."""
    SETTLED_TENSORS = 3
    """The newest ones that `settle` does not wait for."""

    def __init__(self, engine: Engine, device: torch.device) -> None:
        self.engine = engine
        self.device = device
        self._pending: deque[tuple[int, torch.Tensor]] = deque()
        self._pending_bytes = 0
        self._largest = 0
        self.dropped: deque[tuple[int, torch.Tensor | None]] = deque()
        """(number, memory that a copy up may still write to) of tensors that died, in whatever thread."""

    def put(self, tensor: torch.Tensor, tile: int) -> ShelvedTensor:
        """A dense tensor, after the work that makes it on the current stream. `tile` names the block, for the trace."""
        dense = tensor.detach()
        assert is_dense(dense)
        nbytes = dense.numel() * dense.element_size()
        kept = self.engine.keep(tile, dense.data_ptr(), nbytes, stream_handle(self.device))
        self._pending.append((kept, dense))
        self._pending_bytes += nbytes
        self._largest = max(self._largest, nbytes)
        limit = pending_limit(self._largest)
        while self._pending_bytes > limit:
            self._let_go_of_oldest()
        self._drop()
        return ShelvedTensor(self, kept, dense)

    def settle(self) -> None:
        """Before work that takes much memory: let go of that of all but the newest tensors, once they have landed."""
        while len(self._pending) > self.SETTLED_TENSORS:
            self._let_go_of_oldest()
        self._drop()

    def collect(self) -> None:
        """Let go of all device memory, once it has landed, and of host memory that nobody will ask for."""
        while self._pending:
            self._let_go_of_oldest()
        self._largest = 0
        self._drop()

    def _let_go_of_oldest(self) -> None:
        kept, tensor = self._pending[0]
        self.engine.wait_kept(kept, stream_handle(self.device))
        self._pending.popleft()
        self._pending_bytes -= tensor.numel() * tensor.element_size()

    def _drop(self) -> None:
        going_down = {kept for kept, _ in self._pending}
        for _ in range(len(self.dropped)):
            kept, back = self.dropped.popleft()
            if kept in going_down:
                self.dropped.append((kept, back))
                continue
            if back is not None:
                # Nobody may use the memory that the copy up still writes to.
                self.engine.wait_back(kept, stream_handle(self.device))
            self.engine.drop_kept(kept)


def pending_limit(largest: int) -> int:
    """Bytes on their way down that hold device memory at most, where the largest tensor has so many."""
    return min(HostShelf.PENDING_BYTES, HostShelf.PENDING_TENSORS * largest)


class ShelvedTensor:
    """One tensor on the shelf. `fetch` starts its way back, `take` returns it."""

    def __init__(self, shelf: HostShelf, kept: int, tensor: torch.Tensor) -> None:
        self._shelf = shelf
        self._kept = kept
        self._size, self._stride, self._dtype = tensor.shape, tensor.stride(), tensor.dtype
        self._back: torch.Tensor | None = None
        self._waited = False

    def fetch(self) -> None:
        """The copy up starts when the work queued so far on the current stream has ended."""
        if self._back is None:
            shelf = self._shelf
            if shelf._pending:  # the way back of a forward outside of steps, whose end nobody announces
                shelf.collect()
            self._back = torch.empty_strided(self._size, self._stride, dtype=self._dtype, device=shelf.device)
            shelf.engine.bring_back(self._kept, self._back.data_ptr(), stream_handle(shelf.device))

    def take(self) -> torch.Tensor:
        """The tensor, for work queued from now on."""
        self.fetch()
        assert self._back is not None
        if not self._waited:
            self._shelf.engine.wait_back(self._kept, stream_handle(self._shelf.device))
            self._waited = True
        return self._back

    def put_back(self) -> None:
        """It is not needed on the device for now."""
        if self._waited:
            self._back, self._waited = None, False

    def __del__(self) -> None:
        # In any thread, at any time: only noted here.
        self._shelf.dropped.append((self._kept, None if self._waited else self._back))


def is_dense(tensor: torch.Tensor) -> bool:
    """Its elements fill one range of memory, in whatever order."""
    return tensor.layout == torch.strided and bool(torch.ops.aten.is_non_overlapping_and_dense(tensor))
