"""A module's own forward, run in a thread of its own, that stops ("parks") at every block.

Strictly one of the two threads runs at a time: the scheduler's, or that of the forward. What torch and
Python keep per thread or globally (grad mode, autocast, stream, random state, context variables) is
saved when the forward parks and is in place again when it goes on."""

from __future__ import annotations

import contextvars
import threading
from dataclasses import dataclass
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any

import torch

from megatrain.rng import RngState

if TYPE_CHECKING:
    from collections.abc import Callable

    from megatrain.blocks import Block


@dataclass(frozen=True)
class ParkedCall:
    """A block's call that waits for the scheduler."""

    block: Block
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    rng: RngState
    context: contextvars.Context
    grad_enabled: bool


class ForwardAbandoned(BaseException):
    """Unwinds a parked forward whose step was given up. Not an Exception: modules must not catch it."""


class ParkedForward:
    """One micro-batch's forward. `resume` runs it to its next block or to its end.

    `park` is what the block proxies call, in the forward's thread."""

    def __init__(
        self,
        function: Callable[[], Any],
        device: torch.device,
        rng: RngState,
        enter_thread: Callable[[ParkedForward], None],
    ) -> None:
        self.parked: ParkedCall | None = None
        self.result: Any = None
        self.done = False
        self._function = function
        self._device = device
        self._rng = rng
        self._enter_thread = enter_thread
        # Semaphores, in C: threading's own take longer than the rest of a hand-over.
        self._go: SimpleQueue[None] = SimpleQueue()
        self._stopped: SimpleQueue[None] = SimpleQueue()
        self._error: BaseException | None = None
        self._answer: Any = None
        self._abandoned = False
        self._grad_enabled = torch.is_grad_enabled()
        self._stream = torch.cuda.current_stream(device) if device.type == "cuda" else None
        context = contextvars.copy_context()
        self._thread = threading.Thread(target=context.run, args=(self._main,), name="megatrain-forward", daemon=True)
        self._started = False

    def resume(self, answer: Any = None, rng: RngState | None = None) -> None:
        """Hand `answer` to the parked block call (None at the start) and run on, drawing from `rng`
        (the state after the block). Returns when the forward is parked again or done; raises what it
        raised."""
        self._answer = answer
        self.parked = None
        (rng or self._rng).restore(self._device)
        if not self._started:
            self._started = True
            self._thread.start()
        self._go.put(None)
        self._stopped.get()
        if self._error is not None:
            error, self._error = self._error, None
            try:
                raise error
            finally:
                del error  # its traceback holds this frame, and with it the arguments of blocks

    def abandon(self) -> None:
        """Unwind the forward if it has not ended; also after an interrupt while it was running."""
        if not self._started or not self._thread.is_alive():
            return
        self._abandoned = True
        self._go.put(None)
        self._thread.join()

    def park(self, block: Block, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        self.parked = ParkedCall(
            block, args, kwargs, RngState.capture(self._device), contextvars.copy_context(), torch.is_grad_enabled()
        )
        self._wait_for_scheduler()
        answer, self._answer = self._answer, None
        return answer

    def _wait_for_scheduler(self) -> None:
        self._stopped.put(None)
        self._go.get()
        if self._abandoned:
            raise ForwardAbandoned

    def _main(self) -> None:
        self._go.get()
        try:
            if self._abandoned:
                return
            self._enter_thread(self)
            if self._stream is not None:
                torch.cuda.set_device(self._device)
                torch.cuda.set_stream(self._stream)
            with torch.set_grad_enabled(self._grad_enabled):
                self.result = self._function()
            self.done = True
        except ForwardAbandoned:
            pass
        except BaseException as error:  # carried to the scheduler's thread
            self._error = error
        finally:
            self._rng = RngState.capture(self._device)
            self._stopped.put(None)
